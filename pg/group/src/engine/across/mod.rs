//! The engine of a group over several slices, each with as many members: a program inside each slice, the fabric
//! between slices, and a program inside again.
//!
//! With k members in each of S slices, member i of a slice meets the i-th members of the other slices on a channel of the
//! fabric. V is as in docs/ici.md.
//!
//! | operation | inside | between | inside |
//! |---|---|---|---|
//! | all_reduce | reduce-scatter, V | all-reduce, V/k | all-gather, V |
//! | reduce | reduce-scatter, V | reduce, V/k | gather, in the root's slice |
//! | broadcast | | broadcast among the root's counterparts, V | broadcast |
//! | all_gather | | all-gather, V | all-gather, V·S |
//! | reduce_scatter | reduce-scatter, V·S | reduce-scatter, V | |
//! | barrier | barrier | barrier | barrier |
//!
//! The rest goes over the fabric alone: all_to_all, gather, scatter, send, recv, and AVG of integers, whose quotient of
//! quotients would be another number.
//!
//! Collectives run one after another in a [`Line`]. Where the slice's ranks are threads it is the group's own. Where each
//! process has one chip it is the process's, for all its groups, those within one slice too: an operation's programs are
//! launched as its steps come to them, and without the line that would be another order on every rank.

mod line;
mod plan;

use std::{
    collections::VecDeque,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use podring_collective::Collective;
use podring_fabric::error::Failure as HostFailure;
use podring_fabric::hub::{Call, Callback, ChannelSpec, State, Ticket as HostTicket, Waited};
use podring_ici::engine::{self as ici, Failure, Ticket, Times};
use podring_ici::pjrt::Buffer;
use smallvec::SmallVec;

use super::device::pack;
use super::{Broken, DeviceCall, DeviceError, Devices, Engine, Opening, Operation};
use crate::runtime::Process;
use crate::world::channel;

pub(crate) use line::Line;
use plan::{Plan, Step};

/// An operation on its way.
struct Job {
    steps: VecDeque<Step>,
    /// What lies between steps; boxed memory, so that moving the job moves no bytes.
    memory: Vec<Vec<u64>>,
    operation: Arc<AcrossOperation>,
    call: DeviceCall,
    end: Instant,
    /// Collectives run one after another; messages beside them.
    queued: bool,
}

/// What a step waits for.
enum Posted {
    Inside(Arc<Ticket>),
    Fabric { ticket: Arc<HostTicket>, between: bool },
}

/// An operation as its caller sees it.
struct AcrossOperation {
    ticket: Arc<Ticket>,
    broken: OnceLock<Broken>,
    source: OnceLock<u32>,
}

/// What runs inside a slice.
pub(super) trait Within: Engine {
    /// Starts an operation.
    fn start(&self, seq: u64, call: DeviceCall, timeout: Duration) -> Arc<Ticket>;
    /// Fails everything under way and to come.
    fn fail_with(&self, failure: Failure);
    /// Why it is broken, if it is.
    fn exact_failure(&self) -> Option<Arc<Failure>>;
}

#[derive(Default)]
struct Queue {
    broken: Option<Broken>,
    pending: usize,
}

/// The fabric's channels between slices.
#[derive(Clone, Copy)]
struct Channels {
    /// To this member's counterparts.
    between: u64,
    /// Among all members.
    host: u64,
}

struct Shared {
    name: String,
    process: Arc<Process>,
    inside: Box<dyn Within>,
    plan: Plan,
    /// The group's own channel of the fabric, whose failure ends the launches of its members.
    group: u64,
    /// None in a group within one slice.
    channels: Option<Channels>,
    line: Arc<Line>,
    inside_seq: AtomicU64,
    between_seq: AtomicU64,
    host_seq: AtomicU64,
    message_seq: AtomicU64,
    queue: Mutex<Queue>,
}

/// A group over several slices.
pub(super) struct Across(Arc<Shared>);

impl Across {
    /// `touched` has the positions in the group of each slice's members; this rank is number `me` of its slice's.
    pub fn open(
        opening: &Opening,
        inside: Box<dyn Within>,
        line: Arc<Line>,
        touched: &[Vec<u32>],
        me: u32,
    ) -> Result<Across, DeviceError> {
        let hub = &opening.process.hub;
        let slice = touched.iter().position(|members| members.contains(&opening.me)).unwrap_or(0);
        let open = |name: String, me: u32, positions: &[u32]| {
            let members = positions.iter().map(|&position| opening.world.members[position as usize].clone()).collect();
            let id = channel(opening.world.id, &name, opening.epoch);
            let between = |reason: String| DeviceError::Between { group: opening.name.to_owned(), reason };
            hub.open(ChannelSpec { id, name, me, members }).map_err(|error| between(error.to_string()))?;
            Ok::<u64, DeviceError>(id)
        };
        let plan = Plan::new(touched.to_vec(), slice, me as usize);
        let counterparts: Vec<u32> = plan.counterparts().collect();
        let everybody: Vec<u32> = (0..opening.global.len() as u32).collect();
        let channels = || {
            let between = open(format!("{}/between slices/{me}", opening.name), slice as u32, &counterparts)?;
            let host = open(format!("{}/of devices", opening.name), opening.me, &everybody);
            let host = host.inspect_err(|_| hub.close(between))?;
            Ok::<Channels, DeviceError>(Channels { between, host })
        };
        let channels = if touched.len() > 1 { Some(channels()?) } else { None };
        Ok(Across(Arc::new(Shared {
            name: opening.name.to_owned(),
            process: opening.process.clone(),
            inside,
            plan,
            group: opening.channel,
            channels,
            line,
            inside_seq: AtomicU64::new(0),
            between_seq: AtomicU64::new(0),
            host_seq: AtomicU64::new(0),
            message_seq: AtomicU64::new(0),
            queue: Mutex::default(),
        })))
    }
}

impl Shared {
    /// What failed in this slice, with the group's numbers of its ranks.
    fn broken_inside(&self, failure: &Failure) -> Broken {
        let mine = self.plan.within();
        let numbered = failure.numbered(|place| mine.get(place as usize).copied());
        Broken::Device(Arc::new(numbered.unwrap_or_else(|| aborted(failure))))
    }

    /// What failed between the slices, the same.
    fn broken_between(&self, failure: &HostFailure) -> Broken {
        let counterpart = |slice: u32| self.plan.counterparts().nth(slice as usize);
        Broken::Host(Arc::new(failure.numbered(counterpart).unwrap_or_else(|| aborted_host(failure))))
    }

    /// Fails everything: here, and for the counterparts. `told`: the other members of this slice know.
    fn fail(&self, broken: Broken, told: bool) {
        {
            let mut queue = self.queue.lock();
            if queue.broken.is_some() {
                return;
            }
            queue.broken = Some(broken.clone());
        }
        if !told {
            self.tell(&broken);
        }
        let waiting = self.line.withdraw(self);
        // Each is told with its own numbers of the ranks, in words if it has none for one of them.
        let within = |rank: u32| number(self.plan.within().iter().position(|&member| member == rank)?);
        let counterpart = |rank: u32| number(self.plan.counterparts().position(|member| member == rank)?);
        self.inside.fail_with(match &broken {
            Broken::Device(failure) => failure.numbered(within).unwrap_or_else(|| aborted(&**failure)),
            Broken::Host(failure) => aborted(&**failure),
        });
        if let Some(channels) = self.channels {
            let (between, host) = match &broken {
                Broken::Host(failure) => {
                    let numbered = failure.numbered(counterpart).unwrap_or_else(|| aborted_host(&**failure));
                    (numbered, elsewhere(failure).unwrap_or_else(|| aborted_host(&**failure)))
                }
                Broken::Device(failure) => (aborted_host(&**failure), aborted_host(&**failure)),
            };
            self.process.hub.fail(channels.between, between);
            self.process.hub.fail(channels.host, host);
        }
        for job in waiting {
            self.end(job, Some(broken.clone()));
        }
    }

    /// Tells the whole group. Who waits for this rank in a program of the slice's hears of it by nothing else.
    fn tell(&self, broken: &Broken) {
        let why = match broken {
            Broken::Host(failure) => elsewhere(failure).ok_or_else(|| failure.to_string()),
            Broken::Device(failure) => Err(failure.to_string()),
        };
        let by = Some(self.plan.position());
        self.process.hub.fail(self.group, why.unwrap_or_else(|why| HostFailure::Aborted { by, why }));
    }

    fn end(&self, job: Job, broken: Option<Broken>) {
        self.queue.lock().pending -= 1;
        let Job { operation, memory, call, .. } = job;
        drop((memory, call));
        let failure = broken.map(|broken| {
            let why = match &broken {
                Broken::Host(failure) => failure.to_string(),
                Broken::Device(failure) => failure.to_string(),
            };
            let _ = operation.broken.set(broken);
            Arc::new(Failure::Aborted { by: None, why })
        });
        operation.ticket.end(failure);
    }

    /// Runs a job's steps until one has to be waited for, and what comes behind it in the line.
    fn advance(self: &Arc<Self>, job: Job) {
        let (mut group, mut job) = (self.clone(), job);
        while let Some(next) = group.clone().step(job) {
            (group, job) = next;
        }
    }

    /// The same, up to the job's end; then what is next.
    fn step(self: Arc<Self>, mut job: Job) -> Option<(Arc<Shared>, Job)> {
        loop {
            let left = job.end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let step = job.steps.pop_front();
            let (collective, channel) = match (step, self.channels) {
                (None, _) => {
                    let queued = job.queued;
                    self.end(job, None);
                    return if queued { self.line.next() } else { None };
                }
                (Some(Step::Local(act)), _) => {
                    act();
                    continue;
                }
                (Some(Step::Inside(collective)), _) => {
                    let seq = self.inside_seq.fetch_add(1, Relaxed);
                    let ticket = self.inside.start(seq, DeviceCall::staged(*collective), left);
                    let posted = Posted::Inside(ticket.clone());
                    return self.then(job, posted, |callback| ticket.on_end(callback));
                }
                (Some(Step::Between(collective)), Some(channels)) => (collective, channels.between),
                (Some(Step::Host(collective)), Some(channels)) => (collective, channels.host),
                (Some(Step::Between(collective) | Step::Host(collective)), None) => {
                    let why = format!("{collective} within one slice asked for the network between slices");
                    let why = HostFailure::Aborted { by: None, why };
                    return self.broken(job, Broken::Host(Arc::new(why)), false);
                }
            };
            let between = self.channels.is_some_and(|channels| channels.between == channel);
            let seq = match (collective.kind.is_point_to_point(), between) {
                (true, _) => &self.message_seq,
                (_, true) => &self.between_seq,
                _ => &self.host_seq,
            }
            .fetch_add(1, Relaxed);
            let call = Call { channel, seq, collective: *collective, keep: None, timeout: left, sync: false, mark: 0 };
            return match self.process.hub.post(call) {
                Ok(ticket) => {
                    let posted = Posted::Fabric { ticket: ticket.clone(), between };
                    self.then(job, posted, |callback| ticket.on_end(callback))
                }
                Err(error) => {
                    let why = HostFailure::Aborted { by: None, why: error.to_string() };
                    self.broken(job, Broken::Host(Arc::new(why)), false)
                }
            };
        }
    }

    /// Goes on with a job when what it has posted has ended. If it has already, that is left to the caller: many such
    /// steps, one after another, would take as much of the stack.
    fn then(
        self: Arc<Self>,
        job: Job,
        posted: Posted,
        on_end: impl FnOnce(Callback) -> Option<Callback>,
    ) -> Option<(Arc<Shared>, Job)> {
        let waiting = Arc::new(Mutex::new(Some((job, posted))));
        let (shared, same) = (self.clone(), waiting.clone());
        let goes_on: Callback = Box::new(move || {
            let taken = same.lock().take();
            if let Some((group, job)) = taken.and_then(|(job, posted)| shared.resume(job, posted)) {
                group.advance(job);
            }
        });
        // Given back: it has ended.
        drop(on_end(goes_on)?);
        let taken = waiting.lock().take();
        taken.and_then(|(job, posted)| self.resume(job, posted))
    }

    /// The job, or what is next after one that failed.
    fn resume(self: Arc<Self>, job: Job, posted: Posted) -> Option<(Arc<Shared>, Job)> {
        let (broken, told) = match posted {
            Posted::Inside(ticket) => (ticket.failure().map(|failure| self.broken_inside(&failure)), true),
            Posted::Fabric { ticket, between } => match ticket.failure() {
                None => {
                    if let Some(source) = ticket.source() {
                        let _ = job.operation.source.set(source);
                    }
                    self.process.hub.recycle(ticket);
                    (None, false)
                }
                Some(failure) if between => (Some(self.broken_between(&failure)), false),
                Some(failure) => (Some(Broken::Host(failure)), false),
            },
        };
        match broken {
            None => Some((self, job)),
            Some(broken) => self.broken(job, broken, told),
        }
    }

    /// Ends a job that failed, and with it its group.
    fn end_all(&self, job: Job, broken: Broken, told: bool) {
        self.fail(broken.clone(), told);
        let first = self.queue.lock().broken.clone();
        self.end(job, Some(first.unwrap_or(broken)));
    }

    /// The same for one whose turn it was; then what is next.
    fn broken(&self, job: Job, broken: Broken, told: bool) -> Option<(Arc<Shared>, Job)> {
        let queued = job.queued;
        self.end_all(job, broken, told);
        if queued { self.line.next() } else { None }
    }

    /// The same for one whose turn came too late.
    fn late(&self, job: Job, ahead: Option<String>) {
        let ticket = &job.operation.ticket;
        let after_ms = u64::try_from(ticket.timeout().as_millis()).unwrap_or(u64::MAX);
        let failure = Failure::Queued { op: job.call.collective.to_string(), seq: ticket.seq(), after_ms, ahead };
        self.end_all(job, Broken::Device(Arc::new(failure)), false);
    }
}

fn number(place: usize) -> Option<u32> {
    u32::try_from(place).ok()
}

/// A failure in words, for who counts ranks otherwise.
fn aborted(failure: &dyn std::fmt::Display) -> Failure {
    Failure::Aborted { by: None, why: failure.to_string() }
}

/// A failure as another channel with the same ranks has it: others than these have the numbers of one channel's calls.
fn elsewhere(failure: &HostFailure) -> Option<HostFailure> {
    matches!(failure, HostFailure::PeerLost { .. } | HostFailure::Aborted { .. }).then(|| failure.clone())
}

/// [`aborted`], on the host.
fn aborted_host(failure: &dyn std::fmt::Display) -> HostFailure {
    HostFailure::Aborted { by: None, why: failure.to_string() }
}

impl Engine for Across {
    fn runs(&self, collective: &Collective) -> bool {
        self.0.inside.runs(collective)
    }

    fn post(&self, seq: u64, mut call: DeviceCall, timeout: Duration) -> Arc<dyn Operation> {
        let shared = &self.0;
        let ticket = Ticket::manual(seq, timeout, Devices::runner(&shared.process));
        let operation = Arc::new(AcrossOperation { ticket, broken: OnceLock::new(), source: OnceLock::new() });
        let broken = match self.broken() {
            None if call.inputs.is_some() => {
                let why = "buffers that stay on the devices can't cross slices, nor wait in line in a job of several: \
                           pass tensors"
                    .to_owned();
                Some(Broken::Device(Arc::new(Failure::Aborted { by: None, why })))
            }
            broken => broken,
        };
        shared.queue.lock().pending += 1;
        let after = pack(&mut call.collective);
        let mut memory = Vec::new();
        let mut steps = shared.plan.steps(&call.collective, &mut memory);
        steps.extend(after.map(Step::Local));
        let now = Instant::now();
        let end = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(315_360_000));
        let queued = !call.collective.kind.is_point_to_point();
        let job = Job { steps, memory, operation: operation.clone(), call, end, queued };
        if broken.is_some() {
            shared.end(job, broken);
            return operation;
        }
        let turn = if queued { shared.line.take(shared, job) } else { Some(job) };
        if let Some(job) = turn {
            shared.advance(job);
        }
        operation
    }

    fn warm(&self, calls: &[Collective], progress: &mut dyn FnMut(usize, usize)) -> Result<(), Broken> {
        let inside: Vec<Vec<Collective>> = calls
            .iter()
            .map(|call| {
                let mut memory = Vec::new();
                let steps = self.0.plan.steps(call, &mut memory);
                let program = |step| if let Step::Inside(collective) = step { Some(*collective) } else { None };
                steps.into_iter().filter_map(program).collect()
            })
            .collect();
        progress(0, calls.len());
        for (index, calls_inside) in inside.iter().enumerate() {
            self.0.inside.warm(calls_inside, &mut |_, _| ())?;
            progress(index + 1, calls.len());
        }
        Ok(())
    }

    fn fail(&self, by: Option<u32>, why: &str) {
        self.0.fail(Broken::Device(Arc::new(Failure::Aborted { by, why: why.to_owned() })), true);
    }

    fn broken(&self) -> Option<Broken> {
        let broken = self.0.queue.lock().broken.clone();
        broken.or_else(|| self.0.inside.exact_failure().map(|failure| self.0.broken_inside(&failure)))
    }

    fn pending(&self) -> usize {
        self.0.queue.lock().pending
    }

    fn close(&self) {
        self.0.inside.close();
        for channel in self.0.channels.iter().flat_map(|channels| [channels.between, channels.host]) {
            self.0.process.hub.close(channel);
        }
    }
}

impl Drop for Across {
    fn drop(&mut self) {
        self.close();
    }
}

impl Operation for AcrossOperation {
    fn state(&self) -> State {
        Operation::state(&*self.ticket)
    }

    fn broken(&self) -> Option<Broken> {
        self.broken.get().cloned()
    }

    fn seq(&self) -> u64 {
        self.ticket.seq()
    }

    fn key(&self) -> u64 {
        self.ticket.key()
    }

    fn timeout(&self) -> Duration {
        self.ticket.timeout()
    }

    fn source(&self) -> Option<u32> {
        self.source.get().copied()
    }

    fn on_end(&self, callback: ici::Callback) -> Option<ici::Callback> {
        self.ticket.on_end(callback)
    }

    fn wait(&self, limit: Option<Duration>, interrupted: &mut dyn FnMut() -> bool) -> Waited {
        Operation::wait(&*self.ticket, limit, interrupted)
    }

    fn take_outputs(&self) -> SmallVec<[Buffer; 1]> {
        SmallVec::new()
    }

    fn times(&self) -> Option<Times> {
        None
    }
}
