//! What shape a set of ranks has on the slice.

use crate::{error::TopologyError, slice::Slice};

/// The members of a group along one axis: `start, start + stride, …`, modulo the length where the axis wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// First coordinate.
    pub start: u32,
    /// Number of coordinates.
    pub count: u32,
    /// Distance between neighbours, in hops.
    pub stride: u32,
    /// Whether the last is a neighbour of the first: the members close into a ring.
    pub wrap: bool,
}

/// Classes of groups, from the best connected to the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// One device.
    Single,
    /// Devices of one chip.
    Cores,
    /// Every device of a slice (or of all slices).
    Whole,
    /// All of an axis that wraps.
    Ring,
    /// A piece of an axis, or all of one that does not wrap.
    Line,
    /// A box in two or three axes.
    SubTorus,
    /// A box with gaps: its rings cross chips of other groups.
    Strided,
    /// One device in each of several slices: only the data-centre network joins them.
    Slices,
    /// The same box in several slices.
    MultiSlice,
    /// Anything else.
    Irregular,
}

impl GroupKind {
    /// The class as text, as in `podring topo --json`.
    pub const fn name(self) -> &'static str {
        match self {
            GroupKind::Single => "single",
            GroupKind::Cores => "cores",
            GroupKind::Whole => "whole",
            GroupKind::Ring => "ring",
            GroupKind::Line => "line",
            GroupKind::SubTorus => "sub-torus",
            GroupKind::Strided => "strided",
            GroupKind::Slices => "slices",
            GroupKind::MultiSlice => "multi-slice",
            GroupKind::Irregular => "irregular",
        }
    }
}

/// A group and its shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Its class.
    pub kind: GroupKind,
    /// Ranks in it.
    pub size: u32,
    /// Slices it touches.
    pub slices: u32,
    /// Devices on each of its chips, if it is regular.
    pub cores: u32,
    /// Extents along x, y, z; none for irregular groups.
    pub extents: Option<[Extent; 3]>,
}

impl Group {
    /// The axes (0 to 2) along which a regular group has more than one chip.
    pub fn axes(&self) -> impl Iterator<Item = usize> + '_ {
        (0..3).filter(|&axis| self.extents.is_some_and(|extents| extents[axis].count > 1))
    }
}

/// Checks that ranks exist and are distinct.
pub(crate) fn check_ranks(slice: &Slice, ranks: &[u32]) -> Result<(), TopologyError> {
    let devices = slice.devices();
    if ranks.is_empty() {
        return Err(TopologyError::EmptyGroup);
    }
    let mut seen = vec![false; devices as usize];
    for &rank in ranks {
        match seen.get_mut(rank as usize) {
            None => {
                return Err(TopologyError::RankOutOfRange { rank: u64::from(rank), devices: u64::from(devices) });
            }
            Some(seen) if *seen => return Err(TopologyError::DuplicateRank { rank }),
            Some(seen) => *seen = true,
        }
    }
    Ok(())
}

/// Classifies a set of ranks. The order of the ranks does not matter.
pub fn classify(slice: &Slice, ranks: &[u32]) -> Result<Group, TopologyError> {
    check_ranks(slice, ranks)?;
    Ok(classify_checked(slice, ranks))
}

/// [`classify`] for ranks known to exist and to be distinct.
pub(crate) fn classify_checked(slice: &Slice, ranks: &[u32]) -> Group {
    let dims = slice.dims();
    let mut seen: [Vec<bool>; 3] = std::array::from_fn(|axis| vec![false; dims[axis] as usize]);
    let mut cores = 0u32;
    let mut slices = vec![false; slice.slices() as usize];
    for device in ranks.iter().filter_map(|&rank| slice.device(rank)) {
        for axis in 0..3 {
            seen[axis][device.coords[axis] as usize] = true;
        }
        cores |= 1 << device.core;
        slices[device.slice as usize] = true;
    }
    let size = ranks.len() as u32;
    let core_count = cores.count_ones();
    let slice_count = slices.iter().filter(|&&seen| seen).count() as u32;
    let irregular = Group { kind: GroupKind::Irregular, size, slices: slice_count, cores: core_count, extents: None };
    let places = seen.iter().map(|axis| axis.iter().filter(|&&seen| seen).count() as u64).product::<u64>()
        * u64::from(core_count)
        * u64::from(slice_count);
    if places != u64::from(size) {
        return irregular;
    }
    let mut extents = [Extent { start: 0, count: 1, stride: 1, wrap: false }; 3];
    for axis in 0..3 {
        match progression(&seen[axis], slice.wraps_straight(axis)) {
            Some(extent) => extents[axis] = extent,
            None => return irregular,
        }
    }
    close_rings(slice, &mut extents);
    let group =
        Group { kind: GroupKind::Irregular, size, slices: slice_count, cores: core_count, extents: Some(extents) };
    Group { kind: kind_of(slice, &group, &extents), ..group }
}

fn kind_of(slice: &Slice, group: &Group, extents: &[Extent; 3]) -> GroupKind {
    let active = extents.iter().filter(|extent| extent.count > 1);
    if group.size == 1 {
        GroupKind::Single
    } else if group.size == slice.devices() || (group.slices == 1 && group.size == slice.devices_per_slice()) {
        GroupKind::Whole
    } else if group.slices > 1 {
        if group.size == group.slices { GroupKind::Slices } else { GroupKind::MultiSlice }
    } else if active.clone().any(|extent| extent.stride > 1) {
        GroupKind::Strided
    } else {
        match active.clone().count() {
            0 => GroupKind::Cores,
            1 if active.clone().any(|extent| extent.wrap) => GroupKind::Ring,
            1 => GroupKind::Line,
            _ => GroupKind::SubTorus,
        }
    }
}

/// Sets `wrap` of each extent: the axis wraps, the members go all the way round, and in a twisted torus the step over
/// the wrap lands on a member.
pub(crate) fn close_rings(slice: &Slice, extents: &mut [Extent; 3]) {
    let dims = slice.dims();
    let cyclic = |extent: &Extent, axis: usize| extent.count * extent.stride == dims[axis];
    let closed: [bool; 3] = std::array::from_fn(|axis| {
        let extent = &extents[axis];
        slice.wrap()[axis]
            && dims[axis] > 2
            && extent.count > 1
            && cyclic(extent, axis)
            && (0..3).all(|other| {
                let shift = slice.twist(axis, other);
                shift == 0 || (cyclic(&extents[other], other) && shift.is_multiple_of(extents[other].stride))
            })
    });
    for axis in 0..3 {
        extents[axis].wrap = closed[axis];
    }
}

/// The marked places as an arithmetic progression, going over the end if the axis wraps.
fn progression(marked: &[bool], wrap: bool) -> Option<Extent> {
    let length = marked.len() as u32;
    let places: Vec<u32> = (0..length).filter(|&place| marked[place as usize]).collect();
    let count = places.len() as u32;
    let &first = places.first()?;
    if count == 1 {
        return Some(Extent { start: first, count, stride: 1, wrap: false });
    }
    let stride = places[1] - first;
    if wrap && count == 2 && length - stride < stride {
        // Nearer to each other over the end.
        return Some(Extent { start: places[1], count, stride: length - stride, wrap: false });
    }
    if places.windows(2).all(|pair| pair[1] - pair[0] == stride) {
        return Some(Extent { start: first, count, stride, wrap: false });
    }
    if !wrap {
        return None;
    }
    // An arc over the end: all gaps but the largest are equal.
    let gap = |index: usize| {
        let next = places[(index + 1) % places.len()];
        if next > places[index] { next - places[index] } else { next + length - places[index] }
    };
    let largest = (0..places.len()).max_by_key(|&index| gap(index))?;
    let start = (largest + 1) % places.len();
    let stride = gap(start);
    let even = (0..places.len()).filter(|&index| index != largest).all(|index| gap(index) == stride);
    even.then_some(Extent { start: places[start], count, stride, wrap: false })
}

/// Hops between the two members of a group that are furthest apart, over any links of the slice.
///
/// Members in different slices are not joined by hops and are left out.
pub fn diameter(slice: &Slice, ranks: &[u32]) -> Result<u32, TopologyError> {
    let group = classify(slice, ranks)?;
    if let Some(extents) = group.extents.filter(|_| !slice.twisted()) {
        let reach = |axis: usize| {
            let Extent { count, stride, .. } = extents[axis];
            (0..count)
                .map(|step| crate::link::straight(0, step * stride, slice.dims()[axis], slice.wrap()[axis]))
                .max()
                .unwrap_or(0)
        };
        return Ok((0..3).map(reach).sum());
    }
    let mut chips: Vec<(u32, [u32; 3])> =
        ranks.iter().filter_map(|&rank| slice.device(rank)).map(|device| (device.slice, device.coords)).collect();
    chips.sort_unstable();
    chips.dedup();
    // A whole torus looks the same from every chip.
    let from = if group.kind == GroupKind::Whole { &chips[..1] } else { &chips[..] };
    let mut furthest = 0;
    for &(slice_a, a) in from {
        for &(slice_b, b) in &chips {
            if slice_a == slice_b {
                furthest = furthest.max(slice.distance(a, b));
            }
        }
    }
    Ok(furthest)
}
