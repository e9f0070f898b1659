//! Messages over a Unix socket: a length in four bytes, little-endian, and an encoded message.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use parking_lot::Mutex;
use podring_fork::Marked;
use prost::Message;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};

/// How long a peer may take to read what it is told.
const READS: Duration = Duration::from_secs(1);

/// A connection that forked children close.
pub(super) struct Line {
    /// Before the stream, which closes the descriptor.
    _mark: Marked,
    pub(super) stream: UnixStream,
    /// Held while a message is written: several threads may have something to say.
    writing: Mutex<()>,
}

/// The listening end.
pub(super) struct Listener {
    _mark: Marked,
    pub(super) listener: UnixListener,
}

fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name.as_bytes())
}

impl Listener {
    /// An abstract name: no file, seen by this network namespace, gone with the process.
    pub(super) fn bind(name: &str) -> io::Result<Listener> {
        let listener = UnixListener::bind_addr(&address(name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Listener { _mark: Marked::new(&listener), listener })
    }

    /// The next caller, if there is one. One of another user is sent away.
    pub(super) fn accept(&self) -> io::Result<Option<Line>> {
        match self.listener.accept() {
            Ok((stream, _)) => Line::new(stream).map(Some),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Line {
    fn new(stream: UnixStream) -> io::Result<Line> {
        let mark = Marked::new(&stream);
        let peer = sockopt::socket_peercred(&stream)?;
        if peer.uid != rustix::process::geteuid() && !peer.uid.is_root() {
            let why = format!("the other end belongs to user {}", peer.uid.as_raw());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        stream.set_write_timeout(Some(READS))?;
        Ok(Line { _mark: mark, stream, writing: Mutex::new(()) })
    }

    /// To the agent of that name.
    pub(super) fn connect(name: &str) -> io::Result<Line> {
        Line::new(UnixStream::connect_addr(&address(name)?)?)
    }

    /// The two ends of a connection within this process.
    pub(super) fn pair() -> io::Result<(Line, Line)> {
        let (one, other) = UnixStream::pair()?;
        Ok((Line::new(one)?, Line::new(other)?))
    }

    /// Sends a message. After an error the peer can make nothing of what follows.
    pub(super) fn send(&self, message: &impl Message) -> io::Result<()> {
        self.send_bytes(&encode(message))
    }

    pub(super) fn send_bytes(&self, bytes: &[u8]) -> io::Result<()> {
        let _writing = self.writing.lock();
        let mut rest = bytes;
        while !rest.is_empty() {
            // No SIGPIPE: whose program this is in isn't known.
            match send(&self.stream, rest, SendFlags::NOSIGNAL) {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads what is there without waiting; `false` at the end, also if the peer hasn't read all it was sent.
    pub(super) fn read_into(&self, inbox: &mut Inbox) -> io::Result<bool> {
        loop {
            let have = inbox.bytes.len();
            inbox.bytes.resize(have + CHUNK, 0);
            let got = recv(&self.stream, &mut inbox.bytes[have..], RecvFlags::DONTWAIT);
            let got = got.map(|(got, _)| got);
            inbox.bytes.truncate(have + *got.as_ref().unwrap_or(&0));
            match got {
                Ok(0) | Err(Errno::CONNRESET) => return Ok(false),
                // One burst at a time, so that nobody can fill the memory.
                Ok(_) if inbox.bytes.len() > inbox.limit => return Ok(true),
                Ok(_) => {}
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

const CHUNK: usize = 16 << 10;

pub(super) fn encode(message: &impl Message) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4 + message.encoded_len());
    bytes.extend(u32::try_from(message.encoded_len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend(message.encode_to_vec());
    bytes
}

/// What was read and not yet understood.
pub(super) struct Inbox {
    bytes: Vec<u8>,
    /// Bytes of a message.
    limit: usize,
}

impl Inbox {
    pub(super) fn new(limit: usize) -> Inbox {
        Inbox { bytes: Vec::new(), limit }
    }

    /// The next whole message.
    pub(super) fn next<M: Message + Default>(&mut self) -> Result<Option<M>, String> {
        let Some(head) = self.bytes.first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*head) as usize;
        if length > self.limit {
            return Err(format!("a message of {length} bytes, more than the {} allowed", self.limit));
        }
        let Some(body) = self.bytes.get(4..4 + length) else { return Ok(None) };
        let message = M::decode(body).map_err(|error| error.to_string())?;
        self.bytes.drain(..4 + length);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use podring_proto as pb;

    use super::*;

    #[test]
    fn messages_come_whole_and_bounded() {
        let (one, other) = Line::pair().unwrap();
        let said = pb::NoCoordinator { why: "gone".into(), lost: true };
        let bytes = encode(&said);
        let mut inbox = Inbox::new(64);
        for part in bytes.chunks(3) {
            assert_eq!(inbox.next::<pb::NoCoordinator>(), Ok(None));
            one.send_bytes(part).unwrap();
            assert!(other.read_into(&mut inbox).unwrap());
        }
        assert_eq!(inbox.next(), Ok(Some(said)));
        one.send_bytes(&65u32.to_le_bytes()).unwrap();
        other.read_into(&mut inbox).unwrap();
        assert!(inbox.next::<pb::NoCoordinator>().unwrap_err().contains("65 bytes"));
        drop(one);
        assert!(!other.read_into(&mut inbox).unwrap());
    }
}
