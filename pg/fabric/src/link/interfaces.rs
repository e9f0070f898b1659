//! At which addresses other hosts may find this one, and through which of its own a peer's are tried.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

/// Addresses that one process publishes or tries, at most.
pub const MOST: usize = 16;

/// Which interfaces are used, as PODRING_INTERFACES says: `eth0,ib` those whose names are or begin so, `^docker,veth` all
/// but those. A name that is an interface's whole name means that one alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    names: Vec<String>,
    exclude: bool,
}

impl Selection {
    /// Reads the setting; `None` if it can't be read.
    pub fn parse(text: &str) -> Option<Self> {
        let mut names = Vec::new();
        let mut marked = 0usize;
        for (index, item) in text.split(',').map(str::trim).filter(|item| !item.is_empty()).enumerate() {
            let bare = item.strip_prefix('^');
            // `^a,b` leaves out both; `a,^b` says two things at once.
            if bare.is_some() && index > 0 && marked == 0 {
                return None;
            }
            marked += usize::from(bare.is_some());
            let name = bare.unwrap_or(item);
            if name.is_empty() || name.contains('^') {
                return None;
            }
            names.push(name.to_owned());
        }
        Some(Selection { names, exclude: marked > 0 })
    }

    fn selects(&self, interface: &str, present: &BTreeSet<&str>) -> bool {
        let named = self.names.iter().any(|name| {
            if present.contains(name.as_str()) { name == interface } else { interface.starts_with(name.as_str()) }
        });
        self.names.is_empty() || named != self.exclude
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.exclude { "^" } else { "" }, self.names.join(","))
    }
}

/// PODRING_INTERFACES names what this host doesn't have, or leaves nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PODRING_INTERFACES={selection}: {}; this host has {}", match missing {
    Some(name) => format!("no interface with an address is, or begins with, {name:?}"),
    None => "no interface is left".to_owned(),
}, if present.is_empty() { "none with an address".to_owned() } else { present.join(", ") })]
pub struct NoInterface {
    /// The setting.
    pub selection: String,
    /// The name that stands for none; `None` if all were excluded.
    pub missing: Option<String>,
    /// Those with an address.
    pub present: Vec<String>,
}

/// An address of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// Its interface.
    pub interface: String,
    /// The interface's number, which link-local addresses need.
    pub index: u32,
    /// It is up and has a carrier.
    pub running: bool,
    /// The address.
    pub ip: IpAddr,
}

/// All of this host's.
pub fn local() -> io::Result<Vec<Local>> {
    let found = if_addrs::get_if_addrs()?;
    let of = |interface: if_addrs::Interface| Local {
        index: interface.index.unwrap_or(0),
        running: interface.is_oper_up(),
        ip: interface.ip(),
        interface: interface.name,
    };
    Ok(found.into_iter().map(of).collect())
}

/// Whether an address means something only on its own link.
pub fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// How far an address carries: everywhere, its link, this machine.
fn reach(ip: &IpAddr) -> u8 {
    if ip.is_loopback() { 2 } else { u8::from(is_link_local(ip)) }
}

/// The addresses to publish, most useful first: those that carry farthest, of interfaces with a carrier, IPv4 before
/// IPv6. Without a selection loopback comes last, for peers on this machine.
pub fn publish(found: &[Local], selection: &Selection) -> Result<Vec<IpAddr>, NoInterface> {
    let present: BTreeSet<&str> = found.iter().map(|local| local.interface.as_str()).collect();
    let none = |missing: Option<&String>| NoInterface {
        selection: selection.to_string(),
        missing: missing.cloned(),
        present: present.iter().map(|&name| name.to_owned()).collect(),
    };
    if !selection.exclude {
        let absent = |name: &&String| !present.iter().any(|interface| interface.starts_with(name.as_str()));
        if let Some(name) = selection.names.iter().find(absent) {
            return Err(none(Some(name)));
        }
    }
    let mut chosen: Vec<&Local> = found
        .iter()
        .filter(|local| !local.ip.is_unspecified() && !local.ip.is_multicast())
        .filter(|local| selection.selects(&local.interface, &present))
        .collect();
    if chosen.is_empty() && !selection.names.is_empty() {
        return Err(none(None));
    }
    chosen.sort_by_key(|local| (reach(&local.ip), !local.running, local.ip.is_ipv6(), local.ip));
    let mut addresses: Vec<IpAddr> = chosen.into_iter().map(|local| local.ip).collect();
    addresses.dedup();
    addresses.truncate(MOST);
    Ok(addresses)
}

/// The addresses to try for a peer's, in order. Loopback is the surest on one machine and means another elsewhere, where
/// it is tried only if there is nothing else. A link-local address is tried on each link of this host, as it doesn't say
/// on which it holds.
pub fn candidates(theirs: &[SocketAddr], same_machine: bool, found: &[Local]) -> Vec<SocketAddr> {
    let mut links: Vec<u32> = found
        .iter()
        .filter(|local| local.ip.is_ipv6() && is_link_local(&local.ip) && local.index != 0)
        .map(|local| local.index)
        .collect();
    links.sort_unstable();
    links.dedup();
    let is_loopback = |address: &&SocketAddr| address.ip().is_loopback();
    let near: Vec<SocketAddr> = theirs.iter().filter(is_loopback).copied().collect();
    let far: Vec<SocketAddr> = theirs
        .iter()
        .filter(|address| !is_loopback(address))
        .flat_map(|address| match address {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => {
                links.iter().map(|&link| SocketAddrV6::new(*v6.ip(), v6.port(), 0, link).into()).collect()
            }
            other => vec![*other],
        })
        .collect();
    let mut tried = match (same_machine, far.is_empty()) {
        (true, _) => [near, far].concat(),
        (false, true) => near,
        (false, false) => far,
    };
    tried.truncate(MOST);
    tried
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(interface: &str, index: u32, ip: &str) -> Local {
        Local { interface: interface.into(), index, running: !interface.starts_with("dead"), ip: ip.parse().unwrap() }
    }

    fn host() -> Vec<Local> {
        vec![
            local("lo", 1, "127.0.0.1"),
            local("lo", 1, "::1"),
            local("eth0", 2, "fe80::2"),
            local("eth0", 2, "fd00::2"),
            local("eth0", 2, "10.0.0.2"),
            local("eth0.5", 3, "10.5.0.2"),
            local("dead0", 4, "9.0.0.2"),
            local("docker0", 5, "172.17.0.1"),
            local("usb0", 6, "169.254.1.2"),
        ]
    }

    fn published(selection: &str) -> Vec<String> {
        let selection = Selection::parse(selection).unwrap();
        publish(&host(), &selection).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_carries_farthest_comes_first() {
        let all = ["10.0.0.2", "10.5.0.2", "172.17.0.1", "fd00::2", "9.0.0.2", "169.254.1.2", "fe80::2", "127.0.0.1"];
        assert_eq!(published(""), [&all[..], &["::1"]].concat());
    }

    #[test]
    fn selections() {
        assert_eq!(published("eth0"), ["10.0.0.2", "fd00::2", "fe80::2"]);
        assert_eq!(published("eth"), ["10.0.0.2", "10.5.0.2", "fd00::2", "fe80::2"]);
        assert_eq!(published("usb0, eth0.5"), ["10.5.0.2", "169.254.1.2"]);
        assert_eq!(published("^eth,dead,docker,lo"), ["169.254.1.2"]);
        assert_eq!(published("^eth, ^dead, ^docker, ^lo, ^none"), ["169.254.1.2"]);
        assert_eq!(Selection::parse("eth0,^eth1"), None);
        assert_eq!(Selection::parse("^"), None);
    }

    #[test]
    fn an_unknown_name_is_told_with_those_present() {
        let error = |text: &str| publish(&host(), &Selection::parse(text).unwrap()).unwrap_err().to_string();
        let all = "dead0, docker0, eth0, eth0.5, lo, usb0";
        let text = error("eth0,ib0");
        assert!(
            text.contains("PODRING_INTERFACES=eth0,ib0") && text.contains("\"ib0\"") && text.contains(all),
            "{text}"
        );
        let text = error("^l,e,d,u");
        assert!(text.contains("no interface is left") && text.contains(all), "{text}");
    }

    #[test]
    fn a_peers_addresses_as_tried_from_here() {
        let parse = |list: &[&str]| list.iter().map(|text| text.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let theirs = parse(&["10.0.0.3:5", "[fd00::3]:5", "[fe80::3]:5", "127.0.0.1:5"]);
        let mut here = host();
        here.push(local("eth1", 7, "fe80::7"));
        let far = ["10.0.0.3:5", "[fd00::3]:5", "[fe80::3%2]:5", "[fe80::3%7]:5"];
        assert_eq!(candidates(&theirs, false, &here), parse(&far));
        assert_eq!(candidates(&theirs, true, &here), parse(&[&["127.0.0.1:5"], &far[..]].concat()));
        let lonely = parse(&["[::1]:5"]);
        assert_eq!(candidates(&lonely, false, &here), lonely);
        let many: Vec<SocketAddr> = (0..100).map(|port| ([10, 0, 0, 1], port).into()).collect();
        assert_eq!(candidates(&many, false, &here).len(), MOST);
    }
}
