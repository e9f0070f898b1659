//! Engine that moves bytes between CPUs.
//!
//! One [`hub::Hub`] per process holds the links to other processes and plays operations over them; a group is a channel
//! over the hub. What is sent when is decided by [`schedule`], what is done to elements by [`podring_kernel`].

pub mod error;
pub mod handshake;
pub mod hub;
pub mod link;
pub mod memory;
pub mod schedule;
pub mod wire;

pub use podring_fork as fork;
