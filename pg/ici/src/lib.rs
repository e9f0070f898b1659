//! Collectives as PJRT programs.
//!
//! [`pjrt`] binds to plugins (libtpu, XLA's CPU plugin); [`program`] writes StableHLO for each collective; [`readback`]
//! reads what XLA made of it.

pub mod pjrt;
pub mod program;
pub mod readback;
