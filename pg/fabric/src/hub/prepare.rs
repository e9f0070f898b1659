//! From a call to a request: where its blocks lie, and which tensors go through temporary memory.
//!
//! Inputs that aren't plain are packed, outputs that aren't are unpacked at the end. Plain ones go the same way if they
//! share memory with others of the call in a way that no schedule allows for. Every rank decides for itself; the
//! schedules are the same.

use std::sync::Arc;

use podring_collective::{Blocks as Side, Collective, Kind, Layout, Part, Tensor};
use podring_kernel as kernel;
use smallvec::SmallVec;

use super::engine::Request;
use super::overlap::{self, Conflicts, Input, Output, Span};
use super::play::{Blocks, Unpack};
use super::ticket::{Ticket, deadline};
use super::{Call, Shared};
use crate::memory::Buffer;

impl Shared {
    pub(super) fn prepare(&self, call: Call, ticket: Arc<Ticket>) -> Request {
        let mut parts = SmallVec::new();
        let mut staging: SmallVec<[Buffer; 2]> = SmallVec::new();
        let mut unpack: SmallVec<[Unpack; 1]> = SmallVec::new();
        let conflicts = conflicts(&call.collective, || self.places.read().get(&call.channel).copied());
        let (mut reads, mut writes) = (0, 0);
        for part in &call.collective.parts {
            let dtype = part.dtype;
            // The tensor packed last, so that an operation in place packs once. Only where its one block is the result.
            let mut packed: Option<(*mut u8, &Layout, *mut u8)> = None;
            let in_place =
                matches!(call.collective.kind, Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. });
            let mut inputs = Blocks::new();
            let place = |counts: &[usize], blocks: &mut Blocks, mut at: *mut u8| {
                for &count in counts {
                    blocks.push((at, count));
                    at = at.wrapping_add(count * dtype.size());
                }
            };
            let single = part.inputs.tensors.len() == 1;
            for (index, tensor) in part.inputs.tensors.iter().enumerate() {
                let counts = if single { &part.inputs.counts[..] } else { &part.inputs.counts[index..=index] };
                let plain = tensor.layout.is_plain();
                let shared = conflicts.as_ref().is_some_and(|conflicts| conflicts.inputs[reads]);
                reads += 1;
                let at = if plain && !shared {
                    tensor.data
                } else {
                    let count = tensor.layout.numel().unwrap_or(0);
                    let buffer = self.memory.take(count * dtype.size());
                    // SAFETY: the tensor is readable by the caller's promise; the buffer is large enough.
                    unsafe { kernel::pack(&tensor.layout, dtype, tensor.data, buffer.as_ptr(), 0..count) };
                    let at = buffer.as_ptr();
                    if !plain && in_place {
                        packed = Some((tensor.data, &tensor.layout, at));
                    }
                    staging.push(buffer);
                    at
                };
                place(counts, &mut inputs, at);
            }
            let mut outputs = Blocks::new();
            let single = part.outputs.tensors.len() == 1;
            for (index, tensor) in part.outputs.tensors.iter().enumerate() {
                let counts = if single { &part.outputs.counts[..] } else { &part.outputs.counts[index..=index] };
                let shared = conflicts.as_ref().is_some_and(|conflicts| conflicts.outputs[writes]);
                writes += 1;
                let at = if tensor.layout.is_plain() && !shared {
                    tensor.data
                } else {
                    let count = tensor.layout.numel().unwrap_or(0);
                    let at = match packed {
                        Some((data, layout, at)) if data == tensor.data && *layout == tensor.layout => at,
                        _ => {
                            let buffer = self.memory.take(count * dtype.size());
                            let at = buffer.as_ptr();
                            staging.push(buffer);
                            at
                        }
                    };
                    if count > 0 {
                        unpack.push(Unpack { from: at, into: tensor.clone(), dtype, count });
                    }
                    at
                };
                place(counts, &mut outputs, at);
            }
            parts.push((inputs, outputs));
        }
        // They are taken from the end; where outputs share memory, the last one is to be the last one written.
        unpack.reverse();
        let fingerprint = if call.collective.kind.is_point_to_point() {
            call.collective.parts.first().map_or(0, |part| part.dtype as u64 + 1)
        } else {
            call.collective.fingerprint() ^ call.mark
        };
        Request {
            channel: call.channel,
            seq: call.seq,
            fingerprint,
            collective: call.collective,
            parts,
            staging,
            unpack,
            ticket,
            keep: call.keep,
            deadline: deadline(call.timeout),
            timeout: call.timeout,
        }
    }
}

/// Which tensors share memory; `None` if that is no matter, as almost always. `me` gives this rank's number in the
/// group; where that isn't known, no place counts as a rank's own.
fn conflicts(collective: &Collective, me: impl FnOnce() -> Option<u32>) -> Option<Conflicts> {
    let parts = &collective.parts;
    let read = |part: &Part, tensor: &Tensor| {
        if tensor.layout.is_plain() { span(tensor, part.dtype.size()) } else { Span::default() }
    };
    let reads = parts.iter().flat_map(|part| part.inputs.tensors.iter().map(move |tensor| read(part, tensor)));
    let writes =
        parts.iter().flat_map(|part| part.outputs.tensors.iter().map(|tensor| span(tensor, part.dtype.size())));
    if overlap::apart(reads, writes) {
        return None;
    }
    let me = me();
    let mut inputs: SmallVec<[Input; 8]> = SmallVec::new();
    let mut outputs: SmallVec<[Output; 8]> = SmallVec::new();
    for (number, part) in parts.iter().enumerate() {
        let number = number as u32;
        let own = me.and_then(|me| own(collective.kind, part, me as usize));
        for (index, tensor) in part.inputs.tensors.iter().enumerate() {
            let own = own.filter(|own| own.0 == index).map_or(Span::default(), |own| own.1);
            inputs.push(Input { span: read(part, tensor), part: number, own });
        }
        for tensor in &part.outputs.tensors {
            let staged = !tensor.layout.is_plain();
            outputs.push(Output { span: span(tensor, part.dtype.size()), part: number, staged });
        }
    }
    let conflicts = overlap::conflicts(&inputs, &outputs);
    (conflicts.inputs.contains(&true) || conflicts.outputs.contains(&true)).then_some(conflicts)
}

/// The rank's own block, where it is the same memory on both sides, and the input tensor that it lies in. These are the
/// places in which the tests of the schedules play every algorithm with input and output as one.
fn own(kind: Kind, part: &Part, me: usize) -> Option<(usize, Span)> {
    let (input, output) = match kind {
        Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. } => (0, 0),
        Kind::AllGather | Kind::Gather { .. } => (0, me),
        Kind::ReduceScatter | Kind::Scatter { .. } => (me, 0),
        Kind::AllToAll | Kind::Barrier | Kind::Send { .. } | Kind::Recv { .. } => return None,
    };
    let size = part.dtype.size();
    let (tensor, read) = block(&part.inputs, input, size)?;
    let (_, written) = block(&part.outputs, output, size)?;
    (read == written && !read.is_empty()).then_some((tensor, read))
}

/// A block's tensor and memory; `None` if there is no such block or it isn't plain.
fn block(side: &Side, block: usize, size: usize) -> Option<(usize, Span)> {
    let count = *side.counts.get(block)?;
    let (index, before) = if side.tensors.len() == 1 { (0, side.counts[..block].iter().sum()) } else { (block, 0) };
    let tensor = side.tensors.get(index).filter(|tensor| tensor.layout.is_plain())?;
    let start = tensor.data as usize + before * size;
    Some((index, Span { start, end: start + count * size }))
}

/// A tensor's memory from its lowest to its highest element of `size` bytes.
fn span(tensor: &Tensor, size: usize) -> Span {
    let (base, layout) = (tensor.data as usize, &tensor.layout);
    let count = layout.numel().unwrap_or(0);
    if count == 0 {
        return Span::default();
    }
    if layout.is_plain() {
        return Span { start: base, end: base.saturating_add(count * size) };
    }
    let (mut low, mut high) = (0i64, 0i64);
    for (&extent, &stride) in layout.sizes.iter().zip(&layout.strides) {
        let reach = stride.saturating_mul(extent - 1);
        let side = if reach < 0 { &mut low } else { &mut high };
        *side = side.saturating_add(reach);
    }
    let size = size as i64;
    Span {
        start: base.saturating_add_signed(low.saturating_mul(size) as isize),
        end: base.saturating_add_signed(high.saturating_add(1).saturating_mul(size) as isize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use podring_collective::{DType, Reduction};
    use proptest::prelude::*;

    fn at(address: usize, count: usize) -> Tensor {
        Tensor { data: std::ptr::without_provenance_mut(address), layout: Layout::flat(count) }
    }

    fn call(kind: Kind, inputs: Side, outputs: Side) -> Collective {
        let reduction = kind.reduces().then_some(Reduction::Sum);
        let part = Part { dtype: DType::F32, reduction, inputs, outputs };
        Collective { kind, parts: SmallVec::from_iter([part]) }
    }

    fn found(collective: &Collective, me: u32) -> Option<(Vec<bool>, Vec<bool>)> {
        conflicts(collective, || Some(me)).map(|found| (found.inputs.to_vec(), found.outputs.to_vec()))
    }

    /// Three blocks of 5, 0 and 3 elements: those of an uneven collective.
    const COUNTS: [usize; 3] = [5, 0, 3];

    #[test]
    fn in_place_is_left_alone() {
        let own = [at(1000, 5), at(1020, 0), at(1020, 3)];
        for me in 0..3u32 {
            let mine = || Side::whole(own[me as usize].clone());
            let cut = || Side::cut(at(1000, 8), &COUNTS);
            let list = || Side::list(own.clone());
            let root = me;
            for whole in [cut(), list()] {
                assert_eq!(found(&call(Kind::AllGather, mine(), whole.clone()), me), None);
                assert_eq!(found(&call(Kind::Gather { root }, mine(), whole.clone()), me), None);
                assert_eq!(found(&call(Kind::ReduceScatter, whole.clone(), mine()), me), None);
                assert_eq!(found(&call(Kind::Scatter { root }, whole, mine()), me), None);
            }
            for kind in [Kind::AllReduce, Kind::Broadcast { root: 0 }, Kind::Reduce { root }] {
                assert_eq!(found(&call(kind, mine(), mine()), me), None);
            }
        }
    }

    #[test]
    fn elsewhere_is_staged() {
        let cut = || Side::cut(at(1000, 8), &[4, 4]);
        let slot = |at_element: usize| Side::whole(at(1000 + 4 * at_element, 4));
        for element in [3, 4, 5] {
            assert_eq!(found(&call(Kind::AllGather, slot(element), cut()), 0), Some((vec![true], vec![false])));
            assert_eq!(found(&call(Kind::ReduceScatter, cut(), slot(element)), 0), Some((vec![true], vec![false])));
        }
        // Blocks that swap, and those that stay.
        assert_eq!(found(&call(Kind::AllToAll, cut(), cut()), 0), Some((vec![true], vec![false])));
        let (first, second) = (|| at(1000, 4), || at(2000, 4));
        let swapped = call(Kind::AllToAll, Side::list([first(), second()]), Side::list([second(), first()]));
        assert_eq!(found(&swapped, 0), Some((vec![true, true], vec![false, false])));
        // The own block is in place, but another rank's is in the same memory.
        let twice = call(Kind::ReduceScatter, Side::list([first(), first()]), Side::whole(first()));
        assert_eq!(found(&twice, 1), Some((vec![true, false], vec![false])));
        let shifted = call(Kind::AllReduce, Side::whole(at(1000, 4)), Side::whole(at(1004, 4)));
        assert_eq!(found(&shifted, 0), Some((vec![true], vec![false])));
        // Not known which one is the own.
        assert!(conflicts(&call(Kind::AllGather, slot(0), cut()), || None).is_some());
    }

    #[test]
    fn outputs_that_meet_are_staged_over_all_parts() {
        let same = call(Kind::AllGather, Side::whole(at(3000, 4)), Side::list([at(1000, 4), at(1000, 4), at(2000, 4)]));
        assert_eq!(found(&same, 0), Some((vec![false], vec![true, true, false])));
        let mut parts = call(Kind::AllReduce, Side::whole(at(1000, 4)), Side::whole(at(1000, 4)));
        parts.parts.push(parts.parts[0].clone());
        assert_eq!(found(&parts, 0), Some((vec![false; 2], vec![true; 2])));
        // Part 1 reads what part 0 writes.
        parts.parts[1].outputs = Side::whole(at(2000, 4));
        assert_eq!(found(&parts, 0), Some((vec![false, true], vec![false; 2])));
    }

    #[test]
    fn strided_inputs_are_read_before_and_strided_outputs_written_after() {
        let strided = |address: usize, stride: i64| {
            let mut tensor = at(address, 4);
            tensor.layout.strides[0] = stride;
            tensor
        };
        let call = |input: Tensor, output: Tensor| call(Kind::AllToAll, Side::whole(input), Side::whole(output));
        assert_eq!(found(&call(strided(1000, 2), at(1000, 4)), 0), None);
        assert_eq!(found(&call(at(1000, 4), strided(1000, 2)), 0), None);
    }

    proptest! {
        #[test]
        fn every_element_lies_within_its_span(dims in prop::collection::vec((1i64..5, -9i64..10), 0..4)) {
            let (sizes, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
            let layout = Layout {
                sizes: SmallVec::from_slice(&sizes),
                strides: SmallVec::from_slice(&strides),
                conj: false,
                neg: false,
            };
            let count = layout.numel().unwrap();
            let tensor = Tensor { data: std::ptr::without_provenance_mut(100_000), layout };
            let span = span(&tensor, 4);
            for index in 0..count as i64 {
                let (mut rest, mut element) = (index, 0);
                for (size, stride) in sizes.iter().zip(&strides).rev() {
                    element += rest % size * stride;
                    rest /= size;
                }
                let address = (100_000 + 4 * element) as usize;
                prop_assert!(span.start <= address && address + 4 <= span.end);
            }
        }
    }
}
