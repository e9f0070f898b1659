//! Addresses that peers on other hosts could reach, and what the host's name leads to.

use std::net::{IpAddr, ToSocketAddrs as _};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::json;

use super::Check;

const GROUP: &str = "Network";
const RESOLVE_LIMIT: Duration = Duration::from_secs(5);

pub(super) fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    let mut addresses = Vec::new();
    match if_addrs::get_if_addrs() {
        Err(error) => checks.push(
            Check::ok(GROUP, "addresses", format!("cannot be listed: {error}"), json!([]))
                .warning("podring then serves on loopback only: all ranks must be on this host"),
        ),
        Ok(interfaces) => {
            for interface in &interfaces {
                let ip = interface.ip();
                addresses.push(ip);
                let mut notes = vec![if ip.is_ipv4() { "IPv4" } else { "IPv6" }];
                notes.extend(interface.is_loopback().then_some("loopback"));
                notes.extend((!interface.is_oper_up() && !interface.is_loopback()).then_some("not up"));
                let data = json!({
                    "interface": interface.name, "address": ip.to_string(), "ipv6": ip.is_ipv6(),
                    "loopback": interface.is_loopback(), "up": interface.is_oper_up() || interface.is_loopback(),
                });
                checks.push(Check::ok(GROUP, interface.name.clone(), format!("{ip} ({})", notes.join(", ")), data));
            }
            if !interfaces.iter().any(|interface| !interface.is_loopback()) {
                checks.push(
                    Check::ok(GROUP, "addresses", "loopback only", json!([]))
                        .warning("fine for one host; ranks on other hosts cannot reach this one"),
                );
            }
        }
    }
    checks.push(hostname(&addresses));
    checks
}

fn hostname(local: &[IpAddr]) -> Check {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let (sender, receiver) = mpsc::channel();
    let wanted = name.clone();
    // The resolver has no time limit of its own; a thread that it keeps ends with the process.
    std::thread::spawn(move || {
        sender.send((wanted.as_str(), 0).to_socket_addrs().map(|found| found.collect::<Vec<_>>()))
    });
    let resolved = match receiver.recv_timeout(RESOLVE_LIMIT) {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => return unresolved(&name, &error.to_string()),
        Err(_) => return unresolved(&name, &format!("no answer within {} s", RESOLVE_LIMIT.as_secs())),
    };
    let mut ips: Vec<IpAddr> = resolved.iter().map(|address| address.ip()).collect();
    ips.dedup();
    judge(&name, &ips, local)
}

fn unresolved(name: &str, why: &str) -> Check {
    Check::ok(GROUP, "hostname", format!("{name} does not resolve: {why}"), json!({"name": name, "resolved": null}))
        .warning(
            "podring does not need it, but torchrun's rendezvous and gloo may: add it to /etc/hosts, or set \
             MASTER_ADDR and GLOO_SOCKET_IFNAME",
        )
}

fn judge(name: &str, ips: &[IpAddr], local: &[IpAddr]) -> Check {
    let list = ips.iter().map(ToString::to_string).collect::<Vec<_>>();
    let data = json!({"name": name, "resolved": list});
    let check = Check::ok(GROUP, "hostname", format!("{name} is {}", list.join(", ")), data);
    let reachable = |ip: &&IpAddr| !ip.is_loopback();
    if !ips.iter().any(|ip| local.contains(ip) || ip.is_loopback()) {
        return check.warning("none of these is an address of this host: set MASTER_ADDR to one that is");
    }
    if ips.iter().any(|ip| reachable(&ip)) || !local.iter().any(|ip| reachable(&ip)) {
        return check;
    }
    check.warning("loopback: for ranks on other hosts set MASTER_ADDR to one of the addresses above")
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn a_name_must_lead_home() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let local = [ip("127.0.0.1"), ip("10.0.0.5"), ip("fd00::5")];
        let status = |ips: &[IpAddr]| judge("me", ips, &local).status;
        assert_eq!(status(&[ip("10.0.0.5")]), Status::Ok);
        assert_eq!(status(&[ip("fd00::5"), ip("127.0.1.1")]), Status::Ok);
        assert_eq!(status(&[ip("127.0.1.1")]), Status::Warning);
        assert_eq!(status(&[ip("10.0.0.6")]), Status::Warning);
        assert_eq!(judge("me", &[ip("127.0.1.1")], &[ip("127.0.0.1")]).status, Status::Ok);
    }
}
