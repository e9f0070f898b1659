//! A process group: the operations of one set of ranks, in the order they are called.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use podring_collective::{Collective, Kind as Op};
use podring_fabric::error::Failure;
use podring_fabric::hub::{Call, Callback, ChannelSpec, Hub, Keep, State, Ticket, Waited};

use crate::error::Error;
use crate::membership::{Membership, StoreMembership};
use crate::rendezvous::{News, Rendezvous};
use crate::runtime::{Process, Runtime};
use crate::store::Store;
use crate::watchdog::Watched;
use crate::world::{Forming, Standing, World, channel, form};

/// How long an orderly end waits for what is under way.
const LINGER: Duration = Duration::from_secs(5);

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
    /// What forms a default group; `None`: the store alone.
    pub rendezvous: Option<Arc<dyn Rendezvous>>,
}

pub(crate) struct Inner {
    pub(crate) process: Arc<Process>,
    pub(crate) name: String,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) channel: u64,
    /// The default world this group stands for, forgotten with it.
    world: Option<Standing>,
    timeout_ms: AtomicU64,
    /// The next collective's number. Held while posting, so that numbers and posts have one order.
    next: StdMutex<u64>,
    /// The next point-to-point operation's number, for messages only.
    direct: AtomicU64,
    /// Monitored barriers: how many this rank came to; on rank 0, how many of each rank's it has counted.
    pub(crate) arrivals: StdMutex<Vec<u64>>,
    closed: AtomicBool,
    pub(crate) store: Arc<dyn Store>,
    _watched: Arc<Watched>,
}

/// A process group.
#[derive(Clone)]
pub struct ProcessGroup(pub(crate) Arc<Inner>);

impl ProcessGroup {
    /// Forms a group: returns when every member is known.
    ///
    /// Within a default group that podring formed, a group is a function of its members, and nobody is waited for.
    pub fn form(runtime: &Runtime, config: Config, mut interrupted: impl FnMut() -> bool) -> Result<Self, Error> {
        let process = runtime.0.clone();
        let Config { rank, size, name, global_ranks, timeout, store, rendezvous } = config;
        process.hub.check_fork()?;
        let epoch = {
            let mut epochs = process.epochs.lock();
            let count = epochs.entry(name.clone()).or_insert(0);
            *count += 1;
            *count - 1
        };
        let current = process.current.lock().get();
        let within = global_ranks.as_ref().zip(current).filter(|(ranks, standing)| {
            let members = &standing.world.members;
            ranks.len() == size as usize
                && ranks.iter().all(|&global| (global as usize) < members.len())
                && ranks.get(rank as usize).is_some_and(|&me| members[me as usize] == *process.hub.address())
        });
        let (world, seat, stands_for) = match within {
            Some((ranks, Standing { world, seat })) => {
                let members = ranks.iter().map(|&global| world.members[global as usize].clone()).collect();
                (Arc::new(World { members, ..(*world).clone() }), seat, None)
            }
            None => {
                let address = process.hub.address();
                let secret = process.hub.secret();
                let forming = Forming { name: &name, epoch, rank, size, timeout, address, secret };
                // A world of one needs nobody to tell it of the others.
                let rendezvous = rendezvous.filter(|_| global_ranks.is_none() && size > 1);
                let (world, seat) = match rendezvous {
                    Some(rendezvous) => {
                        let (world, seat) = rendezvous.join(&forming, &store, &mut interrupted)?;
                        (Arc::new(world), Some(seat))
                    }
                    None => (Arc::new(form(&*store, &forming, interrupted)?), None),
                };
                process.hub.trust(world.job());
                if let Some(seat) = &seat {
                    seat.listen(Box::new(act_on(process.hub.clone(), world.clone())));
                }
                if global_ranks.is_none() {
                    let standing = Standing { world: world.clone(), seat: seat.clone() };
                    process.current.lock().set(standing.clone());
                    (world, seat, Some(standing))
                } else {
                    (world, seat, None)
                }
            }
        };
        let id = channel(world.id, &name, epoch);
        process.hub.open(ChannelSpec { id, name: name.clone(), me: rank, members: world.members.clone() })?;
        let membership: Box<dyn Membership> = match &seat {
            Some(seat) => seat.membership(id, epoch),
            None => Box::new(StoreMembership::new(store.clone(), id, epoch)),
        };
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
            arrivals: StdMutex::new(vec![0; size as usize]),
            closed: AtomicBool::new(false),
            store,
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

    /// Memory the process holds for all its groups, in bytes, by kind.
    pub fn memory(&self) -> [(&'static std::ffi::CStr, u64); 2] {
        let (rings, pooled) = self.0.process.hub.memory();
        [(c"shared_memory", rings as u64), (c"pooled", pooled as u64)]
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
        inner.process.hub.close(inner.channel);
        inner.leave();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !*self.closed.get_mut() && self.process.hub.check_fork().is_ok() {
            self.process.hub.close(self.channel);
            self.leave();
        }
    }
}

impl Inner {
    /// Gives up the world that this group stands for.
    fn leave(&self) {
        let Some(Standing { world, seat }) = &self.world else { return };
        self.process.current.lock().clear(world.id);
        if let Some(seat) = seat {
            seat.leave();
        }
    }
}

/// What is done about news of a world.
fn act_on(hub: Hub, world: Arc<World>) -> impl Fn(News) + Send + Sync {
    move |news| match news {
        News::Lost { rank, how } => {
            if let Some(member) = world.members.get(rank as usize) {
                hub.lose(member.hub, how);
            }
        }
        News::Failed { channel, failure } => hub.fail(channel, failure),
    }
}

pub(crate) fn millis(time: Duration) -> u64 {
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
