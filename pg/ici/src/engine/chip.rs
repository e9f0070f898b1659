//! One process per device, as on a TPU: each rank launches programs on its own chip, and nobody sees the others' calls.
//!
//! A [`Chip`] is this process's device of a slice. A group's member opens it ([`Chip::open`]) and posts [`Call`]s; what it
//! gets back is a [`Ticket`]. Nobody waits in [`Seat::post`]: a thread of the chip's takes the calls, and for each one
//! copies the tensors to the device, launches the program and copies the results back.
//!
//! **Launch order.** The posts of a process are one sequence, whatever groups they are of. A plugin whose launches return
//! before the program has run, as libtpu's do, gets them all from one thread, in that order: so the device gets programs
//! in the order of calls, and ranks that share groups have to call in one order, as every framework for TPUs asks. Where
//! a launch returns when the program has run ([`ChipOptions::played`]), as on a virtual slice, each group has a thread of
//! its own (groups of the same members share one, as the player may play them in one order only): one that waits for
//! late ranks holds up nobody else. There the order is compared: a call brings along what was posted before it in groups
//! that hold all members of its own ([`super::Launching::mark`]), so that another order among such groups is a mismatch,
//! named at once. Groups that overlap otherwise are not compared.
//!
//! What a program depends on is known to each rank, the sizes of other ranks' blocks excepted (all-to-all, gather,
//! scatter): the largest are agreed upon over the hosts' network first ([`Peers`]).

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use podring_collective::{Collective, Keep};
use podring_topology::Slice;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    constants::Constants,
    failure::Failure,
    group::{Call, GroupSpec, OpenError},
    key::{self, Target},
    launch::{self, Arrangement, Place, Prepared},
    launching::Launching,
    order::Order,
    stage,
    ticket::{Free, Runner, Ticket, now},
};
use crate::{
    cache::{Cache, Counts, Disk},
    pjrt::{Buffer, Client, Event, OnReady, PjrtError, Plugin, VIEW_ALIGNMENT, Value},
    program::{Backend, Role, Unsupported},
};

/// How often deadlines of running programs are looked at.
const TICK: Duration = Duration::from_millis(20);

/// How a chip is used.
#[derive(Default)]
pub struct ChipOptions {
    /// The slice that the devices are of, whose first ones they are in its list order.
    pub slice: Option<Slice>,
    /// Sum 16-bit floats in f32 and round once.
    pub exact: bool,
    /// The devices' memory is this process's.
    pub on_host: bool,
    /// A launch returns when the program has run, or failed.
    pub played: bool,
    /// Compiled programs are kept here.
    pub disk: Option<Disk>,
    /// XLA's options for every compile, by name.
    pub overrides: Vec<(String, Value)>,
}

/// The other members of a group, reached otherwise than by programs.
pub trait Peers: Send + Sync {
    /// Replaces each number by the largest of all members'. Called on all of them, in one order.
    fn most(&self, numbers: &mut [u64], limit: Duration) -> Result<(), String>;
    /// Why the group is over, if that came to be known otherwise than by a program.
    fn over(&self) -> Option<String>;
}

/// This process's device among those of its job.
pub struct Chip {
    client: Client,
    cache: Cache,
    /// The plugin's number of each rank's device.
    ids: Vec<i64>,
    /// This process's.
    rank: u32,
    slice: Option<Slice>,
    name: String,
    target: Target,
    on_host: bool,
    played: bool,
    constants: Constants,
    launched: AtomicU64,
    order: Mutex<Order>,
    threads: Threads,
    landing: mpsc::Sender<Landed>,
}

/// The threads that launch.
enum Threads {
    /// One for all groups.
    One(Arc<Launcher>),
    /// One for all groups of the same members, sorted, while there are any.
    Each(Mutex<FxHashMap<Vec<u32>, Weak<Launcher>>>),
}

/// Where calls go to be launched one after another.
type Launcher = mpsc::Sender<Job>;

impl Threads {
    fn of(&self, members: &[u32]) -> Result<Arc<Launcher>, PjrtError> {
        let mut threads = match self {
            Threads::One(launcher) => return Ok(launcher.clone()),
            Threads::Each(threads) => threads.lock(),
        };
        if let Some(known) = threads.get(members).and_then(Weak::upgrade) {
            return Ok(known);
        }
        threads.retain(|_, launcher| launcher.strong_count() > 0);
        let made = launcher()?;
        threads.insert(members.to_vec(), Arc::downgrade(&made));
        Ok(made)
    }
}

/// A call on its way to the device.
struct Job {
    group: Arc<Group>,
    call: Call,
    ticket: Arc<Ticket>,
    deadline: Instant,
    mark: u64,
}

/// A launched program that was not done at once.
struct Flight {
    job: Job,
    prepared: Arc<Prepared>,
    outputs: SmallVec<[Buffer; 1]>,
    event: Event,
}

/// A program on its way: its results, and when they are there.
type Launched = (Arc<Prepared>, SmallVec<[Buffer; 1]>, Event);

enum Landed {
    Started(Box<Flight>),
    /// Some program is done.
    Some,
}

/// Tells the thread that waits for programs.
struct Bell(mpsc::Sender<Landed>, Arc<Plugin>);

impl OnReady for Bell {
    fn plugin(&self) -> Option<&Arc<Plugin>> {
        Some(&self.1)
    }

    fn ready(&self, _: Result<(), PjrtError>) {
        // The outcome is asked for again by whoever hears this; nobody hears it only when the chip is gone.
        let _ = self.0.send(Landed::Some);
    }
}

#[derive(Default)]
struct State {
    failed: Option<Arc<Failure>>,
    closed: bool,
    /// Posted and not ended.
    live: Vec<Arc<Ticket>>,
    /// The launch that is under way.
    current: Option<Arc<Launching>>,
}

/// A group, as this member sees it.
struct Group {
    chip: Arc<Chip>,
    name: String,
    /// In the order of posts.
    place: usize,
    me: u32,
    size: usize,
    arrangement: Arrangement,
    peers: Arc<dyn Peers>,
    runner: Runner,
    jobs: Arc<Launcher>,
    state: Mutex<State>,
    free: Free,
}

/// This process's part of a group; closed when dropped.
pub struct Seat(Arc<Group>);

impl Chip {
    /// This process's chip: the client's only addressable device. Rank r's is the r-th of all the client's devices.
    pub fn start(client: Client, options: ChipOptions) -> Result<Arc<Chip>, PjrtError> {
        let wrong =
            |what, expected: &str, got: String| PjrtError::Argument { what, expected: expected.to_owned(), got };
        let [own] = client.devices() else {
            let got = client.devices().len().to_string();
            return Err(wrong("addressable devices", "one: a process holds one device", got));
        };
        let ids: Vec<i64> = client.all_devices()?.iter().map(|device| i64::from(device.id)).collect();
        let rank = ids.iter().position(|&id| id == i64::from(own.id)).ok_or_else(|| {
            wrong("addressable device", "one of the client's devices", format!("{own:?}, and they are {ids:?}"))
        })?;
        let name = match &options.slice {
            Some(slice) => slice.to_string(),
            None => format!("{} {} devices", ids.len(), client.platform()?),
        };
        let threads = if options.played { Threads::Each(Mutex::default()) } else { Threads::One(launcher()?) };
        let (landing, landed) = mpsc::channel();
        let chip = Arc::new(Chip {
            cache: Cache::new(client.clone(), options.disk)?.with(options.overrides, None),
            client,
            ids,
            rank: rank as u32,
            slice: options.slice,
            name,
            // The program that a TPU would run: whoever plays it otherwise plays this very one.
            target: Target { backend: Backend::Tpu, exact: options.exact },
            on_host: options.on_host,
            played: options.played,
            constants: Constants::default(),
            launched: AtomicU64::new(0),
            order: Mutex::default(),
            threads,
            landing,
        });
        let weak = Arc::downgrade(&chip);
        thread("podring-landing", move || land(&landed, &weak))?;
        Ok(chip)
    }

    /// Devices of the job.
    pub fn devices(&self) -> u32 {
        self.ids.len() as u32
    }

    /// Which of them is this process's.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// What errors call the slice.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Programs launched so far.
    pub fn launched(&self) -> u64 {
        self.launched.load(Relaxed)
    }

    /// How programs were come by so far.
    pub fn counts(&self) -> Counts {
        self.cache.counts()
    }

    /// Whether a collective among `members` ranks has a program. The same on all of them.
    pub fn has_program(&self, collective: &Collective, members: usize) -> bool {
        !collective.kind.is_point_to_point() && key::of(collective, members, self.target).is_ok()
    }

    /// Opens a group for this process. Every member does, with the same `spec`, whose devices are ranks.
    pub fn open(
        self: &Arc<Self>,
        spec: &GroupSpec,
        me: u32,
        peers: Arc<dyn Peers>,
        runner: Runner,
    ) -> Result<Seat, OpenError> {
        if let Some(&device) = spec.devices.iter().find(|&&device| device >= self.devices()) {
            let (group, machine) = (spec.name.clone(), self.name.clone());
            return Err(OpenError::Device { group, device, devices: self.devices(), machine });
        }
        if spec.devices.get(me as usize) != Some(&self.rank) {
            return Err(OpenError::Disagree { group: spec.name.clone(), rank: me });
        }
        let id = |device: u32| self.ids[device as usize];
        let arrangement = Arrangement::new(self.slice.as_ref(), id, &spec.name, &spec.devices)?;
        let mut members = spec.devices.clone();
        members.sort_unstable();
        let no_thread = |error: PjrtError| OpenError::Thread { group: spec.name.clone(), why: error.to_string() };
        let jobs = self.threads.of(&members).map_err(no_thread)?;
        let place = self.order.lock().enter(spec.id, members);
        Ok(Seat(Arc::new(Group {
            chip: self.clone(),
            name: spec.name.clone(),
            place,
            me,
            size: spec.devices.len(),
            arrangement,
            peers,
            runner,
            jobs,
            state: Mutex::default(),
            free: Free::default(),
        })))
    }

    /// Gives a call its place in the order of launches; gives it back if there is nobody to launch it.
    fn submit(&self, group: &Arc<Group>, call: Call, ticket: Arc<Ticket>, deadline: Instant) -> Option<Call> {
        let fingerprint = call.collective.fingerprint();
        let mut order = self.order.lock();
        let mark = order.mark(group.place, fingerprint);
        let job = Job { group: group.clone(), call, ticket, deadline, mark };
        group.jobs.send(job).err().map(|refused| refused.0.call)
    }
}

fn thread(name: &str, act: impl FnOnce() + Send + 'static) -> Result<(), PjrtError> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(act);
    let wrong = |error: std::io::Error| PjrtError::Argument {
        what: "threads",
        expected: "one for programs".to_owned(),
        got: error.to_string(),
    };
    spawned.map(drop).map_err(wrong)
}

/// A thread that runs calls one after another, until nobody can send any.
fn launcher() -> Result<Arc<Launcher>, PjrtError> {
    let (jobs, posted) = mpsc::channel::<Job>();
    thread("podring-chip", move || posted.into_iter().for_each(Job::run))?;
    Ok(Arc::new(jobs))
}

/// Waits for programs that were not done when they were launched, and for their deadlines.
fn land(landed: &mpsc::Receiver<Landed>, chip: &Weak<Chip>) {
    let mut flights: Vec<Box<Flight>> = Vec::new();
    loop {
        let limit = if flights.is_empty() { Duration::from_secs(5) } else { TICK };
        match landed.recv_timeout(limit) {
            Ok(Landed::Started(flight)) => flights.push(flight),
            Ok(Landed::Some) | Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
        // The thread that held the last flight of a chip that is gone is this one.
        if flights.is_empty() && chip.strong_count() == 0 {
            return;
        }
        let now = Instant::now();
        let mut index = 0;
        while let Some(flight) = flights.get(index) {
            match flight.event.is_ready() {
                Ok(false) => {
                    if now >= flight.job.deadline {
                        flight.job.group.fail(Arc::new(flight.job.overdue()));
                    }
                    index += 1;
                }
                Ok(true) | Err(_) => flights.swap_remove(index).end(),
            }
        }
    }
}

impl Job {
    fn overdue(&self) -> Failure {
        Failure::Timeout {
            op: self.call.collective.to_string(),
            seq: self.ticket.seq(),
            after_ms: u64::try_from(self.ticket.timeout().as_millis()).unwrap_or(u64::MAX),
            missing: Vec::new(),
            called: Vec::new(),
        }
    }

    fn plugin_failure(&self, doing: &'static str, error: PjrtError) -> Arc<Failure> {
        Arc::new(Failure::Plugin {
            doing,
            program: self.call.collective.to_string(),
            group: self.group.name.clone(),
            slice: self.group.chip.name.clone(),
            rank: Some(self.group.me),
            error: Box::new(error),
        })
    }

    /// On a thread of the chip's.
    fn run(self) {
        let group = self.group.clone();
        let launching = Launching::until(self.deadline, self.mark).watching({
            let peers = group.peers.clone();
            move || peers.over()
        });
        let launching = Arc::new(launching);
        {
            let mut state = group.state.lock();
            if let Some(failure) = state.failed.clone() {
                drop(state);
                return self.end(Some(failure));
            }
            state.current = Some(launching.clone());
        }
        let outcome = match self.deadline.checked_duration_since(Instant::now()) {
            None => Err(Arc::new(self.overdue())),
            Some(_) => launching.run(|| self.launch(&launching)),
        };
        group.state.lock().current = None;
        match outcome {
            Err(failure) => {
                group.fail(failure.clone());
                self.end(Some(failure));
            }
            Ok((prepared, outputs, event)) => {
                let flight = Box::new(Flight { job: self, prepared, outputs, event });
                // On a virtual slice the launch is the whole of it.
                if flight.event.is_ready().unwrap_or(true) {
                    return flight.end();
                }
                let chip = &group.chip;
                let bell = Arc::new(Bell(chip.landing.clone(), chip.client.plugin().clone()));
                if let Err(error) = flight.event.on_ready(bell) {
                    // The thread looks at the event all the same, now and then.
                    tracing::warn!(%error, "a program's end is not told");
                }
                if let Err(refused) = chip.landing.send(Landed::Started(flight))
                    && let Landed::Started(flight) = refused.0
                {
                    flight.end();
                }
            }
        }
    }

    /// The program for this call, as all members know it.
    fn key(&self, launching: &Launching) -> Result<key::Key, Arc<Failure>> {
        let (group, collective) = (&self.group, &self.call.collective);
        let unsupported =
            |reason: Unsupported| Arc::new(Failure::Unsupported { op: collective.to_string(), reason: reason.into() });
        let target = group.chip.target;
        let mut numbers = key::unknown_to_others(collective);
        if !numbers.is_empty() && group.size > 1 {
            let why =
                |why| Arc::new(Failure::Aborted { by: None, why: format!("{collective}: agreeing on sizes: {why}") });
            group.peers.most(&mut numbers, launching.left()).map_err(why)?;
        }
        key::agreed(collective, group.size, target, &numbers).map_err(unsupported)
    }

    fn launch(&self, launching: &Launching) -> Result<Launched, Arc<Failure>> {
        let (group, Call { collective, .. }) = (&self.group, &self.call);
        let chip = &group.chip;
        let key = self.key(launching)?;
        let unsupported = |reason| Arc::new(Failure::Unsupported { op: collective.to_string(), reason });
        let prepared = group.arrangement.prepared(chip.target, &key).map_err(unsupported)?;
        let loaded = group.arrangement.load(&chip.cache, &prepared);
        let loaded = loaded.map_err(|error| self.plugin_failure("compiling", error))?;
        let device = chip.client.devices()[0];
        let place = Place { client: &chip.client, constants: &chip.constants, device: 0 };
        let mut own: SmallVec<[Buffer; 4]> = SmallVec::new();
        let mut shared: SmallVec<[Arc<Buffer>; 4]> = SmallVec::new();
        // Whose: this call's buffers, copies made here, or such as are shared.
        let mut list: SmallVec<[(u8, usize); 8]> = SmallVec::new();
        let mut donate = self.call.inputs.is_none() || self.call.donate;
        for (port, shape) in prepared.program.inputs.iter().zip(&prepared.inputs) {
            if let Role::Data(part) = port.role {
                if let Some(inputs) = &self.call.inputs
                    && part < inputs.len()
                {
                    list.push((0, part));
                    continue;
                }
                let given = collective.parts.get(part).and_then(|one| {
                    launch::gives(collective.kind, group.me, one, &prepared.key.op, prepared.key.parts[part].elements)
                });
                if let (Some((blocks, lay)), None) = (given, &self.call.inputs) {
                    let lies = stage::lies(&blocks, lay, shape.bytes)
                        .filter(|data| data.addr().is_multiple_of(VIEW_ALIGNMENT));
                    let copied = match lies.filter(|_| chip.played && chip.on_host) {
                        Some(data) => {
                            donate = false;
                            // SAFETY: aligned, as many bytes as the buffer has, and the caller's to stay as they are
                            // until `keep` is dropped; the launch is over when it returns.
                            unsafe { chip.client.view(data, shape.element, &shape.dims, &device) }
                        }
                        // SAFETY: the caller keeps its tensors readable until `keep` is dropped, which this job holds.
                        None => unsafe { stage::to_device(&chip.client, &device, shape, &blocks, lay) },
                    };
                    list.push((1, own.len()));
                    own.push(copied.map_err(|error| self.plugin_failure("copying to the device for", error))?);
                    continue;
                }
                // Others use it as well.
                donate = false;
            }
            let other = launch::other(&place, collective, port.role, shape);
            list.push((2, shared.len()));
            shared.push(other.map_err(|error| self.plugin_failure("copying to the device for", error))?);
        }
        let given = self.call.inputs.as_deref().unwrap_or_default();
        let arguments: SmallVec<[&Buffer; 8]> = list
            .iter()
            .map(|&(whose, index)| match whose {
                0 => &given[index],
                1 => &own[index],
                _ => &*shared[index],
            })
            .collect();
        if chip.played && chip.on_host && self.call.inputs.is_none() {
            self.offer(launching, &prepared);
        }
        self.ticket.stamp(|times| {
            times.launched = now();
            times.gathered = times.launched;
        });
        let (mut outputs, mut done) = (SmallVec::new(), None);
        let outcome = loaded.launch_flat(
            1,
            &arguments,
            donate,
            |_, _, buffer| outputs.push(buffer),
            |_, event| done = Some(event),
        );
        outcome.map_err(|error| self.plugin_failure("running", error))?;
        self.ticket.stamp(|times| times.returned = now());
        chip.launched.fetch_add(1, Relaxed);
        match done {
            Some(event) => Ok((prepared, outputs, event)),
            None => Err(Arc::new(Failure::Aborted { by: None, why: "the launch gave no event".to_owned() })),
        }
    }

    /// Lets results be written where they are to be, if they lie there as the program has them.
    fn offer(&self, launching: &Launching, prepared: &Prepared) {
        let (group, collective) = (&self.group, &self.call.collective);
        for (index, part) in collective.parts.iter().enumerate() {
            let elements = prepared.key.parts[index].elements;
            let taken = launch::takes(collective.kind, group.me, part, &prepared.key.op, elements);
            let (Some((blocks, lay)), Some(shape)) = (taken, prepared.outputs.get(index)) else { continue };
            let lies = stage::lies(&blocks, lay, shape.bytes);
            if let Some(data) = lies.filter(|data| data.addr().is_multiple_of(VIEW_ALIGNMENT)) {
                launching.offer(index, data, shape.bytes);
            }
        }
    }

    /// Lets go of the memory, and tells the caller.
    fn end(self, failure: Option<Arc<Failure>>) {
        let Job { group, call, ticket, .. } = self;
        group.forget(&ticket);
        ticket.end(failure);
        if let Some(keep) = call.keep {
            release(&group.runner, keep);
        }
    }
}

/// What lets go of memory may do anything: never on the chip's own threads.
fn release(runner: &Runner, keep: Keep) {
    runner(Box::new(move || drop(keep)));
}

impl Flight {
    /// The device is done: results are copied out.
    fn end(self) {
        let Flight { mut job, prepared, mut outputs, event } = self;
        let group = job.group.clone();
        let outcome = event.wait().map_err(|error| job.plugin_failure("running", error));
        job.ticket.stamp(|times| times.computed = now());
        let outcome = outcome.and_then(|()| {
            if job.call.inputs.is_some() {
                job.ticket.deliver(std::mem::take(&mut outputs));
                return Ok(());
            }
            let collective = &job.call.collective;
            for (index, part) in collective.parts.iter().enumerate() {
                let elements = prepared.key.parts[index].elements;
                let taken = launch::takes(collective.kind, group.me, part, &prepared.key.op, elements);
                let Some((blocks, lay)) = taken else { continue };
                let (Some(buffer), Some(shape)) = (outputs.get(index), prepared.outputs.get(index)) else { continue };
                // SAFETY: the caller keeps its tensors until `keep` is dropped, which this job holds; validation has
                // refused outputs that overlap.
                let copied = unsafe { stage::from_device(group.chip.on_host, buffer, shape.bytes, &blocks, lay) };
                copied.map_err(|error| job.plugin_failure("copying from the device after", error))?;
            }
            if let Some(after) = job.call.after.take() {
                after();
            }
            Ok(())
        });
        drop(outputs);
        if let Err(failure) = &outcome {
            group.fail(failure.clone());
        }
        job.end(outcome.err());
    }
}

impl Group {
    fn fail(&self, failure: Arc<Failure>) {
        let tickets = {
            let mut state = self.state.lock();
            if state.failed.is_some() {
                return;
            }
            state.failed = Some(failure.clone());
            if let Some(current) = &state.current {
                current.stop(&failure.to_string());
            }
            std::mem::take(&mut state.live)
        };
        for ticket in tickets {
            ticket.end(Some(failure.clone()));
        }
    }

    fn forget(&self, ticket: &Arc<Ticket>) {
        self.state.lock().live.retain(|live| !Arc::ptr_eq(live, ticket));
    }
}

impl Seat {
    /// Starts an operation; waits for nobody.
    pub fn post(&self, call: Call) -> Arc<Ticket> {
        let group = &self.0;
        let ticket = group.free.take(call.seq, call.timeout, &group.runner);
        ticket.stamp(|times| times.arrived = now());
        group.free.give(ticket.clone());
        let broken = {
            let mut state = group.state.lock();
            if state.closed && state.failed.is_none() {
                let why = format!("{} after the group was closed", call.collective);
                state.failed = Some(Arc::new(Failure::Aborted { by: None, why }));
            }
            if state.failed.is_none() {
                state.live.push(ticket.clone());
            }
            state.failed.clone()
        };
        let refused = match broken {
            Some(failure) => Some((call, failure)),
            None => {
                let now = Instant::now();
                let deadline = now.checked_add(call.timeout).unwrap_or(now + Duration::from_secs(315_360_000));
                let gone = || Arc::new(Failure::Aborted { by: None, why: "the chip's thread is gone".to_owned() });
                group.chip.submit(group, call, ticket.clone(), deadline).map(|call| (call, gone()))
            }
        };
        if let Some((call, failure)) = refused {
            group.forget(&ticket);
            ticket.end(Some(failure));
            if let Some(keep) = call.keep {
                release(&group.runner, keep);
            }
        }
        ticket
    }

    /// Compiles the programs of calls ahead of time, as far as this rank alone knows them.
    pub fn warm(&self, calls: &[Collective], mut progress: impl FnMut(usize, usize)) -> Result<(), Failure> {
        let (group, chip) = (&self.0, &self.0.chip);
        progress(0, calls.len());
        for (index, call) in calls.iter().enumerate() {
            let unsupported = |reason| Failure::Unsupported { op: call.to_string(), reason };
            let key = key::of(call, group.size, chip.target).map_err(|reason| unsupported(reason.into()))?;
            let prepared = group.arrangement.prepared(chip.target, &key).map_err(unsupported)?;
            group.arrangement.load(&chip.cache, &prepared).map_err(|error| Failure::Plugin {
                doing: "compiling",
                program: call.to_string(),
                group: group.name.clone(),
                slice: chip.name.clone(),
                rank: Some(group.me),
                error: Box::new(error),
            })?;
            progress(index + 1, calls.len());
        }
        Ok(())
    }

    /// Whether a collective of the group has a program. The same on all members.
    pub fn has_program(&self, collective: &Collective) -> bool {
        self.0.chip.has_program(collective, self.0.size)
    }

    /// Fails everything under way and to come, here.
    pub fn fail(&self, failure: Failure) {
        self.0.fail(Arc::new(failure));
    }

    /// Why the group is broken, if it is.
    pub fn failure(&self) -> Option<Arc<Failure>> {
        self.0.state.lock().failed.clone()
    }

    /// Operations under way.
    pub fn pending(&self) -> usize {
        self.0.state.lock().live.len()
    }

    /// Ends this member's part; what was posted goes on.
    pub fn close(&self) {
        self.0.state.lock().closed = true;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.close();
    }
}
