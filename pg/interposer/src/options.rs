//! Compile options rewritten for one virtual chip.
//!
//! A framework compiles for the whole slice: so many partitions, with a device assignment over all. The CPU plugin is
//! to run the program on this process's device alone. Only the fields concerned are replaced; all others, known here or
//! not, go on byte by byte.

use std::path::Path;

use crate::error::InterposeError;
use crate::wire::{Damaged, Fields, put_bytes, put_varint, take_varint, varint};

/// Fields of `xla.CompileOptionsProto` and `xla.ExecutableBuildOptionsProto` (XLA's `compile_options.proto`).
const BUILD_OPTIONS: u64 = 3;
const DEVICE_ORDINAL: u64 = 1;
const NUM_REPLICAS: u64 = 4;
const NUM_PARTITIONS: u64 = 5;
const USE_SPMD: u64 = 6;
const DEVICE_ASSIGNMENT: u64 = 9;
const REPLACED: [u64; 5] = [DEVICE_ORDINAL, NUM_REPLICAS, NUM_PARTITIONS, USE_SPMD, DEVICE_ASSIGNMENT];

/// `options` with one replica, one partition, on the device that the plugin knows as `device`.
pub fn for_one(options: &[u8], device: u64) -> Result<Vec<u8>, InterposeError> {
    let mut out = Vec::with_capacity(options.len() + 32);
    let mut build = Vec::new();
    // A message that comes in several pieces is the pieces one after another; so they are merged and written once.
    for field in Fields(options) {
        let (number, whole, payload) = field?;
        if number == BUILD_OPTIONS {
            let Some(payload) = payload else { return Err(damaged("the build options are no message")) };
            for field in Fields(payload) {
                let (number, whole, _) = field?;
                if !REPLACED.contains(&number) {
                    build.extend_from_slice(whole);
                }
            }
        } else {
            out.extend_from_slice(whole);
        }
    }
    // No default device: the assignment says where.
    put_varint(&mut build, DEVICE_ORDINAL, u64::MAX);
    put_varint(&mut build, NUM_REPLICAS, 1);
    put_varint(&mut build, NUM_PARTITIONS, 1);
    // xla.DeviceAssignmentProto{replica_count 1, computation_count 1, computation_devices{replica_device_ids [device]}}
    let mut ids = Vec::new();
    varint(&mut ids, device);
    let mut computation = Vec::new();
    put_bytes(&mut computation, 1, &ids);
    let mut assignment = Vec::new();
    put_varint(&mut assignment, 1, 1);
    put_varint(&mut assignment, 2, 1);
    put_bytes(&mut assignment, 3, &computation);
    put_bytes(&mut build, DEVICE_ASSIGNMENT, &assignment);
    put_bytes(&mut out, BUILD_OPTIONS, &build);
    Ok(out)
}

/// Overrides of XLA's options by name (`xla.CompileOptionsProto`), and of one option (`xla.OptionOverrideProto`).
const OVERRIDES: u64 = 7;
const TEXT: u64 = 1;
const YES_OR_NO: u64 = 2;

/// `options`, having XLA write what it was given into `folder`, as a protobuf.
pub fn with_dump(options: &[u8], folder: &Path) -> Vec<u8> {
    let mut out = options.to_vec();
    let mut put = |name: &str, value: &dyn Fn(&mut Vec<u8>)| {
        let mut inner = Vec::new();
        value(&mut inner);
        let mut entry = Vec::new();
        put_bytes(&mut entry, 1, name.as_bytes());
        put_bytes(&mut entry, 2, &inner);
        put_bytes(&mut out, OVERRIDES, &entry);
    };
    put("xla_dump_to", &|inner| put_bytes(inner, TEXT, folder.as_os_str().as_encoded_bytes()));
    put("xla_dump_hlo_as_proto", &|inner| put_varint(inner, YES_OR_NO, 1));
    out
}

/// Which devices a program is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// Copies of the program.
    pub replicas: usize,
    /// Parts of each.
    pub partitions: usize,
    /// The device of replica `r`, partition `p`, at `r * partitions + p`.
    pub devices: Vec<i64>,
}

/// What the options say of it; without a word, devices are numbered from 0.
pub fn assignment(options: &[u8]) -> Result<Assignment, InterposeError> {
    let (mut replicas, mut partitions, mut parts) = (1usize, 1usize, Vec::new());
    for field in Fields(options) {
        let (BUILD_OPTIONS, _, Some(build)) = field? else { continue };
        for field in Fields(build) {
            match field? {
                (NUM_REPLICAS, whole, None) => replicas = number(whole)?.max(1),
                (NUM_PARTITIONS, whole, None) => partitions = number(whole)?.max(1),
                (DEVICE_ASSIGNMENT, _, Some(payload)) => {
                    parts.clear();
                    for field in Fields(payload) {
                        if let (3, _, Some(computation)) = field? {
                            parts.push(computation_devices(computation)?);
                        }
                    }
                }
                _ => {}
            }
        }
    }
    if parts.is_empty() {
        let total = replicas.checked_mul(partitions).filter(|&total| total <= 1 << 20);
        let total = total.ok_or_else(|| damaged("more participants than a job can have"))?;
        return Ok(Assignment { replicas, partitions, devices: (0..total as i64).collect() });
    }
    if parts.len() != partitions || parts.iter().any(|devices| devices.len() != replicas) {
        return Err(damaged("the device assignment is of another size than replicas and partitions"));
    }
    let devices = (0..replicas).flat_map(|replica| parts.iter().map(move |part| part[replica])).collect();
    Ok(Assignment { replicas, partitions, devices })
}

/// `xla.DeviceAssignmentProto.ComputationDevice`: numbers, one by one or packed.
fn computation_devices(message: &[u8]) -> Result<Vec<i64>, InterposeError> {
    let mut devices = Vec::new();
    for field in Fields(message) {
        match field? {
            (1, whole, None) => devices.push(number(whole)? as i64),
            (1, _, Some(mut packed)) => {
                while !packed.is_empty() {
                    devices.push(take_varint(&mut packed)? as i64);
                }
            }
            _ => {}
        }
    }
    Ok(devices)
}

/// The number in a field that is one.
fn number(mut field: &[u8]) -> Result<usize, InterposeError> {
    take_varint(&mut field)?;
    usize::try_from(take_varint(&mut field)?).map_err(|_| damaged("a number too large"))
}

fn damaged(reason: &'static str) -> InterposeError {
    Damaged(reason).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a decoder of the message gives: the last value of each number, and everything else in order.
    fn fields(bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
        Fields(bytes).map(|field| field.map(|(number, whole, _)| (number, whole.to_vec())).unwrap()).collect()
    }

    fn payload(bytes: &[u8], wanted: u64) -> Vec<u8> {
        let found = Fields(bytes).map(Result::unwrap).find(|(number, ..)| *number == wanted);
        found.unwrap().2.unwrap().to_vec()
    }

    #[test]
    fn a_program_for_four_becomes_one_for_one() {
        let mut build = Vec::new();
        put_varint(&mut build, NUM_REPLICAS, 1);
        put_varint(&mut build, NUM_PARTITIONS, 4);
        put_varint(&mut build, USE_SPMD, 1);
        put_bytes(&mut build, DEVICE_ASSIGNMENT, b"whatever");
        put_varint(&mut build, 10, 1);
        let mut options = Vec::new();
        put_varint(&mut options, 2, 1);
        put_bytes(&mut options, BUILD_OPTIONS, &build);
        put_bytes(&mut options, 7, b"override");

        let made = for_one(&options, 3).unwrap();
        assert_eq!(payload(&made, 7), b"override");
        let build = payload(&made, BUILD_OPTIONS);
        let numbers: Vec<u64> = fields(&build).into_iter().map(|(number, _)| number).collect();
        assert_eq!(numbers, [10, DEVICE_ORDINAL, NUM_REPLICAS, NUM_PARTITIONS, DEVICE_ASSIGNMENT]);
        assert_eq!(payload(&build, DEVICE_ASSIGNMENT), [0x08, 1, 0x10, 1, 0x1a, 3, 0x0a, 1, 3]);
    }

    #[test]
    fn an_assignment_is_read_back() {
        let computation = |ids: &[u8]| {
            let mut computation = Vec::new();
            put_bytes(&mut computation, 1, ids);
            computation
        };
        let mut assigned = Vec::new();
        put_varint(&mut assigned, 1, 1);
        put_varint(&mut assigned, 2, 2);
        put_bytes(&mut assigned, 3, &computation(&[4]));
        put_bytes(&mut assigned, 3, &computation(&[7]));
        let mut build = Vec::new();
        put_varint(&mut build, NUM_REPLICAS, 1);
        put_varint(&mut build, NUM_PARTITIONS, 2);
        let mut options = Vec::new();
        put_bytes(&mut options, BUILD_OPTIONS, &build);
        let plain = assignment(&options).unwrap();
        assert_eq!(plain, Assignment { replicas: 1, partitions: 2, devices: vec![0, 1] });
        put_bytes(&mut build, DEVICE_ASSIGNMENT, &assigned);
        let mut options = Vec::new();
        put_bytes(&mut options, BUILD_OPTIONS, &build);
        assert_eq!(assignment(&options).unwrap().devices, [4, 7]);
        // For one chip there is one left.
        assert_eq!(assignment(&for_one(&options, 7).unwrap()).unwrap().devices, [7]);
        put_varint(&mut build, NUM_PARTITIONS, 3);
        let mut options = Vec::new();
        put_bytes(&mut options, BUILD_OPTIONS, &build);
        assert!(assignment(&options).is_err());
    }

    #[test]
    fn options_that_end_early_are_refused() {
        assert_eq!(for_one(&[0x1a, 5, 0], 0), Err(damaged("they end within a field")));
        assert_eq!(for_one(&[0x18, 1], 0), Err(damaged("the build options are no message")));
        assert_eq!(for_one(&[0xff; 11], 0), Err(damaged("a number of more than ten bytes")));
        assert_eq!(for_one(&[0x0b], 0), Err(damaged("an unknown wire type")));
    }

    proptest! {
        #[test]
        fn other_fields_go_on_as_they_came(others in prop::collection::vec((10u64..500, prop::collection::vec(any::<u8>(), 0..200)), 0..6), device in 0u64..100_000) {
            let mut options = Vec::new();
            for (number, bytes) in &others {
                put_bytes(&mut options, *number, bytes);
            }
            let mut made = fields(&for_one(&options, device).unwrap());
            prop_assert_eq!(made.pop().unwrap().0, BUILD_OPTIONS);
            prop_assert_eq!(made, fields(&options));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = for_one(&bytes, 0);
            let _ = assignment(&bytes);
        }
    }
}
