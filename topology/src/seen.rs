//! From devices to the slice that they are.

use crate::{
    error::TopologyError,
    generation::Generation,
    slice::{ChipConfig, Device, MAX_SLICES, Shape, Slice, SliceParts},
};

/// The slice whose devices these are: all of them, in libtpu's list order. `kind` is what they say that they are
/// (`TPU v5 lite`). Of a device its coordinates, core, slice and process count, but not its id.
///
/// Devices don't tell how links wrap: that is the generation's rule. Nor do they tell a twisted torus from another.
pub fn seen(kind: &str, devices: &[Device]) -> Result<Slice, TopologyError> {
    let none = |why: &'static str| TopologyError::NoSlice { kind: kind.to_owned(), devices: devices.len(), why };
    let generation = Generation::from_text(kind).ok_or_else(|| none("no known generation calls its devices so"))?;
    let Some(first) = devices.first() else { return Err(none("there is none")) };
    let count = |of: &dyn Fn(&Device) -> u32| devices.iter().map(of).max().unwrap_or(0).saturating_add(1);
    let dims: [u32; 3] = std::array::from_fn(|axis| count(&|device| device.coords[axis]));
    let (cores, slices) = (count(&|device| device.core), count(&|device| device.slice));
    let product = dims.iter().chain([&cores, &slices]).map(|&one| u64::from(one));
    if slices > MAX_SLICES || product.fold(1u64, u64::saturating_mul) != devices.len() as u64 {
        return Err(none("they don't fill a box of chips from 0,0,0 on"));
    }
    let host = std::array::from_fn(|axis| {
        let own = devices.iter().filter(|device| device.process == first.process).map(|device| device.coords[axis]);
        own.clone().max().unwrap_or(0) - own.min().unwrap_or(0) + 1
    });
    let merged = cores == 1 && generation == Generation::V4;
    let place = |device: &Device| (device.coords, device.core, device.slice);
    // Processes that share a host may be listed host by host all the same.
    for host in [Some(host), None] {
        let slice = Slice::build(SliceParts {
            generation,
            shape: Shape::for_generation(generation, dims),
            host,
            wrap: None,
            twisted: false,
            config: if merged { ChipConfig::Megacore } else { ChipConfig::Default },
            slices,
        })?;
        if slice.list().map(|device| place(&device)).eq(devices.iter().map(place)) {
            return Ok(slice);
        }
    }
    Err(none("they are listed in another order than libtpu's"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SliceOptions, parse, parse_with};

    fn devices(slice: &Slice) -> Vec<Device> {
        slice.list().collect()
    }

    #[test]
    fn a_slices_devices_give_the_slice() {
        for (name, kind) in [
            ("v2:4x4", "TPU v2"),
            ("v4:2x2x1", "TPU v4"),
            ("v4:4x4x8", "TPU v4"),
            ("v5e:1x1", "TPU v5 lite"),
            ("v5e:2x4", "TPU v5 lite"),
            ("v5e:4x4*2", "TPU v5 lite"),
            ("v5e:16x16", "TPU v5e"),
            ("v5p:2x2x1", "TPU v5"),
            ("v5p:4x4x8*3", "TPU v5p"),
            ("v6e:8x8", "TPU v6 lite"),
            ("tpu7x:2x2x1", "TPU7x"),
            ("tpu7x:4x4x8", "TPU7x"),
        ] {
            let slice = parse(name).unwrap();
            assert_eq!(seen(kind, &devices(&slice)), Ok(slice), "{name}");
        }
        // One process per chip, as torch_tpu has it: processes count along x first.
        let options = SliceOptions { chips_per_host_bounds: Some([1, 1, 1]), ..SliceOptions::default() };
        let slice = parse_with("v5e:4x4", &options).unwrap();
        assert_eq!(seen("TPU v5 lite", &devices(&slice)), Ok(slice));
        // The same, listed host by host.
        let slice = parse("v5e:4x4").unwrap();
        let alone = slice.list().enumerate().map(|(rank, device)| Device { process: rank as u32, ..device });
        assert_eq!(seen("TPU v5 lite", &alone.collect::<Vec<_>>()), Ok(slice));
        let options = SliceOptions { chip_config_name: Some("megacore".to_owned()), ..SliceOptions::default() };
        let slice = parse_with("v4:2x2x2", &options).unwrap();
        assert_eq!(seen("TPU v4", &devices(&slice)), Ok(slice));
    }

    #[test]
    fn what_is_no_slice_is_refused_with_the_reason() {
        let all = devices(&parse("v5e:4x4").unwrap());
        let why = |kind: &str, devices: &[Device]| match seen(kind, devices) {
            Err(TopologyError::NoSlice { why, .. }) => why,
            other => panic!("{other:?}"),
        };
        assert!(why("cpu", &all).contains("no known generation"));
        assert_eq!(why("TPU v5 lite", &[]), "there is none");
        // A part, one twice, one far away.
        assert!(why("TPU v5 lite", &all[1..]).contains("box"));
        assert!(why("TPU v5 lite", &[&all[..], &all[..1]].concat()).contains("box"));
        let mut far = all.clone();
        far[3].coords[2] = u32::MAX;
        assert!(why("TPU v5 lite", &far).contains("box"));
        let mut other = all.clone();
        other.swap(2, 9);
        assert!(why("TPU v5 lite", &other).contains("order"));
        let mut twice = all;
        twice[2] = twice[3];
        assert!(why("TPU v5 lite", &twice).contains("order"));
        // A generation that has no such slice.
        assert!(seen("TPU7x", &devices(&parse("v5e:4x4").unwrap())).is_err());
    }
}
