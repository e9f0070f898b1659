//! Who is in the job, across hosts: a coordinator, sessions, a key-value store, barriers, liveness.
//!
//! [`decide`] is pure: every decision without network and clock. [`coordinator`] serves it over gRPC; [`session`] is the
//! ranks' side, blocking. Both run on one small runtime of the process's own. [`host`] lets the ranks of a host share one
//! session; [`bootstrap`] is how a rank finds its coordinator.

mod board;
pub mod bootstrap;
pub mod coordinator;
pub mod decide;
pub mod environment;
mod frame;
pub mod host;
pub mod refusal;
mod runtime;
pub mod secret;
mod seldom;
pub mod serve;
pub mod session;
mod settings;
mod wire;

/// An error with its causes, each once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
