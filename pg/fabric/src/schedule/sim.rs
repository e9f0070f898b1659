//! Plays schedules of all ranks over plain vectors, as unkindly as the contract allows, and measures them.
//!
//! [`check`] looks at the schedules alone: messages match, regions exist, nothing under way at the same time touches
//! memory that another writes, whatever the timing. [`play`] runs them in a random order: which started lane goes on,
//! which message is delivered, which sends complete at once and which only when received. [`cost`] counts rounds and
//! elements. A schedule that passes the first is wrong only if its arithmetic or its waiting is, which the second finds.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;
use thiserror::Error;

use super::{Region, Schedule, Space, Step};

/// How elements are combined.
pub trait Arithmetic {
    /// An element of the dtype.
    type Element: Clone;
    /// An element of its accumulator.
    type Partial: Clone;
    /// The accumulator for a raw element of one rank, with PREMUL_SUM's factor.
    fn lift(&self, raw: &Self::Element) -> Self::Partial;
    /// Combines the next source into what there is of the earlier ones.
    fn combine(&self, earlier: Self::Partial, next: &Self::Partial) -> Self::Partial;
    /// The result: divided for AVG, rounded to the dtype.
    fn finish(&self, total: Self::Partial) -> Self::Element;
}

/// One rank: its schedule and its memory.
#[derive(Clone, Debug)]
pub struct Rank<T> {
    /// What it does.
    pub schedule: Schedule,
    /// Its input, per block.
    pub inputs: Vec<Vec<T>>,
    /// Elements of its output, per block.
    pub outputs: Vec<usize>,
    /// Pairs of an input and an output block that are the same memory.
    pub aliases: Vec<(usize, usize)>,
}

/// What is wrong with schedules. Numbers of rounds are those of the schedule of the rank that is named first.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// A step names memory that isn't there, isn't written yet, has another length or type, or may not be used so.
    #[error("rank {rank}, lane {lane}, round {round}: {what}: {step:?}")]
    Step {
        /// The rank.
        rank: u32,
        /// The lane.
        lane: usize,
        /// The round.
        round: usize,
        /// What is wrong with it.
        what: &'static str,
        /// The step.
        step: Box<Step>,
    },
    /// Two steps of the rank may be under way together, and one writes what the other reads or writes.
    #[error("rank {rank}: {first:?} and {second:?} (lane, round) both touch block {block} of {space:?}")]
    Race {
        /// The rank.
        rank: u32,
        /// Lane and round of one.
        first: (usize, usize),
        /// Lane and round of the other.
        second: (usize, usize),
        /// The memory.
        space: Space,
        /// The block.
        block: u32,
    },
    /// A message that one of the two ranks doesn't know of, or knows twice, or differently.
    #[error("message {from} -> {to}, lane {lane}, tag {tag}: sent as {sent:?}, received as {received:?}")]
    Message {
        /// The sender.
        from: u32,
        /// The receiver.
        to: u32,
        /// The lane.
        lane: usize,
        /// The number.
        tag: u32,
        /// Elements and whether they are partial results, for each time it is sent.
        sent: Vec<(usize, bool)>,
        /// The same, for each time it is received.
        received: Vec<(usize, bool)>,
    },
    /// Nothing can go on.
    #[error("stuck, as (rank, lane, round): {waiting:?}")]
    Deadlock {
        /// Rank, lane and round of every started lane that isn't at its end.
        waiting: Vec<(u32, usize, usize)>,
    },
}

/// Checks schedules for everything that doesn't depend on values or timing.
pub fn check<T>(ranks: &[Rank<T>]) -> Result<(), Fault> {
    let mut messages: FxHashMap<Key, [Vec<(usize, bool)>; 2]> = FxHashMap::default();
    for (me, rank) in ranks.iter().enumerate() {
        let me = me as u32;
        check_steps(me, rank, ranks.len())?;
        check_races(me, rank)?;
        for (lane, round) in rounds(&rank.schedule) {
            for step in &rank.schedule.lanes[lane].rounds[round].steps {
                let (key, side, region) = match *step {
                    Step::Send { to, tag, from } => (Key { from: me, to, lane, tag }, 0, from),
                    Step::Recv { from, tag, into } => (Key { from, to: me, lane, tag }, 1, into),
                    _ => continue,
                };
                messages.entry(key).or_default()[side].push((region.len, region.space == Space::Partial));
            }
        }
    }
    let wrong = messages.into_iter().filter(|(_, [sent, received])| sent != received || sent.len() != 1);
    match wrong.min_by_key(|(key, _)| *key) {
        Some((Key { from, to, lane, tag }, [sent, received])) => {
            Err(Fault::Message { from, to, lane, tag, sent, received })
        }
        None => Ok(()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Key {
    from: u32,
    to: u32,
    lane: usize,
    tag: u32,
}

fn rounds(schedule: &Schedule) -> impl Iterator<Item = (usize, usize)> {
    let lanes = schedule.lanes.iter().enumerate();
    lanes.flat_map(|(index, lane)| (0..lane.rounds.len()).map(move |round| (index, round)))
}

/// What a step reads and what it writes.
fn touches(step: &Step) -> (&[Region], Option<Region>) {
    match step {
        Step::Send { from, .. } => (std::slice::from_ref(from), None),
        Step::Recv { into, .. } => (&[], Some(*into)),
        Step::Copy { from, into } => (std::slice::from_ref(from), Some(*into)),
        Step::Reduce { sources, into } => (sources, Some(*into)),
    }
}

fn check_steps<T>(me: u32, rank: &Rank<T>, ranks: usize) -> Result<(), Fault> {
    for (lane, round) in rounds(&rank.schedule) {
        let size = |region: Region| match region.space {
            Space::Input => rank.inputs.get(region.block as usize).map(Vec::len),
            Space::Output => rank.outputs.get(region.block as usize).copied(),
            Space::Scratch => (region.block == 0).then_some(rank.schedule.lanes[lane].scratch),
            Space::Partial => (region.block == 0).then_some(rank.schedule.lanes[lane].partial),
        };
        for step in &rank.schedule.lanes[lane].rounds[round].steps {
            let fault = |what| Err(Fault::Step { rank: me, lane, round, what, step: Box::new(step.clone()) });
            let (reads, writes) = touches(step);
            for &region in reads.iter().chain(&writes) {
                let end = region.offset.checked_add(region.len);
                if end.is_none_or(|end| size(region).is_none_or(|size| end > size)) {
                    return fault("outside of its memory");
                }
            }
            if writes.is_some_and(|into| into.space == Space::Input) {
                return fault("writes its input");
            }
            match step {
                Step::Send { to: peer, .. } | Step::Recv { from: peer, .. } => {
                    if *peer == me || *peer as usize >= ranks {
                        return fault("is with no other rank");
                    }
                }
                Step::Copy { from, into } => {
                    if from.len != into.len {
                        return fault("has two lengths");
                    }
                    if (from.space == Space::Partial) != (into.space == Space::Partial) {
                        return fault("has two types");
                    }
                }
                Step::Reduce { sources, into } => {
                    if sources.is_empty() || sources.iter().any(|source| source.len != into.len) {
                        return fault("has sources of another length, or none");
                    }
                    if into.space == Space::Scratch {
                        return fault("reduces into scratch");
                    }
                }
            }
        }
    }
    Ok(())
}

/// One run of elements that a step touches, in numbers that are equal for the same memory.
#[derive(Clone, Copy)]
struct Touch {
    space: u8,
    start: usize,
    end: usize,
    writes: bool,
    /// Lane and round.
    at: (usize, usize),
    /// Steps with equal numbers don't race with each other.
    party: usize,
    region: Region,
}

/// Finds two touches of different parties that overlap, one of them a write.
fn race(me: u32, touches: &mut [Touch]) -> Result<(), Fault> {
    touches.sort_unstable_by_key(|touch| (touch.space, touch.start));
    // For reads and for writes the two furthest ends so far of different parties: one of them is another's than mine.
    let mut furthest: [[Option<Touch>; 2]; 2] = [[None; 2]; 2];
    for &touch in touches.iter() {
        for other in furthest[1].iter().chain(if touch.writes { &furthest[0][..] } else { &[] }).flatten() {
            if other.party != touch.party && other.space == touch.space && other.end > touch.start {
                return Err(Fault::Race {
                    rank: me,
                    first: other.at,
                    second: touch.at,
                    space: touch.region.space,
                    block: touch.region.block,
                });
            }
        }
        let known = &mut furthest[usize::from(touch.writes)];
        let reach = |known: &Option<Touch>| known.map(|known| (known.space, known.end));
        match known.iter().position(|known| known.is_some_and(|known| known.party == touch.party)) {
            Some(at) if reach(&known[at]) < Some((touch.space, touch.end)) => known[at] = Some(touch),
            Some(_) => {}
            None => {
                let at = usize::from(reach(&known[1]) < reach(&known[0]));
                if reach(&known[at]) < Some((touch.space, touch.end)) {
                    known[at] = Some(touch);
                }
            }
        }
    }
    Ok(())
}

fn check_races<T>(me: u32, rank: &Rank<T>) -> Result<(), Fault> {
    let places = Places::of(rank);
    let mut between_lanes = Vec::new();
    let mut within_round = Vec::new();
    for (lane, round) in rounds(&rank.schedule) {
        within_round.clear();
        for (index, step) in rank.schedule.lanes[lane].rounds[round].steps.iter().enumerate() {
            let (reads, into) = touches(step);
            if let Step::Copy { from, into } = step
                && places.start(*from) == places.start(*into)
            {
                continue;
            }
            let local = matches!(step, Step::Copy { .. } | Step::Reduce { .. });
            let reads = reads.iter().map(|&region| (region, false));
            for (region, writes) in reads.chain(into.map(|into| (into, true))).filter(|(region, _)| region.len > 0) {
                let (space, start) = places.start(region);
                let end = start + region.len;
                let touch = Touch {
                    space,
                    start,
                    end,
                    writes,
                    at: (lane, round),
                    party: if local { 0 } else { 1 + index },
                    region,
                };
                within_round.push(touch);
                if space == 0 {
                    between_lanes.push(Touch { party: lane, ..touch });
                }
            }
        }
        race(me, &mut within_round)?;
    }
    race(me, &mut between_lanes)
}

/// Where a rank's blocks lie in one vector of its input and output.
struct Places {
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    total: usize,
}

impl Places {
    fn of<T>(rank: &Rank<T>) -> Self {
        let mut total = 0;
        let mut next = |len: usize| {
            total += len;
            total - len
        };
        let inputs: Vec<usize> = rank.inputs.iter().map(|block| next(block.len())).collect();
        let mut outputs = Vec::with_capacity(rank.outputs.len());
        for (block, &len) in rank.outputs.iter().enumerate() {
            let alias = rank.aliases.iter().find(|alias| alias.1 == block);
            outputs.push(alias.map_or_else(|| next(len), |alias| inputs[alias.0]));
        }
        Places { inputs, outputs, total }
    }

    /// 0 and the place in the rank's vector, or the lane's own memory, as 1 or 2, and the place there.
    fn start(&self, region: Region) -> (u8, usize) {
        match region.space {
            Space::Input => (0, self.inputs[region.block as usize] + region.offset),
            Space::Output => (0, self.outputs[region.block as usize] + region.offset),
            Space::Scratch => (1, region.offset),
            Space::Partial => (2, region.offset),
        }
    }
}

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
                let mut total: Vec<A::Partial> = Vec::new();
                for &source in sources {
                    let lifted = match self.read(me, lane, source)? {
                        Run::Raw(raw) => raw.iter().map(|raw| self.arithmetic.lift(raw)).collect(),
                        Run::Partial(partial) => partial,
                    };
                    total = if total.is_empty() {
                        lifted
                    } else {
                        total
                            .into_iter()
                            .zip(&lifted)
                            .map(|(total, next)| self.arithmetic.combine(total, next))
                            .collect()
                    };
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

/// What a set of schedules costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cost {
    /// The most messages that have to follow one another in a lane: its length if every message takes one unit of time
    /// and nothing else takes any.
    pub depth: usize,
    /// Elements that each rank sends, raw and partial.
    pub sent: Vec<usize>,
    /// Messages that each rank sends.
    pub messages: Vec<usize>,
}

/// Costs of schedules that pass [`check`]; `counts(from, to)` says which messages count.
pub fn cost(schedules: &[Schedule], counts: impl Fn(u32, u32) -> bool) -> Cost {
    let mut cost = Cost { depth: 0, sent: vec![0; schedules.len()], messages: vec![0; schedules.len()] };
    for (me, schedule) in schedules.iter().enumerate() {
        for step in schedule.lanes.iter().flat_map(|lane| &lane.rounds).flat_map(|round| &round.steps) {
            if let Step::Send { to, from, .. } = step
                && counts(me as u32, *to)
            {
                cost.sent[me] += from.len;
                cost.messages[me] += 1;
            }
        }
    }
    let lanes = schedules.iter().map(|schedule| schedule.lanes.len()).max().unwrap_or(0);
    for lane in 0..lanes {
        cost.depth = cost.depth.max(depth(schedules, lane, &counts));
    }
    cost
}

/// When the last rank is through with the lane.
fn depth(schedules: &[Schedule], lane: usize, counts: &impl Fn(u32, u32) -> bool) -> usize {
    let rounds = |rank: usize| schedules[rank].lanes.get(lane).map_or(&[][..], |lane| &lane.rounds);
    // Each rank's round, when it entered it, how many of the round's messages are open, and when the last ended.
    struct Clock {
        round: usize,
        entered: usize,
        open: usize,
        end: usize,
    }
    let mut clocks: Vec<Clock> = Vec::new();
    let mut waiting: FxHashMap<Key, usize> = FxHashMap::default();
    let mut entering: Vec<usize> = (0..schedules.len()).collect();
    for _ in 0..schedules.len() {
        clocks.push(Clock { round: 0, entered: 0, open: 0, end: 0 });
    }
    while let Some(me) = entering.pop() {
        let Some(round) = rounds(me).get(clocks[me].round) else { continue };
        let keys = round.steps.iter().filter_map(|step| match *step {
            Step::Send { to, tag, .. } => Some(Key { from: me as u32, to, lane, tag }),
            Step::Recv { from, tag, .. } => Some(Key { from, to: me as u32, lane, tag }),
            _ => None,
        });
        let keys: Vec<Key> = keys.collect();
        let now = clocks[me].entered;
        (clocks[me].open, clocks[me].end) = (keys.len(), now);
        if keys.is_empty() {
            clocks[me].round += 1;
            entering.push(me);
        }
        for key in keys {
            let Some(other) = waiting.remove(&key) else {
                waiting.insert(key, now);
                continue;
            };
            let end = now.max(other) + usize::from(counts(key.from, key.to));
            for rank in [key.from as usize, key.to as usize] {
                let clock = &mut clocks[rank];
                clock.open -= 1;
                clock.end = clock.end.max(end);
                if clock.open == 0 {
                    (clock.round, clock.entered) = (clock.round + 1, clock.end);
                    entering.push(rank);
                }
            }
        }
    }
    clocks.iter().map(|clock| clock.end).max().unwrap_or(0)
}
