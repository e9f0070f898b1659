//! The coordinator's key-value store, as a blocking client.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pb::store_call::Call;
use pb::store_reply::Reply;
use podring_proto as pb;
use tokio::time::timeout;
use tonic::{Response, Status};

use super::connect::{Access, Client, Connection, call_error, connect};
use super::error::Error;
use super::line;
use super::stream::Streams;
use crate::refusal::Refusal;
use crate::{runtime, wire};

/// What a call may take beyond the time it waits for something by intention.
const ANSWER: Duration = Duration::from_secs(30);
/// How often one who waits is asked whether to go on.
const ASKING: Duration = Duration::from_millis(100);

/// Asked a few times a second in a call that waits: true ends it with [`Error::Interrupted`].
pub type Asks = Arc<dyn Fn() -> bool + Send + Sync>;

/// The store. Clones share their connections. Calls block, so none may be made on the runtime's own threads.
#[derive(Clone)]
pub struct Store {
    link: Link,
    answer: Duration,
    asks: Option<Asks>,
}

#[derive(Clone)]
enum Link {
    Stream(Arc<Streams>),
    /// With TLS, and beside a session.
    Grpc(Box<Connection>),
}

impl Store {
    /// Connects. The store is that of the coordinator's present life: after a restart without state directory each
    /// call is refused with [`crate::refusal::Refusal::StoreLost`].
    pub fn connect(access: &Access) -> Result<Store, Error> {
        Store::connect_asking(access, None)
    }

    /// The same; `asks` may end the connecting, and every call afterwards.
    pub fn connect_asking(access: &Access, asks: Option<Asks>) -> Result<Store, Error> {
        let began = Instant::now();
        if access.tls.is_none() {
            let taken = line::dial(access, asks.as_ref())?;
            let left = access.timeout.saturating_sub(began.elapsed());
            if let Some(streams) = Streams::connect(access, taken, left / 2)? {
                return Ok(Store { link: Link::Stream(Arc::new(streams)), answer: ANSWER, asks });
            }
        }
        // Says at length what is wrong, if something is.
        let left = access.timeout.saturating_sub(began.elapsed()).max(Duration::from_millis(1));
        let connection = blocking(connect(&Access { timeout: left, ..access.clone() }))??;
        Ok(Store { link: Link::Grpc(Box::new(connection)), answer: ANSWER, asks })
    }

    pub(super) fn over(connection: Connection) -> Store {
        Store { link: Link::Grpc(Box::new(connection)), answer: ANSWER, asks: None }
    }

    /// The same store; a call may take so long beyond the time it waits for something by intention (30 s otherwise),
    /// and `asks` may end it.
    #[must_use]
    pub fn patient(&self, answer: Duration, asks: Option<Asks>) -> Store {
        Store { link: self.link.clone(), answer, asks }
    }

    /// Names the store's life.
    pub fn instance(&self) -> u64 {
        match &self.link {
            Link::Stream(streams) => streams.instance,
            Link::Grpc(connection) => connection.instance,
        }
    }

    /// Where the coordinator is, as it was named.
    pub fn endpoint(&self) -> &str {
        match &self.link {
            Link::Stream(streams) => &streams.endpoint,
            Link::Grpc(connection) => &connection.endpoint,
        }
    }

    /// Writes a key. Without TLS a short value isn't waited for: it is there before whatever this store, or a clone of
    /// it, does next; should the coordinator refuse it, the next call that is answered says so.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        if let Link::Stream(streams) = &self.link
            && streams.set(key, value, self.answer, self.asks.as_ref())?
        {
            return Ok(());
        }
        let (instance, key, value) = (self.instance(), key.to_owned(), value.to_owned());
        self.done("set", Call::Set(pb::SetRequest { instance, key, value }), Duration::ZERO)
    }

    /// Reads a key; waits for it to exist. A timeout of zero doesn't wait.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, Error> {
        let (instance, key, timeout_ms) = (self.instance(), key.to_owned(), wire::milliseconds(timeout));
        self.bytes("get", Call::Get(pb::GetRequest { instance, key, timeout_ms }), timeout)
    }

    /// Waits until all keys exist.
    pub fn wait<K: AsRef<str>>(&self, keys: &[K], timeout: Duration) -> Result<(), Error> {
        let began = Instant::now();
        // On the coordinator's own host that needs no message. What goes wrong is for the coordinator to say.
        if let Link::Stream(streams) = &self.link
            && !timeout.is_zero()
            && streams.watch(keys, timeout, timeout.saturating_add(self.answer), self.asks.as_ref())?
        {
            return Ok(());
        }
        let left = timeout.saturating_sub(began.elapsed());
        let keys = keys.iter().map(|key| key.as_ref().to_owned()).collect();
        let (instance, timeout_ms) = (self.instance(), wire::milliseconds(left));
        let mut done = self.done("wait", Call::Wait(pb::WaitRequest { instance, keys, timeout_ms }), left);
        if let Err(Error::Refused { refusal: Refusal::KeysMissing { waited, .. }, .. }) = &mut done {
            *waited = (*waited).max(began.elapsed());
        }
        done
    }

    /// Whether all keys exist.
    pub fn check(&self, keys: &[String]) -> Result<bool, Error> {
        let call = Call::Check(pb::CheckRequest { instance: self.instance(), keys: keys.to_vec() });
        self.flag("check", call)
    }

    /// Adds to a decimal number, a missing one counting as 0, and returns the sum.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, Error> {
        self.number("add", Call::Add(pb::AddRequest { instance: self.instance(), key: key.to_owned(), amount }))
    }

    /// Writes `desired` if the value is `expected`, or if there is none and `expected` is empty. Returns what is stored
    /// afterwards, or `expected` if nothing is.
    pub fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, Error> {
        let (expected, desired) = (expected.to_owned(), desired.to_owned());
        let request = pb::CompareSetRequest { instance: self.instance(), key: key.to_owned(), expected, desired };
        self.bytes("compare_set", Call::CompareSet(request), Duration::ZERO)
    }

    /// Writes at the end of a value.
    pub fn append(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        let (instance, key, value) = (self.instance(), key.to_owned(), value.to_owned());
        self.done("append", Call::Append(pb::AppendRequest { instance, key, value }), Duration::ZERO)
    }

    /// Removes a key and its queue; whether there was one.
    pub fn delete(&self, key: &str) -> Result<bool, Error> {
        let call = Call::Delete(pb::DeleteRequest { instance: self.instance(), key: key.to_owned() });
        self.flag("delete", call)
    }

    /// Reads several keys; waits for all of them.
    pub fn multi_get(&self, keys: &[String], timeout: Duration) -> Result<Vec<Vec<u8>>, Error> {
        let mut values = Vec::with_capacity(keys.len());
        self.multi_get_each(keys, timeout, |value| values.push(value.to_vec()))?;
        Ok(values)
    }

    /// The same; `each` gets the values, in the order of the keys.
    pub fn multi_get_each<K: AsRef<str>>(
        &self,
        keys: &[K],
        timeout: Duration,
        mut each: impl FnMut(&[u8]),
    ) -> Result<(), Error> {
        let timeout_ms = wire::milliseconds(timeout);
        let reply = match &self.link {
            Link::Stream(streams) => {
                let limit = timeout.saturating_add(self.answer);
                streams.multi_get(keys, timeout_ms, &mut each, limit, self.asks.as_ref())?
            }
            Link::Grpc(_) => {
                let (instance, keys) = (self.instance(), keys.iter().map(|key| key.as_ref().to_owned()).collect());
                self.call("multi_get", Call::MultiGet(pb::MultiGetRequest { instance, keys, timeout_ms }), timeout)?
            }
        };
        match reply {
            Reply::Done(_) => Ok(()),
            Reply::Values(pb::Values { values }) => {
                values.iter().for_each(|value| each(value));
                Ok(())
            }
            _ => Err(self.odd("multi_get")),
        }
    }

    /// Writes several keys, all or none. Few short ones aren't waited for, as with [`Store::set`].
    pub fn multi_set<K: AsRef<str>, V: AsRef<[u8]>>(&self, keys: &[K], values: &[V]) -> Result<(), Error> {
        if let Link::Stream(streams) = &self.link
            && streams.multi_set_quietly(keys, values, self.answer, self.asks.as_ref())?
        {
            return Ok(());
        }
        let reply = match &self.link {
            Link::Stream(streams) => streams.multi_set((keys, values), self.answer, self.asks.as_ref())?,
            Link::Grpc(_) => {
                let (instance, keys) = (self.instance(), keys.iter().map(|key| key.as_ref().to_owned()).collect());
                let values = values.iter().map(|value| value.as_ref().to_vec()).collect();
                let call = Call::MultiSet(pb::MultiSetRequest { instance, keys, values });
                self.call("multi_set", call, Duration::ZERO)?
            }
        };
        match reply {
            Reply::Done(_) => Ok(()),
            _ => Err(self.odd("multi_set")),
        }
    }

    /// Appends to a queue.
    pub fn queue_push(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        let (instance, key, value) = (self.instance(), key.to_owned(), value.to_owned());
        self.done("queue_push", Call::QueuePush(pb::QueuePushRequest { instance, key, value }), Duration::ZERO)
    }

    /// Takes the oldest value of a queue; waits for one. A timeout of zero doesn't wait.
    pub fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, Error> {
        let (instance, key, timeout_ms) = (self.instance(), key.to_owned(), wire::milliseconds(timeout));
        self.bytes("queue_pop", Call::QueuePop(pb::QueuePopRequest { instance, key, timeout_ms }), timeout)
    }

    /// The length of a queue.
    pub fn queue_len(&self, key: &str) -> Result<i64, Error> {
        let request = pb::QueueLengthRequest { instance: self.instance(), key: key.to_owned() };
        self.number("queue_len", Call::QueueLength(request))
    }

    /// How many keys there are; each queue counts as one more.
    pub fn num_keys(&self) -> Result<i64, Error> {
        self.number("num_keys", Call::NumKeys(pb::NumKeysRequest { instance: self.instance() }))
    }

    /// The keys that begin with `prefix`, ascending.
    pub fn list_keys(&self, prefix: &str) -> Result<Vec<String>, Error> {
        let request = pb::ListKeysRequest { instance: self.instance(), prefix: prefix.to_owned() };
        match self.call("list_keys", Call::ListKeys(request), Duration::ZERO)? {
            Reply::Keys(pb::Keys { keys }) => Ok(keys),
            _ => Err(self.odd("list_keys")),
        }
    }

    /// What the coordinator knows.
    pub fn status(&self) -> Result<pb::StatusReply, Error> {
        match self.call("status", Call::Status(pb::StatusRequest {}), Duration::ZERO)? {
            Reply::Status(status) => Ok(status),
            _ => Err(self.odd("status")),
        }
    }

    fn done(&self, call: &'static str, what: Call, wait: Duration) -> Result<(), Error> {
        match self.call(call, what, wait)? {
            Reply::Done(_) => Ok(()),
            _ => Err(self.odd(call)),
        }
    }

    fn flag(&self, call: &'static str, what: Call) -> Result<bool, Error> {
        match self.call(call, what, Duration::ZERO)? {
            Reply::Flag(pb::Flag { value }) => Ok(value),
            _ => Err(self.odd(call)),
        }
    }

    fn number(&self, call: &'static str, what: Call) -> Result<i64, Error> {
        match self.call(call, what, Duration::ZERO)? {
            Reply::Value(pb::Number { value }) => Ok(value),
            _ => Err(self.odd(call)),
        }
    }

    fn bytes(&self, call: &'static str, what: Call, wait: Duration) -> Result<Vec<u8>, Error> {
        match self.call(call, what, wait)? {
            Reply::Bytes(pb::Value { value }) => Ok(value),
            _ => Err(self.odd(call)),
        }
    }

    fn odd(&self, call: &str) -> Error {
        Error::CoordinatorLost { endpoint: self.endpoint().to_owned(), how: format!("no answer to {call} is this") }
    }

    fn call(&self, call: &'static str, what: Call, wait: Duration) -> Result<Reply, Error> {
        let limit = wait.saturating_add(self.answer);
        match &self.link {
            Link::Stream(streams) => streams.call(call, what, limit, self.asks.as_ref()),
            Link::Grpc(connection) => {
                let calling = connection.call(call, limit, |client| unary(client, what));
                let asks = self.asks.as_ref();
                blocking(async {
                    tokio::pin!(calling);
                    loop {
                        if let Ok(reply) = timeout(ASKING, &mut calling).await {
                            return reply;
                        }
                        if asks.is_some_and(|asks| asks()) {
                            return Err(Error::Interrupted { call });
                        }
                    }
                })?
            }
        }
    }
}

/// The same call as one of gRPC's.
async fn unary(mut client: Client, call: Call) -> Result<Response<Reply>, Status> {
    Ok(match call {
        Call::Set(request) => client.set(request).await?.map(Reply::Done),
        Call::Get(request) => client.get(request).await?.map(Reply::Bytes),
        Call::Wait(request) => client.wait(request).await?.map(Reply::Done),
        Call::Check(request) => client.check(request).await?.map(Reply::Flag),
        Call::Add(request) => client.add(request).await?.map(Reply::Value),
        Call::CompareSet(request) => client.compare_set(request).await?.map(Reply::Bytes),
        Call::Append(request) => client.append(request).await?.map(Reply::Done),
        Call::Delete(request) => client.delete(request).await?.map(Reply::Flag),
        Call::MultiGet(request) => client.multi_get(request).await?.map(Reply::Values),
        Call::MultiSet(request) => client.multi_set(request).await?.map(Reply::Done),
        Call::QueuePush(request) => client.queue_push(request).await?.map(Reply::Done),
        Call::QueuePop(request) => client.queue_pop(request).await?.map(Reply::Bytes),
        Call::QueueLength(request) => client.queue_length(request).await?.map(Reply::Value),
        Call::NumKeys(request) => client.num_keys(request).await?.map(Reply::Value),
        Call::Status(request) => client.status(request).await?.map(Reply::Status),
        Call::ListKeys(request) => client.list_keys(request).await?.map(Reply::Keys),
    })
}

impl Connection {
    /// A call that ends within `limit`.
    pub(super) async fn call<T, F>(
        &self,
        call: &'static str,
        limit: Duration,
        act: impl FnOnce(Client) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        match timeout(limit, self.sockets.answer(act(self.client.clone()))).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(call_error(call, &self.endpoint, &status)),
            Err(_) => Err(Error::Timeout { call, endpoint: self.endpoint.to_string(), waited: limit }),
        }
    }
}

pub(super) fn blocking<F: Future>(future: F) -> Result<F::Output, Error> {
    runtime::block_on(future).map_err(|error| Error::System { what: "runtime", why: error.to_string() })
}
