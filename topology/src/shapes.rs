//! Which shapes exist, and the nearest that does.

use crate::{
    error::TopologyError,
    generation::{Generation, WrapRule},
    slice::Shape,
};

/// How many alternatives an error lists.
const NEAREST: usize = 3;

/// Extents that no slice of the generation can have, whatever its hosts.
pub(crate) fn check_extents(generation: Generation, dims: [u32; 3]) -> Result<(), String> {
    if dims.contains(&0) {
        return Err("every extent is at least 1".to_owned());
    }
    if generation.dimensions() == 2 && dims[2] != 1 {
        return Err(format!("{generation} pods are 2-D"));
    }
    Ok(())
}

/// Whether the pod can be cut into such a slice.
pub(crate) fn check_shape(generation: Generation, dims: [u32; 3]) -> Result<(), String> {
    check_extents(generation, dims)?;
    let chips = Shape::new3(dims).volume();
    match generation.wrap_rule() {
        WrapRule::PodAxis(length) => {
            if dims.iter().any(|&dim| dim > length) {
                return Err(format!("the pod is {length}x{length}"));
            }
            if dims.iter().any(|dim| !dim.is_power_of_two()) {
                return Err("extents are powers of two".to_owned());
            }
        }
        WrapRule::Cubes(edge) => {
            if chips > u64::from(generation.pod_chips()) {
                return Err(format!("{chips} chips; the pod has {}", generation.pod_chips()));
            }
            let within_cube = dims.iter().all(|&dim| matches!(dim, 1 | 2 | 4));
            let whole_cubes = dims.iter().all(|dim| dim % edge == 0);
            if !within_cube && !whole_cubes {
                return Err(format!(
                    "inside a {edge}x{edge}x{edge} cube extents are 1, 2 or 4; beyond it all are multiples of {edge}"
                ));
            }
        }
    }
    Ok(())
}

/// Documented twisted tori: 2A = B = C or 2A = 2B = C in some order, each a multiple of 4
/// (docs.cloud.google.com/tpu/docs/v4, "3D mesh and 3D torus").
pub(crate) fn can_twist(dims: [u32; 3]) -> bool {
    let mut sorted = dims;
    sorted.sort_unstable();
    let [a, b, c] = sorted;
    a % 4 == 0 && a > 0 && (b == a || b == 2 * a) && c == 2 * a
}

/// Every shape of the generation with exactly `chips` chips, extents ascending.
pub(crate) fn with_chips(generation: Generation, chips: u64) -> Vec<[u32; 3]> {
    let mut found = Vec::new();
    if chips == 0 || chips > u64::from(generation.pod_chips()) {
        return found;
    }
    for x in (1..=chips).take_while(|x| x * x <= chips) {
        if !chips.is_multiple_of(x) {
            continue;
        }
        let rest = chips / x;
        for y in (x..=rest).take_while(|y| y * y <= rest || generation.dimensions() == 2) {
            if !rest.is_multiple_of(y) {
                continue;
            }
            let z = rest / y;
            let ascending = [x as u32, y as u32, z as u32];
            // Sub-cube shapes are written largest first along z only from 2x2: 2x2x1, not 1x2x2.
            let dims =
                if generation.dimensions() == 3 && chips <= 4 { [z as u32, y as u32, x as u32] } else { ascending };
            if check_shape(generation, dims).is_ok() && hosts_divide(generation, dims) {
                found.push(dims);
            }
        }
    }
    found
}

/// The shape that an accelerator type of `chips` chips means: the most compact (smallest surface).
pub(crate) fn default_for_chips(generation: Generation, chips: u64) -> Option<[u32; 3]> {
    with_chips(generation, chips).into_iter().min_by_key(|&[x, y, z]| {
        (u64::from(x) * u64::from(y) + u64::from(y) * u64::from(z) + u64::from(x) * u64::from(z), x.max(y).max(z))
    })
}

/// Chip counts for which a default shape exists, nearest to `chips` first.
pub(crate) fn nearest_counts(generation: Generation, chips: f64) -> Vec<u64> {
    let pod = u64::from(generation.pod_chips());
    let mut counts: Vec<u64> = match generation.wrap_rule() {
        WrapRule::PodAxis(_) => (0..=pod.ilog2()).map(|power| 1 << power).collect(),
        WrapRule::Cubes(edge) => {
            let cube = u64::from(edge).pow(3);
            [1, 2, 4, 8, 16, 32].into_iter().chain((1..=pod / cube).map(|cubes| cubes * cube)).collect()
        }
    };
    counts.retain(|&count| default_for_chips(generation, count).is_some());
    counts.sort_by(|a, b| log_distance(*a as f64, chips).total_cmp(&log_distance(*b as f64, chips)));
    counts.truncate(NEAREST);
    counts
}

pub(crate) fn hosts_divide(generation: Generation, dims: [u32; 3]) -> bool {
    dims.iter().zip(generation.host_bounds()).all(|(&dim, bound)| dim % bound.min(dim.max(1)) == 0)
}

/// The names nearest to `dims` that exist and satisfy `also`.
pub(crate) fn nearest(generation: Generation, dims: [u32; 3], also: impl Fn([u32; 3]) -> bool) -> Vec<String> {
    let closest = closest(generation, dims, also);
    closest.into_iter().map(|dims| format!("{generation}:{}", Shape::for_generation(generation, dims))).collect()
}

pub(crate) fn nearest_twisted(generation: Generation, dims: [u32; 3]) -> Vec<String> {
    if generation.dimensions() != 3 {
        return vec!["v4:4x4x8_twisted".to_owned(), "v5p:4x4x8_twisted".to_owned(), "tpu7x:4x4x8_twisted".to_owned()];
    }
    let closest = closest(generation, dims, can_twist);
    closest.into_iter().map(|dims| format!("{generation}:{}_twisted", Shape::new3(dims))).collect()
}

pub(crate) fn bad_shape(generation: Generation, shape: Shape, reason: String) -> TopologyError {
    TopologyError::BadShape {
        generation: generation.name(),
        shape,
        reason,
        nearest: nearest(generation, shape.dims, |_| true),
    }
}

fn closest(generation: Generation, dims: [u32; 3], also: impl Fn([u32; 3]) -> bool) -> Vec<[u32; 3]> {
    let extents: Vec<u32> = match generation.wrap_rule() {
        WrapRule::PodAxis(length) => (0..=length.ilog2()).map(|power| 1 << power).collect(),
        // Cube slices longer than 64 exist on paper; nobody who mistypes means one.
        WrapRule::Cubes(edge) => [1, 2].into_iter().chain((1..=16).map(|cubes| cubes * edge)).collect(),
    };
    let third: &[u32] = if generation.dimensions() == 3 { &extents } else { &[1] };
    let mut found: Vec<(f64, [u32; 3])> = Vec::new();
    for &x in &extents {
        for &y in &extents {
            for &z in third {
                let candidate = [x, y, z];
                if check_shape(generation, candidate).is_ok() && hosts_divide(generation, candidate) && also(candidate)
                {
                    let apart =
                        (0..3).map(|axis| log_distance(f64::from(candidate[axis]), f64::from(dims[axis].max(1)))).sum();
                    found.push((apart, candidate));
                }
            }
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    found.into_iter().take(NEAREST).map(|(_, dims)| dims).collect()
}

fn log_distance(a: f64, b: f64) -> f64 {
    (a.max(0.5) / b.max(0.5)).ln().abs()
}
