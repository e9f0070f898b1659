//! The store on disk: every change is appended, and read again when the coordinator starts.
//!
//! Survives the coordinator's death, not the host's: nothing is synced to the disk.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use podring_proto::JournalRecord;
use podring_proto::journal_record::What;
use prost::Message as _;

use crate::decide::keyvalue::{Change, KeyValue};
use crate::wire;

/// A journal that can't be used.
#[derive(Debug, thiserror::Error)]
#[error("state directory {dir:?}: {why}")]
pub struct BadState {
    /// The directory.
    pub dir: PathBuf,
    /// What is wrong.
    pub why: String,
}

pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    buffer: Vec<u8>,
    /// Held for as long as the journal is used.
    _lock: File,
}

/// What a journal holds.
pub(crate) struct Restored {
    pub(crate) instance: u64,
    pub(crate) epoch: u64,
}

impl Journal {
    /// Reads what is there into `store`, and begins a journal with just that. `instance` is used if nothing is there.
    pub(crate) fn open(dir: &Path, instance: u64, store: &mut KeyValue) -> Result<(Journal, Restored), BadState> {
        let bad = |why: String| BadState { dir: dir.to_owned(), why };
        let io = |error: std::io::Error| bad(error.to_string());
        std::fs::create_dir_all(dir).map_err(io)?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(dir.join("lock")).map_err(io)?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => bad("in use by another coordinator".to_owned()),
            TryLockError::Error(error) => io(error),
        })?;
        let path = dir.join("store.log");
        let mut restored = Restored { instance, epoch: 0 };
        match std::fs::read(&path) {
            Ok(bytes) => replay(&bytes, store, &mut restored).map_err(bad)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(io(error)),
        }
        // What is there is written anew, without what has been overwritten or deleted since.
        let fresh = dir.join("store.new");
        let file = private(&fresh).map_err(io)?;
        let mut journal = Journal { file, path: fresh.clone(), buffer: Vec::new(), _lock: lock };
        journal.put(&JournalRecord { what: Some(What::Instance(restored.instance)) });
        journal.put(&JournalRecord { what: Some(What::Epoch(restored.epoch)) });
        for change in store.contents() {
            journal.put(&wire::record(change));
            if journal.buffer.len() > 1 << 20 {
                journal.flush().map_err(io)?;
            }
        }
        journal.flush().map_err(io)?;
        std::fs::rename(&fresh, &path).map_err(io)?;
        journal.path = path;
        Ok((journal, restored))
    }

    /// Writes changes. If that fails the journal is removed: a store that is lost is better than one that is wrong.
    pub(crate) fn write(&mut self, changes: Vec<Change>, epoch: Option<u64>) -> std::io::Result<()> {
        changes.into_iter().for_each(|change| self.put(&wire::record(change)));
        if let Some(epoch) = epoch {
            self.put(&JournalRecord { what: Some(What::Epoch(epoch)) });
        }
        self.flush().inspect_err(|_| {
            let _ = std::fs::remove_file(&self.path);
        })
    }

    fn put(&mut self, record: &JournalRecord) {
        self.buffer.extend(record.encode_length_delimited_to_vec());
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}

fn private(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)
}

/// A torn record at the end is what a killed coordinator leaves: it was never answered for.
fn replay(bytes: &[u8], store: &mut KeyValue, restored: &mut Restored) -> Result<(), String> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let at = bytes.len() - rest.len();
        let Ok(length) = prost::decode_length_delimiter(rest) else { break };
        let head = prost::length_delimiter_len(length);
        let Some(record) = rest.get(head..).and_then(|body| body.get(..length)) else { break };
        let record = JournalRecord::decode(record).map_err(|error| format!("store.log at byte {at}: {error}"))?;
        match record.what {
            Some(What::Instance(instance)) => restored.instance = instance,
            Some(What::Epoch(epoch)) => restored.epoch = epoch,
            Some(What::Put(put)) => store.replay(Change::Put(put.key, put.value)),
            Some(What::Delete(key)) => store.replay(Change::Delete(key)),
            Some(What::Push(push)) => store.replay(Change::Push(push.key, push.value)),
            Some(What::Unpop(push)) => store.replay(Change::Unpop(push.key, push.value)),
            Some(What::Pop(key)) => store.replay(Change::Pop(key)),
            None => return Err(format!("store.log at byte {at}: a record of a newer podring's")),
        }
        rest = &rest[head + length..];
    }
    Ok(())
}

/// The random number that names a store's life.
pub(crate) fn fresh_instance() -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    // 0 is what a client says that doesn't know the instance.
    Ok(u64::from_le_bytes(bytes) | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_survives_and_a_torn_tail_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = KeyValue::default();
        let (mut journal, restored) = Journal::open(dir.path(), 7, &mut store).unwrap();
        assert_eq!((restored.instance, restored.epoch), (7, 0));
        let put = |key: &str, value: &[u8]| Change::Put(key.into(), value.into());
        journal.write(vec![put("a", b"1"), put("b", b"2"), Change::Delete("b".into())], Some(4)).unwrap();
        journal.write(vec![Change::Push("q".into(), vec![1]), Change::Push("q".into(), vec![2])], None).unwrap();
        journal.write(vec![Change::Pop("q".into())], None).unwrap();
        let second = Journal::open(dir.path(), 8, &mut KeyValue::default()).err().unwrap();
        assert!(second.to_string().contains("another coordinator"), "{second}");
        drop(journal);
        let path = dir.path().join("store.log");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.extend([200, 1, 0]);
        std::fs::write(&path, bytes).unwrap();
        let mut store = KeyValue::default();
        let (_journal, restored) = Journal::open(dir.path(), 9, &mut store).unwrap();
        assert_eq!((restored.instance, restored.epoch), (7, 4));
        assert_eq!(store.list(""), ["a", "q"]);
        assert_eq!(store.queue_len("q"), 1);
    }

    #[test]
    fn a_damaged_journal_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("store.log"), [3, 0xff, 0xff, 0xff, 0]).unwrap();
        let error = Journal::open(dir.path(), 1, &mut KeyValue::default()).err().unwrap();
        assert!(error.to_string().contains("byte 0"), "{error}");
    }
}
