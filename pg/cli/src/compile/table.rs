//! `podring compile --table`: the table of docs/ici.md.

use clap::ValueEnum as _;
use serde_json::Value;

use super::{Args, CompileError, child, job::Job};
use crate::{bench::op::Op, terminal};

/// Small slices: every operation that has a strategy of its own.
const SMALL: &[&str] = &["v5e:2x2", "v5e:4x4", "v6e:8x8", "v4:2x2x4", "v5p:2x2x2", "tpu7x:2x2x1"];
/// Large ones, to full pods.
const LARGE: &[&str] = &["v5e:16x16", "v6e:16x16", "v4:16x16x16", "v5p:8x8x8", "v5p:16x20x28", "tpu7x:16x24x24"];
const OPS: &[(&str, &str)] = &[
    ("all_reduce", "all"),
    ("all_reduce", "axis:x"),
    ("reduce_scatter", "all"),
    ("reduce_scatter", "axis:x"),
    ("all_gather", "all"),
    ("all_to_all", "all"),
    ("broadcast", "all"),
];

/// The first so many of [`OPS`] on large slices.
const ON_LARGE: usize = 3;

/// Prints a row as soon as it is there.
pub(super) fn run(args: &Args) -> Result<i32, CompileError> {
    terminal::out(
        "| slice | operation | group | plan | compile, s | RSS, MiB | code, KiB | device memory, MiB | collectives | strategy | \
         emitter | colors | phases | dims | async | predicted, µs |",
    );
    terminal::out("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let rows = SMALL
        .iter()
        .flat_map(|slice| OPS.iter().map(move |op| (slice, op)))
        .chain(LARGE.iter().flat_map(|slice| OPS[..ON_LARGE].iter().map(move |op| (slice, op))));
    let total = SMALL.len() * OPS.len() + LARGE.len() * ON_LARGE;
    let mut progress = terminal::Progress::new();
    for (index, (slice, (op, group))) in rows.enumerate() {
        progress.show(&format!("{}/{total} {op} on {slice}, {group}", index + 1));
        let one = Args {
            slice: Some((*slice).to_owned()),
            op: Op::from_str(op, false).ok(),
            group: (*group).to_owned(),
            mlir: None,
            plan: None,
            table: false,
            ..*args
        };
        let outcome = Job::of(&one).and_then(|job| child::compile(&one, &job));
        progress.clear();
        match outcome {
            Ok(report) => terminal::out(&row(&report)),
            Err(error) => {
                let words = error.to_string().replace(['|', '\n'], " ");
                terminal::out(&format!("| {slice} | {op} | {group} | {words} |"));
            }
        }
    }
    Ok(0)
}

fn row(report: &Value) -> String {
    let text = |name: &str| match &report[name] {
        Value::Null => "–".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let scaled =
        |name: &str, shift: u32| report[name].as_i64().map_or("–".to_owned(), |value| (value >> shift).to_string());
    let mut collectives: Vec<&str> =
        report["collectives"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    collectives.dedup();
    if collectives.is_empty() {
        collectives.push("–");
    }
    let cells = [
        text("slice"),
        text("op"),
        text("group"),
        text("plan"),
        report["compile_s"].as_f64().map_or("–".to_owned(), |seconds| format!("{seconds:.2}")),
        text("peak_rss_mib"),
        scaled("code_bytes", 10),
        scaled("peak_memory_bytes", 20),
        collectives.join(", "),
        text("strategy"),
        text("emitter"),
        text("colors"),
        text("phases"),
        text("dim_sizes"),
        report["async"].as_bool().map_or("–", |is| if is { "yes" } else { "no" }).to_owned(),
        text("predicted_us"),
    ];
    format!("| {} |", cells.join(" | "))
}
