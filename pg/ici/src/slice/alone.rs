//! Which sets of devices libtpu 0.0.52 takes as all the devices of a program.
//!
//! It looks whether a set is a part of the slice that could be a slice itself, and then compiles for that one. Where the
//! two don't agree it refuses the program, or ends its process. Seen by compiling small programs (all-reduce, all-gather,
//! reduce-scatter, all-to-all) for sets of devices of slices of v4, v5e, v5p, v6e and tpu7x that aren't here: every box
//! of the small slices, some of the large, boxes with gaps, random sets. The rule refuses more than libtpu does.

use podring_topology::{
    Generation, Slice, TopologyError,
    group::{Extent, classify},
};

/// The largest 2-D slice on which boxes at its corner were taken.
const ONE_HOST: [u32; 3] = [2, 2, 1];

/// Chips of the largest 2-D slice on which other sets than boxes were taken: beyond, the compiler speaks of "limited ICI
/// routing".
const ROUTED: u32 = 16;

/// Whether a program on these devices alone is sure to be taken, where each process holds one chip (as the engine has
/// it: with more, libtpu also refuses boxes that are neither within a host nor made of whole ones).
pub(super) fn taken(slice: &Slice, members: &[u32]) -> Result<bool, TopologyError> {
    let group = classify(slice, members)?;
    if group.size == slice.devices_per_slice() && group.slices == 1 {
        return Ok(true);
    }
    let flat = match slice.generation() {
        // Never tried.
        Generation::V2 | Generation::V3 => return Ok(false),
        // Every set that was tried, of one core and of two.
        Generation::V4 => return Ok(true),
        generation => generation.dimensions() == 2,
    };
    let large = flat && slice.chips_per_slice() > ROUTED;
    let Some(extents) = group.extents else { return Ok(!large) };
    let corner = extents.iter().all(|extent| extent.start == 0);
    if group.size == 1 {
        return Ok(!(large && corner));
    }
    if !flat {
        return Ok(group.cores == slice.devices_per_chip());
    }
    if slice.dims().iter().zip(ONE_HOST).all(|(&length, most)| length <= most) {
        return Ok(true);
    }
    let wide: Vec<&Extent> = extents.iter().filter(|extent| extent.count > 1).collect();
    let gaps = extents.iter().zip(slice.dims()).any(|(extent, length)| {
        let Extent { start, count, stride, .. } = *extent;
        count > 1 && (stride > 1 || start + count > length)
    });
    let odd = wide.iter().all(|extent| extent.count % 2 == 1);
    Ok(!corner && if wide.len() > 1 { !gaps && !odd } else { !gaps || !large })
}

#[cfg(test)]
mod tests {
    use super::*;
    use podring_topology::parse;

    /// A box with gaps: where it starts, its extents, its strides, and the cores of each chip.
    type Set = ([u32; 3], [u32; 3], [u32; 3], u32);

    fn is_taken(name: &str, (start, counts, strides, cores): Set) -> bool {
        let slice = parse(name).unwrap();
        let mut ranks = Vec::new();
        for index in 0..counts.iter().product() {
            let [x, y, _] = counts;
            let inside = [index % x, index / x % y, index / x / y];
            let coords = std::array::from_fn(|axis| start[axis] + inside[axis] * strides[axis]);
            ranks.extend((0..cores).map(|core| slice.rank_at(0, coords, core).unwrap()));
        }
        taken(&slice, &ranks).unwrap()
    }

    const NEXT: [u32; 3] = [1, 1, 1];

    /// Sets that libtpu refused, or at which it ended its process.
    #[test]
    fn what_was_refused_is_not_called_sure() {
        let refused: &[(&str, Set)] = &[
            // At the corner: "Unexpected device_id", and 4x3 and (all-gather) 2x2 ended the process.
            ("v5e:4x4", ([0, 0, 0], [1, 4, 1], NEXT, 1)),
            ("v5e:4x4", ([0, 0, 0], [2, 2, 1], NEXT, 1)),
            ("v5e:4x4", ([0, 0, 0], [2, 4, 1], NEXT, 1)),
            ("v5e:4x4", ([0, 0, 0], [3, 4, 1], NEXT, 1)),
            ("v5e:4x4", ([0, 0, 0], [4, 3, 1], NEXT, 1)),
            ("v6e:4x4", ([0, 0, 0], [2, 2, 1], NEXT, 1)),
            ("v5e:4x2", ([0, 0, 0], [2, 2, 1], NEXT, 1)),
            ("v5e:2x4", ([0, 0, 0], [2, 3, 1], NEXT, 1)),
            // On larger slices every one there: "device_count == …".
            ("v5e:4x8", ([0, 0, 0], [2, 1, 1], NEXT, 1)),
            ("v5e:4x8", ([0, 0, 0], [1, 8, 1], NEXT, 1)),
            ("v5e:8x8", ([0, 0, 0], [8, 1, 1], NEXT, 1)),
            ("v5e:16x16", ([0, 0, 0], [12, 10, 1], NEXT, 1)),
            // Nor one with gaps anywhere, nor the chip itself (all-to-all).
            ("v5e:4x8", ([1, 1, 0], [1, 3, 1], [1, 2, 1], 1)),
            ("v5e:8x8", ([0, 0, 0], [1, 1, 1], NEXT, 1)),
            // Of two odd sides.
            ("v5e:4x8", ([0, 1, 0], [3, 5, 1], NEXT, 1)),
            ("v5e:4x8", ([1, 1, 0], [3, 3, 1], NEXT, 1)),
            // With gaps, in two dimensions.
            ("v5e:4x4", ([0, 1, 0], [2, 2, 1], [1, 2, 1], 1)),
            ("v5e:4x4", ([1, 0, 0], [3, 2, 1], [1, 2, 1], 1)),
            ("v5e:4x4", ([1, 2, 0], [2, 2, 1], [2, 1, 1], 1)),
            // One core of each chip: "SupportSubslices".
            ("tpu7x:2x2x2", ([0, 0, 1], [1, 2, 1], NEXT, 1)),
            ("tpu7x:2x2x2", ([1, 0, 0], [1, 2, 1], NEXT, 1)),
        ];
        for (name, set) in refused {
            assert!(!is_taken(name, *set), "{name} {set:?}");
        }
        // No box at all, on slices of "limited ICI routing".
        for name in ["v5e:4x8", "v5e:16x16"] {
            assert!(!super::taken(&parse(name).unwrap(), &[1, 5, 6]).unwrap(), "{name}");
        }
    }

    /// Sets that it took, of kinds that meshes have.
    #[test]
    fn what_was_taken_by_rule_is_called_sure() {
        let taken: &[(&str, Set)] = &[
            ("v5e:4x4", ([3, 2, 0], [1, 1, 1], NEXT, 1)),
            ("v5e:4x4", ([1, 0, 0], [1, 4, 1], NEXT, 1)),
            ("v5e:4x4", ([0, 3, 0], [4, 1, 1], NEXT, 1)),
            ("v5e:4x4", ([2, 0, 0], [2, 2, 1], NEXT, 1)),
            ("v5e:4x4", ([2, 0, 0], [2, 4, 1], NEXT, 1)),
            ("v5e:4x4", ([1, 1, 0], [1, 2, 1], [1, 2, 1], 1)),
            ("v5e:4x8", ([0, 1, 0], [4, 1, 1], NEXT, 1)),
            ("v5e:16x16", ([5, 0, 0], [1, 16, 1], NEXT, 1)),
            ("v6e:8x8", ([2, 2, 0], [2, 4, 1], NEXT, 1)),
            ("v5e:2x2", ([0, 0, 0], [2, 1, 1], NEXT, 1)),
            ("v5e:2x2", ([0, 0, 0], [1, 2, 1], NEXT, 1)),
            ("v5p:2x2x2", ([0, 0, 0], [2, 2, 1], NEXT, 1)),
            ("v5p:2x2x2", ([1, 0, 0], [1, 2, 2], NEXT, 1)),
            ("v5p:4x4x4", ([0, 0, 0], [4, 1, 1], NEXT, 1)),
            ("v5p:4x4x4", ([0, 1, 0], [2, 2, 2], [2, 1, 2], 1)),
            ("v4:2x2x2", ([0, 1, 0], [2, 1, 2], NEXT, 2)),
            ("v4:2x2x2", ([0, 1, 0], [2, 1, 2], NEXT, 1)),
            ("tpu7x:2x2x2", ([0, 1, 0], [2, 1, 1], NEXT, 2)),
        ];
        for (name, set) in taken {
            assert!(is_taken(name, *set), "{name} {set:?}");
        }
        // Sets that are no boxes.
        for ranks in [&[0, 3, 5][..], &[0, 7, 9, 14], &[1, 2, 3, 4, 6]] {
            assert!(super::taken(&parse("v5e:4x4").unwrap(), ranks).unwrap(), "{ranks:?}");
        }
    }
}
