//! A byte ring in shared memory: one process writes frames, one reads them.
//!
//! Frames start at multiples of 64 bytes and never wrap inside their header; a payload may wrap. Positions count bytes
//! since the beginning and never go back, so full and empty can't be confused.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::wire::{HEADER, Header, WireError};

/// Bytes before the data: the shared words, each on lines of its own, padded to a page.
pub const CONTROL: usize = 4096;

#[repr(C, align(128))]
struct Line<T>(T);

/// The shared words. Both sides map the same page.
#[repr(C)]
struct Control {
    /// Bytes written. Only the writer stores.
    tail: Line<AtomicU64>,
    /// Bytes read. Only the reader stores.
    head: Line<AtomicU64>,
    /// The reader sleeps and wants its bell rung when something is written.
    reader_sleeps: Line<AtomicU32>,
    /// The writer sleeps and wants its bell rung when room is made.
    writer_sleeps: Line<AtomicU32>,
    /// The writer takes something back that it has written of before, and what says so isn't in the ring yet.
    withheld: Line<AtomicU32>,
}

/// Rounds a payload up to where the next frame starts.
fn padded(len: usize) -> usize {
    len.div_ceil(HEADER) * HEADER
}

/// Common to both ends: the mapping.
#[derive(Debug)]
struct Shared {
    control: *const Control,
    data: *mut u8,
    capacity: usize,
}

// SAFETY: the pointers are to memory mapped for as long as the owner lives; access is by atomics, and data bytes between
// head and tail belong to the reader, the others to the writer.
unsafe impl Send for Shared {}

impl Shared {
    /// # Safety
    /// `base` must be mapped, page-aligned, CONTROL + capacity bytes long, for as long as the ring lives.
    unsafe fn new(base: *mut u8, capacity: usize) -> Self {
        assert!(capacity.is_power_of_two() && capacity >= 4 * HEADER);
        // SAFETY: within the mapping by the caller's promise.
        Shared { control: base.cast(), data: unsafe { base.add(CONTROL) }, capacity }
    }

    fn control(&self) -> &Control {
        // SAFETY: mapped, aligned, and all fields are atomics, valid for any bytes.
        unsafe { &*self.control }
    }
}

/// The writing end.
#[derive(Debug)]
pub struct Writer {
    shared: Shared,
    tail: u64,
    head_seen: u64,
    withheld: bool,
}

impl Writer {
    /// # Safety
    /// `base` must be mapped, page-aligned and zeroed, CONTROL + capacity bytes long, for as long as the writer lives,
    /// and have no other writer. `capacity` must be a power of two, at least 256.
    pub unsafe fn new(base: *mut u8, capacity: usize) -> Self {
        // SAFETY: promised by the caller.
        Writer { shared: unsafe { Shared::new(base, capacity) }, tail: 0, head_seen: 0, withheld: false }
    }

    /// Payload bytes that fit into one frame now. `None` if not even an empty frame does.
    pub fn room(&mut self) -> Option<usize> {
        let used = (self.tail - self.head_seen) as usize;
        if self.shared.capacity - used < self.shared.capacity / 2 {
            self.head_seen = self.shared.control().head.0.load(Ordering::Acquire);
        }
        let free = self.shared.capacity - (self.tail - self.head_seen) as usize;
        free.checked_sub(HEADER)
    }

    /// Writes a frame; `false` if it doesn't fit now. `header.len` must be `len`.
    ///
    /// # Safety
    /// `payload` must be readable for `len` bytes.
    pub unsafe fn push(&mut self, header: &Header, payload: *const u8, len: usize) -> bool {
        debug_assert_eq!(header.len as usize, len);
        match self.room() {
            Some(room) if room >= padded(len) => {}
            _ => return false,
        }
        let mask = self.shared.capacity - 1;
        let at = self.tail as usize & mask;
        let bytes = header.encode();
        // SAFETY: bytes from tail on are ours; a header doesn't wrap because positions are multiples of its size.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.shared.data.add(at), HEADER) };
        let at = (at + HEADER) & mask;
        let first = len.min(self.shared.capacity - at);
        // SAFETY: as above; the two pieces end before head by the room check.
        unsafe {
            std::ptr::copy_nonoverlapping(payload, self.shared.data.add(at), first);
            std::ptr::copy_nonoverlapping(payload.add(first), self.shared.data, len - first);
        }
        self.tail += (HEADER + padded(len)) as u64;
        self.shared.control().tail.0.store(self.tail, Ordering::Release);
        true
    }

    /// Whether the reader must be woken for what was written. Call after the last push of a batch.
    pub fn reader_sleeps(&self) -> bool {
        // Orders the tail's store before the flag's load; the reader orders its flag's store before its tail's load.
        fence(Ordering::SeqCst);
        let flag = &self.shared.control().reader_sleeps.0;
        flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
    }

    /// Says whether something is taken back that the ring doesn't tell of yet: before the memory that it is about may
    /// change, and until it does tell.
    pub fn set_withheld(&mut self, withheld: bool) {
        if std::mem::replace(&mut self.withheld, withheld) != withheld {
            self.shared.control().withheld.0.store(u32::from(withheld), Ordering::Release);
            fence(Ordering::SeqCst);
        }
    }

    /// What [`Writer::set_withheld`] said last.
    pub fn withheld(&self) -> bool {
        self.withheld
    }

    /// Says whether the writer sleeps until room is made.
    pub fn set_sleeping(&self, sleeps: bool) {
        self.shared.control().writer_sleeps.0.store(u32::from(sleeps), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

/// A frame in the ring: its payload in one or two pieces.
#[derive(Debug)]
pub struct Slot<'a> {
    /// The header.
    pub header: Header,
    /// The payload up to the ring's end.
    pub first: &'a [u8],
    /// The rest, from the ring's beginning.
    pub second: &'a [u8],
}

/// The reading end.
#[derive(Debug)]
pub struct Reader {
    shared: Shared,
    head: u64,
    tail_seen: u64,
}

impl Reader {
    /// # Safety
    /// `base` must be mapped, page-aligned, CONTROL + capacity bytes long, for as long as the reader lives, and have no
    /// other reader. `capacity` must be a power of two, at least 256.
    pub unsafe fn new(base: *mut u8, capacity: usize) -> Self {
        // SAFETY: promised by the caller.
        Reader { shared: unsafe { Shared::new(base, capacity) }, head: 0, tail_seen: 0 }
    }

    /// The next frame, if there is one. Its payload may be read until [`Reader::pop`].
    pub fn peek(&mut self) -> Result<Option<Slot<'_>>, WireError> {
        if self.tail_seen == self.head {
            self.tail_seen = self.shared.control().tail.0.load(Ordering::Acquire);
            if self.tail_seen == self.head {
                return Ok(None);
            }
        }
        let mask = self.shared.capacity - 1;
        let at = self.head as usize & mask;
        let mut bytes = [0u8; HEADER];
        // SAFETY: bytes between head and tail are the reader's; headers don't wrap.
        unsafe { std::ptr::copy_nonoverlapping(self.shared.data.add(at), bytes.as_mut_ptr(), HEADER) };
        let header = Header::decode(&bytes)?;
        let len = header.len as usize;
        let available = self.tail_seen.wrapping_sub(self.head);
        if len > self.shared.capacity - HEADER || (HEADER + padded(len)) as u64 > available {
            return Err(WireError::Length { got: len as u64, limit: available });
        }
        let at = (at + HEADER) & mask;
        let split = len.min(self.shared.capacity - at);
        // SAFETY: within the frame just checked; the writer doesn't touch it before `pop` moves head.
        let (first, second) = unsafe {
            (
                std::slice::from_raw_parts(self.shared.data.add(at), split),
                std::slice::from_raw_parts(self.shared.data, len - split),
            )
        };
        Ok(Some(Slot { header, first, second }))
    }

    /// Gives the frame last peeked back to the writer. `len` is its payload's length.
    pub fn pop(&mut self, len: usize) {
        self.head += (HEADER + padded(len)) as u64;
        self.shared.control().head.0.store(self.head, Ordering::Release);
    }

    /// Whether a frame waits, without reading it.
    pub fn has_frame(&self) -> bool {
        self.tail_seen != self.head || self.shared.control().tail.0.load(Ordering::Acquire) != self.head
    }

    /// Whether the writer takes something back that the ring didn't tell of. If not, what it took back before the call is
    /// told of by what is in the ring after it.
    pub fn withheld(&self) -> bool {
        fence(Ordering::SeqCst);
        self.shared.control().withheld.0.load(Ordering::Acquire) != 0
    }

    /// Whether the writer must be woken for the room that was made.
    pub fn writer_sleeps(&self) -> bool {
        fence(Ordering::SeqCst);
        let flag = &self.shared.control().writer_sleeps.0;
        flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
    }

    /// Says whether the reader sleeps until something is written. Look for a frame once more after saying so.
    pub fn set_sleeping(&self, sleeps: bool) {
        self.shared.control().reader_sleeps.0.store(u32::from(sleeps), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Frame;
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    struct Memory(*mut u8, Layout);

    impl Memory {
        fn new(capacity: usize) -> Self {
            let layout = Layout::from_size_align(CONTROL + capacity, 4096).unwrap();
            // SAFETY: nonzero size.
            Memory(unsafe { alloc_zeroed(layout) }, layout)
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: allocated above with this layout.
            unsafe { dealloc(self.0, self.1) }
        }
    }

    fn header(len: usize, seq: u64) -> Header {
        let mut header = Header::new(Frame::Data, 1);
        header.len = len as u32;
        header.seq = seq;
        header
    }

    #[test]
    fn refuses_what_does_not_fit_and_takes_it_later() {
        let memory = Memory::new(256);
        // SAFETY: memory is large enough, zeroed and outlives both ends.
        let (mut writer, mut reader) = unsafe { (Writer::new(memory.0, 256), Reader::new(memory.0, 256)) };
        let payload = [7u8; 100];
        // SAFETY: payload is 100 bytes.
        unsafe {
            assert!(writer.push(&header(100, 0), payload.as_ptr(), 100));
            assert!(!writer.push(&header(1, 1), payload.as_ptr(), 1));
        }
        let len = reader.peek().unwrap().unwrap().header.len as usize;
        reader.pop(len);
        // SAFETY: as above.
        assert!(unsafe { writer.push(&header(1, 1), payload.as_ptr(), 1) });
    }

    #[test]
    fn a_corrupt_length_is_an_error() {
        let memory = Memory::new(256);
        // SAFETY: as above.
        let (mut writer, mut reader) = unsafe { (Writer::new(memory.0, 256), Reader::new(memory.0, 256)) };
        // SAFETY: an empty payload.
        assert!(unsafe { writer.push(&header(0, 0), std::ptr::null(), 0) });
        let bytes = header(200, 0).encode();
        // SAFETY: overwrites the header inside the ring.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.0.add(CONTROL), HEADER) };
        assert!(matches!(reader.peek(), Err(WireError::Length { got: 200, .. })));
    }

    #[test]
    fn two_threads_see_every_frame_in_order() {
        const FRAMES: u64 = 20_000;
        let memory = Memory::new(4096);
        // SAFETY: as above; the scope joins before memory is freed.
        let (mut writer, mut reader) = unsafe { (Writer::new(memory.0, 4096), Reader::new(memory.0, 4096)) };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let payload: Vec<u8> = (0..=255).cycle().take(1000).collect();
                for seq in 0..FRAMES {
                    let len = (seq * 37 % 1000) as usize;
                    // SAFETY: payload has 1000 bytes.
                    while !unsafe { writer.push(&header(len, seq), payload.as_ptr(), len) } {
                        std::thread::yield_now();
                    }
                }
            });
            let mut next = 0;
            while next < FRAMES {
                let Some(slot) = reader.peek().unwrap() else {
                    std::thread::yield_now();
                    continue;
                };
                assert_eq!(slot.header.seq, next);
                let len = slot.header.len as usize;
                assert!(slot.first.iter().chain(slot.second).enumerate().all(|(i, &b)| b == i as u8));
                reader.pop(len);
                next += 1;
            }
        });
    }
}
