//! Slices and groups for property tests.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use podring_topology::{Generation, Slice, parse};
use proptest::prelude::*;

/// Names of valid slices of every generation, small enough to check exhaustively.
pub fn slice_names() -> Vec<String> {
    let mut names = Vec::new();
    for generation in Generation::ALL {
        let extents: &[u32] = &[1, 2, 4, 8, 16];
        for &x in extents {
            for &y in extents {
                if generation.dimensions() == 2 {
                    names.push(format!("{generation}:{x}x{y}"));
                } else {
                    names.extend([1, 2, 4, 8, 12].iter().map(|z| format!("{generation}:{x}x{y}x{z}")));
                }
            }
        }
    }
    for shape in ["4x4x8", "8x4x4", "4x8x4", "4x8x8", "8x8x4", "8x4x8", "8x8x16"] {
        names.push(format!("v5p:{shape}_twisted"));
        names.push(format!("tpu7x:{shape}_twisted"));
    }
    names.retain(|name| parse(name).is_ok_and(|slice| slice.devices() <= 2048));
    names
}

/// Any valid slice of up to 512 devices, one to three of them.
pub fn any_slice() -> impl Strategy<Value = Slice> {
    let names: Vec<String> = slice_names().into_iter().filter(|name| parse(name).unwrap().devices() <= 512).collect();
    (proptest::sample::select(names), 1u32..=3).prop_map(|(name, slices)| parse(&format!("{name}*{slices}")).unwrap())
}

/// A single slice of up to `most` devices.
pub fn lone_slice(most: u32) -> impl Strategy<Value = Slice> {
    let names: Vec<String> = slice_names().into_iter().filter(|name| parse(name).unwrap().devices() <= most).collect();
    proptest::sample::select(names).prop_map(|name| parse(&name).unwrap())
}

/// A slice and a non-empty set of its ranks in any order.
pub fn slice_and_ranks() -> impl Strategy<Value = (Slice, Vec<u32>)> {
    any_slice().prop_flat_map(|slice| {
        let all: Vec<u32> = (0..slice.devices()).collect();
        let most = all.len().min(24);
        (Just(slice), proptest::sample::subsequence(all, 1..=most).prop_shuffle())
    })
}

/// A slice and a mesh of its devices with one to four axes.
pub fn slice_and_mesh(most: u32) -> impl Strategy<Value = (Slice, Vec<u32>)> {
    (lone_slice(most), proptest::collection::vec(any::<proptest::sample::Index>(), 3)).prop_map(|(slice, picks)| {
        let mut left = slice.devices();
        let mut sizes = Vec::new();
        for pick in picks {
            let divisors: Vec<u32> = (1..=left).filter(|d| left % d == 0).collect();
            let size = divisors[pick.index(divisors.len())];
            sizes.push(size);
            left /= size;
        }
        sizes.push(left);
        (slice, sizes)
    })
}

/// The group on a box of a slice: `start`, `count` and `stride` per axis.
pub fn box_ranks(slice: &Slice, extents: [(u32, u32, u32); 3], cores: &[u32]) -> Vec<u32> {
    let dims = slice.dims();
    let mut ranks = Vec::new();
    for z in 0..extents[2].1 {
        for y in 0..extents[1].1 {
            for x in 0..extents[0].1 {
                let step = [x, y, z];
                let coords = std::array::from_fn(|axis| (extents[axis].0 + step[axis] * extents[axis].2) % dims[axis]);
                ranks.extend(cores.iter().map(|&core| slice.rank_at(0, coords, core).unwrap()));
            }
        }
    }
    ranks
}
