//! What a generation's devices say of themselves.

use podring_topology::{Device, Generation, Slice};

use crate::sys::NamedValue;

/// libtpu's name for a generation's device (`device_kind`), as its topology descriptions give it.
pub const fn kind(generation: Generation) -> &'static str {
    match generation {
        Generation::V2 => "TPU v2",
        Generation::V3 => "TPU v3",
        Generation::V4 => "TPU v4",
        Generation::V5e => "TPU v5 lite",
        Generation::V5p => "TPU v5",
        Generation::V6e => "TPU v6 lite",
        Generation::Tpu7x => "TPU7x",
    }
}

/// Memory of a chip (HBM), bytes: docs.cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x}, 2026 as stored.
const fn chip_memory(generation: Generation) -> u64 {
    const GIB: u64 = 1 << 30;
    match generation {
        Generation::V2 | Generation::V5e => 16 * GIB,
        Generation::V3 | Generation::V4 | Generation::V6e => 32 * GIB,
        Generation::V5p => 95 * GIB,
        Generation::Tpu7x => 192 * GIB,
    }
}

/// Memory of one device, bytes: a chip's, or a core's share of it where each core is a device.
pub fn memory(slice: &Slice) -> u64 {
    chip_memory(slice.generation()) / u64::from(slice.devices_per_chip())
}

/// A device's attributes, with the lists that they point into.
pub struct Attributes {
    // Boxed: `values` points to it, and stays true when this moves.
    _coords: Box<[i64; 3]>,
    values: [NamedValue; 3],
}

// SAFETY: constant once made; the pointers inside are to its own box and to constants.
unsafe impl Send for Attributes {}
// SAFETY: as above.
unsafe impl Sync for Attributes {}

impl Attributes {
    /// `coords`, `core_on_chip` and `slice_index`, as libtpu's devices have them.
    pub fn of(device: &Device) -> Attributes {
        let coords = Box::new(device.coords.map(i64::from));
        let values = [
            NamedValue::ints("coords", &*coords),
            NamedValue::int("core_on_chip", i64::from(device.core)),
            NamedValue::int("slice_index", i64::from(device.slice)),
        ];
        Attributes { _coords: coords, values }
    }

    /// For the interface.
    pub fn values(&self) -> &[NamedValue] {
        &self.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_is_a_device_has_its_share_of_the_chip() {
        let memory = |name| memory(&podring_topology::parse(name).unwrap()) >> 30;
        assert_eq!(memory("v5e:2x2"), 16);
        assert_eq!(memory("v5p:2x2x1"), 95);
        assert_eq!(memory("tpu7x:2x2x1"), 96);
        assert_eq!(memory("v4:2x2x1"), 16);
    }

    #[test]
    fn attributes_stay_true_when_moved() {
        let slice = podring_topology::parse("v4:2x2x2").unwrap();
        let all: Vec<Attributes> = slice.list().map(|device| Attributes::of(&device)).collect();
        let last = all.last().unwrap().values();
        // SAFETY: a list of three, alive with `all`.
        let coords = unsafe { std::slice::from_raw_parts(last[0].value.int64_list, last[0].value_size) };
        assert_eq!(coords, [1, 1, 1]);
        // SAFETY: an integer.
        assert_eq!(unsafe { last[1].value.int64 }, 1);
    }
}
