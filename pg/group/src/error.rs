//! What a caller of a process group may get instead of a result.

use std::fmt;
use std::sync::Arc;

use podring_collective::Invalid;
use podring_fabric::error::{Failure, HubError};
use podring_ici::engine::Failure as Of;
use podring_setting::BadSetting;

use crate::store::StoreError;

/// A group and this rank in it, as errors name them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The group's name.
    pub group: String,
    /// This rank, by the group's numbers, as all ranks in an error.
    pub rank: u32,
    /// The members' ranks in the default group, where those aren't the group's own numbers.
    pub members: Option<Arc<[u32]>>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { group, rank, members } = self;
        match members {
            None => write!(f, "group {group}, rank {rank}"),
            Some(members) => write!(f, "group {group} of ranks {} (its rank {rank})", list(members)),
        }
    }
}

/// Why a call failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The request is wrong by itself.
    #[error("rank {rank}: {source}")]
    Invalid {
        /// This rank.
        rank: u32,
        /// What is wrong.
        source: Invalid,
    },
    /// The group is broken, or this operation failed.
    #[error("{failure} [{place}]")]
    Failed {
        /// The group and this rank.
        place: Place,
        /// Why.
        failure: Arc<Failure>,
    },
    /// The same of an operation on devices.
    #[error("{failure} [{place}]")]
    Device {
        /// The group and this rank.
        place: Place,
        /// Why.
        failure: Arc<podring_ici::engine::Failure>,
    },
    /// The group has no devices.
    #[error("{op} of device buffers, but {why} [{place}]")]
    NoDevices {
        /// The operation's name.
        op: &'static str,
        /// Why not.
        why: &'static str,
        /// The group and this rank.
        place: Place,
    },
    /// The process's devices can't be used.
    #[error(transparent)]
    Devices(#[from] crate::engine::DeviceError),
    /// The group's devices can't be.
    #[error("{source} [{place}]")]
    Unopened {
        /// Why.
        source: Box<crate::engine::DeviceError>,
        /// The group and this rank.
        place: Box<Place>,
    },
    /// A wait with a time limit of its own ended before the operation, which is still under way.
    #[error("wait on {op}, seq {seq}, timed out after {after_ms} ms; the operation is still under way [{place}]")]
    WaitTimeout {
        /// The operation's name.
        op: &'static str,
        /// Its sequence number.
        seq: u64,
        /// The limit.
        after_ms: u64,
        /// The group and this rank.
        place: Place,
    },
    /// Some ranks didn't come.
    #[error("{what}: no sign of rank{} {} within {after_ms} ms; {present} of {size} came [{place}]", if missing.len() == 1 { "" } else { "s" }, list(missing))]
    Missing {
        /// What they were awaited for.
        what: &'static str,
        /// Who didn't come.
        missing: Vec<u32>,
        /// How many did.
        present: usize,
        /// The group's size.
        size: u32,
        /// The limit.
        after_ms: u64,
        /// The group and this rank.
        place: Box<Place>,
    },
    /// The world didn't form: some ranks didn't come.
    #[error(
        "forming the group: no sign of rank{} {} within {after_ms} ms; {} of {size} came{} [{place}]",
        if missing.len() == 1 { "" } else { "s" },
        list(&missing.iter().map(at).collect::<Vec<_>>()),
        *size as usize - missing.len().min(*size as usize),
        refusals(refused)
    )]
    Absent {
        /// Who didn't come, and the host where that is known.
        missing: Vec<(u32, Option<String>)>,
        /// Ranks that came and were refused, and why.
        refused: Vec<String>,
        /// The group's size.
        size: u32,
        /// The limit.
        after_ms: u64,
        /// The group and this rank.
        place: Box<Place>,
    },
    /// The job's coordinator can't be found or used, or says no.
    #[error("{why} [{place}]")]
    Rendezvous {
        /// What kind of failure.
        kind: Kind,
        /// Why.
        why: String,
        /// The group and this rank.
        place: Box<Place>,
    },
    /// A monitored barrier that not everybody passed.
    #[error("{} [{place}]", barrier_text(place.rank, missing, *after_ms))]
    Barrier {
        /// On rank 0, who didn't come, or rank 0 itself if it gave them no time. Elsewhere, what rank 0 said; rank 0
        /// itself if it said nothing.
        missing: Vec<u32>,
        /// The limit.
        after_ms: u64,
        /// The group and this rank.
        place: Place,
    },
    /// Ranks disagree on the group itself.
    #[error("rank {} has {what} {mine}, but rank {other} has {theirs} [{place}]", place.rank)]
    Disagree {
        /// On what.
        what: &'static str,
        /// This rank's.
        mine: String,
        /// The other's.
        theirs: String,
        /// The other.
        other: u32,
        /// The group and this rank.
        place: Box<Place>,
    },
    /// The launcher's store failed.
    #[error("rank {}: store: {source} [{place}]", place.rank)]
    Store {
        /// The group and this rank.
        place: Box<Place>,
        /// What it said.
        source: StoreError,
    },
    /// A setting in the environment is wrong.
    #[error(transparent)]
    Setting(#[from] BadSetting),
    /// The hub can't start or be used.
    #[error(transparent)]
    Hub(Arc<HubError>),
    /// The caller's interrupt callback said to stop.
    #[error("interrupted")]
    Interrupted,
}

fn at((rank, host): &(u32, Option<String>)) -> String {
    match host {
        Some(host) => format!("{rank} on {host}"),
        None => rank.to_string(),
    }
}

fn refusals(refused: &[String]) -> String {
    if refused.is_empty() { String::new() } else { format!("; refused meanwhile: {}", refused.join("; ")) }
}

fn list<T: ToString>(ranks: &[T]) -> String {
    const SHOWN: usize = 32;
    let mut text = ranks.iter().take(SHOWN).map(T::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() > SHOWN {
        text.push_str(&format!(" and {} more", ranks.len() - SHOWN));
    }
    text
}

/// In the words of torch's own backends, which callers match.
fn barrier_text(rank: u32, missing: &[u32], after_ms: u64) -> String {
    let ranks = if missing.len() == 1 { "Rank" } else { "Ranks" };
    let absent = format!("{ranks} {} failed to pass monitoredBarrier in {after_ms} ms", list(missing));
    match (rank, missing) {
        (0, [0]) => format!("Rank 0 timed out in monitoredBarrier after {after_ms} ms"),
        (0, _) => absent,
        (_, [0]) => format!(
            "Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank \
             0: no word from it within {after_ms} ms"
        ),
        _ => format!(
            "Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank \
             0: {absent}"
        ),
    }
}

impl From<HubError> for Error {
    fn from(error: HubError) -> Self {
        Error::Hub(Arc::new(error))
    }
}

/// Which kind of exception an error becomes. The codes are the C ABI's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Kind {
    /// Wrong by itself.
    Invalid = 1,
    /// Right, but not to be had here.
    Unsupported = 2,
    /// A deadline passed.
    Timeout = 3,
    /// A rank is gone.
    PeerLost = 4,
    /// Ranks called different things.
    Mismatch = 5,
    /// Aborted, closed, or failed before.
    Aborted = 6,
    /// The launcher's store.
    Store = 7,
    /// The network.
    Network = 8,
    /// A bug.
    Internal = 9,
    /// Interrupted by the caller.
    Interrupted = 10,
}

impl Error {
    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self {
            Error::Invalid { .. } | Error::Setting(_) => Kind::Invalid,
            Error::Failed { failure, .. } => match **failure {
                Failure::Timeout { .. } => Kind::Timeout,
                Failure::PeerLost { .. } => Kind::PeerLost,
                Failure::Mismatch { .. } | Failure::Message { .. } => Kind::Mismatch,
                Failure::Aborted { .. } => Kind::Aborted,
                Failure::Internal { .. } => Kind::Internal,
            },
            Error::Device { failure, .. } => match **failure {
                Of::Timeout { .. } | Of::Queued { .. } => Kind::Timeout,
                Of::Mismatch { .. } => Kind::Mismatch,
                Of::Left { .. } => Kind::PeerLost,
                Of::Aborted { .. } => Kind::Aborted,
                Of::Unsupported { .. } | Of::Plugin { doing: "compiling", .. } => Kind::Unsupported,
                Of::Plugin { .. } => Kind::Internal,
            },
            Error::NoDevices { .. } => Kind::Unsupported,
            Error::Devices(_) | Error::Unopened { .. } => Kind::Invalid,
            Error::WaitTimeout { .. } | Error::Missing { .. } | Error::Absent { .. } | Error::Barrier { .. } => {
                Kind::Timeout
            }
            Error::Rendezvous { kind, .. } => *kind,
            Error::Disagree { .. } => Kind::Mismatch,
            Error::Store { .. } => Kind::Store,
            Error::Hub(error) => match **error {
                HubError::System { .. } | HubError::Port { .. } => Kind::Network,
                HubError::Interfaces(_) => Kind::Invalid,
                HubError::Forked | HubError::Closed | HubError::Duplicate { .. } => Kind::Aborted,
            },
            Error::Interrupted => Kind::Interrupted,
        }
    }
}
