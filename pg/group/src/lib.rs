//! Process groups over the engines: who is in one, what is called when, and what happens when something breaks.

mod error;
mod group;
mod membership;
mod monitored;
mod runtime;
mod store;
mod watchdog;
mod world;

pub use error::{Error, Kind};
pub use group::{Config, ProcessGroup, Work};
pub use membership::{Membership, StoreMembership};
pub use podring_fabric::handshake::Secret;
pub use podring_fabric::hub::{BadSetting, Callback, Config as HubConfig, Keep, State};
pub use runtime::Runtime;
pub use store::{MemoryStore, Store, StoreError};
pub use world::{World, form};
