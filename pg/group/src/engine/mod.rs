//! Engines: what runs a group's collectives.
//!
//! Tensors in this process's memory go to the fabric ([`crate::ProcessGroup::post`]); tensors on devices, or that are to
//! go there, to a device engine ([`crate::ProcessGroup::post_device`]). The two don't know each other, and each numbers
//! its collectives by itself: both kinds may be under way in one group at once.
//!
//! A device engine is an [`Engine`] of one group. There are two kinds: for ranks that are threads of one process, over one
//! client of many devices ([`Devices`]), and for a process that holds one device of many
//! ([`podring_ici::engine::Chip`]), as on a TPU.
//!
//! Across slices (see [`across`]) a group's collectives are a program inside each slice, the fabric between slices, and
//! a program again.

mod across;
mod chip;
mod device;
mod share;
mod wanted;

use std::{sync::Arc, time::Duration};

use podring_collective::{Collective, Keep};
use podring_fabric::error::Failure as HostFailure;
use podring_fabric::hub::{Callback, State, Waited};
use podring_ici::engine::{self as ici, Chip, GroupSpec, Machine, OpenError, Runner};
use podring_ici::pjrt::{Buffer, PjrtError};
use smallvec::SmallVec;

pub(crate) use across::Line;
pub use share::{Patience, StoreShare};
pub use wanted::Wanted;

use crate::runtime::Process;
use crate::store::Store;
use crate::world::World;

/// Why an operation, or its group, failed.
#[derive(Clone, Debug)]
pub enum Broken {
    /// On the hosts' network.
    Host(Arc<HostFailure>),
    /// On the devices.
    Device(Arc<ici::Failure>),
}

/// An operation for a device engine. The collective has been validated.
pub struct DeviceCall {
    /// What to do.
    pub collective: Collective,
    /// Inputs that lie on this rank's device already, one per part, in the program's layout (docs/ici.md). Then results
    /// stay there too, and the collective's tensors only say how many elements there are. Else tensors are copied there
    /// and back.
    pub inputs: Option<SmallVec<[Buffer; 1]>>,
    /// `inputs` may be overwritten.
    pub donate: bool,
    /// Dropped when the tensors' memory is no longer used.
    pub keep: Option<Keep>,
    /// When it is overdue; the group's, if none.
    pub timeout: Option<Duration>,
}

impl DeviceCall {
    /// For tensors in this process's memory.
    pub fn staged(collective: Collective) -> Self {
        DeviceCall { collective, inputs: None, donate: false, keep: None, timeout: None }
    }
}

/// An operation of a device engine under way or ended.
pub trait Operation: Send + Sync {
    /// How far it is.
    fn state(&self) -> State;
    /// Why it failed, if it did.
    fn broken(&self) -> Option<Broken>;
    /// Its number in the group.
    fn seq(&self) -> u64;
    /// A number no other operation of this process has.
    fn key(&self) -> u64;
    /// Its deadline, from the call on.
    fn timeout(&self) -> Duration;
    /// Whom a receive got its message from.
    fn source(&self) -> Option<u32>;
    /// Registers a callback, run elsewhere; gives it back if the operation has ended already.
    fn on_end(&self, callback: Callback) -> Option<Callback>;
    /// Waits until it has ended, `limit` has passed, or `interrupted` (asked now and then) says to stop.
    fn wait(&self, limit: Option<Duration>, interrupted: &mut dyn FnMut() -> bool) -> Waited;
    /// The results of an operation on device buffers, once it is done.
    fn take_outputs(&self) -> SmallVec<[Buffer; 1]>;
    /// When what happened, where the engine knows.
    fn times(&self) -> Option<ici::Times>;
}

impl Operation for ici::Ticket {
    fn state(&self) -> State {
        match self.state() {
            ici::State::Pending => State::Pending,
            ici::State::Done => State::Done,
            ici::State::Failed => State::Failed,
        }
    }

    fn broken(&self) -> Option<Broken> {
        self.failure().map(Broken::Device)
    }

    fn seq(&self) -> u64 {
        self.seq()
    }

    fn key(&self) -> u64 {
        self.key()
    }

    fn timeout(&self) -> Duration {
        self.timeout()
    }

    fn source(&self) -> Option<u32> {
        self.source()
    }

    fn on_end(&self, callback: Callback) -> Option<Callback> {
        self.on_end(callback)
    }

    fn wait(&self, limit: Option<Duration>, interrupted: &mut dyn FnMut() -> bool) -> Waited {
        match self.wait(limit, interrupted) {
            ici::Waited::Ended => Waited::Ended,
            ici::Waited::TimedOut => Waited::TimedOut,
            ici::Waited::Interrupted => Waited::Interrupted,
        }
    }

    fn take_outputs(&self) -> SmallVec<[Buffer; 1]> {
        self.take_outputs()
    }

    fn times(&self) -> Option<ici::Times> {
        Some(self.times())
    }
}

/// What runs the device collectives of one group, for one of its members. Closed when dropped.
pub trait Engine: Send + Sync {
    /// Whether a collective has a program; what has none goes over the hosts' network. The same on all members.
    fn runs(&self, _collective: &Collective) -> bool {
        true
    }
    /// Starts an operation of number `seq` (the same on all members); waits for nobody.
    fn post(&self, seq: u64, call: DeviceCall, timeout: Duration) -> Arc<dyn Operation>;
    /// Compiles the programs of calls ahead of time; `progress` is told how many are ready.
    fn warm(&self, calls: &[Collective], progress: &mut dyn FnMut(usize, usize)) -> Result<(), Broken>;
    /// Fails everything under way and to come, on all members that this engine reaches.
    fn fail(&self, by: Option<u32>, why: &str);
    /// Why the group is broken, if it is.
    fn broken(&self) -> Option<Broken>;
    /// This member's operations under way.
    fn pending(&self) -> usize;
    /// Ends this member's part: who needs it fails.
    fn close(&self);
}

/// The devices of a job as a process reaches them: a machine, whose devices are one of the job's slices. Ranks of the
/// default group are counted slice by slice, each rank having one device.
#[derive(Clone)]
pub struct Devices {
    /// The devices of this rank's slice, shared with the ranks that are threads of this process.
    pub machine: Arc<Machine>,
    /// Slices in the job, each of as many devices.
    pub slices: u32,
    /// Which of them the machine is.
    pub slice: u32,
}

/// What a rank has of its job's devices.
#[derive(Clone)]
pub enum Hardware {
    /// The devices of a slice, in one process with all of the slice's ranks.
    Machine(Devices),
    /// One device: rank r of the default group holds the r-th of the job's, which may be of several slices.
    Chip(Arc<Chip>),
}

impl Hardware {
    /// The engine of a group; none if its device collectives have to go over the hosts' network.
    pub(crate) fn open(&self, opening: &Opening) -> Result<Option<Arc<dyn Engine>>, DeviceError> {
        match self {
            Hardware::Machine(devices) => devices.open(opening),
            Hardware::Chip(chip) => chip::open(chip, opening),
        }
    }
}

/// Why a group gets no device engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The job's ranks are not its devices.
    #[error(
        "group {group}: {ranks} ranks, but {slices} slice{} of {devices} devices ({machine}): expected {}",
        if *slices == 1 { "" } else { "s" }, slices * devices
    )]
    Count {
        /// The group's name.
        group: String,
        /// Ranks of the default group.
        ranks: u32,
        /// Slices.
        slices: u32,
        /// Devices of a slice.
        devices: u32,
        /// The machine's name.
        machine: String,
    },
    /// This rank's device is in another slice than the process's machine.
    #[error("group {group}: rank {rank} belongs to slice {expected}, but this process holds slice {got}")]
    Slice {
        /// The group's name.
        group: String,
        /// The rank in the default group.
        rank: u32,
        /// Its slice.
        expected: u32,
        /// The machine's.
        got: u32,
    },
    /// A process holds another device than its rank's.
    #[error("group {group}: rank {rank} holds device {device} of {slice}: expected rank r to hold device r")]
    Chip {
        /// The group's name.
        group: String,
        /// The rank in the default group.
        rank: u32,
        /// The device's place among the job's.
        device: u32,
        /// The slice.
        slice: String,
    },
    /// The plugin's client can't be used.
    #[error("the process's chip: {0}")]
    Client(#[from] PjrtError),
    /// The devices make no group.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The rings between slices can't be opened.
    #[error("group {group}: the hosts' network between slices: {reason}")]
    Between {
        /// The group's name.
        group: String,
        /// Why.
        reason: String,
    },
}

/// What opening a group's engine needs to know.
pub(crate) struct Opening<'a> {
    pub process: &'a Arc<Process>,
    pub channel: u64,
    pub name: &'a str,
    /// This rank in the group.
    pub me: u32,
    /// Each member's rank in the default group.
    pub global: &'a [u32],
    /// Whether this is the default group.
    pub whole: bool,
    pub world: &'a World,
    pub epoch: u64,
    /// The group's own.
    pub store: &'a Arc<dyn Store>,
}

/// With this rank's number in the group, where the devices' engine has the one in its slice's part.
fn numbered(error: OpenError, me: u32) -> OpenError {
    match error {
        OpenError::Disagree { group, .. } => OpenError::Disagree { group, rank: me },
        other => other,
    }
}

impl Devices {
    pub(crate) fn runner(process: &Process) -> Runner {
        let pool = process.hub.callbacks().clone();
        Arc::new(move |callback: ici::Callback| pool.run(callback))
    }

    /// The engine of a group; none if its device collectives have to go over the hosts' network.
    pub(crate) fn open(&self, opening: &Opening) -> Result<Option<Arc<dyn Engine>>, DeviceError> {
        let per_slice = self.machine.devices();
        let group = || opening.name.to_owned();
        if opening.whole && opening.global.len() as u32 != per_slice * self.slices {
            let (ranks, machine) = (opening.global.len() as u32, self.machine.name().to_owned());
            return Err(DeviceError::Count { group: group(), ranks, slices: self.slices, devices: per_slice, machine });
        }
        let rank = opening.global[opening.me as usize];
        if rank / per_slice != self.slice {
            let (expected, got) = (rank / per_slice, self.slice);
            return Err(DeviceError::Slice { group: group(), rank, expected, got });
        }
        let place = |rank: u32| (rank / per_slice, rank % per_slice);
        // The members of each slice, as positions in the group.
        let mut inside: Vec<Vec<u32>> = vec![Vec::new(); self.slices as usize];
        for (position, &rank) in opening.global.iter().enumerate() {
            match inside.get_mut(place(rank).0 as usize) {
                Some(members) => members.push(position as u32),
                None => {
                    let machine = self.machine.name().to_owned();
                    let (ranks, slices) = (rank + 1, self.slices);
                    return Err(DeviceError::Count { group: group(), ranks, slices, devices: per_slice, machine });
                }
            }
        }
        let mine = &inside[self.slice as usize];
        let devices = mine.iter().map(|&position| place(opening.global[position as usize]).1).collect();
        let me = mine.iter().position(|&position| position == opening.me).unwrap_or(0) as u32;
        let spec = GroupSpec { id: opening.channel, name: group(), devices };
        let touched: Vec<Vec<u32>> = inside.iter().filter(|members| !members.is_empty()).cloned().collect();
        if touched.len() > 1 && touched.iter().any(|members| members.len() != touched[0].len()) {
            return Ok(None);
        }
        let opened = self.machine.open(&spec, me, Self::runner(opening.process));
        let member = opened.map_err(|error| numbered(error, opening.me))?;
        let inside = device::Inside::new(member);
        if touched.len() == 1 {
            return Ok(Some(Arc::new(inside)));
        }
        let across = across::Across::open(opening, Box::new(inside), Arc::default(), &touched, me)?;
        Ok(Some(Arc::new(across)))
    }
}
