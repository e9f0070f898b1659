//! Links between hosts: one TCP connection each way.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, accept_with, bind, connect, getsockname, listen,
    recv, send, socket_with, sockopt,
};

/// Socket buffer size asked for, in bytes; the kernel may give less.
const BUFFER: usize = 4 << 20;

/// A listening socket on every address of this host, and its port. Both IP versions where the host has them.
pub fn listener(port: u16) -> Result<(OwnedFd, u16), Errno> {
    let any: [SocketAddr; 2] = [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
    let mut last = Errno::AFNOSUPPORT;
    for address in any {
        match listen_on(address) {
            Ok(bound) => return Ok(bound),
            Err(errno) => last = errno,
        }
    }
    Err(last)
}

fn listen_on(address: SocketAddr) -> Result<(OwnedFd, u16), Errno> {
    let fd = socket(&address)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, false)?;
    }
    sockopt::set_socket_reuseaddr(&fd, true)?;
    bind(&fd, &address)?;
    listen(&fd, 4096)?;
    let bound: SocketAddr = getsockname(&fd)?.try_into()?;
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
    let _ = sockopt::set_socket_send_buffer_size(fd, BUFFER);
    let _ = sockopt::set_socket_recv_buffer_size(fd, BUFFER);
}

/// Accepts one connection.
pub fn accept(listener: impl AsFd) -> Result<OwnedFd, Errno> {
    let fd = accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    tune(&fd);
    Ok(fd)
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

/// Reads what has come; `Ok(None)` if nothing has, `Ok(Some(0))` at the end.
pub fn read(fd: impl AsFd, into: &mut [u8]) -> Result<Option<usize>, Errno> {
    match recv(fd, into, RecvFlags::DONTWAIT) {
        Ok((_, got)) => Ok(Some(got)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Addresses at which other processes may find this host: those of its interfaces, loopback last. Link-local ones are
/// left out: they mean nothing without an interface.
pub fn addresses() -> io::Result<Vec<IpAddr>> {
    let mut found: Vec<IpAddr> = if_addrs::get_if_addrs()?
        .into_iter()
        .filter(|interface| !interface.is_link_local())
        .map(|interface| interface.ip())
        .collect();
    found.sort_by_key(|address| (address.is_loopback(), address.is_ipv6(), *address));
    found.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn bytes_arrive_over_loopback() {
        let (listening, port) = listener(0).unwrap();
        let out = dial((Ipv4Addr::LOCALHOST, port).into()).unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        let accepted = loop {
            match accept(&listening) {
                Ok(fd) => break fd,
                Err(_) => assert!(Instant::now() < end),
            }
        };
        connected(&out).unwrap();
        assert_eq!(write(&out, b"hello").unwrap(), 5);
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

    #[test]
    fn loopback_comes_last() {
        let found = addresses().unwrap();
        let first_loopback = found.iter().position(IpAddr::is_loopback).unwrap_or(found.len());
        assert!(found[first_loopback..].iter().all(IpAddr::is_loopback));
    }
}
