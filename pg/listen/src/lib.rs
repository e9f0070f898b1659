//! Listening on a TCP port of this host, when others may want the same one at the same moment.
//!
//! `SO_REUSEADDR` is needed for a port whose last connections still wait to be forgotten. It also lets several sockets
//! have one port until the first of them listens, and Linux tells none of several that begin to listen at the same
//! moment that it was the first: each is said to be in use, and nobody has the port (`inet_csk_listen_start` calls
//! itself listening before it looks for others who do). So who is refused that late asks again.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, listen, socket_with, sockopt};

/// Attempts at a port that nobody is seen to listen on.
const ATTEMPTS: u32 = 12;

/// A socket that listens on `address`, nonblocking and closed by `exec`, and where it listens; port 0 takes a
/// free one. `[::]` takes IPv4 too. At most `backlog` connections wait to be accepted.
///
/// # Errors
///
/// What the system says; `ADDRINUSE` if somebody listens there.
pub fn listener(address: SocketAddr, backlog: i32) -> Result<(OwnedFd, SocketAddr), Errno> {
    for attempt in 0..ATTEMPTS {
        let fd = bound(address)?;
        match listen(&fd, backlog) {
            Err(Errno::ADDRINUSE) => {}
            Err(errno) => return Err(errno),
            Ok(()) => {
                let address = getsockname(&fd)?.try_into()?;
                return Ok((fd, address));
            }
        }
        // Not as long as the others wait.
        drop(fd);
        thread::sleep(Duration::from_micros(u64::from(random()) << attempt.min(6)));
    }
    Err(Errno::ADDRINUSE)
}

fn bound(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let fd = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, false)?;
    }
    sockopt::set_socket_reuseaddr(&fd, true)?;
    bind(&fd, &address)?;
    Ok(fd)
}

fn random() -> u8 {
    let mut byte = [0];
    // Without it all wait the same and come at different times nevertheless.
    let _ = getrandom::fill(&mut byte);
    byte[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    #[test]
    fn of_several_at_once_exactly_one_has_the_port() {
        const ROUNDS: usize = 5_000;
        let (free, address) = listener((Ipv4Addr::LOCALHOST, 0).into(), 1).unwrap();
        drop(free);
        let (together, had) = (Barrier::new(2), AtomicUsize::new(0));
        let contend = || {
            for round in 1..=ROUNDS {
                together.wait();
                let mine = listener(address, 1);
                had.fetch_add(usize::from(mine.is_ok()), SeqCst);
                together.wait();
                assert_eq!(had.load(SeqCst), round, "{mine:?}");
                together.wait();
            }
        };
        thread::scope(|scope| {
            scope.spawn(contend);
            scope.spawn(contend);
        });
    }

    #[test]
    fn a_port_in_use_is_refused_for_both_families() {
        let (_taken, address) = listener((Ipv4Addr::UNSPECIFIED, 0).into(), 1).unwrap();
        for any in [IpAddr::from(Ipv4Addr::UNSPECIFIED), Ipv6Addr::UNSPECIFIED.into()] {
            let again = listener((any, address.port()).into(), 1);
            assert!(matches!(again, Err(Errno::ADDRINUSE | Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL)), "{again:?}");
        }
    }

    #[test]
    fn an_address_that_is_not_this_hosts_is_refused() {
        // TEST-NET-1, RFC 5737.
        let foreign = listener((Ipv4Addr::new(192, 0, 2, 1), 0).into(), 1);
        assert_eq!(foreign.unwrap_err(), Errno::ADDRNOTAVAIL);
    }

    #[test]
    fn connections_are_queued() {
        let (_listener, address) = listener((Ipv4Addr::LOCALHOST, 0).into(), 4).unwrap();
        assert_ne!(address.port(), 0);
        TcpStream::connect(address).unwrap();
    }
}
