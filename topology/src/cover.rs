//! Replica groups: libtpu compiles a collective only for groups of equal size that hold every device once.
//! Unequal sizes, padding with -1 and partial covers are refused by libtpu 0.0.52.

use crate::{
    error::TopologyError,
    group::{Group, check_ranks, classify_checked},
    slice::Slice,
};

/// Groups of equal size that hold every rank once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cover {
    /// The groups; those asked for come first and keep their order.
    pub groups: Vec<Vec<u32>>,
    /// How the rest was filled.
    pub filling: Filling,
}

/// Where the groups nobody asked for come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Filling {
    /// There are none: the groups asked for cover everything.
    Complete,
    /// They are the first group moved about: every group has its shape, so none is slower.
    Translated,
    /// The first group doesn't tile the slice: the rest is cut in list order and may be slower.
    ListOrder,
}

/// Completes disjoint groups of equal size to a cover of the slice.
///
/// A cover exists exactly if the groups' size divides the number of devices; otherwise [`TopologyError::NoCover`].
pub fn cover(slice: &Slice, groups: &[Vec<u32>]) -> Result<Cover, TopologyError> {
    let Some(first) = groups.first() else { return Err(TopologyError::EmptyGroup) };
    let size = first.len();
    for (index, group) in groups.iter().enumerate() {
        if group.len() != size {
            return Err(TopologyError::UnequalGroups { index, size: group.len(), first: size });
        }
    }
    check_ranks(slice, &groups.concat())?;
    let devices = slice.devices() as usize;
    if !devices.is_multiple_of(size) {
        return Err(TopologyError::NoCover { size, devices });
    }
    let mut result = groups.to_vec();
    if result.len() * size == devices {
        return Ok(Cover { groups: result, filling: Filling::Complete });
    }
    if let Some(translated) = translates(slice, first)
        && let Some(rest) = without(slice, &translated, groups)
    {
        result.extend(rest);
        return Ok(Cover { groups: result, filling: Filling::Translated });
    }
    let mut taken = vec![false; devices];
    for &rank in groups.iter().flatten() {
        taken[rank as usize] = true;
    }
    let free: Vec<u32> = (0..slice.devices()).filter(|&rank| !taken[rank as usize]).collect();
    result.extend(free.chunks(size).map(<[u32]>::to_vec));
    Ok(Cover { groups: result, filling: Filling::ListOrder })
}

/// Every translate of a regular group, if they tile the devices.
fn translates(slice: &Slice, ranks: &[u32]) -> Option<Vec<Vec<u32>>> {
    let group = classify_checked(slice, ranks);
    let shifts = axis_shifts(slice, &group)?;
    let cores = slice.devices_per_chip();
    if group.cores != 1 && group.cores != cores {
        return None;
    }
    let core_shifts = if group.cores == 1 { cores } else { 1 };
    let slice_shifts = match group.slices {
        1 => slice.slices(),
        all if all == slice.slices() => 1,
        _ => return None,
    };
    let devices: Vec<_> = ranks.iter().filter_map(|&rank| slice.device(rank)).collect();
    let mut tiles = Vec::new();
    for by_slice in 0..slice_shifts {
        for &z in &shifts[2] {
            for &y in &shifts[1] {
                for &x in &shifts[0] {
                    for by_core in 0..core_shifts {
                        let moved: Option<Vec<u32>> = devices
                            .iter()
                            .map(|device| {
                                let dims = slice.dims();
                                let coords = [
                                    (device.coords[0] + x) % dims[0],
                                    (device.coords[1] + y) % dims[1],
                                    (device.coords[2] + z) % dims[2],
                                ];
                                let core = if core_shifts == 1 { device.core } else { (device.core + by_core) % cores };
                                slice.rank_at((device.slice + by_slice) % slice.slices(), coords, core)
                            })
                            .collect();
                        tiles.push(moved?);
                    }
                }
            }
        }
    }
    Some(tiles)
}

/// Shifts along each axis that tile it with the group's extent. Extents of `count` with `stride` tile blocks of
/// `count * stride`, which must divide the axis and, where the axis does not wrap, must not be cut by its end.
fn axis_shifts(slice: &Slice, group: &Group) -> Option<[Vec<u32>; 3]> {
    let extents = group.extents?;
    let dims = slice.dims();
    let mut shifts: [Vec<u32>; 3] = Default::default();
    for axis in 0..3 {
        let extent = extents[axis];
        let block = extent.count * extent.stride;
        if !dims[axis].is_multiple_of(block) {
            return None;
        }
        // Moves are modulo the length; without a wrap they must keep lines inside their blocks.
        if !slice.wraps_straight(axis) && extent.start % block >= extent.stride {
            return None;
        }
        shifts[axis] = (0..dims[axis] / block)
            .flat_map(|by_block| (0..extent.stride).map(move |by_one| by_block * block + by_one))
            .map(|shift| {
                if slice.wraps_straight(axis) {
                    shift
                } else {
                    // Rotate within the grid of starts, so that the group itself is shift 0.
                    let start_block = extent.start / block;
                    let start_offset = extent.start % block;
                    let target_block = (start_block + shift / block) % (dims[axis] / block);
                    let target_offset = (start_offset + shift % block) % extent.stride;
                    (target_block * block + target_offset + dims[axis] - extent.start) % dims[axis]
                }
            })
            .collect();
    }
    Some(shifts)
}

/// The tiles that are none of the groups, if every group is one of the tiles.
fn without(slice: &Slice, tiles: &[Vec<u32>], groups: &[Vec<u32>]) -> Option<Vec<Vec<u32>>> {
    let mut tile_of = vec![usize::MAX; slice.devices() as usize];
    for (index, tile) in tiles.iter().enumerate() {
        for &rank in tile {
            if tile_of[rank as usize] != usize::MAX {
                return None;
            }
            tile_of[rank as usize] = index;
        }
    }
    let mut asked = vec![false; tiles.len()];
    for group in groups {
        let index = *tile_of.get(*group.first()? as usize)?;
        if index == usize::MAX || group.iter().any(|&rank| tile_of[rank as usize] != index) {
            return None;
        }
        asked[index] = true;
    }
    Some(tiles.iter().zip(asked).filter(|(_, asked)| !asked).map(|(tile, _)| tile.clone()).collect())
}
