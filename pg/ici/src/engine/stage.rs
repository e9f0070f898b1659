//! Between a rank's memory and its device: blocks laid out and gathered up.

use std::cell::RefCell;

use podring_collective::Blocks;
use smallvec::SmallVec;

use crate::pjrt::{Buffer, Client, Device, Element, PjrtError};

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
        let mut at = 0;
        for (index, &(data, bytes)) in blocks.iter().enumerate() {
            let start = lay.start(index, at);
            if bytes > 0 {
                // SAFETY: readable by the caller's promise.
                laid[start..start + bytes].copy_from_slice(unsafe { std::slice::from_raw_parts(data, bytes) });
            }
            at = start + bytes;
        }
        client.buffer(laid, shape.element, &shape.dims, device)
    })
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
        // A launch may have written where it was asked to.
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
}
