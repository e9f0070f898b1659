//! Orders in which a group passes data round: a Hamiltonian cycle over links where one exists.

use crate::{
    error::TopologyError,
    group::{Extent, check_ranks, classify_checked},
    slice::Slice,
};

/// Steps that the search for a cycle through an irregular group may take before it gives up.
const SEARCH_STEPS: u32 = 200_000;
/// Largest irregular group, in chips, that is searched.
const SEARCH_CHIPS: usize = 128;

/// What is known of a cycle over the group's own links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hamiltonian {
    /// The order is one: every step is one hop between members (or stays on a chip).
    Cycle,
    /// There is none.
    Impossible,
    /// None was found within the limits of the search, or the group spans slices.
    Unknown,
}

/// A closed tour of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingOrder {
    /// The group's ranks in order.
    pub order: Vec<u32>,
    /// Whether it is a Hamiltonian cycle.
    pub hamiltonian: Hamiltonian,
    /// The longest step in hops, the closing one included; steps between slices don't count.
    pub longest_step: u32,
}

/// Orders a group as a ring.
///
/// A cycle over links is found whenever one exists for boxes of chips (by construction) and for irregular groups of up
/// to 128 chips (by search, bounded); otherwise the order keeps steps short and `hamiltonian` says why.
pub fn ring_order(slice: &Slice, ranks: &[u32]) -> Result<RingOrder, TopologyError> {
    check_ranks(slice, ranks)?;
    let group = classify_checked(slice, ranks);
    let mut order = Vec::with_capacity(ranks.len());
    let mut verdict = Hamiltonian::Cycle;
    for index in 0..slice.slices() {
        let mut chips: Vec<[u32; 3]> = Vec::new();
        let mut members: Vec<(u32, u32)> = Vec::new();
        for &rank in ranks {
            if let Some(device) = slice.device(rank).filter(|device| device.slice == index) {
                chips.push(device.coords);
                members.push((slice.chip_index(0, device.coords), rank));
            }
        }
        if chips.is_empty() {
            continue;
        }
        chips.sort_unstable();
        chips.dedup();
        members.sort_unstable();
        let (tour, found) = chip_tour(slice, group.extents, chips);
        if found != Hamiltonian::Cycle {
            verdict = found;
        }
        for chip in tour {
            let key = slice.chip_index(0, chip);
            let from = members.partition_point(|&(chip, _)| chip < key);
            order.extend(members[from..].iter().take_while(|&&(chip, _)| chip == key).map(|&(_, rank)| rank));
        }
    }
    if group.slices > 1 {
        verdict = Hamiltonian::Unknown;
    }
    let longest_step = longest_step(slice, &order);
    Ok(RingOrder { order, hamiltonian: verdict, longest_step })
}

fn longest_step(slice: &Slice, order: &[u32]) -> u32 {
    let devices: Vec<_> = order.iter().filter_map(|&rank| slice.device(rank)).collect();
    (0..devices.len())
        .map(|index| (&devices[index], &devices[(index + 1) % devices.len()]))
        .filter(|(a, b)| a.slice == b.slice)
        .map(|(a, b)| slice.distance(a.coords, b.coords))
        .max()
        .unwrap_or(0)
}

fn chip_tour(slice: &Slice, extents: Option<[Extent; 3]>, chips: Vec<[u32; 3]>) -> (Vec<[u32; 3]>, Hamiltonian) {
    if chips.len() == 1 {
        return (chips, Hamiltonian::Cycle);
    }
    let mut fallback = None;
    if let Some(extents) = extents {
        let counts = extents.map(|extent| extent.count);
        let wraps = extents.map(|extent| extent.wrap);
        // A twisted wrap is no straight step back; only a lone axis may close over it.
        let straight_wraps: [bool; 3] = std::array::from_fn(|axis| wraps[axis] && slice.wraps_straight(axis));
        let (cells, closed) = box_cycle(counts, straight_wraps);
        let place = |cell: [u32; 3]| -> [u32; 3] {
            std::array::from_fn(|axis| (extents[axis].start + cell[axis] * extents[axis].stride) % slice.dims()[axis])
        };
        let tour: Vec<[u32; 3]> = cells.into_iter().map(place).collect();
        let one_hop = extents.iter().all(|extent| extent.count == 1 || extent.stride == 1);
        if closed && one_hop {
            return (tour, Hamiltonian::Cycle);
        }
        fallback = Some(tour);
    }
    if let Some(verdict) = no_cycle(slice, &chips) {
        let tour = fallback.unwrap_or_else(|| nearest_neighbour(slice, &chips));
        return (tour, verdict);
    }
    match search(slice, &chips) {
        Ok(tour) => (tour, Hamiltonian::Cycle),
        Err(verdict) => (fallback.unwrap_or_else(|| nearest_neighbour(slice, &chips)), verdict),
    }
}

/// A closed tour of a box, one step between neighbours, if there is one; else a tour with short steps.
///
/// `wraps` says which axes close. The second value tells whether every step, the closing one included, is between
/// neighbours. A box has a cycle if it has an even number of cells and two axes, or an axis that wraps.
pub fn box_cycle(counts: [u32; 3], wraps: [bool; 3]) -> (Vec<[u32; 3]>, bool) {
    let active: Vec<usize> = (0..3).filter(|&axis| counts[axis] > 1).collect();
    let cell = |pairs: &[(usize, u32)]| {
        let mut cell = [0; 3];
        for &(axis, value) in pairs {
            cell[axis] = value;
        }
        cell
    };
    match active.as_slice() {
        [] => (vec![[0; 3]], true),
        &[axis] => {
            let count = counts[axis];
            if wraps[axis] || count == 2 {
                return ((0..count).map(|value| cell(&[(axis, value)])).collect(), true);
            }
            // Out over the even places, back over the odd ones: no step longer than 2.
            let out = (0..count).step_by(2);
            let back = (0..count).filter(|value| value % 2 == 1).rev();
            (out.chain(back).map(|value| cell(&[(axis, value)])).collect(), false)
        }
        _ => {
            // One axis as rows; a snake over the others as columns. Column 0 (or, over a wrap, the last row) is kept
            // for the way back.
            if let Some(&rows) = active.iter().find(|&&axis| counts[axis].is_multiple_of(2)) {
                let path = snake(counts, &active, rows);
                let columns = path.len();
                let mut tour = Vec::with_capacity(columns * counts[rows] as usize);
                for row in 0..counts[rows] {
                    let at = |column: usize| with(path[column], rows, row);
                    if row == 0 {
                        tour.push(at(0));
                    }
                    if row % 2 == 0 {
                        tour.extend((1..columns).map(at));
                    } else {
                        tour.extend((1..columns).rev().map(at));
                    }
                }
                tour.extend((1..counts[rows]).rev().map(|row| with(path[0], rows, row)));
                return (tour, true);
            }
            if let Some(&around) = active.iter().find(|&&axis| wraps[axis]) {
                let path = snake(counts, &active, around);
                let last = counts[around] - 1;
                let mut tour = Vec::new();
                for (row, &cell) in path.iter().enumerate() {
                    let at = |value: u32| with(cell, around, value);
                    if row % 2 == 0 {
                        tour.extend((0..last).map(at));
                    } else {
                        tour.extend((0..last).rev().map(at));
                    }
                }
                tour.extend(path.iter().rev().map(|&cell| with(cell, around, last)));
                return (tour, true);
            }
            let rows = active[0];
            let path = snake(counts, &active, rows);
            let mut tour = Vec::new();
            for row in 0..counts[rows] {
                let line = path.iter().map(|&cell| with(cell, rows, row));
                if row % 2 == 0 {
                    tour.extend(line);
                } else {
                    tour.extend(line.rev());
                }
            }
            (tour, false)
        }
    }
}

fn with(mut cell: [u32; 3], axis: usize, value: u32) -> [u32; 3] {
    cell[axis] = value;
    cell
}

/// A Hamiltonian path over the active axes other than `except`.
fn snake(counts: [u32; 3], active: &[usize], except: usize) -> Vec<[u32; 3]> {
    let mut path = vec![[0u32; 3]];
    for &axis in active.iter().filter(|&&axis| axis != except) {
        let mut longer = Vec::with_capacity(path.len() * counts[axis] as usize);
        for value in 0..counts[axis] {
            let line = path.iter().map(|&cell| with(cell, axis, value));
            if value % 2 == 0 {
                longer.extend(line);
            } else {
                longer.extend(line.rev());
            }
        }
        path = longer;
    }
    path
}

fn neighbours(slice: &Slice, chips: &[[u32; 3]]) -> Vec<Vec<usize>> {
    chips
        .iter()
        .map(|&chip| {
            let mut near: Vec<usize> =
                slice.links_of(chip).filter_map(|link| chips.binary_search(&link.to).ok()).collect();
            near.sort_unstable();
            near.dedup();
            near
        })
        .collect()
}

/// Cheap proofs that no cycle exists. `chips` is sorted.
fn no_cycle(slice: &Slice, chips: &[[u32; 3]]) -> Option<Hamiltonian> {
    if chips.len() == 2 {
        return (slice.distance(chips[0], chips[1]) > 1).then_some(Hamiltonian::Impossible);
    }
    let near = neighbours(slice, chips);
    if near.iter().any(|near| near.len() < 2) {
        return Some(Hamiltonian::Impossible);
    }
    // A bipartite graph needs sides of equal size, and a connected one at all.
    let mut colour = vec![0i8; chips.len()];
    let mut queue = vec![0usize];
    colour[0] = 1;
    let mut bipartite = true;
    while let Some(at) = queue.pop() {
        for &next in &near[at] {
            if colour[next] == 0 {
                colour[next] = -colour[at];
                queue.push(next);
            } else if colour[next] == colour[at] {
                bipartite = false;
            }
        }
    }
    let balance: i64 = colour.iter().map(|&side| i64::from(side)).sum();
    let disconnected = colour.contains(&0);
    (disconnected || (bipartite && balance != 0)).then_some(Hamiltonian::Impossible)
}

/// Depth-first search for a cycle, tightest neighbour first.
fn search(slice: &Slice, chips: &[[u32; 3]]) -> Result<Vec<[u32; 3]>, Hamiltonian> {
    if chips.len() == 2 {
        return Ok(chips.to_vec());
    }
    if chips.len() > SEARCH_CHIPS {
        return Err(Hamiltonian::Unknown);
    }
    let near = neighbours(slice, chips);
    let mut state = Search { near: &near, used: vec![false; chips.len()], path: vec![0], steps: SEARCH_STEPS };
    state.used[0] = true;
    if state.extend() {
        return Ok(state.path.iter().map(|&index| chips[index]).collect());
    }
    Err(if state.steps == 0 { Hamiltonian::Unknown } else { Hamiltonian::Impossible })
}

struct Search<'a> {
    near: &'a [Vec<usize>],
    used: Vec<bool>,
    path: Vec<usize>,
    steps: u32,
}

impl Search<'_> {
    fn extend(&mut self) -> bool {
        let Some(&at) = self.path.last() else { return false };
        if self.path.len() == self.near.len() {
            return self.near[at].contains(&0);
        }
        let mut choices: Vec<usize> = self.near[at].iter().copied().filter(|&next| !self.used[next]).collect();
        choices.sort_by_key(|&next| self.near[next].iter().filter(|&&after| !self.used[after]).count());
        for next in choices {
            if self.steps == 0 {
                return false;
            }
            self.steps -= 1;
            self.used[next] = true;
            self.path.push(next);
            if self.extend() {
                return true;
            }
            self.path.pop();
            self.used[next] = false;
        }
        false
    }
}

fn nearest_neighbour(slice: &Slice, chips: &[[u32; 3]]) -> Vec<[u32; 3]> {
    let mut left: Vec<[u32; 3]> = chips.to_vec();
    let mut tour = vec![left.remove(0)];
    while let Some(&at) = tour.last() {
        let Some(best) = (0..left.len()).min_by_key(|&index| slice.distance(at, left[index])) else { break };
        tour.push(left.swap_remove(best));
    }
    tour
}
