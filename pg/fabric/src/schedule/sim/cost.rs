//! Measuring schedules.

use rustc_hash::FxHashMap;

use super::Key;
use crate::schedule::{Schedule, Step};

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
