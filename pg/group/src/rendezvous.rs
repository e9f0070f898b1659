//! What forms default worlds: the launcher's store alone ([`crate::form`]), or somebody who knows the job better.

use std::sync::Arc;

use podring_fabric::error::Failure;

use crate::error::Error;
use crate::membership::Membership;
use crate::store::Store;
use crate::world::{Forming, World};

/// Forms default worlds.
pub trait Rendezvous: Send + Sync {
    /// Joins, and waits until the world has formed. `store` is the launcher's, `interrupted` is asked now and then.
    fn join(
        &self,
        forming: &Forming<'_>,
        store: &Arc<dyn Store>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(World, Arc<dyn Seat>), Error>;
}

/// A rank's place in a world that a [`Rendezvous`] formed.
pub trait Seat: Send + Sync {
    /// The common knowledge of one group's members. `channel` names the group, `epoch` counts its formings.
    fn membership(&self, channel: u64, epoch: u64) -> Box<dyn Membership>;
    /// Calls `tell` for each piece of news from now on, and for those that came before; on a thread of the seat's.
    fn listen(&self, tell: Box<dyn Fn(News) + Send + Sync>);
    /// Leaves in order: the default group is destroyed.
    fn leave(&self);
}

/// What a rank hears of its world.
#[derive(Clone, Debug)]
pub enum News {
    /// A rank is gone.
    Lost {
        /// The rank.
        rank: u32,
        /// How that was noticed.
        how: String,
    },
    /// A member reported that a group failed.
    Failed {
        /// The group's channel.
        channel: u64,
        /// Why.
        failure: Failure,
    },
}

#[cfg(test)]
#[path = "rendezvous_tests.rs"]
mod tests;
