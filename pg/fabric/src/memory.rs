//! Temporary memory for packed tensors, scratch and early messages: kept and lent again, so that a steady state
//! allocates nothing.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

/// Alignment of every buffer: a cache line, and enough for any vector load.
const ALIGN: usize = 64;
/// The smallest class, in bytes (log 2).
const MIN_CLASS: u32 = 8;
/// Memory kept for reuse, in bytes; what comes back above it is freed.
const KEEP: usize = 64 << 20;

/// Uninitialised memory of at least the length asked for.
#[derive(Debug)]
pub struct Buffer {
    data: NonNull<u8>,
    class: u32,
}

// SAFETY: a Buffer owns its memory like a Box<[u8]>.
unsafe impl Send for Buffer {}

impl Buffer {
    fn layout(class: u32) -> Layout {
        // A class is at most 62, so size and alignment are valid by construction.
        Layout::from_size_align(1usize << class, ALIGN).unwrap_or_else(|_| Layout::new::<[u64; 8]>())
    }

    fn new(class: u32) -> Self {
        let layout = Self::layout(class);
        // SAFETY: the layout has a nonzero size.
        let data = unsafe { alloc(layout) };
        match NonNull::new(data) {
            Some(data) => Buffer { data, class },
            None => std::alloc::handle_alloc_error(layout),
        }
    }

    /// Its address.
    pub fn as_ptr(&self) -> *mut u8 {
        self.data.as_ptr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this very layout.
        unsafe { dealloc(self.data.as_ptr(), Self::layout(self.class)) }
    }
}

/// Lends buffers by power-of-two size class.
#[derive(Debug, Default)]
pub struct Pool {
    classes: Vec<Vec<Buffer>>,
    kept: usize,
}

impl Pool {
    /// A buffer of at least `bytes` bytes, contents arbitrary.
    pub fn take(&mut self, bytes: usize) -> Buffer {
        let class = bytes.max(1).next_power_of_two().trailing_zeros().max(MIN_CLASS);
        if let Some(buffer) = self.classes.get_mut(class as usize).and_then(Vec::pop) {
            self.kept -= 1 << class;
            return buffer;
        }
        Buffer::new(class)
    }

    /// Takes a buffer back.
    pub fn give(&mut self, buffer: Buffer) {
        let bytes = 1usize << buffer.class;
        if self.kept + bytes > KEEP {
            return;
        }
        let class = buffer.class as usize;
        if self.classes.len() <= class {
            self.classes.resize_with(class + 1, Vec::new);
        }
        self.kept += bytes;
        self.classes[class].push(buffer);
    }
}

/// A pool that several threads take from.
#[derive(Clone, Debug, Default)]
pub struct SharedPool(std::sync::Arc<parking_lot::Mutex<Pool>>);

impl SharedPool {
    /// See [`Pool::take`].
    pub fn take(&self, bytes: usize) -> Buffer {
        self.0.lock().take(bytes)
    }

    /// Bytes kept for reuse.
    pub fn kept(&self) -> usize {
        self.0.lock().kept
    }

    /// See [`Pool::give`].
    pub fn give(&self, buffer: Buffer) {
        self.0.lock().give(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lends_the_same_memory_again() {
        let mut pool = Pool::default();
        let buffer = pool.take(1000);
        let address = buffer.as_ptr();
        assert_eq!(address as usize % ALIGN, 0);
        pool.give(buffer);
        assert_eq!(pool.take(1024).as_ptr(), address);
        assert_eq!(pool.kept, 0);
    }

    #[test]
    fn keeps_no_more_than_its_bound() {
        let mut pool = Pool::default();
        let buffers: Vec<_> = (0..3).map(|_| pool.take(KEEP / 2)).collect();
        for buffer in buffers {
            pool.give(buffer);
        }
        assert_eq!(pool.kept, KEEP);
    }
}
