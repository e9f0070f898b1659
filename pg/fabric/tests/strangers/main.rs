//! What comes to a hub's port that is no peer, and what a peer may not do: live hubs, real sockets.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod allocation;
mod flood;
mod fuzz;
mod rig;
