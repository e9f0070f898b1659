//! Rings: each rank sends to the next only, so that every link carries each byte about once, in as many rounds as there
//! are other ranks. Ranks of a host are neighbours.

use super::draft::{Draft, Shards, single};
use super::plan::Planner;
use super::{Region, Schedule, Space, direct::longest};

struct Ring {
    order: Vec<u32>,
    place: usize,
}

impl Ring {
    fn new(planner: &Planner) -> Self {
        let order = planner.chain();
        let place = planner.place_in(&order);
        Ring { order, place }
    }

    fn ranks(&self) -> usize {
        self.order.len()
    }

    /// The rank `steps` places before this one.
    fn back(&self, steps: usize) -> u32 {
        self.order[(self.place + 2 * self.ranks() - steps) % self.ranks()]
    }

    fn next(&self) -> u32 {
        self.order[(self.place + 1) % self.ranks()]
    }

    /// Block b of every rank, `at(b)` in the input, travels from the rank after b round to b, which writes the result
    /// to `into`. Takes rounds 0..2(ranks − 1).
    fn reduce(&self, draft: &mut Draft, at: impl Fn(u32) -> Region, into: Region) {
        let longest = self.order.iter().map(|&rank| at(rank).len).max().unwrap_or(0);
        let first = draft.temporary(Space::Scratch, at(self.back(2)).len);
        let last = self.ranks() - 2;
        let buffer = if last > 0 { longest } else { 0 };
        let [arrives, sums] = [(); 2].map(|()| draft.temporary(Space::Partial, buffer));
        for step in 0..=last {
            let (gives, takes) = (at(self.back(step + 1)), at(self.back(step + 2)));
            let (held, arrived) = match step {
                0 => (gives, first),
                _ => (sums.part(0, gives.len), arrives.part(0, takes.len)),
            };
            draft.send(2 * step, self.next(), held);
            draft.recv(2 * step, self.back(1), arrived);
            draft.reduce(2 * step + 1, [arrived, takes], if step == last { into } else { sums.part(0, takes.len) });
        }
    }

    /// Every rank's block travels round to all others, from `own` into `at(rank)`.
    fn share(&self, draft: &mut Draft, round: usize, own: Region, at: impl Fn(u32) -> Region) {
        for step in 0..self.ranks() - 1 {
            draft.send(round + step, self.next(), if step == 0 { own } else { at(self.back(step)) });
            draft.recv(round + step, self.back(1), at(self.back(step + 1)));
        }
    }
}

pub(super) fn all_reduce(planner: &Planner, count: usize) -> Schedule {
    let ring = Ring::new(planner);
    let ranks = ring.ranks();
    let shards = Shards::new(Region::whole(Space::Input, 0, count), ranks, planner.granule);
    let slices = planner.slices(shards.get(0).len, planner.width(), 3, 5 * planner.peers());
    slices.schedule(|lane, draft| {
        let at = |rank: u32| slices.of(lane, shards.get(rank as usize));
        let result = at(ring.back(0)).of(Space::Output);
        ring.reduce(draft, at, result);
        ring.share(draft, 2 * (ranks - 1), result, |rank| at(rank).of(Space::Output));
    })
}

pub(super) fn reduce_scatter(planner: &Planner, counts: &[usize]) -> Schedule {
    let ring = Ring::new(planner);
    let slices = planner.slices(longest(counts), planner.width(), 3, 3 * planner.peers());
    slices.schedule(|lane, draft| {
        let at = |rank: u32| slices.of(lane, Region::whole(Space::Input, rank, counts[rank as usize]));
        ring.reduce(draft, at, Region { space: Space::Output, block: 0, ..at(ring.back(0)) });
    })
}

pub(super) fn all_gather(planner: &Planner, counts: &[usize]) -> Schedule {
    let ring = Ring::new(planner);
    let own = Region::whole(Space::Input, 0, counts[planner.place]);
    let at = |rank: u32| Region::whole(Space::Output, rank, counts[rank as usize]);
    single(|draft| {
        ring.share(draft, 0, own, at);
        draft.copy(0, own, at(ring.back(0)));
    })
}
