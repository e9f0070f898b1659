//! torch's monitored barrier, over the store, so that it works while the group itself doesn't.
//!
//! Each rank numbers its own arrivals, and rank 0 counts them rank by rank: one that missed a barrier is not out of step
//! at the next.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::group::{ProcessGroup, millis};
use crate::store::StoreError;

/// The longest pause between two looks at the store.
const PAUSE: Duration = Duration::from_millis(10);

impl ProcessGroup {
    /// Rank 0 waits for every rank and names who doesn't come, the first or (`all`) every one; the others wait for its
    /// word. Doesn't break the group. `timeout` `None`: the group's.
    pub fn monitored_barrier(
        &self,
        timeout: Option<Duration>,
        all: bool,
        interrupted: impl FnMut() -> bool,
    ) -> Result<(), Error> {
        self.0.process.hub.check_fork()?;
        let timeout = timeout.unwrap_or_else(|| self.timeout());
        let mut arrivals = self.0.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let visit = Visit { group: self, timeout, start: Instant::now() };
        let missing = if self.rank() == 0 {
            visit.count(&mut arrivals, all, interrupted)?
        } else {
            let number = &mut arrivals[self.rank() as usize];
            *number += 1;
            visit.arrive(*number - 1, interrupted)?
        };
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::Barrier { missing, after_ms: millis(timeout), place: self.place() })
    }
}

struct Visit<'a> {
    group: &'a ProcessGroup,
    timeout: Duration,
    start: Instant,
}

impl Visit<'_> {
    fn key(&self, what: &str, rank: u32, number: u64) -> String {
        format!("podring/{:016x}/barrier/{what}/{rank}/{number}", self.group.0.channel)
    }

    fn failed(&self) -> impl Fn(StoreError) -> Error + use<> {
        let place = Box::new(self.group.place());
        move |source| Error::Store { place: place.clone(), source }
    }

    fn has(&self, key: String) -> Result<bool, Error> {
        self.group.0.store.check(&[key]).map_err(self.failed())
    }

    fn over(&self) -> bool {
        self.start.elapsed() >= self.timeout
    }

    /// Announces this rank and waits for rank 0's word: who was missing.
    fn arrive(&self, number: u64, mut interrupted: impl FnMut() -> bool) -> Result<Vec<u32>, Error> {
        let (rank, store) = (self.group.rank(), &self.group.0.store);
        store.set(&self.key("here", rank, number), b"1").map_err(self.failed())?;
        let word = self.key("word", rank, number);
        let mut pause = Duration::from_micros(100);
        while !self.has(word.clone())? {
            let stop = interrupted();
            if stop || self.over() {
                // Rank 0 must not take this visit for one to a later barrier.
                store.set(&self.key("gone", rank, number), b"1").map_err(self.failed())?;
                return if stop { Err(Error::Interrupted) } else { Ok(vec![0]) };
            }
            std::thread::sleep(pause);
            pause = (pause * 3 / 2).min(PAUSE);
        }
        let word = store.get(&word).map_err(self.failed())?;
        Ok(serde_json::from_slice(&word).unwrap_or_default())
    }

    /// Counts the others in, and tells those who came who didn't.
    fn count(&self, arrivals: &mut [u64], all: bool, mut interrupted: impl FnMut() -> bool) -> Result<Vec<u32>, Error> {
        if self.timeout.is_zero() && arrivals.len() > 1 {
            return Ok(vec![0]);
        }
        let mut waiting: Vec<u32> = (1..arrivals.len() as u32).collect();
        let mut came = Vec::new();
        let mut pause = Duration::from_micros(100);
        loop {
            let mut still = Vec::new();
            for rank in waiting {
                let number = &mut arrivals[rank as usize];
                while self.has(self.key("gone", rank, *number))? {
                    *number += 1;
                }
                if self.has(self.key("here", rank, *number))? {
                    came.push((rank, *number));
                    *number += 1;
                } else {
                    still.push(rank);
                }
            }
            waiting = still;
            if waiting.is_empty() || self.over() {
                break;
            }
            if interrupted() {
                return Err(Error::Interrupted);
            }
            std::thread::sleep(pause);
            pause = (pause * 3 / 2).min(PAUSE);
        }
        if !all {
            waiting.truncate(1);
        }
        let word = serde_json::to_vec(&waiting).unwrap_or_default();
        for (rank, number) in came {
            self.group.0.store.set(&self.key("word", rank, number), &word).map_err(self.failed())?;
        }
        Ok(waiting)
    }
}
