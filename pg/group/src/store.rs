//! The launcher's key-value store, as far as podring needs one.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// What a store said instead of answering.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} of key {key:?}: {why}")]
pub struct StoreError {
    /// The call.
    pub call: &'static str,
    /// Its (first) key.
    pub key: String,
    /// The store's own words.
    pub why: String,
}

/// A key-value store shared by the members of a group. No call waits for another process to do something.
pub trait Store: Send + Sync {
    /// Writes a key.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError>;
    /// Reads a key that exists.
    fn get(&self, key: &str) -> Result<Vec<u8>, StoreError>;
    /// Whether all keys exist.
    fn check(&self, keys: &[String]) -> Result<bool, StoreError>;
    /// Adds to a counter and returns its new value.
    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError>;
}

/// A store within one process, for tests and benches.
#[derive(Clone, Default)]
pub struct MemoryStore(Arc<Mutex<HashMap<String, Vec<u8>>>>);

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.0.lock().insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, StoreError> {
        let missing = || StoreError { call: "get", key: key.to_owned(), why: "no such key".to_owned() };
        self.0.lock().get(key).cloned().ok_or_else(missing)
    }

    fn check(&self, keys: &[String]) -> Result<bool, StoreError> {
        let map = self.0.lock();
        Ok(keys.iter().all(|key| map.contains_key(key)))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        let mut map = self.0.lock();
        let value = map.entry(key.to_owned()).or_insert_with(|| b"0".to_vec());
        let now = std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok()).unwrap_or(0) + amount;
        *value = now.to_string().into_bytes();
        Ok(now)
    }
}
