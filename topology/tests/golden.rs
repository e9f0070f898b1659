//! What libtpu 0.0.52 says of slices, line by line, and what it refuses.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use podring_topology::{SliceOptions, TopologyError, parse_with};
use serde::Deserialize;

#[derive(Deserialize)]
struct Line {
    name: String,
    opts: Options,
    #[serde(default)]
    devices: Vec<(u32, [u32; 3], u32, u32, u32)>,
    num_cores: Option<u32>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Options {
    num_slices: Option<u32>,
    chips_per_host_bounds: Option<[u32; 3]>,
    wrap: Option<[u8; 3]>,
    chip_config_name: Option<String>,
}

fn lines() -> Vec<Line> {
    include_str!("data/libtpu_devices.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn options(line: &Line) -> SliceOptions {
    SliceOptions {
        num_slices: line.opts.num_slices,
        chips_per_host_bounds: line.opts.chips_per_host_bounds,
        wrap: line.opts.wrap.map(|wrap| wrap.map(|flag| flag != 0)),
        chip_config_name: line.opts.chip_config_name.clone(),
    }
}

#[test]
fn devices_are_libtpus_in_its_order() {
    let mut compared = 0;
    for line in lines().iter().filter(|line| line.error.is_none()) {
        let slice = parse_with(&line.name, &options(line)).unwrap();
        let ours: Vec<_> = slice.list().map(|d| (d.id, d.coords, d.core, d.slice, d.process)).collect();
        assert_eq!(ours, line.devices, "{} {:?}", line.name, options(line));
        let cores = if slice.devices_per_chip() == 2 { 1 } else { slice.generation().tensor_cores() };
        assert_eq!(Some(cores), line.num_cores, "{}: cores per device", line.name);
        compared += ours.len();
    }
    assert!(compared > 800, "only {compared} devices compared");
}

#[test]
fn refusals_are_libtpus_and_name_what_is_nearest() {
    let refused: Vec<Line> = lines().into_iter().filter(|line| line.error.is_some()).collect();
    assert_eq!(refused.len(), 3);
    for line in refused {
        let theirs = line.error.clone().unwrap();
        let ours = parse_with(&line.name, &options(&line)).unwrap_err();
        match &ours {
            TopologyError::HostsDontDivide { bounds, nearest, .. } => {
                assert!(theirs.contains("not divisible"), "{theirs}");
                assert!(theirs.contains(&format!("\"{bounds}\"")), "{theirs} / {ours}");
                assert_eq!(nearest.len(), 3, "{ours}");
            }
            TopologyError::UnknownGeneration { nearest, .. } => {
                assert!(theirs.contains("Invalid TPU external name"), "{theirs}");
                assert!(!nearest.is_empty());
            }
            other => panic!("{}: {other:?} for {theirs}", line.name),
        }
    }
}
