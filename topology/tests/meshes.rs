//! Mesh assignment.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod common;

use std::collections::HashSet;

use podring_topology::{
    Slice, TopologyError,
    cost::Collective,
    group::GroupKind,
    mesh::{Axis, Mesh, MeshRequest, assign, score},
    parse,
};
use proptest::prelude::*;

fn request(sizes: &[u32]) -> MeshRequest {
    let axes = sizes.iter().enumerate().map(|(index, &size)| Axis::new(format!("a{index}"), i64::from(size)));
    MeshRequest::new(axes.collect())
}

/// Every mesh that gives each axis a factor of x, y, z and the cores, in one order of nearness, made by brute force.
fn brute_force(slice: &Slice, request: &MeshRequest) -> f64 {
    let sizes: Vec<u32> = request.axes.iter().map(|axis| axis.size as u32).collect();
    let [x, y, z] = slice.dims();
    let places = [x, y, z, slice.devices_per_chip()];
    let mut factorings: Vec<Vec<[u32; 4]>> = vec![vec![]];
    for &size in &sizes {
        let mut longer = Vec::new();
        for partial in &factorings {
            for a in 1..=size {
                for b in 1..=size / a {
                    for c in 1..=size / a / b {
                        if size % (a * b * c) == 0 {
                            let mut next = partial.clone();
                            next.push([a, b, c, size / (a * b * c)]);
                            longer.push(next);
                        }
                    }
                }
            }
        }
        factorings = longer;
    }
    factorings.retain(|f| (0..4).all(|p| f.iter().map(|share| share[p]).product::<u32>() == places[p]));
    let mut best = f64::INFINITY;
    for factoring in factorings {
        // Nearness: axes in order or reversed.
        for reversed in [false, true] {
            let mut order: Vec<usize> = (0..sizes.len()).collect();
            if reversed {
                order.reverse();
            }
            let mut ranks = Vec::new();
            for index in 0..slice.devices() {
                let mut left = index;
                let mut at = vec![0; sizes.len()];
                for axis in (0..sizes.len()).rev() {
                    at[axis] = left % sizes[axis];
                    left /= sizes[axis];
                }
                let mut coords = [0u32; 4];
                let mut strides = [1u32; 4];
                for &axis in &order {
                    let mut digit = at[axis];
                    for place in 0..4 {
                        coords[place] += digit % factoring[axis][place] * strides[place];
                        digit /= factoring[axis][place];
                        strides[place] *= factoring[axis][place];
                    }
                }
                ranks.push(slice.rank_at(0, [coords[0], coords[1], coords[2]], coords[3]).unwrap());
            }
            let mesh = Mesh::from_ranks(slice, &request.axes, ranks).unwrap();
            best = best.min(score(slice, request, &mesh).unwrap());
        }
    }
    best
}

proptest! {
    #[test]
    fn every_shape_is_solved_with_every_rank_once((slice, sizes) in common::slice_and_mesh(2048)) {
        let request = request(&sizes);
        let mesh = assign(&slice, &request).unwrap();
        prop_assert_eq!(mesh.sizes(), &sizes[..]);
        prop_assert_eq!(mesh.ranks().iter().collect::<HashSet<_>>().len() as u32, slice.devices());
        for (axis, &size) in sizes.iter().enumerate() {
            let groups = mesh.groups(axis);
            prop_assert_eq!(groups.size() as u32, size);
            let members: HashSet<u32> = groups.iter().flatten().copied().collect();
            prop_assert_eq!(members.len() as u32, slice.devices());
            let report = mesh.report(&slice, axis).unwrap();
            prop_assert!(report.uniform);
            prop_assert!(report.group.kind != GroupKind::Irregular);
        }
    }

    #[test]
    fn axes_of_a_mesh_meet_in_one_rank((slice, sizes) in common::slice_and_mesh(256)) {
        let mesh = assign(&slice, &request(&sizes)).unwrap();
        for first in 0..sizes.len() {
            for second in first + 1..sizes.len() {
                let a = mesh.groups(first);
                let b = mesh.groups(second);
                for group in a.iter() {
                    for other in b.iter() {
                        let shared = group.iter().filter(|rank| other.contains(rank)).count();
                        prop_assert!(shared <= 1);
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn no_factoring_is_faster((slice, sizes) in common::slice_and_mesh(64), last_talk in 0usize..3) {
        let mut request = request(&sizes);
        if let Some(axis) = request.axes.last_mut() {
            axis.talk = [Collective::AllReduce, Collective::AllToAll, Collective::AllGather][last_talk];
        }
        let ours = score(&slice, &request, &assign(&slice, &request).unwrap()).unwrap();
        let best = brute_force(&slice, &request);
        prop_assert!(ours <= best * (1.0 + 1e-6), "{} {:?}: {} against {}", slice, sizes, ours, best);
    }
}

#[test]
fn shapes_that_need_split_axes_are_solved() {
    for (name, sizes) in [
        ("v5p:4x4x4", vec![8, 8]),
        ("v5p:8x8x8", vec![32, 16]),
        ("v5e:16x16", vec![64, 4]),
        ("v5p:4x4x8", vec![2, 64]),
        ("tpu7x:16x24x24", vec![96, 192]),
        ("tpu7x:16x24x24", vec![96, 96, 2]),
        ("v5p:16x24x24", vec![96, 96]),
    ] {
        let Ok(slice) = parse(name) else {
            // 9,216 chips are more than a v5p pod.
            assert_eq!(name, "v5p:16x24x24");
            continue;
        };
        let mesh = assign(&slice, &request(&sizes)).unwrap();
        assert_eq!(mesh.ranks().iter().collect::<HashSet<_>>().len() as u32, slice.devices(), "{name} {sizes:?}");
    }
}

#[test]
fn the_axis_that_talks_most_gets_the_rings() {
    let slice = parse("v5p:4x4x8").unwrap();
    let mesh = assign(&slice, &request(&[8, 16])).unwrap();
    let kind = |mesh: &Mesh, axis: usize| mesh.report(&slice, axis).unwrap();
    let hot = kind(&mesh, 1).group;
    assert_eq!(hot.axes().count(), 2, "{hot:?}");
    assert!(hot.extents.unwrap().iter().filter(|e| e.count > 1).all(|e| e.wrap));
    // Told otherwise, the first axis gets the better links.
    let mut other = request(&[16, 8]);
    other.axes[0].traffic = Some(100.0);
    other.axes[1].traffic = Some(1.0);
    let hot = kind(&assign(&slice, &other).unwrap(), 0).group;
    assert!(hot.extents.unwrap().iter().filter(|e| e.count > 1).all(|e| e.wrap && e.stride == 1), "{hot:?}");
}

#[test]
fn slices_lie_outermost_or_where_asked() {
    let slice = parse("v5e:4x4*2").unwrap();
    let mesh = assign(&slice, &request(&[4, 8])).unwrap();
    let slice_of = |rank: u32| slice.device(rank).unwrap().slice;
    assert!(mesh.ranks()[..16].iter().all(|&rank| slice_of(rank) == 0));
    assert!(mesh.groups(1).iter().all(|group| group.iter().all(|&rank| slice_of(rank) == slice_of(group[0]))));
    let mut asked = request(&[4, 8]);
    asked.dcn = Some(vec![("a1".into(), 2)]);
    let mesh = assign(&slice, &asked).unwrap();
    assert!(mesh.groups(0).iter().all(|group| group.iter().all(|&rank| slice_of(rank) == slice_of(group[0]))));
    assert!(mesh.groups(1).iter().all(|group| group.iter().filter(|&&rank| slice_of(rank) == 0).count() == 4));
    asked.dcn = Some(vec![("zz".into(), 2)]);
    assert!(matches!(assign(&slice, &asked), Err(TopologyError::UnknownAxis { .. })));
    asked.dcn = Some(vec![("a1".into(), 3)]);
    assert!(matches!(assign(&slice, &asked), Err(TopologyError::DcnAxes { .. })));
    let three = parse("v5e:4x4*3").unwrap();
    assert!(assign(&three, &request(&[48])).is_ok());
}

#[test]
fn bad_meshes_say_what_fits() {
    let slice = parse("v5p:4x4x4").unwrap();
    let text = |sizes: &[i64]| {
        let axes = ["dp", "tp", "pp"].iter().zip(sizes).map(|(name, &size)| Axis::new(*name, size)).collect();
        assign(&slice, &MeshRequest::new(axes)).unwrap_err().to_string()
    };
    assert!(text(&[8, 16]).contains("dp=4,tp=16"), "{}", text(&[8, 16]));
    assert!(text(&[8, 16]).contains("dp=8,tp=8"), "{}", text(&[8, 16]));
    assert!(text(&[5, 7]).contains("for 64 devices"), "{}", text(&[5, 7]));
    assert!(text(&[0, 64]).contains("\"dp\" has size 0"), "{}", text(&[0, 64]));
    assert!(text(&[64, -1]).contains("\"tp\" has size -1"), "{}", text(&[64, -1]));
    assert!(text(&[i64::MAX, 2]).contains("places"), "{}", text(&[i64::MAX, 2]));
    let twice = MeshRequest::new(vec![Axis::new("dp", 8), Axis::new("dp", 8)]);
    assert!(matches!(assign(&slice, &twice), Err(TopologyError::DuplicateAxis { .. })));
    assert!(assign(&slice, &MeshRequest::new(vec![])).is_err());
}
