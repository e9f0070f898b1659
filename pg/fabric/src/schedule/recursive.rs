//! Recursive doubling and halving: rounds grow with the logarithm of the group's size.
//!
//! Groups that aren't a power of two are folded first: the surplus ranks each hand their input to a neighbour and get
//! their result from it at the end. Both sides of an exchange combine the lower ranks' part first, so that they get the
//! same bits.

use super::draft::{Draft, Shards};
use super::plan::Planner;
use super::{Region, Schedule, Space, direct::longest};

/// Who takes part. Places are those in the chain of hosts, so that near ranks are near numbers.
struct Fold {
    order: Vec<u32>,
    /// Participants: the largest power of two within the group's size.
    size: usize,
    /// Surplus ranks. The first 2 · surplus places are pairs: the even one takes part for both.
    surplus: usize,
    place: usize,
}

enum Role {
    /// Takes part as this number, alone or for the surplus rank too.
    Participant { number: usize, guest: Option<u32> },
    /// Is represented by this rank.
    Guest { host: u32 },
}

impl Fold {
    fn new(planner: &Planner) -> Self {
        let order = planner.chain();
        let place = planner.place_in(&order);
        let size = 1 << order.len().ilog2();
        Fold { surplus: order.len() - size, size, place, order }
    }

    fn role(&self) -> Role {
        match self.place {
            place if place >= 2 * self.surplus => Role::Participant { number: place - self.surplus, guest: None },
            place if place.is_multiple_of(2) => {
                Role::Participant { number: place / 2, guest: Some(self.order[place + 1]) }
            }
            place => Role::Guest { host: self.order[place - 1] },
        }
    }

    /// The first place that participant `number` stands for; of `size`: the group's size.
    fn first_place(&self, number: usize) -> usize {
        number + number.min(self.surplus)
    }

    fn rank(&self, number: usize) -> u32 {
        self.order[self.first_place(number)]
    }

    fn levels(&self) -> usize {
        self.size.ilog2() as usize
    }

    /// Rounds 0 and 1 of an all-reduce: the sum of this participant's input and its guest's, as a partial result.
    fn take_in(&self, draft: &mut Draft, guest: Option<u32>, input: Region) -> Region {
        let sum = draft.temporary(Space::Partial, input.len);
        match guest {
            Some(guest) => {
                let arrived = draft.temporary(Space::Scratch, input.len);
                draft.recv(0, guest, arrived);
                draft.reduce(1, [input, arrived], sum);
            }
            None => draft.reduce(1, [input], sum),
        }
        sum
    }

    /// Halves what this participant is responsible for until it is its own part, exchanging the rest. `sum` holds all;
    /// `part(from, to)` is where those participants' parts lie in it. Takes two rounds per level from `round` on but for
    /// the last reduction, whose sources it returns.
    fn halve(
        &self,
        draft: &mut Draft,
        round: usize,
        number: usize,
        part: impl Fn(usize, usize) -> Region,
    ) -> [Region; 2] {
        let (mut from, mut to) = (0, self.size);
        let most = part(0, self.size / 2).len.max(part(self.size / 2, self.size).len);
        let buffer = draft.temporary(Space::Partial, most);
        let mut sources = [Region::EMPTY; 2];
        for level in 0..self.levels() {
            let half = (to - from) / 2;
            let peer = self.rank(number ^ half);
            let lower = number < from + half;
            let (keeps, gives) = if lower {
                (part(from, from + half), part(from + half, to))
            } else {
                (part(from + half, to), part(from, from + half))
            };
            (from, to) = if lower { (from, from + half) } else { (from + half, to) };
            let arrived = buffer.part(0, keeps.len);
            draft.send(round + 2 * level, peer, gives);
            draft.recv(round + 2 * level, peer, arrived);
            sources = if lower { [keeps, arrived] } else { [arrived, keeps] };
            if level + 1 < self.levels() {
                draft.reduce(round + 2 * level + 1, sources, keeps);
            }
        }
        sources
    }
}

/// Doubling: whole partial results are exchanged, log2(ranks) times.
pub(super) fn doubling_all_reduce(planner: &Planner, count: usize) -> Schedule {
    let fold = Fold::new(planner);
    let levels = fold.levels();
    let end = 2 + 2 * levels;
    let slices = planner.slices(count, planner.width(), 3, 3 * levels + 4);
    slices.schedule(|lane, draft| {
        let input = slices.of(lane, Region::whole(Space::Input, 0, count));
        let output = input.of(Space::Output);
        let (number, guest) = match fold.role() {
            Role::Guest { host } => {
                draft.send(0, host, input);
                draft.recv(end, host, output);
                return;
            }
            Role::Participant { number, guest } => (number, guest),
        };
        let sum = fold.take_in(draft, guest, input);
        let arrived = draft.temporary(Space::Partial, input.len);
        for level in 0..levels {
            let bit = 1 << level;
            let peer = fold.rank(number ^ bit);
            draft.send(2 + 2 * level, peer, sum);
            draft.recv(2 + 2 * level, peer, arrived);
            let sources = if number & bit == 0 { [sum, arrived] } else { [arrived, sum] };
            draft.reduce(3 + 2 * level, sources, if level + 1 == levels { output } else { sum });
        }
        if let Some(guest) = guest {
            draft.send(end, guest, output);
        }
    })
}

/// Halving, then doubling with final elements: about as few bytes as a ring in logarithmically many rounds.
pub(super) fn halving_all_reduce(planner: &Planner, count: usize) -> Schedule {
    let fold = Fold::new(planner);
    let levels = fold.levels();
    let slices = planner.slices(count, planner.width(), 3, 5 * levels + 4);
    let end = 2 + 3 * levels;
    slices.schedule(|lane, draft| {
        let input = slices.of(lane, Region::whole(Space::Input, 0, count));
        let output = input.of(Space::Output);
        let (number, guest) = match fold.role() {
            Role::Guest { host } => {
                draft.send(0, host, input);
                draft.recv(end, host, output);
                return;
            }
            Role::Participant { number, guest } => (number, guest),
        };
        let sum = fold.take_in(draft, guest, input);
        let partials = Shards::new(sum, fold.size, planner.granule);
        let finals = Shards::new(output, fold.size, planner.granule);
        let sources = fold.halve(draft, 2, number, |from, to| partials.range(from, to));
        draft.reduce(1 + 2 * levels, sources, finals.get(number));
        for level in 0..levels {
            let size = 1 << level;
            let from = number & !(size - 1);
            let peer = from ^ size;
            draft.send(2 + 2 * levels + level, fold.rank(number ^ size), finals.range(from, from + size));
            draft.recv(2 + 2 * levels + level, fold.rank(number ^ size), finals.range(peer, peer + size));
        }
        if let Some(guest) = guest {
            draft.send(end, guest, output);
        }
    })
}

/// Halving over whole blocks.
pub(super) fn halving_reduce_scatter(planner: &Planner, counts: &[usize]) -> Schedule {
    let fold = Fold::new(planner);
    let levels = fold.levels();
    let ranks = fold.order.len();
    let slices = planner.slices(longest(counts), planner.width(), 3 * ranks, ranks + 3 * levels + 6);
    let end = 3 + 2 * levels;
    slices.schedule(|lane, draft| {
        let block = |place: usize| {
            let rank = fold.order[place];
            slices.of(lane, Region::whole(Space::Input, rank, counts[rank as usize]))
        };
        // Blocks lie one after another in the order of places, so that any run of them is one region.
        let starts: Vec<usize> = (0..=ranks)
            .scan(0, |next, place| {
                let start = *next;
                *next += if place < ranks { block(place).len } else { 0 };
                Some(start)
            })
            .collect();
        let sum = draft.temporary(Space::Partial, starts[ranks]);
        let run = |from: usize, to: usize| sum.part(starts[from], starts[to] - starts[from]);
        for place in 0..ranks {
            draft.reduce(0, [block(place)], run(place, place + 1));
        }
        let own = Region { space: Space::Output, block: 0, ..block(fold.place) };
        let (number, guest) = match fold.role() {
            Role::Guest { host } => {
                draft.send(1, host, sum);
                let arrived = draft.temporary(Space::Partial, own.len);
                draft.recv(end, host, arrived);
                draft.reduce(end + 1, [arrived], own);
                return;
            }
            Role::Participant { number, guest } => (number, guest),
        };
        if let Some(guest) = guest {
            let arrived = draft.temporary(Space::Partial, sum.len);
            draft.recv(1, guest, arrived);
            draft.reduce(2, [sum, arrived], sum);
        }
        let sources = fold.halve(draft, 3, number, |from, to| run(fold.first_place(from), fold.first_place(to)));
        draft.reduce(end - 1, sources.map(|source| source.part(0, own.len)), own);
        if let Some(guest) = guest {
            let theirs = run(fold.place + 1, fold.place + 2);
            draft.reduce(end - 1, sources.map(|source| source.part(own.len, theirs.len)), theirs);
            draft.send(end, guest, theirs);
        }
    })
}
