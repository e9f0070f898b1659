//! Who sends which elements when: pure data, made by pure functions.
//!
//! A [`Schedule`] is one rank's share of one part of a collective. It is a set of independent [`Lane`]s; a lane is a
//! sequence of [`Round`]s; a round's steps may all be under way at once. **A rank enters round k + 1 of a lane when
//! every step of its own round k is complete**: a send when its memory may be overwritten, a receive when the data has
//! landed. Lanes touch disjoint memory (inputs may be read by several), so a player may run any number of them side by
//! side, in any interleaving, and pipelines by doing so.
//!
//! A message is identified by (lane, `tag`) within its pair of ranks and direction; the sender's and the receiver's
//! schedule must agree on both, on the length and on whether the elements are partial sums. Ranks compute their
//! schedules apart, from the same arguments. Within a lane a pair exchanges at most one message each way per round.
//!
//! [`plan`] picks an [`Algorithm`] and writes the schedule; [`plan_with`] writes the one that is named. [`sim`] plays
//! schedules of all ranks over plain vectors, checks them, and measures them.

mod direct;
mod draft;
mod hierarchical;
mod plan;
mod recursive;
mod ring;
pub mod sim;
#[cfg(test)]
mod tests;
mod tree;

pub use plan::{Algorithm, Shape, Tuning, choose, plan, plan_with};

/// Which memory a region lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// What the rank contributes, as the user's blocks. Elements of the dtype.
    Input,
    /// Where the rank's result goes, as the user's blocks. Elements of the dtype. May be the same memory as the input.
    Output,
    /// The lane's own temporary memory, elements of the dtype. Has one block, 0.
    Scratch,
    /// The lane's own temporary memory, elements of the dtype's accumulator. Has one block, 0. Partial sums travel in it.
    Partial,
}

/// A run of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// The memory.
    pub space: Space,
    /// The block within it.
    pub block: u32,
    /// First element within the block.
    pub offset: usize,
    /// Elements.
    pub len: usize,
}

impl Region {
    /// No elements, of no particular memory: what a barrier's messages carry.
    pub const EMPTY: Region = Region { space: Space::Scratch, block: 0, offset: 0, len: 0 };

    /// The first `len` elements of a block.
    pub const fn whole(space: Space, block: u32, len: usize) -> Self {
        Region { space, block, offset: 0, len }
    }

    /// `len` elements of this region from its element `start` on.
    pub const fn part(self, start: usize, len: usize) -> Self {
        Region { offset: self.offset + start, len, ..self }
    }

    /// The same elements of the same block in another memory.
    pub const fn of(self, space: Space) -> Self {
        Region { space, ..self }
    }
}

/// One thing to do. Ranks are group ranks, never the schedule's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Let `to` have a copy of `from`.
    Send {
        /// The receiver.
        to: u32,
        /// The message's number between these two ranks, this way, in this lane.
        tag: u32,
        /// What is sent.
        from: Region,
    },
    /// Fill `into` with what `from` sends.
    Recv {
        /// The sender.
        from: u32,
        /// The message's number.
        tag: u32,
        /// Where it lands; never [`Space::Input`].
        into: Region,
    },
    /// Copy within this rank. Source and destination have the same element type; they may be the very same memory, and
    /// then nothing is to be done (another rank may be reading it). They never overlap in part.
    Copy {
        /// Source.
        from: Region,
        /// Destination.
        into: Region,
    },
    /// Combine `sources`, in this order, into `into`. All have `into`'s length. Elements read from Input or Scratch are
    /// raw and get PREMUL_SUM's factor; elements read from Partial have it already. Written to Partial the result is a
    /// partial sum; written to Output it is final: AVG divides by the group's size, narrow floats are rounded once.
    /// `into` may be one of the sources.
    Reduce {
        /// What is combined, first to last.
        sources: Vec<Region>,
        /// Where the result goes: Partial or Output.
        into: Region,
    },
}

/// Steps that may be under way together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// The steps. Local ones (Copy, Reduce) run in their order among themselves, at any time in the round: they wait for
    /// none of its messages, touch no memory that one writes, and write none that one reads.
    pub steps: Vec<Step>,
}

/// A sequence of rounds over its own memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lane {
    /// The rounds, first to last.
    pub rounds: Vec<Round>,
    /// Elements of [`Space::Scratch`] it needs.
    pub scratch: usize,
    /// Elements of [`Space::Partial`] it needs.
    pub partial: usize,
}

/// One rank's share of one part of a collective.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Independent lanes, to be started in order. Lane i of one rank talks to lane i of the others; it may be empty.
    pub lanes: Vec<Lane>,
}

impl Schedule {
    /// Steps over all lanes.
    pub fn steps(&self) -> usize {
        self.lanes.iter().flat_map(|lane| &lane.rounds).map(|round| round.steps.len()).sum()
    }

    /// The most elements of [`Space::Scratch`] and of [`Space::Partial`] that one lane needs.
    pub fn temporaries(&self) -> (usize, usize) {
        self.lanes
            .iter()
            .fold((0, 0), |(scratch, partial), lane| (scratch.max(lane.scratch), partial.max(lane.partial)))
    }
}
