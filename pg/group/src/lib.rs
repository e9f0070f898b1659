//! Process groups over the engines: who is in one, what is called when, and what happens when something breaks.

pub mod engine;
mod error;
mod group;
mod membership;
mod monitored;
mod rendezvous;
mod runtime;
mod store;
mod watchdog;
mod world;

pub use error::{Error, Kind, Place};
pub use group::{Config, ProcessGroup, Work};
pub use membership::{Membership, StoreMembership};
pub use podring_fabric::error::{Failure, LedgerRow};
pub use podring_fabric::handshake::Secret;
pub use podring_fabric::hub::{Address, Callback, Config as HubConfig, Keep, State};
pub use podring_setting::BadSetting;
pub use rendezvous::{News, Rendezvous, Seat};
pub use runtime::Runtime;
pub use store::{MemoryStore, Store, StoreError};
pub use world::{Forming, World, form};
