//! The hub: one per process. Whoever waits drives it; a thread drives what nobody waits for.
//!
//! All state is behind one lock, the driver token. A caller that waits takes it and works until its operation has ended,
//! so that a small operation never pays for waking a thread. The progress thread stands aside while anybody does.

mod channel;
mod config;
mod endpoint;
mod engine;
mod failing;
mod message;
mod net;
mod overlap;
mod play;
mod pool;
mod prepare;
mod start;
mod ticket;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crossbeam_queue::SegQueue;
use parking_lot::{Mutex, MutexGuard, RwLock};
use podring_collective::Collective;
use rustc_hash::FxHashMap;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

pub use config::{BadSetting, Config};
pub use endpoint::Address;
pub use pool::Pool;
pub use ticket::{Callback, Keep, State, Ticket};

use crate::error::{Failure, HubError};
use crate::fork::{self, Guarded};
use crate::handshake::{Job, Secret};
use crate::memory::SharedPool;
use crate::wire::HubId;
use channel::Channel;
use engine::{Engine, Request};
use net::Net;
use ticket::{Tickets, deadline};

/// Looks with nothing but a pause between them, where every rank has a core to itself: a few microseconds, in which a
/// peer that is at it too answers.
const SPINS: u32 = 200;
/// How long a waiter yields before it sleeps. It yields even where every rank should have a core: something else may run
/// there, and then the peer that it waits for stands behind this very thread.
const YIELD: Duration = Duration::from_micros(300);
/// How long a report of a failure may take to leave before this process goes on.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// The longest sleep, so that deadlines and interrupts are noticed.
const NAP: Duration = Duration::from_millis(50);

/// The progress thread works or looks for work.
const AWAKE: u8 = 0;
/// It stands aside for a waiter.
const PARKED: u8 = 1;
/// It sleeps until a socket or its bell wakes it.
const ASLEEP: u8 = 2;

struct Shared {
    engine: Mutex<Engine>,
    inbox: SegQueue<Request>,
    /// This process's rank in each open group: for calls that are made ready without the token.
    places: RwLock<FxHashMap<u64, u32>>,
    tickets: Tickets,
    pool: Arc<Pool>,
    memory: SharedPool,
    epoll: Arc<Guarded>,
    bell: Arc<Guarded>,
    address: Address,
    secret: Option<Secret>,
    /// Callers that wait.
    foreground: AtomicUsize,
    /// Waiters that sleep on the sockets: none or one.
    sleepers: AtomicUsize,
    /// Waiters that another one drives for.
    passengers: Mutex<Vec<Thread>>,
    aboard: AtomicUsize,
    progress: AtomicU8,
    thread: Mutex<Option<Thread>>,
    /// Work is under way that nobody may be waiting for.
    busy: AtomicBool,
    spin: AtomicBool,
    closing: AtomicBool,
    generation: u32,
    garbage: Mutex<Vec<Keep>>,
}

/// A handle to the process's hub.
#[derive(Clone)]
pub struct Hub(Arc<Shared>);

/// A group to open.
#[derive(Clone, Debug)]
pub struct ChannelSpec {
    /// The same on all members, different from every other channel of the job.
    pub id: u64,
    /// For messages.
    pub name: String,
    /// This process's rank.
    pub me: u32,
    /// Where each rank is to be found, this one included.
    pub members: Vec<Address>,
}

/// An operation to run.
pub struct Call {
    /// The group.
    pub channel: u64,
    /// Its number in the group: consecutive for collectives, posted in order.
    pub seq: u64,
    /// What to do. Must have been validated.
    pub collective: Collective,
    /// Dropped when the memory is no longer used.
    pub keep: Option<Keep>,
    /// When it is overdue.
    pub timeout: Duration,
    /// The caller waits at once, so nobody else need be woken.
    pub sync: bool,
    /// What must agree on all ranks beside the collective itself; 0 for nothing. Ignored for point-to-point.
    pub mark: u64,
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

/// How long to look before sleeping.
struct Patience {
    since: Option<Instant>,
    looks: u32,
    spin: bool,
}

impl Patience {
    fn new(spin: bool) -> Self {
        Patience { since: None, looks: 0, spin }
    }

    fn reset(&mut self) {
        self.since = None;
        self.looks = 0;
    }

    /// Waits a little; `false` when it is time to sleep.
    fn wait(&mut self) -> bool {
        self.looks += 1;
        if self.spin && self.looks < SPINS {
            std::hint::spin_loop();
            return true;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        rustix::thread::sched_yield();
        since.elapsed() < YIELD
    }
}

impl Hub {
    /// Starts a hub: its sockets and its progress thread.
    pub fn start(config: Config) -> Result<Hub, HubError> {
        fork::install();
        crate::link::shm::permit_reads();
        let mut id = [0u8; 16];
        getrandom::fill(&mut id).map_err(|error| HubError::System {
            what: "random numbers",
            source: std::io::Error::other(error.to_string()),
        })?;
        let me = HubId(u128::from_le_bytes(id));
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let machine = machine();
        let host = config.host.clone().unwrap_or_else(|| machine.clone());
        let name = config.host.clone().unwrap_or(name);
        let net = Net::new(me, &config, host, machine, name)?;
        let memory = SharedPool::default();
        let (epoll, bell, address) = (net.epoll.clone(), net.bell.clone(), net.address.clone());
        let secret = config.secret.clone();
        let shared = Arc::new(Shared {
            engine: Mutex::new(Engine::new(config, net, memory.clone())),
            inbox: SegQueue::new(),
            places: RwLock::default(),
            tickets: Tickets::default(),
            pool: Pool::new(),
            memory,
            epoll,
            bell,
            address,
            secret,
            foreground: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            passengers: Mutex::new(Vec::new()),
            aboard: AtomicUsize::new(0),
            progress: AtomicU8::new(AWAKE),
            thread: Mutex::new(None),
            busy: AtomicBool::new(false),
            spin: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            generation: fork::generation(),
            garbage: Mutex::new(Vec::new()),
        });
        let weak = Arc::downgrade(&shared);
        let handle = std::thread::Builder::new()
            .name("podring-progress".into())
            .spawn(move || {
                while let Some(shared) = weak.upgrade() {
                    if !shared.background() {
                        return;
                    }
                }
            })
            .map_err(|source| HubError::System { what: "progress thread", source })?;
        *shared.thread.lock() = Some(handle.thread().clone());
        Ok(Hub(shared))
    }

    /// Where peers find this process.
    pub fn address(&self) -> &Address {
        &self.0.address
    }

    /// The job's secret, if it comes from outside.
    pub fn secret(&self) -> Option<&Secret> {
        self.0.secret.as_ref()
    }

    /// The pool on which callbacks run.
    pub fn callbacks(&self) -> &Arc<Pool> {
        &self.0.pool
    }

    /// This process made the hub, and wasn't forked from the one that did.
    pub fn check_fork(&self) -> Result<(), HubError> {
        if self.0.generation == fork::generation() { Ok(()) } else { Err(HubError::Forked) }
    }

    /// Lets the members of a job in, and calls them as such from now on.
    pub fn trust(&self, job: Job) {
        self.with(|engine| engine.trust(job));
    }

    /// Opens a group.
    pub fn open(&self, spec: ChannelSpec) -> Result<(), HubError> {
        self.check_fork()?;
        let here = spec.members.iter().filter(|address| address.host == self.0.address.host).count();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let crowded = here > cores;
        self.with(|engine| {
            engine.config.ring = engine.config.ring.min(ring_for(here));
            if engine.channels.contains_key(&spec.id) {
                return Err(HubError::Duplicate { name: spec.name.clone() });
            }
            let mut hosts: Vec<&str> = Vec::new();
            let mut channel = Channel::new(spec.name.clone(), spec.me, spec.members.len());
            for (rank, address) in spec.members.iter().enumerate() {
                let host = hosts.iter().position(|known| *known == address.host).unwrap_or_else(|| {
                    hosts.push(&address.host);
                    hosts.len() - 1
                });
                channel.hosts.push(host as u32);
                if rank as u32 == spec.me {
                    channel.members.push(u32::MAX);
                    continue;
                }
                let endpoint = engine.endpoint(address.hub);
                let peer = &mut engine.endpoints[endpoint as usize];
                peer.address.get_or_insert_with(|| address.clone());
                channel.members.push(endpoint);
                channel.rank_of.insert(endpoint, rank as u32);
            }
            if hosts.len() <= 1 {
                channel.hosts.clear();
            }
            self.0.places.write().insert(spec.id, spec.me);
            engine.open(spec.id, channel);
            Ok(())
        })?;
        // One crowded group is enough to make spinning wrong; the world is opened first.
        if crowded {
            self.0.spin.store(false, Ordering::Relaxed);
        } else if here > 1 {
            self.0.spin.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Closes a group. What is under way in it fails.
    pub fn close(&self, id: u64) {
        if self.check_fork().is_ok() {
            self.0.places.write().remove(&id);
            // Driven at once: this may be the last that this process does.
            self.with(|engine| {
                engine.close(id);
                engine.drive();
            });
            self.0.kick();
        }
    }

    /// Fails a group, on all its members.
    pub fn fail(&self, id: u64, failure: Failure) {
        if self.check_fork().is_ok() {
            // Told from here: the process may end before another thread gets to it.
            self.with(|engine| {
                engine.fail_channel(id, failure, true);
                engine.drive();
            });
            self.0.kick();
        }
    }

    /// Why a group is broken, if it is.
    pub fn failure(&self, id: u64) -> Option<Arc<Failure>> {
        self.check_fork().ok()?;
        self.with(|engine| engine.channels.get(&id).and_then(|channel| channel.failed.clone()))
    }

    /// Operations of a group under way.
    pub fn pending(&self, id: u64) -> usize {
        if self.check_fork().is_err() {
            return 0;
        }
        self.with(|engine| engine.channels.get(&id).map_or(0, |channel| channel.pending))
    }

    /// Bytes of shared memory this process made for links, and bytes kept for reuse.
    pub fn memory(&self) -> (usize, usize) {
        if self.check_fork().is_err() {
            return (0, 0);
        }
        (self.with(|engine| engine.shared_memory()), self.0.memory.kept())
    }

    /// Bytes held of messages that came before anybody here asked for them.
    pub fn early(&self) -> usize {
        if self.check_fork().is_err() {
            return 0;
        }
        self.with(|engine| engine.endpoints.iter().map(|peer| peer.held).sum())
    }

    fn with<R>(&self, act: impl FnOnce(&mut Engine) -> R) -> R {
        let mut engine = self.0.engine.lock();
        let result = act(&mut engine);
        self.0.release(engine, true);
        result
    }

    /// Starts an operation and returns without waiting for anybody.
    pub fn post(&self, call: Call) -> Result<Arc<Ticket>, HubError> {
        self.check_fork()?;
        let shared = &*self.0;
        let ticket = shared.tickets.take(call.seq, call.timeout);
        let sync = call.sync;
        let request = shared.prepare(call, ticket.clone());
        match shared.engine.try_lock() {
            Some(mut engine) => {
                shared.take_inbox(&mut engine);
                engine.submit(request);
                engine.drive();
                shared.release(engine, true);
            }
            None => {
                shared.inbox.push(request);
                shared.serve_inbox();
            }
        }
        if !sync && !ticket.ended() {
            shared.kick();
        }
        Ok(ticket)
    }

    /// Gives a ticket back for reuse.
    pub fn recycle(&self, ticket: Arc<Ticket>) {
        self.0.tickets.give(ticket);
    }

    /// Works until an operation has ended, `limit` has passed, or `interrupted` (asked now and then) says to stop.
    pub fn wait(&self, ticket: &Ticket, limit: Option<Duration>, interrupted: impl FnMut() -> bool) -> Waited {
        let waited = self.drive_until(ticket, limit, interrupted);
        if ticket.state() == State::Failed {
            // Whoever hears of it may end the process at once: the others should know the cause by then.
            self.settle();
        }
        waited
    }

    fn drive_until(&self, ticket: &Ticket, limit: Option<Duration>, mut interrupted: impl FnMut() -> bool) -> Waited {
        if ticket.ended() {
            return Waited::Ended;
        }
        if self.check_fork().is_err() {
            return Waited::TimedOut;
        }
        let shared = &*self.0;
        shared.foreground.fetch_add(1, Ordering::SeqCst);
        let until = limit.map(deadline);
        let mut asked = Instant::now();
        let result = loop {
            if ticket.ended() {
                break Waited::Ended;
            }
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                break Waited::TimedOut;
            }
            if now - asked >= NAP {
                asked = now;
                if interrupted() {
                    break Waited::Interrupted;
                }
            }
            let nap = until.map_or(NAP, |until| (until - now).min(NAP));
            let driver = if shared.sleepers.load(Ordering::SeqCst) == 0 { shared.engine.try_lock() } else { None };
            match driver {
                Some(engine) => shared.drive_for(engine, ticket, nap),
                None => shared.ride(ticket, nap),
            }
        };
        if shared.foreground.fetch_sub(1, Ordering::SeqCst) == 1 {
            shared.hand_over();
        }
        shared.wake_passengers();
        shared.drop_garbage();
        result
    }

    /// Works until what was said of failures has left for the others, at most [`LAST_WORDS`] after it was said: some of
    /// them may have to be called first. `false` if time was up.
    pub fn settle(&self) -> bool {
        while self.check_fork().is_ok() {
            let since = self.with(|engine| {
                engine.endpoints.iter().any(endpoint::Endpoint::has_reports).then(|| {
                    engine.drive();
                    engine.poll_sockets();
                    engine.tick(Instant::now());
                    engine.reported.elapsed()
                })
            });
            match since {
                None => return true,
                Some(since) if since >= LAST_WORDS => return false,
                Some(_) => std::thread::sleep(Duration::from_micros(200)),
            }
        }
        true
    }

    /// Ends the progress thread. Operations under way stay so.
    pub fn shut(&self) {
        self.0.closing.store(true, Ordering::SeqCst);
        self.0.wake_progress();
    }
}

impl Shared {
    fn take_inbox(&self, engine: &mut Engine) -> bool {
        let mut any = false;
        while let Some(request) = self.inbox.pop() {
            engine.submit(request);
            any = true;
        }
        any
    }

    /// Makes sure that what is in the inbox is taken out: by whoever holds the token, or by this thread.
    fn serve_inbox(&self) {
        while !self.inbox.is_empty() {
            let Some(mut engine) = self.engine.try_lock() else { return };
            self.take_inbox(&mut engine);
            engine.drive();
            self.release(engine, false);
        }
    }

    /// Gives the token up, then does what must not be done under it.
    fn release(&self, mut engine: MutexGuard<'_, Engine>, serve: bool) {
        // Whoever hears that an operation has ended may end the process at once, and with it the other threads: what
        // peers must know by then has to be on its way.
        engine.flush_dirty();
        let callbacks = std::mem::take(&mut engine.callbacks);
        if !engine.garbage.is_empty() {
            self.garbage.lock().append(&mut engine.garbage);
        }
        self.busy.store(engine.busy(), Ordering::SeqCst);
        drop(engine);
        for callback in callbacks {
            self.pool.run(callback);
        }
        if serve {
            self.serve_inbox();
        }
    }

    /// Drops memory nobody uses any more. Never under a lock: a drop may take the interpreter's.
    fn drop_garbage(&self) {
        let garbage = {
            let mut garbage = self.garbage.lock();
            if garbage.is_empty() {
                return;
            }
            std::mem::take(&mut *garbage)
        };
        drop(garbage);
    }

    /// Drives until the ticket has ended or about `nap` has passed without that.
    fn drive_for<'a>(&'a self, mut engine: MutexGuard<'a, Engine>, ticket: &Ticket, nap: Duration) {
        let start = Instant::now();
        let mut patience = Patience::new(self.spin.load(Ordering::Relaxed));
        let mut rounds = 0u32;
        let mut ended = engine.ended;
        engine.disarm();
        loop {
            let mut moved = !self.inbox.is_empty() && self.take_inbox(&mut engine);
            moved |= engine.drive();
            if ticket.ended() {
                break;
            }
            if engine.ended != ended {
                ended = engine.ended;
                self.wake_passengers();
                if !engine.callbacks.is_empty() {
                    // Somebody waits for them, perhaps before going on with what this thread waits for.
                    for callback in std::mem::take(&mut engine.callbacks) {
                        self.pool.run(callback);
                    }
                }
            }
            rounds += 1;
            if rounds.is_multiple_of(64) || engine.net.tcp_links > 0 && !moved {
                moved |= engine.poll_sockets();
                let now = Instant::now();
                engine.tick(now);
                if now - start >= nap {
                    break;
                }
            }
            if moved {
                patience.reset();
            } else if !patience.wait() {
                if engine.arm() {
                    let next = engine.tick(Instant::now());
                    if engine.runnable() || ticket.ended() {
                        engine.disarm();
                        continue;
                    }
                    self.release(engine, true);
                    if !self.sleep(next, nap) {
                        return;
                    }
                    let Some(again) = self.engine.try_lock() else { return };
                    engine = again;
                    engine.disarm();
                    engine.poll_sockets();
                    if start.elapsed() >= nap {
                        break;
                    }
                }
                patience.reset();
            }
        }
        self.release(engine, true);
    }

    /// Sleeps until a socket or the bell wakes this process, at most until `next` or `longest`. Only one waiter does: a
    /// second one could miss a ring that the first has answered. `false` if another one sleeps already.
    fn sleep(&self, next: Option<Instant>, longest: Duration) -> bool {
        if self.sleepers.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return false;
        }
        // What was posted before this process counted as asleep rang no bell.
        if self.inbox.is_empty() {
            self.poll(next, longest);
        }
        self.sleepers.store(0, Ordering::SeqCst);
        true
    }

    fn poll(&self, next: Option<Instant>, longest: Duration) {
        let limit = next.map_or(longest, |next| next.saturating_duration_since(Instant::now()).min(longest));
        let time = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        let _ = poll(&mut [PollFd::new(&*self.epoll, PollFlags::IN)], Some(&time));
    }

    /// Another thread drives: sleeps until an operation ends or the token may be free.
    fn ride(&self, ticket: &Ticket, nap: Duration) {
        self.passengers.lock().push(std::thread::current());
        self.aboard.fetch_add(1, Ordering::SeqCst);
        let driven = || self.engine.is_locked() || self.sleepers.load(Ordering::SeqCst) > 0;
        if !ticket.ended() && driven() {
            std::thread::park_timeout(nap.min(Duration::from_millis(1)));
        }
        self.aboard.fetch_sub(1, Ordering::SeqCst);
        let me = std::thread::current().id();
        self.passengers.lock().retain(|thread| thread.id() != me);
    }

    fn wake_passengers(&self) {
        if self.aboard.load(Ordering::SeqCst) > 0 {
            for thread in self.passengers.lock().iter() {
                thread.unpark();
            }
        }
    }

    /// Work was left that nobody waits for: sees to it that somebody does it.
    fn kick(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            endpoint::ring(&self.bell);
        } else if self.foreground.load(Ordering::SeqCst) == 0 {
            self.wake_progress();
        }
    }

    /// The last waiter leaves: the progress thread takes over if there is something to do. If there isn't, it looks after
    /// the sockets again when its nap is over.
    fn hand_over(&self) {
        if self.busy.load(Ordering::SeqCst) || !self.inbox.is_empty() {
            self.wake_progress();
        }
    }

    fn wake_progress(&self) {
        match self.progress.load(Ordering::SeqCst) {
            PARKED => {
                if let Some(thread) = &*self.thread.lock() {
                    thread.unpark();
                }
            }
            ASLEEP => endpoint::ring(&self.bell),
            _ => {}
        }
    }

    /// One stretch of the progress thread; `false` when it is to end.
    fn background(&self) -> bool {
        if self.closing.load(Ordering::SeqCst) || self.generation != fork::generation() {
            return false;
        }
        if self.foreground.load(Ordering::SeqCst) > 0 {
            self.progress.store(PARKED, Ordering::SeqCst);
            if self.foreground.load(Ordering::SeqCst) > 0 {
                std::thread::park_timeout(NAP);
            }
            self.progress.store(AWAKE, Ordering::SeqCst);
            return true;
        }
        let mut patience = Patience::new(false);
        loop {
            if self.foreground.load(Ordering::SeqCst) > 0 {
                return true;
            }
            let Some(mut engine) = self.engine.try_lock() else {
                rustix::thread::sched_yield();
                continue;
            };
            if self.foreground.load(Ordering::SeqCst) > 0 {
                // Looked at under the token: a waiter that sleeps, or is about to, must get the bell itself.
                return true;
            }
            let mut moved = self.take_inbox(&mut engine);
            moved |= engine.drive();
            if !moved {
                moved |= engine.poll_sockets();
            }
            let next = engine.tick(Instant::now());
            let busy = engine.busy();
            if moved || busy && patience.wait() {
                if moved {
                    patience.reset();
                }
                self.release(engine, false);
                continue;
            }
            if engine.runnable() || busy && !engine.arm() {
                self.release(engine, false);
                patience.reset();
                continue;
            }
            self.progress.store(ASLEEP, Ordering::SeqCst);
            self.release(engine, false);
            if !self.garbage.lock().is_empty() {
                let garbage = std::mem::take(&mut *self.garbage.lock());
                self.pool.run(Box::new(move || drop(garbage)));
            }
            if self.inbox.is_empty() && self.foreground.load(Ordering::SeqCst) == 0 {
                self.poll(next, Duration::from_secs(1));
            }
            self.progress.store(AWAKE, Ordering::SeqCst);
            return true;
        }
    }
}

/// The largest ring with which links to all ranks of a host stay within [`SHARED`].
fn ring_for(ranks: usize) -> usize {
    let share = (SHARED / ranks.max(1)).max(SMALLEST_RING);
    1 << (usize::BITS - 1 - share.leading_zeros())
}

/// Shared memory a process may make for its links, in bytes; a control page per link comes on top.
const SHARED: usize = 48 << 20;
/// Below this a ring no longer holds a few eager messages.
const SMALLEST_RING: usize = 64 << 10;

/// This machine and its network namespace: where loopback and abstract sockets mean the same.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let net = std::fs::read_link("/proc/self/ns/net").map(|path| path.display().to_string()).unwrap_or_default();
    format!("{}/{net}", boot.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::interfaces::Selection;

    /// The peer's process may be the next thing to end: with the token, what it was told must have left.
    #[test]
    fn what_is_said_leaves_with_the_token() {
        let config = || Config { interfaces: Selection::parse("lo").unwrap(), ..Config::default() };
        let hubs = [Hub::start(config()).unwrap(), Hub::start(config()).unwrap()];
        let members: Vec<Address> = hubs.iter().map(|hub| hub.address().clone()).collect();
        for (me, hub) in hubs.iter().enumerate() {
            let ids = members.iter().map(|address| address.hub).collect();
            hub.trust(Job { id: 1, secret: Secret::new([7; 32]), members: ids });
            hub.open(ChannelSpec { id: 3, name: "g".into(), me: me as u32, members: members.clone() }).unwrap();
        }
        let why = || Failure::Aborted { by: Some(0), why: "enough".into() };
        let engine = {
            let mut engine = hubs[0].0.engine.lock();
            engine.fail_channel(3, why(), true);
            assert!(engine.endpoints.iter().any(endpoint::Endpoint::has_output));
            engine
        };
        hubs[0].0.release(engine, false);
        let engine = hubs[0].0.engine.lock();
        assert!(!engine.endpoints.iter().any(endpoint::Endpoint::has_output));
        drop(engine);
        assert!(hubs[0].settle());
        let until = Instant::now() + Duration::from_secs(10);
        while hubs[1].failure(3).is_none() {
            assert!(Instant::now() < until, "told");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn links_to_a_crowded_host_stay_within_bounds() {
        for ranks in 1..=700 {
            let ring = ring_for(ranks);
            assert!(ring.is_power_of_two() && ring >= SMALLEST_RING);
            assert!(ring * (ranks - 1) <= 64 << 20, "{ranks} ranks of {ring} bytes");
        }
        assert!(ring_for(8) >= Config::default().ring);
    }
}
