//! The store stream: the store's calls without HTTP/2 around them, all on one thread of their own.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pb::store_call::Call;
use pb::store_reply::Reply;
use podring_fork::Marked;
use podring_proto as pb;
use prost::Message as _;
use rustc_hash::FxHashMap;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, Interest};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;

use super::guard::Stop;
use super::state::Shared;
use crate::board::{Board, PARTS};
use crate::decide::keyvalue::{KeyValue, Outcome, Want};
use crate::decide::{bounded, invalid};
use crate::frame::{self, About, HELLO, Inbound, MAGIC, Many};
use crate::refusal::Refusal;
use crate::secret::Token;
use crate::wire;

/// How long the quiet calls that come before another may take to be read.
const LOST: Duration = Duration::from_secs(5);
/// Between two looks for them.
const PAUSE: Duration = Duration::from_millis(1);

/// A caller whose first byte is the magic's.
pub(super) struct Caller {
    pub(super) stream: std::net::TcpStream,
    pub(super) seat: OwnedSemaphorePermit,
}

/// What every stream needs.
pub(super) struct Calls {
    pub(super) shared: Arc<Shared>,
    pub(super) token: Option<Token>,
    /// Those that make quiet calls, as long as they have a stream.
    clients: Mutex<FxHashMap<u64, Weak<Client>>>,
}

/// A client that makes quiet calls.
struct Client {
    /// So many are done.
    done: AtomicU64,
    /// Why one was refused, until the client has been told.
    refused: Mutex<Option<Refusal>>,
}

/// What became of a call of many keys.
enum Done {
    /// It is another call, or one that waits.
    Not,
    /// It is done and wants no answer.
    Quietly,
    /// The answer is written.
    Answered,
}

/// The thread that serves them.
pub(super) struct Streams {
    pub(super) callers: mpsc::UnboundedSender<Caller>,
    pub(super) thread: thread::JoinHandle<()>,
}

impl Calls {
    pub(super) fn new(shared: Arc<Shared>, token: Option<Token>) -> Self {
        Calls { shared, token, clients: Mutex::default() }
    }

    /// Serves callers until stopped, and those of this host that come through the addresses beside `served`.
    pub(super) fn start(self, served: &[SocketAddr], seats: Arc<Semaphore>, stop: Stop) -> io::Result<Streams> {
        let mut beside = Vec::new();
        for address in served {
            let name = std::os::unix::net::SocketAddr::from_abstract_name(frame::beside(*address))?;
            match UnixListener::bind_addr(&name) {
                Ok(listener) => {
                    listener.set_nonblocking(true)?;
                    beside.push(listener);
                }
                Err(error) => tracing::info!(%error, %address, "no Unix socket beside the port"),
            }
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (callers, inbox) = mpsc::unbounded_channel();
        let serve = move || runtime.block_on(run(Arc::new(self), beside, inbox, seats, stop));
        let thread = thread::Builder::new().name("podring-store".to_owned()).spawn(serve)?;
        Ok(Streams { callers, thread })
    }

    /// The answer to a call.
    async fn answer(&self, call: Call) -> Result<Reply, Refusal> {
        let done = Reply::Done(pb::Done {});
        Ok(match call {
            Call::Set(pb::SetRequest { instance, key, value }) => {
                self.store(instance, |store| store.set(&key, value))?;
                done
            }
            Call::Get(pb::GetRequest { instance, key, timeout_ms }) => {
                one(self.keys(instance, vec![key], Want::Values, timeout_ms).await?)
            }
            Call::Wait(pb::WaitRequest { instance, keys, timeout_ms }) => {
                self.keys(instance, keys, Want::Existence, timeout_ms).await?;
                done
            }
            Call::Check(pb::CheckRequest { instance, keys }) => {
                Reply::Flag(pb::Flag { value: self.store(instance, |store| store.check(&keys))? })
            }
            Call::Add(pb::AddRequest { instance, key, amount }) => {
                Reply::Value(pb::Number { value: self.store(instance, |store| store.add(&key, amount))? })
            }
            Call::CompareSet(pb::CompareSetRequest { instance, key, expected, desired }) => {
                let value = self.store(instance, |store| store.compare_set(&key, expected, desired))?;
                Reply::Bytes(pb::Value { value })
            }
            Call::Append(pb::AppendRequest { instance, key, value }) => {
                self.store(instance, |store| store.append(&key, &value))?;
                done
            }
            Call::Delete(pb::DeleteRequest { instance, key }) => {
                Reply::Flag(pb::Flag { value: self.store(instance, |store| Ok(store.delete(&key)))? })
            }
            Call::MultiGet(pb::MultiGetRequest { instance, keys, timeout_ms }) => {
                let values = self.keys(instance, keys, Want::Values, timeout_ms).await?;
                Reply::Values(pb::Values { values })
            }
            Call::MultiSet(pb::MultiSetRequest { instance, keys, values }) => {
                self.store(instance, |store| store.multi_set(&keys, &values))?;
                done
            }
            Call::QueuePush(pb::QueuePushRequest { instance, key, value }) => {
                self.store(instance, |store| store.push(&key, value))?;
                done
            }
            Call::QueuePop(pb::QueuePopRequest { instance, key, timeout_ms }) => {
                one(self.keys(instance, vec![key], Want::Pop, timeout_ms).await?)
            }
            Call::QueueLength(pb::QueueLengthRequest { instance, key }) => {
                let value = self.store(instance, |store| Ok(store.queue_len(&key) as i64))?;
                Reply::Value(pb::Number { value })
            }
            Call::NumKeys(pb::NumKeysRequest { instance }) => {
                Reply::Value(pb::Number { value: self.store(instance, |store| Ok(store.num_keys() as i64))? })
            }
            Call::Status(pb::StatusRequest {}) => Reply::Status(self.shared.status()),
            Call::ListKeys(pb::ListKeysRequest { instance, prefix }) => {
                Reply::Keys(pb::Keys { keys: self.store(instance, |store| Ok(store.list(&prefix)))? })
            }
        })
    }

    /// Does a call of many keys that needs no waiting, and writes its answer, if it wants one, into `out`.
    fn many(&self, message: &[u8], client: &Client, out: &mut Vec<u8>) -> Done {
        let Some(Many { about, instance, keys, values }) = Many::read(message) else { return Done::Not };
        let About { number, after, quiet } = about;
        let owed = !quiet && client.refused.lock().is_some();
        if client.done.load(Ordering::Relaxed) < after || owed || quiet && values.is_none() {
            return Done::Not;
        }
        let done = match &values {
            Some(values) => {
                let done = self.store(instance, |store| store.multi_set(&keys, values));
                if quiet {
                    client.done(done);
                    return Done::Quietly;
                }
                done.map(|()| {
                    frame::encode(&pb::StoreReply { number, reply: Some(Reply::Done(pb::Done {})) }, out);
                    Done::Answered
                })
            }
            None => self.store(instance, |store| {
                let Some(values) = store.values(&keys)? else { return Ok(Done::Not) };
                let bytes = values.iter().map(|value| value.len() + 8).sum();
                bounded("bytes of an answer", bytes, self.shared.message_bytes)?;
                frame::values(number, values.iter().copied(), out);
                Ok(Done::Answered)
            }),
        };
        done.unwrap_or_else(|refusal| {
            let reply = Some(Reply::Refused(wire::refused(&refusal).1));
            frame::encode(&pb::StoreReply { number, reply }, out);
            Done::Answered
        })
    }

    fn store<R>(&self, instance: u64, act: impl FnOnce(&mut KeyValue) -> Result<R, Refusal>) -> Result<R, Refusal> {
        self.shared.same(instance)?;
        self.shared.with(|state, _| act(&mut state.store))
    }

    async fn keys(&self, instance: u64, keys: Vec<String>, want: Want, ms: u32) -> Result<Vec<Vec<u8>>, Refusal> {
        self.shared.same(instance)?;
        let pop = (want == Want::Pop).then(|| keys.first().cloned()).flatten();
        let ask = move |store: &mut KeyValue, now| store.wait(now, keys, want, wire::duration(ms));
        match self.shared.store_answer(pop, ask).await? {
            Outcome::Exist => Ok(Vec::new()),
            Outcome::Values(values) => Ok(values),
            Outcome::Missing { keys, waited } => Err(Refusal::KeysMissing { keys, waited }),
        }
    }

    fn admit(&self, hello: &pb::StoreHello) -> Result<(), Refusal> {
        if let Some(token) = &self.token
            && !token.is(hello.token.as_bytes())
        {
            return Err(Refusal::Token { given: !hello.token.is_empty() });
        }
        wire::compatible(&hello.version)
    }

    fn client(&self, hello: &pb::StoreHello) -> Arc<Client> {
        let mut clients = self.clients.lock();
        if let Some(client) = clients.get(&hello.client).and_then(Weak::upgrade) {
            return client;
        }
        let client = Arc::new(Client { done: AtomicU64::new(hello.sent), refused: Mutex::default() });
        if hello.client != 0 {
            // As many as were there at most twice, so that it is seldom done.
            if clients.len() == clients.capacity() {
                clients.retain(|_, client| client.strong_count() > 0);
            }
            clients.insert(hello.client, Arc::downgrade(&client));
        }
        client
    }
}

impl Client {
    /// A quiet call is done.
    fn done(&self, how: Result<(), Refusal>) {
        self.done.fetch_add(1, Ordering::Relaxed);
        if let Err(refusal) = how {
            self.refused.lock().get_or_insert(refusal);
        }
    }

    /// Waits until so many quiet calls are done: those of another stream may be read a moment later than this one's.
    async fn reach(&self, after: u64) -> Result<(), Refusal> {
        let since = Instant::now();
        while self.done.load(Ordering::Relaxed) < after {
            if since.elapsed() > LOST {
                let done = self.done.load(Ordering::Relaxed);
                return Err(invalid("order", format!("{done} of {after} calls before it: others were lost")));
            }
            if since.elapsed() < PAUSE { tokio::task::yield_now().await } else { tokio::time::sleep(PAUSE).await }
        }
        Ok(())
    }
}

fn one(mut values: Vec<Vec<u8>>) -> Reply {
    Reply::Bytes(pb::Value { value: values.pop().unwrap_or_default() })
}

/// Everything that this thread does ends when this does: the runtime is dropped then.
async fn run(
    calls: Arc<Calls>,
    beside: Vec<UnixListener>,
    mut inbox: mpsc::UnboundedReceiver<Caller>,
    seats: Arc<Semaphore>,
    stop: Stop,
) {
    for listener in beside {
        if let Ok(listener) = tokio::net::UnixListener::from_std(listener) {
            let beside = Beside { _mark: Marked::new(&listener), listener };
            tokio::spawn(accept(beside, Arc::clone(&calls), Arc::clone(&seats)));
        }
    }
    loop {
        let Caller { stream, seat } = tokio::select! {
            caller = inbox.recv() => match caller {
                Some(caller) => caller,
                None => return stop.wait().await,
            },
            () = stop.wait() => return,
        };
        // A host that is gone without a word must not hold its calls for ever.
        let _ = keep_alive(&stream, calls.shared.silence);
        if let Ok(stream) = tokio::net::TcpStream::from_std(stream) {
            tokio::spawn(attend(stream, Arc::clone(&calls), seat, false));
        }
    }
}

/// Takes in what clients of this host set by the ring, soon after.
async fn take_in(board: Arc<Board>, shared: Arc<Shared>) {
    let watched = |timer| {
        // SAFETY: the descriptor is this `OwnedFd`'s own, which stays open until it is dropped.
        unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) }
    };
    let timer = board.timer().and_then(|timer| Ok(watched(timer)?));
    let timer = match timer {
        Ok(timer) => timer,
        // Whatever anybody asks next takes it in as well, and a look now and then.
        Err(error) => {
            tracing::info!(%error, "no timer for sets on this host: they are looked for now and then");
            loop {
                tokio::time::sleep(Duration::from_millis(50)).await;
                board.looking();
                shared.with(|_, _| ());
            }
        }
    };
    let _mark = Marked::new(&timer);
    while let Ok(mut ready) = timer.readable().await {
        board.looking();
        ready.clear_ready();
        shared.with(|_, _| ());
    }
}

struct Beside {
    /// Before the listener, which closes the descriptor.
    _mark: Marked,
    listener: tokio::net::UnixListener,
}

/// Callers of this host. Only this user's, and root's.
async fn accept(beside: Beside, calls: Arc<Calls>, seats: Arc<Semaphore>) {
    let me = rustix::process::geteuid().as_raw();
    loop {
        let Ok((stream, _)) = beside.listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let known = stream.peer_cred().is_ok_and(|peer| peer.uid() == me || peer.uid() == 0);
        if let Ok(seat) = Arc::clone(&seats).try_acquire_owned()
            && known
        {
            tokio::spawn(attend(stream, Arc::clone(&calls), seat, true));
        }
    }
}

/// Lets the kernel find out within about twice the silence that the peer's host is gone.
pub(crate) fn keep_alive(stream: &impl AsFd, silence: Duration) -> io::Result<()> {
    use rustix::net::sockopt;
    let second = Duration::from_secs(1);
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, silence.max(second))?;
    sockopt::set_tcp_keepintvl(stream, (silence / 4).max(second))?;
    sockopt::set_tcp_keepcnt(stream, 4)?;
    Ok(())
}

/// `beside`: through a Unix socket.
async fn attend<S: AsyncRead + AsyncWrite + AsRawFd + AsFd + Unpin>(
    stream: S,
    calls: Arc<Calls>,
    _seat: OwnedSemaphorePermit,
    beside: bool,
) {
    let _mark = Marked::new(&stream);
    let (inbound, silence) = (Inbound::default(), calls.shared.silence);
    let mut line = Line { _mark, stream, inbound, out: Vec::new(), silence, beside };
    if let Err(error) = line.serve(&calls).await {
        tracing::debug!(%error, "a store stream ended");
    }
}

struct Line<S> {
    /// Before the stream, which closes the descriptor.
    _mark: Marked,
    stream: S,
    inbound: Inbound,
    out: Vec<u8>,
    silence: Duration,
    beside: bool,
}

impl<S: AsyncRead + AsyncWrite + AsFd + Unpin> Line<S> {
    async fn serve(&mut self, calls: &Calls) -> io::Result<()> {
        // Bounded in time and size, and nothing but this is read of one who isn't known yet.
        let hello = timeout(calls.shared.silence, self.hello()).await.map_err(|_| io::ErrorKind::TimedOut)??;
        let admitted = calls.admit(&hello);
        let reply = match &admitted {
            Ok(()) => Reply::Hello(calls.shared.hello()),
            Err(refusal) => Reply::Refused(wire::refused(refusal).1),
        };
        let (board, new) = if self.beside && admitted.is_ok() { calls.shared.board() } else { (None, false) };
        if let Some(board) = board.clone()
            && new
        {
            tokio::spawn(take_in(board, Arc::clone(&calls.shared)));
        }
        match board {
            Some(board) => self.give(reply, &board)?,
            None => self.say(0, reply).await?,
        }
        if admitted.is_err() {
            return Ok(());
        }
        let client = calls.client(&hello);
        let ended = self.answer_calls(calls, &client).await;
        // This thread alone counts them.
        if hello.client != 0 && self.beside && Arc::strong_count(&client) == 1 {
            calls.shared.gone(hello.client);
        }
        ended
    }

    async fn answer_calls(&mut self, calls: &Calls, client: &Client) -> io::Result<()> {
        loop {
            let pb::StoreCall { number, quiet, after, call } = loop {
                match self.inbound.frame(calls.shared.message_bytes) {
                    Ok(Some(message)) => {
                        match calls.many(message, client, &mut self.out) {
                            Done::Not => break pb::StoreCall::decode(message)?,
                            Done::Quietly => {}
                            Done::Answered => self.write().await?,
                        }
                        continue;
                    }
                    Ok(None) => {}
                    Err(frame::TooLong(length)) => {
                        let (what, limit) = ("bytes of a message".to_owned(), calls.shared.message_bytes as u64);
                        let refusal = Refusal::TooMuch { what, limit, got: length as u64 };
                        return self.say(u64::MAX, Reply::Refused(wire::refused(&refusal).1)).await;
                    }
                }
                if self.read().await? == 0 {
                    return Ok(());
                }
            };
            let answer = async {
                client.reach(after).await?;
                if !quiet && let Some(refusal) = client.refused.lock().take() {
                    return Err(refusal);
                }
                if quiet && !matches!(call, Some(Call::Set(_) | Call::MultiSet(_))) {
                    return Err(invalid("call", "a quiet one that isn't a set"));
                }
                let call = call.ok_or_else(|| invalid("call", "one that this coordinator doesn't know"))?;
                let reply = calls.answer(call).await?;
                bounded("bytes of an answer", reply.encoded_len(), calls.shared.message_bytes)?;
                Ok(reply)
            };
            tokio::pin!(answer);
            let reply = tokio::select! {
                biased;
                reply = &mut answer => reply,
                // One call after another: what comes meanwhile can only be the end, and withdraws the call.
                _ = self.read(), if !quiet => return Ok(()),
            };
            if quiet {
                client.done(reply.map(drop));
                continue;
            }
            let reply = reply.unwrap_or_else(|refusal: Refusal| Reply::Refused(wire::refused(&refusal).1));
            frame::encode(&pb::StoreReply { number, reply: Some(reply) }, &mut self.out);
            self.write().await?;
        }
    }

    async fn hello(&mut self) -> io::Result<pb::StoreHello> {
        let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        while self.inbound.bytes.len() < MAGIC.len() {
            if self.read().await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        if self.inbound.take(MAGIC.len()) != Some(&MAGIC[..]) {
            return Err(bad("no store stream"));
        }
        loop {
            match self.inbound.frame(HELLO) {
                Ok(Some(hello)) => return Ok(pb::StoreHello::decode(hello)?),
                Ok(None) => {}
                Err(frame::TooLong(_)) => return Err(bad("a hello that is too long")),
            }
            if self.read().await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    async fn read(&mut self) -> io::Result<usize> {
        self.inbound.make_room();
        self.stream.read_buf(&mut self.inbound.bytes).await
    }

    async fn say(&mut self, number: u64, reply: Reply) -> io::Result<()> {
        frame::encode(&pb::StoreReply { number, reply: Some(reply) }, &mut self.out);
        self.write().await
    }

    /// The answer to the hello, and the board with it. There is room for it: nothing was said on this socket before.
    fn give(&mut self, reply: Reply, board: &Board) -> io::Result<()> {
        frame::encode(&pb::StoreReply { number: 0, reply: Some(reply) }, &mut self.out);
        let fds = board.give();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PARTS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = sendmsg(&self.stream, &[IoSlice::new(&self.out)], &mut control, flags)?;
        if sent == self.out.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    async fn write(&mut self) -> io::Result<()> {
        let mut rest = &self.out[..];
        while !rest.is_empty() {
            // A caller who doesn't read for so long is gone.
            let written = timeout(2 * self.silence, self.stream.write(rest)).await;
            match written.map_err(|_| io::ErrorKind::TimedOut)?? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => rest = &rest[count..],
            }
        }
        Ok(())
    }
}
