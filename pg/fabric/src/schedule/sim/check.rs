//! What is wrong with schedules whatever the timing.

use super::{Fault, Key, Places, Rank, rounds, touches};
use crate::schedule::{Region, Space, Step};

/// Checks schedules for everything that doesn't depend on values or timing.
pub fn check<T>(ranks: &[Rank<T>]) -> Result<(), Fault> {
    let mut messages = Vec::new();
    for (me, rank) in ranks.iter().enumerate() {
        let me = me as u32;
        check_steps(me, rank, ranks.len())?;
        check_races(me, rank)?;
        for (lane, round) in rounds(&rank.schedule) {
            for step in &rank.schedule.lanes[lane].rounds[round].steps {
                let (key, received, region) = match *step {
                    Step::Send { to, tag, from } => (Key { from: me, to, lane, tag }, false, from),
                    Step::Recv { from, tag, into } => (Key { from, to: me, lane, tag }, true, into),
                    _ => continue,
                };
                messages.push((key, received, (region.len, region.space == Space::Partial)));
            }
        }
    }
    messages.sort_unstable();
    for ends in messages.chunk_by(|one, other| one.0 == other.0) {
        if !matches!(ends, [(_, false, sent), (_, true, received)] if sent == received) {
            let Key { from, to, lane, tag } = ends[0].0;
            let side = |side| ends.iter().filter(|end| end.1 == side).map(|end| end.2).collect();
            return Err(Fault::Message { from, to, lane, tag, sent: side(false), received: side(true) });
        }
    }
    Ok(())
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
