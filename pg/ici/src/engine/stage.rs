//! Between a rank's memory and its device: blocks laid out and gathered up.

use std::cell::RefCell;

use podring_collective::Blocks;
use smallvec::SmallVec;

use crate::pjrt::{Buffer, Client, Device, Element, Event, PjrtError, VIEW_ALIGNMENT};

/// Where a block lies, and its bytes.
pub(super) type Block = (*mut u8, usize);

/// How blocks lie in a device buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lay {
    /// One after another.
    Packed,
    /// As many bytes apart.
    Slots(usize),
    /// One after another, each from a multiple of as many bytes on.
    Aligned(usize),
}

impl Lay {
    /// Where the next block starts, whose number is `index` and before which `end` bytes are taken.
    fn start(self, index: usize, end: usize) -> usize {
        match self {
            Lay::Packed => end,
            Lay::Slots(slot) => index * slot,
            Lay::Aligned(unit) => end.next_multiple_of(unit),
        }
    }
}

/// The blocks of one side of a part, whose tensors are plain.
pub(super) fn blocks(side: &Blocks, width: usize) -> SmallVec<[Block; 8]> {
    if let [tensor] = &side.tensors[..] {
        let mut at = tensor.data;
        return side
            .counts
            .iter()
            .map(|count| {
                let block = (at, count * width);
                at = at.wrapping_add(block.1);
                block
            })
            .collect();
    }
    side.tensors.iter().zip(&side.counts).map(|(tensor, count)| (tensor.data, count * width)).collect()
}

/// Whether the blocks already lie in memory as they are to lie.
pub(super) fn lies(blocks: &[Block], lay: Lay, bytes: usize) -> Option<*mut u8> {
    let (first, _) = *blocks.first()?;
    let mut at = first;
    for (index, &(data, size)) in blocks.iter().enumerate() {
        let end = at as usize - first as usize;
        if data != at || lay.start(index, end) != end || matches!(lay, Lay::Slots(slot) if slot != size) {
            return None;
        }
        at = at.wrapping_add(size);
    }
    (at as usize - first as usize == bytes).then_some(first)
}

thread_local! {
    /// Grows to the largest buffer that this thread laid out, up to [`KEPT`].
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A thread keeps no more scratch memory than this.
const KEPT: usize = 8 << 20;

fn with_scratch<R>(bytes: usize, act: impl FnOnce(&mut [u8]) -> R) -> R {
    SCRATCH.with(|scratch| {
        let mut scratch = scratch.take();
        if scratch.len() < bytes {
            scratch.resize(bytes, 0);
        }
        let result = act(&mut scratch[..bytes]);
        if scratch.len() <= KEPT {
            SCRATCH.with(|kept| kept.replace(scratch));
        }
        result
    })
}

/// Where the blocks lie in memory as they are to lie, aligned as XLA's CPU plugin wants what it doesn't copy.
pub(super) fn lendable(blocks: &[Block], lay: Lay, bytes: usize) -> Option<*mut u8> {
    lies(blocks, lay, bytes).filter(|data| data.addr().is_multiple_of(VIEW_ALIGNMENT))
}

/// Whether no block touches these bytes.
pub(super) fn apart(blocks: &[Block], memory: *mut u8, bytes: usize) -> bool {
    let (start, end) = (memory.addr(), memory.addr() + bytes);
    blocks.iter().all(|&(data, size)| size == 0 || data.addr() + size <= start || data.addr() >= end)
}

/// The shape of a device buffer.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub element: Element,
    pub dims: SmallVec<[i64; 4]>,
    pub bytes: usize,
}

/// The blocks must end inside a buffer of `bytes`.
fn fit(blocks: &[Block], lay: Lay, bytes: usize) -> Result<(), PjrtError> {
    let mut end = 0;
    for (index, block) in blocks.iter().enumerate() {
        end = lay.start(index, end) + block.1;
    }
    if end <= bytes {
        return Ok(());
    }
    Err(PjrtError::Argument {
        what: "bytes of a rank's blocks",
        expected: format!("at most {bytes}, its device buffer's"),
        got: end.to_string(),
    })
}

/// Copies blocks to a device. What pads them is arbitrary.
///
/// # Safety
/// The blocks are readable.
pub(super) unsafe fn to_device(
    client: &Client,
    device: &Device,
    shape: &Shape,
    blocks: &[Block],
    lay: Lay,
) -> Result<Buffer, PjrtError> {
    fit(blocks, lay, shape.bytes)?;
    if let Some(data) = lies(blocks, lay, shape.bytes) {
        // SAFETY: the blocks lie one after another from here on, and the caller says that they are readable.
        let data = unsafe { std::slice::from_raw_parts(data, shape.bytes) };
        return client.buffer(data, shape.element, &shape.dims, device);
    }
    with_scratch(shape.bytes, |laid| {
        // SAFETY: readable by the caller's promise; `fit` has checked the size, and the scratch is this thread's own.
        unsafe { lay_out(blocks, lay, laid.as_mut_ptr()) };
        client.buffer(laid, shape.element, &shape.dims, device)
    })
}

/// Copies blocks to where they lie in a buffer.
///
/// # Safety
/// The blocks are readable, `laid` is writable as far as they reach ([`fit`]), and none of them touches it.
unsafe fn lay_out(blocks: &[Block], lay: Lay, laid: *mut u8) {
    let mut at = 0;
    for (index, &(data, bytes)) in blocks.iter().enumerate() {
        let start = lay.start(index, at);
        if bytes > 0 {
            // SAFETY: by the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(data, laid.add(start), bytes) };
        }
        at = start + bytes;
    }
}

/// Lends a rank's own memory to a device as an argument, where an operation runs in place: the memory where the result is
/// to be. What is given is copied there if it lies elsewhere, and `moves` allows it. None where it can't be lent.
///
/// # Safety
/// What is given is readable, what is taken writable, by this thread alone now and by nobody else until the event has
/// happened.
pub(super) unsafe fn lend_result(
    client: &Client,
    device: &Device,
    shape: &Shape,
    given: Option<(&[Block], Lay)>,
    taken: (&[Block], Lay),
    moves: bool,
) -> Result<Option<(Buffer, Event)>, PjrtError> {
    let Some(place) = lendable(taken.0, taken.1, shape.bytes) else { return Ok(None) };
    if let Some((blocks, lay)) = given
        && lies(blocks, lay, shape.bytes) != Some(place)
    {
        fit(blocks, lay, shape.bytes)?;
        if !moves || !apart(blocks, place, shape.bytes) {
            return Ok(None);
        }
        // SAFETY: readable and writable by the caller's promise, of this size, and apart.
        unsafe { lay_out(blocks, lay, place) };
    }
    // SAFETY: aligned, as many bytes as the shape has, and left alone by the caller's promise.
    unsafe { client.lend(place, true, shape.element, &shape.dims, device) }.map(Some)
}

/// Lends what a rank gives to a device, for reading. None where it has to be copied.
///
/// # Safety
/// What is given is readable, and stays as it is until the event has happened.
pub(super) unsafe fn lend_input(
    client: &Client,
    device: &Device,
    shape: &Shape,
    given: (&[Block], Lay),
) -> Result<Option<(Buffer, Event)>, PjrtError> {
    let Some(data) = lendable(given.0, given.1, shape.bytes) else { return Ok(None) };
    // SAFETY: aligned, as many bytes as the shape has, and left alone by the caller's promise.
    unsafe { client.lend(data, false, shape.element, &shape.dims, device) }.map(Some)
}

/// Copies a computed buffer's blocks to memory; `on_host` if the devices' memory is this process's.
///
/// # Safety
/// The blocks are writable, by this thread alone.
pub(super) unsafe fn from_device(
    on_host: bool,
    buffer: &Buffer,
    bytes: usize,
    blocks: &[Block],
    lay: Lay,
) -> Result<(), PjrtError> {
    fit(blocks, lay, bytes)?;
    let scatter = |laid: *const u8| {
        let mut at = 0;
        for (index, &(data, size)) in blocks.iter().enumerate() {
            let start = lay.start(index, at);
            if size > 0 {
                // SAFETY: inside the buffer, which `fit` has checked; writable by the caller's promise.
                unsafe { std::ptr::copy_nonoverlapping(laid.add(start), data, size) };
            }
            at = start + size;
        }
    };
    if on_host {
        // SAFETY: the devices are this process's CPUs; the buffer is computed, and borrowed meanwhile.
        let address = unsafe { buffer.address() }?;
        // A launch may have written where it was to.
        if lies(blocks, lay, bytes) != Some(address.cast_mut()) {
            scatter(address);
        }
        return Ok(());
    }
    with_scratch(bytes, |laid| {
        buffer.read(laid)?;
        scatter(laid.as_ptr());
        Ok(())
    })
}

/// Whether a computed buffer is the very memory where these blocks are to be, as they are to lie.
pub(super) fn landed(buffer: &Buffer, bytes: usize, blocks: &[Block], lay: Lay) -> bool {
    // SAFETY: compared, not read.
    let address = unsafe { buffer.address() };
    address.is_ok_and(|address| lies(blocks, lay, bytes) == Some(address.cast_mut()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use podring_collective::{Layout, Tensor};

    #[test]
    fn blocks_are_found_and_known_to_lie_well() {
        let memory = [0u8; 64];
        let tensor = |start: usize, count| Tensor {
            data: memory.as_ptr().wrapping_add(start).cast_mut(),
            layout: Layout::flat(count),
        };
        let cut = blocks(&Blocks::cut(tensor(0, 6), &[1, 2, 3]), 4);
        assert_eq!(cut.iter().map(|block| block.1).collect::<Vec<_>>(), [4, 8, 12]);
        assert_eq!(lies(&cut, Lay::Packed, 24), Some(memory.as_ptr().cast_mut()));
        assert_eq!(lies(&cut, Lay::Packed, 32), None);
        assert_eq!(lies(&cut, Lay::Slots(8), 24), None);
        let even = blocks(&Blocks::cut(tensor(8, 4), &[2, 2]), 4);
        assert!(lies(&even, Lay::Slots(8), 16).is_some());
        assert!(lies(&even, Lay::Aligned(8), 16).is_some() && lies(&cut, Lay::Aligned(8), 24).is_none());
        let list = blocks(&Blocks::list([tensor(0, 2), tensor(16, 2)]), 4);
        assert_eq!(lies(&list, Lay::Packed, 16), None);
        assert_eq!(lies(&[], Lay::Packed, 0), None);
    }

    #[test]
    fn memory_that_overlaps_is_known() {
        let memory = [0u8; 64];
        let at = |start: usize| memory.as_ptr().wrapping_add(start).cast_mut();
        assert!(apart(&[(at(0), 8), (at(40), 24), (at(20), 0)], at(8), 32));
        assert!(!apart(&[(at(0), 9)], at(8), 32) && !apart(&[(at(39), 1)], at(8), 32));
        assert!(!apart(&[(at(0), 64)], at(8), 32));
    }
}
