//! Who sends which elements when: pure data, made by pure functions.
//!
//! A [`Schedule`] is one rank's share of one part of a collective. It is a set of independent [`Lane`]s; a lane is a
//! sequence of [`Round`]s; a round's steps may all be under way at once. **A rank enters round k + 1 of a lane when
//! every step of its own round k is complete**: a send when its memory may be overwritten, a receive when the data has
//! landed. Lanes touch disjoint memory (inputs may be read by several), so a player may run any number of them side by
//! side, in any interleaving, and pipelines by doing so.
//!
//! A message is identified by (lane, `tag`) within its pair of ranks and direction; the sender's and the receiver's
//! schedule must agree on both and on the length. Ranks compute their schedules apart, from the same arguments.

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
    /// Copy within this rank. Source and destination have the same element type; they may be the same memory.
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
    /// The steps; order matters only for local ones (Copy, Reduce), which run in order after nothing else.
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
    /// Independent lanes, to be started in order.
    pub lanes: Vec<Lane>,
}
