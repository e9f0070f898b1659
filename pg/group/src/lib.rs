//! Process groups over the engines: who is in one, what is called when, and what happens when something breaks.

mod error;
mod group;
mod membership;
mod store;
mod watchdog;
mod world;

pub use error::{Error, Kind};
pub use group::{Config, ProcessGroup, Work};
pub use membership::{Membership, StoreMembership};
pub use podring_fabric::hub::{Callback, Keep, State};
pub use store::{MemoryStore, Store, StoreError};
pub use world::{World, form};

/// Waits until no callback runs, then runs no more: the interpreter is about to end. `false` if that took too long.
pub fn drain(limit: std::time::Duration) -> bool {
    group::drain(limit)
}
