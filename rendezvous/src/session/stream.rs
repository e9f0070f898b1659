//! The store stream from the ranks' side: the calling thread itself writes and reads, so that no other need be woken.
//!
//! A call has a connection for itself while it lasts; connections are kept for later calls. So a thread that waits
//! holds no other up, and a forked child, which must not touch its parent's connections, makes its own.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pb::store_call::Call;
use pb::store_reply::Reply;
use podring_proto as pb;
use prost::Message as _;
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::connect::{self, Access};
use super::error::Error;
use super::store::Asks;
use crate::coordinator::stream::keep_alive;
use crate::frame::{self, HELLO, Inbound, Looking, MAGIC};
use crate::secret::Token;
use crate::wire;

/// How often one who waits is asked whether to go on.
const ASKING: Duration = Duration::from_millis(100);
/// Connections that are kept for later calls.
const KEPT: usize = 16;

/// Connections to one coordinator's store.
pub(super) struct Streams {
    pub(super) endpoint: Arc<str>,
    pub(super) instance: u64,
    silence: Duration,
    road: Road,
    idle: Mutex<Idle>,
}

struct Idle {
    /// The process whose connections these are.
    owner: u32,
    lines: Vec<Line>,
}

/// How to make a connection.
struct Road {
    peer: SocketAddr,
    /// The name of a Unix socket of the same coordinator's.
    beside: Option<String>,
    token: Option<Token>,
    message_bytes: usize,
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
        }
    }
}

/// One connection.
struct Line {
    socket: Socket,
    inbound: Inbound,
    out: Vec<u8>,
    number: u64,
    message_bytes: usize,
    /// For calls that are answered at once, and for those that wait.
    looking: [Looking; 2],
}

/// Why an exchange has no answer.
#[derive(Debug)]
enum Failed {
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

/// A call: how it is written, how its answer is read, and whether it may wait for others.
struct Exchange<E, R> {
    waits: bool,
    encode: E,
    read: R,
}

fn decoded(message: &[u8]) -> Result<pb::StoreReply, Failed> {
    pb::StoreReply::decode(message).map_err(|error| Failed::Nonsense(error.to_string()))
}

/// What bounds an exchange.
struct Until<'a> {
    deadline: Instant,
    asks: Option<&'a Asks>,
}

impl Streams {
    /// Connects, if the coordinator takes store streams. `Ok(None)`: it doesn't, and what it is shall be found out
    /// otherwise.
    pub(super) fn connect(access: &Access, stream: TcpStream, limit: Duration) -> Result<Option<Streams>, Error> {
        let peer = match stream.peer_addr() {
            Ok(peer) => peer,
            Err(_) => return Ok(None),
        };
        let (token, message_bytes) = (access.token.clone(), access.message_bytes);
        let mut road = Road { peer, beside: None, token, message_bytes };
        let until = Until { deadline: Instant::now() + limit, asks: None };
        let (mut line, mut hello) = match road.greet(Socket::Tcp(stream), &until) {
            Ok(Ok(greeted)) => greeted,
            Ok(Err(refusal)) => return Err(Error::Refused { call: "hello", refusal }),
            Err(_) => return Ok(None),
        };
        // The same coordinator through a Unix socket, if there is one of this host and of this user.
        for name in frame::served_as(peer).map(frame::beside) {
            let Ok(socket) = unix(&name) else { continue };
            if let Ok(Ok((near, again))) = road.greet(socket, &until)
                && again.instance == hello.instance
            {
                (line, hello) = (near, again);
                road.beside = Some(name);
                break;
            }
        }
        let silence = wire::duration(hello.silence_ms.max(1));
        road.message_bytes = line.message_bytes;
        if let Socket::Tcp(stream) = &line.socket {
            let _ = keep_alive(stream, silence);
        }
        let idle = Mutex::new(Idle { owner: std::process::id(), lines: vec![line] });
        let endpoint = access.endpoints.join(", ").into();
        Ok(Some(Streams { endpoint, instance: hello.instance, silence, road, idle }))
    }

    /// Makes a call and waits for its answer, for at most `limit`.
    pub(super) fn call(
        &self,
        call: &'static str,
        what: Call,
        limit: Duration,
        asks: Option<&Asks>,
    ) -> Result<Reply, Error> {
        let waits = matches!(what, Call::Get(_) | Call::Wait(_) | Call::QueuePop(_));
        let encode = |number, out: &mut Vec<u8>| frame::encode(&pb::StoreCall { number, call: Some(what) }, out);
        self.exchange(call, Exchange { waits, encode, read: decoded }, limit, asks)
    }

    /// multi_set, with nothing copied but into the frame.
    pub(super) fn multi_set<K: AsRef<str>, V: AsRef<[u8]>>(
        &self,
        (keys, values): (&[K], &[V]),
        limit: Duration,
        asks: Option<&Asks>,
    ) -> Result<Reply, Error> {
        let encode = |number, out: &mut Vec<u8>| frame::multi_set(number, self.instance, keys, values, out);
        self.exchange("multi_set", Exchange { waits: false, encode, read: decoded }, limit, asks)
    }

    /// multi_get; `each` gets the values in order.
    pub(super) fn multi_get<K: AsRef<str>>(
        &self,
        keys: &[K],
        timeout_ms: u32,
        mut each: impl FnMut(&[u8]),
        limit: Duration,
        asks: Option<&Asks>,
    ) -> Result<Reply, Error> {
        let encode = |number, out: &mut Vec<u8>| frame::multi_get(number, self.instance, keys, timeout_ms, out);
        let read = |message: &[u8]| match frame::read_values(message) {
            Some((number, values)) => {
                values.into_iter().for_each(&mut each);
                Ok(pb::StoreReply { number, reply: Some(Reply::Done(pb::Done {})) })
            }
            None => decoded(message),
        };
        self.exchange("multi_get", Exchange { waits: true, encode, read }, limit, asks)
    }

    fn exchange<E, R>(
        &self,
        call: &'static str,
        what: Exchange<E, R>,
        limit: Duration,
        asks: Option<&Asks>,
    ) -> Result<Reply, Error>
    where
        E: FnOnce(u64, &mut Vec<u8>),
        R: FnOnce(&[u8]) -> Result<pb::StoreReply, Failed>,
    {
        let began = Instant::now();
        let deadline = began + limit;
        let until = Until { deadline, asks };
        let failed = |failed| self.failed(call, failed, began.elapsed());
        let mut line = match self.kept() {
            Some(line) => line,
            None => self.open(call, limit.min(self.silence), asks)?,
        };
        let reply = line.exchange(what, &until).map_err(failed)?;
        self.keep(line);
        match reply {
            Reply::Refused(refused) => {
                let refusal = wire::from_refused(refused);
                let refusal =
                    refusal.ok_or_else(|| failed(Failed::Nonsense("a refusal of a newer kind".to_owned())))?;
                Err(Error::Refused { call, refusal })
            }
            reply => Ok(reply),
        }
    }

    fn failed(&self, call: &'static str, failed: Failed, waited: Duration) -> Error {
        let endpoint = self.endpoint.to_string();
        match failed {
            Failed::Late => Error::Timeout { call, endpoint, waited },
            Failed::Interrupted => Error::Interrupted { call },
            Failed::Broken(how) | Failed::Nonsense(how) => Error::CoordinatorLost { endpoint, how },
            Failed::TooLong(got) => {
                let (what, limit) = ("bytes of a message".to_owned(), self.road.message_bytes as u64);
                let refusal = crate::refusal::Refusal::TooMuch { what, limit, got: got as u64 };
                Error::Refused { call, refusal }
            }
        }
    }

    /// A kept connection that is alive.
    fn kept(&self) -> Option<Line> {
        let mut idle = self.idle.lock();
        let me = std::process::id();
        if idle.owner != me {
            // Those of the process this one was forked from: closing them here takes nothing from it.
            *idle = Idle { owner: me, lines: Vec::new() };
        }
        while let Some(line) = idle.lines.pop() {
            if line.alive() {
                return Some(line);
            }
        }
        None
    }

    fn keep(&self, line: Line) {
        let mut idle = self.idle.lock();
        if idle.lines.len() < KEPT && idle.owner == std::process::id() {
            idle.lines.push(line);
        }
    }

    /// A new connection. A coordinator that was restarted may need a moment.
    fn open(&self, call: &'static str, limit: Duration, asks: Option<&Asks>) -> Result<Line, Error> {
        let began = Instant::now();
        let until = Until { deadline: began + limit, asks };
        let mut pause = Duration::from_millis(5);
        loop {
            let how = match self.road.socket(&until).and_then(|socket| self.road.greet(socket, &until)) {
                Ok(Ok((line, _))) => {
                    if let Socket::Tcp(stream) = &line.socket {
                        let _ = keep_alive(stream, self.silence);
                    }
                    return Ok(line);
                }
                Ok(Err(refusal)) => return Err(Error::Refused { call: "hello", refusal }),
                Err(Failed::Interrupted) => return Err(Error::Interrupted { call }),
                Err(Failed::Late) => "no answer to a new connection".to_owned(),
                Err(Failed::Broken(how) | Failed::Nonsense(how)) => how,
                Err(Failed::TooLong(_)) => "a hello that is too long".to_owned(),
            };
            if until.deadline <= Instant::now() + pause {
                let how = format!("{how}; tried for {:?}", began.elapsed());
                return Err(Error::CoordinatorLost { endpoint: self.endpoint.to_string(), how });
            }
            if asks.is_some_and(|asks| asks()) {
                return Err(Error::Interrupted { call });
            }
            thread::sleep(pause);
            pause = (pause * 2).min(ASKING);
        }
    }
}

impl Road {
    fn socket(&self, until: &Until<'_>) -> Result<Socket, Failed> {
        if let Some(name) = &self.beside
            && let Ok(socket) = unix(name)
        {
            return Ok(socket);
        }
        let left = until.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(&self.peer, left)?;
        stream.set_nodelay(true)?;
        Ok(Socket::Tcp(stream))
    }

    /// Begins a store stream.
    fn greet(
        &self,
        socket: Socket,
        until: &Until<'_>,
    ) -> Result<Result<(Line, pb::HelloReply), crate::refusal::Refusal>, Failed> {
        let (inbound, message_bytes) = (Inbound::default(), self.message_bytes);
        let looking = [Looking::default(); 2];
        // A read that sleeps wakes so often to see whether to go on.
        set_socket_timeout(&socket, Timeout::Recv, Some(ASKING)).map_err(|error| Failed::Broken(error.to_string()))?;
        let mut line = Line { socket, inbound, out: Vec::new(), number: 0, message_bytes, looking };
        let token = self.token.as_ref().map(Token::reveal).unwrap_or_default();
        let hello = pb::StoreHello { version: wire::VERSION.to_owned(), token };
        let mut out = Vec::new();
        frame::encode(&hello, &mut out);
        out.splice(..0, *MAGIC);
        line.write(&out, until)?;
        match line.answer(0, HELLO, until, &mut Looking::default(), decoded)? {
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

/// A Unix socket of this host that belongs to this user or to root: the token goes through it.
fn unix(name: &str) -> io::Result<Socket> {
    let stream = UnixStream::connect_addr(&std::os::unix::net::SocketAddr::from_abstract_name(name)?)?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    if peer.uid != rustix::process::geteuid() && !peer.uid.is_root() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(Socket::Unix(stream))
}

impl Line {
    /// Whether the other side is there and has said nothing unasked.
    fn alive(&self) -> bool {
        let mut byte = [0];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(recv(&self.socket, &mut byte[..], flags), Err(Errno::AGAIN))
    }

    fn exchange<E, R>(&mut self, what: Exchange<E, R>, until: &Until<'_>) -> Result<Reply, Failed>
    where
        E: FnOnce(u64, &mut Vec<u8>),
        R: FnOnce(&[u8]) -> Result<pb::StoreReply, Failed>,
    {
        self.number += 1;
        let mut out = std::mem::take(&mut self.out);
        (what.encode)(self.number, &mut out);
        let long = out.len() - frame::HEAD > self.message_bytes;
        let written = if long { Err(Failed::TooLong(out.len())) } else { self.write(&out, until) };
        self.out = out;
        written?;
        let mut looking = self.looking[usize::from(what.waits)];
        let reply = self.answer(self.number, self.message_bytes, until, &mut looking, what.read);
        self.looking[usize::from(what.waits)] = looking;
        reply
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
        looking: &mut Looking,
        read: impl FnOnce(&[u8]) -> Result<pb::StoreReply, Failed>,
    ) -> Result<Reply, Failed> {
        let (sent, mut slept) = (Instant::now(), false);
        let message = loop {
            match self.inbound.next(limit) {
                Ok(Some(range)) if range.end <= self.inbound.bytes.len() => break range,
                Ok(_) => {}
                Err(frame::TooLong(length)) => return Err(Failed::Nonsense(format!("a frame of {length} bytes"))),
            }
            self.inbound.make_room();
            let looks = !slept && sent.elapsed() < looking.limit();
            let flags = if looks { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
            match recv(&self.socket, spare_capacity(&mut self.inbound.bytes), flags) {
                Ok((0, _)) => return Err(Failed::Broken("it closed the connection".to_owned())),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if looks => thread::yield_now(),
                // The socket's own timeout.
                Err(Errno::AGAIN) => until.passed()?,
                Err(error) => return Err(Failed::Broken(error.to_string())),
            }
            slept |= !looks;
        };
        if slept {
            looking.missed();
        } else {
            looking.found();
        }
        let reply = read(self.inbound.used(message))?;
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
    fn ready(&self, socket: &Socket, flags: PollFlags) -> Result<(), Failed> {
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
            let _ = answer.send((address, stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream))));
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
