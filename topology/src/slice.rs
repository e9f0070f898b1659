//! A slice: its chips and devices, numbered, listed and grouped into hosts as libtpu does it.
//!
//! libtpu's rules, read off its topology descriptions (tests/golden.rs holds them to it):
//! device ids count cores first, then x, y, z; several slices start at 100000, 200000, …; the list is grouped by
//! process; processes count hosts along x, y, z and then slices.

use crate::{
    error::TopologyError,
    generation::{Generation, WrapRule},
    shapes,
};

/// libtpu numbers the devices of slice `s` from `(s + 1) * SLICE_ID_STEP` when there are several slices.
const SLICE_ID_STEP: u32 = 100_000;

/// The largest number of slices: device ids and ranks stay well inside 32 bits.
pub(crate) const MAX_SLICES: u32 = 1024;

/// Extents along x, y, z. Written `4x4` when z is 1 and the shape is of a 2-D generation, else `4x4x8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Extents along x, y, z; z is 1 for 2-D shapes.
    pub dims: [u32; 3],
    /// How many of them were written: 2 or 3.
    pub written: u8,
}

impl Shape {
    /// A shape written with all three extents.
    pub const fn new3(dims: [u32; 3]) -> Self {
        Shape { dims, written: 3 }
    }

    /// A shape in the generation's usual spelling.
    pub const fn for_generation(generation: Generation, dims: [u32; 3]) -> Self {
        let written = if generation.dimensions() == 2 && dims[2] == 1 { 2 } else { 3 };
        Shape { dims, written }
    }

    /// Number of places; saturates.
    pub fn volume(&self) -> u64 {
        self.dims.iter().fold(1u64, |product, &dim| product.saturating_mul(u64::from(dim)))
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [x, y, z] = self.dims;
        if self.written == 2 && z == 1 { write!(f, "{x}x{y}") } else { write!(f, "{x}x{y}x{z}") }
    }
}

/// How a chip's TensorCores appear as devices; libtpu's `chip_config_name`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ChipConfig {
    /// libtpu's default for the generation.
    #[default]
    Default,
    /// v4 and v5p: both TensorCores of a chip are one device.
    Megacore,
}

/// One device of a slice, as libtpu describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Device {
    /// libtpu's device id.
    pub id: u32,
    /// Chip coordinates x, y, z inside the slice.
    pub coords: [u32; 3],
    /// Core on the chip.
    pub core: u32,
    /// Index of the slice.
    pub slice: u32,
    /// Process (host) index over all slices.
    pub process: u32,
}

/// One or more equal slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    generation: Generation,
    shape: Shape,
    host: [u32; 3],
    wrap: [bool; 3],
    twisted: bool,
    cores: u32,
    config: ChipConfig,
    slices: u32,
}

/// What a [`Slice`] is made from once names are parsed.
pub(crate) struct SliceParts {
    pub generation: Generation,
    pub shape: Shape,
    pub host: Option<[u32; 3]>,
    pub wrap: Option<[bool; 3]>,
    pub twisted: bool,
    pub config: ChipConfig,
    pub slices: u32,
}

impl Slice {
    pub(crate) fn build(parts: SliceParts) -> Result<Slice, TopologyError> {
        let SliceParts { generation, shape, host, wrap, twisted, config, slices } = parts;
        let default_host = clipped(generation.host_bounds(), shape.dims);
        let host = host.unwrap_or(default_host);
        if host.contains(&0) {
            return Err(TopologyError::BadHostBounds {
                generation: generation.name(),
                bounds: Shape::new3(host),
                default: Shape::new3(default_host),
            });
        }
        if let Err(reason) = shapes::check_extents(generation, shape.dims) {
            return Err(shapes::bad_shape(generation, shape, reason));
        }
        // libtpu checks hosts before anything else, so an odd extent is reported as its hosts.
        if shape.dims.iter().zip(host).any(|(&dim, bound)| dim % bound != 0) {
            return Err(TopologyError::HostsDontDivide {
                generation: generation.name(),
                shape,
                bounds: Shape::new3(host),
                nearest: shapes::nearest(generation, shape.dims, |dims| {
                    dims.iter().zip(host).all(|(&dim, bound)| dim % bound.min(dim) == 0)
                }),
            });
        }
        if let Err(reason) = shapes::check_shape(generation, shape.dims) {
            return Err(shapes::bad_shape(generation, shape, reason));
        }
        let wrap = wrap.unwrap_or_else(|| default_wrap(generation, shape.dims));
        if twisted {
            let reason = if generation.dimensions() != 3 {
                Some("only 3-D tori twist")
            } else if !shapes::can_twist(shape.dims) {
                Some("a twist needs extents k, k, 2k or k, 2k, 2k with k a multiple of 4")
            } else if wrap != [true; 3] {
                Some("a twist needs wrap in all dimensions")
            } else {
                None
            };
            if let Some(reason) = reason {
                return Err(TopologyError::BadTwist {
                    generation: generation.name(),
                    shape,
                    reason,
                    nearest: shapes::nearest_twisted(generation, shape.dims),
                });
            }
        }
        let cores = match config {
            ChipConfig::Default if generation.device_per_core() => generation.tensor_cores(),
            ChipConfig::Default => 1,
            ChipConfig::Megacore if matches!(generation, Generation::V4 | Generation::V5p) => 1,
            ChipConfig::Megacore => {
                return Err(TopologyError::BadChipConfig {
                    generation: generation.name(),
                    config: "megacore".to_owned(),
                    valid: valid_configs(generation),
                });
            }
        };
        Ok(Slice { generation, shape, host, wrap, twisted, cores, config, slices })
    }

    /// The generation.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The shape of each slice, in chips.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Extents along x, y, z of each slice, in chips.
    pub fn dims(&self) -> [u32; 3] {
        self.shape.dims
    }

    /// Chips of a host along x, y, z.
    pub fn host_bounds(&self) -> [u32; 3] {
        self.host
    }

    /// Hosts along x, y, z.
    pub fn host_grid(&self) -> [u32; 3] {
        std::array::from_fn(|axis| self.shape.dims[axis] / self.host[axis])
    }

    /// Which axes close into rings.
    pub fn wrap(&self) -> [bool; 3] {
        self.wrap
    }

    /// Whether it is a twisted torus.
    pub fn twisted(&self) -> bool {
        self.twisted
    }

    /// The chip configuration.
    pub fn config(&self) -> ChipConfig {
        self.config
    }

    /// Devices per chip: 2 where each TensorCore is a device of its own.
    pub fn devices_per_chip(&self) -> u32 {
        self.cores
    }

    /// Number of slices.
    pub fn slices(&self) -> u32 {
        self.slices
    }

    /// Chips of one slice.
    pub fn chips_per_slice(&self) -> u32 {
        self.shape.dims.iter().product()
    }

    /// Devices of one slice.
    pub fn devices_per_slice(&self) -> u32 {
        self.chips_per_slice() * self.cores
    }

    /// Devices of all slices: the world size when each device is a rank.
    pub fn devices(&self) -> u32 {
        self.devices_per_slice() * self.slices
    }

    /// Hosts (processes) of all slices.
    pub fn processes(&self) -> u32 {
        self.host_grid().iter().product::<u32>() * self.slices
    }

    /// Devices of one host.
    pub fn devices_per_process(&self) -> u32 {
        self.host.iter().product::<u32>() * self.cores
    }

    /// The device of a rank: the `rank`-th of libtpu's list.
    pub fn device(&self, rank: u32) -> Option<Device> {
        if rank >= self.devices() {
            return None;
        }
        let per_host = self.devices_per_process();
        let process = rank / per_host;
        let local = rank % per_host;
        let hosts_per_slice = self.processes() / self.slices;
        let slice = process / hosts_per_slice;
        let host = unravel(process % hosts_per_slice, self.host_grid());
        let core = local % self.cores;
        let inside = unravel(local / self.cores, self.host);
        let coords: [u32; 3] = std::array::from_fn(|axis| host[axis] * self.host[axis] + inside[axis]);
        Some(Device { id: self.id_of(slice, coords, core), coords, core, slice, process })
    }

    /// All devices in libtpu's list order.
    pub fn list(&self) -> impl ExactSizeIterator<Item = Device> + '_ {
        // In range, so `device` is always there; `map_while` only spares an unwrap.
        Listed { slice: self, next: 0 }
    }

    /// The rank at a place, if the place exists.
    pub fn rank_at(&self, slice: u32, coords: [u32; 3], core: u32) -> Option<u32> {
        if slice >= self.slices || core >= self.cores || (0..3).any(|axis| coords[axis] >= self.shape.dims[axis]) {
            return None;
        }
        let host = std::array::from_fn(|axis| coords[axis] / self.host[axis]);
        let inside = std::array::from_fn(|axis| coords[axis] % self.host[axis]);
        let process = slice * (self.processes() / self.slices) + ravel(host, self.host_grid());
        Some(process * self.devices_per_process() + ravel(inside, self.host) * self.cores + core)
    }

    /// The rank of a libtpu device id.
    pub fn rank_of_id(&self, id: u32) -> Option<u32> {
        let (slice, inside) =
            if self.slices > 1 { ((id / SLICE_ID_STEP).checked_sub(1)?, id % SLICE_ID_STEP) } else { (0, id) };
        if inside >= self.devices_per_slice() {
            return None;
        }
        self.rank_at(slice, unravel(inside / self.cores, self.shape.dims), inside % self.cores)
    }

    /// Dense index of a chip over all slices: x fastest, then y, z, slice.
    pub(crate) fn chip_index(&self, slice: u32, coords: [u32; 3]) -> u32 {
        slice * self.chips_per_slice() + ravel(coords, self.shape.dims)
    }

    fn id_of(&self, slice: u32, coords: [u32; 3], core: u32) -> u32 {
        let base = if self.slices > 1 { (slice + 1) * SLICE_ID_STEP } else { 0 };
        base + ravel(coords, self.shape.dims) * self.cores + core
    }
}

impl std::fmt::Display for Slice {
    /// The name in the form that [`crate::parse`] reads.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.generation, self.shape)?;
        if self.twisted {
            f.write_str("_twisted")?;
        }
        if self.slices > 1 {
            write!(f, "*{}", self.slices)?;
        }
        Ok(())
    }
}

struct Listed<'a> {
    slice: &'a Slice,
    next: u32,
}

impl Iterator for Listed<'_> {
    type Item = Device;

    fn next(&mut self) -> Option<Device> {
        let device = self.slice.device(self.next)?;
        self.next += 1;
        Some(device)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = (self.slice.devices() - self.next) as usize;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Listed<'_> {}

/// Configurations of a generation by libtpu's names.
pub(crate) fn valid_configs(generation: Generation) -> Vec<&'static str> {
    match generation {
        Generation::V4 | Generation::V5p => vec!["default", "megacore"],
        _ => vec!["default"],
    }
}

/// Position of `coords` in a box, x fastest.
pub(crate) fn ravel(coords: [u32; 3], dims: [u32; 3]) -> u32 {
    (coords[2] * dims[1] + coords[1]) * dims[0] + coords[0]
}

/// Inverse of [`ravel`].
pub(crate) fn unravel(index: u32, dims: [u32; 3]) -> [u32; 3] {
    [index % dims[0], index / dims[0] % dims[1], index / dims[0] / dims[1]]
}

fn clipped(bounds: [u32; 3], dims: [u32; 3]) -> [u32; 3] {
    std::array::from_fn(|axis| bounds[axis].min(dims[axis].max(1)))
}

fn default_wrap(generation: Generation, dims: [u32; 3]) -> [bool; 3] {
    match generation.wrap_rule() {
        WrapRule::PodAxis(length) => std::array::from_fn(|axis| dims[axis] == length),
        WrapRule::Cubes(edge) => [dims.iter().all(|dim| dim % edge == 0); 3],
    }
}
