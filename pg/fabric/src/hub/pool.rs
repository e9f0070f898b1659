//! Threads on which callbacks run. A callback may wait for another collective, so one never queues behind another: with
//! no idle thread, a new one is made.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// An idle thread ends after this long.
const IDLE: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Inner {
    jobs: VecDeque<Job>,
    idle: usize,
    running: usize,
    closed: bool,
}

/// The pool.
pub struct Pool {
    inner: Mutex<Inner>,
    work: Condvar,
    quiet: Condvar,
    me: Weak<Pool>,
}

impl Pool {
    /// An empty pool.
    pub fn new() -> Arc<Self> {
        Arc::new_cyclic(|me| Pool {
            inner: Mutex::new(Inner::default()),
            work: Condvar::new(),
            quiet: Condvar::new(),
            me: me.clone(),
        })
    }

    /// Runs a job on a thread of the pool. After [`Pool::drain`], drops it: the interpreter is going away.
    pub fn run(&self, job: Job) {
        let mut inner = self.inner.lock();
        if inner.closed {
            drop(inner);
            // Dropping could run foreign code too; what a job holds is leaked instead.
            std::mem::forget(job);
            return;
        }
        inner.jobs.push_back(job);
        if inner.idle >= inner.jobs.len() {
            self.work.notify_one();
            return;
        }
        let Some(me) = self.me.upgrade() else { return };
        let spawned = std::thread::Builder::new().name("podring-callback".into()).spawn(move || me.work());
        if spawned.is_err() && inner.idle + inner.running == 0 {
            // No thread to be had at all: better late on this one than never.
            if let Some(job) = inner.jobs.pop_front() {
                drop(inner);
                job();
            }
        }
    }

    fn work(&self) {
        let mut inner = self.inner.lock();
        loop {
            if let Some(job) = inner.jobs.pop_front() {
                inner.running += 1;
                drop(inner);
                // A callback that panics ends itself, not the pool.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                inner = self.inner.lock();
                inner.running -= 1;
                if inner.running == 0 && inner.jobs.is_empty() {
                    self.quiet.notify_all();
                }
                continue;
            }
            inner.idle += 1;
            let timed_out = self.work.wait_for(&mut inner, IDLE).timed_out();
            inner.idle -= 1;
            if timed_out && inner.jobs.is_empty() {
                return;
            }
        }
    }

    /// Waits until nothing runs or is queued, then runs nothing more. `false` if that took longer than `limit`.
    pub fn drain(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut inner = self.inner.lock();
        while inner.running > 0 || !inner.jobs.is_empty() {
            if self.quiet.wait_until(&mut inner, end).timed_out() {
                break;
            }
        }
        inner.closed = true;
        inner.running == 0 && inner.jobs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_job_that_waits_for_a_later_one_does_not_block_it() {
        let pool = Pool::new();
        let (first, second) = (channel(), channel());
        pool.run(Box::new(move || {
            let _: Result<(), _> = first.1.recv_timeout(Duration::from_secs(10));
            second.0.send(()).unwrap();
        }));
        pool.run(Box::new(move || first.0.send(()).unwrap()));
        second.1.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(pool.drain(Duration::from_secs(10)));
        pool.run(Box::new(|| panic!("ran after drain")));
    }

    #[test]
    fn survives_a_panicking_job() {
        let pool = Pool::new();
        let (send, receive) = channel();
        pool.run(Box::new(|| std::panic::resume_unwind(Box::new(()))));
        pool.run(Box::new(move || send.send(()).unwrap()));
        receive.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(pool.drain(Duration::from_secs(10)));
    }
}
