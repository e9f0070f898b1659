//! What the thread that launches a program tells whoever plays it in its place.
//!
//! libtpu plays programs itself and asks nobody. On a virtual slice the interposer plays a program's collectives on the
//! fabric, within the call that launches it: on this very thread.

use std::{
    cell::RefCell,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use smallvec::SmallVec;

/// A launch under way on this thread.
pub struct Launching {
    end: Instant,
    /// What must be the same on all members beside the program itself; 0 for nothing.
    pub mark: u64,
    stopped: Mutex<Option<String>>,
    /// By the number of the program's result.
    targets: Mutex<Targets>,
    over: Option<Box<dyn Fn() -> Option<String> + Send + Sync>>,
}

/// Addresses and bytes.
type Targets = SmallVec<[Option<(usize, usize)>; 1]>;

thread_local! {
    static NOW: RefCell<Option<Arc<Launching>>> = const { RefCell::new(None) };
}

/// The launch that this thread is in.
pub fn launching() -> Option<Arc<Launching>> {
    NOW.with(|now| now.borrow().clone())
}

impl Launching {
    /// One that is overdue at `end`.
    pub fn until(end: Instant, mark: u64) -> Launching {
        Launching { end, mark, stopped: Mutex::new(None), targets: Mutex::default(), over: None }
    }

    /// Also to be stopped once `over` gives a reason.
    pub fn watching(self, over: impl Fn() -> Option<String> + Send + Sync + 'static) -> Launching {
        Launching { over: Some(Box::new(over)), ..self }
    }

    /// Runs `act` as this launch.
    pub fn run<R>(self: &Arc<Self>, act: impl FnOnce() -> R) -> R {
        NOW.with(|now| now.replace(Some(self.clone())));
        let result = act();
        NOW.with(|now| now.replace(None));
        result
    }

    /// How long it may still take; a moment, if it is overdue.
    pub fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    /// Offers memory for a result of the program: aligned for a buffer, of exactly its bytes, and the player's to write
    /// until the launch returns. The buffer that it then gives for the result may be of that memory.
    pub(super) fn offer(&self, result: usize, memory: *mut u8, bytes: usize) {
        let mut targets = self.targets.lock();
        if targets.len() <= result {
            targets.resize(result + 1, None);
        }
        targets[result] = Some((memory.expose_provenance(), bytes));
    }

    /// The memory that was offered for a result of so many bytes; not twice.
    pub fn target(&self, result: usize, bytes: usize) -> Option<*mut u8> {
        let mut targets = self.targets.lock();
        let (address, _) = targets.get_mut(result)?.take_if(|(_, offered)| *offered == bytes)?;
        Some(std::ptr::with_exposed_provenance_mut(address))
    }

    /// Tells whoever plays it to stop. The first reason stands.
    pub fn stop(&self, why: &str) {
        self.stopped.lock().get_or_insert_with(|| why.to_owned());
    }

    /// Why it is to be stopped, if it is.
    pub fn stopped(&self) -> Option<String> {
        let told = self.stopped.lock().clone();
        told.or_else(|| self.over.as_ref().and_then(|over| over()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_is_known_to_its_thread_while_it_lasts() {
        let launch = Arc::new(Launching::until(Instant::now() + Duration::from_secs(5), 7));
        let mark = launch.run(|| {
            assert!(std::thread::spawn(launching).join().unwrap().is_none());
            launching().map(|launch| launch.mark)
        });
        assert_eq!((mark, launching().is_none()), (Some(7), true));
        assert!(launch.left() > Duration::from_secs(1));
        let mut byte = 0u8;
        launch.offer(1, &raw mut byte, 1);
        assert_eq!([launch.target(0, 1), launch.target(1, 2)], [None; 2]);
        assert_eq!(launch.target(1, 1), Some(&raw mut byte));
        assert_eq!(launch.target(1, 1), None);
        launch.stop("first");
        launch.stop("second");
        assert_eq!(launch.stopped().as_deref(), Some("first"));
    }
}
