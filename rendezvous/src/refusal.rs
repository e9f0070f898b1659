//! Why the coordinator refuses a call, as data. Travels in the details of a gRPC status.

use std::fmt;
use std::time::Duration;

/// A rank, and its host where that is known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RankAt {
    /// The rank.
    pub rank: u32,
    /// Its host, as it named itself or as the launcher's host list has it.
    pub host: Option<String>,
}

impl fmt::Display for RankAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Some(host) => write!(f, "{} on {host}", self.rank),
            None => write!(f, "{} (host unknown)", self.rank),
        }
    }
}

/// Ranks of a formed epoch that are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The epoch.
    pub epoch: u64,
    /// Their host.
    pub host: String,
    /// The ranks, ascending.
    pub ranks: Vec<u32>,
    /// How that was noticed.
    pub how: String,
    /// If an agent was lost: the rank in whose process it ran. Of the others nothing certain is known.
    pub speaker: Option<u32>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lost { epoch, host, ranks, how, .. } = self;
        write!(f, "epoch {epoch} lost {} on {host}: {how}", Ranks(ranks))
    }
}

/// An epoch that didn't form in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Late {
    /// Ranks that never came, ascending.
    pub missing: Vec<RankAt>,
    /// From the first announcement to the deadline.
    pub waited: Duration,
    /// How many ranks were expected.
    pub world_size: u32,
    /// Agents that were refused meanwhile, and why.
    pub refused: Vec<String>,
}

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Late { missing, waited, world_size, refused } = self;
        write!(f, "{} of {world_size} ranks missing after {waited:?}: {}", missing.len(), Missing(missing))?;
        if !refused.is_empty() {
            write!(f, "; refused meanwhile: {}", refused.join("; "))?;
        }
        Ok(())
    }
}

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The job's token wasn't given, or is another.
    #[error("{}", if *given { "wrong token" } else { "no token given, and the coordinator wants one" })]
    Token {
        /// Whether there was one.
        given: bool,
    },
    /// The peer speaks another major version.
    #[error("protocol version {yours:?} is incompatible with the coordinator's {ours}")]
    Version {
        /// The caller's.
        yours: String,
        /// The coordinator's.
        ours: String,
    },
    /// Two agents announced the same rank.
    #[error("rank {rank} announced twice: by {holder}, then by {second}")]
    Twin {
        /// The rank.
        rank: u32,
        /// The host that holds it.
        holder: String,
        /// The host that came second.
        second: String,
    },
    /// Agents disagree on the world size.
    #[error("world size {yours} differs from {theirs}, which {host} announced")]
    SizesDiffer {
        /// The caller's.
        yours: u32,
        /// What was announced first.
        theirs: u32,
        /// By whom.
        host: String,
    },
    /// The caller speaks of an epoch that isn't the current one.
    #[error("epoch {yours} is not the current one, {current}")]
    Stale {
        /// The caller's.
        yours: u64,
        /// The coordinator's.
        current: u64,
    },
    /// The coordinator was started anew without the store the caller knows.
    #[error("the coordinator was restarted: its key-value store {yours:016x} is lost, this one is {current:016x}")]
    StoreLost {
        /// The instance the caller knows.
        yours: u64,
        /// The one that answers.
        current: u64,
    },
    /// Keys that didn't appear in time.
    #[error("no key {} after {waited:?}", keys.join(", "))]
    KeysMissing {
        /// The keys, at most 16 of them.
        keys: Vec<String>,
        /// From the call to the deadline.
        waited: Duration,
    },
    /// Over a limit.
    #[error("{what}: {got} is over the limit of {limit}")]
    TooMuch {
        /// Of what.
        what: String,
        /// The limit.
        limit: u64,
        /// What came.
        got: u64,
    },
    /// A malformed request.
    #[error("invalid {what}: {got}")]
    Invalid {
        /// Which part.
        what: String,
        /// What came.
        got: String,
    },
    /// A member that the call needs is gone.
    #[error("{0}")]
    Lost(Lost),
    /// Members that didn't come to a barrier in time.
    #[error("barrier {name:?}: missing after {waited:?}: {}", Missing(missing))]
    BarrierLate {
        /// The barrier.
        name: String,
        /// Who is missing, ascending.
        missing: Vec<RankAt>,
        /// From the first arrival to the deadline.
        waited: Duration,
    },
    /// `add` on something else, or past 64 bits.
    #[error("key {key:?} can't be added to: {got}")]
    NotANumber {
        /// The key.
        key: String,
        /// What is stored.
        got: String,
    },
    /// The agent hasn't joined, or was given up.
    #[error("the coordinator doesn't know this session: it never joined, or was silent for too long")]
    UnknownSession,
}

/// Ranks in words, at most 16 of them.
pub(crate) struct Ranks<'a>(pub(crate) &'a [u32]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        list(f, "rank", self.0)
    }
}

/// Missing ranks in words, at most 16 of them.
struct Missing<'a>(&'a [RankAt]);

impl fmt::Display for Missing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        list(f, "rank", self.0)
    }
}

fn list<T: fmt::Display>(f: &mut fmt::Formatter<'_>, noun: &str, items: &[T]) -> fmt::Result {
    const SHOWN: usize = 16;
    write!(f, "{noun}{}", if items.len() == 1 { "" } else { "s" })?;
    for (index, item) in items.iter().take(SHOWN).enumerate() {
        write!(f, "{} {item}", if index == 0 { "" } else { "," })?;
    }
    if items.len() > SHOWN {
        write!(f, " and {} more", items.len() - SHOWN)?;
    }
    Ok(())
}
