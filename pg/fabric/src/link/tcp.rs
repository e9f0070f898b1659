//! Links between hosts: one TCP connection each way.

use std::io::IoSlice;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::LazyLock;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, acceptfrom_with, connect, recv,
    send, sendmsg, socket_with, sockopt,
};

/// A listening socket on every address of this host, and its port: the first of those given that is free, 0 for any.
/// Both IP versions where the host has them.
pub fn listener(ports: &RangeInclusive<u16>) -> Result<(OwnedFd, u16), Errno> {
    let mut last = Errno::ADDRINUSE;
    for port in ports.clone() {
        match listener_on(port) {
            Err(errno @ (Errno::ADDRINUSE | Errno::ACCESS)) => last = errno,
            other => return other,
        }
    }
    Err(last)
}

/// Connections that may wait to be accepted: all ranks of a large job at once.
const BACKLOG: i32 = 4096;

fn listener_on(port: u16) -> Result<(OwnedFd, u16), Errno> {
    let at = |ip: IpAddr| podring_listen::listener((ip, port).into(), BACKLOG);
    let (fd, bound) = match at(Ipv6Addr::UNSPECIFIED.into()) {
        // IPv4 alone might still be had, but then somebody else would answer at this host's IPv6 addresses.
        Err(errno @ (Errno::ADDRINUSE | Errno::ACCESS)) => return Err(errno),
        // There is no IPv6 here.
        Err(_) => at(Ipv4Addr::UNSPECIFIED.into())?,
        Ok(both) => both,
    };
    Ok((fd, bound.port()))
}

fn socket(address: &SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

fn tune(fd: &OwnedFd) {
    // Each is a wish: a kernel that refuses one still gives a working link.
    let _ = sockopt::set_tcp_nodelay(fd, true);
    let _ = sockopt::set_socket_keepalive(fd, true);
    // A size asked for stays as it is, cut to the system's limit; that is often less than what the kernel itself would
    // grow the buffer to. So only where it is to be had in full.
    let [send, receive] = *LIMITS;
    if send >= BUFFER {
        let _ = sockopt::set_socket_send_buffer_size(fd, BUFFER);
    }
    if receive >= BUFFER {
        let _ = sockopt::set_socket_recv_buffer_size(fd, BUFFER);
    }
}

/// Socket buffer size asked for, in bytes.
const BUFFER: usize = 4 << 20;

/// The system's limits of socket buffers for sending and receiving, in bytes; 0 where they can't be read.
static LIMITS: LazyLock<[usize; 2]> = LazyLock::new(|| {
    ["wmem_max", "rmem_max"].map(|name| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    })
});

/// Accepts one connection; also says from where.
pub fn accept(listener: impl AsFd) -> Result<(OwnedFd, IpAddr), Errno> {
    let (fd, from) = acceptfrom_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    tune(&fd);
    let from = from.and_then(|from| SocketAddr::try_from(from).ok());
    Ok((fd, from.map_or(Ipv6Addr::UNSPECIFIED.into(), |from| from.ip().to_canonical())))
}

/// What is sent and not acknowledged for so long ends the connection.
pub fn limit_silence(fd: impl AsFd, limit: Duration) {
    // A wish, as in `tune`: without it only the peer's own silence tells.
    let _ = sockopt::set_tcp_user_timeout(fd, u32::try_from(limit.as_millis()).unwrap_or(u32::MAX));
}

/// Begins to connect; writable when connected, see [`connected`].
pub fn dial(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let fd = socket(&address)?;
    tune(&fd);
    match connect(&fd, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(fd),
        Err(errno) => Err(errno),
    }
}

/// How a connection attempt went.
pub fn connected(fd: impl AsFd) -> Result<(), Errno> {
    sockopt::socket_error(fd)?
}

/// Sends what the socket takes now; 0 if nothing.
pub fn write(fd: impl AsFd, bytes: &[u8]) -> Result<usize, Errno> {
    match send(fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        other => other,
    }
}

/// Sends what the socket takes now of two pieces, one after the other; 0 if nothing.
pub fn write_both(fd: impl AsFd, first: &[u8], second: &[u8]) -> Result<usize, Errno> {
    let pieces = [IoSlice::new(first), IoSlice::new(second)];
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match sendmsg(fd, &pieces, &mut SendAncillaryBuffer::default(), flags) {
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        other => other,
    }
}

/// Reads what has come; `Ok(None)` if nothing has, `Ok(Some(0))` at the end.
pub fn read(fd: impl AsFd, into: &mut [u8]) -> Result<Option<usize>, Errno> {
    match recv(fd, into, RecvFlags::DONTWAIT) {
        Ok((_, got)) => Ok(Some(got)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Something has come.
pub fn has_bytes(fd: impl AsFd) -> bool {
    matches!(recv(fd, &mut [0u8; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK), Ok((_, 1..)))
}

/// Nothing has come, and the connection stands.
pub fn is_quiet(fd: impl AsFd) -> bool {
    matches!(recv(fd, &mut [0u8; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK), Err(Errno::AGAIN | Errno::INTR))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn the_first_free_port_of_a_range_is_taken() {
        // Some ports in a row that are free; others may take one meanwhile, so try again.
        let taken = (0..100).find_map(|_| {
            let (taken, port) = listener(&(0..=0)).unwrap();
            let range = port..=port.checked_add(3)?;
            let (_second, second) = listener(&range).ok()?;
            assert!(second > port && range.contains(&second));
            Some((taken, port))
        });
        let (_taken, port) = taken.unwrap();
        assert_eq!(listener(&(port..=port)).unwrap_err(), Errno::ADDRINUSE);
    }

    #[test]
    fn bytes_arrive_over_loopback() {
        let (listening, port) = listener(&(0..=0)).unwrap();
        let out = dial((Ipv4Addr::LOCALHOST, port).into()).unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        let accepted = loop {
            match accept(&listening) {
                Ok((fd, from)) => {
                    assert_eq!(from, Ipv4Addr::LOCALHOST);
                    break fd;
                }
                Err(_) => assert!(Instant::now() < end),
            }
        };
        connected(&out).unwrap();
        assert_eq!(write_both(&out, b"hel", b"lo").unwrap(), 5);
        let mut buffer = [0u8; 8];
        loop {
            if let Some(got) = read(&accepted, &mut buffer).unwrap() {
                assert_eq!(&buffer[..got], b"hello");
                break;
            }
            assert!(Instant::now() < end);
        }
        drop(out);
        while read(&accepted, &mut buffer).unwrap() != Some(0) {
            assert!(Instant::now() < end);
        }
    }
}
