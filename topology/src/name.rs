//! Slice names as users write them.

use crate::{
    error::TopologyError,
    generation::Generation,
    shapes,
    slice::{ChipConfig, MAX_SLICES, Shape, Slice, SliceParts, valid_configs},
};

/// What may be said of a slice beyond its name; libtpu's topology options.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SliceOptions {
    /// Number of slices; overrides a `*N` in the name. Zero and one mean one slice.
    pub num_slices: Option<u32>,
    /// Chips of a host along x, y, z.
    pub chips_per_host_bounds: Option<[u32; 3]>,
    /// Which axes wrap, where it is not what the generation's rule says.
    pub wrap: Option<[bool; 3]>,
    /// `default` or `megacore`.
    pub chip_config_name: Option<String>,
}

/// Parses a slice name with the generation's defaults.
///
/// Accepted: libtpu's names (`v5p:4x4x8`, `v5p:4x4x8_twisted`, `v5e=4x4`), accelerator types (`v4-32`,
/// `v5litepod-16`), and either followed by `*N` for N slices.
pub fn parse(name: &str) -> Result<Slice, TopologyError> {
    parse_with(name, &SliceOptions::default())
}

/// Parses a slice name and applies options.
pub fn parse_with(name: &str, options: &SliceOptions) -> Result<Slice, TopologyError> {
    let name = name.trim();
    let (body, written_slices) = split_slices(name)?;
    let (generation, shape, twisted) = match split_topology(body) {
        Some((generation, layout)) => {
            let generation = generation_named(generation)?;
            let (layout, twisted) = match layout.strip_suffix("_twisted") {
                Some(layout) => (layout, true),
                None => (layout.strip_suffix("_untwisted").unwrap_or(layout), false),
            };
            (generation, parse_shape(name, layout)?, twisted)
        }
        None => {
            let (generation, chips) = accelerator_chips(body)?;
            (generation, default_shape(generation, chips, body)?, false)
        }
    };
    finish(generation, shape, twisted, written_slices, options)
}

/// A slice from what a TPU VM's environment says: an accelerator type, a topology, or both.
///
/// `accelerator` may be a type with a count (`v4-32`), a generation, or GKE's name (`tpu-v5-lite-podslice`);
/// `topology` is a shape (`2x2x4`) or a full name. If both are given they must agree.
pub fn from_accelerator(
    accelerator: Option<&str>,
    topology: Option<&str>,
    options: &SliceOptions,
) -> Result<Slice, TopologyError> {
    let accelerator = accelerator.map(str::trim).filter(|text| !text.is_empty());
    let topology = topology.map(str::trim).filter(|text| !text.is_empty());
    match (accelerator, topology) {
        (None, None) => Err(TopologyError::BadName {
            name: String::new(),
            expected: "an accelerator type (\"v4-32\"), a topology (\"v5p:4x4x8\") or both".to_owned(),
        }),
        (Some(accelerator), None) => parse_with(accelerator, options),
        (None, Some(topology)) => parse_with(topology, options),
        (Some(accelerator), Some(topology)) => {
            let (body, slices) = split_slices(accelerator)?;
            let (generation, chips) = match Generation::from_text(body) {
                Some(generation) => (generation, None),
                None => {
                    let (generation, chips) = accelerator_chips(body)?;
                    (generation, Some(chips))
                }
            };
            let (layout_text, topology_slices) = split_slices(topology)?;
            let (named, layout) = match split_topology(layout_text) {
                Some((named, layout)) => (Some(generation_named(named)?), layout),
                None => (None, layout_text),
            };
            let (layout, twisted) = match layout.strip_suffix("_twisted") {
                Some(layout) => (layout, true),
                None => (layout, false),
            };
            let shape = parse_shape(topology, layout)?;
            if let Some(named) = named.filter(|&named| named != generation) {
                return Err(TopologyError::GenerationMismatch {
                    accelerator: accelerator.to_owned(),
                    accelerator_generation: generation.name(),
                    topology: topology.to_owned(),
                    topology_generation: named.name(),
                });
            }
            if let Some(chips) = chips.filter(|&chips| chips != shape.volume()) {
                return Err(contradiction(accelerator, generation, chips, topology, shape));
            }
            let slices = topology_slices.or(slices);
            finish(generation, shape, twisted, slices, options)
        }
    }
}

fn finish(
    generation: Generation,
    shape: Shape,
    twisted: bool,
    written_slices: Option<u32>,
    options: &SliceOptions,
) -> Result<Slice, TopologyError> {
    let config = match options.chip_config_name.as_deref() {
        None | Some("default") => ChipConfig::Default,
        Some("megacore") => ChipConfig::Megacore,
        Some(other) => {
            return Err(TopologyError::BadChipConfig {
                generation: generation.name(),
                config: other.to_owned(),
                valid: valid_configs(generation),
            });
        }
    };
    let slices = options.num_slices.map(|count| count.max(1)).or(written_slices).unwrap_or(1);
    if slices > MAX_SLICES {
        return Err(TopologyError::BadSliceCount {
            name: format!("{generation}:{shape}"),
            count: u64::from(slices),
            max: MAX_SLICES,
        });
    }
    // A 3-D generation may be written with two extents, as libtpu allows: v4:4x4 is 4x4x1.
    let shape = Shape::for_generation(generation, shape.dims);
    Slice::build(SliceParts {
        generation,
        shape,
        host: options.chips_per_host_bounds,
        wrap: options.wrap,
        twisted,
        config,
        slices,
    })
}

fn split_slices(name: &str) -> Result<(&str, Option<u32>), TopologyError> {
    let Some((body, count)) = name.rsplit_once('*') else { return Ok((name, None)) };
    let parsed: u64 = count.trim().parse().map_err(|_| TopologyError::BadName {
        name: name.to_owned(),
        expected: "after \"*\" comes the number of slices, as in \"v5e:4x4*2\"".to_owned(),
    })?;
    match u32::try_from(parsed) {
        Ok(slices) if (1..=MAX_SLICES).contains(&slices) => Ok((body.trim(), Some(slices))),
        _ => Err(TopologyError::BadSliceCount { name: name.to_owned(), count: parsed, max: MAX_SLICES }),
    }
}

/// Splits `generation:layout`. `_` separates too, as libtpu allows, if the layout follows it.
fn split_topology(body: &str) -> Option<(&str, &str)> {
    if let Some(split) = body.split_once([':', '=']) {
        return Some(split);
    }
    let (generation, layout) = body.split_once('_')?;
    layout.starts_with(|c: char| c.is_ascii_digit()).then_some((generation, layout))
}

fn parse_shape(name: &str, layout: &str) -> Result<Shape, TopologyError> {
    let bad = || TopologyError::BadName {
        name: name.to_owned(),
        expected: "two or three extents joined by \"x\", as in \"v5e:4x4\" or \"v5p:4x4x8\", \
                   with an optional \"_twisted\" or \"*N\" slices"
            .to_owned(),
    };
    let mut dims = [1u32; 3];
    let mut written = 0usize;
    for part in layout.split('x') {
        let all_digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if written == 3 || !all_digits {
            return Err(bad());
        }
        dims[written] = part.parse().map_err(|_| bad())?;
        written += 1;
    }
    if written < 2 {
        return Err(bad());
    }
    Ok(Shape { dims, written: written as u8 })
}

fn generation_named(text: &str) -> Result<Generation, TopologyError> {
    Generation::from_text(text).ok_or_else(|| unknown_generation(text))
}

fn unknown_generation(text: &str) -> TopologyError {
    let lower = text.to_ascii_lowercase();
    let known: Vec<&'static str> = Generation::ALL.iter().map(|generation| generation.name()).collect();
    // The number says more than the letters round it: "v7x" means tpu7x, not v2.
    let number = lower.chars().find(char::is_ascii_digit);
    let same_number = |name: &str| number.is_some_and(|number| name.contains(number));
    let nearest = known.iter().copied().min_by_key(|name| (!same_number(name), edit_distance(&lower, name)));
    let nearest = nearest.unwrap_or("v4");
    TopologyError::UnknownGeneration { name: text.to_owned(), known, nearest }
}

/// Generation and chips of an accelerator type such as `v4-32`.
fn accelerator_chips(body: &str) -> Result<(Generation, u64), TopologyError> {
    let Some((family, count)) = body.rsplit_once('-') else {
        return Err(match Generation::from_text(body) {
            Some(generation) => TopologyError::BadName {
                name: body.to_owned(),
                expected: format!(
                    "a shape or a count after the generation, as in \"{generation}:{}\"",
                    Shape::for_generation(generation, if generation.dimensions() == 2 { [4, 4, 1] } else { [2, 2, 1] })
                ),
            },
            None if body.contains(|c: char| c.is_ascii_digit()) => unknown_generation(body),
            None => TopologyError::BadName {
                name: body.to_owned(),
                expected: "a topology (\"v5p:4x4x8\") or an accelerator type (\"v4-32\")".to_owned(),
            },
        });
    };
    let generation = generation_named(family)?;
    let count: u64 = count.parse().map_err(|_| TopologyError::BadName {
        name: body.to_owned(),
        expected: format!("a count after \"{family}-\", as in \"{}\"", type_name(generation, 4)),
    })?;
    if generation == Generation::Tpu7x {
        // The count would be ambiguous: chips here, TensorCores there.
        let mut nearest = Vec::new();
        for chips in [count / 2, count] {
            if let Some(dims) = shapes::default_for_chips(generation, chips) {
                nearest.push(format!("{generation}:{} ({chips} chips)", Shape::new3(dims)));
            }
        }
        if nearest.is_empty() {
            nearest.push("tpu7x:2x2x1 (4 chips)".to_owned());
        }
        return Err(TopologyError::NamedByTopology {
            accelerator: body.to_owned(),
            generation: generation.name(),
            nearest,
        });
    }
    let per_chip = count_per_chip(generation);
    if count == 0 || !count.is_multiple_of(per_chip) {
        return Err(bad_count(body, generation, count));
    }
    Ok((generation, count / per_chip))
}

/// v2, v3, v4 and v5p types count TensorCores, two to a chip; v5e and v6e types count chips.
fn count_per_chip(generation: Generation) -> u64 {
    u64::from(generation.tensor_cores())
}

fn type_name(generation: Generation, chips: u64) -> String {
    match generation {
        Generation::V5e => format!("v5litepod-{chips}"),
        Generation::Tpu7x => match shapes::default_for_chips(generation, chips) {
            Some(dims) => format!("tpu7x:{}", Shape::new3(dims)),
            None => format!("tpu7x of {chips} chips"),
        },
        _ => format!("{generation}-{}", chips * count_per_chip(generation)),
    }
}

fn bad_count(accelerator: &str, generation: Generation, count: u64) -> TopologyError {
    let per_chip = count_per_chip(generation);
    let chips = count as f64 / per_chip as f64;
    TopologyError::BadCount {
        accelerator: accelerator.to_owned(),
        generation: generation.name(),
        unit: if per_chip == 1 { "chips" } else { "TensorCores" },
        count,
        nearest: shapes::nearest_counts(generation, chips)
            .into_iter()
            .map(|chips| type_name(generation, chips))
            .collect(),
    }
}

fn default_shape(generation: Generation, chips: u64, accelerator: &str) -> Result<Shape, TopologyError> {
    shapes::default_for_chips(generation, chips)
        .map(|dims| Shape::for_generation(generation, dims))
        .ok_or_else(|| bad_count(accelerator, generation, chips * count_per_chip(generation)))
}

fn contradiction(accelerator: &str, generation: Generation, chips: u64, topology: &str, shape: Shape) -> TopologyError {
    TopologyError::Contradiction {
        accelerator: accelerator.to_owned(),
        accelerator_chips: chips,
        topology: topology.to_owned(),
        topology_chips: shape.volume(),
        fitting_topologies: shapes::with_chips(generation, chips)
            .into_iter()
            .map(|dims| Shape::for_generation(generation, dims).to_string())
            .collect(),
        fitting_types: if shapes::default_for_chips(generation, shape.volume()).is_some() {
            vec![type_name(generation, shape.volume())]
        } else {
            shapes::nearest_counts(generation, shape.volume() as f64)
                .into_iter()
                .map(|chips| type_name(generation, chips))
                .collect()
        },
    }
}

fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let cost = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}
