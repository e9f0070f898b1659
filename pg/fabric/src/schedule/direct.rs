//! Everybody talks to everybody: fewest rounds, no byte sent twice. Reductions read raw inputs, in rank order, in one
//! place: these are the plans of deterministic mode.

use super::draft::{Shards, after, before, single};
use super::plan::Planner;
use super::{Region, Schedule, Space};

/// Everybody sends its whole input to everybody; everyone reduces in rank order.
pub(super) fn one_shot_all_reduce(planner: &Planner, count: usize) -> Schedule {
    let (me, group) = (planner.place, &planner.everyone);
    let input = Region::whole(Space::Input, 0, count);
    let slices = planner.slices(count, planner.element, planner.peers(), 2 * planner.peers() + 1);
    slices.schedule(|lane, draft| {
        let mine = slices.of(lane, input);
        let sources = draft.exchange(0, group, me, |_| mine, mine, Space::Scratch);
        draft.reduce(1, sources, mine.of(Space::Output));
    })
}

/// Reduce-scatter, then all-gather. A lane covers a slice of every rank's shard.
pub(super) fn all_reduce(planner: &Planner, count: usize) -> Schedule {
    let (me, group) = (planner.place, &planner.everyone);
    let shards = Shards::new(Region::whole(Space::Input, 0, count), group.len(), planner.granule);
    let slices = planner.slices(shards.get(0).len, planner.element, planner.peers(), 4 * planner.peers() + 1);
    slices.schedule(|lane, draft| {
        let at = |rank| slices.of(lane, shards.get(rank));
        let sources = draft.exchange(0, group, me, at, at(me), Space::Scratch);
        let result = at(me).of(Space::Output);
        draft.reduce(1, sources, result);
        draft.share(2, group, me, result, |rank| at(rank).of(Space::Output));
    })
}

/// Every rank sends block j to rank j, which reduces in rank order.
pub(super) fn reduce_scatter(planner: &Planner, counts: &[usize]) -> Schedule {
    let (me, group) = (planner.place, &planner.everyone);
    let slices = planner.slices(longest(counts), planner.element, planner.peers(), 2 * planner.peers() + 1);
    slices.schedule(|lane, draft| {
        let at = |rank: usize| slices.of(lane, Region::whole(Space::Input, rank as u32, counts[rank]));
        let sources = draft.exchange(0, group, me, at, at(me), Space::Scratch);
        draft.reduce(1, sources, Region { space: Space::Output, block: 0, ..at(me) });
    })
}

/// Every rank sends its input to the root, which reduces in rank order.
pub(super) fn reduce(planner: &Planner, root: u32, count: usize) -> Schedule {
    let (me, group) = (planner.place, &planner.everyone);
    let root = root as usize;
    let slices = planner.slices(count, planner.element, planner.peers(), planner.peers() + 1);
    slices.schedule(|lane, draft| {
        let mine = slices.of(lane, Region::whole(Space::Input, 0, count));
        let own = if me == root { mine } else { Region::EMPTY };
        let to_root = |rank| if rank == root { mine } else { Region::EMPTY };
        let sources = draft.exchange(0, group, me, to_root, own, Space::Scratch);
        draft.reduce(1, sources, own.of(Space::Output));
    })
}

/// Reduce-scatter, then gather at the root; partial sums travel in the second half, for only the root has an output.
pub(super) fn two_phase_reduce(planner: &Planner, root: u32, count: usize) -> Schedule {
    let (me, group) = (planner.place, &planner.everyone);
    let root = root as usize;
    let shards = Shards::new(Region::whole(Space::Input, 0, count), group.len(), planner.granule);
    let slices = planner.slices(shards.get(0).len, planner.width(), 2 * planner.peers(), 4 * planner.peers() + 1);
    slices.schedule(|lane, draft| {
        let at = |rank| slices.of(lane, shards.get(rank));
        let sources = draft.exchange(0, group, me, at, at(me), Space::Scratch);
        if me != root {
            let partial = draft.temporary(Space::Partial, at(me).len);
            draft.reduce(1, sources, partial);
            draft.send(2, root as u32, partial);
            return;
        }
        draft.reduce(1, sources, at(me).of(Space::Output));
        for rank in before(me, group.len()) {
            let partial = draft.temporary(Space::Partial, at(rank).len);
            draft.recv(2, rank as u32, partial);
            draft.reduce(3, [partial], at(rank).of(Space::Output));
        }
    })
}

/// The root sends its tensor to everybody.
pub(super) fn broadcast(planner: &Planner, root: u32, count: usize) -> Schedule {
    let me = planner.place;
    let (input, output) = (Region::whole(Space::Input, 0, count), Region::whole(Space::Output, 0, count));
    single(|draft| {
        if me == root as usize {
            for rank in after(me, planner.ranks()) {
                draft.send(0, rank as u32, input);
            }
            draft.copy(0, input, output);
        } else {
            draft.recv(0, root, output);
        }
    })
}

/// The root hands every other rank a shard; those share them among themselves.
pub(super) fn two_phase_broadcast(planner: &Planner, root: u32, count: usize) -> Schedule {
    let me = planner.place;
    let others: Vec<u32> = (0..planner.ranks() as u32).filter(|&rank| rank != root).collect();
    let place = others.iter().position(|&rank| rank as usize == me);
    let shards = Shards::new(Region::whole(Space::Output, 0, count), others.len(), planner.granule);
    // No temporary memory: slices only let the second phase of one overlap the first phase of the next.
    let slices = planner.slices(shards.get(0).len, planner.element, 1, 2 * others.len());
    slices.schedule(|lane, draft| {
        let at = |place| slices.of(lane, shards.get(place));
        match place {
            Some(place) => {
                draft.recv(0, root, at(place));
                draft.share(1, &others, place, at(place), at);
            }
            None => {
                for (place, &rank) in others.iter().enumerate() {
                    draft.send(0, rank, at(place).of(Space::Input));
                    draft.copy(0, at(place).of(Space::Input), at(place));
                }
            }
        }
    })
}

/// Every rank sends its block to everybody.
pub(super) fn all_gather(planner: &Planner, counts: &[usize]) -> Schedule {
    let me = planner.place;
    let own = Region::whole(Space::Input, 0, counts[me]);
    let at = |rank: usize| Region::whole(Space::Output, rank as u32, counts[rank]);
    single(|draft| {
        draft.share(0, &planner.everyone, me, own, at);
        draft.copy(0, own, at(me));
    })
}

/// Every rank sends every other its block. Only the two of them know its length.
pub(super) fn all_to_all(planner: &Planner, inputs: &[usize], outputs: &[usize]) -> Schedule {
    let me = planner.place;
    let input = |rank: usize| Region::whole(Space::Input, rank as u32, inputs[rank]);
    let output = |rank: usize| Region::whole(Space::Output, rank as u32, outputs[rank]);
    single(|draft| {
        for rank in after(me, planner.ranks()) {
            draft.send_always(0, rank as u32, input(rank));
        }
        for rank in before(me, planner.ranks()) {
            draft.recv_always(0, rank as u32, output(rank));
        }
        draft.copy(0, input(me), output(me));
    })
}

/// Every rank sends its block to the root. Only the two of them know its length.
pub(super) fn gather(planner: &Planner, root: u32, inputs: &[usize], outputs: &[usize]) -> Schedule {
    let me = planner.place;
    let own = Region::whole(Space::Input, 0, inputs[0]);
    let at = |rank: usize| Region::whole(Space::Output, rank as u32, outputs[rank]);
    single(|draft| {
        if me == root as usize {
            for rank in after(me, planner.ranks()) {
                draft.recv_always(0, rank as u32, at(rank));
            }
            draft.copy(0, own, at(me));
        } else {
            draft.send_always(0, root, own);
        }
    })
}

/// The root sends every rank its block. Only the two of them know its length.
pub(super) fn scatter(planner: &Planner, root: u32, inputs: &[usize], outputs: &[usize]) -> Schedule {
    let me = planner.place;
    let own = Region::whole(Space::Output, 0, outputs[0]);
    let at = |rank: usize| Region::whole(Space::Input, rank as u32, inputs[rank]);
    single(|draft| {
        if me == root as usize {
            for rank in after(me, planner.ranks()) {
                draft.send_always(0, rank as u32, at(rank));
            }
            draft.copy(0, at(me), own);
        } else {
            draft.recv_always(0, root, own);
        }
    })
}

/// Everybody tells everybody that it has come.
pub(super) fn barrier(planner: &Planner) -> Schedule {
    let me = planner.place;
    single(|draft| {
        for rank in after(me, planner.ranks()) {
            draft.send_always(0, rank as u32, Region::EMPTY);
        }
        for rank in before(me, planner.ranks()) {
            draft.recv_always(0, rank as u32, Region::EMPTY);
        }
    })
}

pub(super) fn longest(counts: &[usize]) -> usize {
    counts.iter().copied().max().unwrap_or(0)
}
