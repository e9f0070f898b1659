//! The ring: sets on their way to the coordinator, in memory that its host's clients write; and the bells, on which they
//! sleep.
//!
//! A set is done when the tail has moved past it: the coordinator takes in all that lies before the tail ahead of
//! whatever it does next, so every answer that it gives from then on counts it. Who waits for a key finds it here as
//! long as the coordinator hasn't taken it in, and afterwards on the lines.
//!
//! One client writes at a time, under a lock that nobody waits for: who can't have it makes a call instead. If its holder
//! dies the coordinator, which sees that client's connections end, frees it; what was half written lies behind the tail.
//! All that is read here is checked: other processes write it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::ProtFlags;
use rustix::thread::futex;

use super::memory::{Mapping, Shared};

/// Of the ring, 1 MiB.
const WORDS: u64 = 1 << 17;
/// Lengths, the key's hash, and where the bell's last entry before this one is.
const HEAD: u64 = 3;
/// Keys share a bell by their hashes; a wrong one wakes a sleeper for nothing.
const BELLS: usize = 1 << 13;
const STEP: usize = 64;
const BELLS_AT: usize = 3 * STEP;
const WORDS_AT: usize = BELLS_AT + BELLS * size_of::<Bell>();
const BYTES: usize = WORDS_AT + WORDS as usize * 8;
/// Looks at a lock that is held, a few microseconds: its holder copies a few words.
const TRIES: u32 = 100;
/// Positions only rise, and the first isn't 0: that is "none".
const START: u64 = WORDS;

/// Bytes of a key and its value that may go by the ring.
pub(super) const ENTRY: usize = 4096;
/// Entries and bytes that it can hold at most.
pub(super) const HOLDS: (usize, usize) = ((WORDS / HEAD) as usize, WORDS as usize * 8);

#[repr(C, align(64))]
struct Cell(AtomicU64);

#[repr(C)]
struct Bell {
    /// Counts what happens to this bell's keys.
    changes: AtomicU32,
    /// Who sleeps on it, or died so.
    sleepers: AtomicU32,
    /// Where its last entry is.
    last: AtomicU64,
}

// SAFETY: an atomic integer, and its alignment.
unsafe impl Shared for Cell {}
// SAFETY: atomics.
unsafe impl Shared for Bell {}

/// In either's address space.
pub(super) struct Ring(Mapping);

/// What lies in the ring is none of ours.
#[derive(Debug, thiserror::Error)]
#[error("the ring of sets holds nonsense at {at}: {what}")]
pub(super) struct Broken {
    at: u64,
    what: &'static str,
}

fn words(bytes: usize) -> u64 {
    bytes.div_ceil(8) as u64
}

impl Ring {
    pub(super) fn new() -> io::Result<(OwnedFd, Ring)> {
        let (fd, memory) = Mapping::create("podring-ring", BYTES, SealFlags::empty())?;
        let ring = Ring(memory);
        ring.tail().store(START, Ordering::SeqCst);
        Ok((fd, ring))
    }

    pub(super) fn open(fd: &OwnedFd) -> io::Result<Ring> {
        Mapping::open(fd, BYTES, SealFlags::empty(), ProtFlags::READ | ProtFlags::WRITE).map(Ring)
    }

    /// The client that writes; 0 is nobody.
    fn lock(&self) -> &AtomicU64 {
        &self.0.at::<Cell>(0).0
    }

    fn tail(&self) -> &AtomicU64 {
        &self.0.at::<Cell>(STEP).0
    }

    /// Whether the coordinator has been told that there is something, since it looked last.
    fn told(&self) -> &AtomicU64 {
        &self.0.at::<Cell>(2 * STEP).0
    }

    fn bell(&self, print: u64) -> &Bell {
        self.0.at(BELLS_AT + (print >> 16) as usize % BELLS * size_of::<Bell>())
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        self.0.at(WORDS_AT + (at % WORDS) as usize * 8)
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        for (index, part) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.word(at + index as u64).store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let word = |index| self.word(at + index).load(Ordering::Relaxed).to_le_bytes();
        let mut bytes: Vec<u8> = (0..words(len)).flat_map(word).collect();
        bytes.truncate(len);
        bytes
    }

    /// Where a ring begins.
    pub(super) const fn start() -> u64 {
        START
    }

    /// Up to where there are sets.
    pub(super) fn end(&self) -> u64 {
        self.tail().load(Ordering::SeqCst)
    }

    /// Sets a key, for a client with this name, which isn't 0; where the ring ends then. `None`: not now.
    pub(super) fn post(&self, client: u64, print: u64, key: &str, value: &[u8], taken: &AtomicU64) -> Option<u64> {
        let free = || self.lock().compare_exchange(0, client, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let again = |_| {
            std::hint::spin_loop();
            free()
        };
        if !free() && !(0..TRIES).any(again) {
            return None;
        }
        let end = self.write_entry(print, key.as_bytes(), value, taken.load(Ordering::Acquire));
        // Only our own: a client that was taken for dead isn't to free somebody else's.
        let _ = self.lock().compare_exchange(client, 0, Ordering::Release, Ordering::Relaxed);
        if end.is_some() {
            self.ring(print);
        }
        end
    }

    fn write_entry(&self, print: u64, key: &[u8], value: &[u8], taken: u64) -> Option<u64> {
        let (at, bell) = (self.tail().load(Ordering::Relaxed), self.bell(print));
        let end = at + HEAD + words(key.len()) + words(value.len());
        // Not over what the coordinator hasn't taken in yet; and a tail that makes no sense is for it to find.
        if taken > at || end - taken > WORDS {
            return None;
        }
        // Who still reads what lay here sees that it has been taken in.
        fence(Ordering::Release);
        let lengths = key.len() as u64 | (value.len() as u64) << 32;
        for (index, word) in [lengths, print, bell.last.load(Ordering::Relaxed)].into_iter().enumerate() {
            self.word(at + index as u64).store(word, Ordering::Relaxed);
        }
        self.write(at + HEAD, key);
        self.write(at + HEAD + words(key.len()), value);
        self.tail().store(end, Ordering::SeqCst);
        bell.last.store(at, Ordering::Release);
        Some(end)
    }

    /// Whether a set of this key is here, not taken in.
    pub(super) fn holds(&self, print: u64, taken: &AtomicU64) -> bool {
        let since = taken.load(Ordering::Acquire);
        let mut at = self.bell(print).last.load(Ordering::Acquire);
        while at >= since {
            if self.word(at + 1).load(Ordering::Relaxed) == print {
                fence(Ordering::Acquire);
                // Otherwise it may be something else that lies here now, and the key is on the lines.
                return taken.load(Ordering::Relaxed) <= at;
            }
            let before = self.word(at + 2).load(Ordering::Relaxed);
            if before >= at {
                return false;
            }
            at = before;
        }
        false
    }

    /// Reads the sets from `from` on, in order; up to where.
    pub(super) fn read(&self, from: u64, mut each: impl FnMut(&str, Vec<u8>)) -> Result<u64, Broken> {
        let end = self.end();
        if end < from || end - from > WORDS {
            return Err(Broken { at: end, what: "the end" });
        }
        let mut at = from;
        while at < end {
            let lengths = self.word(at).load(Ordering::Relaxed);
            let (key, value) = (lengths as u32 as usize, (lengths >> 32) as usize);
            let next = at + HEAD + words(key) + words(value);
            if key + value > ENTRY || next > end {
                return Err(Broken { at, what: "the lengths" });
            }
            let name = String::from_utf8(self.bytes(at + HEAD, key)).map_err(|_| Broken { at, what: "the key" })?;
            each(&name, self.bytes(at + HEAD + words(key), value));
            at = next;
        }
        Ok(end)
    }

    #[cfg(test)]
    pub(super) fn set_end(&self, end: u64) {
        self.tail().store(end, Ordering::SeqCst);
    }

    /// Whether it is the caller's to tell the coordinator that there is something.
    pub(super) fn untold(&self) -> bool {
        self.told().swap(1, Ordering::SeqCst) == 0
    }

    /// The coordinator is about to look.
    pub(super) fn looking(&self) {
        self.told().store(0, Ordering::SeqCst);
    }

    /// Frees the lock of a client that is gone.
    pub(super) fn free(&self, client: u64) {
        let _ = self.lock().compare_exchange(client, 0, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Counts what happens to a key's bell.
    pub(super) fn changes(&self, print: u64) -> u32 {
        self.bell(print).changes.load(Ordering::SeqCst)
    }

    /// Something has happened to a key: wakes whoever sleeps there.
    pub(super) fn ring(&self, print: u64) {
        let bell = self.bell(print);
        bell.changes.fetch_add(1, Ordering::SeqCst);
        if bell.sleepers.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&bell.changes, futex::Flags::empty(), u32::MAX >> 1);
        }
    }

    /// Looks for it for so long, without sleeping.
    pub(super) fn watch(&self, print: u64, changes: u32, limit: Duration) -> bool {
        let (bell, began) = (self.bell(print), Instant::now());
        // No pause instruction: a hypervisor takes a row of them for a lock whose holder doesn't run, and steps in.
        loop {
            if bell.changes.load(Ordering::SeqCst) != changes {
                return true;
            }
            if began.elapsed() >= limit {
                return false;
            }
        }
    }

    /// Sleeps until that happens, for at most `limit`; false if it didn't, or a signal came.
    pub(super) fn sleep(&self, print: u64, changes: u32, limit: Duration) -> bool {
        let (bell, limit) = (self.bell(print), Timespec::try_from(limit).ok());
        bell.sleepers.fetch_add(1, Ordering::SeqCst);
        let slept = futex::wait(&bell.changes, futex::Flags::empty(), changes, limit.as_ref());
        bell.sleepers.fetch_sub(1, Ordering::SeqCst);
        matches!(slept, Ok(()) | Err(Errno::AGAIN))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    fn pair() -> (Ring, Ring, AtomicU64) {
        let (fd, ring) = Ring::new().unwrap();
        let other = Ring::open(&fd).unwrap();
        (ring, other, AtomicU64::new(Ring::start()))
    }

    fn print(number: u64) -> u64 {
        number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
    }

    #[test]
    fn what_is_posted_is_held_until_it_is_taken_in() {
        let (ring, client, taken) = pair();
        let mut seen = Vec::new();
        for round in 0..200u64 {
            for number in 0..100 {
                let (key, value) = (format!("{round}/{number}"), vec![7; (number * 40) as usize]);
                assert!(!client.holds(print(round * 100 + number), &taken));
                client.post(1, print(round * 100 + number), &key, &value, &taken).unwrap();
                assert!(client.holds(print(round * 100 + number), &taken), "{key}");
            }
            let end = ring.read(taken.load(Ordering::Relaxed), |key, value| seen.push((key.to_owned(), value.len())));
            taken.store(end.unwrap(), Ordering::Release);
            assert!((0..100).all(|number| !client.holds(print(round * 100 + number), &taken)));
        }
        let expected =
            (0..200).flat_map(|round| (0..100).map(move |number| (format!("{round}/{number}"), number * 40)));
        assert!(seen.into_iter().eq(expected));
    }

    #[test]
    fn a_full_ring_and_a_held_lock_are_for_later() {
        let (ring, client, taken) = pair();
        let posted = (0..).take_while(|key| client.post(1, *key, "k", &[7; 4000], &taken).is_some()).count();
        assert_eq!(posted, 260);
        let mut seen = 0;
        taken.store(ring.read(Ring::start(), |_, value| seen += value.len()).unwrap(), Ordering::SeqCst);
        assert_eq!(seen, 260 * 4000);
        assert!(client.post(1, 7, "k", b"", &taken).is_some());
        // Of one that died with it.
        client.lock().store(5, Ordering::SeqCst);
        assert!(client.post(1, 7, "k", b"", &taken).is_none());
        ring.free(1);
        assert!(client.post(1, 7, "k", b"", &taken).is_none());
        ring.free(5);
        assert!(client.post(1, 7, "k", b"", &taken).is_some());
    }

    /// Many write while the coordinator reads: each one's sets come once, in its order, and whoever has seen one in
    /// the ring or been told that it was taken in finds it.
    #[test]
    fn many_clients_in_one_order() {
        const EACH: u64 = 20_000;
        let (ring, client, taken) = pair();
        let mut seen: Vec<(u64, u64)> = Vec::new();
        thread::scope(|scope| {
            for who in 1..=3u64 {
                let (client, taken) = (&client, &taken);
                scope.spawn(move || {
                    for number in 0..EACH {
                        let (key, print) = (format!("{who}/{number}"), print(who * EACH + number));
                        let end = loop {
                            match client.post(who, print, &key, &[7; 30], taken) {
                                Some(end) => break end,
                                None => thread::yield_now(),
                            }
                        };
                        assert!(client.holds(print, taken) || taken.load(Ordering::SeqCst) >= end);
                    }
                });
            }
            while seen.len() < 3 * EACH as usize {
                let end = ring.read(taken.load(Ordering::Relaxed), |key, value| {
                    let (who, number) = key.split_once('/').unwrap();
                    assert_eq!(value, [7; 30]);
                    seen.push((who.parse().unwrap(), number.parse().unwrap()));
                });
                taken.store(end.unwrap(), Ordering::SeqCst);
            }
        });
        for who in 1..=3 {
            assert!(seen.iter().filter(|one| one.0 == who).map(|one| one.1).eq(0..EACH));
        }
    }

    #[test]
    fn a_bell_wakes_and_no_ring_is_missed() {
        let (ring, client, taken) = pair();
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                for number in 0..2000 {
                    loop {
                        let changes = client.changes(print(number));
                        if client.holds(print(number), &taken) {
                            break;
                        }
                        assert!(client.sleep(print(number), changes, Duration::from_secs(10)), "{number}");
                    }
                }
            });
            (0..2000).for_each(|number| assert!(ring.post(1, print(number), "k", b"", &taken).is_some()));
            waits.join().unwrap();
        });
        assert!(!client.sleep(5, client.changes(5), Duration::from_millis(1)));
    }

    proptest! {
        /// Whatever lies there: an error or keys within their bounds; no panic, no loop without end.
        #[test]
        fn garbage_is_found_out(
            garbage in proptest::collection::vec(prop_oneof![0u64..70, any::<u64>()], 0..200),
            end in prop_oneof![START..START + 200, any::<u64>()],
            last in any::<u64>(),
        ) {
            let (ring, client, taken) = pair();
            for (index, word) in garbage.iter().enumerate() {
                ring.word(START + index as u64).store(*word, Ordering::Relaxed);
            }
            ring.tail().store(end, Ordering::SeqCst);
            ring.bell(7).last.store(last, Ordering::SeqCst);
            let _ = client.holds(7, &taken);
            let mut bytes = 0;
            let read = ring.read(START, |key, value| bytes += key.len() + value.len());
            prop_assert!(bytes <= 8 * WORDS as usize);
            if let Ok(to) = read {
                prop_assert_eq!(to, end);
                prop_assert!((START..=START + WORDS).contains(&end));
            }
            let _ = client.post(1, 7, "k", b"v", &taken);
        }
    }
}
