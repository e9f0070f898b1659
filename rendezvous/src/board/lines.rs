//! The lines of the board: which keys exist, by their hashes. The coordinator writes, its host's clients read.

use std::hash::Hasher as _;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::SealFlags;
use rustix::mm::ProtFlags;
use siphasher::sip::SipHasher13;

use super::memory::{Mapping, Shared};

const MAGIC: u64 = u64::from_le_bytes(*b"podring2");
/// Lines, 8 MiB; with seven keys each, and two lines for a key to be in, 700,000 keys leave few that can't be shown.
const LINES: usize = 1 << 17;
const WAYS: usize = 7;
/// Of the head and of each line: one of a processor's.
const STEP: usize = 64;
const BYTES: usize = STEP + LINES * STEP;
/// Nobody else can map it for writing.
const SEALS: SealFlags = SealFlags::FUTURE_WRITE;

#[repr(C, align(64))]
pub(super) struct Head {
    magic: AtomicU64,
    secret: [AtomicU64; 2],
    /// Up to where the coordinator has taken the ring's sets in.
    pub(super) taken: AtomicU64,
    /// Counts the keys that ceased to exist, twice each; odd while one does.
    gone: AtomicU64,
    /// Calls that wait at the coordinator.
    pub(super) waiting: AtomicU32,
    /// Not 0: no sets by the ring.
    pub(super) shut: AtomicU32,
}

#[repr(C, align(64))]
struct Line {
    /// Keys that exist and have no room here and in their other line.
    hidden: AtomicU64,
    /// Keys' hashes; 0 is none.
    keys: [AtomicU64; WAYS],
}

const _: () = assert!(size_of::<Head>() == STEP && size_of::<Line>() == STEP);

// SAFETY: atomics.
unsafe impl Shared for Head {}
// SAFETY: as above.
unsafe impl Shared for Line {}

pub(super) struct Lines {
    memory: Mapping,
    secret: (u64, u64),
}

/// What the lines say of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    There,
    Absent,
    /// It may be one of those that had no room.
    Unknown,
}

impl Lines {
    /// Empty ones, and the descriptor for those who read.
    pub(super) fn new() -> io::Result<(OwnedFd, Lines)> {
        let (fd, memory) = Mapping::create("podring-board", BYTES, SEALS)?;
        let mut secret = [0; 16];
        getrandom::fill(&mut secret).map_err(io::Error::other)?;
        let secret = u128::from_le_bytes(secret);
        let lines = Lines { memory, secret: (secret as u64, (secret >> 64) as u64) };
        let head = lines.head();
        head.secret[0].store(lines.secret.0, Ordering::Relaxed);
        head.secret[1].store(lines.secret.1, Ordering::Relaxed);
        head.magic.store(MAGIC, Ordering::Release);
        Ok((fd, lines))
    }

    /// A coordinator's. An error if the descriptor is none of a board as this build knows it.
    pub(super) fn open(fd: &OwnedFd) -> io::Result<Lines> {
        let memory = Mapping::open(fd, BYTES, SEALS, ProtFlags::READ)?;
        let mut lines = Lines { memory, secret: (0, 0) };
        if lines.head().magic.load(Ordering::Acquire) != MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let [low, high] = &lines.head().secret;
        lines.secret = (low.load(Ordering::Relaxed), high.load(Ordering::Relaxed));
        Ok(lines)
    }

    pub(super) fn head(&self) -> &Head {
        self.memory.at(0)
    }

    /// A key's two.
    fn both(&self, print: u64) -> [&Line; 2] {
        [print, print >> 32].map(|part| self.memory.at(STEP + part as usize % LINES * STEP))
    }

    pub(super) fn print(&self, key: &str) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.secret.0, self.secret.1);
        hasher.write(key.as_bytes());
        hasher.finish().max(1)
    }

    /// A key exists now, or no longer. One caller at a time.
    pub(super) fn turn(&self, print: u64, exists: bool) {
        let [home, other] = self.both(print);
        let slot = |line: &'_ Line, wanted| line.keys.iter().position(|slot| slot.load(Ordering::Relaxed) == wanted);
        if exists {
            let free = |line: &Line| line.keys.iter().filter(|slot| slot.load(Ordering::Relaxed) == 0).count();
            let line = if free(other) > free(home) { other } else { home };
            match slot(line, 0) {
                Some(index) => line.keys[index].store(print, Ordering::Release),
                None => drop(home.hidden.fetch_add(1, Ordering::Release)),
            }
            return;
        }
        let gone = &self.head().gone;
        gone.fetch_add(1, Ordering::SeqCst);
        match (slot(home, print), slot(other, print)) {
            (Some(index), _) => home.keys[index].store(0, Ordering::SeqCst),
            (None, Some(index)) => other.keys[index].store(0, Ordering::SeqCst),
            (None, None) => drop(home.hidden.fetch_sub(1, Ordering::SeqCst)),
        }
        gone.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn look(&self, print: u64) -> Shown {
        let [home, other] = self.both(print);
        if [home, other].iter().any(|line| line.keys.iter().any(|slot| slot.load(Ordering::Acquire) == print)) {
            return Shown::There;
        }
        if home.hidden.load(Ordering::Acquire) != 0 { Shown::Unknown } else { Shown::Absent }
    }

    /// Whether what `act` finds holds at one moment: no key ceased to exist meanwhile.
    pub(super) fn undisturbed(&self, act: impl FnOnce() -> bool) -> bool {
        let gone = &self.head().gone;
        let before = gone.load(Ordering::Acquire);
        let found = act();
        fence(Ordering::Acquire);
        found && before.is_multiple_of(2) && gone.load(Ordering::Relaxed) == before
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fcntl_add_seals, memfd_create};
    use rustix::io::Errno;
    use rustix::mm::{MapFlags, mmap};

    use super::*;

    fn pair() -> (OwnedFd, Lines, Lines) {
        let (fd, lines) = Lines::new().unwrap();
        let view = Lines::open(&fd).unwrap();
        (fd, lines, view)
    }

    #[test]
    fn keys_come_and_go() {
        let (_fd, board, view) = pair();
        let prints: Vec<u64> = (0..1000).map(|key| board.print(&key.to_string())).collect();
        for (key, print) in prints.iter().enumerate() {
            assert_eq!(view.print(&key.to_string()), *print);
            assert_eq!(view.look(*print), Shown::Absent, "{key}");
            board.turn(*print, true);
            assert_eq!(view.look(*print), Shown::There);
        }
        for print in &prints {
            board.turn(*print, false);
            assert_eq!(view.look(*print), Shown::Absent);
        }
    }

    /// More on two lines than they have room for: nothing false is said of any, and all is well when they are gone.
    #[test]
    fn a_full_line_sends_to_the_coordinator() {
        let (_fd, board, view) = pair();
        let print = |key: u64| (key << 49) | (6 << 32) | 5;
        let prints: Vec<u64> = (1..=17).map(print).collect();
        prints.iter().for_each(|print| board.turn(*print, true));
        let looks = |of: Shown| prints.iter().filter(|print| view.look(**print) == of).count();
        assert_eq!((looks(Shown::There), looks(Shown::Unknown)), (2 * WAYS, 3));
        assert_eq!(view.look(print(18)), Shown::Unknown);
        prints.iter().rev().for_each(|print| board.turn(*print, false));
        assert!(prints.iter().all(|print| view.look(*print) == Shown::Absent));
    }

    #[test]
    fn there_is_room_for_many_keys() {
        let (_fd, board, view) = pair();
        let prints: Vec<u64> = (0..700_000).map(|key| board.print(&key.to_string())).collect();
        prints.iter().for_each(|print| board.turn(*print, true));
        let unseen = prints.iter().filter(|print| view.look(**print) != Shown::There).count();
        let unknown = (0..100_000).filter(|key| view.look(board.print(&format!("no {key}"))) == Shown::Unknown).count();
        assert!(unseen < 7_000 && unknown < 1_000, "{unseen} of 700,000 not shown, {unknown} of 100,000 unknown");
    }

    #[test]
    fn keys_that_go_are_a_disturbance() {
        let (_fd, board, view) = pair();
        board.turn(7, true);
        assert!(view.undisturbed(|| true) && !view.undisturbed(|| false));
        let there = || view.look(7) == Shown::There;
        assert!(!view.undisturbed(|| {
            let there = there();
            board.turn(7, false);
            there
        }));
        assert!(view.undisturbed(|| {
            board.turn(9, true);
            true
        }));
    }

    #[test]
    fn what_is_no_board_is_refused() {
        let (fd, _board, _view) = pair();
        // Not sealed; sealed and too short; nothing of the kind.
        let made = || memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        let (open, short) = (made(), made());
        fallocate(&open, FallocateFlags::empty(), 0, BYTES as u64).unwrap();
        assert!(Lines::open(&open).is_err());
        let seals = SEALS | SealFlags::SHRINK | SealFlags::GROW;
        fcntl_add_seals(&open, seals).unwrap();
        assert!(Lines::open(&open).is_err(), "no magic");
        fcntl_add_seals(&short, seals).unwrap();
        assert!(Lines::open(&short).is_err());
        assert!(Lines::open(&std::fs::File::open("/dev/null").unwrap().into()).is_err());
        // Nobody else can write.
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a mapping that must fail.
        let writable = unsafe { mmap(std::ptr::null_mut(), BYTES, access, MapFlags::SHARED, fd.as_fd(), 0) };
        assert_eq!(writable.unwrap_err(), Errno::PERM);
    }
}
