//! Engine that moves bytes between CPUs.

pub mod schedule;
