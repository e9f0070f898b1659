//! The store stream from the ranks' side: the calling thread itself writes and reads, so that no other need be woken.
//!
//! A call has a connection for itself while it lasts; connections are kept for later calls. So a thread that waits
//! holds no other up, and a forked child, which must not touch its parent's connections, makes its own.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pb::store_call::Call;
use pb::store_reply::Reply;
use podring_proto as pb;

use super::connect::Access;
use super::error::Error;
use super::line::{ASKING, Exchange, Failed, Line, Road, Until, decoded, unix};
use super::store::Asks;
use crate::board::Look;
use crate::coordinator::stream::keep_alive;
use crate::frame::{self, About};
use crate::wire;

/// Connections that are kept for later calls.
const KEPT: usize = 16;
/// Of so many sets that went by the connection though the ring would do, one is waited for, so that it will.
const MANY: u64 = 16;
/// A connection that stood so short a time ago is taken to stand still by what goes over the board: to ask the system
/// costs as much as all the rest. If it doesn't, the next call finds out, and says so.
const FRESH: Duration = Duration::from_millis(1);
/// Keys that are looked for on the board at once.
const LOOKED_FOR: usize = 256;
/// What isn't waited for, if the coordinator takes it.
const QUIET: Quiet = Quiet { key_bytes: 4096, value_bytes: 64 << 10, keys: 1024 };

/// A client's name; 0, with which no call is quiet, if there is no randomness.
fn nonce() -> u64 {
    let mut bytes = [0; 8];
    if getrandom::fill(&mut bytes).is_ok() { u64::from_le_bytes(bytes) | 1 } else { 0 }
}

/// Connections to one coordinator's store.
pub(super) struct Streams {
    pub(super) endpoint: Arc<str>,
    pub(super) instance: u64,
    silence: Duration,
    road: Road,
    /// The name of this client in quiet calls, and how many it has made.
    client: AtomicU64,
    sent: AtomicU64,
    /// So many of them are known to be done.
    known: AtomicU64,
    /// Sets that would have gone by the ring if all of them were.
    missed: AtomicU64,
    quiet: Quiet,
    idle: Mutex<Idle>,
}

/// Bounds of a quiet call: none is refused for its length.
#[derive(Clone, Copy, Debug)]
struct Quiet {
    /// Of the longest key.
    key_bytes: usize,
    /// Of the longest value, and of all keys and values together.
    value_bytes: usize,
    /// Of a multi_set.
    keys: usize,
}

struct Idle {
    /// The process whose connections these are, in forks since the first.
    owner: u32,
    lines: Vec<Line>,
}

impl Streams {
    /// Connects, if the coordinator takes store streams. `Ok(None)`: it doesn't, and what it is shall be found out
    /// otherwise.
    pub(super) fn connect(access: &Access, stream: TcpStream, limit: Duration) -> Result<Option<Streams>, Error> {
        let peer = match stream.peer_addr() {
            Ok(peer) => peer,
            Err(_) => return Ok(None),
        };
        podring_fork::install();
        let (token, message_bytes) = (access.token.clone(), access.message_bytes);
        let mut road = Road { peer, beside: None, token, message_bytes, board: Mutex::default() };
        let until = Until { deadline: Instant::now() + limit, asks: None };
        let client = nonce();
        let (mut line, mut hello) = match road.greet(stream.into(), (client, 0), &until) {
            Ok(Ok(greeted)) => greeted,
            Ok(Err(refusal)) => return Err(Error::Refused { call: "hello", refusal }),
            Err(_) => return Ok(None),
        };
        // The same coordinator through a Unix socket, if there is one of this host and of this user.
        for name in frame::served_as(peer).map(frame::beside) {
            let Ok(socket) = unix(&name) else { continue };
            if let Ok(Ok((near, again))) = road.greet(socket, (client, 0), &until)
                && again.instance == hello.instance
            {
                (line, hello) = (near, again);
                road.beside = Some(name);
                break;
            }
        }
        let silence = wire::duration(hello.silence_ms.max(1));
        road.message_bytes = line.message_bytes;
        // Not all of it is for Unix sockets, and none of them needs it.
        let _ = keep_alive(&line.socket, silence);
        let idle = Mutex::new(Idle { owner: podring_fork::generation(), lines: vec![line] });
        let endpoint = access.endpoints.join(", ").into();
        let [client, sent, known, missed] = [client, 0, 0, 0].map(AtomicU64::new);
        let least = |most: usize, theirs: u64| usize::try_from(theirs).map_or(most, |theirs| most.min(theirs));
        let (key_bytes, value_bytes) =
            (least(QUIET.key_bytes, hello.key_bytes), least(QUIET.value_bytes, hello.value_bytes));
        let quiet = Quiet { key_bytes, value_bytes, keys: least(QUIET.keys, hello.quiet_keys.into()) };
        Ok(Some(Streams {
            endpoint,
            instance: hello.instance,
            silence,
            road,
            client,
            sent,
            known,
            missed,
            quiet,
            idle,
        }))
    }

    /// Makes a call and waits for its answer, for at most `limit`.
    pub(super) fn call(
        &self,
        call: &'static str,
        what: Call,
        limit: Duration,
        asks: Option<&Asks>,
    ) -> Result<Reply, Error> {
        let encode = |About { number, after, .. }, out: &mut Vec<u8>| {
            frame::encode(&pb::StoreCall { number, quiet: false, after, call: Some(what) }, out);
        };
        self.exchange(call, Exchange { encode, read: decoded }, limit, asks)
    }

    /// A set that isn't waited for: it is done before whatever this client does next, on whichever connection. `false`:
    /// that can't be had, and nothing was done.
    pub(super) fn set(&self, key: &str, value: &[u8], limit: Duration, asks: Option<&Asks>) -> Result<bool, Error> {
        if key.len() > self.quiet.key_bytes || value.len() > self.quiet.value_bytes {
            return Ok(false);
        }
        let line = self.fresh_line("set", limit, asks)?;
        if let Some(board) = &line.board
            && line.client != 0
            && board.is_open(key, value)
        {
            // The coordinator takes the ring in before what it reads from a connection: what was said there must be done.
            let sure = self.known.load(Ordering::SeqCst) >= self.sent.load(Ordering::SeqCst);
            if sure || self.missed.fetch_add(1, Ordering::Relaxed) % MANY == MANY - 1 {
                let posted = sure && board.post(line.client, key, value);
                self.keep(line);
                return Ok(posted);
            }
        }
        let encode = |About { number, after, quiet }, out: &mut Vec<u8>| {
            let request = pb::SetRequest { instance: self.instance, key: key.to_owned(), value: value.to_owned() };
            frame::encode(&pb::StoreCall { number, quiet, after, call: Some(Call::Set(request)) }, out);
        };
        self.say(line, ("set", encode), limit, asks)
    }

    /// A multi_set that isn't waited for, in the same way.
    pub(super) fn multi_set_quietly<K: AsRef<str>, V: AsRef<[u8]>>(
        &self,
        keys: &[K],
        values: &[V],
        limit: Duration,
        asks: Option<&Asks>,
    ) -> Result<bool, Error> {
        let Quiet { key_bytes, value_bytes, keys: most } = self.quiet;
        let long = |key: &K| key.as_ref().len() > key_bytes;
        if keys.len() != values.len() || keys.len() > most || keys.iter().any(long) {
            return Ok(false);
        }
        let bytes = keys.iter().zip(values).map(|(key, value)| key.as_ref().len() + value.as_ref().len());
        if bytes.sum::<usize>() > value_bytes {
            return Ok(false);
        }
        let encode = |about, out: &mut Vec<u8>| frame::multi_set(about, self.instance, keys, values, out);
        self.say(self.line("multi_set", limit, asks)?, ("multi_set", encode), limit, asks)
    }

    /// Writes a quiet call. `false`: the coordinator doesn't know this client, and nothing was done.
    fn say(
        &self,
        mut line: Line,
        (call, encode): (&'static str, impl FnOnce(About, &mut Vec<u8>)),
        limit: Duration,
        asks: Option<&Asks>,
    ) -> Result<bool, Error> {
        let until = Until { deadline: Instant::now() + limit, asks };
        if line.client == 0 || line.client != self.client.load(Ordering::SeqCst) {
            self.keep(line);
            return Ok(false);
        }
        let after = self.sent.fetch_add(1, Ordering::SeqCst);
        match line.say(after, encode, &until) {
            Ok(()) => self.keep(line),
            Err(failed) => {
                // Whether it arrived isn't known, and those who wait for it would wait in vain: another name.
                self.rename(&mut self.idle.lock());
                return Err(self.failed(call, failed, limit));
            }
        }
        Ok(true)
    }

    /// Begins anew as another client, without connections.
    fn rename(&self, idle: &mut Idle) {
        *idle = Idle { owner: podring_fork::generation(), lines: Vec::new() };
        self.sent.store(0, Ordering::SeqCst);
        self.known.store(0, Ordering::SeqCst);
        self.client.store(nonce(), Ordering::SeqCst);
    }

    /// multi_set, with nothing copied but into the frame.
    pub(super) fn multi_set<K: AsRef<str>, V: AsRef<[u8]>>(
        &self,
        (keys, values): (&[K], &[V]),
        limit: Duration,
        asks: Option<&Asks>,
    ) -> Result<Reply, Error> {
        let encode = |about, out: &mut Vec<u8>| {
            frame::multi_set(about, self.instance, keys, values, out);
        };
        self.exchange("multi_set", Exchange { encode, read: decoded }, limit, asks)
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
        let encode = |about, out: &mut Vec<u8>| {
            frame::multi_get(about, self.instance, keys, timeout_ms, out);
        };
        let read = |message: &[u8]| match frame::read_values(message) {
            Some((number, values)) => {
                values.into_iter().for_each(&mut each);
                Ok(pb::StoreReply { number, reply: Some(Reply::Done(pb::Done {})) })
            }
            None => decoded(message),
        };
        self.exchange("multi_get", Exchange { encode, read }, limit, asks)
    }

    /// Waits for keys by the board, for at most `timeout`; true if all exist. Otherwise the coordinator must be asked.
    /// `limit` is for a connection, if there is none.
    pub(super) fn watch<K: AsRef<str>>(
        &self,
        keys: &[K],
        timeout: Duration,
        limit: Duration,
        asks: Option<&Asks>,
    ) -> Result<bool, Error> {
        let began = Instant::now();
        let until = Until { deadline: began + timeout, asks };
        let line = self.fresh_line("wait", limit, asks)?;
        let Some(board) = line.board.as_ref().filter(|_| (1..=LOOKED_FOR).contains(&keys.len())) else {
            self.keep(line);
            return Ok(false);
        };
        let prints: Vec<u64> = keys.iter().map(|key| board.print(key.as_ref())).collect();
        let seen = loop {
            let (print, changes) = match board.all(&prints) {
                Look::There => break true,
                Look::Unknown => break false,
                Look::Absent { print, changes } => (print, changes),
            };
            let left = until.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break false;
            }
            if board.sleep(print, changes, left.min(ASKING), keys.len() == 1) {
                continue;
            }
            if !line.alive() {
                if line.owes() {
                    self.rename(&mut self.idle.lock());
                }
                let broken = Failed::Broken("it closed the connection".to_owned());
                return Err(self.failed("wait", broken, began.elapsed()));
            }
            if asks.is_some_and(|asks| asks()) {
                self.keep(line);
                return Err(Error::Interrupted { call: "wait" });
            }
        };
        self.keep(line);
        Ok(seen)
    }

    fn exchange<E, R>(
        &self,
        call: &'static str,
        what: Exchange<E, R>,
        limit: Duration,
        asks: Option<&Asks>,
    ) -> Result<Reply, Error>
    where
        E: FnOnce(About, &mut Vec<u8>),
        R: FnOnce(&[u8]) -> Result<pb::StoreReply, Failed>,
    {
        let began = Instant::now();
        let deadline = began + limit;
        let until = Until { deadline, asks };
        let failed = |failed| self.failed(call, failed, began.elapsed());
        let mut line = self.line(call, limit, asks)?;
        let (client, after) = (line.client, self.sent.load(Ordering::SeqCst));
        let reply = match line.exchange(after, what, &until) {
            Ok(reply) => reply,
            Err(why) => {
                if matches!(why, Failed::Broken(_) | Failed::Nonsense(_)) && line.owes() {
                    self.rename(&mut self.idle.lock());
                }
                return Err(failed(why));
            }
        };
        if !matches!(reply, Reply::Refused(_)) && client == self.client.load(Ordering::SeqCst) {
            self.known.fetch_max(after, Ordering::SeqCst);
        }
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

    /// A connection for a call.
    fn line(&self, call: &'static str, limit: Duration, asks: Option<&Asks>) -> Result<Line, Error> {
        match self.kept(None)? {
            Some(line) => Ok(line),
            None => self.open(call, limit.min(self.silence), asks),
        }
    }

    /// One that stood a moment ago will do.
    fn fresh_line(&self, call: &'static str, limit: Duration, asks: Option<&Asks>) -> Result<Line, Error> {
        match self.kept(Some(Instant::now()))? {
            Some(line) => Ok(line),
            None => self.open(call, limit.min(self.silence), asks),
        }
    }

    /// A kept connection that is alive. An error, once, if one has ended before a set was known to be done. `now`: one
    /// that was [`FRESH`] ago will do.
    fn kept(&self, now: Option<Instant>) -> Result<Option<Line>, Error> {
        let mut idle = self.idle.lock();
        let me = podring_fork::generation();
        if idle.owner != me {
            // Those of the process this one was forked from, closed here by now.
            self.rename(&mut idle);
        }
        while let Some(mut line) = idle.lines.pop() {
            let fresh = now.zip(line.stood).is_some_and(|(now, stood)| now.saturating_duration_since(stood) < FRESH);
            let alive = fresh || line.alive();
            if !fresh {
                line.stood = now.filter(|_| alive);
            }
            if alive && line.client == self.client.load(Ordering::SeqCst) {
                return Ok(Some(line));
            }
            if !alive && line.owes() {
                self.rename(&mut idle);
                let how = "it closed the connection; whether a set before was done isn't known".to_owned();
                return Err(Error::CoordinatorLost { endpoint: self.endpoint.to_string(), how });
            }
        }
        Ok(None)
    }

    fn keep(&self, line: Line) {
        let mut idle = self.idle.lock();
        let same = line.client == self.client.load(Ordering::SeqCst) && idle.owner == podring_fork::generation();
        if idle.lines.len() < KEPT && same {
            idle.lines.push(line);
        }
    }

    /// A new connection. A coordinator that was restarted may need a moment.
    fn open(&self, call: &'static str, limit: Duration, asks: Option<&Asks>) -> Result<Line, Error> {
        let began = Instant::now();
        let until = Until { deadline: began + limit, asks };
        let mut pause = Duration::from_millis(5);
        loop {
            let name = (self.client.load(Ordering::SeqCst), self.sent.load(Ordering::SeqCst));
            let how = match self.road.socket(&until).and_then(|socket| self.road.greet(socket, name, &until)) {
                Ok(Ok((mut line, hello))) => {
                    // What the board of another life shows is nothing of this store's.
                    line.board = line.board.filter(|_| hello.instance == self.instance);
                    let _ = keep_alive(&line.socket, self.silence);
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
