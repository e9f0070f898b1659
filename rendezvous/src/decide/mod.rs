//! What the coordinator decides, with no network and no clock: time is passed in, as the time since the coordinator
//! began.

pub mod barrier;
pub mod blame;
pub mod keyvalue;
pub mod roster;
pub mod seats;

use crate::refusal::Refusal;

/// A call's answer: at once, or later under this number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer<T> {
    /// At once.
    Now(T),
    /// When somebody else does something, or the deadline passes.
    Later(u64),
}

/// `Err` if `got` is over `limit`.
pub(crate) fn bounded(what: &str, got: usize, limit: usize) -> Result<(), Refusal> {
    if got > limit {
        return Err(Refusal::TooMuch { what: what.to_owned(), limit: limit as u64, got: got as u64 });
    }
    Ok(())
}

pub(crate) fn invalid(what: &str, got: impl ToString) -> Refusal {
    Refusal::Invalid { what: what.to_owned(), got: got.to_string() }
}
