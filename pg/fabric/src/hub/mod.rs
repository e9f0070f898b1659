//! The hub: one per process. Whoever waits drives it; a thread drives what nobody waits for.
//!
//! All state is behind one lock, the driver token. A caller that waits takes it and works until its operation has ended,
//! so that a small operation never pays for waking a thread. The progress thread stands aside while anybody does.

mod channel;
mod config;
mod drive;
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
use parking_lot::{Mutex, RwLock};
use podring_collective::Collective;
use rustc_hash::FxHashMap;

pub use config::Config;
pub use endpoint::Address;
pub use pool::Pool;
pub use ticket::{Callback, Keep, State, Ticket};

use crate::error::{Failure, HubError};
use crate::fork::{self, Guarded};
use crate::handshake::{Job, Secret};
use crate::memory::SharedPool;
use crate::wire::HubId;
use channel::Channel;
use endpoint::Endpoint;
use engine::{Engine, Request};
use net::Net;
use ticket::Tickets;

/// How often it is looked whether a report of a failure has left before this process goes on. Counted and not timed: a
/// process that stood still meanwhile still has its say.
const LOOKS: u32 = 2500;
const LOOK: Duration = Duration::from_micros(200);

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
            progress: AtomicU8::new(drive::AWAKE),
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
        // In a forked child the lock may be one that a thread held which isn't there.
        if self.check_fork().is_ok() {
            self.0.tickets.give(ticket);
        } else {
            std::mem::forget(ticket);
        }
    }

    /// Works until an operation has ended, `limit` has passed, or `interrupted` (asked now and then) says to stop. On a
    /// caller's thread: [`Keep`]s of operations that ended meanwhile are let go of on it.
    pub fn wait(&self, ticket: &Ticket, limit: Option<Duration>, interrupted: impl FnMut() -> bool) -> Waited {
        self.wait_then(ticket, limit, interrupted, Shared::drop_garbage)
    }

    /// The same on a thread that isn't a caller's, such as a runtime's in the middle of a program: nothing of a caller's
    /// runs on it. A runtime may forbid that (torch_tpu ends the process if a tensor goes on a thread that runs its
    /// programs), and who waits for the program may hold a lock that the caller's function takes.
    pub fn wait_as_guest(&self, ticket: &Ticket, limit: Option<Duration>, interrupted: impl FnMut() -> bool) -> Waited {
        self.wait_then(ticket, limit, interrupted, Shared::drop_garbage_elsewhere)
    }

    fn wait_then(
        &self,
        ticket: &Ticket,
        limit: Option<Duration>,
        interrupted: impl FnMut() -> bool,
        let_go: impl FnOnce(&Shared),
    ) -> Waited {
        let waited = if ticket.ended() {
            Waited::Ended
        } else if self.check_fork().is_err() {
            Waited::TimedOut
        } else {
            let waited = self.0.drive_until(ticket, limit, interrupted);
            let_go(&self.0);
            waited
        };
        if ticket.state() == State::Failed {
            // Whoever hears of it may end the process at once: the others should know the cause by then.
            self.settle();
        }
        waited
    }

    /// Works until what was said of failures has left for the others: some of them may have to be called first. `false`
    /// if it hadn't after [`LOOKS`] at it, some half a second; that of those who asked before counts.
    pub fn settle(&self) -> bool {
        self.flush_until(|engine| {
            engine.settling += 1;
            match engine.endpoints.iter().any(Endpoint::has_reports) {
                true => (engine.settling >= LOOKS).then_some(false),
                false => Some(true),
            }
        })
    }

    /// The same for all that was said or sent: the process is about to end.
    pub fn finish(&self) -> bool {
        let mut looks = 0;
        self.flush_until(|engine| {
            looks += 1;
            match engine.endpoints.iter().any(|peer| peer.dead.is_none() && peer.has_output()) {
                true => (looks >= LOOKS).then_some(false),
                false => Some(true),
            }
        })
    }

    fn flush_until(&self, mut done: impl FnMut(&mut Engine) -> Option<bool>) -> bool {
        while self.check_fork().is_ok() {
            let end = self.with(|engine| {
                engine.drive();
                // Who calls this process learns from its answer more than from its end.
                engine.answer_callers();
                let end = done(engine);
                if end.is_none() {
                    engine.poll_sockets();
                    engine.tick(Instant::now());
                }
                end
            });
            if let Some(end) = end {
                return end;
            }
            std::thread::sleep(LOOK);
        }
        true
    }

    /// Ends the progress thread. Operations under way stay so.
    pub fn shut(&self) {
        self.0.closing.store(true, Ordering::SeqCst);
        self.0.wake_progress();
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
            assert!(engine.endpoints.iter().any(Endpoint::has_output));
            engine
        };
        hubs[0].0.release(engine, false);
        let engine = hubs[0].0.engine.lock();
        assert!(!engine.endpoints.iter().any(Endpoint::has_output));
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

#[cfg(test)]
#[path = "pair_tests.rs"]
mod pair_tests;
