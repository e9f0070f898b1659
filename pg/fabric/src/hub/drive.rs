//! Whose turn it is: waiters that drive what they wait for, those who ride along, and the progress thread.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use podring_collective::Keep;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::endpoint;
use super::engine::Engine;
use super::ticket::{Ticket, deadline};
use super::{Shared, Waited, fork};

/// Looks with nothing but a pause between them, where every rank has a core to itself: a few microseconds, in which a
/// peer that is at it too answers.
const SPINS: u32 = 200;
/// How long a waiter yields before it sleeps. It yields even where every rank should have a core: something else may run
/// there, and then the peer that it waits for stands behind this very thread.
const YIELD: Duration = Duration::from_micros(300);
/// The longest sleep, so that deadlines and interrupts are noticed.
const NAP: Duration = Duration::from_millis(50);

/// The progress thread works or looks for work.
pub(super) const AWAKE: u8 = 0;
/// It stands aside for a waiter.
const PARKED: u8 = 1;
/// It sleeps until a socket or its bell wakes it.
const ASLEEP: u8 = 2;

/// How long to look before sleeping.
struct Patience {
    since: Option<Instant>,
    looks: u32,
    spin: bool,
}

impl Patience {
    fn new(spin: bool) -> Self {
        Patience { since: None, looks: 0, spin }
    }

    fn reset(&mut self) {
        self.since = None;
        self.looks = 0;
    }

    /// Waits a little; `false` when it is time to sleep.
    fn wait(&mut self) -> bool {
        self.looks += 1;
        if self.spin && self.looks < SPINS {
            std::hint::spin_loop();
            return true;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        rustix::thread::sched_yield();
        since.elapsed() < YIELD
    }
}

impl Shared {
    /// Works until an operation has ended, `limit` has passed, or `interrupted` says to stop.
    pub fn drive_until(
        &self,
        ticket: &Ticket,
        limit: Option<Duration>,
        mut interrupted: impl FnMut() -> bool,
    ) -> Waited {
        self.foreground.fetch_add(1, Ordering::SeqCst);
        let until = limit.map(deadline);
        let mut asked = Instant::now();
        let result = loop {
            if ticket.ended() {
                break Waited::Ended;
            }
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                break Waited::TimedOut;
            }
            if now - asked >= NAP {
                asked = now;
                // Asking may take the interpreter's lock, which another thread may hold for long: meanwhile the progress
                // thread drives, or peers would take this process for lost.
                if self.foreground.fetch_sub(1, Ordering::SeqCst) == 1 {
                    self.hand_over();
                }
                let stop = interrupted();
                self.foreground.fetch_add(1, Ordering::SeqCst);
                if stop {
                    break Waited::Interrupted;
                }
            }
            let nap = until.map_or(NAP, |until| (until - now).min(NAP));
            let driver = if self.sleepers.load(Ordering::SeqCst) == 0 { self.engine.try_lock() } else { None };
            match driver {
                Some(engine) => self.drive_for(engine, ticket, nap),
                None => self.ride(ticket, nap),
            }
        };
        if self.foreground.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.hand_over();
        }
        self.wake_passengers();
        result
    }

    pub fn take_inbox(&self, engine: &mut Engine) -> bool {
        let mut any = false;
        while let Some(request) = self.inbox.pop() {
            engine.submit(request);
            any = true;
        }
        any
    }

    /// Makes sure that what is in the inbox is taken out: by whoever holds the token, or by this thread.
    pub fn serve_inbox(&self) {
        while !self.inbox.is_empty() {
            let Some(mut engine) = self.engine.try_lock() else { return };
            self.take_inbox(&mut engine);
            engine.drive();
            self.release(engine, false);
        }
    }

    /// Gives the token up, then does what must not be done under it.
    pub fn release(&self, mut engine: MutexGuard<'_, Engine>, serve: bool) {
        // Whoever hears that an operation has ended may end the process at once, and with it the other threads: what
        // peers must know by then has to be on its way.
        engine.flush_dirty();
        let callbacks = std::mem::take(&mut engine.callbacks);
        if !engine.garbage.is_empty() {
            self.garbage.lock().append(&mut engine.garbage);
        }
        self.busy.store(engine.busy(), Ordering::SeqCst);
        drop(engine);
        for callback in callbacks {
            self.pool.run(callback);
        }
        if serve {
            self.serve_inbox();
        }
    }

    /// Lets go of memory nobody uses any more. Never under a lock: that may take the interpreter's.
    pub fn drop_garbage(&self) {
        drop(self.take_garbage());
    }

    /// The same on a thread of the pool.
    pub fn drop_garbage_elsewhere(&self) {
        let garbage = self.take_garbage();
        if !garbage.is_empty() {
            self.pool.run(Box::new(move || drop(garbage)));
        }
    }

    fn take_garbage(&self) -> Vec<Keep> {
        std::mem::take(&mut *self.garbage.lock())
    }

    /// Drives until the ticket has ended or about `nap` has passed without that.
    fn drive_for<'a>(&'a self, mut engine: MutexGuard<'a, Engine>, ticket: &Ticket, nap: Duration) {
        let start = Instant::now();
        let mut patience = Patience::new(self.spin.load(Ordering::Relaxed));
        let mut rounds = 0u32;
        let mut ended = engine.ended;
        engine.disarm();
        loop {
            let mut moved = !self.inbox.is_empty() && self.take_inbox(&mut engine);
            moved |= engine.drive();
            if ticket.ended() {
                break;
            }
            if engine.ended != ended {
                ended = engine.ended;
                self.wake_passengers();
                if !engine.callbacks.is_empty() {
                    // Somebody waits for them, perhaps before going on with what this thread waits for.
                    self.release(engine, true);
                    let Some(again) = self.engine.try_lock() else { return };
                    engine = again;
                }
            }
            rounds += 1;
            if rounds.is_multiple_of(64) || engine.net.tcp_links > 0 && !moved {
                moved |= engine.poll_sockets();
                let now = Instant::now();
                engine.tick(now);
                if now - start >= nap {
                    break;
                }
            }
            if moved {
                patience.reset();
            } else if !patience.wait() {
                if engine.arm() {
                    let next = engine.tick(Instant::now());
                    if engine.runnable() || ticket.ended() {
                        engine.disarm();
                        continue;
                    }
                    self.release(engine, true);
                    if !self.sleep(next, nap) {
                        return;
                    }
                    let Some(again) = self.engine.try_lock() else { return };
                    engine = again;
                    engine.disarm();
                    engine.poll_sockets();
                    if start.elapsed() >= nap {
                        break;
                    }
                }
                patience.reset();
            }
        }
        self.release(engine, true);
    }

    /// Sleeps until a socket or the bell wakes this process, at most until `next` or `longest`. Only one waiter does: a
    /// second one could miss a ring that the first has answered. `false` if another one sleeps already.
    fn sleep(&self, next: Option<Instant>, longest: Duration) -> bool {
        if self.sleepers.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return false;
        }
        // What was posted before this process counted as asleep rang no bell.
        if self.inbox.is_empty() {
            self.poll(next, longest);
        }
        self.sleepers.store(0, Ordering::SeqCst);
        true
    }

    fn poll(&self, next: Option<Instant>, longest: Duration) {
        let limit = next.map_or(longest, |next| next.saturating_duration_since(Instant::now()).min(longest));
        let time = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        let _ = poll(&mut [PollFd::new(&*self.epoll, PollFlags::IN)], Some(&time));
    }

    /// Another thread drives: sleeps until an operation ends or the token may be free.
    fn ride(&self, ticket: &Ticket, nap: Duration) {
        self.passengers.lock().push(std::thread::current());
        self.aboard.fetch_add(1, Ordering::SeqCst);
        let driven = || self.engine.is_locked() || self.sleepers.load(Ordering::SeqCst) > 0;
        if !ticket.ended() && driven() {
            std::thread::park_timeout(nap.min(Duration::from_millis(1)));
        }
        self.aboard.fetch_sub(1, Ordering::SeqCst);
        let me = std::thread::current().id();
        self.passengers.lock().retain(|thread| thread.id() != me);
    }

    pub fn wake_passengers(&self) {
        if self.aboard.load(Ordering::SeqCst) > 0 {
            for thread in self.passengers.lock().iter() {
                thread.unpark();
            }
        }
    }

    /// Work was left that nobody waits for: sees to it that somebody does it.
    pub fn kick(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            endpoint::ring(&self.bell);
        } else if self.foreground.load(Ordering::SeqCst) == 0 {
            self.wake_progress();
        }
    }

    /// The last waiter leaves: the progress thread takes over if there is something to do. If there isn't, it looks after
    /// the sockets again when its nap is over.
    pub fn hand_over(&self) {
        if self.busy.load(Ordering::SeqCst) || !self.inbox.is_empty() {
            self.wake_progress();
        }
    }

    pub fn wake_progress(&self) {
        match self.progress.load(Ordering::SeqCst) {
            PARKED => {
                if let Some(thread) = &*self.thread.lock() {
                    thread.unpark();
                }
            }
            ASLEEP => endpoint::ring(&self.bell),
            _ => {}
        }
    }

    /// One stretch of the progress thread; `false` when it is to end.
    pub fn background(&self) -> bool {
        if self.closing.load(Ordering::SeqCst) || self.generation != fork::generation() {
            return false;
        }
        if self.foreground.load(Ordering::SeqCst) > 0 {
            self.progress.store(PARKED, Ordering::SeqCst);
            if self.foreground.load(Ordering::SeqCst) > 0 {
                std::thread::park_timeout(NAP);
            }
            self.progress.store(AWAKE, Ordering::SeqCst);
            return true;
        }
        let mut patience = Patience::new(false);
        loop {
            if self.foreground.load(Ordering::SeqCst) > 0 {
                return true;
            }
            let Some(mut engine) = self.engine.try_lock() else {
                rustix::thread::sched_yield();
                continue;
            };
            if self.foreground.load(Ordering::SeqCst) > 0 {
                // Looked at under the token: a waiter that sleeps, or is about to, must get the bell itself.
                return true;
            }
            let mut moved = self.take_inbox(&mut engine);
            moved |= engine.drive();
            if !moved {
                moved |= engine.poll_sockets();
            }
            let next = engine.tick(Instant::now());
            let busy = engine.busy();
            if moved || busy && patience.wait() {
                if moved {
                    patience.reset();
                }
                self.release(engine, false);
                continue;
            }
            if engine.runnable() || busy && !engine.arm() {
                self.release(engine, false);
                patience.reset();
                continue;
            }
            self.progress.store(ASLEEP, Ordering::SeqCst);
            self.release(engine, false);
            self.drop_garbage_elsewhere();
            if self.inbox.is_empty() && self.foreground.load(Ordering::SeqCst) == 0 {
                self.poll(next, Duration::from_secs(1));
            }
            self.progress.store(AWAKE, Ordering::SeqCst);
            return true;
        }
    }
}
