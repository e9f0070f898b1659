//! What a plugin, or the search for one, can answer instead.

use std::path::PathBuf;

/// The status codes of PJRT (those of absl).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// Cancelled, 1.
    Cancelled,
    /// Unknown, 2, and every number that is none of these.
    Unknown,
    /// Invalid argument, 3.
    InvalidArgument,
    /// Deadline exceeded, 4.
    DeadlineExceeded,
    /// Not found, 5.
    NotFound,
    /// Already exists, 6.
    AlreadyExists,
    /// Permission denied, 7.
    PermissionDenied,
    /// Resource exhausted, 8: out of device memory.
    ResourceExhausted,
    /// Failed precondition, 9.
    FailedPrecondition,
    /// Aborted, 10.
    Aborted,
    /// Out of range, 11.
    OutOfRange,
    /// Unimplemented, 12.
    Unimplemented,
    /// Internal, 13.
    Internal,
    /// Unavailable, 14.
    Unavailable,
    /// Data loss, 15.
    DataLoss,
    /// Unauthenticated, 16.
    Unauthenticated,
}

impl Code {
    pub(super) const fn from_number(number: i32) -> Code {
        match number {
            1 => Code::Cancelled,
            3 => Code::InvalidArgument,
            4 => Code::DeadlineExceeded,
            5 => Code::NotFound,
            6 => Code::AlreadyExists,
            7 => Code::PermissionDenied,
            8 => Code::ResourceExhausted,
            9 => Code::FailedPrecondition,
            10 => Code::Aborted,
            11 => Code::OutOfRange,
            12 => Code::Unimplemented,
            13 => Code::Internal,
            14 => Code::Unavailable,
            15 => Code::DataLoss,
            16 => Code::Unauthenticated,
            _ => Code::Unknown,
        }
    }
}

/// Errors of the bindings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PjrtError {
    /// No plugin anywhere.
    #[error("no PJRT plugin found; looked at: {}", looked_at.join("; "))]
    NoPlugin {
        /// Settings and files that were tried, in order.
        looked_at: Vec<String>,
    },
    /// The file can't be loaded.
    #[error("PJRT plugin {} cannot be loaded: {reason}", file.display())]
    Load {
        /// The file.
        file: PathBuf,
        /// The loader's words.
        reason: String,
    },
    /// The library is no plugin.
    #[error("{} is no PJRT plugin: {reason}", file.display())]
    NotAPlugin {
        /// The file.
        file: PathBuf,
        /// What it lacks.
        reason: &'static str,
    },
    /// An interface that this code doesn't know.
    #[error(
        "PJRT plugin {} speaks version {major}.{minor}; podring knows 0.{} and later of major version 0",
        file.display(), super::OLDEST_MINOR
    )]
    Version {
        /// The file.
        file: PathBuf,
        /// Its major version.
        major: i32,
        /// Its minor version.
        minor: i32,
    },
    /// The plugin has no such function.
    #[error("PJRT plugin {} (version 0.{minor}) has no {function}", file.display())]
    Missing {
        /// The file.
        file: PathBuf,
        /// Its minor version.
        minor: i32,
        /// The function's name in the header.
        function: &'static str,
    },
    /// The plugin refused or failed.
    #[error("{function}: {code:?}: {message} (plugin {})", file.display())]
    Call {
        /// The file.
        file: PathBuf,
        /// The function's name in the header.
        function: &'static str,
        /// The status code.
        code: Code,
        /// The plugin's words.
        message: String,
    },
    /// The caller's arguments don't fit the program or each other.
    #[error("{what}: expected {expected}, got {got}")]
    Argument {
        /// What doesn't fit.
        what: &'static str,
        /// What would.
        expected: String,
        /// What came.
        got: String,
    },
}
