//! Machines, and ranks on them.

use std::{path::PathBuf, sync::Arc, time::Duration};

use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Reduction, Tensor};
use podring_group::{
    Config, Error, HubConfig, MemoryStore, ProcessGroup, Runtime, Work,
    engine::{DeviceCall, Devices},
};
use podring_ici::{
    cache::Disk,
    engine::{Machine, Options},
    pjrt::{Client, PjrtError, Plugin, Value, Want, find},
};
use smallvec::SmallVec;

pub const LONG: Duration = Duration::from_secs(60);

/// XLA's CPU plugin, or none where there is none and none is required.
pub fn plugin() -> Option<Arc<Plugin>> {
    let environment = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.venv");
    match find(Want::Cpu, &[environment]) {
        // SAFETY: XLA's CPU plugin, pinned in requirements/ici.txt.
        Ok(file) => Some(unsafe { Plugin::load(&file) }.unwrap()),
        Err(error @ PjrtError::NoPlugin { .. }) => {
            assert!(std::env::var("PODRING_REQUIRE_PJRT").as_deref() != Ok("1"), "{error}");
            eprintln!("NOT RUN: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

pub fn client(devices: u32) -> Option<Client> {
    let plugin = plugin()?;
    let client = Client::create(&plugin, &[("cpu_device_count", Value::Int(devices.into()))]).unwrap();
    assert_eq!(client.devices().len(), devices as usize);
    Some(client)
}

pub fn machine_with(devices: u32, options: Options) -> Option<Arc<Machine>> {
    Some(Machine::start(client(devices)?, options).unwrap())
}

/// A machine whose programs are kept between tests, each of which may be a process of its own. Many small programs:
/// most of the time would go to optimizing them.
pub fn machine(devices: u32) -> Option<Arc<Machine>> {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("programs");
    let disk = Disk::open(&directory, 1 << 30).unwrap();
    let overrides = vec![
        ("xla_backend_optimization_level".to_owned(), Value::Int(0)),
        ("xla_llvm_disable_expensive_passes".to_owned(), Value::Bool(true)),
    ];
    machine_with(devices, Options { disk: Some(disk), overrides, ..Options::default() })
}

/// Runs `body` as each rank of a job over `machines`, slice by slice; panics are passed on.
pub fn run_over<R: Send>(machines: &[Arc<Machine>], timeout: Duration, body: impl Fn(&Rank) -> R + Sync) -> Vec<R> {
    let store = MemoryStore::default();
    let per_slice = machines[0].devices();
    let size = per_slice * machines.len() as u32;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (store, body) = (store.clone(), &body);
                scope.spawn(move || {
                    let slice = rank / per_slice;
                    let slices = machines.len() as u32;
                    let devices = Devices { machine: machines[slice as usize].clone(), slices, slice };
                    // A slice is a host of its own.
                    let config = HubConfig { host: Some(format!("slice{slice}")), ..HubConfig::default() };
                    let runtime = Runtime::start_on(config, Some(devices)).unwrap();
                    let me = Rank { runtime: runtime.clone(), rank, size, store: store.clone(), timeout };
                    let result = body(&me);
                    runtime.stop();
                    result
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

pub fn run<R: Send>(machine: &Arc<Machine>, timeout: Duration, body: impl Fn(&Rank) -> R + Sync) -> Vec<R> {
    run_over(std::slice::from_ref(machine), timeout, body)
}

/// Runs `body` with the default group.
pub fn world<R: Send>(machine: &Arc<Machine>, timeout: Duration, body: impl Fn(&ProcessGroup) -> R + Sync) -> Vec<R> {
    run(machine, timeout, |rank| {
        let group = rank.world().unwrap();
        let result = body(&group);
        group.shutdown();
        result
    })
}

pub struct Rank {
    pub runtime: Runtime,
    pub rank: u32,
    pub size: u32,
    store: MemoryStore,
    timeout: Duration,
}

impl Rank {
    pub fn world(&self) -> Result<ProcessGroup, Error> {
        self.world_of(self.size)
    }

    pub fn world_of(&self, size: u32) -> Result<ProcessGroup, Error> {
        self.form(self.rank, size, "world", None)
    }

    /// A group of these ranks of the world; none on others.
    pub fn group(&self, name: &str, ranks: &[u32]) -> Option<ProcessGroup> {
        let me = ranks.iter().position(|&rank| rank == self.rank)?;
        Some(self.form(me as u32, ranks.len() as u32, name, Some(ranks.to_vec())).unwrap())
    }

    fn form(&self, rank: u32, size: u32, name: &str, global_ranks: Option<Vec<u32>>) -> Result<ProcessGroup, Error> {
        let store = Arc::new(self.store.clone());
        let config =
            Config { rank, size, name: name.into(), global_ranks, timeout: self.timeout, store, rendezvous: None };
        ProcessGroup::form(&self.runtime, config, || false)
    }
}

pub fn tensor<T>(data: &mut [T]) -> Tensor {
    Tensor { data: data.as_mut_ptr().cast(), layout: Layout::flat(data.len()) }
}

/// A tensor of this many elements over bytes, which may be none.
pub fn over(bytes: &mut [u8], dtype: DType) -> Tensor {
    Tensor { data: bytes.as_mut_ptr(), layout: Layout::flat(bytes.len() / dtype.size()) }
}

pub fn one(kind: Kind, dtype: DType, reduction: Option<Reduction>, inputs: Blocks, outputs: Blocks) -> Collective {
    Collective { kind, parts: SmallVec::from_iter([Part { dtype, reduction, inputs, outputs }]) }
}

pub fn all_reduce(data: &mut [f32]) -> Collective {
    let tensor = tensor(data);
    one(Kind::AllReduce, DType::F32, Some(Reduction::Sum), Blocks::whole(tensor.clone()), Blocks::whole(tensor))
}

pub fn barrier() -> Collective {
    Collective { kind: Kind::Barrier, parts: SmallVec::new() }
}

pub fn post(group: &ProcessGroup, collective: Collective) -> Work {
    group.post_device(DeviceCall::staged(collective)).unwrap()
}

pub fn finish(group: &ProcessGroup, collective: Collective) -> Result<(), Error> {
    post(group, collective).wait(Some(LONG), || false)
}

/// A small generator (splitmix64), so that data is the same on every run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..count.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
        bytes.truncate(count);
        bytes
    }
}
