//! Who is in the group still: a place to report a failure, and to hear of one.
//!
//! Ranks tell each other over their links, which is faster; this is for when there is no link, or nobody to answer it.

use std::sync::Arc;

use podring_fabric::error::Failure;

use crate::store::{Store, StoreError};

/// The members' common knowledge of a group.
pub trait Membership: Send + Sync {
    /// Tells all members that the group failed. The first report stands.
    fn report(&self, failure: &Failure) -> Result<(), StoreError>;
    /// The failure that was reported, if one was. Doesn't wait.
    fn watch(&self) -> Result<Option<Failure>, StoreError>;
    /// Counts the formings of the group.
    fn epoch(&self) -> u64;
}

/// Membership over the launcher's store.
pub struct StoreMembership {
    store: Arc<dyn Store>,
    /// Where the report is. In a slice, as it is asked for: a look allocates nothing.
    key: [String; 1],
    epoch: u64,
}

impl StoreMembership {
    /// Over `store`, which is the group's own. `channel` tells this group from one that an earlier life of the job made
    /// in the same store.
    pub fn new(store: Arc<dyn Store>, channel: u64, epoch: u64) -> Self {
        StoreMembership { store, key: [format!("podring/{channel:016x}/failed")], epoch }
    }
}

impl Membership for StoreMembership {
    fn report(&self, failure: &Failure) -> Result<(), StoreError> {
        let [key] = &self.key;
        if self.store.add(&format!("{key}/count"), 1)? > 1 {
            return Ok(());
        }
        let text = serde_json::to_vec(failure).map_err(|error| StoreError {
            call: "set",
            key: key.clone(),
            why: error.to_string(),
        })?;
        self.store.set(key, &text)
    }

    fn watch(&self) -> Result<Option<Failure>, StoreError> {
        if !self.store.check(&self.key)? {
            return Ok(None);
        }
        let [key] = &self.key;
        let text = self.store.get(key)?;
        serde_json::from_slice(&text).map(Some).map_err(|error| StoreError {
            call: "get",
            key: key.clone(),
            why: error.to_string(),
        })
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    #[test]
    fn the_first_report_stands() {
        let membership = StoreMembership::new(Arc::new(MemoryStore::default()), 5, 3);
        assert_eq!(membership.watch().unwrap(), None);
        let failure = |why: &str| Failure::Aborted { by: Some(1), why: why.into() };
        membership.report(&failure("first")).unwrap();
        membership.report(&failure("second")).unwrap();
        assert_eq!(membership.watch().unwrap(), Some(failure("first")));
        assert_eq!(membership.epoch(), 3);
    }
}
