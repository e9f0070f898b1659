//! Running schedules in a random order.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use super::{Arithmetic, Fault, Key, Places, Rank, check, touches};
use crate::schedule::{Region, Space, Step};

/// Plays all ranks' schedules after [`check`]ing them, and returns every rank's output blocks; elements that nothing
/// wrote are `None`. Every rank has between 1 and `window` lanes under way, as `seed` decides along with everything
/// else that the contract leaves open.
#[expect(clippy::type_complexity, reason = "ranks of blocks of elements")]
pub fn play<A: Arithmetic>(
    arithmetic: &A,
    ranks: &[Rank<A::Element>],
    window: usize,
    seed: u64,
) -> Result<Vec<Vec<Vec<Option<A::Element>>>>, Fault> {
    check(ranks)?;
    let mut game = Game::new(arithmetic, ranks, window, seed);
    game.run()?;
    let blocks = game.players.iter().map(|player| {
        let starts = player.places.outputs.iter().zip(&player.rank.outputs);
        starts.map(|(&start, &len)| player.memory[start..start + len].to_vec()).collect()
    });
    Ok(blocks.collect())
}

/// Elements in flight or in memory.
enum Run<A: Arithmetic> {
    Raw(Vec<A::Element>),
    Partial(Vec<A::Partial>),
}

struct Player<'a, A: Arithmetic> {
    rank: &'a Rank<A::Element>,
    places: Places,
    memory: Vec<Option<A::Element>>,
    lanes: Vec<Progress<A>>,
    window: usize,
    under_way: usize,
}

struct Progress<A: Arithmetic> {
    round: usize,
    /// Steps of the round that aren't complete.
    open: usize,
    /// The next of the round's local steps.
    local: usize,
    scratch: Vec<Option<A::Element>>,
    partial: Vec<Option<A::Partial>>,
}

/// What may happen next.
enum Event {
    /// The next local step of a rank's lane.
    Local(u32, usize),
    /// Delivery of a message that both sides have come to.
    Message(Key, Region, Region),
    /// Delivery of a message that was taken from its sender before.
    Letter(Key, usize, Region),
}

/// What has come of a message so far.
enum Half {
    Offered(Region),
    Posted(usize),
    Wanted(Region),
}

struct Game<'a, A: Arithmetic> {
    arithmetic: &'a A,
    players: Vec<Player<'a, A>>,
    halves: FxHashMap<Key, Half>,
    letters: Vec<Option<Run<A>>>,
    events: Vec<Event>,
    random: u64,
}

impl<'a, A: Arithmetic> Game<'a, A> {
    fn new(arithmetic: &'a A, ranks: &'a [Rank<A::Element>], window: usize, seed: u64) -> Self {
        let mut game = Game {
            arithmetic,
            players: Vec::new(),
            halves: FxHashMap::default(),
            letters: Vec::new(),
            events: Vec::new(),
            random: seed,
        };
        for rank in ranks {
            let places = Places::of(rank);
            let mut memory: Vec<Option<A::Element>> = rank.inputs.iter().flatten().cloned().map(Some).collect();
            memory.resize_with(places.total, || None);
            let window = 1 + game.draw(window);
            game.players.push(Player { rank, places, memory, lanes: Vec::new(), window, under_way: 0 });
        }
        game
    }

    /// SplitMix64 (Steele, Lea, Flood 2014), below `bound`.
    fn draw(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.random;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) % bound.max(1) as u64) as usize
    }

    fn run(&mut self) -> Result<(), Fault> {
        for me in 0..self.players.len() {
            self.start_lanes(me)?;
        }
        while !self.events.is_empty() {
            let index = self.draw(self.events.len());
            match self.events.swap_remove(index) {
                Event::Local(me, lane) => self.local_step(me, lane)?,
                Event::Message(key, from, into) => {
                    let run = self.read(key.from, key.lane, from)?;
                    self.write(key.to, key.lane, into, run);
                    self.complete(key.from as usize, key.lane)?;
                    self.complete(key.to as usize, key.lane)?;
                }
                Event::Letter(key, letter, into) => {
                    if let Some(run) = self.letters[letter].take() {
                        self.write(key.to, key.lane, into, run);
                    }
                    self.complete(key.to as usize, key.lane)?;
                }
            }
        }
        let mut waiting = Vec::new();
        for (me, player) in self.players.iter().enumerate() {
            for (lane, progress) in player.lanes.iter().enumerate() {
                if progress.round < player.rank.schedule.lanes[lane].rounds.len() {
                    waiting.push((me as u32, lane, progress.round));
                }
            }
        }
        if waiting.is_empty() { Ok(()) } else { Err(Fault::Deadlock { waiting }) }
    }

    fn start_lanes(&mut self, me: usize) -> Result<(), Fault> {
        loop {
            let player = &mut self.players[me];
            let lane = player.lanes.len();
            let Some(next) = player.rank.schedule.lanes.get(lane) else { return Ok(()) };
            if player.under_way == player.window {
                return Ok(());
            }
            let mut progress = Progress { round: 0, open: 0, local: 0, scratch: Vec::new(), partial: Vec::new() };
            progress.scratch.resize_with(next.scratch, || None);
            progress.partial.resize_with(next.partial, || None);
            player.lanes.push(progress);
            if !next.rounds.is_empty() {
                player.under_way += 1;
                self.enter(me, lane)?;
            }
        }
    }

    /// Posts the messages of the lane's round and offers its first local step.
    fn enter(&mut self, me: usize, lane: usize) -> Result<(), Fault> {
        let player = &mut self.players[me];
        let progress = &mut player.lanes[lane];
        let steps = &player.rank.schedule.lanes[lane].rounds[progress.round].steps;
        progress.open = steps.len();
        progress.local = 0;
        let mine = me as u32;
        for step in steps {
            match *step {
                Step::Send { to, tag, from } => self.offer(Key { from: mine, to, lane, tag }, from)?,
                Step::Recv { from, tag, into } => {
                    let key = Key { from, to: mine, lane, tag };
                    match self.halves.remove(&key) {
                        Some(Half::Offered(from)) => self.events.push(Event::Message(key, from, into)),
                        Some(Half::Posted(letter)) => self.events.push(Event::Letter(key, letter, into)),
                        _ => {
                            self.halves.insert(key, Half::Wanted(into));
                        }
                    }
                }
                _ => {}
            }
        }
        self.offer_local(me, lane);
        if self.players[me].lanes[lane].open == 0 { self.leave(me, lane) } else { Ok(()) }
    }

    fn offer(&mut self, key: Key, from: Region) -> Result<(), Fault> {
        let eager = self.draw(2) == 0;
        let letter = self.letters.len();
        if eager {
            let run = self.read(key.from, key.lane, from)?;
            self.letters.push(Some(run));
        }
        match self.halves.entry(key) {
            Entry::Occupied(entry) => {
                if let Half::Wanted(into) = entry.remove() {
                    self.events.push(if eager {
                        Event::Letter(key, letter, into)
                    } else {
                        Event::Message(key, from, into)
                    });
                }
            }
            Entry::Vacant(entry) => {
                entry.insert(if eager { Half::Posted(letter) } else { Half::Offered(from) });
            }
        }
        // Not `complete`: the round has steps that aren't posted yet.
        if eager {
            self.players[key.from as usize].lanes[key.lane].open -= 1;
        }
        Ok(())
    }

    /// Offers the first local step of the round from `local` on.
    fn offer_local(&mut self, me: usize, lane: usize) {
        let player = &mut self.players[me];
        let progress = &mut player.lanes[lane];
        let steps = &player.rank.schedule.lanes[lane].rounds[progress.round].steps;
        let local = |step: &Step| matches!(step, Step::Copy { .. } | Step::Reduce { .. });
        match steps[progress.local..].iter().position(local) {
            Some(next) => {
                progress.local += next;
                self.events.push(Event::Local(me as u32, lane));
            }
            None => progress.local = steps.len(),
        }
    }

    fn local_step(&mut self, me: u32, lane: usize) -> Result<(), Fault> {
        let player = &mut self.players[me as usize];
        let rank = player.rank;
        let progress = &mut player.lanes[lane];
        let step = &rank.schedule.lanes[lane].rounds[progress.round].steps[progress.local];
        progress.local += 1;
        match step {
            Step::Copy { from, into } => {
                if player.places.start(*from) != player.places.start(*into) {
                    let run = self.read(me, lane, *from)?;
                    self.write(me, lane, *into, run);
                }
            }
            Step::Reduce { sources, into } => {
                let arithmetic = self.arithmetic;
                let mut total: Vec<A::Partial> = Vec::with_capacity(into.len);
                for &source in sources {
                    let next = match self.read(me, lane, source)? {
                        Run::Raw(raw) => raw.iter().map(|raw| arithmetic.lift(raw)).collect(),
                        Run::Partial(partial) => partial,
                    };
                    if total.is_empty() {
                        total = next;
                    } else {
                        total.iter_mut().zip(&next).for_each(|(total, next)| arithmetic.combine(total, next));
                    }
                }
                let run = if into.space == Space::Partial {
                    Run::Partial(total)
                } else {
                    Run::Raw(total.into_iter().map(|total| self.arithmetic.finish(total)).collect())
                };
                self.write(me, lane, *into, run);
            }
            Step::Send { .. } | Step::Recv { .. } => {}
        }
        self.offer_local(me as usize, lane);
        self.complete(me as usize, lane)
    }

    fn complete(&mut self, me: usize, lane: usize) -> Result<(), Fault> {
        let progress = &mut self.players[me].lanes[lane];
        progress.open -= 1;
        if progress.open == 0 { self.leave(me, lane) } else { Ok(()) }
    }

    fn leave(&mut self, me: usize, lane: usize) -> Result<(), Fault> {
        let player = &mut self.players[me];
        player.lanes[lane].round += 1;
        if player.lanes[lane].round < player.rank.schedule.lanes[lane].rounds.len() {
            self.enter(me, lane)
        } else {
            player.under_way -= 1;
            self.start_lanes(me)
        }
    }

    fn read(&self, me: u32, lane: usize, region: Region) -> Result<Run<A>, Fault> {
        let player = &self.players[me as usize];
        let progress = &player.lanes[lane];
        let (_, start) = player.places.start(region);
        let end = start + region.len;
        let run = match region.space {
            Space::Input | Space::Output => {
                player.memory[start..end].iter().cloned().collect::<Option<Vec<_>>>().map(Run::Raw)
            }
            Space::Scratch => progress.scratch[start..end].iter().cloned().collect::<Option<Vec<_>>>().map(Run::Raw),
            Space::Partial => {
                progress.partial[start..end].iter().cloned().collect::<Option<Vec<_>>>().map(Run::Partial)
            }
        };
        run.ok_or_else(|| {
            let round = progress.round;
            let steps = &player.rank.schedule.lanes[lane].rounds[round].steps;
            let step = steps.iter().find(|step| touches(step).0.contains(&region));
            let step = step.cloned().unwrap_or(Step::Copy { from: region, into: region });
            Fault::Step { rank: me, lane, round, what: "reads what nothing wrote", step: Box::new(step) }
        })
    }

    fn write(&mut self, me: u32, lane: usize, region: Region, run: Run<A>) {
        let player = &mut self.players[me as usize];
        let progress = &mut player.lanes[lane];
        let (_, start) = player.places.start(region);
        let end = start + region.len;
        match run {
            Run::Partial(run) => {
                progress.partial[start..end].iter_mut().zip(run).for_each(|(cell, value)| *cell = Some(value));
            }
            Run::Raw(run) => {
                let cells = match region.space {
                    Space::Scratch => &mut progress.scratch[start..end],
                    _ => &mut player.memory[start..end],
                };
                cells.iter_mut().zip(run).for_each(|(cell, value)| *cell = Some(value));
            }
        }
    }
}
