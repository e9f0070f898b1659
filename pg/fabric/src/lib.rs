//! Engine that moves bytes between CPUs.

pub mod error;
pub mod fork;
pub mod link;
pub mod memory;
pub mod schedule;
pub mod wire;
