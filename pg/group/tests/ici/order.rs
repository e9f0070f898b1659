//! Groups that share devices, called in different orders.

use podring_group::ProcessGroup;

use crate::job::{LONG, Random, all_reduce, machine, post, run};

/// Every rank posts rounds of its groups' collectives in an order of its own, several rounds ahead, and waits for them in
/// yet another. With launches in different orders on different devices this would hang.
#[test]
fn overlapping_groups_in_different_orders_do_not_deadlock() {
    let Some(machine) = machine(4) else { return };
    let sets: [&[u32]; 7] = [&[0, 1, 2, 3], &[0, 1], &[1, 2], &[2, 3], &[3, 0], &[0, 1, 2], &[3, 1, 2]];
    run(&machine, LONG, |rank| {
        let world = rank.world().unwrap();
        let groups: Vec<(u32, ProcessGroup)> = sets
            .iter()
            .enumerate()
            .filter_map(|(index, ranks)| {
                let sum = ranks.iter().map(|rank| rank + 1).sum();
                Some((sum, rank.group(&format!("set {index}"), ranks)?))
            })
            .collect();
        let mut random = Random(u64::from(rank.rank) + 1);
        for round in 0..30 {
            let mut posts: Vec<(usize, Vec<f32>)> = (0..groups.len())
                .flat_map(|group| {
                    [(group, vec![rank.rank as f32 + 1.0; 100 + round]), (group, vec![rank.rank as f32 + 1.0; 7])]
                })
                .collect();
            // Within a group the order of calls is the same on all ranks; between groups it is anybody's.
            let mut order: Vec<usize> = (0..posts.len()).collect();
            for place in (1..order.len()).rev() {
                order.swap(place, random.below(place + 1));
            }
            let mut seen = vec![0; groups.len()];
            let order: Vec<usize> = order
                .into_iter()
                .map(|index| {
                    let group = posts[index].0;
                    seen[group] += 1;
                    2 * group + seen[group] - 1
                })
                .collect();
            let mut works = Vec::new();
            for &index in &order {
                let (group, data) = &mut posts[index];
                works.push(post(&groups[*group].1, all_reduce(data)));
            }
            while !works.is_empty() {
                works.swap_remove(random.below(works.len())).wait(Some(LONG), || false).unwrap();
            }
            for (group, data) in &posts {
                assert!(data.iter().all(|value| *value == groups[*group].0 as f32), "round {round}");
            }
        }
        world.shutdown();
    });
}
