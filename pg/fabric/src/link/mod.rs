//! Links carry frames from one process to another, one way each: shared memory on a host, TCP between hosts.
//!
//! A link is opened by the side that sends on it, when it first has something to send. Whoever answers opens its own.

pub mod interfaces;
pub mod ring;
pub mod shm;
pub mod tcp;
