//! Links, distances and routes against breadth-first search.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod common;

use std::collections::{HashMap, VecDeque};

use podring_topology::{Slice, cost, link::Direction, parse};
use proptest::prelude::*;

fn chips(slice: &Slice) -> Vec<[u32; 3]> {
    let [x, y, z] = slice.dims();
    (0..x * y * z).map(|index| [index % x, index / x % y, index / x / y]).collect()
}

fn breadth_first(slice: &Slice, from: [u32; 3]) -> HashMap<[u32; 3], u32> {
    let mut hops = HashMap::from([(from, 0)]);
    let mut queue = VecDeque::from([from]);
    while let Some(at) = queue.pop_front() {
        for link in slice.links_of(at) {
            if !hops.contains_key(&link.to) {
                hops.insert(link.to, hops[&at] + 1);
                queue.push_back(link.to);
            }
        }
    }
    hops
}

proptest! {
    #[test]
    fn links_go_both_ways(slice in common::lone_slice(512)) {
        for chip in chips(&slice) {
            for link in slice.links_of(chip) {
                let back = match link.direction { Direction::Plus => Direction::Minus, Direction::Minus => Direction::Plus };
                let reverse = slice.link(link.to, link.axis, back).unwrap();
                prop_assert_eq!(reverse.to, chip);
                prop_assert_eq!(reverse.wraps, link.wraps);
            }
            let ports = slice.generation().rates().links_per_chip.value as usize;
            prop_assert!(slice.links_of(chip).count() <= ports);
        }
    }

    #[test]
    fn distance_is_the_shortest_path_and_routes_take_it(
        slice in common::lone_slice(512), pick in any::<proptest::sample::Index>(),
    ) {
        let all = chips(&slice);
        let from = all[pick.index(all.len())];
        let hops = breadth_first(&slice, from);
        prop_assert_eq!(hops.len(), all.len(), "connected");
        for to in all {
            prop_assert_eq!(slice.distance(from, to), hops[&to], "{:?} to {:?}", from, to);
            let route = slice.route(from, to);
            prop_assert_eq!(route.len() as u32, hops[&to]);
            let mut at = from;
            for link in route {
                prop_assert_eq!(link.from, at);
                at = link.to;
            }
            prop_assert_eq!(at, to);
        }
    }
}

#[test]
fn full_tori_use_every_port() {
    for name in ["v5e:16x16", "v3:32x32", "v4:4x4x4", "tpu7x:4x4x8_twisted", "v5p:4x8x8_twisted"] {
        let slice = parse(name).unwrap();
        for chip in chips(&slice) {
            assert_eq!(
                slice.links_of(chip).count(),
                slice.generation().rates().links_per_chip.value as usize,
                "{name}"
            );
        }
    }
}

#[test]
fn twists_shorten_the_way_as_the_lattices_do() {
    // Camarero et al.: the diameter of the face-centred lattice of side k is 3k/2, as is the body-centred one's.
    for (name, plain, twisted) in
        [("v5p:4x4x8", 8, 6), ("v5p:4x8x8", 10, 6), ("v5p:8x8x16", 16, 12), ("v5p:8x16x16", 20, 12)]
    {
        assert_eq!(cost::distances(&parse(name).unwrap()).1, plain, "{name}");
        assert_eq!(cost::distances(&parse(&format!("{name}_twisted")).unwrap()).1, twisted, "{name} twisted");
    }
}

#[test]
fn twisted_tori_look_the_same_from_every_chip_and_axis() {
    for name in ["v5p:4x4x8_twisted", "v5p:4x8x8_twisted", "v5p:8x4x4_twisted"] {
        let slice = parse(name).unwrap();
        let all = chips(&slice);
        let profile = |from: [u32; 3]| {
            let mut counts = vec![0; 32];
            all.iter().for_each(|&to| counts[slice.distance(from, to) as usize] += 1);
            counts
        };
        let origin = profile([0; 3]);
        assert!(all.iter().all(|&chip| profile(chip) == origin), "{name}");
    }
}
