//! Correctness over ranks, counts, roots, hosts, sizes and timings.

use proptest::prelude::*;

use super::super::choose;
use super::*;

fn kinds(root: usize) -> [Kind; 9] {
    let root = root as u32;
    [
        Kind::AllReduce,
        Kind::Broadcast { root },
        Kind::Reduce { root },
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Gather { root },
        Kind::Scatter { root },
        Kind::Barrier,
    ]
}

/// Counts in `style` for a kind: about `total` elements in all.
fn counts(kind: Kind, ranks: usize, total: usize, style: usize) -> Vec<Vec<usize>> {
    let row = |shift: usize| -> Vec<usize> {
        (0..ranks)
            .map(|rank| match style % 4 {
                0 => total.div_ceil(ranks),
                1 => (rank + shift) * 7 % 5,
                2 => {
                    if (rank + shift) % ranks == 1 % ranks {
                        total
                    } else {
                        0
                    }
                }
                _ => (total / ranks.max(4) + rank % 3) * usize::from(!(rank + shift).is_multiple_of(4)),
            })
            .collect()
    };
    match kind {
        Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. } => vec![vec![total]],
        Kind::AllToAll => (0..ranks).map(row).collect(),
        _ => vec![row(0)],
    }
}

/// Which algorithms a kind has, for more than one rank (hierarchical ones: on more than one host).
fn algorithms(kind: Kind) -> &'static [Algorithm] {
    use Algorithm::*;
    match kind {
        Kind::AllReduce => &[OneShot, Direct, RecursiveDoubling, RecursiveHalving, Ring, Hierarchical],
        Kind::Broadcast { .. } | Kind::Reduce { .. } => &[Direct, TwoPhase, Tree, Hierarchical],
        Kind::AllGather => &[Direct, Ring, Hierarchical],
        Kind::ReduceScatter => &[Direct, RecursiveHalving, Ring, Hierarchical],
        Kind::Barrier => &[Direct, Dissemination],
        _ => &[Direct],
    }
}

#[test]
fn algorithms_apply_where_they_say() {
    for ranks in 1..6 {
        for hosts in layouts(ranks) {
            let spread = hosts.iter().any(|host| host != &hosts[0]);
            for kind in kinds(0) {
                for algorithm in Algorithm::ALL {
                    let mut case = Case::new(kind, ranks, vec![]);
                    case.counts = counts(kind, ranks, 9, 0);
                    case.hosts = hosts.clone();
                    let expected = match algorithm {
                        Algorithm::Local => ranks == 1,
                        Algorithm::Hierarchical => spread && algorithms(kind).contains(&algorithm),
                        _ => ranks > 1 && algorithms(kind).contains(&algorithm),
                    };
                    assert_eq!(case.schedules(Some(algorithm)).is_some(), expected, "{algorithm:?} {case:?}");
                }
            }
        }
    }
}

#[test]
fn every_algorithm_at_every_rank_count() {
    for ranks in 1..=64usize {
        for kind in kinds(ranks * 5 / 7) {
            let all = if ranks == 1 { &[Algorithm::Local] } else { algorithms(kind) };
            for (number, &algorithm) in all.iter().enumerate() {
                let mut case = Case::new(kind, ranks, vec![]);
                let seed = ranks * 31 + number;
                // Enough that every rank has some, and few enough that the largest groups stay fast.
                case.counts = counts(kind, ranks, 2 * ranks + 5, seed);
                let layouts = layouts(ranks);
                let mut hosts = layouts[seed % layouts.len()].clone();
                if algorithm == Algorithm::Hierarchical && hosts.iter().all(|host| host == &hosts[0]) {
                    hosts = layouts[1].clone();
                }
                case.hosts = hosts;
                case.accumulator = 4 << (ranks % 2);
                if ranks > 12 {
                    case.tuning.chunk = 128..=256;
                }
                // The largest groups take most of the time: apart and aliased by turns.
                let applies = match ranks {
                    ..=32 => case.run(Some(algorithm), seed as u64),
                    _ => case.try_run(Some(algorithm), (ranks + number).is_multiple_of(2), 3, seed as u64),
                };
                assert!(applies, "{algorithm:?} {case:?}");
            }
            let mut case = Case::new(kind, ranks, vec![]);
            case.counts = counts(kind, ranks, ranks + 3, ranks);
            case.deterministic = ranks.is_multiple_of(2);
            case.tuning.chunk = 128..=256;
            assert!(case.run(None, ranks as u64));
        }
    }
}

#[test]
fn every_root_on_every_layout() {
    for ranks in 1..=10usize {
        for root in 0..ranks {
            for hosts in layouts(ranks) {
                for kind in kinds(root).into_iter().filter(|kind| kind.root().is_some()) {
                    for &algorithm in algorithms(kind) {
                        let mut case = Case::new(kind, ranks, vec![]);
                        case.hosts = hosts.clone();
                        let seed = ranks * 100 + root;
                        case.counts = counts(kind, ranks, 5 + seed % 40, root);
                        case.run(Some(algorithm), seed as u64);
                    }
                }
            }
        }
    }
}

#[test]
fn every_layout_of_hosts() {
    for ranks in [2usize, 3, 4, 5, 6, 7, 9, 12] {
        for hosts in layouts(ranks) {
            for kind in kinds(0).into_iter().filter(|kind| kind.root().is_none()) {
                for &algorithm in algorithms(kind) {
                    for style in 0..4 {
                        let mut case = Case::new(kind, ranks, vec![]);
                        case.hosts = hosts.clone();
                        case.counts = counts(kind, ranks, [3, 60, 100, 31][style], style);
                        case.accumulator = [4, 8][style % 2];
                        case.run(Some(algorithm), (ranks * 10 + style) as u64);
                    }
                }
            }
        }
    }
}

#[test]
fn sizes_around_every_real_threshold() {
    let base = Case { tuning: Tuning::default(), ..Case::new(Kind::AllReduce, 2, vec![]) };
    let limits = |case: &Case| {
        let tuning = &case.tuning;
        let per_rank = [tuning.latency, tuning.ring, *tuning.chunk.start(), *tuning.chunk.end()];
        let total = [tuning.one_shot, tuning.one_shot * 4 / case.ranks, tuning.two_phase];
        let bytes: Vec<usize> = per_rank.iter().map(|bytes| bytes * case.ranks).chain(total).collect();
        bytes.into_iter().map(move |bytes| bytes / 4).filter(|&count| count * case.ranks <= 300_000).collect::<Vec<_>>()
    };
    for (ranks, hosts) in [(2, 1), (2, 2), (3, 1), (4, 2), (6, 2), (8, 1), (18, 1), (18, 18)] {
        let hosts: Vec<u32> = (0..ranks as u32).map(|rank| rank % hosts).collect();
        let case = Case { ranks, hosts, ..base.clone() };
        for count in limits(&case) {
            for count in [count - 1, count, count + 1] {
                for kind in [Kind::AllReduce, Kind::Broadcast { root: 1 }, Kind::Reduce { root: 0 }] {
                    let case = Case { kind, counts: vec![vec![count]], ..case.clone() };
                    assert!(case.try_run(None, true, 4, count as u64));
                }
            }
        }
    }
}

#[test]
fn the_real_choice() {
    let chosen = |kind, ranks: u32, hosts: &[u32], bytes: usize, deterministic| {
        let shape = Shape { ranks, me: 0, hosts, element: 4, accumulator: 4, deterministic };
        let per_rank = vec![bytes / 4 / ranks as usize; ranks as usize];
        let one = [bytes / 4];
        let counts = if matches!(kind, Kind::AllGather | Kind::ReduceScatter) { &per_rank[..] } else { &one[..] };
        choose(kind, &shape, counts, counts, &Tuning::default())
    };
    let apart: Vec<u32> = (0..64).collect();
    let pairs: Vec<u32> = (0..64).map(|rank| rank / 2).collect();
    let (broadcast, reduce) = (Kind::Broadcast { root: 0 }, Kind::Reduce { root: 0 });
    const K: usize = 1 << 10;
    const M: usize = 1 << 20;
    for (kind, ranks, hosts, bytes, algorithm) in [
        (Kind::AllReduce, 1, &[][..], 8, Algorithm::Local),
        (Kind::AllReduce, 2, &[], 8, Algorithm::OneShot),
        (Kind::AllReduce, 4, &[], 32 * K, Algorithm::OneShot),
        (Kind::AllReduce, 4, &[], 33 * K, Algorithm::Direct),
        (Kind::AllReduce, 8, &[], 16 * K, Algorithm::OneShot),
        (Kind::AllReduce, 8, &[], 17 * K, Algorithm::Direct),
        (Kind::AllReduce, 16, &[], 64 * M, Algorithm::Direct),
        (Kind::AllReduce, 64, &[], 8, Algorithm::RecursiveDoubling),
        (Kind::AllReduce, 64, &[], 64 * M, Algorithm::Direct),
        (Kind::AllReduce, 64, &apart, 8, Algorithm::RecursiveDoubling),
        (Kind::AllReduce, 64, &apart, M, Algorithm::RecursiveHalving),
        (Kind::AllReduce, 64, &apart, 64 * M, Algorithm::Ring),
        (Kind::AllReduce, 64, &pairs, 64 * M, Algorithm::Hierarchical),
        (Kind::AllGather, 16, &[], M, Algorithm::Direct),
        (Kind::AllGather, 64, &apart, 64 * M, Algorithm::Ring),
        (Kind::AllGather, 64, &pairs, M, Algorithm::Hierarchical),
        (Kind::ReduceScatter, 4, &[], M, Algorithm::Direct),
        (Kind::ReduceScatter, 64, &apart, K, Algorithm::RecursiveHalving),
        (Kind::ReduceScatter, 64, &apart, 64 * M, Algorithm::Ring),
        (Kind::ReduceScatter, 64, &pairs, M, Algorithm::Hierarchical),
        (broadcast, 4, &[], 64 * M, Algorithm::Direct),
        (broadcast, 8, &[], 8, Algorithm::Direct),
        (broadcast, 8, &[], 64 * M, Algorithm::TwoPhase),
        (broadcast, 64, &[], 8, Algorithm::Tree),
        (broadcast, 64, &pairs, 8, Algorithm::Hierarchical),
        (reduce, 4, &[], 8, Algorithm::Direct),
        (reduce, 4, &[], 64 * M, Algorithm::TwoPhase),
        (reduce, 64, &[], 8, Algorithm::Tree),
        (reduce, 64, &pairs, 8, Algorithm::Hierarchical),
        (Kind::AllToAll, 64, &pairs, 8, Algorithm::Direct),
        (Kind::Barrier, 8, &[], 0, Algorithm::Direct),
        (Kind::Barrier, 9, &[], 0, Algorithm::Dissemination),
    ] {
        let hosts = &hosts[..hosts.len().min(ranks as usize)];
        assert_eq!(chosen(kind, ranks, hosts, bytes, false), algorithm, "{kind:?} {ranks} {} {bytes}", hosts.len());
        assert!(chosen(kind, ranks, hosts, bytes, true).is_deterministic() || !kind.reduces());
    }
}

#[test]
fn point_to_point_is_not_planned() {
    for ranks in [1, 2] {
        let shape = Shape { ranks, me: 0, hosts: &[], element: 4, accumulator: 4, deterministic: false };
        let made = plan(Kind::Send { to: 1, tag: 0 }, &shape, &[3], &[], &Tuning::default());
        assert_eq!(made, Schedule::default());
    }
}

fn cases() -> impl Strategy<Value = (Case, u64)> {
    let tuning = (0usize..3, 0usize..3, 0usize..3, 0usize..3, 1u32..9, 0usize..200).prop_map(
        |(scratch, chunk, steps, align, direct_ranks, limit)| Tuning {
            one_shot: limit,
            scratch: [8, 64, 1000][scratch],
            chunk: [4..=4, 16..=64, 64..=1024][chunk].clone(),
            steps: [1, 30, 10_000][steps],
            direct_ranks,
            latency: limit / 3,
            ring: limit / 2,
            two_phase: limit,
            align: [1, 8, 64][align],
        },
    );
    let hosts = (1usize..=24, 1u32..6).prop_flat_map(|(ranks, hosts)| {
        let hosts = prop_oneof![Just(vec![]), proptest::collection::vec(0..hosts, ranks)];
        (Just(ranks), hosts)
    });
    let sizes = prop_oneof![Just((1usize, 4usize)), Just((2, 4)), Just((4, 4)), Just((16, 16))];
    (hosts, 0usize..9, any::<u32>(), 0usize..150, any::<bool>(), sizes, tuning, any::<u32>()).prop_flat_map(
        |((ranks, hosts), kind, root, total, deterministic, (element, accumulator), tuning, seed)| {
            let kind = kinds(root as usize % ranks)[kind];
            let count = prop_oneof![Just(0usize), 0usize..6, Just(total / ranks)];
            let rows = if kind == Kind::AllToAll { ranks } else { 1 };
            proptest::collection::vec(proptest::collection::vec(count, ranks), rows).prop_map(move |mut counts| {
                if matches!(kind, Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. }) {
                    counts = vec![vec![total]];
                }
                let (hosts, tuning) = (hosts.clone(), tuning.clone());
                (Case { kind, ranks, hosts, counts, element, accumulator, deterministic, tuning }, u64::from(seed))
            })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn any_case_is_right((case, seed) in cases()) {
        case.run(None, seed);
        for &algorithm in algorithms(case.kind) {
            case.run(Some(algorithm), seed);
        }
    }

    #[test]
    fn deterministic_bits_depend_on_nothing_else((case, seed) in cases(), (other, _) in cases()) {
        let mut case = case;
        case.deterministic = true;
        case.run(None, seed);
        // `verify` compares with the rank-order reduction, whatever hosts, tuning and element size.
        case.tuning = other.tuning;
        (case.element, case.accumulator) = (other.element, other.accumulator);
        case.hosts = case.hosts.iter().rev().copied().collect();
        case.run(None, seed);
    }
}
