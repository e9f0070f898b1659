//! A process group: the operations of one set of ranks, in the order they are called.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use podring_collective::{Collective, Kind as Op};
use podring_fabric::error::Failure;
use podring_fabric::hub::{Call, Callback, ChannelSpec, Hub, Keep, State, Ticket, Waited};
use podring_ici::engine::Times;
use podring_ici::pjrt::Buffer;
use smallvec::SmallVec;

use crate::engine::{Broken, DeviceCall, Engine, Opening, Operation};
use crate::error::{Error, Place};
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
    /// The members' ranks in the default group, where those differ from the group's own.
    members: Option<Arc<[u32]>>,
    pub(crate) channel: u64,
    /// The default world this group stands for, forgotten with it.
    world: Option<Standing>,
    timeout_ms: AtomicU64,
    /// The next collective's number. Held while posting, so that numbers and posts have one order.
    next: StdMutex<u64>,
    /// The next point-to-point operation's number, for messages only.
    direct: AtomicU64,
    /// What runs collectives on devices, if the group has them, and its next collective's number.
    devices: Option<(Arc<dyn Engine>, StdMutex<u64>)>,
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
    pub fn form(runtime: &Runtime, config: Config, interrupted: impl FnMut() -> bool) -> Result<Self, Error> {
        Self::form_with(runtime, config, true, interrupted)
    }

    /// The same; on the hosts' network alone, unless it is to be on devices.
    fn form_with(
        runtime: &Runtime,
        config: Config,
        on_devices: bool,
        mut interrupted: impl FnMut() -> bool,
    ) -> Result<Self, Error> {
        let process = runtime.0.clone();
        let Config { rank, size, name, global_ranks, timeout, store, rendezvous } = config;
        process.hub.check_fork()?;
        let own = |ranks: &&Vec<u32>| ranks.iter().enumerate().any(|(number, &global)| number as u32 != global);
        let members: Option<Arc<[u32]>> = global_ranks.as_ref().filter(own).map(|ranks| ranks.as_slice().into());
        let current = process.current.lock().get();
        let within = global_ranks.as_ref().zip(current).filter(|(ranks, standing)| {
            let members = &standing.world.members;
            ranks.len() == size as usize
                && ranks.iter().all(|&global| (global as usize) < members.len())
                && ranks.get(rank as usize).is_some_and(|&me| members[me as usize] == *process.hub.address())
        });
        let epoch = within.as_ref().map_or(&process.epochs, |(_, standing)| &standing.epochs).next(&name);
        let (world, seat, stands_for) = match within {
            Some((ranks, Standing { world, seat, .. })) => {
                let members = ranks.iter().map(|&global| world.members[global as usize].clone()).collect();
                (Arc::new(World { members, ..(*world).clone() }), seat, None)
            }
            None => {
                let address = process.hub.address();
                let secret = process.hub.secret();
                let members = members.as_ref();
                let forming = Forming { name: &name, epoch, rank, size, members, timeout, address, secret };
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
                    seat.listen(Box::new(act_on(Arc::downgrade(&process), world.clone())));
                }
                if global_ranks.is_none() {
                    let standing = Standing { world: world.clone(), seat: seat.clone(), epochs: Arc::default() };
                    process.current.lock().set(standing.clone());
                    (world, seat, Some(standing))
                } else {
                    (world, seat, None)
                }
            }
        };
        let id = channel(world.id, &name, epoch);
        process.hub.open(ChannelSpec { id, name: name.clone(), me: rank, members: world.members.clone() })?;
        let devices = match process.devices.as_ref().filter(|_| on_devices) {
            None => None,
            Some(devices) => {
                let everybody: Vec<u32> = (0..size).collect();
                let opened = devices.open(&Opening {
                    process: &process,
                    channel: id,
                    name: &name,
                    me: rank,
                    global: global_ranks.as_deref().unwrap_or(&everybody),
                    whole: global_ranks.is_none(),
                    world: &world,
                    epoch,
                    store: &store,
                });
                let engine = opened.map_err(|source| {
                    process.hub.close(id);
                    let place = Box::new(Place { group: name.clone(), rank, members: members.clone() });
                    Error::Unopened { source: Box::new(source), place }
                })?;
                if let Some(engine) = &engine {
                    let mut engines = process.engines.lock();
                    engines.retain(|(_, engine)| engine.strong_count() > 0);
                    engines.push((id, Arc::downgrade(engine)));
                }
                engine.map(|engine| (engine, StdMutex::new(0)))
            }
        };
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
            members,
            channel: id,
            world: stands_for,
            timeout_ms: AtomicU64::new(millis(timeout)),
            next: StdMutex::new(0),
            direct: AtomicU64::new(0),
            devices,
            arrivals: StdMutex::new(vec![0; size as usize]),
            closed: AtomicBool::new(false),
            store,
            _watched: watched,
        })))
    }

    /// The group of some of this one's members, by their ranks here; this rank is one of them. A function of the members
    /// and of what is added to this group's name, if this is a default group: then nobody is waited for. It is on the
    /// hosts' network alone.
    pub fn part_named(&self, addition: &str, members: &[u32]) -> Result<Self, Error> {
        let inner = &self.0;
        let rank = members.iter().position(|&member| member == inner.rank).unwrap_or(members.len()) as u32;
        let config = Config {
            rank,
            size: members.len() as u32,
            name: format!("{}{addition}", inner.name),
            global_ranks: Some(members.to_vec()),
            timeout: self.timeout(),
            store: inner.store.clone(),
            rendezvous: None,
        };
        Self::form_with(&Runtime(inner.process.clone()), config, false, || false)
    }

    /// Whether its tensors on devices have an engine of their own.
    pub fn has_devices(&self) -> bool {
        self.0.devices.is_some()
    }

    /// Whether `other` is a handle of this very group.
    pub fn is(&self, other: &ProcessGroup) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
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
        let read = |next: &StdMutex<u64>| *next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        read(&self.0.next) + self.0.devices.as_ref().map_or(0, |(_, next)| read(next))
    }

    /// How errors name the group and this rank.
    pub(crate) fn place(&self) -> Place {
        Place { group: self.0.name.clone(), rank: self.0.rank, members: self.0.members.clone() }
    }

    fn failed(&self, failure: Arc<Failure>) -> Error {
        Error::Failed { place: self.place(), failure }
    }

    fn broken(&self, broken: Broken) -> Error {
        match broken {
            Broken::Host(failure) => self.failed(failure),
            Broken::Device(failure) => Error::Device { place: self.place(), failure },
        }
    }

    /// Why the group is broken, if it is.
    pub fn error(&self) -> Option<Error> {
        let host = self.0.process.hub.failure(self.0.channel).map(|failure| self.failed(failure));
        let device = || self.0.devices.as_ref().and_then(|(engine, _)| engine.broken());
        host.or_else(|| device().map(|broken| self.broken(broken)))
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
        self.start(collective, keep, timeout, sync, 0)
    }

    /// A collective on behalf of a program, waited for at once. `mark` must be the same on all members.
    pub fn post_marked(&self, collective: Collective, timeout: Option<Duration>, mark: u64) -> Result<Work, Error> {
        self.start(collective, None, timeout, true, mark)
    }

    fn start(
        &self,
        collective: Collective,
        keep: Option<Keep>,
        timeout: Option<Duration>,
        sync: bool,
        mark: u64,
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
        let call = |seq| Call { channel: inner.channel, seq, collective, keep, timeout, sync, mark };
        let ticket = if op.is_point_to_point() {
            inner.process.hub.post(call(inner.direct.fetch_add(1, Ordering::Relaxed)))?
        } else {
            let mut next = inner.next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let ticket = inner.process.hub.post(call(*next))?;
            *next += 1;
            ticket
        };
        Ok(Work { group: self.clone(), op, posted: Some(Posted::Host(ticket)) })
    }

    /// Starts an operation on the group's devices; waits for nobody. What has no program (a group whose members are
    /// unevenly spread over slices; messages, where each process has one device) goes over the hosts' network.
    pub fn post_device(&self, call: DeviceCall) -> Result<Work, Error> {
        let inner = &self.0;
        inner.process.hub.check_fork()?;
        let op = call.collective.kind;
        let Some((engine, next)) = &inner.devices else {
            let refused = |why| Error::NoDevices { op: op.name(), why, place: self.place() };
            if inner.process.devices.is_none() {
                return Err(refused("this rank has no device"));
            }
            if call.inputs.is_some() {
                return Err(refused("no program joins the group's devices, which are unevenly spread over slices"));
            }
            return self.post(call.collective, call.keep, call.timeout, false);
        };
        if call.inputs.is_none() && !engine.runs(&call.collective) {
            return self.post(call.collective, call.keep, call.timeout, false);
        }
        call.collective
            .validate(inner.rank, inner.size)
            .map_err(|source| Error::Invalid { rank: inner.rank, source })?;
        if inner.closed.load(Ordering::Relaxed) {
            let why = format!("{} after destroy_process_group", op.name());
            return Err(self.failed(Arc::new(Failure::Aborted { by: None, why })));
        }
        let timeout = call.timeout.unwrap_or_else(|| self.timeout());
        let operation = if op.is_point_to_point() {
            engine.post(inner.direct.fetch_add(1, Ordering::Relaxed), call, timeout)
        } else {
            let seq = {
                let mut next = next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                *next += 1;
                *next - 1
            };
            engine.post(seq, call, timeout)
        };
        Ok(Work { group: self.clone(), op, posted: Some(Posted::Device(operation)) })
    }

    /// Compiles the programs of calls ahead of time, which need not be posted as they are: one program serves all calls
    /// of its size class. `progress` is told how many are ready, before the first and after each.
    pub fn warm(&self, calls: &[Collective], mut progress: impl FnMut(usize, usize)) -> Result<(), Error> {
        match &self.0.devices {
            Some((engine, _)) => engine.warm(calls, &mut progress).map_err(|broken| self.broken(broken)),
            None => Ok(()),
        }
    }

    /// Fails everything under way and to come, on all members.
    pub fn abort(&self, why: &str) {
        let failure = Failure::Aborted { by: Some(self.0.rank), why: why.to_owned() };
        self.0.process.hub.fail(self.0.channel, failure);
        if let Some((engine, _)) = &self.0.devices {
            engine.fail(Some(self.0.rank), why);
        }
    }

    /// The orderly end of this rank's part: waits a while for what is under way, then closes.
    pub fn shutdown(&self) {
        let inner = &self.0;
        if inner.closed.swap(true, Ordering::SeqCst) || inner.process.hub.check_fork().is_err() {
            return;
        }
        let end = Instant::now() + LINGER.min(self.timeout());
        let on_devices = || inner.devices.as_ref().map_or(0, |(engine, _)| engine.pending());
        while inner.process.hub.pending(inner.channel) + on_devices() > 0
            && self.error().is_none()
            && Instant::now() < end
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        inner.process.hub.close(inner.channel);
        if let Some((engine, _)) = &inner.devices {
            engine.close();
        }
        inner.leave();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.process.hub.check_fork().is_err() {
            // A forked child: the engine's locks may be held by threads that are not here.
            std::mem::forget(self.devices.take());
            return;
        }
        if !*self.closed.get_mut() {
            self.process.hub.close(self.channel);
            self.leave();
        }
    }
}

impl Inner {
    /// Gives up the world that this group stands for.
    fn leave(&self) {
        let Some(Standing { world, seat, .. }) = &self.world else { return };
        self.process.current.lock().clear(world.id);
        if let Some(seat) = seat {
            seat.leave();
        }
    }
}

/// What is done about news of a world.
fn act_on(process: Weak<Process>, world: Arc<World>) -> impl Fn(News) + Send + Sync {
    move |news| {
        let Some(process) = process.upgrade() else { return };
        match news {
            News::Lost { rank, how } => {
                if let Some(member) = world.members.get(rank as usize) {
                    process.hub.lose(member.hub, how);
                }
            }
            News::Failed { channel, failure } => {
                let engines = process.engines.lock().clone();
                for engine in engines.iter().filter(|(id, _)| *id == channel).filter_map(|(_, engine)| engine.upgrade())
                {
                    engine.fail(None, &failure.to_string());
                }
                process.hub.fail(channel, failure);
            }
        }
    }
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// An operation at its engine.
enum Posted {
    Host(Arc<Ticket>),
    Device(Arc<dyn Operation>),
}

/// An operation under way or ended.
pub struct Work {
    group: ProcessGroup,
    op: Op,
    posted: Option<Posted>,
}

impl Work {
    fn posted(&self) -> &Posted {
        match &self.posted {
            Some(posted) => posted,
            // Taken only in drop.
            None => unreachable!("work used after drop"),
        }
    }

    /// Works on it until it has ended. With a limit, gives up after that long and leaves it under way.
    ///
    /// On a caller's thread: what other operations kept may be let go of on it.
    pub fn wait(&self, limit: Option<Duration>, interrupted: impl FnMut() -> bool) -> Result<(), Error> {
        self.wait_on(Hub::wait, limit, interrupted)
    }

    /// The same on a thread of somebody else's, a runtime's perhaps that runs a program: nothing of a caller's runs on it.
    pub fn wait_as_guest(&self, limit: Option<Duration>, interrupted: impl FnMut() -> bool) -> Result<(), Error> {
        self.wait_on(Hub::wait_as_guest, limit, interrupted)
    }

    fn wait_on<I: FnMut() -> bool>(
        &self,
        wait: impl FnOnce(&Hub, &Ticket, Option<Duration>, I) -> Waited,
        limit: Option<Duration>,
        mut interrupted: I,
    ) -> Result<(), Error> {
        let waited = match self.posted() {
            Posted::Host(ticket) => wait(&self.group.0.process.hub, ticket, limit, interrupted),
            Posted::Device(operation) => {
                let waited = operation.wait(limit, &mut interrupted);
                if operation.state() == State::Failed {
                    self.group.0.process.hub.settle();
                }
                waited
            }
        };
        match waited {
            Waited::Ended => self.error().map_or(Ok(()), Err),
            Waited::Interrupted => Err(Error::Interrupted),
            Waited::TimedOut => {
                self.group.0.process.hub.check_fork()?;
                Err(Error::WaitTimeout {
                    op: self.op.name(),
                    seq: self.sequence(),
                    after_ms: limit.map_or(0, millis),
                    place: self.group.place(),
                })
            }
        }
    }

    /// How far it is.
    pub fn state(&self) -> State {
        match self.posted() {
            Posted::Host(ticket) => ticket.state(),
            Posted::Device(operation) => operation.state(),
        }
    }

    /// Why it failed, if it did.
    pub fn error(&self) -> Option<Error> {
        match self.posted() {
            Posted::Host(ticket) => ticket.failure().map(|failure| self.group.failed(failure)),
            Posted::Device(operation) => operation.broken().map(|broken| self.group.broken(broken)),
        }
    }

    /// Its number in the group, among those of its engine; for point-to-point, among those.
    pub fn sequence(&self) -> u64 {
        match self.posted() {
            Posted::Host(ticket) => ticket.seq(),
            Posted::Device(operation) => operation.seq(),
        }
    }

    /// A number no other work of this process has.
    pub fn key(&self) -> u64 {
        match self.posted() {
            Posted::Host(ticket) => ticket.key(),
            Posted::Device(operation) => operation.key(),
        }
    }

    /// Its deadline, from the call on.
    pub fn timeout(&self) -> Duration {
        match self.posted() {
            Posted::Host(ticket) => ticket.timeout(),
            Posted::Device(operation) => operation.timeout(),
        }
    }

    /// Whom a receive got its message from.
    pub fn source(&self) -> Option<u32> {
        match self.posted() {
            Posted::Host(ticket) => ticket.source(),
            Posted::Device(operation) => operation.source(),
        }
    }

    /// Calls `callback` once when it has ended: at once if it has, else on the callback pool.
    pub fn on_end(&self, callback: Callback) {
        let back = match self.posted() {
            Posted::Host(ticket) => ticket.on_end(callback),
            Posted::Device(operation) => operation.on_end(callback),
        };
        if let Some(callback) = back {
            callback();
        }
    }

    /// The results of an operation on device buffers, once it is done: one buffer per part.
    pub fn take_outputs(&self) -> SmallVec<[Buffer; 1]> {
        match self.posted() {
            Posted::Host(_) => SmallVec::new(),
            Posted::Device(operation) => operation.take_outputs(),
        }
    }

    /// When what happened, for an operation on devices.
    pub fn times(&self) -> Option<Times> {
        match self.posted() {
            Posted::Host(_) => None,
            Posted::Device(operation) => operation.times(),
        }
    }

    /// Fails it, and with it the group.
    pub fn abort(&self) {
        self.group.abort(&format!("{}, seq {}, was aborted", self.op.name(), self.sequence()));
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Some(Posted::Host(ticket)) = self.posted.take() {
            self.group.0.process.hub.recycle(ticket);
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
