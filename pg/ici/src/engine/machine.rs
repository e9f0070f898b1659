//! The meeting point of the ranks that share a client: its devices, its programs, and the order of launches.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use podring_topology::Slice;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    constants::Constants,
    group::{Group, GroupSpec, Member, OpenError},
    key::Target,
    launch::Arrangement,
    ticket::{CHORES, Runner},
};
use crate::{
    cache::{Cache, Counts, Disk, Share},
    pjrt::{Client, PjrtError, Value},
    program::Backend,
};

/// How often deadlines are looked at while something is under way.
const TICK: Duration = Duration::from_millis(20);
/// How long the machine's thread sleeps when nothing is.
const REST: Duration = Duration::from_secs(5);

/// How a machine is used.
#[derive(Default)]
pub struct Options {
    /// The slice that the client's devices are, in its list order; none for plain devices, of which any set can run a
    /// program.
    pub slice: Option<Slice>,
    /// Sum 16-bit floats in f32 and round once, as the CPU fabric does it.
    pub exact: bool,
    /// Compiled programs are kept here.
    pub disk: Option<Disk>,
    /// Compiled programs are shared with the job's other machines.
    pub share: Option<Arc<dyn Share>>,
    /// XLA's options for every compile, by name.
    pub overrides: Vec<(String, Value)>,
}

/// A client's devices, for the ranks that are threads of this process: rank after rank has device after device.
///
/// **Launch order.** Programs are launched one at a time, each on all its devices in one call, in the order in which
/// their last rank came; so every device gets them in the same order, whatever groups share it and in whatever order
/// ranks called. A rank that comes never waits for another, so that two ranks may call two groups in different orders
/// as long as neither waits for its first before it calls its second.
pub struct Machine {
    client: Client,
    cache: Cache,
    slice: Option<Slice>,
    name: String,
    pub(super) target: Target,
    on_host: bool,
    pub(super) groups: Mutex<FxHashMap<u64, Arc<Group>>>,
    /// Held while a program is launched.
    pub(super) launching: Mutex<()>,
    pub(super) constants: Constants,
    pub(super) lent: AtomicU64,
    pub(super) landed: AtomicU64,
    chores: Arc<Chores>,
}

struct Chores {
    /// Something may be there to do.
    news: Mutex<bool>,
    bell: Condvar,
    /// The thread sleeps long: nothing was under way.
    resting: AtomicBool,
    started: AtomicBool,
    /// Operations under way.
    pending: AtomicUsize,
}

impl Machine {
    /// A machine over a client.
    pub fn start(client: Client, options: Options) -> Result<Arc<Machine>, PjrtError> {
        let on_host = client.platform()?.eq_ignore_ascii_case("cpu");
        let name = match &options.slice {
            Some(slice) => slice.to_string(),
            None => format!("{} {} devices", client.devices().len(), client.platform()?),
        };
        if let Some(slice) = &options.slice
            && slice.devices() as usize != client.devices().len()
        {
            return Err(PjrtError::Argument {
                what: "devices of the client",
                expected: format!("{}, those of slice {slice}", slice.devices()),
                got: client.devices().len().to_string(),
            });
        }
        let cache = Cache::new(client.clone(), options.disk)?.with(options.overrides, options.share).within(&name);
        Ok(Arc::new(Machine {
            cache,
            slice: options.slice,
            name,
            target: Target { backend: if on_host { Backend::Cpu } else { Backend::Tpu }, exact: options.exact },
            on_host,
            groups: Mutex::default(),
            launching: Mutex::new(()),
            constants: Constants::default(),
            lent: AtomicU64::new(0),
            landed: AtomicU64::new(0),
            chores: Arc::new(Chores {
                news: Mutex::new(false),
                bell: Condvar::new(),
                resting: AtomicBool::new(false),
                started: AtomicBool::new(false),
                pending: AtomicUsize::new(0),
            }),
            client,
        }))
    }

    /// The client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// How many devices.
    pub fn devices(&self) -> u32 {
        self.client.devices().len() as u32
    }

    /// The slice that the devices are.
    pub fn slice(&self) -> Option<&Slice> {
        self.slice.as_ref()
    }

    /// What errors call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How programs were come by so far.
    pub fn counts(&self) -> Counts {
        self.cache.counts()
    }

    /// Tensors in memory that devices read or wrote where they are, so far; and operations of which some were, whose
    /// results came to be where they are wanted with no copy.
    pub fn lent(&self) -> (u64, u64) {
        (self.lent.load(Relaxed), self.landed.load(Relaxed))
    }

    pub(super) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The devices' memory is this process's.
    pub(super) fn on_host(&self) -> bool {
        self.on_host
    }

    /// How a group of these devices runs.
    pub(super) fn arrangement(&self, group: &str, members: &[u32]) -> Result<Arrangement, OpenError> {
        let id = |device: u32| i64::from(self.client.devices()[device as usize].id);
        Arrangement::new(self.slice.as_ref(), id, group, members)
    }

    /// Opens a group for one of its members. Every member opens it, with the same `spec`.
    pub fn open(self: &Arc<Self>, spec: &GroupSpec, me: u32, runner: Runner) -> Result<Member, OpenError> {
        Group::open(self, spec, me, runner)
    }

    /// An operation began.
    pub(super) fn begun(self: &Arc<Self>) {
        self.chores.pending.fetch_add(1, SeqCst);
        if !self.chores.started.swap(true, SeqCst) {
            let (machine, chores) = (Arc::downgrade(self), self.chores.clone());
            let thread = std::thread::Builder::new().name(CHORES.into()).spawn(move || chores.run(&machine));
            if let Err(error) = thread {
                tracing::warn!(%error, "no thread for deadlines and results that nobody waits for");
                self.chores.started.store(false, SeqCst);
            }
        } else if self.chores.resting.load(SeqCst) {
            self.chores.ring();
        }
    }

    /// Operations ended.
    pub(super) fn ended(&self, count: usize) {
        self.chores.pending.fetch_sub(count, SeqCst);
    }

    /// Results wait to be copied out, and nobody waits for them.
    pub(super) fn look_for_results(&self) {
        self.chores.ring();
    }

    fn look(&self) {
        let groups: SmallVec<[Arc<Group>; 8]> = self.groups.lock().values().cloned().collect();
        let now = Instant::now();
        for group in groups {
            group.look(now);
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.chores.ring();
    }
}

impl Chores {
    fn ring(&self) {
        *self.news.lock() = true;
        self.bell.notify_one();
    }

    fn run(&self, machine: &Weak<Machine>) {
        let mut idle = 0;
        loop {
            {
                let mut news = self.news.lock();
                if !*news {
                    idle = if self.pending.load(SeqCst) > 0 { 0 } else { idle + 1 };
                    // A job that computes between its collectives is not idle yet.
                    let rest = idle > 100;
                    self.resting.store(rest, SeqCst);
                    if !rest || self.pending.load(SeqCst) == 0 {
                        self.bell.wait_for(&mut news, if rest { REST } else { TICK });
                    }
                    self.resting.store(false, SeqCst);
                }
                *news = false;
            }
            let Some(machine) = machine.upgrade() else { return };
            machine.look();
        }
    }
}
