//! In a steady state a collective on device buffers allocates nothing of ours: counted at Rust's allocator, over all
//! threads of the process. (The plugin allocates by its own.)

#![allow(clippy::unwrap_used, reason = "a test")]

mod counting;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use counting::ALLOCATIONS;
use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Reduction, Tensor};
use podring_group::engine::{DeviceCall, Devices};
use podring_group::{Config, HubConfig, MemoryStore, ProcessGroup, Runtime};
use podring_ici::engine::{Machine, Options};
use podring_ici::pjrt::{Client, Element, Plugin, Value, Want, find};
use smallvec::SmallVec;

/// The watchdog, which looks twice a second, allocates a little in a stretch.
const ENOUGH: u64 = 40;

#[test]
fn nothing_is_allocated_per_collective() {
    let environment = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.venv");
    let file = match find(Want::Cpu, &[environment]) {
        Ok(file) => file,
        Err(error) => {
            assert!(std::env::var("PODRING_REQUIRE_PJRT").as_deref() != Ok("1"), "{error}");
            eprintln!("NOT RUN: {error}");
            return;
        }
    };
    // SAFETY: XLA's CPU plugin, pinned in requirements/ici.txt.
    let plugin = unsafe { Plugin::load(&file) }.unwrap();
    let client = Client::create(&plugin, &[("cpu_device_count", Value::Int(2))]).unwrap();
    let machine = Machine::start(client, Options::default()).unwrap();
    let store = MemoryStore::default();
    // The fewest allocations of a stretch, as rank 0 counts them.
    let (together, fewest) = (Barrier::new(2), AtomicU64::new(u64::MAX));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, together, fewest, machine) = (store.clone(), &together, &fewest, machine.clone());
            scope.spawn(move || {
                let devices = Devices { machine: machine.clone(), slices: 1, slice: 0 };
                let runtime = Runtime::start_on(HubConfig::default(), Some(devices)).unwrap();
                let config = Config {
                    rank,
                    size: 2,
                    name: "steady".into(),
                    global_ranks: None,
                    timeout: Duration::from_secs(60),
                    store: Arc::new(store),
                    rendezvous: None,
                };
                let group = ProcessGroup::form(&runtime, config, || false).unwrap();
                let device = machine.client().devices()[rank as usize];
                let laid = vec![0u8; 4096];
                let mut buffer = Some(machine.client().buffer(&laid, Element::F32, &[1, 8, 128], &device).unwrap());
                let mut round = |times: usize| {
                    for _ in 0..times {
                        let nothing = Tensor { data: std::ptr::dangling_mut(), layout: Layout::flat(1000) };
                        let both = || Blocks::whole(nothing.clone());
                        let (dtype, reduction) = (DType::F32, Some(Reduction::Sum));
                        let part = Part { dtype, reduction, inputs: both(), outputs: both() };
                        let collective = Collective { kind: Kind::AllReduce, parts: SmallVec::from_iter([part]) };
                        let inputs = buffer.take().map(|buffer| SmallVec::from_iter([buffer]));
                        let call = DeviceCall { inputs, donate: true, ..DeviceCall::staged(collective) };
                        let work = group.post_device(call).unwrap();
                        work.wait(Some(Duration::from_secs(60)), || false).unwrap();
                        buffer = work.take_outputs().pop();
                    }
                };
                for _ in 0..6 {
                    together.wait();
                    let before = ALLOCATIONS.load(Ordering::SeqCst);
                    together.wait();
                    round(200);
                    together.wait();
                    if rank == 0 {
                        fewest.fetch_min(ALLOCATIONS.load(Ordering::SeqCst) - before, Ordering::SeqCst);
                    }
                    together.wait();
                    // One such stretch is enough.
                    if fewest.load(Ordering::SeqCst) < ENOUGH {
                        break;
                    }
                }
                let fewest = fewest.load(Ordering::SeqCst);
                // One per collective would be 400.
                assert!(fewest < ENOUGH, "{fewest} allocations in 400 collectives");
                group.shutdown();
                runtime.stop();
            });
        }
    });
}
