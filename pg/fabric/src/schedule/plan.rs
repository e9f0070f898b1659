//! Which algorithm, for which shape and size.

use std::ops::RangeInclusive;

use podring_collective::Kind;

use super::direct::{self, longest};
use super::draft::{Slices, single};
use super::{Region, Schedule, Space, hierarchical, recursive, ring, tree};

/// What the planner may know of a group. The same on all its ranks, but for `me`.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// The group's size.
    pub ranks: u32,
    /// This rank within the group.
    pub me: u32,
    /// For each rank the host it is on, as any number that tells hosts apart; empty if all are on one.
    pub hosts: &'a [u32],
    /// Bytes of an element.
    pub element: usize,
    /// Bytes of an element of the dtype's accumulator.
    pub accumulator: usize,
    /// Results must be the same bits for any number of hosts and any tuning: only plans that reduce raw inputs in rank
    /// order in one place.
    pub deterministic: bool,
}

/// Sizes at which the planner changes its mind. Ranks must agree on them.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// Bytes of the largest one-shot all-reduce of up to 4 ranks; 4 / ranks of it for 5 to 8 ranks; none above.
    pub one_shot: usize,
    /// Bytes of temporary memory that a lane should stay within, as long as its messages have the least size.
    pub scratch: usize,
    /// Bytes of a message between two ranks in a lane of a plan that needs temporary memory.
    pub chunk: RangeInclusive<usize>,
    /// Steps that a schedule should stay within, as long as its messages have no more than the largest size.
    pub steps: usize,
    /// Groups larger than this are too large for everybody to talk to everybody.
    pub direct_ranks: u32,
    /// In larger groups: bytes per rank up to which the number of rounds matters more than the bytes sent.
    pub latency: usize,
    /// In larger groups on hosts of one rank each: bytes per rank from which a ring's many rounds don't matter.
    pub ring: usize,
    /// Bytes of a tensor from which a broadcast or reduction to a root is worth two phases, so that the root's link
    /// carries it about once. Also when a hierarchical broadcast uses more than one rank per host.
    pub two_phase: usize,
    /// Bytes: shards and slices start on multiples of it within their block.
    pub align: usize,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            one_shot: 32 << 10,
            scratch: 1 << 20,
            chunk: 16 << 10..=256 << 10,
            steps: 64 << 10,
            direct_ranks: 16,
            latency: 1 << 10,
            ring: 64 << 10,
            two_phase: 256 << 10,
            align: 64,
        }
    }
}

/// How a collective is done. Which kinds have which is what [`plan_with`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// One rank: a copy or a reduction of one source.
    Local,
    /// All-reduce: everybody sends everything to everybody.
    OneShot,
    /// Every element goes straight to where it is needed or reduced.
    Direct,
    /// Broadcast: scatter, then all-gather. Reduce: reduce-scatter, then gather.
    TwoPhase,
    /// All-reduce by exchanging partial results with rank ± 1, 2, 4, …
    RecursiveDoubling,
    /// All-reduce and reduce-scatter by exchanging ever smaller halves with rank ± … 4, 2, 1.
    RecursiveHalving,
    /// Each rank sends to the next only.
    Ring,
    /// Broadcast and reduce along a binomial tree.
    Tree,
    /// Barrier in which round k tells rank + 2^k.
    Dissemination,
    /// Within hosts and across hosts by turns, so that as few bytes as possible cross.
    Hierarchical,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Algorithm; 10] = [
        Algorithm::Local,
        Algorithm::OneShot,
        Algorithm::Direct,
        Algorithm::TwoPhase,
        Algorithm::RecursiveDoubling,
        Algorithm::RecursiveHalving,
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::Dissemination,
        Algorithm::Hierarchical,
    ];

    /// Raw inputs are reduced in rank order in one place, so that the bits don't depend on the plan.
    pub const fn is_deterministic(self) -> bool {
        matches!(self, Algorithm::Local | Algorithm::OneShot | Algorithm::Direct | Algorithm::TwoPhase)
    }
}

/// The schedule of one part of a collective on rank `shape.me`; none of point-to-point operations.
///
/// `inputs` and `outputs` are the elements per block of this rank, as in [`podring_collective::Blocks`] of a validated
/// collective.
///
/// # Panics
/// If there are fewer counts or hosts than the operation and the group have.
pub fn plan(kind: Kind, shape: &Shape, inputs: &[usize], outputs: &[usize], tuning: &Tuning) -> Schedule {
    let planner = Planner::new(shape, tuning);
    let algorithm = planner.choose(kind, inputs, outputs);
    // Every kind but the point-to-point ones has the algorithm that is chosen for it; a test goes through all.
    planner.write(algorithm, kind, inputs, outputs).unwrap_or_default()
}

/// The schedule by this algorithm, or nothing if it does not apply to the kind or the shape (deterministic or not).
///
/// # Panics
/// As [`plan`].
pub fn plan_with(
    algorithm: Algorithm,
    kind: Kind,
    shape: &Shape,
    inputs: &[usize],
    outputs: &[usize],
    tuning: &Tuning,
) -> Option<Schedule> {
    Planner::new(shape, tuning).write(algorithm, kind, inputs, outputs)
}

/// The algorithm that [`plan`] uses. All ranks get the same answer.
pub fn choose(kind: Kind, shape: &Shape, inputs: &[usize], outputs: &[usize], tuning: &Tuning) -> Algorithm {
    Planner::new(shape, tuning).choose(kind, inputs, outputs)
}

/// Everything the algorithms need to know.
pub(super) struct Planner<'a> {
    pub tuning: &'a Tuning,
    /// This rank.
    pub place: usize,
    /// All ranks, in order.
    pub everyone: Vec<u32>,
    /// The ranks of each host, in order; hosts by their lowest rank.
    pub hosts: Vec<Vec<u32>>,
    pub element: usize,
    pub accumulator: usize,
    /// Elements: where shards and slices may start.
    pub granule: usize,
    deterministic: bool,
}

impl<'a> Planner<'a> {
    fn new(shape: &Shape, tuning: &'a Tuning) -> Self {
        let everyone: Vec<u32> = (0..shape.ranks).collect();
        let mut hosts: Vec<Vec<u32>> = Vec::new();
        if shape.hosts.is_empty() {
            hosts.push(everyone.clone());
        } else {
            let mut names: Vec<u32> = Vec::new();
            for &rank in &everyone {
                let name = shape.hosts[rank as usize];
                match names.iter().position(|&known| known == name) {
                    Some(host) => hosts[host].push(rank),
                    None => {
                        names.push(name);
                        hosts.push(vec![rank]);
                    }
                }
            }
        }
        Planner {
            tuning,
            place: shape.me as usize,
            everyone,
            hosts,
            element: shape.element,
            accumulator: shape.accumulator,
            granule: (tuning.align / shape.element.max(1)).max(1),
            deterministic: shape.deterministic,
        }
    }

    pub fn ranks(&self) -> usize {
        self.everyone.len()
    }

    /// The other ranks.
    pub fn peers(&self) -> usize {
        self.ranks() - 1
    }

    /// Bytes of temporary memory per element, for raw elements and partial results alike.
    pub fn width(&self) -> usize {
        self.element.max(self.accumulator)
    }

    /// All ranks, those of a host next to each other.
    pub fn chain(&self) -> Vec<u32> {
        self.hosts.concat()
    }

    /// The hosts, the root's first and the root first in it.
    pub fn rooted(&self, root: u32) -> Vec<Vec<u32>> {
        let mut hosts = self.hosts.clone();
        if let Some(at) = hosts.iter().position(|host| host.contains(&root)) {
            hosts[..=at].rotate_right(1);
            hosts[0].retain(|&rank| rank != root);
            hosts[0].insert(0, root);
        }
        hosts
    }

    /// Where this rank stands in an order of all.
    pub fn place_in(&self, order: &[u32]) -> usize {
        order.iter().position(|&rank| rank as usize == self.place).unwrap_or_default()
    }

    /// How to cut regions of at most `longest` elements into lanes that need `buffers` slices of temporary memory, with
    /// `width` bytes per element, and have `steps` steps.
    pub fn slices(&self, longest: usize, width: usize, buffers: usize, steps: usize) -> Slices {
        let (least, most) = (*self.tuning.chunk.start(), *self.tuning.chunk.end());
        let wanted = self.tuning.scratch / buffers.max(1);
        let lanes = (self.tuning.steps / steps.max(1)).max(1);
        let few = longest.div_ceil(lanes).saturating_mul(width);
        let chunk = wanted.max(least).max(few).min(most);
        Slices::new(longest, chunk / width.max(1), self.granule)
    }

    fn choose(&self, kind: Kind, inputs: &[usize], outputs: &[usize]) -> Algorithm {
        let ranks = self.ranks();
        if ranks == 1 {
            return Algorithm::Local;
        }
        let count = match kind {
            Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. } | Kind::ReduceScatter => inputs,
            Kind::AllGather => outputs,
            _ => &[],
        };
        let bytes = count.iter().fold(0usize, |sum, &count| sum.saturating_add(count)).saturating_mul(self.element);
        let per_rank = bytes / ranks;
        let few = ranks <= self.tuning.direct_ranks as usize;
        let one_host = self.hosts.len() == 1;
        let flat = one_host || self.hosts.len() == ranks;
        let one_shot = match ranks {
            0..=4 => self.tuning.one_shot,
            5..=8 => self.tuning.one_shot * 4 / ranks,
            _ => 0,
        };
        match kind {
            Kind::AllReduce if bytes <= one_shot => Algorithm::OneShot,
            Kind::AllReduce | Kind::ReduceScatter if self.deterministic => Algorithm::Direct,
            Kind::AllReduce | Kind::ReduceScatter | Kind::AllGather if !flat => Algorithm::Hierarchical,
            Kind::AllReduce | Kind::ReduceScatter | Kind::AllGather if few => Algorithm::Direct,
            Kind::AllReduce if per_rank <= self.tuning.latency => Algorithm::RecursiveDoubling,
            Kind::ReduceScatter if per_rank <= self.tuning.latency => Algorithm::RecursiveHalving,
            Kind::AllReduce if !one_host && per_rank < self.tuning.ring => Algorithm::RecursiveHalving,
            Kind::AllReduce | Kind::ReduceScatter | Kind::AllGather if !one_host && per_rank >= self.tuning.ring => {
                Algorithm::Ring
            }
            Kind::AllReduce | Kind::ReduceScatter | Kind::AllGather => Algorithm::Direct,
            Kind::Broadcast { .. } | Kind::Reduce { .. } if !flat && (!self.deterministic || !kind.reduces()) => {
                Algorithm::Hierarchical
            }
            Kind::Reduce { .. } if bytes >= self.tuning.two_phase => Algorithm::TwoPhase,
            Kind::Reduce { .. } if few || self.deterministic => Algorithm::Direct,
            Kind::Broadcast { .. } if ranks == 2 || ranks <= 4 && one_host => Algorithm::Direct,
            Kind::Broadcast { .. } if bytes >= self.tuning.two_phase => Algorithm::TwoPhase,
            Kind::Broadcast { .. } if few => Algorithm::Direct,
            Kind::Broadcast { .. } | Kind::Reduce { .. } => Algorithm::Tree,
            Kind::Barrier if ranks > 8 => Algorithm::Dissemination,
            _ => Algorithm::Direct,
        }
    }

    fn write(&self, algorithm: Algorithm, kind: Kind, inputs: &[usize], outputs: &[usize]) -> Option<Schedule> {
        if (self.ranks() == 1) != (algorithm == Algorithm::Local) {
            return None;
        }
        Some(match (algorithm, kind) {
            (Algorithm::Local, _) => local(kind, inputs)?,
            (Algorithm::OneShot, Kind::AllReduce) => direct::one_shot_all_reduce(self, inputs[0]),
            (Algorithm::Direct, Kind::AllReduce) => direct::all_reduce(self, inputs[0]),
            (Algorithm::Direct, Kind::Broadcast { root }) => direct::broadcast(self, root, inputs[0]),
            (Algorithm::Direct, Kind::Reduce { root }) => direct::reduce(self, root, inputs[0]),
            (Algorithm::Direct, Kind::AllGather) => direct::all_gather(self, outputs),
            (Algorithm::Direct, Kind::ReduceScatter) => direct::reduce_scatter(self, inputs),
            (Algorithm::Direct, Kind::AllToAll) => direct::all_to_all(self, inputs, outputs),
            (Algorithm::Direct, Kind::Gather { root }) => direct::gather(self, root, inputs, outputs),
            (Algorithm::Direct, Kind::Scatter { root }) => direct::scatter(self, root, inputs, outputs),
            (Algorithm::Direct, Kind::Barrier) => direct::barrier(self),
            (Algorithm::TwoPhase, Kind::Broadcast { root }) => direct::two_phase_broadcast(self, root, inputs[0]),
            (Algorithm::TwoPhase, Kind::Reduce { root }) => direct::two_phase_reduce(self, root, inputs[0]),
            (Algorithm::RecursiveDoubling, Kind::AllReduce) => recursive::doubling_all_reduce(self, inputs[0]),
            (Algorithm::RecursiveHalving, Kind::AllReduce) => recursive::halving_all_reduce(self, inputs[0]),
            (Algorithm::RecursiveHalving, Kind::ReduceScatter) => recursive::halving_reduce_scatter(self, inputs),
            (Algorithm::Ring, Kind::AllReduce) => ring::all_reduce(self, inputs[0]),
            (Algorithm::Ring, Kind::AllGather) => ring::all_gather(self, outputs),
            (Algorithm::Ring, Kind::ReduceScatter) => ring::reduce_scatter(self, inputs),
            (Algorithm::Tree, Kind::Broadcast { root }) => tree::broadcast(self, root, inputs[0]),
            (Algorithm::Tree, Kind::Reduce { root }) => tree::reduce(self, root, inputs[0]),
            (Algorithm::Dissemination, Kind::Barrier) => tree::dissemination_barrier(self),
            (Algorithm::Hierarchical, _) if self.hosts.len() == 1 => return None,
            (Algorithm::Hierarchical, Kind::AllReduce) => hierarchical::all_reduce(self, inputs[0]),
            (Algorithm::Hierarchical, Kind::Broadcast { root }) => hierarchical::broadcast(self, root, inputs[0]),
            (Algorithm::Hierarchical, Kind::Reduce { root }) => hierarchical::reduce(self, root, inputs[0]),
            (Algorithm::Hierarchical, Kind::AllGather) => hierarchical::all_gather(self, outputs),
            (Algorithm::Hierarchical, Kind::ReduceScatter) => hierarchical::reduce_scatter(self, inputs),
            _ => return None,
        })
    }
}

/// What a group of one does.
fn local(kind: Kind, inputs: &[usize]) -> Option<Schedule> {
    let input = Region::whole(Space::Input, 0, longest(inputs));
    let output = input.of(Space::Output);
    match kind {
        Kind::Send { .. } | Kind::Recv { .. } => None,
        Kind::Barrier => Some(Schedule::default()),
        _ if kind.reduces() => Some(single(|draft| draft.reduce(0, [input], output))),
        _ => Some(single(|draft| draft.copy(0, input, output))),
    }
}
