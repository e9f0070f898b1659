//! What can go wrong, as data.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::handshake::NoRandomness;
use crate::link::interfaces::NoInterface;

/// Why operations of a group fail. Travels between ranks, so that all of them raise the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// The deadline passed.
    Timeout {
        /// What was called, e.g. `all_reduce(SUM, float32, count=8)`.
        op: String,
        /// Its sequence number in the group.
        seq: u64,
        /// The rank whose deadline passed.
        by: u32,
        /// The deadline, in milliseconds from the call.
        after_ms: u64,
        /// Ranks it still waited for.
        waiting_on: Vec<u32>,
        /// What each rank had called.
        ledger: Vec<LedgerRow>,
    },
    /// A rank is gone.
    PeerLost {
        /// The rank.
        rank: u32,
        /// Its host, as it named itself.
        host: String,
        /// How that was noticed.
        how: String,
        /// The operation that needed it, if one did.
        op: Option<String>,
        /// Its sequence number.
        seq: u64,
    },
    /// Ranks called different things.
    Mismatch {
        /// The sequence number at which they differ.
        seq: u64,
        /// What was seen first.
        what: String,
        /// What each rank had called.
        ledger: Vec<LedgerRow>,
    },
    /// A message isn't what its receive expected.
    Message {
        /// The receive's number among this rank's messages of the group.
        seq: u64,
        /// The rank that received it.
        rank: u32,
        /// The rank that sent it.
        from: u32,
        /// What the receive expected.
        expected: Extent,
        /// What was sent.
        sent: Extent,
    },
    /// Somebody ended it.
    Aborted {
        /// The rank, if not this one.
        by: Option<u32>,
        /// Why.
        why: String,
    },
    /// The engine itself failed: out of descriptors, memory, or a bug.
    Internal {
        /// The rank.
        rank: u32,
        /// What failed.
        what: String,
    },
}

/// The size of a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Its bytes.
    pub bytes: u64,
    /// Its elements.
    pub count: u64,
    /// Their type's name, e.g. `float32`.
    pub dtype: String,
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes ({} {})", self.bytes, self.count, self.dtype)
    }
}

/// What one rank had called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerRow {
    /// The rank.
    pub rank: u32,
    /// Its call with the number in question, or what it did instead.
    pub called: String,
}

impl Failure {
    /// Which of two failures of one group tells more about the cause; higher wins.
    pub(crate) fn weight(&self) -> u8 {
        match self {
            Failure::Mismatch { .. } | Failure::Message { .. } => 4,
            Failure::PeerLost { .. } => 3,
            Failure::Internal { .. } => 2,
            Failure::Timeout { .. } => 1,
            Failure::Aborted { .. } => 0,
        }
    }

    /// Whether a table of what each rank called explains it.
    pub(crate) fn has_ledger(&self) -> bool {
        matches!(self, Failure::Timeout { .. } | Failure::Mismatch { .. })
    }

    /// The same with the ranks' numbers in another group; nothing if one of them has none there.
    pub fn numbered(&self, number: impl Fn(u32) -> Option<u32>) -> Option<Failure> {
        let mut failure = self.clone();
        match &mut failure {
            Failure::Timeout { by, waiting_on, .. } => {
                *by = number(*by)?;
                for rank in waiting_on {
                    *rank = number(*rank)?;
                }
            }
            Failure::PeerLost { rank, .. } | Failure::Internal { rank, .. } => *rank = number(*rank)?,
            Failure::Message { rank, from, .. } => (*rank, *from) = (number(*rank)?, number(*from)?),
            Failure::Aborted { by: Some(by), .. } => *by = number(*by)?,
            Failure::Mismatch { .. } | Failure::Aborted { by: None, .. } => {}
        }
        if let Some((_, ledger)) = failure.ledger_mut() {
            for row in ledger {
                row.rank = number(row.rank)?;
            }
        }
        Some(failure)
    }

    /// Its table has been gathered.
    pub(crate) fn is_told(&self) -> bool {
        matches!(self, Failure::Timeout { ledger, .. } | Failure::Mismatch { ledger, .. } if !ledger.is_empty())
    }

    /// The table to fill, for the failures that have one.
    pub(crate) fn ledger_mut(&mut self) -> Option<(u64, &mut Vec<LedgerRow>)> {
        match self {
            Failure::Timeout { seq, ledger, .. } | Failure::Mismatch { seq, ledger, .. } => Some((*seq, ledger)),
            _ => None,
        }
    }
}

impl std::error::Error for Failure {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = |f: &mut fmt::Formatter<'_>, ledger: &[LedgerRow]| {
            for row in ledger {
                write!(f, "\n  rank {}: {}", row.rank, row.called)?;
            }
            Ok(())
        };
        match self {
            Failure::Timeout { op, seq, by, after_ms, waiting_on, ledger } => {
                write!(f, "{op}, seq {seq}: the timeout of {after_ms} ms passed on rank {by}")?;
                if !waiting_on.is_empty() {
                    write!(f, "; waiting on rank{} ", if waiting_on.len() == 1 { "" } else { "s" })?;
                    for (index, rank) in waiting_on.iter().enumerate() {
                        write!(f, "{}{rank}", if index == 0 { "" } else { ", " })?;
                    }
                }
                table(f, ledger)
            }
            Failure::PeerLost { rank, host, how, op, seq } => {
                write!(f, "lost rank {rank} on host {host}: {how}")?;
                match op {
                    Some(op) => write!(f, "; needed by {op}, seq {seq}"),
                    None => Ok(()),
                }
            }
            Failure::Mismatch { seq, what, ledger } => {
                write!(f, "ranks called different operations at seq {seq}: {what}")?;
                table(f, ledger)
            }
            Failure::Message { seq, rank, from, expected, sent } => {
                write!(
                    f,
                    "recv from rank {from} on rank {rank}, seq {seq}: expected {expected}, rank {from} sent {sent}"
                )
            }
            Failure::Aborted { by: Some(by), why } => write!(f, "aborted by rank {by}: {why}"),
            Failure::Aborted { by: None, why } => write!(f, "aborted: {why}"),
            Failure::Internal { rank, what } => write!(f, "internal error on rank {rank}: {what}"),
        }
    }
}

/// Why a hub can't be started or used.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// None of the ports that PODRING_PORT names can be listened on.
    #[error("PODRING_PORT={ports}: {source}")]
    Port {
        /// The setting.
        ports: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// PODRING_INTERFACES names what isn't there.
    #[error(transparent)]
    Interfaces(#[from] NoInterface),
    /// This process was forked from the one that made the group.
    #[error("this process was forked after the group was made; a process group can't be used in a forked child")]
    Forked,
    /// The channel was closed.
    #[error("the group was destroyed")]
    Closed,
    /// Two channels of one name.
    #[error("a group named {name:?} is live in this process already")]
    Duplicate {
        /// The name.
        name: String,
    },
}

impl From<NoRandomness> for HubError {
    fn from(error: NoRandomness) -> Self {
        HubError::System { what: "random numbers", source: std::io::Error::other(error) }
    }
}

impl HubError {
    pub(crate) fn system(what: &'static str) -> impl Fn(rustix::io::Errno) -> HubError {
        move |errno| HubError::System { what, source: errno.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_other_numbers_in_another_group() {
        let row = |rank| LedgerRow { rank, called: "barrier".to_owned() };
        let timeout = |by, waiting_on, rank| Failure::Timeout {
            op: "barrier".to_owned(),
            seq: 1,
            by,
            after_ms: 5,
            waiting_on,
            ledger: vec![row(rank)],
        };
        let number = |rank| (rank < 2).then_some(rank + 10);
        assert_eq!(timeout(0, vec![1], 1).numbered(number), Some(timeout(10, vec![11], 11)));
        for unknown in [timeout(2, vec![1], 1), timeout(0, vec![1, 2], 1), timeout(0, vec![1], 2)] {
            assert_eq!(unknown.numbered(number), None);
        }
        let aborted = |by| Failure::Aborted { by, why: "enough".to_owned() };
        assert_eq!(aborted(Some(1)).numbered(number), Some(aborted(Some(11))));
        assert_eq!(aborted(None).numbered(number), Some(aborted(None)));
        let lost = |rank| Failure::PeerLost { rank, host: "a".to_owned(), how: "gone".to_owned(), op: None, seq: 2 };
        assert_eq!(lost(1).numbered(number), Some(lost(11)));
        assert_eq!(lost(3).numbered(number), None);
        let extent = |count| Extent { bytes: 4 * count, count, dtype: "float32".to_owned() };
        let message = |rank, from| Failure::Message { seq: 3, rank, from, expected: extent(4), sent: extent(5) };
        assert_eq!(message(1, 0).numbered(number), Some(message(11, 10)));
        let text = "recv from rank 0 on rank 1, seq 3: expected 16 bytes (4 float32), rank 0 sent 20 bytes (5 float32)";
        assert_eq!(message(1, 0).to_string(), text);
    }
}
