//! The key-value store's semantics: those of torch's TCPStore, waits included.
//!
//! A key exists when it has a value or a queue that isn't empty. A waiter sits on one key it lacks; when that key
//! appears it moves on to another it lacks, or is answered. So each is answered at a moment when all its keys exist.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::{Answer, bounded, invalid};
use crate::refusal::Refusal;

/// What the store takes at most.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a key.
    pub key_bytes: usize,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Keys in one call.
    pub keys_per_call: usize,
    /// Keys in the store, queues' values included.
    pub keys: usize,
    /// Bytes of all keys and values.
    pub bytes: usize,
    /// Calls that wait.
    pub waiting: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            key_bytes: 4096,
            value_bytes: 32 << 20,
            keys_per_call: 65_536,
            keys: 1 << 20,
            bytes: 1 << 30,
            waiting: 65_536,
        }
    }
}

/// What a waiting call wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// That all keys exist.
    Existence,
    /// All keys' values.
    Values,
    /// The oldest value of a queue, taken. One key.
    Pop,
}

/// How a wait ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All keys exist.
    Exist,
    /// Their values, or the one taken from a queue.
    Values(Vec<Vec<u8>>),
    /// The deadline passed; keys that are missing, at most 16.
    Missing {
        /// The keys.
        keys: Vec<String>,
        /// Since the call.
        waited: Duration,
    },
}

/// A change of the store, for the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A key has this value now.
    Put(String, Vec<u8>),
    /// A key and its queue are gone.
    Delete(String),
    /// A value went to the end of a queue.
    Push(String, Vec<u8>),
    /// A value went back to the front of a queue.
    Unpop(String, Vec<u8>),
    /// The oldest value of a queue is gone.
    Pop(String),
}

struct Waiter {
    keys: Vec<String>,
    want: Want,
    /// The index of the key it sits on.
    on: usize,
    began: Duration,
    deadline: Duration,
}

/// The store.
#[derive(Default)]
pub struct KeyValue {
    limits: Limits,
    values: FxHashMap<String, Vec<u8>>,
    queues: FxHashMap<String, VecDeque<Vec<u8>>>,
    queued: usize,
    bytes: usize,
    waiters: FxHashMap<u64, Waiter>,
    sitting: FxHashMap<String, VecDeque<u64>>,
    deadlines: BTreeSet<(Duration, u64)>,
    next: u64,
    woken: Vec<(u64, Outcome)>,
    journal: Option<Vec<Change>>,
    presence: Option<Presence>,
}

/// Keys that came to exist or ceased to, by their hashes.
struct Presence {
    hash: Box<dyn Fn(&str) -> u64 + Send>,
    turns: Vec<(u64, bool)>,
}

impl KeyValue {
    /// An empty store.
    pub fn new(limits: Limits) -> Self {
        KeyValue { limits, ..Default::default() }
    }

    /// What it takes at most.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// A store that keeps account of its changes from now on; see [`KeyValue::changes`].
    pub fn keep_journal(&mut self) {
        self.journal = Some(Vec::new());
    }

    /// The changes since the last call.
    pub fn changes(&mut self) -> Vec<Change> {
        self.journal.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// A store that keeps account, from now on, of which keys exist, by their hashes; see [`KeyValue::presence`].
    pub fn keep_presence(&mut self, hash: impl Fn(&str) -> u64 + Send + 'static) {
        let queues = self.queues.keys().filter(|key| !self.values.contains_key(*key));
        let turns = self.values.keys().chain(queues).map(|key| (hash(key), true)).collect();
        self.presence = Some(Presence { hash: Box::new(hash), turns });
    }

    /// The keys that came to exist (true) or ceased to since the last call, in order.
    pub fn presence(&mut self, mut each: impl FnMut(u64, bool)) {
        if let Some(presence) = &mut self.presence {
            presence.turns.drain(..).for_each(|(hash, exists)| each(hash, exists));
        }
    }

    /// The changes that make an empty store into this one.
    pub fn contents(&self) -> impl Iterator<Item = Change> + '_ {
        let values = self.values.iter().map(|(key, value)| Change::Put(key.clone(), value.clone()));
        let queues = self.queues.iter();
        values.chain(queues.flat_map(|(key, queue)| queue.iter().map(|v| Change::Push(key.clone(), v.clone()))))
    }

    /// Does what a journal says, over no limit: it was within them once.
    pub fn replay(&mut self, change: Change) {
        match change {
            Change::Put(key, value) => self.put(&key, value),
            Change::Delete(key) => {
                self.remove(&key);
            }
            Change::Push(key, value) => self.enqueue(&key, value, false),
            Change::Unpop(key, value) => self.enqueue(&key, value, true),
            Change::Pop(key) => {
                self.dequeue(&key);
            }
        }
    }

    /// Writes a value.
    pub fn set(&mut self, key: &str, value: Vec<u8>) -> Result<(), Refusal> {
        self.room(key, value.len())?;
        self.put(key, value);
        Ok(())
    }

    /// Writes a value for which there was room when it was promised; see [`KeyValue::has_room_for`].
    pub fn set_promised(&mut self, key: &str, value: Vec<u8>) {
        self.put(key, value);
    }

    /// Whether so many more keys and bytes are within the limits.
    pub fn has_room_for(&self, keys: usize, bytes: usize) -> bool {
        self.values.len() + self.queued + keys <= self.limits.keys && self.bytes + bytes <= self.limits.bytes
    }

    /// Writes several, all or none.
    pub fn multi_set<K: AsRef<str>, V: AsRef<[u8]>>(&mut self, keys: &[K], values: &[V]) -> Result<(), Refusal> {
        if keys.len() != values.len() {
            return Err(invalid("multi_set", format!("{} keys, {} values", keys.len(), values.len())));
        }
        bounded("keys in one call", keys.len(), self.limits.keys_per_call)?;
        let mut bytes = 0;
        for (key, value) in keys.iter().zip(values) {
            let (key, value) = (key.as_ref(), value.as_ref());
            self.fits(key, value.len())?;
            bytes += key.len() + value.len();
        }
        bounded("keys in the store", self.num_keys() + keys.len(), self.limits.keys)?;
        bounded("bytes in the store", self.bytes + bytes, self.limits.bytes)?;
        let mut new = Vec::new();
        for (key, value) in keys.iter().zip(values) {
            if self.overwrite(key.as_ref(), value.as_ref()) {
                new.push(key.as_ref());
            }
        }
        // Only now: nobody sees half of them.
        new.into_iter().for_each(|key| self.appeared(key));
        Ok(())
    }

    /// All keys' values, if all have one.
    pub fn values(&self, keys: &[&str]) -> Result<Option<Vec<&[u8]>>, Refusal> {
        bounded("keys in one call", keys.len(), self.limits.keys_per_call)?;
        Ok(keys.iter().map(|key| self.values.get(*key).map(Vec::as_slice)).collect())
    }

    /// Whether all keys exist.
    pub fn check(&self, keys: &[String]) -> Result<bool, Refusal> {
        bounded("keys in one call", keys.len(), self.limits.keys_per_call)?;
        Ok(keys.iter().all(|key| self.exists(key)))
    }

    /// Adds to a decimal number and returns the sum.
    pub fn add(&mut self, key: &str, amount: i64) -> Result<i64, Refusal> {
        let bad = |got: String| Refusal::NotANumber { key: key.to_owned(), got };
        let old = match self.values.get(key) {
            None => 0,
            Some(value) => {
                let shown = || String::from_utf8_lossy(value).chars().take(64).collect::<String>();
                std::str::from_utf8(value).ok().and_then(|t| t.parse::<i64>().ok()).ok_or_else(|| bad(shown()))?
            }
        };
        let sum = old.checked_add(amount).ok_or_else(|| bad(format!("{old} + {amount} is past 64 bits")))?;
        self.set(key, sum.to_string().into_bytes())?;
        Ok(sum)
    }

    /// Writes `desired` if the value is `expected`, or if there is none and `expected` is empty. Returns what is stored
    /// afterwards, or `expected` if nothing is.
    pub fn compare_set(&mut self, key: &str, expected: Vec<u8>, desired: Vec<u8>) -> Result<Vec<u8>, Refusal> {
        match self.values.get(key) {
            None if !expected.is_empty() => Ok(expected),
            Some(value) if *value != expected => Ok(value.clone()),
            _ => {
                self.set(key, desired.clone())?;
                Ok(desired)
            }
        }
    }

    /// Writes at the end of a value; a missing one counts as empty.
    pub fn append(&mut self, key: &str, tail: &[u8]) -> Result<(), Refusal> {
        let old = self.values.get(key).map_or(&[][..], Vec::as_slice);
        let value = [old, tail].concat();
        self.set(key, value)
    }

    /// Removes a key with its queue; whether there was one.
    pub fn delete(&mut self, key: &str) -> bool {
        self.remove(key)
    }

    /// Appends to a queue.
    pub fn push(&mut self, key: &str, value: Vec<u8>) -> Result<(), Refusal> {
        self.room(key, value.len())?;
        self.enqueue(key, value, false);
        Ok(())
    }

    /// Gives back a value that was taken for a caller who is gone.
    pub fn unpop(&mut self, key: &str, value: Vec<u8>) {
        self.enqueue(key, value, true);
    }

    /// The queue's length.
    pub fn queue_len(&self, key: &str) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }

    /// How many keys exist; each queue counts as one more.
    pub fn num_keys(&self) -> usize {
        self.values.len() + self.queues.len()
    }

    /// The keys that begin with `prefix`, ascending.
    pub fn list(&self, prefix: &str) -> Vec<String> {
        let all = self.values.keys().chain(self.queues.keys());
        let set: BTreeSet<&String> = all.filter(|key| key.starts_with(prefix)).collect();
        set.into_iter().cloned().collect()
    }

    /// Bytes of all keys and values.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many calls wait.
    pub fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// Waits for keys. A timeout of zero answers at once.
    pub fn wait(
        &mut self,
        now: Duration,
        keys: Vec<String>,
        want: Want,
        timeout: Duration,
    ) -> Result<Answer<Outcome>, Refusal> {
        bounded("keys in one call", keys.len(), self.limits.keys_per_call)?;
        if want == Want::Pop && keys.len() != 1 {
            return Err(invalid("pop", format!("{} keys", keys.len())));
        }
        // Nobody overtakes those who wait for a queue already: they would have been served if it weren't empty.
        let Some(on) = self.lacks(&keys, want, 0) else { return Ok(Answer::Now(self.serve(keys, want))) };
        if timeout.is_zero() {
            return Ok(Answer::Now(self.missing(&keys, want, Duration::ZERO)));
        }
        bounded("calls that wait", self.waiters.len() + 1, self.limits.waiting)?;
        let id = self.next;
        self.next += 1;
        let deadline = now + timeout;
        self.sitting.entry(keys[on].clone()).or_default().push_back(id);
        self.deadlines.insert((deadline, id));
        self.waiters.insert(id, Waiter { keys, want, on, began: now, deadline });
        Ok(Answer::Later(id))
    }

    /// Forgets a waiting call whose caller is gone.
    pub fn cancel(&mut self, id: u64) {
        if let Some(waiter) = self.waiters.remove(&id) {
            self.deadlines.remove(&(waiter.deadline, id));
            self.unseat(&waiter.keys[waiter.on], id);
        }
    }

    /// Ends the waits whose deadline has passed.
    pub fn tick(&mut self, now: Duration) {
        while let Some(&(deadline, id)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.deadlines.pop_first();
            if let Some(waiter) = self.waiters.remove(&id) {
                self.unseat(&waiter.keys[waiter.on], id);
                let outcome = self.missing(&waiter.keys, waiter.want, now - waiter.began);
                self.woken.push((id, outcome));
            }
        }
    }

    /// When [`KeyValue::tick`] is due next.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Calls answered since the last time this was asked.
    pub fn woken(&mut self) -> Vec<(u64, Outcome)> {
        std::mem::take(&mut self.woken)
    }

    fn exists(&self, key: &str) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    fn has(&self, key: &str, want: Want) -> bool {
        match want {
            Want::Existence => self.exists(key),
            Want::Values => self.values.contains_key(key),
            Want::Pop => self.queues.contains_key(key),
        }
    }

    /// The index of a key that isn't there, looked for from `from` on, around.
    fn lacks(&self, keys: &[String], want: Want, from: usize) -> Option<usize> {
        (from..keys.len()).chain(0..from.min(keys.len())).find(|&index| !self.has(&keys[index], want))
    }

    fn missing(&self, keys: &[String], want: Want, waited: Duration) -> Outcome {
        let keys = keys.iter().filter(|key| !self.has(key, want)).take(16).cloned().collect();
        Outcome::Missing { keys, waited }
    }

    /// The answer to a call all of whose keys are there.
    fn serve(&mut self, keys: Vec<String>, want: Want) -> Outcome {
        match want {
            Want::Existence => Outcome::Exist,
            Want::Values => Outcome::Values(keys.iter().filter_map(|key| self.values.get(key).cloned()).collect()),
            Want::Pop => Outcome::Values(keys.iter().filter_map(|key| self.dequeue(key)).collect()),
        }
    }

    fn fits(&self, key: &str, value: usize) -> Result<(), Refusal> {
        bounded("bytes of a key", key.len(), self.limits.key_bytes)?;
        bounded("bytes of a value", value, self.limits.value_bytes)
    }

    fn room(&self, key: &str, value: usize) -> Result<(), Refusal> {
        self.fits(key, value)?;
        let old = self.values.get(key).map_or(0, Vec::len);
        if !self.values.contains_key(key) {
            bounded("keys in the store", self.values.len() + self.queued + 1, self.limits.keys)?;
        }
        bounded("bytes in the store", self.bytes + key.len() + value - old, self.limits.bytes)
    }

    fn note(&mut self, change: impl FnOnce() -> Change) {
        if let Some(journal) = &mut self.journal {
            journal.push(change());
        }
    }

    fn turned(&mut self, key: &str, exists: bool) {
        if let Some(Presence { hash, turns }) = &mut self.presence {
            turns.push((hash(key), exists));
        }
    }

    fn put(&mut self, key: &str, value: Vec<u8>) {
        if self.write(key, value) {
            self.appeared(key);
        }
    }

    /// Writes a copy, into the old value's memory if there is one; whether the key is new.
    fn overwrite(&mut self, key: &str, value: &[u8]) -> bool {
        let Some(slot) = self.values.get_mut(key) else { return self.write(key, value.to_vec()) };
        self.bytes = self.bytes + value.len() - slot.len();
        slot.clear();
        slot.extend_from_slice(value);
        self.note(|| Change::Put(key.to_owned(), value.to_vec()));
        false
    }

    /// Writes; whether the key is new.
    fn write(&mut self, key: &str, value: Vec<u8>) -> bool {
        self.note(|| Change::Put(key.to_owned(), value.clone()));
        self.bytes += value.len();
        if let Some(slot) = self.values.get_mut(key) {
            self.bytes -= slot.len();
            *slot = value;
            return false;
        }
        self.bytes += key.len();
        self.values.insert(key.to_owned(), value);
        if !self.queues.contains_key(key) {
            self.turned(key, true);
        }
        true
    }

    fn remove(&mut self, key: &str) -> bool {
        let mut found = false;
        if let Some(value) = self.values.remove(key) {
            self.bytes -= key.len() + value.len();
            found = true;
        }
        if let Some(queue) = self.queues.remove(key) {
            self.bytes -= queue.iter().map(|value| key.len() + value.len()).sum::<usize>();
            self.queued -= queue.len();
            found = true;
        }
        if found {
            self.turned(key, false);
            self.note(|| Change::Delete(key.to_owned()));
        }
        found
    }

    fn enqueue(&mut self, key: &str, value: Vec<u8>, front: bool) {
        self.note(|| {
            let (key, value) = (key.to_owned(), value.clone());
            if front { Change::Unpop(key, value) } else { Change::Push(key, value) }
        });
        self.bytes += key.len() + value.len();
        self.queued += 1;
        let queue = self.queues.entry(key.to_owned()).or_default();
        if front {
            queue.push_front(value);
        } else {
            queue.push_back(value);
        }
        if queue.len() == 1 {
            if !self.values.contains_key(key) {
                self.turned(key, true);
            }
            self.appeared(key);
        }
    }

    fn dequeue(&mut self, key: &str) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(key);
            if !self.values.contains_key(key) {
                self.turned(key, false);
            }
        }
        self.bytes -= key.len() + value.len();
        self.queued -= 1;
        self.note(|| Change::Pop(key.to_owned()));
        Some(value)
    }

    /// A value or a queue is there that wasn't: those who sit on it are served, or sit elsewhere. The order is that of
    /// their calls; those who only look come before those who take.
    fn appeared(&mut self, key: &str) {
        let Some(sitters) = self.sitting.remove(key) else { return };
        let takes = |id: &u64| self.waiters.get(id).is_some_and(|waiter| waiter.want == Want::Pop);
        let (takers, lookers): (Vec<u64>, Vec<u64>) = sitters.into_iter().partition(takes);
        for id in lookers.into_iter().chain(takers) {
            let Some(waiter) = self.waiters.get(&id) else { continue };
            match self.lacks(&waiter.keys, waiter.want, waiter.on) {
                Some(on) => {
                    let seat = waiter.keys[on].clone();
                    if let Some(waiter) = self.waiters.get_mut(&id) {
                        waiter.on = on;
                    }
                    self.sitting.entry(seat).or_default().push_back(id);
                }
                None => {
                    let Some(waiter) = self.waiters.remove(&id) else { continue };
                    self.deadlines.remove(&(waiter.deadline, id));
                    let outcome = self.serve(waiter.keys, waiter.want);
                    self.woken.push((id, outcome));
                }
            }
        }
    }

    fn unseat(&mut self, key: &str, id: u64) {
        if let Some(sitters) = self.sitting.get_mut(key) {
            sitters.retain(|other| *other != id);
            if sitters.is_empty() {
                self.sitting.remove(key);
            }
        }
    }
}

#[cfg(test)]
#[path = "keyvalue_tests.rs"]
mod tests;
