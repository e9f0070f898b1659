//! Whole groups in one process: a hub per rank, a thread per rank.

#[path = "aliased_tests.rs"]
mod aliased;

use super::*;
use crate::error::Kind;
use crate::store::MemoryStore;
use podring_collective::{Blocks, DType, Layout, Part, Reduction, Tensor};
use podring_fabric::hub;
use smallvec::SmallVec;

#[path = "failure_tests.rs"]
mod failures;

/// Runs `body` as each rank of a new group; panics are passed on.
fn run<R: Send>(
    size: u32,
    config: impl Fn(u32) -> hub::Config + Sync,
    timeout: Duration,
    body: impl Fn(&ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (store, config, body) = (store.clone(), &config, &body);
                scope.spawn(move || {
                    let config = config(rank);
                    let form = Config {
                        rank,
                        size,
                        name: "world".into(),
                        global_ranks: None,
                        timeout,
                        store: Arc::new(store),
                        rendezvous: None,
                    };
                    let runtime = Runtime::start(config).unwrap();
                    let group = ProcessGroup::form(&runtime, form, || false).unwrap();
                    let result = body(&group);
                    group.shutdown();
                    runtime.stop();
                    result
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

fn local(_: u32) -> hub::Config {
    hub::Config::default()
}

fn staged(_: u32) -> hub::Config {
    hub::Config { cma: false, ..hub::Config::default() }
}

fn two_hosts(rank: u32) -> hub::Config {
    hub::Config { host: Some(format!("host{}", rank % 2)), ..hub::Config::default() }
}

#[test]
fn a_secret_from_outside_opens_links_on_every_road() {
    use podring_fabric::handshake::Secret;
    let secret = Some(Secret::new([1; 32]));
    run(3, |rank| hub::Config { secret: secret.clone(), ..two_hosts(rank / 2) }, LONG, sums);
}

#[test]
fn another_token_is_named_on_every_rank() {
    use podring_fabric::handshake::Secret;
    for config in [local, two_hosts] {
        let secret = |rank| Some(Secret::new([rank as u8; 32]));
        let config = |rank| hub::Config { secret: secret(rank), ..config(rank) };
        // A rank that leaves before the other has tried its token is lost to that one, with nothing said of tokens.
        let told = std::sync::Barrier::new(2);
        let errors = run(2, config, Duration::from_secs(20), |group| {
            let mut data = vec![0.0f32; 4];
            let error = finish(group, all_reduce(&mut data)).unwrap_err();
            told.wait();
            error
        });
        for error in errors {
            assert_eq!(error.kind(), Kind::PeerLost, "{error}");
            assert!(error.to_string().contains("PODRING_TOKEN_FILE"), "{error}");
        }
    }
}

const LONG: Duration = Duration::from_secs(60);

fn tensor<T>(data: &mut [T]) -> Tensor {
    Tensor { data: data.as_mut_ptr().cast(), layout: Layout::flat(data.len()) }
}

fn one(kind: Op, dtype: DType, reduction: Option<Reduction>, inputs: Blocks, outputs: Blocks) -> Collective {
    Collective { kind, parts: SmallVec::from_iter([Part { dtype, reduction, inputs, outputs }]) }
}

fn all_reduce(data: &mut [f32]) -> Collective {
    let tensor = tensor(data);
    one(Op::AllReduce, DType::F32, Some(Reduction::Sum), Blocks::whole(tensor.clone()), Blocks::whole(tensor))
}

fn finish(group: &ProcessGroup, collective: Collective) -> Result<(), Error> {
    group.post(collective, None, None, true)?.wait(None, || false)
}

fn sums(group: &ProcessGroup) {
    let (rank, size) = (group.rank() as usize, group.size() as usize);
    for count in [0usize, 1, 3, 1000, 5000, 70_001, 1_000_003] {
        let mut data: Vec<f32> = (0..count).map(|i| ((i % 1000) * (rank + 1)) as f32).collect();
        finish(group, all_reduce(&mut data)).unwrap();
        let factor = size * (size + 1) / 2;
        for (i, value) in data.iter().enumerate() {
            assert_eq!(*value, ((i % 1000) * factor) as f32, "element {i} of {count} on rank {rank}");
        }
    }
}

#[test]
fn sums_on_one_host() {
    for size in 1..=4 {
        run(size, local, LONG, sums);
    }
}

#[test]
fn sums_staged() {
    run(2, staged, LONG, sums);
    run(3, staged, LONG, sums);
}

#[test]
fn sums_over_tcp() {
    run(2, two_hosts, LONG, sums);
    run(4, two_hosts, LONG, sums);
}

fn moves(group: &ProcessGroup) {
    let (rank, size) = (group.rank() as usize, group.size() as usize);
    for base in [1usize, 100, 40_000] {
        // Uneven on purpose, one of them empty.
        let counts: Vec<usize> = (0..size).map(|r| base * r).collect();
        let mut mine = vec![rank as i64; counts[rank]];
        let mut all = vec![-1i64; counts.iter().sum()];
        let gather = one(
            Op::AllGather,
            DType::I64,
            None,
            Blocks::whole(tensor(&mut mine)),
            Blocks::cut(tensor(&mut all), &counts),
        );
        finish(group, gather).unwrap();
        let expected: Vec<i64> = counts.iter().enumerate().flat_map(|(r, &n)| vec![r as i64; n]).collect();
        assert_eq!(all, expected);

        let sent: Vec<usize> = (0..size).map(|to| base * (rank + 2 * to)).collect();
        let got: Vec<usize> = (0..size).map(|from| base * (from + 2 * rank)).collect();
        let mut source: Vec<i64> =
            sent.iter().enumerate().flat_map(|(to, &n)| vec![(rank * 10 + to) as i64; n]).collect();
        let mut target = vec![-1i64; got.iter().sum()];
        let exchange = one(
            Op::AllToAll,
            DType::I64,
            None,
            Blocks::cut(tensor(&mut source), &sent),
            Blocks::cut(tensor(&mut target), &got),
        );
        finish(group, exchange).unwrap();
        let expected: Vec<i64> =
            got.iter().enumerate().flat_map(|(from, &n)| vec![(from * 10 + rank) as i64; n]).collect();
        assert_eq!(target, expected);

        for root in 0..size {
            let mut data = vec![rank as i64; base];
            let t = tensor(&mut data);
            let kind = Op::Broadcast { root: root as u32 };
            finish(group, one(kind, DType::I64, None, Blocks::whole(t.clone()), Blocks::whole(t))).unwrap();
            assert_eq!(data, vec![root as i64; base]);
        }
    }
    finish(group, Collective { kind: Op::Barrier, parts: SmallVec::new() }).unwrap();
}

#[test]
fn moves_everywhere() {
    run(3, local, LONG, moves);
    run(4, staged, LONG, moves);
    run(3, two_hosts, LONG, moves);
}

#[test]
fn direct_messages_match_by_peer_and_tag() {
    run(2, local, LONG, |group| {
        for count in [1usize, 1000, 100_000] {
            let mut out: [Vec<i32>; 2] = [vec![group.rank() as i32; count], vec![group.rank() as i32 + 10; count]];
            let mut into: [Vec<i32>; 2] = [vec![-1; count], vec![-1; count]];
            let to = 1 - group.rank();
            let [first, second] = &mut out;
            let [low, high] = &mut into;
            let send = |data: &mut [i32], tag| {
                let kind = Op::Send { to, tag };
                let call = one(kind, DType::I32, None, Blocks::whole(tensor(data)), Blocks::none());
                group.post(call, None, None, false).unwrap()
            };
            let receive = |data: &mut [i32], from, tag| {
                let kind = Op::Recv { from, tag };
                let call = one(kind, DType::I32, None, Blocks::none(), Blocks::whole(tensor(data)));
                group.post(call, None, None, false).unwrap()
            };
            // The tags are received in the other order than sent, one from anybody.
            let works = [send(first, 1), send(second, 2), receive(high, None, 2), receive(low, Some(to), 1)];
            for work in &works {
                work.wait(None, || false).unwrap();
            }
            assert_eq!(works[2].source(), Some(to));
            assert_eq!(into, [vec![to as i32; count], vec![to as i32 + 10; count]]);
        }
    });
}

/// One rank runs far ahead: it sends what nobody has asked for yet, then everybody does something else together. What is
/// held for it stays within bounds, nothing stops, and nothing is lost.
fn ahead(group: &ProcessGroup) {
    const MESSAGES: u32 = 3000;
    const COUNT: usize = 2048;
    let call = |kind, data: &mut [i32]| match kind {
        Op::Send { .. } => one(kind, DType::I32, None, Blocks::whole(tensor(data)), Blocks::none()),
        _ => one(kind, DType::I32, None, Blocks::none(), Blocks::whole(tensor(data))),
    };
    let mut buffers: Vec<Vec<i32>> =
        (0..MESSAGES).map(|number| if number % 7 == 0 { Vec::new() } else { vec![number as i32; COUNT] }).collect();
    let mut data = vec![1.0f32; 100];
    if group.rank() == 0 {
        let works: Vec<Work> = (0..MESSAGES)
            .map(|tag| {
                group.post(call(Op::Send { to: 1, tag }, &mut buffers[tag as usize]), None, None, false).unwrap()
            })
            .collect();
        finish(group, all_reduce(&mut data)).unwrap();
        for work in works {
            work.wait(None, || false).unwrap();
        }
        // Not a word more until the other rank has looked at what it holds.
        finish(group, call(Op::Recv { from: Some(1), tag: MESSAGES }, &mut [0])).unwrap();
    } else {
        let bound = 4 << 20;
        let mut most = 0;
        let end = Instant::now() + LONG;
        while most < bound / 2 {
            most = most.max(group.0.process.hub.early());
            assert!(Instant::now() < end, "{most}");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
        finish(group, all_reduce(&mut data)).unwrap();
        assert!(group.0.process.hub.early() <= bound);
        // Half of them in the other order.
        let order = (0..MESSAGES / 2).rev().chain(MESSAGES / 2..MESSAGES);
        for tag in order {
            let buffer = &mut buffers[tag as usize];
            buffer.fill(-1);
            finish(group, call(Op::Recv { from: Some(0), tag }, buffer)).unwrap();
            assert!(buffer.iter().all(|&value| value == tag as i32), "message {tag}");
        }
        assert_eq!(group.0.process.hub.early(), 0);
        finish(group, call(Op::Send { to: 0, tag: MESSAGES }, &mut [0])).unwrap();
    }
    assert_eq!(data, vec![2.0; 100]);
    // The way is open again.
    for _ in 0..5000 {
        finish(group, all_reduce(&mut data[..1])).unwrap();
    }
}

#[test]
fn what_is_sent_far_ahead_is_held_within_bounds() {
    for config in [local, staged, two_hosts] {
        run(2, config, LONG, ahead);
    }
}

/// The same in collectives: the root of broadcasts doesn't wait for anybody.
#[test]
fn a_root_far_ahead_is_held_within_bounds() {
    for config in [local, staged, two_hosts] {
        run(3, config, LONG, |group| {
            const CALLS: usize = 4000;
            let mut buffers = vec![vec![group.rank() as u8; 4000]; CALLS];
            if group.rank() != 0 {
                std::thread::sleep(Duration::from_millis(200));
            }
            let mut works = Vec::new();
            for buffer in &mut buffers {
                let t = tensor(buffer);
                let call = one(Op::Broadcast { root: 0 }, DType::U8, None, Blocks::whole(t.clone()), Blocks::whole(t));
                works.push(group.post(call, None, None, false).unwrap());
                assert!(group.0.process.hub.early() <= 2 * (4 << 20));
            }
            for work in works {
                work.wait(None, || false).unwrap();
            }
            assert!(buffers.iter().flatten().all(|&value| value == 0));
        });
    }
}

#[test]
fn a_mismatch_gives_every_rank_the_same_table() {
    let errors = run(3, local, LONG, |group| {
        let mut data = vec![1.0f32; if group.rank() == 2 { 5 } else { 4 }];
        let error = finish(group, all_reduce(&mut data)).unwrap_err();
        assert_eq!(error.kind(), Kind::Mismatch, "{error}");
        let again = finish(group, all_reduce(&mut data)).unwrap_err();
        assert_eq!(again.kind(), Kind::Mismatch);
        error.to_string()
    });
    for error in &errors {
        assert!(error.contains("seq 0"), "{error}");
        assert!(error.contains("rank 0: all_reduce(SUM, float32, count=4)"), "{error}");
        assert!(error.contains("rank 2: all_reduce(SUM, float32, count=5)"), "{error}");
    }
}

/// The table is made when two ranks differ, which may be before the third has called.
#[test]
fn a_rank_that_calls_a_moment_later_is_in_the_table() {
    let errors = run(3, local, LONG, |group| {
        if group.rank() == 2 {
            std::thread::sleep(Duration::from_millis(300));
        }
        let mut data = vec![1.0f32; 4 + group.rank() as usize];
        finish(group, all_reduce(&mut data)).unwrap_err().to_string()
    });
    for error in &errors {
        for (rank, count) in [(0, 4), (1, 5), (2, 6)] {
            assert!(error.contains(&format!("rank {rank}: all_reduce(SUM, float32, count={count})")), "{error}");
        }
    }
}

/// It isn't waited for without end: the others know soon.
#[test]
fn a_rank_that_never_calls_holds_up_no_table() {
    run(3, local, LONG, |group| {
        if group.rank() == 2 {
            std::thread::sleep(Duration::from_secs(4));
            return;
        }
        let start = Instant::now();
        let mut data = vec![1.0f32; 4 + group.rank() as usize];
        let error = finish(group, all_reduce(&mut data)).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(4));
        assert!(error.to_string().contains("rank 2: nothing yet"), "{error}");
    });
}

#[test]
fn different_roots_are_noticed_though_nobody_sends() {
    run(2, local, LONG, |group| {
        let mut data = vec![0u8; 8];
        let t = tensor(&mut data);
        let root = 1 - group.rank();
        let call = one(Op::Broadcast { root }, DType::U8, None, Blocks::whole(t.clone()), Blocks::whole(t));
        let start = Instant::now();
        assert_eq!(finish(group, call).unwrap_err().kind(), Kind::Mismatch);
        assert!(start.elapsed() < Duration::from_secs(10));
    });
}

#[test]
fn a_timeout_names_who_is_late_and_reaches_all() {
    let errors = run(3, local, LONG, |group| {
        let mut data = vec![0.0f32; 4];
        // All begin together.
        finish(group, all_reduce(&mut data)).unwrap();
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_secs(3));
        }
        group.set_timeout(Duration::from_secs(1));
        finish(group, all_reduce(&mut data)).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.kind(), Kind::Timeout, "{error}");
        let text = error.to_string();
        assert!(text.contains("waiting on rank 1") && text.contains("rank 1: nothing yet"), "{text}");
    }
}

#[test]
fn a_rank_that_leaves_fails_those_who_need_it() {
    run(2, local, LONG, |group| {
        let mut data = vec![0.0f32; 4];
        finish(group, all_reduce(&mut data)).unwrap();
        if group.rank() == 0 {
            let error = finish(group, all_reduce(&mut data)).unwrap_err();
            assert_eq!(error.kind(), Kind::PeerLost, "{error}");
            assert!(error.to_string().contains("rank 1"), "{error}");
        }
    });
}

#[test]
fn what_was_sent_before_leaving_arrives() {
    run(2, local, LONG, |group| {
        let mut data = vec![group.rank() as u8; 100];
        let t = tensor(&mut data);
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(200));
        }
        let kind = Op::Broadcast { root: 0 };
        finish(group, one(kind, DType::U8, None, Blocks::whole(t.clone()), Blocks::whole(t))).unwrap();
        assert_eq!(data, vec![0u8; 100]);
    });
}

#[test]
fn abort_reaches_all() {
    run(2, local, LONG, |group| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(100));
            group.abort("enough");
            return;
        }
        let mut data = vec![0.0f32; 1 << 20];
        let error = finish(group, all_reduce(&mut data)).unwrap_err();
        assert_eq!(error.kind(), Kind::Aborted, "{error}");
        assert!(error.to_string().contains("enough"), "{error}");
    });
}

#[test]
fn strided_tensors_are_packed() {
    run(2, local, LONG, |group| {
        let mut data: Vec<f32> = (0..12).map(|i| i as f32).collect();
        // Columns 0 and 2 of a 3×4 matrix, transposed.
        let layout = Layout {
            sizes: SmallVec::from_slice(&[2, 3]),
            strides: SmallVec::from_slice(&[2, 4]),
            conj: false,
            neg: false,
        };
        let t = Tensor { data: data.as_mut_ptr().cast(), layout };
        let call = one(Op::AllReduce, DType::F32, Some(Reduction::Sum), Blocks::whole(t.clone()), Blocks::whole(t));
        finish(group, call).unwrap();
        let expected: Vec<f32> = (0..12).map(|i| if i % 2 == 0 { 2.0 * i as f32 } else { i as f32 }).collect();
        assert_eq!(data, expected);

        // Longer than one step of unpacking.
        let (rows, columns) = (301usize, 403usize);
        let mut data: Vec<f64> = (0..rows * columns).map(|i| i as f64).collect();
        let layout = Layout {
            sizes: SmallVec::from_slice(&[columns as i64, rows as i64]),
            strides: SmallVec::from_slice(&[1, columns as i64]),
            conj: false,
            neg: false,
        };
        let t = Tensor { data: data.as_mut_ptr().cast(), layout };
        let call = one(Op::AllReduce, DType::F64, Some(Reduction::Sum), Blocks::whole(t.clone()), Blocks::whole(t));
        finish(group, call).unwrap();
        assert!(data.iter().enumerate().all(|(i, value)| *value == 2.0 * i as f64));
    });
}

#[test]
fn monitored_barrier_names_the_missing() {
    run(4, local, LONG, |group| {
        let rank = group.rank();
        let short = Some(Duration::from_secs(2));
        group.monitored_barrier(None, false, || false).unwrap();
        for (all, expected) in [(false, "Rank 2 failed to pass monitoredBarrier"), (true, "Ranks 2, 3 failed")] {
            if rank == 0 {
                let error = group.monitored_barrier(short, all, || false).unwrap_err().to_string();
                assert!(error.contains(expected), "{error}");
            } else if rank == 1 {
                let error = group.monitored_barrier(None, all, || false).unwrap_err().to_string();
                assert!(error.contains("Rank 1 successfully reached monitoredBarrier, but"), "{error}");
            }
            finish(group, Collective { kind: Op::Barrier, parts: SmallVec::new() }).unwrap();
        }
        // Those who missed two are not out of step.
        group.monitored_barrier(None, true, || false).unwrap();
        if rank == 0 {
            let error = group.monitored_barrier(Some(Duration::ZERO), false, || false).unwrap_err().to_string();
            assert!(error.contains("Rank 0 timed out in monitoredBarrier"), "{error}");
        }
    });
}

#[test]
fn a_callback_may_wait_for_a_collective() {
    run(2, local, LONG, |group| {
        let (send, receive) = std::sync::mpsc::channel();
        let mut data = vec![1.0f32; 64];
        let work = group.post(all_reduce(&mut data), None, None, false).unwrap();
        let inner = group.clone();
        work.on_end(Box::new(move || {
            let mut data = vec![1.0f32; 64];
            send.send(finish(&inner, all_reduce(&mut data)).map(|()| data[0])).unwrap();
        }));
        work.wait(None, || false).unwrap();
        assert_eq!(receive.recv_timeout(LONG).unwrap().unwrap(), 2.0);
    });
}
