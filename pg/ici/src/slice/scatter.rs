//! A reduce-scatter over a whole slice: at once, or along one axis after the other.
//!
//! Where libtpu 0.0.52 would run an all-reduce in several dimensions at once, it takes a reduce-scatter apart, into that
//! all-reduce and a slice: twice the bytes. Its log says so ("Plain all-reduce may use ND algorithm", "Cannot recognize
//! reduce-scatter", "Decompose"), and no layout, scatter dimension, order of the group, size or option that was tried
//! changes it (docs/ici.md). Along one axis it keeps a reduce-scatter; so one along each axis is one over both.

use std::collections::{BTreeMap, HashMap};

use podring_topology::{Generation, Slice, TopologyError, cost};

use super::SliceError;
use crate::program::Groups;

/// The model's times are no better than this: steps that take up to as much longer are taken, for they send half the
/// bytes, need no second buffer of the whole size, and compile to a quarter of the code.
const MARGIN: f64 = 1.15;

/// At this many bytes two orders of the axes are compared.
const LARGE: u64 = 64 << 20;

/// Whether libtpu takes a reduce-scatter over the whole slice apart, as far as it was tried: 2-D slices whose sides are
/// equal and at least 4, 3-D slices with x = y, and two devices on each chip of a 2-D one; not on tpu7x.
fn takes_apart(slice: &Slice) -> bool {
    let [x, y, z] = slice.dims();
    let deep = z > 1 || slice.devices_per_chip() > 1;
    let tried = matches!(slice.generation(), Generation::V4 | Generation::V5e | Generation::V5p | Generation::V6e);
    tried && slice.slices() == 1 && x == y && x > 1 && (x >= 4 || deep)
}

/// Predicted time of a reduce-scatter of `bytes` (of a rank's input) over the whole slice, as these groups do it; none
/// where libtpu does it at once.
pub fn reduce_scatter_us(slice: &Slice, groups: &Groups, bytes: u64) -> Result<Option<f64>, TopologyError> {
    if !takes_apart(slice) || groups.size() != slice.devices() as usize {
        return Ok(None);
    }
    let all: Vec<u32> = (0..slice.devices()).collect();
    let at_once = cost::predict(slice, &all, cost::Collective::AllReduce, bytes)?.total_us();
    let steps = groups.steps.as_ref().filter(|steps| steps.serve(bytes));
    Ok(Some(if steps.is_some() { steps_us(slice, groups, bytes)? } else { at_once }))
}

/// Adds the steps to the group of every device, whose replica n is rank n, where they are worth it.
pub(super) fn in_steps(slice: &Slice, groups: Groups) -> Result<Groups, SliceError> {
    // On three axes an all-reduce on all links at once is faster by half: libtpu runs steps one after another.
    if !takes_apart(slice) || slice.dims()[2] > 1 || slice.devices_per_chip() > 1 {
        return Ok(groups);
    }
    let all: Vec<u32> = (0..slice.devices()).collect();
    let mut best: Option<(f64, Vec<Vec<Vec<u32>>>)> = None;
    for order in [[0, 1], [1, 0]] {
        let steps: Vec<Vec<Vec<u32>>> = order.iter().map(|&axis| lines(slice, axis)).collect();
        let us = steps_us(slice, &groups.clone().in_steps(steps.clone(), u64::MAX)?, LARGE)?;
        if best.as_ref().is_none_or(|(least, _)| us < *least) {
            best = Some((us, steps));
        }
    }
    let Some((_, steps)) = best else { return Ok(groups) };
    let stepped = groups.clone().in_steps(steps, u64::MAX)?;
    let mut sizes = 0;
    for exponent in 0..u64::BITS {
        let bytes = 1u64 << exponent;
        let at_once = cost::predict(slice, &all, cost::Collective::AllReduce, bytes)?.total_us();
        if steps_us(slice, &stepped, bytes)? <= MARGIN * at_once {
            sizes |= bytes;
        }
    }
    match &stepped.steps {
        Some(steps) if sizes != 0 => Ok(groups.in_steps(steps.groups.clone(), sizes)?),
        _ => Ok(groups),
    }
}

/// Every line along an axis, in the order of coordinates.
fn lines(slice: &Slice, axis: usize) -> Vec<Vec<u32>> {
    let mut lines = BTreeMap::<[u32; 3], Vec<(u32, u32)>>::new();
    for device in (0..slice.devices()).filter_map(|rank| slice.device(rank).map(|device| (rank, device))) {
        let (rank, mut place) = (device.0, device.1.coords);
        let along = std::mem::take(&mut place[axis]);
        lines.entry(place).or_default().push((along, rank));
    }
    let ranks = |mut line: Vec<(u32, u32)>| {
        line.sort_unstable();
        line.into_iter().map(|(_, rank)| rank).collect()
    };
    lines.into_values().map(ranks).collect()
}

/// The steps one after another, each with its fixed cost, and the last blocks' way home.
fn steps_us(slice: &Slice, groups: &Groups, bytes: u64) -> Result<f64, TopologyError> {
    let Some(steps) = &groups.steps else { return Ok(f64::INFINITY) };
    let (mut us, mut left) = (0.0, bytes);
    for step in &steps.groups {
        us += cost::predict(slice, &step[0], cost::Collective::ReduceScatter, left)?.total_us();
        left /= step[0].len() as u64;
    }
    if steps.moves.is_empty() {
        return Ok(us);
    }
    // A shift by one hop is one block on each link; here the busiest link has more.
    let shift = cost::predict(slice, &steps.groups[0][0], cost::Collective::Permute, left)?;
    let launch = shift.estimates.first().map_or(0.0, |estimate| estimate.launch_us);
    Ok(us + launch + busiest(slice, &steps.moves) * (shift.total_us() - launch))
}

/// Messages on the busiest link.
fn busiest(slice: &Slice, moves: &[(u32, u32)]) -> f64 {
    let mut loads = HashMap::new();
    for &(from, to) in moves {
        if let (Some(from), Some(to)) = (slice.device(from), slice.device(to)) {
            for link in slice.route(from.coords, to.coords) {
                *loads.entry(link).or_insert(0u32) += 1;
            }
        }
    }
    f64::from(loads.into_values().max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use podring_topology::parse;

    fn whole(name: &str, order: impl Fn(&Slice, u32) -> (u32, u32)) -> (Slice, Groups) {
        let slice = parse(name).unwrap();
        let mut ranks: Vec<u32> = (0..slice.devices()).collect();
        ranks.sort_by_key(|&rank| order(&slice, rank));
        let groups = in_steps(&slice, Groups::new(vec![ranks]).unwrap()).unwrap();
        (slice, groups)
    }

    fn list(_: &Slice, rank: u32) -> (u32, u32) {
        (rank, 0)
    }

    fn rows(slice: &Slice, rank: u32) -> (u32, u32) {
        let coords = slice.device(rank).unwrap().coords;
        (coords[1], coords[0])
    }

    #[test]
    fn squares_go_axis_by_axis_and_what_libtpu_keeps_goes_at_once() {
        for name in ["v5e:4x4", "v5e:8x8", "v5e:16x16", "v6e:4x4", "v6e:8x8", "v6e:16x16"] {
            for ordered in [false, true] {
                let (slice, groups) = whole(name, if ordered { rows } else { list });
                let steps = groups.steps.as_ref().unwrap_or_else(|| panic!("{name}, {ordered}"));
                assert_eq!(steps.groups.len(), 2, "{name}");
                assert!(steps.serve(LARGE) && steps.serve(LARGE << 8), "{name} {:b}", steps.sizes);
                // In rows, everybody ends with its own block.
                assert_eq!(steps.moves.is_empty(), ordered, "{name}");
                let us = reduce_scatter_us(&slice, &groups, LARGE).unwrap().unwrap();
                let all: Vec<u32> = (0..slice.devices()).collect();
                let flat = cost::predict(&slice, &all, cost::Collective::AllReduce, LARGE).unwrap().total_us();
                assert!(us <= MARGIN * flat, "{name}: {us} against {flat}");
            }
        }
        for name in ["v5e:2x2", "v5e:4x8", "v6e:8x16", "v5p:4x4x4", "v5p:2x4x4", "v4:2x2x4", "tpu7x:2x2x1", "v5e:4x4*2"]
        {
            assert_eq!(whole(name, list).1.steps, None, "{name}");
        }
    }

    #[test]
    fn small_messages_go_where_the_model_says() {
        // 16x16 that wraps, in rows: 8 hops along each axis, an all-reduce has twice both; a second fixed cost is less.
        let (_, rings) = whole("v5e:16x16", rows);
        let rings = rings.steps.unwrap();
        assert!(rings.serve(16) && rings.serve(1 << 20));
        // In between, where the first step's bytes and the second's hops count.
        assert!(!rings.serve(4 << 20));
        // In libtpu's order blocks have to go home: a third step, too much for few bytes.
        let (slice, square) = whole("v5e:4x4", list);
        assert!(!square.steps.as_ref().unwrap().serve(16));
        let us = reduce_scatter_us(&slice, &square, 16).unwrap();
        let all: Vec<u32> = (0..16).collect();
        let flat = cost::predict(&slice, &all, cost::Collective::AllReduce, 16).unwrap().total_us();
        assert_eq!(us, Some(flat));
        assert_eq!(reduce_scatter_us(&parse("v5e:4x8").unwrap(), &Groups::all(32), LARGE).unwrap(), None);
    }

    /// Each axis by itself uses a third of the links that an all-reduce over all three uses at once: half the bytes take half
    /// as long again, even if no block has to go home.
    #[test]
    fn on_three_axes_steps_are_slower_in_any_order() {
        for name in ["v5p:2x2x2", "v5p:4x4x4", "v5p:4x4x8", "v5p:8x8x8", "v5p:8x8x16"] {
            let slice = parse(name).unwrap();
            let all: Vec<u32> = (0..slice.devices()).collect();
            let flat = cost::predict(&slice, &all, cost::Collective::AllReduce, LARGE).unwrap().total_us();
            for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
                let (mut us, mut left) = (0.0, LARGE);
                for axis in order {
                    let line = &lines(&slice, axis)[0];
                    us += cost::predict(&slice, line, cost::Collective::ReduceScatter, left).unwrap().total_us();
                    left /= line.len() as u64;
                }
                eprintln!("{name} {order:?}: {us:.1} µs against {flat:.1}");
                assert!(us > 1.3 * flat, "{name} {order:?}: {us} against {flat}");
            }
        }
    }

    /// Who has contributed to which block, followed through the steps: in the end each rank has its own, of everybody.
    #[test]
    fn steps_and_moves_are_a_reduce_scatter() {
        for name in ["v5e:4x4", "v5e:8x8", "v6e:16x16"] {
            let (slice, groups) = whole(name, list);
            let steps = groups.steps.as_ref().unwrap();
            let size = slice.devices() as usize;
            let mut held: Vec<Vec<(usize, Vec<u32>)>> =
                (0..slice.devices()).map(|rank| (0..size).map(|block| (block, vec![rank])).collect()).collect();
            for step in &steps.groups {
                let before = held.clone();
                for line in step {
                    for (position, &member) in line.iter().enumerate() {
                        let share = before[member as usize].len() / line.len();
                        held[member as usize] = (position * share..(position + 1) * share)
                            .map(|place| {
                                let block = before[member as usize][place].0;
                                let of = |&rank: &u32| {
                                    assert_eq!(before[rank as usize][place].0, block);
                                    before[rank as usize][place].1.clone()
                                };
                                (block, line.iter().flat_map(of).collect())
                            })
                            .collect();
                    }
                }
            }
            let mut home = held.clone();
            for &(from, to) in &steps.moves {
                home[to as usize] = held[from as usize].clone();
            }
            for (rank, blocks) in home.into_iter().enumerate() {
                let [(block, mut from)] = <[_; 1]>::try_from(blocks).unwrap();
                from.sort_unstable();
                assert_eq!((block, from), (rank, (0..slice.devices()).collect::<Vec<_>>()), "{name}");
            }
        }
    }
}
