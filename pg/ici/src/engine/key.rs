//! What a compiled program depends on, so that calls which can share one do.

use podring_collective::{Collective, DType, Kind, Part, Reduction};
use smallvec::SmallVec;

use crate::program::{
    Backend, Groups, How, Op, PartSpec, Spec, Unsupported,
    layout::{LANES, TILE, class_rows},
    route,
};

/// One tensor set of a program, up to its size class. Operations that only move data have one type for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PartKey {
    pub dtype: DType,
    /// The reduction's code; the factor of PREMUL_SUM is an operand.
    pub reduction: Option<u8>,
    /// The class's largest number of elements.
    pub elements: usize,
}

/// A program up to its devices.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub op: Op,
    pub parts: SmallVec<[PartKey; 1]>,
}

/// For whom programs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub backend: Backend,
    pub exact: bool,
}

/// Bytes of the slot that holds this many in an operation that moves data.
pub(super) fn slot_bytes(bytes: usize) -> usize {
    class_rows(bytes.div_ceil(4), 4) * LANES * 4
}

fn most(counts: &[usize]) -> usize {
    counts.iter().copied().max().unwrap_or(0)
}

/// Elements of a block as this rank knows it: of the whole tensor, or of the largest share.
fn elements(kind: Kind, part: &Part) -> usize {
    match kind {
        Kind::AllReduce | Kind::Reduce { .. } | Kind::Send { .. } => part.inputs.total(),
        Kind::Broadcast { .. } | Kind::Recv { .. } => part.outputs.total().max(part.inputs.total()),
        Kind::AllGather | Kind::Gather { .. } => most(&part.outputs.counts).max(most(&part.inputs.counts)),
        Kind::ReduceScatter | Kind::Scatter { .. } => most(&part.inputs.counts).max(most(&part.outputs.counts)),
        Kind::AllToAll => most(&part.inputs.counts).max(most(&part.outputs.counts)),
        Kind::Barrier => 0,
    }
}

/// The class's largest number of elements of a reduction's block.
fn reduced(
    scatter: bool,
    dtype: DType,
    reduction: Reduction,
    elements: usize,
    members: usize,
    target: Target,
) -> Result<usize, Unsupported> {
    let route = route::reduce(dtype, reduction, target.backend, target.exact)?;
    let (share, shares) = match route.how {
        How::Exchange if !scatter => (elements.div_ceil(members), members),
        _ => (elements, 1),
    };
    Ok(class_rows(share, route.wire.size()) * LANES * shares)
}

fn all_equal<'a>(mut counts: impl Iterator<Item = &'a usize>) -> bool {
    let first = counts.next();
    counts.all(|count| Some(count) == first)
}

/// The program that a collective of `members` ranks needs, as far as this rank can know. Blocks of an all-to-all, a
/// gather or a scatter may be larger elsewhere: then the key is another one, see [`join`].
pub(super) fn of(collective: &Collective, members: usize, target: Target) -> Result<Key, Unsupported> {
    let kind = collective.kind;
    let uneven = kind == Kind::AllToAll
        && collective.parts.iter().any(|part| !all_equal(part.inputs.counts.iter().chain(&part.outputs.counts)));
    if uneven {
        return Ok(flat(collective.parts.iter().map(|part| (elements(kind, part) * part.dtype.size(), tiles(part)))));
    }
    let op = match kind {
        Kind::Send { .. } | Kind::Recv { .. } => Op::Permute { pairs: vec![(0, 1)] },
        other => Op::of(other).unwrap_or(Op::Barrier),
    };
    let mut parts = SmallVec::new();
    for part in &collective.parts {
        let elements = elements(kind, part);
        parts.push(match (kind.reduces(), part.reduction) {
            (true, Some(reduction)) => PartKey {
                dtype: part.dtype,
                reduction: Some(reduction.code()),
                elements: reduced(kind == Kind::ReduceScatter, part.dtype, reduction, elements, members, target)?,
            },
            _ => PartKey { dtype: DType::U8, reduction: None, elements: slot_bytes(elements * part.dtype.size()) },
        });
    }
    Ok(Key { op, parts })
}

/// Tiles of a flat buffer, whose blocks each start on one: the larger of input and output.
fn tiles(part: &Part) -> usize {
    let of = |counts: &[usize]| counts.iter().map(|count| (count * part.dtype.size()).div_ceil(TILE)).sum::<usize>();
    of(&part.inputs.counts).max(of(&part.outputs.counts))
}

/// The uneven all-to-all of parts of (bytes of the largest block, tiles). Powers of two: splits that change from call to
/// call meet few classes.
fn flat(parts: impl Iterator<Item = (usize, usize)>) -> Key {
    let mut most = 1;
    let parts = parts
        .map(|(block, tiles)| {
            most = most.max(tiles.next_power_of_two());
            PartKey { dtype: DType::U8, reduction: None, elements: block.max(TILE).next_power_of_two() }
        })
        .collect();
    Key { op: Op::AllToAllUneven { tiles: most }, parts }
}

/// What a rank alone knows of its blocks, and a program depends on: for each part the largest block's elements, and for
/// an all-to-all whether blocks differ and the tiles of a flat buffer. Empty if all ranks know all.
pub(super) fn unknown_to_others(collective: &Collective) -> SmallVec<[u64; 6]> {
    let kind = collective.kind;
    let parts = collective.parts.iter();
    match kind {
        Kind::AllToAll => parts
            .flat_map(|part| {
                let even = all_equal(part.inputs.counts.iter().chain(&part.outputs.counts));
                [elements(kind, part) as u64, u64::from(!even), tiles(part) as u64]
            })
            .collect(),
        Kind::Gather { .. } | Kind::Scatter { .. } => parts.map(|part| elements(kind, part) as u64).collect(),
        _ => SmallVec::new(),
    }
}

/// The program of a collective whose [`unknown_to_others`] numbers are now the largest of all ranks'.
pub(super) fn agreed(
    collective: &Collective,
    members: usize,
    target: Target,
    numbers: &[u64],
) -> Result<Key, Unsupported> {
    let width = |index: usize| collective.parts.get(index).map_or(1, |part| part.dtype.size());
    let moved = |elements: usize, index: usize| PartKey {
        dtype: DType::U8,
        reduction: None,
        elements: slot_bytes(elements * width(index)),
    };
    match collective.kind {
        Kind::AllToAll => {
            let parts = numbers.chunks_exact(3).map(|numbers| numbers.iter().map(|&number| number as usize));
            let parts: SmallVec<[[usize; 3]; 1]> =
                parts.map(|mut one| std::array::from_fn(|_| one.next().unwrap_or(0))).collect();
            if parts.iter().any(|&[_, uneven, _]| uneven != 0) {
                let blocks = parts.iter().enumerate();
                return Ok(flat(blocks.map(|(index, &[elements, _, tiles])| (elements * width(index), tiles))));
            }
            let slots = parts.iter().enumerate().map(|(index, &[elements, ..])| moved(elements, index));
            Ok(Key { op: Op::AllToAll, parts: slots.collect() })
        }
        Kind::Gather { .. } | Kind::Scatter { .. } => {
            let op = Op::of(collective.kind).unwrap_or(Op::Barrier);
            let parts = numbers.iter().enumerate().map(|(index, &elements)| moved(elements as usize, index));
            Ok(Key { op, parts: parts.collect() })
        }
        _ => of(collective, members, target),
    }
}

/// The program for ranks that asked for different ones: of the largest blocks.
pub(super) fn join(keys: &[&Key], calls: &[&Collective]) -> Option<Key> {
    let first = *keys.first()?;
    if keys.iter().all(|key| *key == first) {
        return Some(first.clone());
    }
    if calls.iter().any(|call| call.parts.len() != first.parts.len()) {
        return None;
    }
    if calls.first()?.kind == Kind::AllToAll {
        return Some(flat((0..first.parts.len()).map(|index| {
            let parts = || calls.iter().map(|call| &call.parts[index]);
            let bytes = |part: &Part| elements(Kind::AllToAll, part) * part.dtype.size();
            (parts().map(bytes).max().unwrap_or(0), parts().map(tiles).max().unwrap_or(0))
        })));
    }
    let mut joined = first.clone();
    for key in keys {
        if key.op != first.op {
            return None;
        }
        for (most, part) in joined.parts.iter_mut().zip(&key.parts) {
            if (most.dtype, most.reduction) != (part.dtype, part.reduction) {
                return None;
            }
            most.elements = most.elements.max(part.elements);
        }
    }
    Some(joined)
}

impl Key {
    pub fn spec(&self, groups: &Groups, target: Target) -> Spec {
        Spec {
            op: self.op.clone(),
            parts: self
                .parts
                .iter()
                .map(|part| PartSpec {
                    dtype: part.dtype,
                    reduction: part.reduction.and_then(|code| Reduction::from_code(code, 1.0)),
                    elements: part.elements,
                })
                .collect(),
            groups: groups.clone(),
            backend: target.backend,
            exact: target.exact,
            donate: self.in_place(target),
        }
    }

    /// Whether results are of the arguments' shapes, and may be left in their memory. A broadcast's too on CPUs, where
    /// ranks may lend theirs; elsewhere it would only need more buffers, for those that give nothing.
    pub fn in_place(&self, target: Target) -> bool {
        match self.op {
            Op::AllReduce | Op::AllToAll => true,
            Op::Broadcast => target.backend == Backend::Cpu,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::build;
    use podring_collective::{Blocks, Layout, Tensor};
    use proptest::prelude::*;

    const TARGET: Target = Target { backend: Backend::Cpu, exact: false };

    fn tensor(count: usize) -> Tensor {
        Tensor { data: std::ptr::dangling_mut(), layout: Layout::flat(count) }
    }

    fn exchange(dtype: DType, sent: &[usize], got: &[usize]) -> Collective {
        let part = Part {
            dtype,
            reduction: None,
            inputs: Blocks::cut(tensor(sent.iter().sum()), sent),
            outputs: Blocks::cut(tensor(got.iter().sum()), got),
        };
        Collective { kind: Kind::AllToAll, parts: SmallVec::from_iter([part]) }
    }

    fn reduction(kind: Kind, dtype: DType, reduction: Reduction, count: usize, members: usize) -> Collective {
        let inputs = if kind == Kind::ReduceScatter {
            Blocks::cut(tensor(count * members), &vec![count; members])
        } else {
            Blocks::whole(tensor(count))
        };
        let part = Part { dtype, reduction: Some(reduction), inputs, outputs: Blocks::whole(tensor(count)) };
        Collective { kind, parts: SmallVec::from_iter([part]) }
    }

    #[test]
    fn even_exchanges_are_in_slots_and_others_flat() {
        let even = of(&exchange(DType::F32, &[3, 3], &[3, 3]), 2, TARGET).unwrap();
        assert_eq!(even.op, Op::AllToAll);
        let uneven = of(&exchange(DType::F64, &[3, 2], &[3, 5]), 2, TARGET).unwrap();
        assert_eq!(uneven.op, Op::AllToAllUneven { tiles: 2 });
        assert_eq!(uneven.parts[0], PartKey { dtype: DType::U8, reduction: None, elements: TILE });
        // One rank's splits happen to be even, the other's aren't: both run the flat program.
        let calls = [exchange(DType::F32, &[3, 3], &[3, 3]), exchange(DType::F32, &[3, 2000], &[3, 2000])];
        let keys: Vec<Key> = calls.iter().map(|call| of(call, 2, TARGET).unwrap()).collect();
        let joined = join(&[&keys[0], &keys[1]], &[&calls[0], &calls[1]]).unwrap();
        assert_eq!((joined.op, joined.parts[0].elements), (Op::AllToAllUneven { tiles: 4 }, 2 * TILE));
    }

    #[test]
    fn what_is_agreed_on_is_what_ranks_that_meet_would_join() {
        let calls = [exchange(DType::F32, &[3, 3], &[3, 3]), exchange(DType::F32, &[3, 2000], &[3, 2000])];
        let keys: Vec<Key> = calls.iter().map(|call| of(call, 2, TARGET).unwrap()).collect();
        let mut most = unknown_to_others(&calls[0]);
        most.iter_mut().zip(unknown_to_others(&calls[1])).for_each(|(most, number)| *most = number.max(*most));
        assert_eq!(
            Some(agreed(&calls[0], 2, TARGET, &most).unwrap()),
            join(&[&keys[0], &keys[1]], &[&calls[0], &calls[1]])
        );
        // A rank alone: what it would have run anyway.
        for call in [&calls[0], &calls[1], &reduction(Kind::AllReduce, DType::F16, Reduction::Sum, 77, 2)] {
            assert_eq!(agreed(call, 2, TARGET, &unknown_to_others(call)), of(call, 2, TARGET));
        }
    }

    fn reducible() -> Vec<(DType, Reduction)> {
        let all = (0..8).map(|code| Reduction::from_code(code, 1.0).unwrap());
        all.flat_map(|redop| DType::ALL.iter().map(move |&dtype| (dtype, redop)))
            .filter(|&(dtype, redop)| redop.supports(dtype))
            .collect()
    }

    proptest! {
        /// A key's program is the call's own: the class's largest number of elements is of the same class.
        #[test]
        fn the_class_stands_for_its_sizes(
            count in 0usize..300_000,
            members in 1usize..9,
            scatter: bool,
            (dtype, redop) in proptest::sample::select(reducible()),
        ) {
            let kind = if scatter { Kind::ReduceScatter } else { Kind::AllReduce };
            let key = of(&reduction(kind, dtype, redop, count, members), members, TARGET).unwrap();
            let groups = Groups::all(members as u32);
            let mut spec = key.spec(&groups, TARGET);
            let shared = build(&spec).unwrap();
            spec.parts[0].elements = count;
            prop_assert_eq!(shared.text, build(&spec).unwrap().text);
        }

        #[test]
        fn slots_hold_what_moves(bytes in 0usize..1 << 30) {
            prop_assert!(slot_bytes(bytes) >= bytes);
            prop_assert_eq!(slot_bytes(slot_bytes(bytes)), slot_bytes(bytes));
        }
    }
}
