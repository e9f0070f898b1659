//! Classes, ring orders, diameters and covers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod common;

use std::collections::HashSet;

use common::box_ranks;
use podring_topology::{
    Slice, TopologyError,
    cover::{Filling, cover},
    group::{GroupKind, classify, diameter},
    parse,
    ring::{Hamiltonian, box_cycle, ring_order},
};
use proptest::prelude::*;

fn is_cycle(slice: &Slice, order: &[u32]) -> bool {
    let devices: Vec<_> = order.iter().map(|&rank| slice.device(rank).unwrap()).collect();
    (0..devices.len()).all(|index| {
        let (a, b) = (&devices[index], &devices[(index + 1) % devices.len()]);
        a.slice == b.slice && (a.coords == b.coords || slice.links_of(a.coords).any(|link| link.to == b.coords))
    })
}

fn same_members(a: &[u32], b: &[u32]) -> bool {
    a.len() == b.len() && a.iter().collect::<HashSet<_>>() == b.iter().collect::<HashSet<_>>()
}

proptest! {
    #[test]
    fn the_class_depends_on_the_set_alone((slice, ranks) in common::slice_and_ranks()) {
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        prop_assert_eq!(classify(&slice, &ranks).unwrap(), classify(&slice, &sorted).unwrap());
    }

    #[test]
    fn a_regular_groups_extents_are_its_members((slice, ranks) in common::slice_and_ranks()) {
        let group = classify(&slice, &ranks).unwrap();
        prop_assert_eq!(group.size as usize, ranks.len());
        if let Some(extents) = group.extents {
            for &rank in &ranks {
                let device = slice.device(rank).unwrap();
                for (axis, extent) in extents.iter().enumerate() {
                    let found = (0..extent.count)
                        .any(|step| (extent.start + step * extent.stride) % slice.dims()[axis] == device.coords[axis]);
                    prop_assert!(found);
                }
            }
            let places: u32 = extents.iter().map(|extent| extent.count).product();
            prop_assert_eq!(places * group.cores * group.slices, group.size);
        }
    }

    #[test]
    fn rings_hold_every_member_once_and_say_the_truth((slice, ranks) in common::slice_and_ranks()) {
        let ring = ring_order(&slice, &ranks).unwrap();
        prop_assert!(same_members(&ring.order, &ranks));
        if ring.hamiltonian == Hamiltonian::Cycle {
            prop_assert!(ring.longest_step <= 1);
            prop_assert!(ranks.len() == 1 || is_cycle(&slice, &ring.order));
        }
    }

    #[test]
    fn diameters_are_the_largest_distance((slice, ranks) in common::slice_and_ranks()) {
        let devices: Vec<_> = ranks.iter().map(|&rank| slice.device(rank).unwrap()).collect();
        let mut furthest = 0;
        for a in &devices {
            for b in devices.iter().filter(|b| b.slice == a.slice) {
                furthest = furthest.max(slice.distance(a.coords, b.coords));
            }
        }
        prop_assert_eq!(diameter(&slice, &ranks).unwrap(), furthest);
    }

    #[test]
    fn covers_hold_every_device_once((slice, ranks) in common::slice_and_ranks()) {
        match cover(&slice, std::slice::from_ref(&ranks)) {
            Ok(cover) => {
                prop_assert_eq!(&cover.groups[0], &ranks);
                prop_assert!(cover.groups.iter().all(|group| group.len() == ranks.len()));
                let all: HashSet<u32> = cover.groups.iter().flatten().copied().collect();
                prop_assert_eq!(all.len() as u32, slice.devices());
                prop_assert_eq!(cover.groups.len() * ranks.len(), slice.devices() as usize);
                if cover.filling == Filling::Translated {
                    let shape = |group: &Vec<u32>| {
                        let group = classify(&slice, group).unwrap();
                        (group.kind, group.extents.map(|extents| extents.map(|e| (e.count, e.stride, e.wrap))))
                    };
                    for group in &cover.groups {
                        prop_assert_eq!(shape(group), shape(&ranks));
                    }
                }
            }
            Err(TopologyError::NoCover { size, devices }) => prop_assert!(devices % size != 0),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    #[test]
    fn boxes_have_cycles_exactly_when_they_can(
        counts in (1u32..7, 1u32..7, 1u32..5), wraps in any::<[bool; 3]>(),
    ) {
        let counts = [counts.0, counts.1, counts.2];
        let (tour, closed) = box_cycle(counts, wraps);
        prop_assert_eq!(tour.iter().collect::<HashSet<_>>().len() as u32, counts.iter().product::<u32>());
        let apart = |a: [u32; 3], b: [u32; 3]| -> u32 {
            (0..3).map(|axis| {
                let apart = a[axis].abs_diff(b[axis]);
                if wraps[axis] { apart.min(counts[axis] - apart) } else { apart }
            }).sum()
        };
        let steps_are_one = (0..tour.len()).all(|i| apart(tour[i], tour[(i + 1) % tour.len()]) <= 1);
        prop_assert_eq!(closed, steps_are_one);
        let active = counts.iter().filter(|&&count| count > 1).count();
        let even = counts.iter().product::<u32>() % 2 == 0;
        let wrapped = (0..3).any(|axis| wraps[axis] && counts[axis] > 1);
        let expected = match active {
            0 => true,
            1 => wrapped || counts.contains(&2),
            _ => even || wrapped,
        };
        prop_assert_eq!(closed, expected);
    }

    #[test]
    fn wrong_ranks_are_refused(slice in common::any_slice(), beyond in 0u32..100) {
        let outside = slice.devices() + beyond;
        let refused = matches!(classify(&slice, &[outside]), Err(TopologyError::RankOutOfRange { .. }));
        prop_assert!(refused);
        let refused = matches!(ring_order(&slice, &[0, 0]), Err(TopologyError::DuplicateRank { rank: 0 }));
        prop_assert!(refused);
        prop_assert_eq!(diameter(&slice, &[]), Err(TopologyError::EmptyGroup));
    }
}

#[test]
fn classes() {
    let one = (0, 1, 1);
    for (name, extents, cores, kind) in [
        ("v5e:16x16", [(0, 16, 1), one, one], vec![0], GroupKind::Ring),
        ("v5e:8x8", [(0, 8, 1), one, one], vec![0], GroupKind::Line),
        ("v5e:16x16", [(0, 8, 1), one, one], vec![0], GroupKind::Line),
        ("v5e:16x16", [(14, 4, 1), one, one], vec![0], GroupKind::Line),
        ("v5e:16x16", [(1, 8, 2), one, one], vec![0], GroupKind::Strided),
        ("v5e:16x16", [(0, 4, 1), (4, 4, 1), one], vec![0], GroupKind::SubTorus),
        ("v5p:4x4x8", [(0, 4, 1), (0, 4, 1), (0, 8, 1)], vec![0], GroupKind::Whole),
        ("v5p:4x4x8_twisted", [one, one, (0, 8, 1)], vec![0], GroupKind::Ring),
        ("v5p:4x4x8_twisted", [(0, 4, 1), one, one], vec![0], GroupKind::Line),
        ("v5p:4x4x8_twisted", [(0, 4, 1), one, (0, 8, 1)], vec![0], GroupKind::SubTorus),
        ("tpu7x:2x2x1", [one, one, one], vec![0, 1], GroupKind::Cores),
        ("tpu7x:2x2x1", [one, one, one], vec![1], GroupKind::Single),
        ("tpu7x:4x4x4", [(0, 4, 1), one, one], vec![0, 1], GroupKind::Ring),
    ] {
        let slice = parse(name).unwrap();
        let group = classify(&slice, &box_ranks(&slice, extents, &cores)).unwrap();
        assert_eq!(group.kind, kind, "{name} {extents:?}");
    }
    let slices = parse("v5e:4x4*2").unwrap();
    let pair = [slices.rank_at(0, [0; 3], 0).unwrap(), slices.rank_at(1, [0; 3], 0).unwrap()];
    assert_eq!(classify(&slices, &pair).unwrap().kind, GroupKind::Slices);
    let all: Vec<u32> = (0..32).collect();
    assert_eq!(classify(&slices, &all).unwrap().kind, GroupKind::Whole);
    assert_eq!(classify(&slices, &all[..16]).unwrap().kind, GroupKind::Whole);
    let v5e = parse("v5e:4x4").unwrap();
    let odd: Vec<u32> = [0u32, 3, 5, 10].iter().map(|&id| v5e.rank_of_id(id).unwrap()).collect();
    assert_eq!(classify(&v5e, &odd).unwrap().kind, GroupKind::Irregular);
}

#[test]
fn a_short_axis_of_a_twisted_torus_closes_over_two_rows_of_the_long_one() {
    let slice = parse("v5p:4x4x8_twisted").unwrap();
    let ranks = box_ranks(&slice, [(0, 4, 1), (0, 1, 1), (1, 2, 4)], &[0]);
    let group = classify(&slice, &ranks).unwrap();
    assert!(group.extents.unwrap()[0].wrap);
    let ring = ring_order(&slice, &ranks).unwrap();
    assert_eq!(ring.hamiltonian, Hamiltonian::Cycle);
    assert!(is_cycle(&slice, &ring.order));
}

#[test]
fn whole_slices_have_a_cycle_wherever_one_exists() {
    for name in common::slice_names() {
        let slice = parse(&name).unwrap();
        let ranks: Vec<u32> = (0..slice.devices()).collect();
        let ring = ring_order(&slice, &ranks).unwrap();
        let dims = slice.dims();
        let lone = dims.iter().filter(|&&dim| dim > 1).count() == 1;
        let exists = !lone || dims.contains(&2) || slice.wrap().contains(&true);
        assert_eq!(ring.hamiltonian == Hamiltonian::Cycle, exists, "{name}");
        assert_eq!(
            ring.longest_step,
            if slice.chips_per_slice() == 1 {
                0
            } else if exists {
                1
            } else {
                2
            },
            "{name}"
        );
    }
}

#[test]
fn covers_keep_the_shape_where_it_tiles() {
    let slice = parse("v5e:16x16").unwrap();
    let ask = |extents| cover(&slice, &[box_ranks(&slice, extents, &[0])]).unwrap().filling;
    assert_eq!(ask([(4, 4, 1), (8, 2, 1), (0, 1, 1)]), Filling::Translated);
    assert_eq!(ask([(15, 4, 1), (3, 2, 1), (0, 1, 1)]), Filling::Translated);
    assert_eq!(ask([(1, 8, 2), (0, 16, 1), (0, 1, 1)]), Filling::Translated);
    assert_eq!(ask([(0, 16, 1), (0, 16, 1), (0, 1, 1)]), Filling::Complete);
    let flat = parse("v5e:8x8").unwrap();
    let off_grid = box_ranks(&flat, [(1, 4, 1), (0, 1, 1), (0, 1, 1)], &[0]);
    assert_eq!(cover(&flat, &[off_grid]).unwrap().filling, Filling::ListOrder);
    let pair = vec![vec![0, 1], vec![2, 3, 4]];
    assert_eq!(cover(&flat, &pair), Err(TopologyError::UnequalGroups { index: 1, size: 3, first: 2 }));
    assert_eq!(cover(&flat, &[vec![0, 1, 2]]), Err(TopologyError::NoCover { size: 3, devices: 64 }));
    assert_eq!(cover(&flat, &[vec![0, 1], vec![1, 2]]), Err(TopologyError::DuplicateRank { rank: 1 }));
    let both = cover(&flat, &[vec![2, 3], vec![0, 1]]).unwrap();
    assert_eq!((&both.groups[0], &both.groups[1]), (&vec![2, 3], &vec![0, 1]));
    assert_eq!(both.filling, Filling::Translated);
}

#[test]
fn two_members_over_the_end_of_a_ring_are_neighbours() {
    let slice = parse("v2:16x2").unwrap();
    let ranks: Vec<u32> =
        (0..slice.devices()).filter(|&rank| matches!(slice.device(rank).unwrap().coords, [0 | 15, 0, 0])).collect();
    let group = classify(&slice, &ranks).unwrap();
    let x = group.extents.unwrap()[0];
    assert_eq!((group.kind, x.start, x.count, x.stride), (GroupKind::Line, 15, 2, 1));
}
