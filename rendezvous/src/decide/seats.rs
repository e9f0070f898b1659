//! The ranks of one host, as their agent keeps them: who is seated, who is refused.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::refusal::Refusal;

/// How many refusals are kept for those who wait in vain.
const REFUSED: usize = 16;

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seated {
    /// Its number.
    pub rank: u32,
    /// Ranks in the world, as it believes.
    pub world_size: u32,
    /// Its host.
    pub host: String,
    /// What the others need to know of it; opaque here.
    pub detail: Vec<u8>,
    /// Until when it waits.
    pub deadline: Duration,
    /// The hosts of all ranks, where it knows them.
    pub hosts: Vec<String>,
    /// Ranks that its launcher started on this host.
    pub expected: Vec<u32>,
}

/// What the agent announces for all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    /// The host.
    pub host: String,
    /// Ranks in the world.
    pub world_size: u32,
    /// The ranks, ascending.
    pub ranks: Vec<u32>,
    /// One for each.
    pub details: Vec<Vec<u8>>,
    /// The hosts of all ranks, where known.
    pub hosts: Vec<String>,
    /// Ranks that the launcher started here.
    pub expected: Vec<u32>,
    /// How long they wait: as long as the first of them to give up.
    pub timeout: Duration,
}

/// Who is seated, by the number of his connection.
#[derive(Debug, Default)]
pub struct Seats {
    seated: BTreeMap<u64, Seated>,
    refused: Vec<String>,
}

impl Seats {
    /// A rank sits down. Refused: one whose number is taken, or who believes in another world size.
    pub fn sit(&mut self, id: u64, seat: Seated) -> Result<(), Refusal> {
        let taken = self.seated.values().find(|other| other.rank == seat.rank);
        let differs = self.seated.values().find(|other| other.world_size != seat.world_size);
        let refusal = match (taken, differs) {
            (Some(holder), _) => {
                Refusal::Twin { rank: seat.rank, holder: holder.host.clone(), second: seat.host.clone() }
            }
            (None, Some(other)) => Refusal::SizesDiffer {
                yours: seat.world_size,
                theirs: other.world_size,
                host: format!("rank {} on {}", other.rank, other.host),
            },
            (None, None) => {
                self.seated.insert(id, seat);
                return Ok(());
            }
        };
        if self.refused.len() < REFUSED {
            self.refused.push(format!("rank {} on {}: {refusal}", seat.rank, seat.host));
        }
        Err(refusal)
    }

    /// A rank gets up.
    pub fn rise(&mut self, id: u64) -> Option<Seated> {
        self.seated.remove(&id)
    }

    /// The seat of a connection.
    pub fn get(&self, id: u64) -> Option<&Seated> {
        self.seated.get(&id)
    }

    /// Who has this rank.
    pub fn holder(&self, rank: u32) -> Option<&Seated> {
        self.seated.values().find(|seat| seat.rank == rank)
    }

    /// The connections of those seated.
    pub fn ids(&self) -> Vec<u64> {
        self.seated.keys().copied().collect()
    }

    /// Nobody is seated.
    pub fn is_empty(&self) -> bool {
        self.seated.is_empty()
    }

    /// Who was refused so far, and why.
    pub fn refused(&self) -> &[String] {
        &self.refused
    }

    /// What to announce, if anybody is seated.
    pub fn together(&self, now: Duration) -> Option<Together> {
        let mut all: Vec<&Seated> = self.seated.values().collect();
        all.sort_by_key(|seat| seat.rank);
        let first = all.first()?;
        let deadline = all.iter().map(|seat| seat.deadline).min()?;
        let mut expected: Vec<u32> = all.iter().flat_map(|seat| seat.expected.iter().copied()).collect();
        expected.sort_unstable();
        expected.dedup();
        expected.truncate(first.world_size as usize);
        Some(Together {
            host: first.host.clone(),
            world_size: first.world_size,
            ranks: all.iter().map(|seat| seat.rank).collect(),
            details: all.iter().map(|seat| seat.detail.clone()).collect(),
            hosts: all.iter().map(|seat| &seat.hosts).find(|hosts| !hosts.is_empty()).cloned().unwrap_or_default(),
            expected,
            timeout: deadline.saturating_sub(now),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn seat(rank: u32, world_size: u32) -> Seated {
        Seated {
            rank,
            world_size,
            host: format!("h{rank}"),
            detail: vec![rank as u8],
            deadline: SECOND * (10 - rank),
            hosts: Vec::new(),
            expected: vec![rank, 2],
        }
    }

    #[test]
    fn all_are_announced_together() {
        let mut seats = Seats::default();
        assert_eq!(seats.together(SECOND), None);
        seats.sit(5, seat(3, 4)).unwrap();
        seats.sit(9, seat(1, 4)).unwrap();
        let together = seats.together(SECOND).unwrap();
        assert_eq!((together.ranks, together.details), (vec![1, 3], vec![vec![1], vec![3]]));
        assert_eq!((together.timeout, together.expected), (6 * SECOND, vec![1, 2, 3]));
        assert_eq!((together.host.as_str(), together.world_size), ("h1", 4));
        assert_eq!(seats.rise(9).unwrap().rank, 1);
        assert_eq!(seats.rise(9), None);
        assert_eq!((seats.ids(), seats.is_empty()), (vec![5], false));
    }

    #[test]
    fn a_twin_and_another_size_are_refused_and_noted() {
        let mut seats = Seats::default();
        seats.sit(0, seat(0, 2)).unwrap();
        let twin = seats.sit(1, seat(0, 2)).unwrap_err();
        assert_eq!(twin, Refusal::Twin { rank: 0, holder: "h0".into(), second: "h0".into() });
        let sizes = seats.sit(2, seat(1, 3)).unwrap_err();
        assert_eq!(sizes, Refusal::SizesDiffer { yours: 3, theirs: 2, host: "rank 0 on h0".into() });
        assert!(seats.refused()[1].contains("rank 1 on h1: world size 3 differs from 2"), "{:?}", seats.refused());
    }
}
