//! In which order a process posted its calls, as far as other ranks can know it too.

use std::hash::{Hash as _, Hasher as _};

use rustc_hash::{FxHashMap, FxHasher};

/// What was posted so far, world by world: groups of different worlds have nothing to do with each other.
///
/// When a group is closed differs from rank to rank, what was posted there before does not. So of a group that has ended
/// its calls still count: as one number for all ended groups of the same members, until their world has ended.
#[derive(Default)]
pub(super) struct Order {
    worlds: FxHashMap<u128, World>,
}

/// Groups of one world.
#[derive(Default)]
struct World {
    groups: FxHashMap<u64, Posted>,
    /// What was posted in groups that have ended, by their members.
    ended: FxHashMap<Vec<u32>, u64>,
}

struct Posted {
    /// Sorted.
    members: Vec<u32>,
    count: u64,
    /// How often it was entered and not left.
    seats: usize,
    /// The other groups that hold all of its members.
    around: Vec<u64>,
    /// What was posted in such groups that have ended.
    ended: u64,
}

/// Whether `outer` has all of `inner`; both sorted.
fn holds(outer: &[u32], inner: &[u32]) -> bool {
    inner.iter().all(|one| outer.binary_search(one).is_ok())
}

/// What `count` calls in a group come to: to be added up, so that the groups' order is none.
fn posted(group: u64, count: u64) -> u64 {
    if count == 0 {
        return 0;
    }
    let mut hash = FxHasher::default();
    (group, count).hash(&mut hash);
    hash.finish()
}

impl Order {
    /// Takes in a group of a world, whose sorted members have the process among them.
    pub fn enter(&mut self, world: u128, group: u64, members: Vec<u32>) {
        let world = self.worlds.entry(world).or_default();
        if let Some(known) = world.groups.get_mut(&group) {
            known.seats += 1;
            return;
        }
        let mut around = Vec::new();
        for (&other, known) in &mut world.groups {
            if holds(&known.members, &members) {
                around.push(other);
            }
            if holds(&members, &known.members) {
                known.around.push(group);
            }
        }
        let over = world.ended.iter().filter(|(of, _)| holds(of, &members));
        let ended = over.fold(0u64, |sum, (_, count)| sum.wrapping_add(*count));
        world.groups.insert(group, Posted { members, count: 0, seats: 1, around, ended });
    }

    /// Lets go of a group.
    pub fn leave(&mut self, id: u128, group: u64) {
        let Some(world) = self.worlds.get_mut(&id) else { return };
        let Some(known) = world.groups.get_mut(&group) else { return };
        known.seats -= 1;
        if known.seats > 0 {
            return;
        }
        let Some(left) = world.groups.remove(&group) else { return };
        if world.groups.is_empty() {
            // No group can be made in a world whose groups have all ended, its default group among them.
            self.worlds.remove(&id);
            return;
        }
        let calls = posted(group, left.count);
        for other in world.groups.values_mut().filter(|other| other.around.contains(&group)) {
            other.around.retain(|&one| one != group);
            other.ended = other.ended.wrapping_add(calls);
        }
        if calls != 0 {
            let sum = world.ended.entry(left.members).or_default();
            *sum = sum.wrapping_add(calls);
        }
    }

    /// Counts a call, and says what must be the same on all members beside its program: the call itself, and how many
    /// were posted before in groups that hold all of its members.
    pub fn mark(&mut self, world: u128, group: u64, fingerprint: u64) -> u64 {
        let mut hash = FxHasher::default();
        fingerprint.hash(&mut hash);
        if let Some(world) = self.worlds.get_mut(&world)
            && let Some(own) = world.groups.get(&group)
        {
            let around = own.around.iter().filter_map(|other| Some(posted(*other, world.groups.get(other)?.count)));
            around.fold(own.ended, u64::wrapping_add).hash(&mut hash);
            if let Some(own) = world.groups.get_mut(&group) {
                own.count += 1;
            }
        }
        hash.finish().max(1)
    }

    /// Groups that are there, and member sets of which there were some.
    pub fn known(&self) -> (usize, usize) {
        let worlds = self.worlds.values();
        worlds.fold((0, 0), |(groups, ended), world| (groups + world.groups.len(), ended + world.ended.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const W: u128 = 1;
    const MEMBERS: [&[u32]; 3] = [&[0, 1, 2], &[0, 1], &[1, 2]];

    /// Entered in an order of each rank's own.
    fn order(entered: [usize; 3]) -> Order {
        let mut order = Order::default();
        entered.into_iter().for_each(|index| order.enter(W, index as u64 + 1, MEMBERS[index].to_vec()));
        order
    }

    #[test]
    fn a_mark_tells_the_order_among_groups_that_contain_each_other() {
        let [mut a, mut b] = [order([0, 1, 2]), order([2, 1, 0])];
        let first = [a.mark(W, 1, 7), a.mark(W, 2, 7)];
        let other = [b.mark(W, 2, 7), b.mark(W, 1, 7)];
        // The inner group's members all know what was posted in the outer one; not the other way round.
        assert_ne!(first[1], other[0]);
        assert_eq!(first[0], other[1]);
        // Once both have posted the same, they agree again.
        assert_eq!(a.mark(W, 2, 8), b.mark(W, 2, 8));
    }

    #[test]
    fn a_mark_tells_calls_apart_and_nothing_of_strangers() {
        let [mut a, mut b] = [order([0, 1, 2]), order([1, 0, 2])];
        // Rank 1 has posted in a group that rank 0 is not in.
        b.mark(W, 3, 5);
        assert_eq!(a.mark(W, 2, 7), b.mark(W, 2, 7));
        assert_ne!(a.mark(W, 2, 7), b.mark(W, 2, 8));
    }

    #[test]
    fn groups_of_the_same_members_are_each_around_the_other() {
        let [mut a, mut b] = [Order::default(), Order::default()];
        for order in [&mut a, &mut b] {
            order.enter(W, 5, vec![0, 1]);
            order.enter(W, 3, vec![0, 1]);
        }
        assert_eq!(a.mark(W, 5, 7), b.mark(W, 5, 7));
        assert_eq!(a.mark(W, 3, 7), b.mark(W, 3, 7));
        a.mark(W, 5, 7);
        assert_ne!(a.mark(W, 3, 7), b.mark(W, 3, 7));
    }

    #[test]
    fn a_group_that_was_entered_twice_stays_until_it_is_left_twice() {
        let mut order = order([0, 1, 2]);
        order.enter(W, 2, vec![0, 1]);
        order.leave(W, 2);
        assert_eq!(order.known(), (3, 0));
        order.leave(W, 2);
        assert_eq!(order.known(), (2, 0));
        order.leave(W, 2);
        order.leave(7, 2);
        assert_eq!(order.known(), (2, 0));
    }

    #[test]
    fn a_thousand_groups_made_and_ended_leave_nothing() {
        let mut order = Order::default();
        order.enter(W, 0, vec![0, 1, 2, 3]);
        for group in 1..=1000u64 {
            order.enter(W, group, vec![0, 1 + (group % 3) as u32]);
            order.mark(W, group, group);
            order.mark(W, 0, group);
            order.leave(W, group);
        }
        // A number for each set of members, however many groups of them there were.
        assert_eq!(order.known(), (1, 3));
        assert!(order.worlds[&W].groups[&0].around.is_empty());
        order.leave(W, 0);
        assert_eq!(order.known(), (0, 0));
    }

    proptest! {
        /// Ranks that post alike agree, whenever each of them opens a group and closes it.
        #[test]
        fn when_a_group_is_closed_tells_nothing(
            calls in prop::collection::vec(0usize..3, 0..20),
            seeds in [any::<u64>(), any::<u64>()],
        ) {
            let marks = seeds.map(|seed| {
                let mut order = Order::default();
                // The default group is there from first to last.
                order.enter(W, 9, vec![0, 1, 2]);
                let early = |index: usize| seed >> index & 1 == 1;
                let enter = |order: &mut Order, index: usize| {
                    order.enter(W, index as u64 + 1, MEMBERS[index].to_vec());
                };
                (0..3).filter(|&index| early(index)).for_each(|index| enter(&mut order, index));
                let mut marks = Vec::new();
                for (at, &index) in calls.iter().enumerate() {
                    if !early(index) && !calls[..at].contains(&index) {
                        enter(&mut order, index);
                    }
                    marks.push(order.mark(W, index as u64 + 1, 7));
                    if seed >> (index + 8) & 1 == 1 && !calls[at + 1..].contains(&index) {
                        order.leave(W, index as u64 + 1);
                    }
                }
                order.enter(W, 20, vec![1]);
                marks.push(order.mark(W, 20, 7));
                marks
            });
            prop_assert_eq!(&marks[0], &marks[1]);
        }
    }
}
