//! Process groups whose ranks are threads over the devices of one client: XLA's CPU plugin.
//!
//! Without a plugin nothing can run: with PODRING_REQUIRE_PJRT=1 (set by scripts/test) that fails.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod across;
mod failures;
mod job;
mod matrix;
mod order;
mod programs;
#[path = "../../../ici/tests/execute/reference.rs"]
#[allow(dead_code, reason = "shared with the tests of programs")]
mod reference;
mod tensors;
