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

mod flight;
mod queue;

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use podring_collective::Collective;
use podring_topology::Slice;
use rustc_hash::FxHashMap;

use super::{
    constants::Constants,
    failure::Failure,
    group::{Call, GroupSpec, OpenError},
    key::{self, Target},
    launch::Arrangement,
    launching::Launching,
    order::Order,
    ticket::{Free, Runner, Ticket, now},
};
use crate::{
    cache::{Cache, Counts, Disk, Share, Shared},
    pjrt::{Client, PjrtError, Value},
    program::Backend,
    slice::{How, Plan, plan_alone},
};
use flight::{Job, Landed, land, release};
use queue::{Launcher, Queue};

/// How a chip is used.
#[derive(Default)]
pub struct ChipOptions {
    /// The slice that the devices are of, whose first ones they are in its list order. Without one programs run on all
    /// devices, or on one.
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
    /// Tells the others that the group has failed here, as far as nothing else does: it is over for them too.
    fn fail(&self, why: &str);
    /// Where members hand each other compiled programs, so that one compiles and the others get it.
    fn share(&self) -> Option<&dyn Share> {
        None
    }
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
    /// Groups that were to have programs and have none.
    refused: AtomicU64,
    order: Mutex<Order>,
    threads: Threads,
    /// What was posted and is not being launched yet.
    queue: Arc<Mutex<Queue>>,
    landing: mpsc::Sender<Landed>,
}

/// The threads that launch.
enum Threads {
    /// One for all groups.
    One(Arc<Launcher>),
    /// One for all groups of the same members, sorted, while there are any.
    Each(Mutex<FxHashMap<Vec<u32>, Weak<Launcher>>>),
}

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
        let made = Launcher::start()?;
        threads.insert(members.to_vec(), Arc::downgrade(&made));
        Ok(made)
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
    /// Its world's number and its own, in the order of posts.
    id: (u128, u64),
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
        let threads = if options.played { Threads::Each(Mutex::default()) } else { Threads::One(Launcher::start()?) };
        let (landing, landed) = mpsc::channel();
        let queue = Arc::<Mutex<Queue>>::default();
        let chip = Arc::new(Chip {
            cache: Cache::new(client.clone(), options.disk)?.with(options.overrides, None).within(&name),
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
            refused: AtomicU64::new(0),
            order: Mutex::default(),
            threads,
            queue: queue.clone(),
            landing,
        });
        let weak = Arc::downgrade(&chip);
        thread("podring-landing", move || land(&landed, &queue, &weak))?;
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

    /// Why no program is to be launched on these ranks' devices alone; none if one may be. The same on every rank.
    pub fn refuses(&self, members: &[u32]) -> Option<String> {
        match &self.slice {
            Some(slice) => match plan_alone(slice, members) {
                Ok(Plan { how: How::Whole(_) | How::Cover { .. } | How::Members { .. }, .. }) => None,
                Ok(plan) => Some(plan.why.to_owned()),
                Err(error) => Some(error.to_string()),
            },
            // All of a job's devices, or one, are no part of anything.
            None if members.len() == self.ids.len() || members.len() == 1 => None,
            None => Some("the slice isn't known, and so not whether the compiler takes a part of it".to_owned()),
        }
    }

    /// Counts a group that has no programs; the first is told of.
    pub fn refuse(&self, group: &str, why: &str) {
        if self.refused.fetch_add(1, Relaxed) == 0 {
            let slice = &self.name;
            tracing::warn!(
                group,
                slice,
                "a group's collectives go over the hosts' network, not as programs; others like it are counted: {why}"
            );
        }
    }

    /// Groups that have no programs, so far.
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// The slice that the devices are of.
    pub fn slice(&self) -> Option<&Slice> {
        self.slice.as_ref()
    }

    /// What is kept of groups: how many are open, and of how many sets of members it is known what was posted in groups
    /// that have ended, while their world stands.
    pub fn groups(&self) -> (usize, usize) {
        self.order.lock().known()
    }

    /// Opens a group of a world for this process. Every member does, with the same `spec`, whose devices are ranks.
    pub fn open(
        self: &Arc<Self>,
        world: u128,
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
        self.order.lock().enter(world, spec.id, members);
        Ok(Seat(Arc::new(Group {
            chip: self.clone(),
            name: spec.name.clone(),
            id: (world, spec.id),
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
        let mark = order.mark(group.id.0, group.id.1, fingerprint);
        let job = Job { group: group.clone(), call, ticket, deadline, mark };
        let untold = self.queue.lock().enter(&job);
        if untold {
            let _ = self.landing.send(Landed::Some);
        }
        group.jobs.send(job).map(|refused| {
            self.queue.lock().leave(&refused.ticket);
            refused.call
        })
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

impl Group {
    /// Fails everything under way and to come, here.
    fn fail(&self, failure: Arc<Failure>) {
        self.break_with(failure, false);
    }

    /// The same on all members.
    fn fail_all(&self, failure: Arc<Failure>) {
        self.break_with(failure, true);
    }

    fn break_with(&self, failure: Arc<Failure>, tell: bool) {
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
        if tell {
            // Before the caller hears of it, who may end the process.
            self.peers.fail(&failure.to_string());
        }
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
            let go_on = || self.failure().is_none() && group.peers.over().is_none();
            let shared = group.peers.share().map(|share| Shared { share, go_on: &go_on });
            // Whoever plays the program learns whose it is.
            let own = Arc::new(Launching::until(Instant::now(), 0));
            let loaded = own.run(|| group.arrangement.load(&chip.cache, &prepared, shared));
            loaded.map_err(|error| Failure::Plugin {
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
        let Group { chip, id, state, .. } = &*self.0;
        if !std::mem::replace(&mut state.lock().closed, true) {
            chip.order.lock().leave(id.0, id.1);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.close();
    }
}
