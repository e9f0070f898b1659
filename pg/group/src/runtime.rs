//! What a process has of podring: its hub, and what its groups share.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use podring_fabric::fork;
use podring_fabric::hub::{self, Hub};
use rustc_hash::FxHashMap;

use crate::engine::{Devices, Engine, Hardware, Line};
use crate::error::Error;
use crate::watchdog::Watchdog;
use crate::world::Current;

/// A hub and what the groups over it share. Cheap to clone.
#[derive(Clone)]
pub struct Runtime(pub(crate) Arc<Process>);

pub(crate) struct Process {
    pub hub: Hub,
    pub watchdog: Arc<Watchdog>,
    pub current: Mutex<Current>,
    /// How often a group of each name was made.
    pub epochs: Mutex<FxHashMap<String, u64>>,
    /// The job's devices, if this rank has one.
    pub devices: Option<Hardware>,
    /// Device engines by their group's channel.
    pub engines: Mutex<Vec<(u64, Weak<dyn Engine>)>>,
    /// For operations on this process's chip, in a job of several slices.
    pub line: Arc<Line>,
    generation: u32,
}

/// The process's own, made by the first group. Forked children make theirs; the parent's is left alone, since its locks
/// may be held by threads that don't exist in the child.
static GLOBAL: AtomicPtr<Runtime> = AtomicPtr::new(std::ptr::null_mut());
/// The fork generation in which somebody is making it; `u32::MAX` for none. A mark from before a fork doesn't count.
static MAKING: AtomicU32 = AtomicU32::new(u32::MAX);

impl Runtime {
    /// A runtime of its own, apart from the process's. Several may live in one process, as ranks that don't know of it.
    pub fn start(config: hub::Config) -> Result<Runtime, Error> {
        Self::start_on(config, None)
    }

    /// The same for a rank that has a device: its groups have a device engine beside the fabric.
    pub fn start_on(config: hub::Config, devices: Option<Devices>) -> Result<Runtime, Error> {
        Self::start_with(config, devices.map(Hardware::Machine))
    }

    /// The same for any hardware.
    pub fn start_with(config: hub::Config, devices: Option<Hardware>) -> Result<Runtime, Error> {
        Ok(Runtime(Arc::new(Process {
            hub: Hub::start(config)?,
            watchdog: Arc::new(Watchdog::default()),
            current: Mutex::new(Current::default()),
            epochs: Mutex::new(FxHashMap::default()),
            devices,
            engines: Mutex::new(Vec::new()),
            line: Arc::default(),
            generation: fork::generation(),
        })))
    }

    /// The process's, started if need be with these settings.
    pub fn global(settings: impl Fn() -> Result<(hub::Config, Option<Hardware>), Error>) -> Result<Runtime, Error> {
        loop {
            if let Some(runtime) = Self::existing() {
                return Ok(runtime);
            }
            let (generation, mark) = (fork::generation(), MAKING.load(Ordering::Acquire));
            if mark == generation {
                std::thread::yield_now();
                continue;
            }
            if MAKING.compare_exchange(mark, generation, Ordering::AcqRel, Ordering::Acquire).is_err() {
                continue;
            }
            let made = settings().and_then(|(config, devices)| Runtime::start_with(config, devices));
            if let Ok(runtime) = &made {
                GLOBAL.store(Box::into_raw(Box::new(runtime.clone())), Ordering::Release);
            }
            MAKING.store(u32::MAX, Ordering::Release);
            return made;
        }
    }

    /// The process's, if there is one.
    fn existing() -> Option<Runtime> {
        // SAFETY: set to leaked boxes only, never freed.
        let known = unsafe { GLOBAL.load(Ordering::Acquire).as_ref() }?;
        (known.0.generation == fork::generation()).then(|| known.clone())
    }

    /// This process's own chip, if its groups run programs on one.
    pub fn chip() -> Option<Arc<podring_ici::engine::Chip>> {
        match &Self::existing()?.0.devices {
            Some(Hardware::Chip(chip)) => Some(chip.clone()),
            _ => None,
        }
    }

    /// Waits until no callback of the process's groups runs, then runs no more, and until the others have been sent what
    /// is theirs: the interpreter is about to end. `false` if the callbacks took longer than `limit`.
    pub fn drain(limit: Duration) -> bool {
        Self::existing().is_none_or(|runtime| {
            let drained = runtime.0.hub.callbacks().drain(limit);
            if !runtime.0.hub.finish() {
                tracing::debug!("a peer that takes nothing more");
            }
            drained
        })
    }

    /// Ends the runtime's progress thread. Only for runtimes whose groups are all shut.
    pub fn stop(&self) {
        self.0.hub.shut();
    }
}
