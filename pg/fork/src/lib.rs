//! What becomes of us in a forked child.
//!
//! A child (a DataLoader worker) inherits every descriptor. If it kept them, a killed rank's sockets would live on in its
//! workers and nobody would notice its death. So the fork handler closes all of ours in the child, and says that this is
//! a child. Only async-signal-safe things happen in the handler: atomics and close(2).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const WORDS: usize = 1024;

/// One bit per descriptor number that is ours.
static OURS: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
/// Counts the forks between the first process that used podring and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static INSTALL: Once = Once::new();

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
    for (index, word) in OURS.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::SeqCst);
        while bits != 0 {
            let fd = index * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            // SAFETY: the descriptor was ours in the parent; in the child nothing uses it (users check `generation`).
            unsafe { libc::close(fd as RawFd) };
        }
    }
}

/// Installs the fork handler, once per program.
pub fn install() {
    INSTALL.call_once(|| {
        // SAFETY: the handler does only async-signal-safe work.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// Differs between a process and its forked children.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// A descriptor that forked children close.
#[derive(Debug)]
pub struct Guarded {
    fd: Option<OwnedFd>,
    generation: u32,
}

impl Guarded {
    /// Takes charge of a descriptor.
    pub fn new(fd: OwnedFd) -> Self {
        mark(fd.as_raw_fd(), true);
        Guarded { fd: Some(fd), generation: generation() }
    }
}

impl AsFd for Guarded {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            // `fd` is None only inside drop.
            None => unreachable!("descriptor used after drop"),
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            if self.generation == generation() {
                mark(fd.as_raw_fd(), false);
            } else {
                // Closed by the handler already; the number may be somebody else's by now.
                std::mem::forget(fd);
            }
        }
    }
}

/// A descriptor that somebody else owns, closed in forked children for as long as this lives. Drop it before the owner
/// closes the descriptor.
#[derive(Debug)]
pub struct Marked {
    fd: RawFd,
    generation: u32,
}

impl Marked {
    /// Marks a descriptor.
    pub fn new(fd: &impl AsRawFd) -> Self {
        install();
        let fd = fd.as_raw_fd();
        mark(fd, true);
        Marked { fd, generation: generation() }
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        if self.generation == generation() {
            mark(self.fd, false);
        }
    }
}

fn mark(fd: RawFd, ours: bool) {
    let (index, bit) = (fd as usize / 64, 1u64 << (fd as usize % 64));
    if let Some(word) = OURS.get(index) {
        if ours {
            word.fetch_or(bit, Ordering::SeqCst);
        } else {
            word.fetch_and(!bit, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn a_child_has_none_of_our_descriptors() {
        install();
        let guarded = Guarded::new(eventfd(0, EventfdFlags::empty()).unwrap());
        let raw = guarded.as_fd().as_raw_fd();
        // SAFETY: the child only calls fcntl and _exit.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: async-signal-safe calls only.
            unsafe { libc::_exit(i32::from(libc::fcntl(raw, libc::F_GETFD) != -1)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child just forked.
        unsafe { libc::waitpid(pid, &mut status, 0) };
        assert_eq!(status, 0);
        // SAFETY: a query of a descriptor we own.
        assert_ne!(unsafe { libc::fcntl(raw, libc::F_GETFD) }, -1);
        drop(guarded);
    }
}
