//! Why a collective on devices fails.

use std::fmt;

use crate::{pjrt::PjrtError, program::ProgramError};

/// What one rank had called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Called {
    /// Its position in the group.
    pub rank: u32,
    /// Its call, or what it did instead.
    pub call: String,
}

/// Why operations of a group fail. All members get the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The deadline passed.
    Timeout {
        /// What was called.
        op: String,
        /// Its number in the group.
        seq: u64,
        /// The limit.
        after_ms: u64,
        /// Members that had not come; none if all had, and the devices were not done.
        missing: Vec<u32>,
        /// What each member had called.
        called: Vec<Called>,
    },
    /// The deadline passed before the call's turn came, on this rank.
    Queued {
        /// What was called.
        op: String,
        /// Its number in the group.
        seq: u64,
        /// The limit.
        after_ms: u64,
        /// The call that held it up, and its group, where that is known.
        ahead: Option<String>,
    },
    /// Members called different things.
    Mismatch {
        /// The number at which they differ.
        seq: u64,
        /// In what.
        what: String,
        /// What each member had called.
        called: Vec<Called>,
    },
    /// A member closed its part of the group.
    Left {
        /// The member.
        rank: u32,
        /// What needed it.
        op: String,
        /// Its number.
        seq: u64,
    },
    /// Somebody ended it.
    Aborted {
        /// The member, if it was one.
        by: Option<u32>,
        /// Why.
        why: String,
    },
    /// No program does this.
    Unsupported {
        /// What was called.
        op: String,
        /// Why not.
        reason: ProgramError,
    },
    /// The plugin refused or failed.
    Plugin {
        /// At what: "compiling", "launching", "running", "copying to the device", "copying from the device".
        doing: &'static str,
        /// What was called.
        program: String,
        /// The group's name.
        group: String,
        /// The slice, or the devices of a client that is none.
        slice: String,
        /// The member whose device it was, if it was one's.
        rank: Option<u32>,
        /// The plugin's words.
        error: Box<PjrtError>,
    },
}

impl Failure {
    /// The same with the ranks' numbers in another group; nothing if one of them has none there.
    pub fn numbered(&self, number: impl Fn(u32) -> Option<u32>) -> Option<Failure> {
        let mut failure = self.clone();
        match &mut failure {
            Failure::Timeout { missing, called, .. } => {
                for rank in missing.iter_mut().chain(called.iter_mut().map(|row| &mut row.rank)) {
                    *rank = number(*rank)?;
                }
            }
            Failure::Mismatch { called, .. } => {
                for row in called {
                    row.rank = number(row.rank)?;
                }
            }
            Failure::Left { rank, .. }
            | Failure::Aborted { by: Some(rank), .. }
            | Failure::Plugin { rank: Some(rank), .. } => *rank = number(*rank)?,
            Failure::Queued { .. }
            | Failure::Aborted { by: None, .. }
            | Failure::Unsupported { .. }
            | Failure::Plugin { rank: None, .. } => {}
        }
        Some(failure)
    }
}

impl std::error::Error for Failure {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = |f: &mut fmt::Formatter<'_>, called: &[Called]| {
            called.iter().try_for_each(|row| write!(f, "\n  rank {}: {}", row.rank, row.call))
        };
        match self {
            Failure::Timeout { op, seq, after_ms, missing, called } => {
                write!(f, "{op}, seq {seq}: the timeout of {after_ms} ms passed")?;
                match missing.as_slice() {
                    [] => f.write_str("; all ranks came, the devices are not done")?,
                    [one] => write!(f, "; waiting on rank {one}")?,
                    many => {
                        let list: Vec<String> = many.iter().map(u32::to_string).collect();
                        write!(f, "; waiting on ranks {}", list.join(", "))?;
                    }
                }
                table(f, called)
            }
            Failure::Queued { op, seq, after_ms, ahead } => {
                write!(f, "{op}, seq {seq}: the timeout of {after_ms} ms passed ")?;
                match ahead {
                    Some(ahead) => write!(f, "while it waited behind {ahead}"),
                    None => f.write_str("before it was launched"),
                }
            }
            Failure::Mismatch { seq, what, called } => {
                write!(f, "ranks called different operations at seq {seq}: {what}")?;
                table(f, called)
            }
            Failure::Left { rank, op, seq } => write!(f, "rank {rank} has left; needed by {op}, seq {seq}"),
            Failure::Aborted { by: Some(by), why } => write!(f, "aborted by rank {by}: {why}"),
            Failure::Aborted { by: None, why } => write!(f, "aborted: {why}"),
            Failure::Unsupported { op, reason } => write!(f, "{op}: {reason}"),
            Failure::Plugin { doing, program, group, slice, rank, error } => {
                write!(f, "{doing} {program} failed (group {group}, slice {slice}")?;
                if let Some(rank) = rank {
                    write!(f, ", rank {rank}")?;
                }
                write!(f, "): {error}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_other_numbers_in_another_group() {
        let row = |rank| Called { rank, call: "barrier".to_owned() };
        let timeout = |missing, rank| {
            let failure =
                Failure::Timeout { op: "barrier".to_owned(), seq: 1, after_ms: 5, missing, called: vec![row(rank)] };
            failure.numbered(|rank| (rank < 2).then_some(rank + 10))
        };
        let text = "barrier, seq 1: the timeout of 5 ms passed; waiting on rank 11\n  rank 10: barrier";
        assert_eq!(timeout(vec![1], 0).unwrap().to_string(), text);
        assert!(timeout(vec![2], 0).is_none());
        assert!(timeout(vec![1], 2).is_none());
    }
}
