//! The coordinator's key-value store, as a blocking client.

use std::future::Future;
use std::time::Duration;

use podring_proto as pb;
use tokio::time::timeout;
use tonic::{Response, Status};

use super::connect::{Access, Client, Connection, call_error, connect};
use super::error::Error;
use crate::{runtime, wire};

/// What a call may take beyond the time it waits for something by intention.
const ANSWER: Duration = Duration::from_secs(30);

/// The store. Clones share the connection. Calls block, so none may be made on the runtime's own threads.
#[derive(Clone)]
pub struct Store {
    connection: Connection,
}

impl Store {
    /// Connects. The store is that of the coordinator's present life: after a restart without state directory each
    /// call is refused with [`crate::refusal::Refusal::StoreLost`].
    pub fn connect(access: &Access) -> Result<Store, Error> {
        let connection = blocking(connect(access))??;
        Ok(Store { connection })
    }

    pub(super) fn over(connection: Connection) -> Store {
        Store { connection }
    }

    /// Names the store's life.
    pub fn instance(&self) -> u64 {
        self.connection.instance
    }

    /// Writes a key.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        let (instance, key, value) = (self.instance(), key.to_owned(), value.to_owned());
        let request = pb::SetRequest { instance, key, value };
        self.call("set", ANSWER, |mut client| async move { client.set(request).await }).map(drop)
    }

    /// Reads a key; waits for it to exist. A timeout of zero doesn't wait.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, Error> {
        let (instance, key, timeout_ms) = (self.instance(), key.to_owned(), wire::milliseconds(timeout));
        let request = pb::GetRequest { instance, key, timeout_ms };
        let reply = self.call("get", timeout + ANSWER, |mut client| async move { client.get(request).await })?;
        Ok(reply.value)
    }

    /// Waits until all keys exist.
    pub fn wait(&self, keys: &[String], timeout: Duration) -> Result<(), Error> {
        let (instance, keys, timeout_ms) = (self.instance(), keys.to_vec(), wire::milliseconds(timeout));
        let request = pb::WaitRequest { instance, keys, timeout_ms };
        self.call("wait", timeout + ANSWER, |mut client| async move { client.wait(request).await }).map(drop)
    }

    /// Whether all keys exist.
    pub fn check(&self, keys: &[String]) -> Result<bool, Error> {
        let request = pb::CheckRequest { instance: self.instance(), keys: keys.to_vec() };
        Ok(self.call("check", ANSWER, |mut client| async move { client.check(request).await })?.value)
    }

    /// Adds to a decimal number, a missing one counting as 0, and returns the sum.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, Error> {
        let request = pb::AddRequest { instance: self.instance(), key: key.to_owned(), amount };
        Ok(self.call("add", ANSWER, |mut client| async move { client.add(request).await })?.value)
    }

    /// Writes `desired` if the value is `expected`, or if there is none and `expected` is empty. Returns what is stored
    /// afterwards, or `expected` if nothing is.
    pub fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, Error> {
        let (expected, desired) = (expected.to_owned(), desired.to_owned());
        let request = pb::CompareSetRequest { instance: self.instance(), key: key.to_owned(), expected, desired };
        Ok(self.call("compare_set", ANSWER, |mut client| async move { client.compare_set(request).await })?.value)
    }

    /// Writes at the end of a value.
    pub fn append(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        let (instance, key, value) = (self.instance(), key.to_owned(), value.to_owned());
        let request = pb::AppendRequest { instance, key, value };
        self.call("append", ANSWER, |mut client| async move { client.append(request).await }).map(drop)
    }

    /// Removes a key and its queue; whether there was one.
    pub fn delete(&self, key: &str) -> Result<bool, Error> {
        let request = pb::DeleteRequest { instance: self.instance(), key: key.to_owned() };
        Ok(self.call("delete", ANSWER, |mut client| async move { client.delete(request).await })?.value)
    }

    /// Reads several keys; waits for all of them.
    pub fn multi_get(&self, keys: &[String], timeout: Duration) -> Result<Vec<Vec<u8>>, Error> {
        let (instance, keys, timeout_ms) = (self.instance(), keys.to_vec(), wire::milliseconds(timeout));
        let request = pb::MultiGetRequest { instance, keys, timeout_ms };
        let call = |mut client: Client| async move { client.multi_get(request).await };
        Ok(self.call("multi_get", timeout + ANSWER, call)?.values)
    }

    /// Writes several keys, all or none.
    pub fn multi_set(&self, keys: &[String], values: &[Vec<u8>]) -> Result<(), Error> {
        let (instance, keys, values) = (self.instance(), keys.to_vec(), values.to_vec());
        let request = pb::MultiSetRequest { instance, keys, values };
        self.call("multi_set", ANSWER, |mut client| async move { client.multi_set(request).await }).map(drop)
    }

    /// Appends to a queue.
    pub fn queue_push(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        let (instance, key, value) = (self.instance(), key.to_owned(), value.to_owned());
        let request = pb::QueuePushRequest { instance, key, value };
        self.call("queue_push", ANSWER, |mut client| async move { client.queue_push(request).await }).map(drop)
    }

    /// Takes the oldest value of a queue; waits for one. A timeout of zero doesn't wait.
    pub fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, Error> {
        let (instance, key, timeout_ms) = (self.instance(), key.to_owned(), wire::milliseconds(timeout));
        let request = pb::QueuePopRequest { instance, key, timeout_ms };
        let call = |mut client: Client| async move { client.queue_pop(request).await };
        Ok(self.call("queue_pop", timeout + ANSWER, call)?.value)
    }

    /// The length of a queue.
    pub fn queue_len(&self, key: &str) -> Result<i64, Error> {
        let request = pb::QueueLengthRequest { instance: self.instance(), key: key.to_owned() };
        Ok(self.call("queue_len", ANSWER, |mut client| async move { client.queue_length(request).await })?.value)
    }

    /// How many keys there are; each queue counts as one more.
    pub fn num_keys(&self) -> Result<i64, Error> {
        let request = pb::NumKeysRequest { instance: self.instance() };
        Ok(self.call("num_keys", ANSWER, |mut client| async move { client.num_keys(request).await })?.value)
    }

    /// The keys that begin with `prefix`, ascending.
    pub fn list_keys(&self, prefix: &str) -> Result<Vec<String>, Error> {
        let request = pb::ListKeysRequest { instance: self.instance(), prefix: prefix.to_owned() };
        Ok(self.call("list_keys", ANSWER, |mut client| async move { client.list_keys(request).await })?.keys)
    }

    /// What the coordinator knows.
    pub fn status(&self) -> Result<pb::StatusReply, Error> {
        self.call("status", ANSWER, |mut client| async move { client.status(pb::StatusRequest {}).await })
    }

    fn call<T, F>(&self, call: &'static str, limit: Duration, act: impl FnOnce(Client) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        blocking(self.connection.call(call, limit, act))?
    }
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
        match timeout(limit, act(self.client.clone())).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(call_error(call, &self.endpoint, &status)),
            Err(_) => Err(Error::Timeout { call, endpoint: self.endpoint.to_string(), waited: limit }),
        }
    }
}

pub(super) fn blocking<F: Future>(future: F) -> Result<F::Output, Error> {
    runtime::block_on(future).map_err(|error| Error::System { what: "runtime", why: error.to_string() })
}
