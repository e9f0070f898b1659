//! The slice that a plugin's devices are, as they describe themselves.

use podring_topology::{Device, Slice, SliceOptions, TopologyError, from_accelerator, seen};

use crate::pjrt::{DeviceDescription, Value};

/// Why it isn't known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnseenError {
    /// A device says too little of itself, or what can't be.
    #[error("device {id}: {what}")]
    Device {
        /// The plugin's id of it.
        id: i32,
        /// What is wrong.
        what: &'static str,
    },
    /// Together they are no slice.
    #[error(transparent)]
    Slice(#[from] TopologyError),
    /// They are not those of the slice that is named.
    #[error("TPU_ACCELERATOR_TYPE and TPU_TOPOLOGY name {slice}, whose devices these {devices} are not")]
    Other {
        /// The slice.
        slice: String,
        /// How many devices there are.
        devices: usize,
    },
}

/// The slice that a launcher names, if these are its devices, by their ids: its accelerator's type, its chips in each
/// dimension, and how many slices there are.
pub fn from_names(
    accelerator: Option<&str>,
    dims: Option<&[u32]>,
    num_slices: Option<u32>,
    described: &[DeviceDescription],
) -> Result<Slice, UnseenError> {
    let shape = dims.map(|dims| dims.iter().map(u32::to_string).collect::<Vec<_>>().join("x"));
    let options = SliceOptions { num_slices, ..SliceOptions::default() };
    let slice = from_accelerator(accelerator, shape.as_deref(), &options)?;
    // In its order: a group's shape follows from it.
    if !slice.list().map(|device| i64::from(device.id)).eq(described.iter().map(|device| i64::from(device.id))) {
        return Err(UnseenError::Other { slice: slice.to_string(), devices: described.len() });
    }
    Ok(slice)
}

/// The slice whose devices these are: all of a client's or a topology's, in its order.
pub fn from_devices(described: &[DeviceDescription]) -> Result<Slice, UnseenError> {
    let kind = described.first().map_or("", |device| device.kind.as_str());
    let mut devices = Vec::with_capacity(described.len());
    for one in described {
        let wrong = |what| UnseenError::Device { id: one.id, what };
        let number = |value: i64| u32::try_from(value).map_err(|_| wrong("a number that is no place"));
        let attribute = |name: &str| one.attributes.iter().find(|(other, _)| other == name).map(|(_, value)| value);
        // A lone slice's devices need no slice, and a chip's only device no core.
        let integer = |name: &str| match attribute(name) {
            Some(&Value::Int(value)) => number(value),
            Some(_) => Err(wrong("core_on_chip or slice_index is no integer")),
            None => Ok(0),
        };
        if one.kind != kind {
            return Err(wrong("it is of another kind than the first"));
        }
        let coords = match attribute("coords") {
            Some(Value::Ints(coords)) => match coords[..] {
                [x, y] => [x, y, 0],
                [x, y, z] => [x, y, z],
                _ => return Err(wrong("its coords are not two or three numbers")),
            },
            _ => return Err(wrong("it has no coords")),
        };
        devices.push(Device {
            id: u32::try_from(one.id).unwrap_or(u32::MAX),
            coords: [number(coords[0])?, number(coords[1])?, number(coords[2])?],
            core: integer("core_on_chip")?,
            slice: integer("slice_index")?,
            process: u32::try_from(one.process).unwrap_or(u32::MAX),
        });
    }
    Ok(seen(kind, &devices)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use podring_topology::parse;

    fn described(name: &str, kind: &str) -> Vec<DeviceDescription> {
        let one = |device: Device| DeviceDescription {
            id: device.id as i32,
            process: device.process as i32,
            kind: kind.to_owned(),
            attributes: vec![
                ("coords".to_owned(), Value::Ints(device.coords.map(i64::from).to_vec())),
                ("core_on_chip".to_owned(), Value::Int(device.core.into())),
                ("slice_index".to_owned(), Value::Int(device.slice.into())),
            ],
        };
        parse(name).unwrap().list().map(one).collect()
    }

    #[test]
    fn attributes_give_the_slice() {
        for (name, kind) in [("v5e:4x4", "TPU v5 lite"), ("tpu7x:2x2x1", "TPU7x"), ("v5p:2x2x2*2", "TPU v5")] {
            assert_eq!(from_devices(&described(name, kind)), Ok(parse(name).unwrap()), "{name}");
        }
        // What a lone slice of one device a chip may leave out.
        let mut short = described("v5e:2x2", "TPU v5 lite");
        short.iter_mut().for_each(|device| device.attributes.truncate(1));
        assert_eq!(from_devices(&short), Ok(parse("v5e:2x2").unwrap()));
    }

    #[test]
    fn devices_that_say_too_little_are_named() {
        let change = |act: fn(&mut DeviceDescription)| {
            let mut devices = described("v5e:2x2", "TPU v5 lite");
            act(&mut devices[2]);
            from_devices(&devices).unwrap_err().to_string()
        };
        // The third of the list is the chip at 0,1.
        assert_eq!(change(|device| device.attributes.clear()), "device 2: it has no coords");
        assert!(change(|device| device.kind = "cpu".into()).contains("another kind"));
        assert!(change(|device| device.attributes[0].1 = Value::Ints(vec![0, -1])).contains("no place"));
        assert!(change(|device| device.attributes[0].1 = Value::Ints(vec![0])).contains("two or three"));
        assert!(change(|device| device.attributes[1].1 = Value::Text("0".into())).contains("no integer"));
        assert!(matches!(from_devices(&[]), Err(UnseenError::Slice(TopologyError::NoSlice { .. }))));
    }

    #[test]
    fn launchers_name_slices_that_have_the_devices() {
        let device = |&id: &i32| DeviceDescription { id, process: 0, kind: String::new(), attributes: Vec::new() };
        let named = |accelerator: Option<&str>, dims: Option<&[u32]>, ids: &[i32]| {
            let devices: Vec<DeviceDescription> = ids.iter().map(device).collect();
            from_names(accelerator, dims, None, &devices).map(|slice| slice.to_string())
        };
        let (v5e, square) = (Some("v5litepod-4"), Some(&[2, 2][..]));
        assert_eq!(named(v5e, square, &[0, 1, 2, 3]).unwrap(), "v5e:2x2");
        assert_eq!(named(Some("tpu-v5-lite-podslice"), square, &[0, 1, 2, 3]).unwrap(), "v5e:2x2");
        assert_eq!(named(Some("v4-8"), None, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap(), "v4:2x2x1");
        for ids in [&[0, 1, 2][..], &[0, 1, 3, 2], &[]] {
            assert!(matches!(named(v5e, square, ids), Err(UnseenError::Other { .. })), "{ids:?}");
        }
        for (accelerator, dims) in [(None, None), (None, square), (Some("v5litepod-3"), None)] {
            assert!(matches!(named(accelerator, dims, &[0, 1, 2, 3]), Err(UnseenError::Slice(_))));
        }
    }
}
