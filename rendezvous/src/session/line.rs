//! One connection to a coordinator's store: how it is made, written and read, by the calling thread itself.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pb::store_reply::Reply;
use podring_fork::Guarded;
use podring_proto as pb;
use prost::Message as _;
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, RecvMsg, SendFlags, recv, recvmsg, send};

use super::connect::{self, Access};
use super::error::Error;
use super::store::Asks;
use crate::board::{PARTS, View};
use crate::frame::{self, About, HELLO, Inbound, MAGIC};
use crate::secret::Token;
use crate::wire;

/// How often one who waits is asked whether to go on.
pub(super) const ASKING: Duration = Duration::from_millis(100);

/// How to make a connection.
pub(super) struct Road {
    pub(super) peer: SocketAddr,
    /// The name of a Unix socket of the same coordinator's.
    pub(super) beside: Option<String>,
    pub(super) token: Option<Token>,
    pub(super) message_bytes: usize,
    /// The board that came last.
    pub(super) board: Mutex<Option<Arc<View>>>,
}

/// One connection.
pub(super) struct Line {
    /// Closed in forked children: they would keep it open after this process's death.
    pub(super) socket: Guarded,
    inbound: Inbound,
    out: Vec<u8>,
    number: u64,
    /// As whose it was opened.
    pub(super) client: u64,
    /// When it was last seen to stand, other than when it was made.
    pub(super) stood: Option<Instant>,
    /// A quiet call was made on it, and nothing answered since.
    unsure: bool,
    pub(super) message_bytes: usize,
    /// Which keys exist, of a coordinator on this host.
    pub(super) board: Option<Arc<View>>,
}

/// Why an exchange has no answer.
#[derive(Debug)]
pub(super) enum Failed {
    Late,
    Interrupted,
    Broken(String),
    /// What came is no answer.
    Nonsense(String),
    TooLong(usize),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Failed::Broken(error.to_string())
    }
}

/// A call: how it is written, and how its answer is read.
pub(super) struct Exchange<E, R> {
    /// Given the call's number, and those before it.
    pub(super) encode: E,
    pub(super) read: R,
}

pub(super) fn decoded(message: &[u8]) -> Result<pb::StoreReply, Failed> {
    pb::StoreReply::decode(message).map_err(|error| Failed::Nonsense(error.to_string()))
}

/// What bounds an exchange.
pub(super) struct Until<'a> {
    pub(super) deadline: Instant,
    pub(super) asks: Option<&'a Asks>,
}

impl Road {
    pub(super) fn socket(&self, until: &Until<'_>) -> Result<OwnedFd, Failed> {
        if let Some(name) = &self.beside
            && let Ok(socket) = unix(name)
        {
            return Ok(socket);
        }
        let left = until.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(&self.peer, left)?;
        connect::to_another(&stream)?;
        stream.set_nodelay(true)?;
        Ok(stream.into())
    }

    /// Begins a store stream.
    pub(super) fn greet(
        &self,
        socket: OwnedFd,
        (client, sent): (u64, u64),
        until: &Until<'_>,
    ) -> Result<Result<(Line, pb::HelloReply), crate::refusal::Refusal>, Failed> {
        let (inbound, message_bytes) = (Inbound::default(), self.message_bytes);
        // A read that sleeps wakes so often to see whether to go on.
        let socket = Guarded::new(socket);
        set_socket_timeout(&socket, Timeout::Recv, Some(ASKING)).map_err(|error| Failed::Broken(error.to_string()))?;
        let (out, unsure, board) = (Vec::new(), false, None);
        let mut line = Line { socket, inbound, out, number: 0, client, stood: None, unsure, message_bytes, board };
        let token = self.token.as_ref().map(Token::reveal).unwrap_or_default();
        let hello = pb::StoreHello { version: wire::VERSION.to_owned(), token, client, sent };
        let mut out = Vec::new();
        frame::encode(&hello, &mut out);
        out.splice(..0, *MAGIC);
        line.write(&out, until)?;
        let passed = line.passed(until)?;
        if !passed.is_empty() {
            line.board = self.view(passed);
        }
        match line.answer(0, HELLO, until, decoded)? {
            Reply::Hello(hello) => {
                let theirs = usize::try_from(hello.message_bytes).ok().filter(|bytes| *bytes > 0);
                line.message_bytes = theirs.map_or(line.message_bytes, |theirs| theirs.min(line.message_bytes));
                Ok(Ok((line, hello)))
            }
            Reply::Refused(refused) => match wire::from_refused(refused) {
                Some(refusal) => Ok(Err(refusal)),
                None => Err(Failed::Nonsense("a refusal of a newer kind".to_owned())),
            },
            _ => Err(Failed::Nonsense("no answer to the hello".to_owned())),
        }
    }
}

impl Road {
    /// The board that descriptors are of; one for all connections to the same coordinator.
    fn view(&self, parts: Vec<OwnedFd>) -> Option<Arc<View>> {
        let mut last = self.board.lock();
        if !last.as_ref().is_some_and(|view| view.is_of(&parts)) {
            *last = View::new(parts).ok().map(Arc::new);
        }
        last.clone()
    }
}

/// A Unix socket of this host that belongs to this user or to root: the token goes through it.
pub(super) fn unix(name: &str) -> io::Result<OwnedFd> {
    let stream = UnixStream::connect_addr(&std::os::unix::net::SocketAddr::from_abstract_name(name)?)?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    if peer.uid != rustix::process::geteuid() && !peer.uid.is_root() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(stream.into())
}

impl Line {
    /// Whether the other side is there and has said nothing unasked.
    pub(super) fn alive(&self) -> bool {
        let mut byte = [0];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(recv(&self.socket, &mut byte[..], flags), Err(Errno::AGAIN))
    }

    /// Reads until the answer to the hello is there; what came with it.
    fn passed(&mut self, until: &Until<'_>) -> Result<Vec<OwnedFd>, Failed> {
        let mut passed = Vec::new();
        loop {
            match self.inbound.next(HELLO) {
                Ok(Some(range)) if range.end <= self.inbound.bytes.len() => return Ok(passed),
                Ok(_) => {}
                // Told by whoever reads the answer.
                Err(frame::TooLong(_)) => return Ok(passed),
            }
            let mut bytes = [0; 1024];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PARTS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let into = &mut [IoSliceMut::new(&mut bytes)];
            match recvmsg(&self.socket, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(RecvMsg { bytes: 0, .. }) => return Err(Failed::Broken("it closed the connection".to_owned())),
                Ok(got) => {
                    self.inbound.bytes.extend_from_slice(&bytes[..got.bytes]);
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = message {
                            passed.extend(rights);
                        }
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => until.passed()?,
                Err(error) => return Err(Failed::Broken(error.to_string())),
            }
        }
    }

    /// Whether something that was said or set isn't known to be done. Asked of one that has ended.
    pub(super) fn owes(&self) -> bool {
        // Both: what the board owes is told once.
        self.board.as_ref().is_some_and(|board| board.owes()) | self.unsure
    }

    pub(super) fn exchange<E, R>(
        &mut self,
        after: u64,
        what: Exchange<E, R>,
        until: &Until<'_>,
    ) -> Result<Reply, Failed>
    where
        E: FnOnce(About, &mut Vec<u8>),
        R: FnOnce(&[u8]) -> Result<pb::StoreReply, Failed>,
    {
        self.number += 1;
        let mut out = std::mem::take(&mut self.out);
        (what.encode)(About { number: self.number, after, quiet: false }, &mut out);
        let long = out.len() - frame::HEAD > self.message_bytes;
        let written = if long { Err(Failed::TooLong(out.len())) } else { self.write(&out, until) };
        self.out = out;
        written?;
        self.answer(self.number, self.message_bytes, until, what.read)
    }

    /// Writes a quiet call.
    pub(super) fn say(
        &mut self,
        after: u64,
        encode: impl FnOnce(About, &mut Vec<u8>),
        until: &Until<'_>,
    ) -> Result<(), Failed> {
        self.number += 1;
        let mut out = std::mem::take(&mut self.out);
        encode(About { number: self.number, after, quiet: true }, &mut out);
        self.unsure = true;
        let written = self.write(&out, until);
        self.out = out;
        written
    }

    fn write(&self, bytes: &[u8], until: &Until<'_>) -> Result<(), Failed> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match send(&self.socket, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => rest = &rest[count..],
                Err(Errno::AGAIN) => until.ready(&self.socket, PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(Failed::Broken(error.to_string())),
            }
        }
        Ok(())
    }

    fn answer(
        &mut self,
        number: u64,
        limit: usize,
        until: &Until<'_>,
        read: impl FnOnce(&[u8]) -> Result<pb::StoreReply, Failed>,
    ) -> Result<Reply, Failed> {
        let message = loop {
            match self.inbound.next(limit) {
                Ok(Some(range)) if range.end <= self.inbound.bytes.len() => break range,
                Ok(_) => {}
                Err(frame::TooLong(length)) => return Err(Failed::Nonsense(format!("a frame of {length} bytes"))),
            }
            self.inbound.make_room();
            // No looking before sleeping: a thread that yields beside a busy process gets its core back a time slice later.
            match recv(&self.socket, spare_capacity(&mut self.inbound.bytes), RecvFlags::empty()) {
                Ok((0, _)) => return Err(Failed::Broken("it closed the connection".to_owned())),
                Ok(_) | Err(Errno::INTR) => {}
                // The socket's own timeout.
                Err(Errno::AGAIN) => until.passed()?,
                Err(error) => return Err(Failed::Broken(error.to_string())),
            }
        };
        let reply = read(self.inbound.used(message))?;
        self.unsure = false;
        let known = reply.number == number || matches!(reply.reply, Some(Reply::Refused(_)));
        match reply.reply {
            Some(answer) if known => Ok(answer),
            Some(_) => Err(Failed::Nonsense(format!("answer {} to call {number}", reply.number))),
            None => Err(Failed::Nonsense("an answer of a newer kind".to_owned())),
        }
    }
}

impl Until<'_> {
    /// Waits until the socket can be written or read.
    fn ready(&self, socket: &Guarded, flags: PollFlags) -> Result<(), Failed> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failed::Late);
            }
            let slice = if self.asks.is_some() { left.min(ASKING) } else { left };
            let slice = Timespec::try_from(slice).ok();
            let mut fds = [PollFd::new(socket, flags)];
            match poll(&mut fds, slice.as_ref()) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(Failed::Broken(error.to_string())),
            }
            self.passed()?;
        }
    }

    /// Whether it is time to give up.
    fn passed(&self) -> Result<(), Failed> {
        if Instant::now() >= self.deadline {
            return Err(Failed::Late);
        }
        if self.asks.is_some_and(|asks| asks()) {
            return Err(Failed::Interrupted);
        }
        Ok(())
    }
}

/// Dials until somebody takes the connection or the time is up.
pub(super) fn dial(access: &Access, asks: Option<&Asks>) -> Result<TcpStream, Error> {
    let began = Instant::now();
    connect::well_formed(access)?;
    let mut pause = Duration::from_millis(10);
    loop {
        let left = access.timeout.saturating_sub(began.elapsed()).max(Duration::from_millis(1));
        let why = match first_of(&access.endpoints, left) {
            Ok(stream) => return Ok(stream),
            Err(why) => why,
        };
        let waited = began.elapsed();
        if waited + pause >= access.timeout {
            return Err(Error::Absent { endpoint: access.name(), waited, why });
        }
        if asks.is_some_and(|asks| asks()) {
            return Err(Error::Interrupted { call: "connect" });
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(250));
    }
}

/// A connection to the first address that answers, all of them at once. Not on the runtime: a forked child has none.
fn first_of(endpoints: &[String], limit: Duration) -> Result<TcpStream, String> {
    let (mut addresses, mut why) = (Vec::new(), Vec::new());
    for endpoint in endpoints {
        let Some(named) = connect::split(endpoint) else { continue };
        match named.to_socket_addrs() {
            Ok(found) => addresses.extend(found),
            Err(error) => why.push(format!("{}: {error}", named.0)),
        }
    }
    addresses.sort_unstable();
    addresses.dedup();
    let (answer, answers) = mpsc::channel();
    let several = addresses.len() > 1;
    for address in addresses {
        let answer = answer.clone();
        let connect = move || {
            let stream = TcpStream::connect_timeout(&address, limit);
            let ready = |stream: TcpStream| {
                connect::to_another(&stream)?;
                stream.set_nodelay(true)?;
                Ok(stream)
            };
            let _ = answer.send((address, stream.and_then(ready)));
        };
        if !several {
            connect();
        } else if let Err(error) = thread::Builder::new().name("podring-dial".to_owned()).spawn(connect) {
            why.push(format!("{address}: {error}"));
        }
    }
    drop(answer);
    let until = Instant::now() + limit;
    loop {
        match answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok((_, Ok(stream))) => return Ok(stream),
            Ok((address, Err(error))) => why.push(format!("{address}: {error}")),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                why.push("no address answered".to_owned());
                break;
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    Err(why.join("; "))
}
