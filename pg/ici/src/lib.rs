//! Collectives as PJRT programs.
//!
//! [`pjrt`] binds to plugins (libtpu, XLA's CPU plugin); [`program`] writes StableHLO for each collective; [`readback`]
//! reads what XLA made of it; [`slice`] says how a group runs on a slice; [`cache`] keeps what was compiled; [`engine`]
//! runs the collectives of ranks that share a client.

pub mod cache;
pub mod engine;
pub mod pjrt;
pub mod program;
mod progress;
pub mod readback;
pub mod slice;
