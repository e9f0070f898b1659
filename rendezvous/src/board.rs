//! The board: which keys exist, in memory that clients on the coordinator's own host may read.
//!
//! Who waits for a key there needs no message of it: he looks, sleeps on the line that the key belongs to (a futex), and
//! is woken when that changes. The coordinator shows a key once everything else about it is done, so whoever has seen it
//! finds it in every answer from then on.
//!
//! A key is shown as a hash of 64 bits, under a secret of the board's own (SipHash): that a key which doesn't exist is
//! taken for one which does has a chance of 7 in 2^64 at each look. A line has room for seven; of what isn't shown it has
//! the number, and then the coordinator must be asked.

use std::hash::Hasher as _;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use podring_fork::Guarded;
use rustix::event::Timespec;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, Stat, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;
use siphasher::sip::SipHasher13;

const MAGIC: u64 = u64::from_le_bytes(*b"podring1");
/// Lines, 8 MiB; with seven keys each, 400,000 keys leave few that can't be shown.
const LINES: usize = 1 << 17;
const WAYS: usize = 7;
/// Of the head and of each line: one of a processor's.
const STEP: usize = 64;
const BYTES: usize = STEP + LINES * STEP;
/// Nobody can map it for writing any more, nor cut it, which would end its readers with SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

#[repr(C, align(64))]
struct Head {
    magic: AtomicU64,
    secret: [AtomicU64; 2],
}

#[repr(C, align(64))]
struct Line {
    /// Counts what happens here.
    changes: AtomicU32,
    /// Keys that exist and have no room here.
    hidden: AtomicU32,
    /// Keys' hashes; 0 is none.
    keys: [AtomicU64; WAYS],
}

const _: () = assert!(size_of::<Head>() == STEP && size_of::<Line>() == STEP);

/// The memory, in either's address space.
struct Lines {
    at: NonNull<u8>,
    secret: (u64, u64),
}

// SAFETY: the memory is reached through atomics only.
unsafe impl Send for Lines {}
// SAFETY: as above.
unsafe impl Sync for Lines {}

impl Lines {
    fn map(fd: BorrowedFd<'_>, access: ProtFlags) -> Result<Lines, Errno> {
        // SAFETY: a fresh mapping at an address the kernel picks, of a file that has these bytes and can't lose them.
        let at = unsafe { mmap(std::ptr::null_mut(), BYTES, access, MapFlags::SHARED, fd, 0)? };
        let at = NonNull::new(at.cast::<u8>()).ok_or(Errno::NOMEM)?;
        Ok(Lines { at, secret: (0, 0) })
    }

    fn head(&self) -> &Head {
        // SAFETY: the mapping begins with the head, is aligned to a page, and lives as long as `self`; atomics may have
        // any bits.
        unsafe { self.at.cast::<Head>().as_ref() }
    }

    fn line(&self, print: u64) -> &Line {
        let index = print as usize % LINES;
        // SAFETY: `LINES` lines follow the head; otherwise as above.
        unsafe { self.at.add(STEP + index * STEP).cast::<Line>().as_ref() }
    }

    fn print(&self, key: &str) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.secret.0, self.secret.1);
        hasher.write(key.as_bytes());
        hasher.finish().max(1)
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), BYTES) };
    }
}

/// The coordinator's side, the only one that writes.
pub(crate) struct Board {
    lines: Lines,
    fd: Guarded,
    /// Somebody else has it, or is about to.
    given: AtomicBool,
}

impl Board {
    /// An empty one.
    pub(crate) fn new() -> io::Result<Board> {
        let fd = memfd_create("podring-board", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        // All of it now: memory that can't be had later would end its readers.
        fallocate(&fd, FallocateFlags::empty(), 0, BYTES as u64)?;
        let mut lines = Lines::map(fd.as_fd(), ProtFlags::READ | ProtFlags::WRITE)?;
        let mut secret = [0; 16];
        getrandom::fill(&mut secret).map_err(io::Error::other)?;
        let secret = u128::from_le_bytes(secret);
        lines.secret = (secret as u64, (secret >> 64) as u64);
        lines.head().secret[0].store(lines.secret.0, Ordering::Relaxed);
        lines.head().secret[1].store(lines.secret.1, Ordering::Relaxed);
        lines.head().magic.store(MAGIC, Ordering::Release);
        fcntl_add_seals(&fd, SEALS | SealFlags::SEAL)?;
        Ok(Board { lines, fd: Guarded::new(fd), given: AtomicBool::new(false) })
    }

    /// What stands for a key.
    pub(crate) fn print(&self, key: &str) -> u64 {
        self.lines.print(key)
    }

    /// The descriptor to be passed on.
    pub(crate) fn give(&self) -> BorrowedFd<'_> {
        self.given.store(true, Ordering::SeqCst);
        self.fd.as_fd()
    }

    /// A key exists now, or no longer. One caller at a time.
    pub(crate) fn turn(&self, print: u64, exists: bool) {
        let line = self.lines.line(print);
        let wanted = if exists { 0 } else { print };
        let slot = line.keys.iter().find(|slot| slot.load(Ordering::Relaxed) == wanted);
        match (slot, exists) {
            (Some(slot), true) => slot.store(print, Ordering::Release),
            (Some(slot), false) => slot.store(0, Ordering::Release),
            (None, true) => drop(line.hidden.fetch_add(1, Ordering::Release)),
            (None, false) => drop(line.hidden.fetch_sub(1, Ordering::Release)),
        }
        line.changes.fetch_add(1, Ordering::SeqCst);
        if exists && self.given.load(Ordering::SeqCst) {
            let _ = futex::wake(&line.changes, futex::Flags::empty(), u32::MAX >> 1);
        }
    }
}

/// What the board shows of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// It exists.
    There,
    /// It doesn't, after so many changes of its line.
    Absent(u32),
    /// That can't be seen here.
    Unknown,
}

/// A client's side.
pub(crate) struct View {
    lines: Lines,
    file: (u64, u64),
}

fn file(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

impl View {
    /// Of a descriptor that a coordinator has passed on. An error if it is none of a board as this build knows it.
    pub(crate) fn new(fd: &OwnedFd) -> io::Result<View> {
        let stat = fstat(fd)?;
        let mut lines = match fcntl_get_seals(fd)?.contains(SEALS) && stat.st_size as u64 == BYTES as u64 {
            true => Lines::map(fd.as_fd(), ProtFlags::READ)?,
            false => return Err(io::ErrorKind::InvalidData.into()),
        };
        if lines.head().magic.load(Ordering::Acquire) != MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let [low, high] = &lines.head().secret;
        lines.secret = (low.load(Ordering::Relaxed), high.load(Ordering::Relaxed));
        Ok(View { lines, file: file(&stat) })
    }

    /// Whether it is of that descriptor.
    pub(crate) fn is_of(&self, fd: &OwnedFd) -> bool {
        fstat(fd).is_ok_and(|stat| file(&stat) == self.file)
    }

    /// What stands for a key.
    pub(crate) fn print(&self, key: &str) -> u64 {
        self.lines.print(key)
    }

    /// Whether a key exists.
    pub(crate) fn look(&self, print: u64) -> Look {
        let line = self.lines.line(print);
        // Before the rest: what happens after this ends the sleep.
        let changes = line.changes.load(Ordering::Acquire);
        if line.keys.iter().any(|slot| slot.load(Ordering::Acquire) == print) {
            return Look::There;
        }
        if line.hidden.load(Ordering::Acquire) != 0 { Look::Unknown } else { Look::Absent(changes) }
    }

    /// Sleeps until something happens on the key's line, for at most `limit`; false if nothing did, or a signal came.
    pub(crate) fn sleep(&self, print: u64, changes: u32, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).ok();
        let slept = futex::wait(&self.lines.line(print).changes, futex::Flags::empty(), changes, limit.as_ref());
        matches!(slept, Ok(()) | Err(Errno::AGAIN))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use super::*;

    fn pair() -> (Board, View) {
        let board = Board::new().unwrap();
        let view = View::new(&board.give().try_clone_to_owned().unwrap()).unwrap();
        (board, view)
    }

    #[test]
    fn keys_come_and_go() {
        let (board, view) = pair();
        let prints: Vec<u64> = (0..1000).map(|key| board.print(&key.to_string())).collect();
        for (key, print) in prints.iter().enumerate() {
            assert_eq!(view.print(&key.to_string()), *print);
            assert!(matches!(view.look(*print), Look::Absent(_)), "{key}");
            board.turn(*print, true);
            assert_eq!(view.look(*print), Look::There);
        }
        for print in &prints {
            board.turn(*print, false);
            assert!(matches!(view.look(*print), Look::Absent(_)));
        }
    }

    /// More on one line than it has room for: nothing false is said of any, and all is well when they are gone.
    #[test]
    fn a_full_line_sends_to_the_coordinator() {
        let (board, view) = pair();
        let prints: Vec<u64> = (1..=10).map(|key| (key * LINES as u64) | 5).collect();
        prints.iter().for_each(|print| board.turn(*print, true));
        let looks = |of: Look| prints.iter().filter(|print| view.look(**print) == of).count();
        assert_eq!((looks(Look::There), looks(Look::Unknown)), (WAYS, 3));
        assert_eq!(view.look((11 * LINES as u64) | 5), Look::Unknown);
        prints.iter().rev().for_each(|print| board.turn(*print, false));
        assert!(prints.iter().all(|print| matches!(view.look(*print), Look::Absent(_))));
    }

    #[test]
    fn a_change_wakes_and_none_is_missed() {
        let (board, view) = pair();
        let key = |number: u64| board.print(&format!("k{number}"));
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                for number in 0..2000 {
                    let began = Instant::now();
                    while let Look::Absent(changes) = view.look(key(number)) {
                        assert!(view.sleep(key(number), changes, Duration::from_secs(10)), "{number}");
                        assert!(began.elapsed() < Duration::from_secs(20), "{number}");
                    }
                }
            });
            (0..2000).for_each(|number| board.turn(key(number), true));
            waits.join().unwrap();
        });
        let Look::Absent(changes) = view.look(key(5000)) else { panic!("not there") };
        assert!(!view.sleep(key(5000), changes, Duration::from_millis(1)));
    }

    #[test]
    fn what_is_no_board_is_refused() {
        let (board, view) = pair();
        let again = board.give().try_clone_to_owned().unwrap();
        assert!(view.is_of(&again) && !pair().1.is_of(&again));
        // Not sealed; sealed and too short; nothing of the kind.
        let made = || memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        let (open, short) = (made(), made());
        fallocate(&open, FallocateFlags::empty(), 0, BYTES as u64).unwrap();
        assert!(View::new(&open).is_err());
        fcntl_add_seals(&open, SEALS).unwrap();
        assert!(View::new(&open).is_err(), "no magic");
        fcntl_add_seals(&short, SEALS).unwrap();
        assert!(View::new(&short).is_err());
        assert!(View::new(&std::fs::File::open("/dev/null").unwrap().into()).is_err());
        // Nobody else can write.
        // SAFETY: a mapping that must fail.
        let writable = unsafe {
            mmap(std::ptr::null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &again, 0)
        };
        assert_eq!(writable.unwrap_err(), Errno::PERM);
    }
}
