//! Rounds and traffic are what each algorithm promises.

use super::super::sim::{Cost, cost};
use super::*;

/// Enough lane for everything: one lane, whose depth is the algorithm's.
fn wide() -> Tuning {
    Tuning { scratch: usize::MAX, chunk: 1..=1 << 40, align: 4, two_phase: 0, one_shot: 0, ..Tuning::default() }
}

fn measure(case: &Case, algorithm: Algorithm) -> Cost {
    cost(&case.schedules(Some(algorithm)).unwrap(), |_, _| true)
}

/// Elements per rank; a multiple of every rank count below and of nothing else that matters.
const EACH: usize = 60;

fn case(kind: Kind, ranks: usize) -> Case {
    let total = ranks * EACH;
    let counts = match kind {
        Kind::AllGather | Kind::ReduceScatter => vec![EACH; ranks],
        _ => vec![total],
    };
    Case { tuning: wide(), ..Case::new(kind, ranks, counts) }
}

fn log2(ranks: usize) -> usize {
    (0..).find(|&level| 1 << level >= ranks).unwrap()
}

#[test]
fn direct_plans_take_one_message_per_phase() {
    for ranks in 2..=20 {
        let (total, peers) = (ranks * EACH, ranks - 1);
        let even = |depth, sent, messages| Cost { depth, sent: vec![sent; ranks], messages: vec![messages; ranks] };
        let of = |kind, algorithm| measure(&case(kind, ranks), algorithm);
        assert_eq!(of(Kind::AllReduce, Algorithm::OneShot), even(1, peers * total, peers));
        assert_eq!(of(Kind::AllReduce, Algorithm::Direct), even(2, 2 * peers * EACH, 2 * peers));
        assert_eq!(of(Kind::ReduceScatter, Algorithm::Direct), even(1, peers * EACH, peers));
        assert_eq!(of(Kind::AllGather, Algorithm::Direct), even(1, peers * EACH, peers));
        assert_eq!(of(Kind::Barrier, Algorithm::Direct), even(1, 0, peers));
        assert_eq!(of(Kind::Broadcast { root: 1 }, Algorithm::Direct).depth, 1);
        assert_eq!(of(Kind::Reduce { root: 1 }, Algorithm::Direct).depth, 1);
        let two_phase = of(Kind::Reduce { root: 1 }, Algorithm::TwoPhase);
        assert_eq!((two_phase.depth, two_phase.sent[0], two_phase.sent[1]), (2, total, peers * EACH));
        if ranks > 2 {
            // The root's link carries the tensor once.
            let two_phase = of(Kind::Broadcast { root: 1 }, Algorithm::TwoPhase);
            assert_eq!((two_phase.depth, two_phase.sent[1]), (2, total));
            assert!(two_phase.sent.iter().all(|&sent| sent <= total));
        }
    }
}

#[test]
fn rings_send_each_byte_about_once() {
    for ranks in 2..=20 {
        let peers = ranks - 1;
        let even = |phases| Cost {
            depth: phases * peers,
            sent: vec![phases * peers * EACH; ranks],
            messages: vec![phases * peers; ranks],
        };
        assert_eq!(measure(&case(Kind::AllReduce, ranks), Algorithm::Ring), even(2));
        assert_eq!(measure(&case(Kind::ReduceScatter, ranks), Algorithm::Ring), even(1));
        assert_eq!(measure(&case(Kind::AllGather, ranks), Algorithm::Ring), even(1));
    }
}

#[test]
fn trees_are_as_deep_as_the_logarithm() {
    for ranks in 2..=40 {
        for root in [0, ranks as u32 / 2, ranks as u32 - 1] {
            let total = ranks * EACH;
            let broadcast = measure(&case(Kind::Broadcast { root }, ranks), Algorithm::Tree);
            assert_eq!(broadcast.depth, log2(ranks));
            assert_eq!(broadcast.sent.iter().sum::<usize>(), (ranks - 1) * total);
            assert_eq!(broadcast.messages[root as usize], log2(ranks));
            let reduce = measure(&case(Kind::Reduce { root }, ranks), Algorithm::Tree);
            assert_eq!(reduce.depth, log2(ranks));
            assert!((0..ranks).all(|rank| reduce.sent[rank] == if rank as u32 == root { 0 } else { total }));
        }
        let barrier = measure(&case(Kind::Barrier, ranks), Algorithm::Dissemination);
        assert_eq!((barrier.depth, barrier.messages), (log2(ranks), vec![log2(ranks); ranks]));
    }
}

#[test]
fn recursion_is_logarithmic() {
    for ranks in 2..=40usize {
        let levels = ranks.ilog2() as usize;
        let fold = 2 * usize::from(!ranks.is_power_of_two());
        let total = ranks * EACH;
        let doubling = measure(&case(Kind::AllReduce, ranks), Algorithm::RecursiveDoubling);
        assert_eq!(doubling.depth, levels + fold);
        let halving = measure(&case(Kind::AllReduce, ranks), Algorithm::RecursiveHalving);
        assert_eq!(halving.depth, 2 * levels + fold);
        let scatter = measure(&case(Kind::ReduceScatter, ranks), Algorithm::RecursiveHalving);
        assert_eq!(scatter.depth, levels + fold);
        if fold == 0 {
            assert_eq!(doubling.sent, vec![levels * total; ranks]);
            assert_eq!(halving.sent, vec![2 * (ranks - 1) * EACH; ranks]);
            assert_eq!(scatter.sent, vec![(ranks - 1) * EACH; ranks]);
        }
    }
}

#[test]
fn hierarchies_send_little_between_hosts() {
    for (hosts, local) in [(2, 2), (3, 2), (4, 3), (2, 8)] {
        let ranks = hosts * local;
        let layout: Vec<u32> = (0..ranks).map(|rank| (rank % hosts) as u32).collect();
        let total = ranks * EACH;
        let across = |kind, accumulator| {
            let case = Case { hosts: layout.clone(), accumulator, ..case(kind, ranks) };
            cost(&case.schedules(Some(Algorithm::Hierarchical)).unwrap(), |from, to| {
                layout[from as usize] != layout[to as usize]
            })
        };
        let sent = |cost: &Cost| cost.sent.iter().sum::<usize>();
        // Over all hosts: each sends 2 (hosts − 1) / hosts of the tensor, which is the least; every rank the same.
        let all_reduce = across(Kind::AllReduce, 8);
        assert_eq!((all_reduce.depth, sent(&all_reduce)), (2, 2 * (hosts - 1) * total));
        assert_eq!(all_reduce.sent, vec![2 * (hosts - 1) * total / ranks; ranks]);
        if hosts == 2 {
            let at_once = across(Kind::AllReduce, 4);
            assert_eq!((at_once.depth, sent(&at_once)), (1, 2 * total));
        }
        for kind in [Kind::AllGather, Kind::ReduceScatter] {
            let cost = across(kind, 4);
            assert_eq!(sent(&cost), (hosts - 1) * total, "{kind:?}");
            assert_eq!(cost.sent, vec![(hosts - 1) * EACH; ranks], "{kind:?}");
        }
        assert_eq!(across(Kind::AllGather, 4).depth, 1);
        let broadcast = across(Kind::Broadcast { root: 1 }, 4);
        assert_eq!(sent(&broadcast), (hosts - 1) * total);
        assert_eq!(broadcast.depth, if hosts == 2 { 1 } else { 2 });
        assert_eq!(sent(&across(Kind::Reduce { root: 1 }, 4)), (hosts - 1) * total);
    }
}

/// With the real tuning: temporary memory and steps stay within what it says, in plans of up to 16 GiB.
#[test]
fn plans_stay_small() {
    let tuning = Tuning::default();
    let shape = |ranks| Shape { ranks, me: 1, hosts: &[], element: 4, accumulator: 4, deterministic: false };
    for ranks in [2u32, 3, 8, 16, 64] {
        for bytes in [1usize << 16, 1 << 20, 1 << 26, 1 << 30, 1 << 34] {
            let made =
                plan_with(Algorithm::Direct, Kind::AllReduce, &shape(ranks), &[bytes / 4], &[bytes / 4], &tuning);
            let made = made.unwrap();
            let chunk = made.temporaries().0 * 4 / (ranks as usize - 1);
            let steps_at_most = 4 * ranks as usize * (bytes / ranks as usize).div_ceil(*tuning.chunk.end());
            assert!(made.steps() <= steps_at_most.max(tuning.steps + 4 * ranks as usize), "{ranks} {bytes}");
            assert!(chunk <= tuning.chunk.end() + tuning.align);
            if bytes <= 1 << 26 {
                let scratch = made.temporaries().0 * 4;
                let least = (tuning.chunk.start() + tuning.align) * (ranks as usize - 1);
                assert!(
                    scratch <= least.max(tuning.scratch + tuning.align * ranks as usize),
                    "{ranks} {bytes} {scratch}"
                );
            }
        }
    }
    let lanes =
        |ranks, bytes: usize| plan(Kind::AllReduce, &shape(ranks), &[bytes / 4], &[bytes / 4], &tuning).lanes.len();
    assert_eq!(lanes(2, 64 << 20), 128);
    assert_eq!(lanes(2, 64 << 10), 1);
}
