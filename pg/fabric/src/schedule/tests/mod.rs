//! Every algorithm for every shape, played and compared with what the operation means.

mod cost;
mod faults;
mod shapes;

use podring_collective::Kind;

use super::sim::{Arithmetic, Fault, Rank, play};
use super::{Algorithm, Schedule, Shape, Tuning, plan, plan_with};

/// An element that remembers enough to tell who contributed (the sum), in which order (the bits), and whether it went
/// through a reduction, which it may do once only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Raw {
    sum: u64,
    bits: u64,
    reduced: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Sum {
    sum: u64,
    bits: u64,
}

pub(super) struct Hashes;

fn mix(left: u64, right: u64) -> u64 {
    let word = (left.rotate_left(23) ^ right).wrapping_mul(0xff51_afd7_ed55_8ccd);
    (word ^ (word >> 31)).wrapping_add(left)
}

impl Arithmetic for Hashes {
    type Element = Raw;
    type Partial = Sum;

    fn lift(&self, raw: &Raw) -> Sum {
        assert!(!raw.reduced, "a result is reduced again as if it were raw");
        Sum { sum: raw.sum.wrapping_mul(3), bits: mix(7, raw.bits) }
    }

    /// Neither commutative nor associative in `bits`.
    fn combine(&self, earlier: &mut Sum, next: &Sum) {
        *earlier = Sum { sum: earlier.sum.wrapping_add(next.sum), bits: mix(earlier.bits, next.bits) };
    }

    fn finish(&self, total: Sum) -> Raw {
        Raw { sum: total.sum, bits: mix(total.bits, 11), reduced: true }
    }
}

/// What `rank` has in element `index` of block `block` of its input.
fn raw(rank: usize, block: usize, index: usize) -> Raw {
    let word = mix(mix(mix(1, rank as u64), block as u64), index as u64);
    Raw { sum: mix(word, 5), bits: mix(word, 9), reduced: false }
}

/// The result of reducing element `index` of block `block` of all ranks in rank order.
fn reduced(ranks: usize, block: usize, index: usize) -> Raw {
    let mut total = Hashes.lift(&raw(0, block, index));
    (1..ranks).for_each(|rank| Hashes.combine(&mut total, &Hashes.lift(&raw(rank, block, index))));
    Hashes.finish(total)
}

/// One collective of one group.
#[derive(Clone, Debug)]
pub(super) struct Case {
    kind: Kind,
    ranks: usize,
    hosts: Vec<u32>,
    /// counts[i][j]: for all-to-all what i sends to j; for all others the first row is what the operation shares.
    counts: Vec<Vec<usize>>,
    element: usize,
    accumulator: usize,
    deterministic: bool,
    tuning: Tuning,
}

impl Case {
    fn new(kind: Kind, ranks: usize, counts: Vec<usize>) -> Self {
        Case {
            kind,
            ranks,
            hosts: Vec::new(),
            counts: vec![counts],
            element: 4,
            accumulator: 4,
            deterministic: false,
            tuning: small_tuning(),
        }
    }

    /// Counts of input and output blocks of `me`.
    fn blocks(&self, me: usize) -> (Vec<usize>, Vec<usize>) {
        let shared = &self.counts[0];
        let root = self.kind.root().map(|root| root as usize);
        match self.kind {
            Kind::AllReduce | Kind::Broadcast { .. } => (shared.clone(), shared.clone()),
            Kind::Reduce { .. } => (shared.clone(), if root == Some(me) { shared.clone() } else { vec![] }),
            Kind::AllGather => (vec![shared[me]], shared.clone()),
            Kind::ReduceScatter => (shared.clone(), vec![shared[me]]),
            Kind::AllToAll => (self.counts[me].clone(), self.counts.iter().map(|row| row[me]).collect()),
            Kind::Gather { .. } => (vec![shared[me]], if root == Some(me) { shared.clone() } else { vec![] }),
            Kind::Scatter { .. } => (if root == Some(me) { shared.clone() } else { vec![] }, vec![shared[me]]),
            _ => (vec![], vec![]),
        }
    }

    fn aliases(&self, me: usize) -> Vec<(usize, usize)> {
        let is_root = self.kind.root() == Some(me as u32);
        match self.kind {
            Kind::AllReduce | Kind::Broadcast { .. } => vec![(0, 0)],
            Kind::Reduce { .. } if is_root => vec![(0, 0)],
            Kind::Gather { .. } if is_root => vec![(0, me)],
            Kind::AllGather => vec![(0, me)],
            Kind::ReduceScatter => vec![(me, 0)],
            Kind::Scatter { .. } if is_root => vec![(me, 0)],
            _ => vec![],
        }
    }

    fn shape(&self, me: usize) -> Shape<'_> {
        Shape {
            ranks: self.ranks as u32,
            me: me as u32,
            hosts: &self.hosts,
            element: self.element,
            accumulator: self.accumulator,
            deterministic: self.deterministic,
        }
    }

    /// All ranks' schedules, by this algorithm or the chosen one; `None` if the algorithm doesn't apply.
    fn schedules(&self, algorithm: Option<Algorithm>) -> Option<Vec<Schedule>> {
        let made: Vec<Option<Schedule>> = (0..self.ranks)
            .map(|me| {
                let (inputs, outputs) = self.blocks(me);
                let shape = self.shape(me);
                match algorithm {
                    Some(algorithm) => plan_with(algorithm, self.kind, &shape, &inputs, &outputs, &self.tuning),
                    None => Some(plan(self.kind, &shape, &inputs, &outputs, &self.tuning)),
                }
            })
            .collect();
        assert!(made.iter().all(|schedule| schedule.is_some() == made[0].is_some()), "ranks disagree: {self:?}");
        made.into_iter().collect()
    }

    fn world(&self, schedules: Vec<Schedule>, aliased: bool) -> Vec<Rank<Raw>> {
        let rank = |(me, schedule): (usize, Schedule)| {
            let (inputs, outputs) = self.blocks(me);
            let block = |(block, &len): (usize, &usize)| (0..len).map(|index| raw(me, block, index)).collect();
            let inputs = inputs.iter().enumerate().map(block).collect();
            Rank { schedule, inputs, outputs, aliases: if aliased { self.aliases(me) } else { vec![] } }
        };
        schedules.into_iter().enumerate().map(rank).collect()
    }

    /// Plays the case; false if the algorithm doesn't apply.
    fn try_run(&self, algorithm: Option<Algorithm>, aliased: bool, window: usize, seed: u64) -> bool {
        let Some(schedules) = self.schedules(algorithm) else { return false };
        let context = || format!("{algorithm:?} aliased={aliased} window={window} seed={seed} of {self:?}");
        let results = play(&Hashes, &self.world(schedules, aliased), window, seed)
            .unwrap_or_else(|fault| panic!("{fault} in {}", context()));
        let deterministic = match algorithm {
            Some(algorithm) => algorithm.is_deterministic(),
            None => self.deterministic,
        };
        if let Err(wrong) = self.verify(&results, deterministic) {
            panic!("{wrong} in {}", context());
        }
        true
    }

    /// Compares with what the operation means. A reduction may have any order, but the same on every rank; in
    /// deterministic plans it is that of the ranks.
    fn verify(&self, results: &[Vec<Vec<Option<Raw>>>], deterministic: bool) -> Result<(), String> {
        let shared = match self.kind {
            Kind::AllReduce | Kind::Reduce { .. } => self.counts[0][0],
            _ => 0,
        };
        let shared: Vec<Raw> = (0..shared).map(|index| reduced(self.ranks, 0, index)).collect();
        for (me, blocks) in results.iter().enumerate() {
            for (block, cells) in blocks.iter().enumerate() {
                for (index, &cell) in cells.iter().enumerate() {
                    let expected = match self.kind {
                        Kind::AllReduce | Kind::Reduce { .. } => shared[index],
                        Kind::ReduceScatter => reduced(self.ranks, me, index),
                        Kind::Broadcast { root } => raw(root as usize, 0, index),
                        Kind::AllToAll => raw(block, me, index),
                        Kind::Scatter { root } => raw(root as usize, me, index),
                        _ => raw(block, 0, index),
                    };
                    let wanted = match (self.kind.reduces(), deterministic, cell) {
                        // The order is free, but for what rank 0 has.
                        (true, false, Some(got)) => {
                            let bits = match self.kind {
                                Kind::AllReduce => results[0][block][index].map_or(0, |cell| cell.bits),
                                _ => got.bits,
                            };
                            Raw { bits, ..expected }
                        }
                        _ => expected,
                    };
                    if cell != Some(wanted) {
                        return Err(format!("rank {me}, block {block}, element {index}: {cell:?}, not {wanted:?}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Plays with input and output apart and as the same memory.
    fn run(&self, algorithm: Option<Algorithm>, seed: u64) -> bool {
        let apart = self.try_run(algorithm, false, 1 + seed as usize % 4, seed);
        let same = self.try_run(algorithm, true, 1 + (seed as usize + 2) % 4, seed + 1);
        assert_eq!(apart, same);
        apart
    }
}

/// Everything is tiny, so that small tensors have many lanes and pass every threshold.
pub(super) fn small_tuning() -> Tuning {
    Tuning {
        one_shot: 64,
        scratch: 64,
        chunk: 16..=64,
        steps: 1000,
        direct_ranks: 5,
        latency: 16,
        ring: 64,
        two_phase: 96,
        align: 8,
    }
}

/// How so many ranks may lie on hosts: all on one, each on its own, contiguous, interleaved, unequal, mixed.
pub(super) fn layouts(ranks: usize) -> Vec<Vec<u32>> {
    let by = |host: &dyn Fn(u32) -> u32| (0..ranks as u32).map(host).collect();
    vec![
        vec![],
        by(&|rank| 90 - rank),
        by(&|rank| rank / 2),
        by(&|rank| rank % 2),
        by(&|rank| rank % 3),
        by(&|rank| u32::from(rank == 2)),
        by(&|rank| (rank.is_multiple_of(5)) as u32 * 4 + rank / 7),
        by(&|rank| (rank * rank + 1) % 7 / 2),
    ]
}
