//! `podring bench ici` on XLA's CPU plugin.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{path::PathBuf, process::Command};

use podring_ici::pjrt::{Want, find};
use serde_json::Value;

#[test]
fn what_is_added_to_an_execution_is_told() {
    let environment = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.venv");
    if let Err(error) = find(Want::Cpu, std::slice::from_ref(&environment)) {
        assert!(std::env::var("PODRING_REQUIRE_PJRT").as_deref() != Ok("1"), "{error}");
        eprintln!("NOT RUN: {error}");
        return;
    }
    let output = Command::new(env!("CARGO_BIN_EXE_podring"))
        .env("VIRTUAL_ENV", environment)
        .args(["bench", "ici", "--devices", "2", "--sizes", "8,64K", "--iters", "50", "--json", "-"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(rows.len(), 4);
    for row in &rows {
        let us = |name: &str| row[name].as_f64().unwrap();
        // The bound of 20 µs is for a quiet machine; on a busy one a median may be moved, but not to milliseconds.
        assert!(us("ours_us") > 0.0 && us("ours_us") < 2000.0, "{row}");
        assert!(us("run_us") >= us("execute_us") * 0.5 && us("gather_us") >= 0.0, "{row}");
    }
}
