//! What can go wrong on this side.

use std::time::Duration;

use crate::refusal::{Late, Refusal};
use crate::secret::BadCredential;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Nobody listens there, or there is no way to it.
    #[error("no coordinator at {endpoint} after {waited:?}: {why}")]
    Absent {
        /// Where it should be.
        endpoint: String,
        /// How long it was tried.
        waited: Duration,
        /// The system's words, for each address.
        why: String,
    },
    /// Somebody listens who doesn't speak the protocol, or speaks it encrypted when we don't, or the other way round.
    #[error("{endpoint} is no podring coordinator, or only one of the two sides uses TLS: {why}")]
    NotPodring {
        /// Where.
        endpoint: String,
        /// What came instead.
        why: String,
        /// It only closed the connection, as a coordinator does that is about to end.
        closed: bool,
    },
    /// Somebody takes the connection and says nothing.
    #[error("{endpoint} took the connection and said nothing for {waited:?}")]
    Silent {
        /// Where.
        endpoint: String,
        /// For how long.
        waited: Duration,
    },
    /// One side doesn't accept the other's certificate.
    #[error("certificate refused between this host and {endpoint}: {why}")]
    Certificate {
        /// Where.
        endpoint: String,
        /// What is wrong with it.
        why: String,
    },
    /// The coordinator said no.
    #[error("{call}: {refusal}")]
    Refused {
        /// The call.
        call: &'static str,
        /// Why.
        refusal: Refusal,
    },
    /// The epoch didn't form in time.
    #[error("{0}")]
    Late(Late),
    /// The coordinator is gone, and didn't come back in time.
    #[error("lost the coordinator at {endpoint}: {how}")]
    CoordinatorLost {
        /// Where it was.
        endpoint: String,
        /// How that was noticed.
        how: String,
    },
    /// The coordinator ended in order. What was formed goes on without it.
    #[error("the coordinator at {endpoint} has ended in order")]
    Closed {
        /// Where it was.
        endpoint: String,
    },
    /// No answer in time.
    #[error("{call}: no answer from {endpoint} after {waited:?}")]
    Timeout {
        /// The call.
        call: &'static str,
        /// Where.
        endpoint: String,
        /// How long.
        waited: Duration,
    },
    /// Whoever was asked meanwhile said to end it.
    #[error("{call}: interrupted")]
    Interrupted {
        /// The call.
        call: &'static str,
    },
    /// A token or certificate of this side can't be used.
    #[error(transparent)]
    Credential(#[from] BadCredential),
    /// Threads, randomness, a forked child.
    #[error("{what}: {why}")]
    System {
        /// What was wanted.
        what: &'static str,
        /// Why it can't be had.
        why: String,
    },
}

impl Error {
    /// The coordinator's words, if it was the coordinator who said no.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Error::Refused { refusal, .. } => Some(refusal),
            _ => None,
        }
    }
}
