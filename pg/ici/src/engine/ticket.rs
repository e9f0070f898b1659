//! One rank's operation as its caller sees it.

use std::{
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use super::{Failure, group::Group, launch::Task, machine::Machine};
use crate::pjrt::{Buffer, Event, OnReady, PjrtError, Plugin};

/// Waits for the other ranks, or for the device.
const PENDING: u32 = 0;
/// Somebody uses the operation's memory: it can't be ended from elsewhere.
const BUSY: u32 = 1;
/// The device is done; results are to be copied out.
const COMPUTED: u32 = 2;
const DONE: u32 = 3;
const FAILED: u32 = 4;
/// As [`COMPUTED`], but the operation's memory was lent to the device: it can't be ended from elsewhere.
const RETURNED: u32 = 5;

/// In [`Ticket::left`]: it is not known yet.
const UNKNOWN: usize = usize::MAX / 2;

/// How long a waiter looks before it sleeps.
const YIELD: Duration = Duration::from_micros(50);
/// The longest sleep, so that interrupts are noticed.
const NAP: Duration = Duration::from_millis(50);

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

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The operation ended; see its state.
    Ended,
    /// It is still under way.
    TimedOut,
    /// The caller's callback said to stop.
    Interrupted,
}

/// A function to call when an operation ends.
pub type Callback = Box<dyn FnOnce() + Send>;
/// Runs callbacks, never on the calling thread.
pub type Runner = Arc<dyn Fn(Callback) + Send + Sync>;

/// When what happened, in nanoseconds on one clock of the process; 0 for what has not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// This rank called.
    pub called: u64,
    /// This rank came, with its buffers on its device.
    pub arrived: u64,
    /// The last rank came.
    pub gathered: u64,
    /// PJRT's execute was called.
    pub launched: u64,
    /// It returned.
    pub returned: u64,
    /// PJRT said that this rank's device is done.
    pub computed: u64,
    /// The operation was done: the result is in place.
    pub done: u64,
}

/// The clock of [`Times`].
pub fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
}

#[derive(Default)]
struct Inner {
    failure: Option<Arc<Failure>>,
    callbacks: Vec<Callback>,
    task: Option<Task>,
    outputs: SmallVec<[Buffer; 1]>,
    /// Kept until the next operation: an event must not be destroyed by its own callback.
    event: Option<Event>,
    runner: Option<Runner>,
    home: Option<(Arc<Machine>, Weak<Group>)>,
    times: Times,
}

/// Shared by the engine and whoever holds the work.
pub struct Ticket {
    state: AtomicU32,
    seq: AtomicU64,
    key: AtomicU64,
    source: AtomicI32,
    timeout_ms: AtomicU64,
    /// Threads inside [`Ticket::wait`].
    waiters: AtomicUsize,
    /// What the end of an operation that has lent its memory waits for: the plugin's word for each argument, and the device
    /// with every result in place. [`UNKNOWN`] more until that is known, and if the plugin gives no word.
    left: AtomicUsize,
    inner: Mutex<Inner>,
    change: Condvar,
    /// For the plugin's errors; set once.
    plugin: OnceLock<Arc<Plugin>>,
}

/// Apart from the keys of other engines, which count up from one.
static KEYS: AtomicU64 = AtomicU64::new(1 << 62);

impl Default for Ticket {
    fn default() -> Self {
        Ticket {
            state: AtomicU32::new(PENDING),
            seq: AtomicU64::new(0),
            key: AtomicU64::new(0),
            source: AtomicI32::new(-1),
            timeout_ms: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
            inner: Mutex::default(),
            change: Condvar::new(),
            plugin: OnceLock::new(),
        }
    }
}

/// Tickets kept for reuse.
#[derive(Default)]
pub(super) struct Free(Mutex<Vec<Arc<Ticket>>>);

/// How many at most.
const FREE: usize = 64;

impl Free {
    /// A ticket for an operation that begins: one that nobody else has any more, or a new one.
    pub fn take(&self, seq: u64, timeout: Duration, runner: &Runner) -> Arc<Ticket> {
        let known = {
            let mut free = self.0.lock();
            let place = free.iter().position(|ticket| Arc::strong_count(ticket) == 1);
            place.map(|place| free.swap_remove(place))
        };
        let mut ticket = known.unwrap_or_default();
        match Arc::get_mut(&mut ticket) {
            Some(inner) => inner.reset(seq, timeout, runner.clone()),
            None => ticket = Ticket::manual(seq, timeout, runner.clone()),
        }
        ticket
    }

    /// Lends a ticket again once whoever holds it has let go.
    pub fn give(&self, ticket: Arc<Ticket>) {
        let mut free = self.0.lock();
        if free.len() < FREE {
            free.push(ticket);
        }
    }
}

impl Ticket {
    /// A ticket that its maker ends, by [`Ticket::end`].
    pub fn manual(seq: u64, timeout: Duration, runner: Runner) -> Arc<Ticket> {
        let mut ticket = Ticket::default();
        ticket.reset(seq, timeout, runner);
        Arc::new(ticket)
    }

    pub(super) fn reset(&mut self, seq: u64, timeout: Duration, runner: Runner) {
        *self.state.get_mut() = PENDING;
        *self.seq.get_mut() = seq;
        *self.key.get_mut() = KEYS.fetch_add(1, SeqCst);
        *self.source.get_mut() = -1;
        *self.timeout_ms.get_mut() = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        *self.left.get_mut() = UNKNOWN;
        let inner = self.inner.get_mut();
        inner.failure = None;
        inner.callbacks.clear();
        inner.task = None;
        inner.outputs.clear();
        inner.event = None;
        inner.runner = Some(runner);
        inner.times = Times::default();
    }

    pub(super) fn settle(&mut self, machine: &Arc<Machine>, group: Weak<Group>) {
        let _ = self.plugin.set(machine.client().plugin().clone());
        self.inner.get_mut().home = Some((machine.clone(), group));
    }

    /// How far it is.
    pub fn state(&self) -> State {
        match self.state.load(SeqCst) {
            DONE => State::Done,
            FAILED => State::Failed,
            _ => State::Pending,
        }
    }

    /// Whether it has ended, well or not.
    pub fn ended(&self) -> bool {
        self.state() != State::Pending
    }

    /// Why it failed, if it did.
    pub fn failure(&self) -> Option<Arc<Failure>> {
        match self.state() {
            State::Failed => self.inner.lock().failure.clone(),
            _ => None,
        }
    }

    /// Its number in the group.
    pub fn seq(&self) -> u64 {
        self.seq.load(SeqCst)
    }

    /// A number no other operation of this process has.
    pub fn key(&self) -> u64 {
        self.key.load(SeqCst)
    }

    /// Its deadline, from the call on.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(SeqCst))
    }

    /// Whom a receive got its message from.
    pub fn source(&self) -> Option<u32> {
        u32::try_from(self.source.load(SeqCst)).ok()
    }

    pub(super) fn set_source(&self, rank: u32) {
        self.source.store(rank as i32, SeqCst);
    }

    /// When what happened.
    pub fn times(&self) -> Times {
        self.inner.lock().times
    }

    pub(super) fn stamp(&self, set: impl FnOnce(&mut Times)) {
        set(&mut self.inner.lock().times);
    }

    /// The results of an operation on device buffers, once it is done: one buffer per part.
    pub fn take_outputs(&self) -> SmallVec<[Buffer; 1]> {
        if self.state() == State::Done { std::mem::take(&mut self.inner.lock().outputs) } else { SmallVec::new() }
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

    /// From now on the operation's memory is in use. `false` if it has ended already.
    pub(super) fn hold(&self) -> bool {
        self.state.compare_exchange(PENDING, BUSY, SeqCst, SeqCst).is_ok()
    }

    /// Whether its memory is in use.
    pub(super) fn held(&self) -> bool {
        matches!(self.state.load(SeqCst), BUSY | RETURNED)
    }

    /// Threads that wait for it.
    pub(super) fn waiters(&self) -> usize {
        self.waiters.load(SeqCst)
    }

    /// The program is on its way: what is left to do when it is done. Memory that the device has stays in use.
    pub(super) fn flying(&self, task: Task, outputs: SmallVec<[Buffer; 1]>) {
        let mut inner = self.inner.lock();
        let lends = task.arrival.lends();
        inner.task = Some(task);
        inner.outputs = outputs;
        if !lends {
            self.state.store(PENDING, SeqCst);
        }
    }

    /// Ends an operation in flight whose memory is lent and whose event tells nobody; `false` if none is lent.
    pub(super) fn end_unwatched(&self, failure: &Arc<Failure>) -> bool {
        let (task, outputs, event) = {
            let mut inner = self.inner.lock();
            if !inner.task.as_ref().is_some_and(|task| task.arrival.lends()) {
                return false;
            }
            (inner.task.take(), std::mem::take(&mut inner.outputs), inner.event.take())
        };
        if let Some(Err(error)) = event.map(|event| event.wait()) {
            tracing::warn!(%error, "a launched program that couldn't be watched");
        }
        drop(outputs);
        if let Some(mut task) = task {
            task.arrival.take_back();
        }
        self.end_held(Some(failure.clone()));
        true
    }

    /// Results that stay on the device, for [`Ticket::take_outputs`].
    pub(super) fn deliver(&self, outputs: SmallVec<[Buffer; 1]>) {
        self.inner.lock().outputs = outputs;
    }

    pub(super) fn keep_event(&self, event: Event) {
        self.inner.lock().event = Some(event);
    }

    /// Ends it, unless it has ended or its memory is in use. Callbacks run elsewhere.
    pub fn end(&self, failure: Option<Arc<Failure>>) {
        self.end_from(&[PENDING, COMPUTED], failure);
    }

    /// Ends it for whoever holds it.
    pub(super) fn end_held(&self, failure: Option<Arc<Failure>>) {
        self.end_from(&[BUSY, PENDING, COMPUTED, RETURNED], failure);
    }

    fn end_from(&self, from: &[u32], failure: Option<Arc<Failure>>) {
        let (task, outputs, callbacks, runner) = {
            let mut inner = self.inner.lock();
            let state = self.state.load(SeqCst);
            if !from.contains(&state) {
                return;
            }
            let to = if failure.is_some() { FAILED } else { DONE };
            if self.state.compare_exchange(state, to, SeqCst, SeqCst).is_err() {
                return;
            }
            let failed = failure.is_some();
            inner.failure = failure;
            inner.times.done = now();
            let outputs = if failed { std::mem::take(&mut inner.outputs) } else { SmallVec::new() };
            (inner.task.take(), outputs, std::mem::take(&mut inner.callbacks), inner.runner.clone())
        };
        if self.waiters.load(SeqCst) > 0 {
            self.change.notify_all();
        }
        if let Some(runner) = runner {
            for callback in callbacks {
                runner(callback);
            }
            if let Some(keep) = task.and_then(|task| task.arrival.keep) {
                // What lets go of the memory may do anything: never on a thread of the plugin's.
                runner(Box::new(move || drop(keep)));
            }
        }
        drop(outputs);
    }

    /// Copies results out if they wait for it; `false` if they don't, or somebody else does it.
    pub(super) fn finish(&self) -> bool {
        self.copy_out(false)
    }

    /// `in_callback`: on a thread of the plugin's, where nothing of the caller's may run.
    fn copy_out(&self, in_callback: bool) -> bool {
        let claimed = |from| self.state.compare_exchange(from, BUSY, SeqCst, SeqCst).is_ok();
        if !claimed(COMPUTED) && !claimed(RETURNED) {
            return false;
        }
        let (task, outputs, home, runner) = {
            let mut inner = self.inner.lock();
            (inner.task.take(), std::mem::take(&mut inner.outputs), inner.home.clone(), inner.runner.clone())
        };
        let mut failure = None;
        if let (Some(mut task), Some((machine, group))) = (task, home) {
            failure = task.failure.take();
            if failure.is_none() {
                failure = task.copy_out(&machine, &outputs).err().map(Arc::new);
            }
            drop(outputs);
            if task.arrival.lends() {
                // Never on a thread of the plugin's, which this waits for: there nothing that was lent is copied.
                task.arrival.take_back();
                if failure.is_none() {
                    failure = group.upgrade().and_then(|group| group.failure());
                }
            }
            if in_callback && let (Some(keep), Some(runner)) = (task.arrival.keep.take(), runner) {
                runner(Box::new(move || drop(keep)));
            }
            // The memory's keeper goes with the task, before anybody is told.
            drop(task);
            if let (Some(failure), Some(group)) = (&failure, group.upgrade()) {
                group.fail(failure.clone());
            }
        }
        self.end_held(failure);
        true
    }

    /// Waits until it has ended, `limit` has passed, or `interrupted` (asked now and then) says to stop.
    pub fn wait(&self, limit: Option<Duration>, mut interrupted: impl FnMut() -> bool) -> Waited {
        if self.ended() {
            return Waited::Ended;
        }
        self.waiters.fetch_add(1, SeqCst);
        let start = Instant::now();
        let outcome = loop {
            if self.ended() {
                break Waited::Ended;
            }
            if self.finish() {
                continue;
            }
            let passed = start.elapsed();
            if limit.is_some_and(|limit| passed >= limit) {
                break Waited::TimedOut;
            }
            if passed < YIELD {
                std::thread::yield_now();
                continue;
            }
            let mut inner = self.inner.lock();
            if !matches!(self.state.load(SeqCst), PENDING | BUSY) {
                continue;
            }
            let nap = limit.map_or(NAP, |limit| limit.saturating_sub(passed).min(NAP));
            let slept = self.change.wait_for(&mut inner, nap);
            drop(inner);
            if slept.timed_out() && interrupted() {
                break Waited::Interrupted;
            }
        };
        self.waiters.fetch_sub(1, SeqCst);
        if outcome != Waited::Ended {
            self.pass_on();
        }
        outcome
    }

    /// Results that nobody waits for are copied out by the machine's own thread.
    fn pass_on(self: &Ticket) {
        if !matches!(self.state.load(SeqCst), COMPUTED | RETURNED) || self.waiters.load(SeqCst) > 0 {
            return;
        }
        let home = self.inner.lock().home.clone();
        if let Some((machine, _)) = home {
            machine.look_for_results();
        }
    }
}

impl Ticket {
    /// As many arguments are the caller's memory; `watched` if the plugin will tell of each when it is done with it.
    pub(super) fn lends(&self, arguments: usize, watched: bool) {
        // Some may be done already.
        let unknown = if watched { UNKNOWN } else { 0 };
        self.left.fetch_add(arguments + 1, SeqCst);
        self.less(unknown);
    }

    /// So much less is left; nothing ends the operation.
    fn less(&self, by: usize) {
        if self.left.fetch_sub(by, SeqCst) == by && by > 0 {
            let (failure, group) = {
                let inner = self.inner.lock();
                let failure = inner.task.as_ref().and_then(|task| task.failure.clone());
                (failure, inner.home.as_ref().and_then(|(_, group)| group.upgrade()))
            };
            self.end_held(failure.or_else(|| group.and_then(|group| group.failure())));
        }
    }

    /// The device is done with an operation that has lent it the caller's memory. On a thread of the plugin's, which
    /// mustn't wait for the plugin: if results are to be copied, or the plugin will not tell, another thread does it.
    fn returned(&self, outcome: Result<(), PjrtError>) {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let Some(task) = &mut inner.task else { return };
        let group = inner.home.as_ref().and_then(|(_, group)| group.upgrade());
        let failure = outcome.err().map(|error| Arc::new(task.failed("running", error)));
        let landed = failure.is_some() || task.landed(&inner.outputs);
        if let (true, None, Some((machine, _))) = (landed, &failure, &inner.home) {
            machine.landed.fetch_add(1, SeqCst);
        }
        task.failure = failure.clone();
        // What was donated is the results' by now. Dropped outside the lock: that may release the memory at once.
        let inputs = std::mem::take(&mut task.arrival.inputs);
        let outputs = if landed { std::mem::take(&mut inner.outputs) } else { SmallVec::new() };
        drop(guard);
        drop((inputs, outputs));
        if let (Some(failure), Some(group)) = (&failure, &group) {
            group.fail(failure.clone());
        }
        if landed && self.left.load(SeqCst) < UNKNOWN {
            self.less(1);
            return;
        }
        self.state.store(RETURNED, SeqCst);
        if self.waiters.load(SeqCst) > 0 {
            self.change.notify_all();
        } else {
            self.pass_on();
        }
    }
}

/// The name of a machine's own thread.
pub(super) const CHORES: &str = "podring-ici";

impl OnReady for Ticket {
    fn plugin(&self) -> Option<&Arc<Plugin>> {
        self.plugin.get()
    }

    fn released(&self, outcome: Result<(), PjrtError>) {
        if let Err(error) = outcome {
            tracing::warn!(%error, "memory that was lent to a device");
        }
        self.less(1);
    }

    fn ready(&self, outcome: Result<(), PjrtError>) {
        let mut inner = self.inner.lock();
        inner.times.computed = now();
        if inner.task.as_ref().is_some_and(|task| task.arrival.lends()) {
            drop(inner);
            self.returned(outcome);
            return;
        }
        let Some(task) = &inner.task else { return };
        if let Err(error) = outcome {
            let failure = Arc::new(task.failed("running", error));
            let group = inner.home.as_ref().and_then(|(_, group)| group.upgrade());
            drop(inner);
            if let Some(group) = group {
                group.fail(failure.clone());
            }
            self.end(Some(failure));
            return;
        }
        if !task.copies() {
            drop(inner);
            self.end(None);
            return;
        }
        let at_once = inner.home.as_ref().is_some_and(|(machine, _)| task.copies_at_once(machine));
        let changed = self.state.compare_exchange(PENDING, COMPUTED, SeqCst, SeqCst).is_ok();
        drop(inner);
        if changed && at_once {
            self.copy_out(true);
        } else if changed {
            if self.waiters.load(SeqCst) > 0 {
                self.change.notify_all();
            } else {
                self.pass_on();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runner() -> Runner {
        Arc::new(|callback: Callback| drop(std::thread::spawn(callback)))
    }

    #[test]
    fn callbacks_run_once_whenever_registered() {
        let ticket = Ticket::manual(3, Duration::from_secs(1), runner());
        let (send, receive) = std::sync::mpsc::channel();
        let other = send.clone();
        assert!(ticket.on_end(Box::new(move || send.send(1).unwrap())).is_none());
        ticket.end(None);
        ticket.end(Some(Arc::new(Failure::Aborted { by: None, why: "late".into() })));
        assert_eq!(receive.recv_timeout(Duration::from_secs(10)), Ok(1));
        assert_eq!((ticket.state(), ticket.failure()), (State::Done, None));
        ticket.on_end(Box::new(move || other.send(2).unwrap())).unwrap()();
        assert_eq!(receive.recv_timeout(Duration::from_secs(10)), Ok(2));
    }

    #[test]
    fn a_wait_ends_by_limit_interrupt_or_end() {
        let ticket = Ticket::manual(0, Duration::from_secs(1), runner());
        assert_eq!(ticket.wait(Some(Duration::from_millis(5)), || false), Waited::TimedOut);
        assert_eq!(ticket.wait(None, || true), Waited::Interrupted);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| ticket.wait(Some(Duration::from_secs(60)), || false));
            std::thread::sleep(Duration::from_millis(20));
            ticket.end(None);
            assert_eq!(waiter.join().unwrap(), Waited::Ended);
        });
    }

    #[test]
    fn what_is_held_ends_only_for_the_holder() {
        let ticket = Ticket::manual(0, Duration::from_secs(1), runner());
        assert!(ticket.hold() && !ticket.hold());
        ticket.end(None);
        assert!(!ticket.ended());
        ticket.end_held(None);
        assert!(ticket.ended() && !ticket.hold());
    }
}
