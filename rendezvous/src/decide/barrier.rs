//! Barriers of named ranks within an epoch.
//!
//! The first deadline among those who wait ends a barrier for all of them, with the same list of missing ranks: a
//! barrier that failed for one member can't succeed for another.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::{Answer, bounded, invalid};
use crate::refusal::{Lost, RankAt, Refusal};

/// How many barriers may be open, and how long a name may be.
const OPEN: usize = 65_536;
const NAME_BYTES: usize = 4096;

/// An arrival.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// The epoch.
    pub epoch: u64,
    /// The barrier. A name can be used again when all have passed.
    pub name: String,
    /// Who arrives.
    pub ranks: Vec<u32>,
    /// Who takes part, ascending.
    pub members: Arc<[u32]>,
    /// How long the caller waits.
    pub timeout: Duration,
}

struct Open {
    members: Arc<[u32]>,
    arrived: BTreeSet<u32>,
    waiting: Vec<(u64, Vec<u32>)>,
    began: Duration,
    deadline: Duration,
}

/// How a barrier ended for one call.
pub type Passed = (u64, Result<(), Refusal>);

/// All open barriers.
#[derive(Default)]
pub struct Barriers {
    open: FxHashMap<(u64, String), Open>,
    next: u64,
    passed: Vec<Passed>,
}

impl Barriers {
    /// Ranks arrive. Answered at once for the last, later for the others.
    pub fn arrive(&mut self, now: Duration, arrival: Arrival) -> Result<Answer<()>, Refusal> {
        let Arrival { epoch, name, ranks, members, timeout } = arrival;
        bounded("bytes of a barrier's name", name.len(), NAME_BYTES)?;
        if members.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(invalid("members", "not ascending"));
        }
        if let Some(rank) = ranks.iter().find(|rank| members.binary_search(rank).is_err()) {
            return Err(invalid("rank", format!("{rank}, which isn't a member of barrier {name:?}")));
        }
        let open = self.open.len();
        let key = (epoch, name);
        if !self.open.contains_key(&key) {
            bounded("open barriers", open + 1, OPEN)?;
        }
        let barrier = self.open.entry(key.clone()).or_insert_with(|| Open {
            members: Arc::clone(&members),
            arrived: BTreeSet::new(),
            waiting: Vec::new(),
            began: now,
            deadline: now + timeout,
        });
        if barrier.members != members {
            let theirs = barrier.members.len();
            return Err(invalid("members", format!("{} ranks where others gave {theirs}, or others", members.len())));
        }
        if let Some(rank) = ranks.iter().find(|rank| barrier.arrived.contains(rank)) {
            return Err(invalid("rank", format!("{rank}, which has arrived at barrier {:?} already", key.1)));
        }
        barrier.arrived.extend(&ranks);
        if barrier.arrived.len() == barrier.members.len() {
            if let Some(barrier) = self.open.remove(&key) {
                self.passed.extend(barrier.waiting.into_iter().map(|(id, _)| (id, Ok(()))));
            }
            return Ok(Answer::Now(()));
        }
        barrier.deadline = barrier.deadline.min(now + timeout);
        let id = self.next;
        self.next += 1;
        barrier.waiting.push((id, ranks));
        Ok(Answer::Later(id))
    }

    /// The caller is gone: its ranks haven't arrived.
    pub fn cancel(&mut self, id: u64) {
        self.open.retain(|_, barrier| {
            if let Some(index) = barrier.waiting.iter().position(|(other, _)| *other == id) {
                let (_, ranks) = barrier.waiting.swap_remove(index);
                for rank in ranks {
                    barrier.arrived.remove(&rank);
                }
            }
            !barrier.waiting.is_empty()
        });
    }

    /// Ranks are gone: barriers that need them fail.
    pub fn lost(&mut self, lost: &Lost) {
        self.end(|(epoch, _), barrier| {
            let needs = |rank: &u32| barrier.members.binary_search(rank).is_ok();
            (*epoch == lost.epoch && lost.ranks.iter().any(needs)).then(|| Refusal::Lost(lost.clone()))
        });
    }

    /// Another epoch has formed: barriers of earlier ones fail.
    pub fn superseded(&mut self, current: u64) {
        self.end(|(epoch, _), _| (*epoch != current).then_some(Refusal::Stale { yours: *epoch, current }));
    }

    /// Ends barriers that are overdue.
    pub fn tick(&mut self, now: Duration, host_of: impl Fn(u32) -> Option<String>) {
        self.end(|(_, name), barrier| {
            let absent = barrier.members.iter().filter(|rank| !barrier.arrived.contains(rank));
            (barrier.deadline <= now).then(|| Refusal::BarrierLate {
                name: name.clone(),
                missing: absent.map(|rank| RankAt { rank: *rank, host: host_of(*rank) }).collect(),
                waited: now - barrier.began,
            })
        });
    }

    /// When [`Barriers::tick`] is due next.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.open.values().map(|barrier| barrier.deadline).min()
    }

    /// Calls answered since the last time this was asked.
    pub fn passed(&mut self) -> Vec<Passed> {
        std::mem::take(&mut self.passed)
    }

    /// How many calls wait.
    pub fn waiting(&self) -> usize {
        self.open.values().map(|barrier| barrier.waiting.len()).sum()
    }

    fn end(&mut self, why: impl Fn(&(u64, String), &Open) -> Option<Refusal>) {
        let passed = &mut self.passed;
        self.open.retain(|key, barrier| match why(key, barrier) {
            None => true,
            Some(refusal) => {
                passed.extend(barrier.waiting.drain(..).map(|(id, _)| (id, Err(refusal.clone()))));
                false
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn arrival(name: &str, ranks: &[u32], members: &[u32], seconds: u32) -> Arrival {
        let timeout = seconds * SECOND;
        Arrival { epoch: 1, name: name.into(), ranks: ranks.to_vec(), members: members.into(), timeout }
    }

    fn later(answer: Result<Answer<()>, Refusal>) -> u64 {
        match answer {
            Ok(Answer::Later(id)) => id,
            other => panic!("answered at once: {other:?}"),
        }
    }

    #[test]
    fn the_last_lets_all_pass_and_the_name_can_be_used_again() {
        let mut barriers = Barriers::default();
        for _ in 0..2 {
            let first = later(barriers.arrive(SECOND, arrival("b", &[0, 2], &[0, 1, 2], 5)));
            assert_eq!(barriers.arrive(SECOND, arrival("b", &[1], &[0, 1, 2], 5)), Ok(Answer::Now(())));
            assert_eq!(barriers.passed(), [(first, Ok(()))]);
        }
        assert_eq!(barriers.next_deadline(), None);
    }

    #[test]
    fn the_first_deadline_ends_it_for_all_with_the_missing_named() {
        let mut barriers = Barriers::default();
        let slow = later(barriers.arrive(SECOND, arrival("b", &[0], &[0, 1, 2], 9)));
        let quick = later(barriers.arrive(2 * SECOND, arrival("b", &[2], &[0, 1, 2], 3)));
        assert_eq!(barriers.next_deadline(), Some(5 * SECOND));
        barriers.tick(5 * SECOND, |rank| Some(format!("host{rank}")));
        let missing = vec![RankAt { rank: 1, host: Some("host1".into()) }];
        let refusal = Refusal::BarrierLate { name: "b".into(), missing, waited: 4 * SECOND };
        assert_eq!(refusal.to_string(), "barrier \"b\": missing after 4s: rank 1 on host1");
        assert_eq!(barriers.passed(), [(slow, Err(refusal.clone())), (quick, Err(refusal))]);
    }

    #[test]
    fn a_lost_member_ends_only_what_needs_it() {
        let mut barriers = Barriers::default();
        let needs = later(barriers.arrive(SECOND, arrival("a", &[0], &[0, 1], 9)));
        let not = later(barriers.arrive(SECOND, arrival("b", &[0], &[0, 2], 9)));
        let lost = Lost { epoch: 1, host: "h".into(), ranks: vec![1], how: "gone".into(), speaker: None };
        barriers.lost(&lost);
        assert_eq!(barriers.passed(), [(needs, Err(Refusal::Lost(lost)))]);
        barriers.superseded(2);
        assert_eq!(barriers.passed(), [(not, Err(Refusal::Stale { yours: 1, current: 2 }))]);
    }

    #[test]
    fn nonsense_is_refused_and_a_caller_who_is_gone_has_not_arrived() {
        let mut barriers = Barriers::default();
        let first = later(barriers.arrive(SECOND, arrival("b", &[0], &[0, 1], 9)));
        for bad in [
            arrival("b", &[0], &[0, 1], 9),
            arrival("b", &[1], &[0, 1, 2], 9),
            arrival("c", &[3], &[0, 1], 9),
            arrival("c", &[0], &[1, 0], 9),
        ] {
            assert!(matches!(barriers.arrive(SECOND, bad), Err(Refusal::Invalid { .. })));
        }
        barriers.cancel(first);
        assert_eq!(barriers.waiting(), 0);
        later(barriers.arrive(SECOND, arrival("b", &[1], &[0, 1], 9)));
        assert_eq!(barriers.arrive(SECOND, arrival("b", &[0], &[0, 1], 9)), Ok(Answer::Now(())));
    }

    proptest! {
        #[test]
        fn nobody_passes_before_all_have_arrived(order in Just((0u32..9).collect::<Vec<_>>()).prop_shuffle()) {
            let mut barriers = Barriers::default();
            let members: Vec<u32> = (0..9).collect();
            let mut ids = Vec::new();
            for (count, rank) in order.iter().enumerate() {
                match barriers.arrive(SECOND, arrival("b", &[*rank], &members, 9)).unwrap() {
                    Answer::Later(id) => {
                        prop_assert!(count < 8);
                        prop_assert_eq!(barriers.passed(), vec![]);
                        ids.push((id, Ok(())));
                    }
                    Answer::Now(()) => prop_assert_eq!(count, 8),
                }
            }
            prop_assert_eq!(barriers.passed(), ids);
        }
    }
}
