//! Half-open connections, port scanners, other protocols, wrong proofs: turned away in bounded time, while peers come in.

use std::io::Write as _;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::Duration;

use podring_fabric::handshake::{LocalOpening, Opening, Secret, nonce};
use podring_fabric::hub::Hub;
use podring_fabric::wire::HubId;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, recv, send,
    socket_with, sockopt,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::rig::{HANDSHAKE, SOON, ask, connect, enter, hangs_up, hub, hub_with, job_with, peer_gets_through};

const HTTP: &[u8] = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n";
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const SSH: &[u8] = b"SSH-2.0-OpenSSH_9.6\r\n";
/// So long to prove oneself that what ends at once can't be mistaken for what ends then.
const PATIENT: Duration = Duration::from_secs(8);
/// The record header and the start of a client hello; what follows is as good as random.
const TLS: &[u8] =
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x81\x5b\x2a\x9c\x77\x10\x20\x30\x40\x50\x60\x70\x80\x90\xa0";

fn opening(hub: &Hub) -> Opening {
    let (job, from, to) = (77, HubId(78), hub.address().hub);
    Opening { job, from, to, ranks: [0, 1], nonce: nonce().unwrap() }
}

#[test]
fn other_protocols_are_hung_up_on_at_once() {
    let hub = hub_with(PATIENT);
    for first in [HTTP, HTTP2, SSH, TLS, b"\0", &[0xff; 300]] {
        let mut stream = connect(&hub);
        stream.write_all(first).unwrap();
        assert!(hangs_up(&mut stream, SOON) < PATIENT / 2);
    }
    // Somebody else's opening.
    let mut stream = connect(&hub);
    stream.write_all(&Opening { to: HubId(1), ..opening(&hub) }.encode()).unwrap();
    assert!(hangs_up(&mut stream, SOON) < PATIENT / 2);
    peer_gets_through(&hub);
    hub.shut();
}

#[test]
fn a_member_must_prove_itself() {
    let hub = hub_with(PATIENT);
    let member = HubId(5);
    let job = job_with(&hub, member);
    // The wrong secret.
    let mut stream = connect(&hub);
    let (opening, reply) = ask(&mut stream, &hub, &job, member);
    stream.write_all(&opening.proof(&Secret::new([0; 32]), &reply.nonce)).unwrap();
    assert!(hangs_up(&mut stream, SOON) < PATIENT / 2);
    // A proof from another connection.
    let mut first = connect(&hub);
    let (opening, reply) = ask(&mut first, &hub, &job, member);
    let proof = opening.proof(&job.secret, &reply.nonce);
    let mut second = connect(&hub);
    second.write_all(&opening.encode()).unwrap();
    second.write_all(&proof).unwrap();
    assert!(hangs_up(&mut second, SOON) < PATIENT / 2);
    // The hub's own MAC, sent back.
    let mut stream = connect(&hub);
    let (_, reply) = ask(&mut stream, &hub, &job, member);
    stream.write_all(&reply.mac).unwrap();
    assert!(hangs_up(&mut stream, SOON) < PATIENT / 2);
    // A rank that isn't its own, and a process that is no member.
    let right = job.opening(member, hub.address().hub, nonce().unwrap()).unwrap();
    for wrong in [
        Opening { ranks: [0, 0], ..right },
        Opening { ranks: [u32::MAX, 0], ..right },
        Opening { from: HubId(6), ..right },
    ] {
        let mut stream = connect(&hub);
        stream.write_all(&wrong.encode()).unwrap();
        assert!(hangs_up(&mut stream, SOON) < PATIENT / 2, "{wrong:?}");
    }
    // The first one may still prove itself, and is then let in: it stays.
    first.write_all(&proof).unwrap();
    first.set_read_timeout(Some(2 * HANDSHAKE)).unwrap();
    let error = std::io::Read::read(&mut first, &mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    hub.shut();
}

/// A connection to the hub's socket within the host.
fn connect_locally(hub: &Hub) -> OwnedFd {
    let name = SocketAddrUnix::new_abstract_name(format!("podring-{:032x}", hub.address().hub.0).as_bytes()).unwrap();
    let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    connect_to(&fd, &name).unwrap();
    let limit = Some(SOON);
    sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, limit).unwrap();
    fd
}

#[test]
fn half_open_connections_keep_nobody_out() {
    // A seat for few, so that two hundred are too many.
    let all = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(1024.min(all.maximum.unwrap_or(u64::MAX))), ..all }).unwrap();
    let hub = hub();
    peer_gets_through(&hub);
    let mut silent: Vec<TcpStream> = (0..200).map(|_| connect(&hub)).collect();
    for (number, stream) in silent.iter_mut().enumerate() {
        // Nothing; part of an opening; the opening of a job that nobody here knows.
        let bytes = opening(&hub).encode();
        let part = [0, 4, 60, bytes.len()][number % 4];
        stream.write_all(&bytes[..part]).unwrap();
    }
    let local: Vec<OwnedFd> = (0..50).map(|_| connect_locally(&hub)).collect();
    for fd in local.iter().step_by(2) {
        // Something that carries no ring.
        let signed = LocalOpening::new(&Secret::new([0; 32]), opening(&hub), 65536, 0);
        send(fd, &signed.encode(), SendFlags::NOSIGNAL).unwrap();
    }
    // Scanners: connected and gone, or reset.
    for number in 0..100 {
        let stream = connect(&hub);
        if number % 2 == 0 {
            sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        }
    }
    // More than there are seats for come; those that were there longest go. Peers get through all the while.
    let crowd: Vec<TcpStream> = (0..150).map(|_| connect(&hub)).collect();
    peer_gets_through(&hub);
    // All of them are gone when their time is over: three times as long for those who may only be early.
    for mut stream in silent {
        hangs_up(&mut stream, 3 * HANDSHAKE + SOON);
    }
    for mut stream in crowd {
        hangs_up(&mut stream, HANDSHAKE + SOON);
    }
    for fd in local {
        let got = recv(&fd, &mut [0u8; 1], RecvFlags::empty()).map(|(_, got)| got);
        assert!(matches!(got, Ok(0)) || got == Err(rustix::io::Errno::CONNRESET), "{got:?}");
    }
    peer_gets_through(&hub);
    hub.shut();
}

/// A member that sends and sends what nobody asks for is lost, and what it sent is all that is held.
#[test]
fn a_member_that_sends_more_than_it_may_is_lost() {
    use podring_fabric::wire::{Frame, Header};
    let hub = hub();
    let member = HubId(5);
    let job = job_with(&hub, member);
    let mut stream = enter(&hub, &job, member);
    let mut header = Header::new(Frame::Eager, 9);
    header.len = 60_000;
    let bytes = [&header.encode()[..], &[1; 60_000]].concat();
    let mut sent = 0;
    while stream.write_all(&bytes).is_ok() {
        sent += 1;
        assert!(sent < 2000, "120 MB are taken");
    }
    assert!(hub.early() <= (4 << 20) + 60_064, "{}", hub.early());
    peer_gets_through(&hub);
    hub.shut();
}
