//! Plays schedules of all ranks over plain vectors, as unkindly as the contract allows, and measures them.
//!
//! [`check`] looks at the schedules alone: messages match, regions exist, nothing under way at the same time touches
//! memory that another writes, whatever the timing. [`play`] runs them in a random order: which started lane goes on,
//! which message is delivered, which sends complete at once and which only when received. [`cost`] counts rounds and
//! elements. A schedule that passes the first is wrong only if its arithmetic or its waiting is, which the second finds.

mod check;
mod cost;
mod play;

use thiserror::Error;

use super::{Region, Schedule, Space, Step};

pub use check::check;
pub use cost::{Cost, cost};
pub use play::play;

/// How elements are combined.
pub trait Arithmetic {
    /// An element of the dtype.
    type Element: Clone;
    /// An element of its accumulator.
    type Partial: Clone;
    /// The accumulator for a raw element of one rank, with PREMUL_SUM's factor.
    fn lift(&self, raw: &Self::Element) -> Self::Partial;
    /// Combines the next source into what there is of the earlier ones.
    fn combine(&self, earlier: &mut Self::Partial, next: &Self::Partial);
    /// The result: divided for AVG, rounded to the dtype.
    fn finish(&self, total: Self::Partial) -> Self::Element;
}

/// One rank: its schedule and its memory.
#[derive(Clone, Debug)]
pub struct Rank<T> {
    /// What it does.
    pub schedule: Schedule,
    /// Its input, per block.
    pub inputs: Vec<Vec<T>>,
    /// Elements of its output, per block.
    pub outputs: Vec<usize>,
    /// Pairs of an input and an output block that are the same memory.
    pub aliases: Vec<(usize, usize)>,
}

/// What is wrong with schedules. Numbers of rounds are those of the schedule of the rank that is named first.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// A step names memory that isn't there, isn't written yet, has another length or type, or may not be used so.
    #[error("rank {rank}, lane {lane}, round {round}: {what}: {step:?}")]
    Step {
        /// The rank.
        rank: u32,
        /// The lane.
        lane: usize,
        /// The round.
        round: usize,
        /// What is wrong with it.
        what: &'static str,
        /// The step.
        step: Box<Step>,
    },
    /// Two steps of the rank may be under way together, and one writes what the other reads or writes.
    #[error("rank {rank}: {first:?} and {second:?} (lane, round) both touch block {block} of {space:?}")]
    Race {
        /// The rank.
        rank: u32,
        /// Lane and round of one.
        first: (usize, usize),
        /// Lane and round of the other.
        second: (usize, usize),
        /// The memory.
        space: Space,
        /// The block.
        block: u32,
    },
    /// A message that one of the two ranks doesn't know of, or knows twice, or differently.
    #[error("message {from} -> {to}, lane {lane}, tag {tag}: sent as {sent:?}, received as {received:?}")]
    Message {
        /// The sender.
        from: u32,
        /// The receiver.
        to: u32,
        /// The lane.
        lane: usize,
        /// The number.
        tag: u32,
        /// Elements and whether they are partial results, for each time it is sent.
        sent: Vec<(usize, bool)>,
        /// The same, for each time it is received.
        received: Vec<(usize, bool)>,
    },
    /// Nothing can go on.
    #[error("stuck, as (rank, lane, round): {waiting:?}")]
    Deadlock {
        /// Rank, lane and round of every started lane that isn't at its end.
        waiting: Vec<(u32, usize, usize)>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Key {
    from: u32,
    to: u32,
    lane: usize,
    tag: u32,
}

fn rounds(schedule: &Schedule) -> impl Iterator<Item = (usize, usize)> {
    let lanes = schedule.lanes.iter().enumerate();
    lanes.flat_map(|(index, lane)| (0..lane.rounds.len()).map(move |round| (index, round)))
}

/// What a step reads and what it writes.
fn touches(step: &Step) -> (&[Region], Option<Region>) {
    match step {
        Step::Send { from, .. } => (std::slice::from_ref(from), None),
        Step::Recv { into, .. } => (&[], Some(*into)),
        Step::Copy { from, into } => (std::slice::from_ref(from), Some(*into)),
        Step::Reduce { sources, into } => (sources, Some(*into)),
    }
}

/// Where a rank's blocks lie in one vector of its input and output.
struct Places {
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    total: usize,
}

impl Places {
    fn of<T>(rank: &Rank<T>) -> Self {
        let mut total = 0;
        let mut next = |len: usize| {
            total += len;
            total - len
        };
        let inputs: Vec<usize> = rank.inputs.iter().map(|block| next(block.len())).collect();
        let mut outputs = Vec::with_capacity(rank.outputs.len());
        for (block, &len) in rank.outputs.iter().enumerate() {
            let alias = rank.aliases.iter().find(|alias| alias.1 == block);
            outputs.push(alias.map_or_else(|| next(len), |alias| inputs[alias.0]));
        }
        Places { inputs, outputs, total }
    }

    /// 0 and the place in the rank's vector, or the lane's own memory, as 1 or 2, and the place there.
    fn start(&self, region: Region) -> (u8, usize) {
        match region.space {
            Space::Input => (0, self.inputs[region.block as usize] + region.offset),
            Space::Output => (0, self.outputs[region.block as usize] + region.offset),
            Space::Scratch => (1, region.offset),
            Space::Partial => (2, region.offset),
        }
    }
}
