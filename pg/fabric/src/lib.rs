//! Engine that moves bytes between CPUs.

pub mod kernel;
pub mod schedule;
