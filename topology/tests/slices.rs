//! Names, shapes and numbering.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod common;

use std::collections::HashSet;

use podring_topology::{SliceOptions, TopologyError, from_accelerator, parse, parse_with};
use proptest::prelude::*;

proptest! {
    #[test]
    fn ranks_places_and_ids_name_the_same_device(slice in common::any_slice()) {
        let mut ids = HashSet::new();
        let mut process = 0;
        for (rank, device) in slice.list().enumerate() {
            let rank = rank as u32;
            prop_assert_eq!(slice.device(rank), Some(device));
            prop_assert_eq!(slice.rank_at(device.slice, device.coords, device.core), Some(rank));
            prop_assert_eq!(slice.rank_of_id(device.id), Some(rank));
            prop_assert!(ids.insert(device.id));
            prop_assert!(device.process == process || device.process == process + 1);
            process = device.process;
        }
        prop_assert_eq!(ids.len() as u32, slice.devices());
        prop_assert_eq!(process + 1, slice.processes());
        prop_assert_eq!(slice.processes() * slice.devices_per_process(), slice.devices());
        prop_assert_eq!(slice.device(slice.devices()), None);
    }

    #[test]
    fn a_slice_parses_back_from_its_own_name(slice in common::any_slice()) {
        prop_assert_eq!(parse(&slice.to_string()).unwrap(), slice);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,24}") {
        let _ = parse(&text);
        let _ = from_accelerator(Some(&text), Some(&text), &SliceOptions::default());
    }

    #[test]
    fn near_names_never_panic(generation in "(v[0-9]|v5e|v5p|v6e|tpu7x|v5litepod)", tail in "[:=_x0-9*-]{0,14}") {
        let _ = parse(&format!("{generation}{tail}"));
    }

    #[test]
    fn what_an_error_offers_is_valid(x in 0u32..40, y in 0u32..40, z in 0u32..40, index in 0usize..7) {
        let generation = podring_topology::Generation::ALL[index];
        match parse(&format!("{generation}:{x}x{y}x{z}")) {
            Ok(slice) => prop_assert_eq!(slice.dims(), [x, y, z]),
            Err(TopologyError::BadShape { nearest, .. } | TopologyError::HostsDontDivide { nearest, .. }) => {
                prop_assert!(!nearest.is_empty());
                for name in nearest {
                    prop_assert!(parse(&name).is_ok(), "{}", name);
                }
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    #[test]
    fn counts_that_are_refused_offer_valid_types(count in 0u64..30_000, index in 0usize..6) {
        let family = ["v2", "v3", "v4", "v5litepod", "v5p", "v6e"][index];
        let name = format!("{family}-{count}");
        match parse(&name) {
            Ok(slice) => {
                let per_chip = u64::from(slice.generation().tensor_cores());
                prop_assert_eq!(u64::from(slice.chips_per_slice()) * per_chip, count);
            }
            Err(TopologyError::BadCount { nearest, .. }) => {
                prop_assert!(!nearest.is_empty());
                for name in nearest {
                    prop_assert!(parse(&name).is_ok(), "{}", name);
                }
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}

fn chips(name: &str) -> (String, u32) {
    let slice = parse(name).unwrap();
    (slice.shape().to_string(), slice.chips_per_slice())
}

#[test]
fn accelerator_types_count_what_google_counts() {
    // docs.cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e}: the tables of supported configurations.
    for (name, shape, count) in [
        ("v2-8", "2x2", 4),
        ("v2-512", "16x16", 256),
        ("v3-32", "4x4", 16),
        ("v3-2048", "32x32", 1024),
        ("v4-8", "2x2x1", 4),
        ("v4-16", "2x2x2", 8),
        ("v4-32", "2x2x4", 16),
        ("v4-64", "2x4x4", 32),
        ("v4-128", "4x4x4", 64),
        ("v4-256", "4x4x8", 128),
        ("v4-512", "4x8x8", 256),
        ("v4-1024", "8x8x8", 512),
        ("v4-1536", "8x8x12", 768),
        ("v4-2048", "8x8x16", 1024),
        ("v4-4096", "8x16x16", 2048),
        ("v5litepod-1", "1x1", 1),
        ("v5litepod-4", "2x2", 4),
        ("v5litepod-8", "2x4", 8),
        ("v5litepod-16", "4x4", 16),
        ("v5litepod-32", "4x8", 32),
        ("v5litepod-128", "8x16", 128),
        ("v5litepod-256", "16x16", 256),
        ("v5p-8", "2x2x1", 4),
        ("v5p-128", "4x4x4", 64),
        ("v5p-384", "4x4x12", 192),
        ("v5p-640", "4x4x20", 320),
        ("v5p-768", "4x8x12", 384),
        ("v5p-1152", "4x12x12", 576),
        ("v5p-6912", "12x12x24", 3456),
        ("v5p-12288", "16x16x24", 6144),
        ("v6e-8", "2x4", 8),
        ("v6e-64", "8x8", 64),
        ("v6e-256", "16x16", 256),
    ] {
        assert_eq!(chips(name), (shape.to_owned(), count), "{name}");
    }
}

#[test]
fn spellings() {
    for (name, canonical) in [
        ("v5e=4x4", "v5e:4x4"),
        ("v5e_4x4", "v5e:4x4"),
        ("V5E:4x4", "v5e:4x4"),
        ("TPU v5e:2x2", "v5e:2x2"),
        ("v5 lite:2x2", "v5e:2x2"),
        ("v5:2x2x1", "v5p:2x2x1"),
        ("v4:4x4", "v4:4x4x1"),
        ("v5p:4x4x8_untwisted", "v5p:4x4x8"),
        ("v5p:4x4x8_twisted", "v5p:4x4x8_twisted"),
        (" v5e:4x4*2 ", "v5e:4x4*2"),
        ("v5litepod-16*3", "v5e:4x4*3"),
        ("TPU7x:2x2x2", "tpu7x:2x2x2"),
        ("v5e:04x4", "v5e:4x4"),
    ] {
        assert_eq!(parse(name).unwrap().to_string(), canonical, "{name}");
    }
}

#[test]
fn type_and_topology_together() {
    let options = SliceOptions::default();
    let both = |a, b| from_accelerator(Some(a), Some(b), &options);
    assert_eq!(both("v4-32", "2x2x4").unwrap().to_string(), "v4:2x2x4");
    assert_eq!(both("v4-512", "4x4x16").unwrap().to_string(), "v4:4x4x16");
    assert_eq!(both("tpu-v5-lite-podslice", "4x4").unwrap().to_string(), "v5e:4x4");
    assert_eq!(both("tpu7x", "4x4x4*2").unwrap().to_string(), "tpu7x:4x4x4*2");
    assert_eq!(both("v5p-256", "v5p:4x4x8_twisted").unwrap().to_string(), "v5p:4x4x8_twisted");
    assert_eq!(from_accelerator(None, Some("v5e:4x4"), &options).unwrap().to_string(), "v5e:4x4");
    assert_eq!(from_accelerator(Some("v4-8"), Some(""), &options).unwrap().to_string(), "v4:2x2x1");
    match both("v4-32", "2x2x2").unwrap_err() {
        TopologyError::Contradiction {
            accelerator_chips, topology_chips, fitting_topologies, fitting_types, ..
        } => {
            assert_eq!((accelerator_chips, topology_chips), (16, 8));
            assert!(fitting_topologies.contains(&"2x2x4".to_owned()), "{fitting_topologies:?}");
            assert_eq!(fitting_types, ["v4-16"]);
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(both("v4-32", "v5p:2x2x4"), Err(TopologyError::GenerationMismatch { .. })));
    assert!(matches!(from_accelerator(None, None, &options), Err(TopologyError::BadName { .. })));
}

#[test]
fn bad_names_say_what_is_nearest() {
    let text = |name: &str| parse(name).unwrap_err().to_string();
    assert!(text("v9:2x2").contains("v2, v3, v4, v5e, v5p, v6e, tpu7x"), "{}", text("v9:2x2"));
    assert!(text("v7x:2x2x1").contains("nearest: tpu7x"), "{}", text("v7x:2x2x1"));
    assert!(text("v5e:2x2x2").contains("2-D"), "{}", text("v5e:2x2x2"));
    assert!(text("v5e:0x4").contains("at least 1"), "{}", text("v5e:0x4"));
    assert!(text("v5e:32x32").contains("16x16"), "{}", text("v5e:32x32"));
    assert!(text("v5p:6x4x4").contains("multiples of 4"), "{}", text("v5p:6x4x4"));
    assert!(text("tpu7x:16x24x28").contains("9216"), "{}", text("tpu7x:16x24x28"));
    assert!(text("tpu7x-8").contains("tpu7x:2x2x1"), "{}", text("tpu7x-8"));
    assert!(text("v4-24").contains("TensorCores"), "{}", text("v4-24"));
    assert!(text("v4-7").contains("v4-8"), "{}", text("v4-7"));
    assert!(text("v5e").contains("v5e:4x4"), "{}", text("v5e"));
    assert!(text("hello").contains("accelerator type"), "{}", text("hello"));
    assert!(text("v5e:4x4*0").contains("1 to"), "{}", text("v5e:4x4*0"));
    assert!(text("v5e:-1x4").contains("extents"), "{}", text("v5e:-1x4"));
    assert!(text("v5p:8x8x8_twisted").contains("4x8x8_twisted"), "{}", text("v5p:8x8x8_twisted"));
    assert!(text("v5e:4x8_twisted").contains("3-D"), "{}", text("v5e:4x8_twisted"));
    let options = SliceOptions { wrap: Some([true, true, false]), ..SliceOptions::default() };
    assert!(parse_with("v5p:4x4x8_twisted", &options).unwrap_err().to_string().contains("wrap in all"));
    let options = SliceOptions { chip_config_name: Some("megacore".into()), ..SliceOptions::default() };
    assert!(parse_with("v5e:4x4", &options).unwrap_err().to_string().contains("valid: default"));
    let options = SliceOptions { chips_per_host_bounds: Some([0, 2, 1]), ..SliceOptions::default() };
    assert!(parse_with("v5e:4x4", &options).unwrap_err().to_string().contains("2x2x1"));
}

#[test]
fn wraps() {
    for (name, wrap) in [
        ("v5e:16x16", [true, true, false]),
        ("v5e:8x16", [false, true, false]),
        ("v6e:8x8", [false; 3]),
        ("v3:32x16", [true, false, false]),
        ("v4:4x4x4", [true; 3]),
        ("v4:2x2x4", [false; 3]),
        ("v4:4x4x2", [false; 3]),
        ("tpu7x:16x24x24", [true; 3]),
    ] {
        assert_eq!(parse(name).unwrap().wrap(), wrap, "{name}");
    }
}
