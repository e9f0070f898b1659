//! A process group: the operations of one set of ranks, in the order they are called.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use podring_collective::{Collective, Kind as Op};
use podring_fabric::error::Failure;
use podring_fabric::fork;
use podring_fabric::hub::{self, Call, Callback, ChannelSpec, Hub, Keep, State, Ticket, Waited};
use rustc_hash::FxHashMap;

use crate::error::Error;
use crate::membership::StoreMembership;
use crate::store::Store;
use crate::watchdog::{Watchdog, Watched};
use crate::world::{Current, Forming, World, channel, form};

/// How long an orderly end waits for what is under way.
const LINGER: Duration = Duration::from_secs(5);

/// What a process has of podring: its hub and what groups share.
struct Process {
    hub: Hub,
    watchdog: Arc<Watchdog>,
    current: Mutex<Current>,
    /// How often a group of each name was made.
    epochs: Mutex<FxHashMap<String, u64>>,
    generation: u32,
}

/// The process's, made by the first group. Forked children make their own; the parent's is left alone, since its locks
/// may be held by threads that don't exist in the child.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
static MAKING: AtomicU32 = AtomicU32::new(u32::MAX);

fn process() -> Result<&'static Process, Error> {
    loop {
        let known = PROCESS.load(Ordering::Acquire);
        // SAFETY: set once to a leaked box, never freed.
        if let Some(process) = unsafe { known.as_ref() }
            && process.generation == fork::generation()
        {
            return Ok(process);
        }
        // One thread makes it. A maker's mark from before a fork doesn't count.
        let generation = fork::generation();
        let mark = MAKING.load(Ordering::Acquire);
        if mark == generation {
            std::thread::yield_now();
            continue;
        }
        if MAKING.compare_exchange(mark, generation, Ordering::AcqRel, Ordering::Acquire).is_err() {
            continue;
        }
        let made = make(generation);
        if let Ok(process) = &made {
            PROCESS.store(std::ptr::from_ref::<Process>(process).cast_mut(), Ordering::Release);
        }
        MAKING.store(u32::MAX, Ordering::Release);
        return made;
    }
}

fn make(generation: u32) -> Result<&'static Process, Error> {
    let hub = Hub::start(hub::Config::from_lookup(|name| std::env::var(name).ok())?)?;
    Ok(Box::leak(Box::new(process_over(hub, generation))))
}

fn process_over(hub: Hub, generation: u32) -> Process {
    Process {
        hub,
        watchdog: Arc::new(Watchdog::default()),
        current: Mutex::new(Current::default()),
        epochs: Mutex::new(FxHashMap::default()),
        generation,
    }
}

pub(crate) fn drain(limit: Duration) -> bool {
    let known = PROCESS.load(Ordering::Acquire);
    // SAFETY: as in `process`.
    match unsafe { known.as_ref() } {
        Some(process) if process.generation == fork::generation() => process.hub.callbacks().drain(limit),
        _ => true,
    }
}

/// What makes a group.
pub struct Config {
    /// This rank within it.
    pub rank: u32,
    /// How many members.
    pub size: u32,
    /// Its name: the same on all members, unique in the job at a time.
    pub name: String,
    /// Each member's rank in the default group; `None` for the default group itself.
    pub global_ranks: Option<Vec<u32>>,
    /// For operations that bring no limit of their own, and for forming the group.
    pub timeout: Duration,
    /// A store of the group's own.
    pub store: Arc<dyn Store>,
}

struct Inner {
    process: Source,
    name: String,
    rank: u32,
    size: u32,
    channel: u64,
    /// The default world this group stands for, forgotten with it.
    world: Option<u128>,
    timeout_ms: AtomicU64,
    /// The next collective's number. Held while posting, so that numbers and posts have one order.
    next: StdMutex<u64>,
    /// The next point-to-point operation's number, for messages only.
    direct: AtomicU64,
    barriers: AtomicU64,
    closed: AtomicBool,
    store: Arc<dyn Store>,
    epoch: u64,
    _watched: Arc<Watched>,
}

/// Where a group's process-wide state is: the real process's, or a test's own.
enum Source {
    Global(&'static Process),
    #[cfg(test)]
    Own(Arc<Process>),
}

impl std::ops::Deref for Source {
    type Target = Process;

    fn deref(&self) -> &Process {
        match self {
            Source::Global(process) => process,
            #[cfg(test)]
            Source::Own(process) => process,
        }
    }
}

/// A process group.
#[derive(Clone)]
pub struct ProcessGroup(Arc<Inner>);

impl ProcessGroup {
    /// Forms a group: returns when every member is known.
    ///
    /// Within a default group that podring formed, a group is a function of its members, and nobody is waited for.
    pub fn form(config: Config, interrupted: impl FnMut() -> bool) -> Result<Self, Error> {
        Self::form_in(Source::Global(process()?), config, interrupted)
    }

    fn form_in(process: Source, config: Config, interrupted: impl FnMut() -> bool) -> Result<Self, Error> {
        let Config { rank, size, name, global_ranks, timeout, store } = config;
        process.hub.check_fork()?;
        let epoch = {
            let mut epochs = process.epochs.lock();
            let count = epochs.entry(name.clone()).or_insert(0);
            *count += 1;
            *count - 1
        };
        let current = process.current.lock().get();
        let within = global_ranks.as_ref().zip(current).filter(|(ranks, world)| {
            ranks.len() == size as usize
                && ranks.iter().all(|&global| (global as usize) < world.members.len())
                && ranks.get(rank as usize).is_some_and(|&me| world.members[me as usize] == *process.hub.address())
        });
        let (world, stands_for) = match within {
            Some((ranks, world)) => {
                let members = ranks.iter().map(|&global| world.members[global as usize].clone()).collect();
                (Arc::new(World { members, ..(*world).clone() }), None)
            }
            None => {
                let address = process.hub.address();
                let forming = Forming { name: &name, epoch, rank, size, timeout, address };
                let world = Arc::new(form(&*store, &forming, interrupted)?);
                process.hub.trust(world.token);
                if global_ranks.is_none() {
                    process.current.lock().set(world.clone());
                    (world.clone(), Some(world.id))
                } else {
                    (world, None)
                }
            }
        };
        let id = channel(world.id, &name, epoch);
        process.hub.open(ChannelSpec { id, name: name.clone(), me: rank, members: world.members.clone() })?;
        let membership = Box::new(StoreMembership::new(store.clone(), epoch));
        let watched = Arc::new(Watched { channel: id, membership, told: Mutex::new(size < 2) });
        process.watchdog.watch(&process.hub, &watched);
        Ok(ProcessGroup(Arc::new(Inner {
            process,
            name,
            rank,
            size,
            channel: id,
            world: stands_for,
            timeout_ms: AtomicU64::new(millis(timeout)),
            next: StdMutex::new(0),
            direct: AtomicU64::new(0),
            barriers: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            store,
            epoch,
            _watched: watched,
        })))
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.0.rank
    }

    /// How many members.
    pub fn size(&self) -> u32 {
        self.0.size
    }

    /// For operations that bring no limit of their own.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.0.timeout_ms.load(Ordering::Relaxed))
    }

    /// Changes it for operations to come.
    pub fn set_timeout(&self, timeout: Duration) {
        self.0.timeout_ms.store(millis(timeout), Ordering::Relaxed);
    }

    /// Collectives posted so far.
    pub fn sequence(&self) -> u64 {
        *self.0.next.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn failed(&self, failure: Arc<Failure>) -> Error {
        Error::Failed { group: self.0.name.clone(), rank: self.0.rank, failure }
    }

    /// Why the group is broken, if it is.
    pub fn error(&self) -> Option<Error> {
        self.0.process.hub.failure(self.0.channel).map(|failure| self.failed(failure))
    }

    /// Starts an operation. `keep` is dropped when its memory is no longer used, also if this fails. With `sync` the
    /// caller waits at once. `timeout` `None`: the group's.
    pub fn post(
        &self,
        collective: Collective,
        keep: Option<Keep>,
        timeout: Option<Duration>,
        sync: bool,
    ) -> Result<Work, Error> {
        let inner = &self.0;
        inner.process.hub.check_fork()?;
        collective.validate(inner.rank, inner.size).map_err(|source| Error::Invalid { rank: inner.rank, source })?;
        if inner.closed.load(Ordering::Relaxed) {
            let why = format!("{} after destroy_process_group", collective.kind.name());
            return Err(self.failed(Arc::new(Failure::Aborted { by: None, why })));
        }
        let op = collective.kind;
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let call = |seq| Call { channel: inner.channel, seq, collective, keep, timeout, sync };
        let ticket = if op.is_point_to_point() {
            inner.process.hub.post(call(inner.direct.fetch_add(1, Ordering::Relaxed)))?
        } else {
            let mut next = inner.next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let ticket = inner.process.hub.post(call(*next))?;
            *next += 1;
            ticket
        };
        Ok(Work { group: self.clone(), op, ticket: Some(ticket) })
    }

    /// Fails everything under way and to come, on all members.
    pub fn abort(&self, why: &str) {
        let failure = Failure::Aborted { by: Some(self.0.rank), why: why.to_owned() };
        self.0.process.hub.fail(self.0.channel, failure);
    }

    /// The orderly end of this rank's part: waits a while for what is under way, then closes.
    pub fn shutdown(&self) {
        let inner = &self.0;
        if inner.closed.swap(true, Ordering::SeqCst) || inner.process.hub.check_fork().is_err() {
            return;
        }
        let end = Instant::now() + LINGER.min(self.timeout());
        while inner.process.hub.pending(inner.channel) > 0
            && inner.process.hub.failure(inner.channel).is_none()
            && Instant::now() < end
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(world) = inner.world {
            inner.process.current.lock().clear(world);
        }
        inner.process.hub.close(inner.channel);
    }

    /// torch's monitored barrier, over the store, so that it works while the group doesn't: rank 0 waits for every rank's
    /// arrival and names who is missing, the first or (`all`) every one; the others wait for rank 0's word.
    pub fn monitored_barrier(
        &self,
        timeout: Option<Duration>,
        all: bool,
        mut interrupted: impl FnMut() -> bool,
    ) -> Result<(), Error> {
        let inner = &self.0;
        inner.process.hub.check_fork()?;
        let (rank, size) = (inner.rank, inner.size);
        let failed = |source| Error::Store { rank, source };
        let number = inner.barriers.fetch_add(1, Ordering::Relaxed);
        let base = format!("podring/{}/barrier/{number}", inner.epoch);
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let missing = |missing: Vec<u32>| Error::Missing {
            what: "monitored_barrier",
            present: size as usize - missing.len(),
            missing,
            size,
            after_ms: millis(timeout),
            group: inner.name.clone(),
            rank,
        };
        let mut wait = |keys: &[String]| -> Result<bool, Error> {
            let end = Instant::now() + timeout;
            let mut pause = Duration::from_micros(100);
            while !inner.store.check(keys).map_err(failed)? {
                if Instant::now() >= end {
                    return Ok(false);
                }
                if interrupted() {
                    return Err(Error::Interrupted);
                }
                std::thread::sleep(pause);
                pause = (pause * 3 / 2).min(Duration::from_millis(10));
            }
            Ok(true)
        };
        if rank != 0 {
            inner.store.set(&format!("{base}/{rank}"), b"1").map_err(failed)?;
            let done = format!("{base}/done");
            return if wait(std::slice::from_ref(&done))? {
                let verdict = inner.store.get(&done).map_err(failed)?;
                let absent: Vec<u32> = serde_json::from_slice(&verdict).unwrap_or_default();
                if absent.is_empty() { Ok(()) } else { Err(missing(absent)) }
            } else {
                Err(missing(vec![0]))
            };
        }
        let keys: Vec<String> = (1..size).map(|rank| format!("{base}/{rank}")).collect();
        let mut absent = Vec::new();
        if !keys.is_empty() && !wait(&keys)? {
            for (index, key) in keys.iter().enumerate() {
                if !inner.store.check(std::slice::from_ref(key)).map_err(failed)? {
                    absent.push(index as u32 + 1);
                    if !all {
                        break;
                    }
                }
            }
        }
        let verdict = serde_json::to_vec(&absent).unwrap_or_default();
        inner.store.set(&format!("{base}/done"), &verdict).map_err(failed)?;
        if absent.is_empty() { Ok(()) } else { Err(missing(absent)) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !*self.closed.get_mut() && self.process.hub.check_fork().is_ok() {
            if let Some(world) = self.world {
                self.process.current.lock().clear(world);
            }
            self.process.hub.close(self.channel);
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// An operation under way or ended.
pub struct Work {
    group: ProcessGroup,
    op: Op,
    ticket: Option<Arc<Ticket>>,
}

impl Work {
    fn ticket(&self) -> &Arc<Ticket> {
        match &self.ticket {
            Some(ticket) => ticket,
            // Taken only in drop.
            None => unreachable!("work used after drop"),
        }
    }

    /// Works on it until it has ended. With a limit, gives up after that long and leaves it under way.
    pub fn wait(&self, limit: Option<Duration>, interrupted: impl FnMut() -> bool) -> Result<(), Error> {
        let ticket = self.ticket();
        match self.group.0.process.hub.wait(ticket, limit, interrupted) {
            Waited::Ended => self.error().map_or(Ok(()), Err),
            Waited::Interrupted => Err(Error::Interrupted),
            Waited::TimedOut => {
                self.group.0.process.hub.check_fork()?;
                Err(Error::WaitTimeout {
                    op: self.op.name(),
                    seq: ticket.seq(),
                    after_ms: limit.map_or(0, millis),
                    group: self.group.0.name.clone(),
                    rank: self.group.0.rank,
                })
            }
        }
    }

    /// How far it is.
    pub fn state(&self) -> State {
        self.ticket().state()
    }

    /// Why it failed, if it did.
    pub fn error(&self) -> Option<Error> {
        self.ticket().failure().map(|failure| self.group.failed(failure))
    }

    /// Its number in the group; for point-to-point, among those.
    pub fn sequence(&self) -> u64 {
        self.ticket().seq()
    }

    /// A number no other work of this process has.
    pub fn key(&self) -> u64 {
        self.ticket().key()
    }

    /// Its deadline, from the call on.
    pub fn timeout(&self) -> Duration {
        self.ticket().timeout()
    }

    /// Whom a receive got its message from.
    pub fn source(&self) -> Option<u32> {
        self.ticket().source()
    }

    /// Calls `callback` once when it has ended: at once if it has, else on the callback pool.
    pub fn on_end(&self, callback: Callback) {
        if let Some(callback) = self.ticket().on_end(callback) {
            callback();
        }
    }

    /// Fails it, and with it the group.
    pub fn abort(&self) {
        self.group.abort(&format!("{}, seq {}, was aborted", self.op.name(), self.sequence()));
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.group.0.process.hub.recycle(ticket);
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
