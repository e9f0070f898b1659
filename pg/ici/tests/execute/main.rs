//! Every program runs on XLA's CPU plugin with 8 devices and equals a naive reference.
//!
//! Without the plugin nothing can run: with PODRING_REQUIRE_PJRT=1 (set by scripts/test) that fails.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod caching;
mod chip;
mod machine;
mod moves;
mod reductions;
mod reference;
