//! In a steady state a collective allocates nothing: counted at the allocator, over all threads of the process.

#![allow(clippy::unwrap_used, reason = "a test")]

mod counting;

use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use counting::ALLOCATIONS;
use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Reduction, Tensor};
use podring_group::{Config, HubConfig, MemoryStore, ProcessGroup, Runtime};
use smallvec::SmallVec;

fn all_reduce(group: &ProcessGroup, data: &mut [f32], sync: bool) {
    let whole = || Blocks::whole(Tensor { data: data.as_ptr().cast_mut().cast(), layout: Layout::flat(data.len()) });
    let part = Part { dtype: DType::F32, reduction: Some(Reduction::Sum), inputs: whole(), outputs: whole() };
    let collective = Collective { kind: Kind::AllReduce, parts: SmallVec::from_iter([part]) };
    group.post(collective, None, None, sync).unwrap().wait(None, || false).unwrap();
}

/// The test's own threads may allocate a little in a stretch.
const ENOUGH: u64 = 20;

#[test]
fn nothing_is_allocated_per_collective() {
    let store = MemoryStore::default();
    // The fewest allocations of a stretch, as rank 0 counts them.
    let (together, fewest) = (Barrier::new(2), AtomicU64::new(u64::MAX));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, together, fewest) = (store.clone(), &together, &fewest);
            scope.spawn(move || {
                let runtime = Runtime::start(HubConfig::default()).unwrap();
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
                let mut tensors = [vec![1.0f32; 2], vec![1.0; 10_000], vec![1.0; 300_000]];
                let mut round = |times: usize| {
                    for _ in 0..times {
                        for data in &mut tensors {
                            data.fill(1.0);
                            all_reduce(&group, data, true);
                            all_reduce(&group, data, false);
                        }
                    }
                };
                // Queues and pools grow to what the worst interleaving so far needed; on a busy machine that takes a
                // while. Then there must be a stretch in which collectives allocate nothing.
                for _ in 0..8 {
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
                // One per collective would be 2400.
                assert!(fewest < ENOUGH, "{fewest} allocations in 2400 collectives");
                group.shutdown();
                runtime.stop();
            });
        }
    });
}
