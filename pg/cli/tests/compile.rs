//! `podring compile` over libtpu, with no TPU.
//!
//! Without libtpu nothing can run: with PODRING_REQUIRE_PJRT=1 (set by scripts/test) that fails.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use podring_ici::pjrt::{Want, find};
use serde_json::Value;

fn environment() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.venv")
}

fn missing() -> bool {
    let Err(error) = find(Want::Tpu, &[environment()]) else { return false };
    assert!(std::env::var("PODRING_REQUIRE_PJRT").as_deref() != Ok("1"), "{error}");
    eprintln!("NOT RUN: {error}");
    true
}

fn podring(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_podring"));
    command.env("VIRTUAL_ENV", environment()).arg("compile").args(arguments).output().unwrap()
}

fn report(arguments: &[&str]) -> Value {
    let output = podring(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refusal(arguments: &[&str]) -> String {
    let output = podring(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn every_operation_compiles_for_a_slice_in_bounded_memory() {
    if missing() {
        return;
    }
    for op in ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "scatter", "sendrecv"]
    {
        for group in ["all", "axis:x"] {
            let report = report(&["v5e:4x4", op, "--bytes", "64M", "--group", group, "--json"]);
            assert!(report["peak_rss_mib"].as_u64().unwrap() <= 400, "{report}");
            assert!(report["code_bytes"].as_u64().unwrap() > 0, "{report}");
            assert!(report["predicted_us"].as_f64().unwrap() > 0.0, "{report}");
            assert_eq!(report["ranks"], if group == "all" { 16 } else { 4 });
        }
    }
}

#[test]
fn uneven_exchanges_compile_as_quickly() {
    if missing() {
        return;
    }
    let report = report(&["v5e:4x4", "all_to_all", "--uneven", "--bytes", "64M", "--json"]);
    assert!(report["peak_rss_mib"].as_u64().unwrap() <= 400, "{report}");
    assert_eq!(report["collectives"], serde_json::json!(["all-to-all"]));
    // One block after another in the text would be 2.5 MiB.
    assert!(report["code_bytes"].as_u64().unwrap() < 1 << 20, "{report}");
}

#[test]
fn across_slices_all_parts_are_reported() {
    if missing() {
        return;
    }
    let whole = report(&["v5e:2x2*2", "all_reduce", "--bytes", "1M", "--json"]);
    assert_eq!((whole["plan"].as_str(), whole["ranks"].as_u64()), (Some("across slices"), Some(8)), "{whole}");
    let parts = whole["parts"].as_array().unwrap();
    let what: Vec<_> =
        parts.iter().map(|part| (part["where"].as_str().unwrap(), part["op"].as_str().unwrap())).collect();
    let inside = "inside each slice";
    assert_eq!(what, [(inside, "reduce_scatter"), ("between slices", "all_reduce"), (inside, "all_gather")]);
    assert_eq!(whole["collectives"], serde_json::json!(["reduce-scatter", "all-gather"]));
    assert_eq!(parts[1]["bytes"], 256 << 10);
    let sum = |name: &str| parts.iter().filter_map(|part| part[name].as_f64()).sum::<f64>();
    for name in ["predicted_us", "hlo_ops", "code_bytes", "compile_s"] {
        assert!((whole[name].as_f64().unwrap() - sum(name)).abs() < 0.2 && sum(name) > 0.0, "{name}: {whole}");
    }
    // As many bytes as in one slice, and the way between them.
    let alone = report(&["v5e:2x2", "all_reduce", "--bytes", "1M", "--json"]);
    assert!(whole["predicted_us"].as_f64() > alone["predicted_us"].as_f64(), "{whole} {alone}");
}

#[test]
fn a_plan_is_every_program_once() {
    if missing() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("train.toml");
    let plan = "slice = \"v5e:2x2\"\n[model]\nparameters = 1_000_000\nlayers = 10\nhidden = 64\ntokens = 100\n\
                [[axis]]\nname = \"data\"\nsize = 2\nuse = \"shard\"\n\
                [[axis]]\nname = \"model\"\nsize = 2\nuse = \"tensor\"\n";
    std::fs::write(&file, plan).unwrap();
    let reports = report(&["--plan", file.to_str().unwrap(), "--json"]);
    let ops: Vec<(&str, &str)> = reports
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["op"].as_str().unwrap(), one["group"].as_str().unwrap()))
        .collect();
    let expected = [
        ("all_gather", "data"),
        ("reduce_scatter", "data"),
        ("all_reduce", "model"),
        ("all_reduce", "all"),
        ("barrier", "all"),
    ];
    assert_eq!(ops, expected);
    assert!(reports.as_array().unwrap().iter().all(|one| one["code_bytes"].as_u64().unwrap() > 0));
    std::fs::write(&file, plan.replace("size = 2", "size = 3")).unwrap();
    assert!(refusal(&["--plan", file.to_str().unwrap()]).contains('9'));
    std::fs::write(&file, plan.replace("tensor", "tensors")).unwrap();
    let words = refusal(&["--plan", file.to_str().unwrap()]);
    assert!(words.contains("train.toml") && words.contains("tensors"), "{words}");
    assert!(refusal(&["--plan", "/nonexistent.toml"]).contains("plan /nonexistent.toml"));
}

#[test]
fn strategies_are_read_back() {
    if missing() {
        return;
    }
    let whole = report(&["v5e:4x4", "all_reduce", "--json"]);
    assert!(whole["strategy"].as_str().unwrap().contains("ND"), "{whole}");
    assert_eq!(whole["dim_sizes"], "4,4");
    assert_eq!(whole["plan"], "whole");
    let axis = report(&["v5e:4x4", "reduce_scatter", "--group", "axis:x", "--json"]);
    assert_eq!(axis["collectives"], serde_json::json!(["reduce-scatter"]));
    // libtpu would take one over both axes apart: one along each is kept, and the last blocks go home.
    let square = report(&["v5e:4x4", "reduce_scatter", "--json"]);
    assert_eq!(
        square["collectives"],
        serde_json::json!(["reduce-scatter", "reduce-scatter", "collective-permute-start"]),
        "{square}"
    );
    let oblong = report(&["v5e:4x8", "reduce_scatter", "--json"]);
    assert_eq!(oblong["collectives"], serde_json::json!(["reduce-scatter"]), "{oblong}");
    // What the engine launches, and the other way beside it.
    assert_eq!(
        (&axis["plan"], &axis["members"]["by_host"], &axis["members"]["groups"]),
        (&"members".into(), &1.into(), &4.into())
    );
    assert_eq!((&axis["everybody"]["plan"], &axis["members"]["plan"]), (&"cover".into(), &"members".into()), "{axis}");
    let cover = report(&["v5e:4x4", "all_reduce", "--group", "axis:x", "--everybody", "--bytes", "1M", "--json"]);
    assert_eq!(cover["plan"], "cover", "{cover}");
    let alone = report(&["v5e:4x4", "all_reduce", "--group", "0,3,5", "--bytes", "1M", "--json"]);
    assert_eq!(alone["plan"], "members");
    // Three members' reduce-scatter is one that libtpu doesn't have.
    let three = report(&["v5e:4x4", "reduce_scatter", "--group", "0,3,5", "--bytes", "1M", "--json"]);
    assert_eq!(three["collectives"], serde_json::json!(["all-to-all"]), "{three}");
    // What libtpu can't do natively goes another way.
    let max = report(&["v5e:4x4", "all_reduce", "--dtype", "int64", "--redop", "max", "--bytes", "1M", "--json"]);
    let mut ways: Vec<&str> = max["collectives"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    ways.sort_unstable();
    ways.dedup();
    assert_eq!(ways, ["all-gather", "all-to-all"], "{max}");
}

#[test]
fn refusals_carry_libtpus_words_and_limits_hold() {
    if missing() {
        return;
    }
    // What it would refuse isn't tried: the engine has the hosts' network carry it.
    let square = report(&["v5e:4x4", "all_reduce", "--group", "0,1,2,3", "--bytes", "1M", "--json"]);
    assert_eq!((&square["plan"], &square["code_bytes"]), (&"host".into(), &Value::Null), "{square}");
    let few = refusal(&["v5e:4x4", "all_reduce", "--group", "axis:x", "--bytes", "1T", "--everybody"]);
    assert!(few.contains("v5e:4x4 (group axis:x)") && few.contains("refused"), "{few}");
    let large = refusal(&["v5e:4x4", "all_reduce", "--memory", "40"]);
    assert!(large.contains("more than 40 MiB"), "{large}");
    let slow = refusal(&["v5e:4x4", "all_reduce", "--timeout", "0"]);
    assert!(slow.contains("more than 0 s"), "{slow}");
    // A child that dies is an error of this command, which lives: the system ends it after a second of work.
    let mut command = Command::new("sh");
    command.env("VIRTUAL_ENV", environment()).args(["-c", "ulimit -t 1; exec \"$0\" compile v5p:8x8x8 all_reduce"]);
    let output = command.arg(env!("CARGO_BIN_EXE_podring")).output().unwrap();
    let words = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{words}");
    assert!(words.contains("ended its process (signal"), "{words}");
}

/// A plugin whose compile ends the process: an error of this command, which lives.
#[test]
fn a_plugin_that_aborts_is_an_error_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("aborts.c"), folder.path().join("aborts.so"));
    let text = r#"
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
static void *works(void *args) { (void)args; return NULL; }
static void *dies(void *args) { (void)args; fputs("no such luck\n", stderr); abort(); }
static struct {
  size_t size; void *extension; size_t version_size; void *version_extension; int major, minor;
  void *(*slots[110])(void *);
} table = {sizeof(table), NULL, 24, NULL, 0, 110, {NULL}};
const void *GetPjrtApi(void) {
  for (int i = 0; i < 110; i++) table.slots[i] = works;
  table.slots[89] = dies;
  return &table;
}
"#;
    std::fs::write(&source, text).unwrap();
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(made.success());
    let output = Command::new(env!("CARGO_BIN_EXE_podring"))
        .env("PODRING_PJRT_PLUGIN", &library)
        .args(["compile", "v5e:2x2", "all_reduce", "--bytes", "1K"])
        .output()
        .unwrap();
    let words = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{words}");
    for word in ["all_reduce of 1024 bfloat16 on v5e:2x2 (group all)", "signal 6", "no such luck"] {
        assert!(words.contains(word), "{words} lacks {word}");
    }
}

#[test]
fn bad_questions_are_answered_before_libtpu_is_asked() {
    for (arguments, expected) in [
        (&["v5e:4x4", "all_reduce", "--group", "0,77"][..], "rank 77 is outside the 16 devices"),
        (&["v5e:4x4", "all_reduce", "--group", "axis:q"], "expected all, axis:x"),
        (&["v5e:4x4", "all_reduce", "--group", "axis:z"], "no axis z"),
        (&["v9:4x4", "all_reduce"], "unknown TPU generation"),
        (&["v5e:4x4*2", "all_reduce", "--group", "0,1,16"], "different numbers of devices"),
        (&["v5e:4x4", "all_reduce", "--dtype", "float32", "--redop", "bor"], "BOR of float32 has no program"),
    ] {
        let error = refusal(arguments);
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}
