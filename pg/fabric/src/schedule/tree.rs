//! Binomial trees, and the barrier of the same depth: ceil(log2(ranks)) messages one after another.

use super::draft::single;
use super::plan::Planner;
use super::{Region, Schedule, Space};

/// Levels of a tree over so many ranks.
fn levels(ranks: usize) -> usize {
    ranks.next_power_of_two().ilog2() as usize
}

/// Level of place `place` in a tree: it talks to its parent at this distance, as a power of two, to its children at
/// smaller ones.
fn level(place: usize, ranks: usize) -> usize {
    if place == 0 { levels(ranks) } else { place.trailing_zeros() as usize }
}

/// Halves go first: a subtree is a run of neighbours, and leaves a host only if it must.
pub(super) fn broadcast(planner: &Planner, root: u32, count: usize) -> Schedule {
    let order = planner.rooted(root).concat();
    let (ranks, place) = (order.len(), planner.place_in(&order));
    let mine = level(place, ranks);
    let round = |level: usize| levels(ranks) - 1 - level;
    let (input, output) = (Region::whole(Space::Input, 0, count), Region::whole(Space::Output, 0, count));
    single(|draft| {
        if place > 0 {
            draft.recv(round(mine), order[place - (1 << mine)], output);
        } else {
            draft.copy(0, input, output);
        }
        for level in (0..mine).rev() {
            if let Some(&child) = order.get(place + (1 << level)) {
                draft.send(round(level), child, if place == 0 { input } else { output });
            }
        }
    })
}

/// Neighbours go first; leaves send raw inputs, all others partial results.
pub(super) fn reduce(planner: &Planner, root: u32, count: usize) -> Schedule {
    let order = planner.rooted(root).concat();
    let (ranks, place) = (order.len(), planner.place_in(&order));
    let mine = level(place, ranks);
    let has_children = |place: usize| level(place, ranks) > 0 && place + 1 < ranks;
    let slices = planner.slices(count, planner.width(), 3, 2 * levels(ranks) + 1);
    slices.schedule(|lane, draft| {
        let input = slices.of(lane, Region::whole(Space::Input, 0, count));
        let (mut raw, mut sums) = (None, None);
        let sum = if has_children(place) { draft.temporary(Space::Partial, input.len) } else { input };
        let mut held = input;
        for level in 0..mine {
            let child = place + (1 << level);
            if child >= ranks {
                break;
            }
            let arrived = if has_children(child) {
                *sums.get_or_insert_with(|| draft.temporary(Space::Partial, input.len))
            } else {
                *raw.get_or_insert_with(|| draft.temporary(Space::Scratch, input.len))
            };
            let last = place == 0 && level + 1 == mine;
            draft.recv(2 * level, order[child], arrived);
            draft.reduce(2 * level + 1, [held, arrived], if last { input.of(Space::Output) } else { sum });
            held = sum;
        }
        if place > 0 {
            draft.send(2 * mine, order[place - (1 << mine)], held);
        }
    })
}

/// In round k every rank tells rank + 2^k that it and the 2^k − 1 ranks before it have come.
pub(super) fn dissemination_barrier(planner: &Planner) -> Schedule {
    let order = planner.chain();
    let (ranks, place) = (order.len(), planner.place_in(&order));
    single(|draft| {
        for level in 0..levels(ranks) {
            let distance = 1 << level;
            draft.send_always(level, order[(place + distance) % ranks], Region::EMPTY);
            draft.recv_always(level, order[(place + ranks - distance) % ranks], Region::EMPTY);
        }
    })
}
