//! `podring topo` as its users run it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

fn podring(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_podring"))
        .arg("topo")
        .args(arguments)
        .env_remove("TPU_ACCELERATOR_TYPE")
        .env_remove("TPU_TOPOLOGY")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that refuses its arguments may be gone before it reads.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let mut all = arguments.to_vec();
    all.push("--json");
    let output = podring(&all, "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(arguments: &[&str]) -> String {
    let output = podring(arguments, "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refusal(arguments: &[&str]) -> String {
    let output = podring(arguments, "");
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn json_lists_devices_as_libtpu_does() {
    let golden = include_str!("../../../topology/tests/data/libtpu_devices.jsonl");
    let mut compared = 0;
    for line in golden.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let name = line["name"].as_str().unwrap();
        let mut arguments = vec![name.to_owned()];
        if let Some(slices) = line["opts"]["num_slices"].as_u64() {
            arguments.extend(["--num-slices".to_owned(), slices.to_string()]);
        }
        if let Some(bounds) = line["opts"]["chips_per_host_bounds"].as_array() {
            let bounds: Vec<String> = bounds.iter().map(Value::to_string).collect();
            arguments.extend(["--chips-per-host-bounds".to_owned(), bounds.join(",")]);
        }
        if let Some(config) = line["opts"]["chip_config_name"].as_str() {
            arguments.extend(["--chip-config".to_owned(), config.to_owned()]);
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        if line.get("error").is_some() {
            refusal(&arguments);
            continue;
        }
        let ours: Vec<Value> = json(&arguments)["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|d| serde_json::json!([d["id"], d["coords"], d["core"], d["slice"], d["process"]]))
            .collect();
        assert_eq!(Value::from(ours), line["devices"], "{name}");
        compared += 1;
    }
    assert_eq!(compared, 21);
}

#[test]
fn json_has_the_mesh_and_its_axes() {
    let answer = json(&["v5p:4x4x8", "--mesh", "dp=8,tp=16", "--bytes", "1MiB"]);
    let mesh = answer["mesh"].as_array().unwrap();
    assert_eq!(mesh.len(), 8);
    let mut ids: Vec<u64> =
        mesh.iter().flat_map(|row| row.as_array().unwrap()).map(|id| id.as_u64().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..128).collect::<Vec<u64>>());
    let axes = answer["axes"].as_array().unwrap();
    assert_eq!((axes[0]["name"].as_str(), axes[0]["size"].as_u64()), (Some("dp"), Some(8)));
    assert_eq!((axes[1]["kind"].as_str(), axes[0]["kind"].as_str()), (Some("sub-torus"), Some("ring")));
    for axis in axes {
        for collective in ["allgather", "reduce-scatter", "allreduce", "all-to-all"] {
            assert!(axis["us"][collective].as_f64().unwrap() > 0.0);
        }
    }
    assert_eq!(answer["bytes"], 1 << 20);
    let plain = json(&["v4-32"]);
    assert_eq!((plain["mesh"].is_null(), plain["axes"].as_array().map(Vec::len)), (true, Some(0)));
    assert_eq!(plain["slice"], "v4:2x2x4");
}

#[test]
fn a_given_mesh_is_judged() {
    let arguments = ["v5e:4x4", "--mesh", "dp=4,tp=4", "--mesh-ids", "-", "--json"];
    let rows: Vec<Vec<u32>> = (0..4).map(|y| (0..4).map(|x| y * 4 + x).collect()).collect();
    let output = podring(&arguments, &serde_json::to_string(&rows).unwrap());
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["mesh"], serde_json::json!(rows));
    assert_eq!(answer["axes"][1]["kind"], "line");
    let odd = [[0, 3, 5, 10], [1, 2, 4, 6], [7, 8, 9, 11], [12, 13, 14, 15]];
    let output = podring(&arguments, &serde_json::to_string(&odd).unwrap());
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["axes"][1]["kind"], "irregular");
    for (input, why) in [("[[0,1]]", "places"), ("[99]", "not in the slice"), ("{}", "JSON list"), ("[", "JSON list")] {
        let output = podring(&arguments, input);
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains(why), "{input}");
    }
}

#[test]
fn text_draws_a_dozen_shapes() {
    for (name, mesh) in [
        ("v2:4x4", "dp=4,tp=8"),
        ("v3:8x8", "dp=128"),
        ("v4:2x2x4", "dp=4,tp=8"),
        ("v4:4x4x4", "dp=8,tp=16"),
        ("v5e:2x4", "tp=8"),
        ("v5e:4x4*2", "dp=2,fsdp=4,tp=4"),
        ("v5e:16x16", "dp=64,tp=4"),
        ("v5p:4x4x8_twisted", "dp=8,tp=16"),
        ("v5p:16x16x24", "pp=4,dp=24,tp=64"),
        ("v6e:8x8", "dp=8,tp=8"),
        ("tpu7x:2x2x1", "dp=2,tp=4"),
        ("tpu7x:16x24x24", "dp=96,tp=192"),
    ] {
        let page = text(&[name, "--mesh", mesh, "--color", "never"]);
        assert!(page.starts_with(name), "{name}");
        assert!(page.contains("allreduce"), "{name}");
        assert!(!page.contains('\u{1b}'), "{name}");
        // Rows of chips line up: every row of a layer is as wide as its brackets say.
        let rows: Vec<usize> =
            page.lines().filter(|line| line.starts_with("  [")).map(|line| line.matches('[').count()).collect();
        assert!(rows.windows(2).all(|pair| pair[0] == pair[1]), "{name}");
        let colourful = text(&[name, "--mesh", mesh, "--color", "always", "--devices"]);
        assert!(colourful.contains('\u{1b}'), "{name}");
    }
}

#[test]
fn the_drawing() {
    let page = text(&["v5e:2x2"]);
    assert!(page.contains("  [0]═══[1]\n   ║     ║\n  [2]═══[3]\n"), "{page}");
}

#[test]
fn pictures_are_png() {
    let directory = std::env::temp_dir().join(format!("podring-topo-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    for (name, mesh) in [("v5e:4x4", "dp=4,tp=4"), ("v5p:4x4x8", "dp=8,tp=16"), ("tpu7x:16x24x24", "dp=96,tp=192")] {
        let file = directory.join("slice.png");
        text(&[name, "--mesh", mesh, "--png", file.to_str().unwrap()]);
        let decoder = png::Decoder::new(std::io::BufReader::new(std::fs::File::open(&file).unwrap()));
        let mut reader = decoder.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert!(
            info.width >= 400 && info.height >= 200 && info.width <= 5000 && info.height <= 5000,
            "{name} {info:?}"
        );
        // Both mesh axes' colours are in it.
        for colour in [[0xd6, 0x27, 0x28], [0x1f, 0x77, 0xb4]] {
            assert!(pixels.chunks(3).any(|pixel| pixel == colour), "{name}");
        }
    }
    std::fs::remove_dir_all(&directory).unwrap();
    assert!(refusal(&["v5e:2x2", "--png", "/nonexistent/slice.png"]).contains("/nonexistent/slice.png"));
}

#[test]
fn bad_input_says_what_is_nearest() {
    for (arguments, why) in [
        (vec!["v9:2x2"], "known: v2, v3"),
        (vec!["v5p:3x3x3"], "nearest: v5p:"),
        (vec!["v5e:4x4", "--mesh", "dp=4,tp=5"], "dp=4,tp=4"),
        (vec!["v5e:4x4", "--mesh", "dp=0,tp=16"], "size 0"),
        (vec!["v5e:4x4", "--mesh", "dp=-4,tp=-4"], "size -4"),
        (vec!["v5e:4x4", "--mesh", "dp"], "dp=8,tp=16"),
        (vec!["v5e:4x4", "--mesh", "dp=4,tp=4", "--traffic", "pp=3"], "the axes are dp, tp"),
        (vec!["v5e:4x4", "--mesh", "dp=4,tp=4", "--talk", "tp=shout"], "all-to-all"),
        (vec!["--accelerator-type", "v4-32", "--topology", "2x2x2"], "16 chips"),
        (vec![], "accelerator type"),
    ] {
        let message = refusal(&arguments);
        assert!(message.starts_with("podring topo: ") && message.contains(why), "{arguments:?}: {message}");
    }
    assert_eq!(podring(&["v5e:4x4", "--bytes", "many"], "").status.code(), Some(2));
}
