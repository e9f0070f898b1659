//! Packing and unpacking against index arithmetic.

use podring_collective::{DType, Layout};
use podring_kernel::{copy, pack, unpack};
use proptest::prelude::*;
use proptest::sample::Index;
use smallvec::SmallVec;

use crate::Random;

/// A tensor's layout as drawn: sizes, a stride for each as a rule to make it, and the bits.
#[derive(Clone, Debug)]
struct Drawn {
    layout: Layout,
    dtype: DType,
    misaligned: (usize, usize),
    range: (Index, Index),
    seed: u64,
}

/// Layouts that don't overlap: a dense tensor with gaps, its dimensions permuted and some walked backwards; then, with
/// `overlapping`, some strides 0.
fn drawn(overlapping: bool) -> impl Strategy<Value = Drawn> {
    let size = prop_oneof![5 => 1i64..9, 1 => Just(0i64), 2 => 9i64..70];
    // Per dimension: size, gap behind it, backwards, expanded; and a number to order by.
    let dim = (size, prop_oneof![3 => Just(0i64), 1 => 1i64..4], any::<bool>(), prop::bool::weighted(0.2), any::<u8>());
    let dims = prop::collection::vec(dim, 0..5)
        .prop_filter("too large", |dims| dims.iter().map(|dim| dim.0.max(1) + dim.1).product::<i64>() < 200_000);
    let plain_order = any::<bool>();
    let at = || prop_oneof![Just(0usize), 0usize..16];
    let dtypes = prop::sample::select(DType::ALL.to_vec());
    let bits = (any::<bool>(), any::<bool>());
    (dims, plain_order, dtypes, (at(), at()), bits, any::<(Index, Index)>(), any::<u64>()).prop_map(
        move |(dims, plain_order, dtype, misaligned, (conj, neg), range, seed)| {
            let mut order: Vec<usize> = (0..dims.len()).rev().collect();
            if !plain_order {
                order.sort_by_key(|&at| dims[at].4);
            }
            let mut strides: SmallVec<[i64; 6]> = SmallVec::from_elem(0, dims.len());
            let mut step = 1;
            for at in order {
                let (size, gap, backwards, expanded, _) = dims[at];
                strides[at] = match (overlapping && expanded, overlapping && backwards) {
                    (true, _) => 0,
                    (_, true) => -step,
                    _ => step,
                };
                step *= size.max(1) + gap;
            }
            let layout = Layout { sizes: dims.iter().map(|dim| dim.0).collect(), strides, conj, neg };
            Drawn { layout, dtype, misaligned, range, seed }
        },
    )
}

/// Where logical element `index` lies, in elements from element 0.
fn place(layout: &Layout, index: usize) -> i64 {
    let (mut rest, mut at) = (index as i64, 0);
    for (&size, &stride) in layout.sizes.iter().zip(&layout.strides).rev() {
        at += rest % size * stride;
        rest /= size;
    }
    at
}

/// An element's value from what is stored, or the reverse.
fn turned(layout: &Layout, dtype: DType, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let negate = |bytes: &mut [u8]| match dtype {
        DType::Bool | DType::F8E8M0FNU => {}
        DType::U8 | DType::I8 | DType::U16 | DType::I16 | DType::U32 | DType::I32 | DType::U64 | DType::I64 => {
            let mut wide = [0; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            let negative = (-i128::from(u64::from_le_bytes(wide))).to_le_bytes();
            bytes.copy_from_slice(&negative[..bytes.len()]);
        }
        DType::F8E4M3FNUZ | DType::F8E5M2FNUZ if matches!(bytes[0], 0 | 0x80) => {}
        _ => *bytes.last_mut().unwrap() ^= 0x80,
    };
    if dtype.is_complex() {
        let (re, im) = bytes.split_at_mut(dtype.size() / 2);
        if layout.neg {
            negate(re);
            negate(im);
        }
        if layout.conj {
            negate(im);
        }
    } else if layout.neg {
        negate(&mut bytes);
    }
    bytes
}

/// The tensor's memory: bytes, and where in them element 0 starts.
fn memory(drawn: &Drawn) -> (Vec<u8>, usize) {
    let (mut low, mut high) = (0, 0);
    for (&size, &stride) in drawn.layout.sizes.iter().zip(&drawn.layout.strides) {
        let reach = (size - 1).max(0) * stride;
        low += reach.min(0);
        high += reach.max(0);
    }
    let size = drawn.dtype.size();
    let bytes = drawn.misaligned.0 + (high - low + 1) as usize * size;
    let mut random = Random(drawn.seed);
    ((0..bytes).map(|_| random.next() as u8).collect(), drawn.misaligned.0 + (-low) as usize * size)
}

fn range(drawn: &Drawn) -> std::ops::Range<usize> {
    let numel = drawn.layout.numel().unwrap();
    let (a, b) = (drawn.range.0.index(numel + 1), drawn.range.1.index(numel + 1));
    // Often the whole.
    if drawn.seed.is_multiple_of(3) { 0..numel } else { a.min(b)..a.max(b) }
}

fn at(origin: usize, layout: &Layout, index: usize, size: usize) -> usize {
    (origin as i64 + place(layout, index) * size as i64) as usize
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(800) })]

    #[test]
    fn pack_reads_elements_in_logical_order(drawn in drawn(true)) {
        let (memory, origin) = memory(&drawn);
        let (layout, size, range) = (&drawn.layout, drawn.dtype.size(), range(&drawn));
        let mut want = vec![7u8; drawn.misaligned.1];
        for index in range.clone() {
            want.extend(turned(layout, drawn.dtype, &memory[at(origin, layout, index, size)..][..size]));
        }
        want.extend([7u8; 32]);
        let mut got = vec![7u8; want.len()];
        let into = got[drawn.misaligned.1..].as_mut_ptr();
        // SAFETY: `memory` spans the layout from its lowest element to its highest; `got` has room for the range.
        unsafe { pack(layout, drawn.dtype, memory.as_ptr().add(origin), into, range) };
        prop_assert_eq!(got, want);
    }

    #[test]
    fn unpack_writes_these_elements_and_no_others(drawn in drawn(false)) {
        prop_assert!(!drawn.layout.may_overlap());
        let (mut memory, origin) = memory(&drawn);
        let (layout, size, range) = (&drawn.layout, drawn.dtype.size(), range(&drawn));
        let mut random = Random(!drawn.seed);
        let flat: Vec<u8> = (0..drawn.misaligned.1 + range.len() * size).map(|_| random.next() as u8).collect();
        let flat = &flat[drawn.misaligned.1..];
        let mut want = memory.clone();
        for (index, element) in range.clone().zip(flat.chunks(size)) {
            want[at(origin, layout, index, size)..][..size].copy_from_slice(&turned(layout, drawn.dtype, element));
        }
        // SAFETY: as for packing; no two elements overlap.
        unsafe { unpack(layout, drawn.dtype, flat.as_ptr(), memory.as_mut_ptr().add(origin), range) };
        prop_assert!(memory == want);
    }

    #[test]
    fn copy_copies(bytes in prop::collection::vec(any::<u8>(), 0..5000), offset in 0usize..16) {
        let mut target = vec![0u8; bytes.len() + offset];
        // SAFETY: two vectors with room for `bytes`, then one with itself.
        unsafe {
            copy(target[offset..].as_mut_ptr(), bytes.as_ptr(), bytes.len());
            let same = target[offset..].as_mut_ptr();
            copy(same, same, bytes.len());
        }
        prop_assert_eq!(&target[offset..], &bytes[..]);
    }
}

/// Steps of a transposed matrix put together are the whole; sizes that fill tiles and lines more than once.
#[test]
fn steps_make_a_whole() {
    let (rows, columns) = (301usize, 207usize);
    let layout = Layout {
        sizes: SmallVec::from_slice(&[columns as i64, rows as i64]),
        strides: SmallVec::from_slice(&[1, columns as i64]),
        conj: false,
        neg: false,
    };
    let numel = rows * columns;
    let matrix: Vec<u32> = (0..numel as u32).collect();
    let want: Vec<u32> = (0..columns).flat_map(|c| (0..rows).map(move |r| (r * columns + c) as u32)).collect();
    let (mut flat, mut back) = (vec![0u32; numel], vec![0u32; numel]);
    for start in (0..numel).step_by(10_000) {
        let range = start..numel.min(start + 10_000);
        let step = flat[start..].as_mut_ptr().cast::<u8>();
        // SAFETY: the matrix has the layout's elements, and `flat` all of them in a row.
        unsafe {
            pack(&layout, DType::I32, matrix.as_ptr().cast(), step, range.clone());
            unpack(&layout, DType::I32, step.cast_const(), back.as_mut_ptr().cast(), range);
        }
    }
    assert_eq!(flat, want);
    assert_eq!(back, matrix);
}
