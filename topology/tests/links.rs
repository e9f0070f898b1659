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
    // 3k/2 for both: as far as (k/2, k/2, k/2) is from the nearest points of either lattice (which the next test checks).
    for (name, plain, twisted) in
        [("v5p:4x4x8", 8, 6), ("v5p:4x8x8", 10, 6), ("v5p:8x8x16", 16, 12), ("v5p:8x16x16", 20, 12)]
    {
        assert_eq!(cost::distances(&parse(name).unwrap()).1, plain, "{name}");
        assert_eq!(cost::distances(&parse(&format!("{name}_twisted")).unwrap()).1, twisted, "{name} twisted");
    }
}

#[test]
fn twists_are_the_cubic_crystal_lattices() {
    // Unrolled, the copies of a chip are the points k·(a, b, c): a + b + c even (face-centred), or a, b, c all even or all
    // odd (body-centred). Walking there link by link ends at the start; walking to k·(any other) does not.
    for (name, k, body) in [
        ("v5p:4x4x8_twisted", 4, false),
        ("v5p:8x4x4_twisted", 4, false),
        ("v5p:8x16x8_twisted", 8, false),
        ("v5p:4x8x8_twisted", 4, true),
        ("v5p:16x8x16_twisted", 8, true),
    ] {
        let slice = parse(name).unwrap();
        let walk = |steps: [i32; 3]| {
            let mut at = [0; 3];
            for (axis, &count) in steps.iter().enumerate() {
                let direction = if count < 0 { Direction::Minus } else { Direction::Plus };
                for _ in 0..count.abs() {
                    at = slice.link(at, axis, direction).unwrap().to;
                }
            }
            at
        };
        for index in 0..125 {
            let [a, b, c] = [index / 25 - 2, index / 5 % 5 - 2, index % 5 - 2];
            let odd = [a, b, c].map(|n: i32| n.rem_euclid(2));
            let point = if body { odd[0] == odd[1] && odd[1] == odd[2] } else { odd.iter().sum::<i32>() % 2 == 0 };
            assert_eq!(walk([k * a, k * b, k * c]) == [0; 3], point, "{name}: {a} {b} {c}");
        }
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
