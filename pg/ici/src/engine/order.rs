//! In which order a process posted its calls, as far as other ranks can know it too.

use std::hash::{Hash as _, Hasher as _};

use rustc_hash::FxHasher;

/// What was posted so far. Groups that have ended stay known, as long as the process: when one is closed differs from
/// rank to rank, what was posted there before does not.
#[derive(Default)]
pub(super) struct Order {
    groups: Vec<Posted>,
}

struct Posted {
    group: u64,
    /// Sorted.
    members: Vec<u32>,
    count: u64,
    /// Places of the other groups that hold all of its members, by their numbers.
    around: Vec<usize>,
}

impl Posted {
    fn holds(&self, members: &[u32]) -> bool {
        members.iter().all(|one| self.members.binary_search(one).is_ok())
    }
}

impl Order {
    /// The place of a group, whose sorted members have the process among them.
    pub fn enter(&mut self, group: u64, members: Vec<u32>) -> usize {
        if let Some(place) = self.groups.iter().position(|known| known.group == group) {
            return place;
        }
        let place = self.groups.len();
        let mut around: Vec<usize> = (0..place).filter(|&other| self.groups[other].holds(&members)).collect();
        around.sort_unstable_by_key(|&other| self.groups[other].group);
        let entered = Posted { group, members, count: 0, around };
        for index in 0..place {
            if entered.holds(&self.groups[index].members) {
                let behind = self.groups[index].around.partition_point(|&other| self.groups[other].group < group);
                self.groups[index].around.insert(behind, place);
            }
        }
        self.groups.push(entered);
        place
    }

    /// Counts a call, and says what must be the same on all members beside its program: the call itself, and how many
    /// were posted before in groups that hold all of its members.
    pub fn mark(&mut self, place: usize, fingerprint: u64) -> u64 {
        let mut hash = FxHasher::default();
        fingerprint.hash(&mut hash);
        let around = self.groups[place].around.iter().map(|&other| &self.groups[other]);
        around.filter(|other| other.count > 0).for_each(|other| (other.group, other.count).hash(&mut hash));
        self.groups[place].count += 1;
        hash.finish().max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entered in an order of each rank's own.
    fn order(entered: [usize; 3]) -> (Order, [usize; 3]) {
        let members: [&[u32]; 3] = [&[0, 1, 2], &[0, 1], &[1, 2]];
        let (mut order, mut places) = (Order::default(), [0; 3]);
        for index in entered {
            places[index] = order.enter(index as u64 + 1, members[index].to_vec());
        }
        (order, places)
    }

    #[test]
    fn a_mark_tells_the_order_among_groups_that_contain_each_other() {
        let [(mut a, at), (mut b, on)] = [order([0, 1, 2]), order([2, 1, 0])];
        let first = [a.mark(at[0], 7), a.mark(at[1], 7)];
        let other = [b.mark(on[1], 7), b.mark(on[0], 7)];
        // The inner group's members all know what was posted in the outer one; not the other way round.
        assert_ne!(first[1], other[0]);
        assert_eq!(first[0], other[1]);
        // Once both have posted the same, they agree again.
        assert_eq!(a.mark(at[1], 8), b.mark(on[1], 8));
    }

    #[test]
    fn a_mark_tells_calls_apart_and_nothing_of_strangers() {
        let [(mut a, at), (mut b, on)] = [order([0, 1, 2]), order([1, 0, 2])];
        // Rank 1 has posted in a group that rank 0 is not in.
        b.mark(on[2], 5);
        assert_eq!(a.mark(at[1], 7), b.mark(on[1], 7));
        assert_ne!(a.mark(at[1], 7), b.mark(on[1], 8));
    }

    #[test]
    fn groups_of_the_same_members_are_each_around_the_other() {
        let mut ranks = [Order::default(), Order::default()];
        let places = ranks.each_mut().map(|order| [order.enter(5, vec![0, 1]), order.enter(3, vec![0, 1])]);
        let [a, b] = &mut ranks;
        assert_eq!(a.mark(places[0][0], 7), b.mark(places[1][0], 7));
        assert_eq!(a.mark(places[0][1], 7), b.mark(places[1][1], 7));
        a.mark(places[0][0], 7);
        assert_ne!(a.mark(places[0][1], 7), b.mark(places[1][1], 7));
        assert_eq!(a.enter(5, vec![0, 1]), places[0][0]);
    }
}
