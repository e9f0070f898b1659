//! One operation as its caller sees it: a state, an error if it failed, callbacks, and the memory's keeper.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
pub use podring_collective::Keep;

use crate::error::Failure;

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Under way.
    Pending,
    /// Done; the result is in place.
    Done,
    /// Failed; see [`Ticket::failure`].
    Failed,
}

const PENDING: u32 = 0;
const DONE: u32 = 1;
const FAILED: u32 = 2;

/// A function to call when an operation ends.
pub type Callback = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Inner {
    failure: Option<Arc<Failure>>,
    callbacks: Vec<Callback>,
}

/// Shared by the engine and whoever holds the work.
pub struct Ticket {
    state: AtomicU32,
    /// Sequence number; for point-to-point, the number of the operation in its group's own count.
    seq: AtomicU64,
    key: AtomicU64,
    source: AtomicI32,
    timeout_ms: AtomicU64,
    inner: Mutex<Inner>,
}

static KEYS: AtomicU64 = AtomicU64::new(1);

impl Ticket {
    pub(crate) fn new() -> Self {
        Ticket {
            state: AtomicU32::new(PENDING),
            seq: AtomicU64::new(0),
            key: AtomicU64::new(0),
            source: AtomicI32::new(-1),
            timeout_ms: AtomicU64::new(0),
            inner: Mutex::new(Inner::default()),
        }
    }

    /// Makes it a new operation's.
    pub(crate) fn reset(&mut self, seq: u64, timeout: Duration) {
        *self.state.get_mut() = PENDING;
        *self.seq.get_mut() = seq;
        *self.key.get_mut() = KEYS.fetch_add(1, Ordering::Relaxed);
        *self.source.get_mut() = -1;
        *self.timeout_ms.get_mut() = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let inner = self.inner.get_mut();
        inner.failure = None;
        inner.callbacks.clear();
    }

    /// How far it is.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            PENDING => State::Pending,
            DONE => State::Done,
            _ => State::Failed,
        }
    }

    /// Whether it has ended, well or not.
    pub fn ended(&self) -> bool {
        self.state.load(Ordering::Acquire) != PENDING
    }

    /// Why it failed, if it did.
    pub fn failure(&self) -> Option<Arc<Failure>> {
        match self.state() {
            State::Failed => self.inner.lock().failure.clone(),
            _ => None,
        }
    }

    /// Its sequence number in the group.
    pub fn seq(&self) -> u64 {
        self.seq.load(Ordering::Relaxed)
    }

    /// A number no other operation of this process has.
    pub fn key(&self) -> u64 {
        self.key.load(Ordering::Relaxed)
    }

    /// Its deadline, from the call on.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }

    /// Whom a receive got its message from.
    pub fn source(&self) -> Option<u32> {
        u32::try_from(self.source.load(Ordering::Acquire)).ok()
    }

    pub(crate) fn set_source(&self, rank: u32) {
        self.source.store(rank as i32, Ordering::Release);
    }

    /// Ends it; returns the callbacks to run. Ending twice changes nothing.
    pub(crate) fn end(&self, failure: Option<Arc<Failure>>) -> Vec<Callback> {
        let mut inner = self.inner.lock();
        if self.ended() {
            return Vec::new();
        }
        let state = if failure.is_some() { FAILED } else { DONE };
        inner.failure = failure;
        self.state.store(state, Ordering::Release);
        std::mem::take(&mut inner.callbacks)
    }

    /// Registers a callback. Gives it back if the operation has ended already: the caller runs it.
    pub fn on_end(&self, callback: Callback) -> Option<Callback> {
        let mut inner = self.inner.lock();
        if self.ended() {
            return Some(callback);
        }
        inner.callbacks.push(callback);
        None
    }
}

/// Lends tickets again.
#[derive(Default)]
pub(crate) struct Tickets(Mutex<Vec<Arc<Ticket>>>);

impl Tickets {
    pub fn take(&self, seq: u64, timeout: Duration) -> Arc<Ticket> {
        let mut ticket = self.0.lock().pop().unwrap_or_else(|| Arc::new(Ticket::new()));
        match Arc::get_mut(&mut ticket) {
            Some(inner) => inner.reset(seq, timeout),
            None => {
                // Somebody still looks at it: leave it to them.
                let mut fresh = Ticket::new();
                fresh.reset(seq, timeout);
                ticket = Arc::new(fresh);
            }
        }
        ticket
    }

    /// Takes back a ticket that nobody else holds.
    pub fn give(&self, ticket: Arc<Ticket>) {
        if Arc::strong_count(&ticket) == 1 {
            let mut free = self.0.lock();
            if free.len() < 256 {
                free.push(ticket);
            }
        }
    }
}

/// When an operation is overdue.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    let now = Instant::now();
    // A timeout beyond what the clock can add means never; ten years do.
    now.checked_add(timeout).unwrap_or(now + Duration::from_secs(315_360_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callbacks_run_once_whenever_registered() {
        let ticket = Ticket::new();
        assert!(ticket.on_end(Box::new(|| ())).is_none());
        assert_eq!(ticket.end(None).len(), 1);
        assert_eq!(ticket.end(Some(Arc::new(Failure::Aborted { by: None, why: String::new() }))).len(), 0);
        assert_eq!(ticket.state(), State::Done);
        assert!(ticket.on_end(Box::new(|| ())).is_some());
    }

    #[test]
    fn keys_are_never_reused() {
        let tickets = Tickets::default();
        let first = tickets.take(1, Duration::ZERO);
        let key = first.key();
        let address = Arc::as_ptr(&first);
        tickets.give(first);
        let second = tickets.take(2, Duration::ZERO);
        assert_eq!(Arc::as_ptr(&second), address);
        assert_ne!(second.key(), key);
    }
}
