//! The board: which keys exist, in memory that clients on the coordinator's own host share with it.
//!
//! Who waits for a key there needs no message of it: he looks, sleeps on the bell that the key belongs to (a futex), and
//! is woken when something happens to it. Who sets one writes it into the ring, rings the bell himself, and goes on; the
//! coordinator takes the ring's sets in ahead of whatever it does next, and a timer sees to it that this is soon.
//!
//! The coordinator shows a key once everything else about it is done, so whoever has seen it finds it in every answer
//! from then on. The same holds for one that is in the ring, since every answer counts those.
//!
//! A key is shown as a hash of 64 bits, under a secret of the board's own (SipHash): that a key which doesn't exist is
//! taken for one which does has a chance of 14 in 2^64 at each look. Two lines have room for seven each; of what isn't
//! shown there is the number, and then the coordinator must be asked.

mod lines;
mod memory;
mod ring;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use lines::{Lines, Shown};
use podring_fork::Guarded;
use ring::Ring;
use rustix::fs::fstat;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime};

use crate::decide::keyvalue::KeyValue;

/// So soon after a set by the ring does the coordinator take it in, if nobody calls it before. As many sets as the ring
/// holds take longer to come.
const SOON: Duration = Duration::from_millis(4);
/// So long does one who waits look before it sleeps, if that has been worth it of late: to wake a processor that has
/// gone idle takes longer than a peer that runs needs for its next set.
const LOOK: Duration = Duration::from_micros(25);
/// So many waits at most go by without that look, after looks in vain.
const BLIND: u32 = 255;
/// At once, for a timer: 0 would stop it.
const AT_ONCE: Duration = Duration::from_nanos(1);
/// Descriptors of a board.
pub(crate) const PARTS: usize = 3;

/// The coordinator's side.
pub(crate) struct Board {
    lines: Lines,
    ring: Ring,
    /// The lines', the ring's, the timer's.
    parts: [Guarded; PARTS],
}

impl Board {
    /// An empty one.
    pub(crate) fn new() -> io::Result<Board> {
        let ((lines_fd, lines), (ring_fd, ring)) = (Lines::new()?, Ring::new()?);
        lines.head().taken.store(Ring::start(), Ordering::SeqCst);
        // Until it is known what the store has room for.
        lines.head().shut.store(1, Ordering::SeqCst);
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        Ok(Board { lines, ring, parts: [lines_fd, ring_fd, timer].map(Guarded::new) })
    }

    /// What stands for a key.
    pub(crate) fn print(&self, key: &str) -> u64 {
        self.lines.print(key)
    }

    /// The descriptors to be passed on.
    pub(crate) fn give(&self) -> [BorrowedFd<'_>; PARTS] {
        self.parts.each_ref().map(Guarded::as_fd)
    }

    /// Can be read when the ring has something, and soon is reached.
    pub(crate) fn timer(&self) -> io::Result<OwnedFd> {
        self.parts[2].as_fd().try_clone_to_owned()
    }

    /// It has run down; what comes from now on starts it anew.
    pub(crate) fn looking(&self) {
        self.ring.looking();
        let _ = rustix::io::read(&self.parts[2], &mut [0; 8]);
    }

    /// A client is gone for good.
    pub(crate) fn free(&self, client: u64) {
        self.ring.free(client);
        // It may have died before it started the timer.
        self.ring.looking();
    }

    /// A key exists now, or no longer. One caller at a time.
    pub(crate) fn turn(&self, print: u64, exists: bool) {
        self.lines.turn(print, exists);
        if exists {
            self.ring.ring(print);
        }
    }

    /// Whether the ring has something to take in.
    pub(crate) fn has_news(&self) -> bool {
        let taken = self.lines.head().taken.load(Ordering::Relaxed);
        taken != u64::MAX && self.ring.end() != taken
    }

    /// Puts the ring's sets into the store. They count as taken in when [`Board::taken`] is told what this returns.
    pub(crate) fn take_in(&self, store: &mut KeyValue) -> u64 {
        let from = self.lines.head().taken.load(Ordering::Relaxed);
        match self.ring.read(from, |key, value| store.set_promised(key, value)) {
            Ok(end) => end,
            Err(error) => {
                tracing::error!(%error, "a client has overwritten it; it isn't used any more");
                u64::MAX
            }
        }
    }

    /// They are in the store and on the lines.
    pub(crate) fn taken(&self, end: u64) {
        self.lines.head().taken.store(end, Ordering::Release);
    }

    /// Shows how many calls wait at the coordinator, and whether sets may come by the ring; none do while a call waits.
    pub(crate) fn show(&self, waiting: usize, open: bool) {
        let head = self.lines.head();
        let waiting = u32::try_from(waiting).unwrap_or(u32::MAX);
        if head.waiting.load(Ordering::Relaxed) != waiting {
            head.waiting.store(waiting, Ordering::SeqCst);
        }
        let shut = u32::from(!open || head.taken.load(Ordering::Relaxed) == u64::MAX);
        if head.shut.load(Ordering::Relaxed) != shut {
            head.shut.store(shut, Ordering::SeqCst);
        }
    }

    /// What a store must have room for, keys and bytes, so that no set by the ring need be refused: one ring that is
    /// full, and another whose clients haven't seen yet that it is shut.
    pub(crate) const fn promises() -> (usize, usize) {
        (2 * ring::HOLDS.0, 2 * ring::HOLDS.1)
    }
}

/// What the board shows of a key, or of the first that isn't there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// It exists; they all do, at one moment.
    There,
    /// It doesn't, after so many changes of its bell.
    Absent { print: u64, changes: u32 },
    /// That can't be seen here.
    Unknown,
}

/// A client's side.
pub(crate) struct View {
    lines: Lines,
    ring: Ring,
    timer: Guarded,
    file: (u64, u64),
    /// Up to where this client's sets in the ring go.
    posted: AtomicU64,
    patience: Patience,
    generation: u32,
}

/// Whether looking before sleeping is worth it: after looks in vain ever more waits go by without, after others fewer.
/// Where more processes run than processors, most are in vain.
#[derive(Default)]
struct Patience {
    /// Waits yet to go by.
    left: AtomicU32,
    /// How many after the last look.
    last: AtomicU32,
}

impl Patience {
    /// Whether to look. Threads that meet here may both, or neither: it's an estimate.
    fn looks(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        if left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        left == 0
    }

    fn learn(&self, seen: bool) {
        let last = self.last.load(Ordering::Relaxed);
        let next = if seen { last / 2 } else { (2 * last + 1).min(BLIND) };
        self.last.store(next, Ordering::Relaxed);
        self.left.store(next, Ordering::Relaxed);
    }
}

fn file(fd: &OwnedFd) -> io::Result<(u64, u64)> {
    let stat = fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

impl View {
    /// Of the descriptors that a coordinator has passed on. An error if they are none of a board as this build knows it.
    pub(crate) fn new(parts: Vec<OwnedFd>) -> io::Result<View> {
        let [board, ring, timer]: [OwnedFd; PARTS] = parts.try_into().map_err(|_| io::ErrorKind::InvalidData)?;
        let (lines, file) = (Lines::open(&board)?, file(&board)?);
        let (ring, timer, posted) = (Ring::open(&ring)?, Guarded::new(timer), AtomicU64::new(0));
        let (patience, generation) = (Patience::default(), podring_fork::generation());
        Ok(View { lines, ring, timer, file, posted, patience, generation })
    }

    /// Whether it is of these descriptors, and this process's own.
    pub(crate) fn is_of(&self, parts: &[OwnedFd]) -> bool {
        let same = parts.first().is_some_and(|board| file(board).is_ok_and(|file| file == self.file));
        same && self.generation == podring_fork::generation()
    }

    /// What stands for a key.
    pub(crate) fn print(&self, key: &str) -> u64 {
        self.lines.print(key)
    }

    /// Whether a key exists.
    fn look(&self, print: u64) -> Look {
        // Before the rest: what happens after this ends the sleep.
        let changes = self.ring.changes(print);
        // The ring before the lines: what is taken in is on these before it counts as no longer in that.
        if self.ring.holds(print, &self.lines.head().taken) {
            return Look::There;
        }
        match self.lines.look(print) {
            Shown::There => Look::There,
            Shown::Absent => Look::Absent { print, changes },
            Shown::Unknown => Look::Unknown,
        }
    }

    /// Whether keys exist, all at one moment. The last is looked at first: who sets several tends to go in their order.
    pub(crate) fn all(&self, prints: &[u64]) -> Look {
        let mut look = Look::There;
        let all = || {
            look = prints.iter().rev().map(|print| self.look(*print)).find(|look| *look != Look::There).unwrap_or(look);
            look == Look::There
        };
        let undisturbed = self.lines.undisturbed(all);
        if look == Look::There && !undisturbed && prints.len() > 1 { Look::Unknown } else { look }
    }

    /// Sleeps until something happens to the key's bell, for at most `limit`; false if nothing did, or a signal came.
    /// `alone`: it is the only key that is waited for. Several have several setters, and take longer than a look.
    pub(crate) fn sleep(&self, print: u64, changes: u32, limit: Duration, alone: bool) -> bool {
        if alone && self.patience.looks() {
            let seen = self.ring.watch(print, changes, LOOK.min(limit));
            self.patience.learn(seen);
            if seen {
                return true;
            }
        }
        self.ring.sleep(print, changes, limit)
    }

    /// Whether a set may go by the ring now. Not while a call waits at the coordinator: it would have to be woken.
    pub(crate) fn is_open(&self, key: &str, value: &[u8]) -> bool {
        let head = self.lines.head();
        let shut = head.shut.load(Ordering::Relaxed) != 0 || head.waiting.load(Ordering::Relaxed) != 0;
        !shut && key.len() + value.len() <= ring::ENTRY
    }

    /// Sets a key by the ring, for a client with this name. `false`: not now, and nothing was done.
    pub(crate) fn post(&self, client: u64, key: &str, value: &[u8]) -> bool {
        let head = self.lines.head();
        let Some(end) = self.ring.post(client, self.print(key), key, value, &head.taken) else { return false };
        self.posted.fetch_max(end, Ordering::SeqCst);
        if head.waiting.load(Ordering::SeqCst) != 0 {
            self.start(AT_ONCE);
        } else if self.ring.untold() {
            self.start(SOON);
        }
        true
    }

    fn start(&self, after: Duration) {
        let none = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = rustix::time::Timespec { tv_nsec: after.subsec_nanos().into(), ..none };
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: none, it_value });
    }

    /// Whether a set of this client's is still in the ring; asked when the coordinator is gone, and then once.
    pub(crate) fn owes(&self) -> bool {
        self.posted.swap(0, Ordering::SeqCst) > self.lines.head().taken.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::decide::keyvalue::Limits;

    fn pair() -> (Board, View) {
        let board = Board::new().unwrap();
        board.show(0, true);
        let view = view(&board);
        (board, view)
    }

    fn view(board: &Board) -> View {
        View::new(given(board)).unwrap()
    }

    fn given(board: &Board) -> Vec<OwnedFd> {
        board.give().iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect()
    }

    #[test]
    fn a_change_wakes_and_none_is_missed() {
        let (board, view) = pair();
        let key = |number: u64| board.print(&format!("k{number}"));
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                for number in 0..2000 {
                    let began = Instant::now();
                    while let Look::Absent { print, changes } = view.all(&[key(number)]) {
                        assert!(view.sleep(print, changes, Duration::from_secs(10), true), "{number}");
                        assert!(began.elapsed() < Duration::from_secs(20), "{number}");
                    }
                }
            });
            (0..2000).for_each(|number| board.turn(key(number), true));
            waits.join().unwrap();
        });
        let Look::Absent { print, changes } = view.all(&[key(5000)]) else { panic!("not there") };
        assert!(!view.sleep(print, changes, Duration::from_millis(1), false));
    }

    /// Two play ping-pong by the ring while the coordinator takes in what they set: nobody misses anything, neither
    /// before nor after.
    #[test]
    fn sets_by_the_ring_are_seen_before_and_after_they_are_taken_in() {
        const ROUNDS: u64 = 3000;
        let (board, first) = pair();
        let second = view(&board);
        let mut store = KeyValue::new(Limits::default());
        let prints = |key: &str| board.print(key);
        store.keep_presence({
            let view = view(&board);
            move |key| view.print(key)
        });
        let wait = |view: &View, key: &str| {
            while let Look::Absent { print, changes } = view.all(&[prints(key)]) {
                assert!(view.sleep(print, changes, Duration::from_secs(10), true), "{key}");
            }
        };
        let post = |client: u64, view: &View, key: &str| {
            while !view.post(client, key, b"v") {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            let pings = scope.spawn(|| {
                for round in 0..ROUNDS {
                    post(1, &first, &format!("a{round}"));
                    wait(&first, &format!("b{round}"));
                }
            });
            let pongs = scope.spawn(|| {
                for round in 0..ROUNDS {
                    wait(&second, &format!("a{round}"));
                    post(2, &second, &format!("b{round}"));
                }
            });
            while !(pings.is_finished() && pongs.is_finished()) || board.has_news() {
                let end = board.take_in(&mut store);
                store.presence(|print, exists| board.turn(print, exists));
                board.taken(end);
            }
        });
        assert_eq!(store.num_keys() as u64, 2 * ROUNDS);
        assert!((0..ROUNDS).all(|round| first.all(&[prints(&format!("a{round}")), prints("b0")]) == Look::There));
        assert!(!first.owes() && !second.owes());
    }

    #[test]
    fn looks_in_vain_become_seldom() {
        let patience = Patience::default();
        let look = |seen: bool| {
            let without = (0..).take_while(|_| !patience.looks()).count();
            patience.learn(seen);
            without
        };
        assert_eq!((0..10).map(|_| look(false)).collect::<Vec<_>>(), [0, 1, 3, 7, 15, 31, 63, 127, 255, 255]);
        assert_eq!((0..10).map(|_| look(true)).collect::<Vec<_>>(), [255, 127, 63, 31, 15, 7, 3, 1, 0, 0]);
    }

    #[test]
    fn several_keys_are_there_at_one_moment() {
        let (board, view) = pair();
        let (a, b) = (board.print("a"), board.print("b"));
        board.turn(b, true);
        assert!(matches!(view.all(&[a, b]), Look::Absent { print, .. } if print == a));
        assert!(view.post(1, "a", b""));
        assert_eq!((view.all(&[a, b]), view.all(&[])), (Look::There, Look::There));
        board.turn(b, false);
        assert!(matches!(view.all(&[a, b]), Look::Absent { print, .. } if print == b));
    }

    #[test]
    fn the_timer_is_started_once_and_at_once_for_those_who_wait() {
        let (board, view) = pair();
        let timer = board.timer().unwrap();
        let due = |limit: u64| {
            let limit = Duration::from_millis(limit).try_into().unwrap();
            rustix::event::poll(&mut [rustix::event::PollFd::new(&timer, rustix::event::PollFlags::IN)], Some(&limit))
                .unwrap()
                == 1
        };
        assert!(!due(20) && view.post(1, "a", b"") && due(2000));
        board.looking();
        assert!(!due(20) && board.has_news());
        board.show(1, true);
        assert!(!view.is_open("b", b"") && view.post(1, "b", b"") && due(2000));
        board.looking();
        board.show(0, true);
        assert!(view.is_open("b", &[0; ring::ENTRY - 1]) && !view.is_open("b", &[0; ring::ENTRY]));
        board.show(0, false);
        assert!(!view.is_open("b", b""));
    }

    #[test]
    fn a_ring_that_was_overwritten_is_left_alone() {
        let (board, view) = pair();
        let mut store = KeyValue::new(Limits::default());
        assert!(view.post(1, "a", b"1") && view.owes());
        // An end that can't be.
        let ring = Ring::open(&given(&board)[1]).unwrap();
        ring.set_end(5);
        assert!(board.has_news());
        let end = board.take_in(&mut store);
        board.taken(end);
        board.show(0, true);
        assert!(!board.has_news() && !view.is_open("b", b"") && !view.post(1, "b", b""));
        assert!(matches!(view.all(&[board.print("b")]), Look::Absent { .. }));
    }

    #[test]
    fn what_is_no_board_is_refused() {
        let (board, view) = pair();
        assert!(view.is_of(&given(&board)) && !pair().1.is_of(&given(&board)));
        let mut parts = given(&board);
        parts.swap(0, 1);
        assert!(View::new(parts).is_err());
        let mut parts = given(&board);
        parts.pop();
        assert!(View::new(parts).is_err() && View::new(Vec::new()).is_err());
    }
}
