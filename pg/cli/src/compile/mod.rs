//! `podring compile`: a collective compiled for a slice that isn't here, and what libtpu made of it. See docs/ici.md.
//!
//! libtpu runs in a child process: it can take minutes and gigabytes on a program, or end its process. The child is this
//! very command again, told by an environment variable where to leave its answer.

mod across;
mod child;
mod job;
mod plan;
mod table;

use std::path::PathBuf;

use podring_collective::{DType, Reduction};
use serde_json::Value;

use crate::{
    bench::op::{Op, parse_dtype, parse_redop},
    terminal,
};
use across::Across;
use job::Job;

/// Where a child leaves its answer.
const ANSWER: &str = "PODRING_COMPILE_ANSWER";

/// A collective compiled by libtpu for a slice; no TPU is needed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  podring compile v5e:4x4 all_reduce --bytes 64M --dtype bf16
  podring compile v5p:8x8x8 reduce_scatter --bytes 64M --dtype bf16 --group axis:x --json
  podring compile v5e:4x4 all_gather --bytes 1M --group 0,3,5,10
  podring compile v5e:4x4 all_gather --bytes 1M --group axis:x --everybody
  podring compile v5e:4x4 all_to_all --uneven --bytes 64M
  podring compile --table
  podring compile --plan examples/train.toml

Bytes are nccl-tests' convention: the whole buffer per rank (all_gather's output, reduce_scatter's input).
Ranks are positions in libtpu's list of devices (podring topo SLICE --devices); groups that run at once are
separated by slashes (0,1/2,3). docs/ici.md says what a plan holds.")]
pub(crate) struct Args {
    /// Slice, as podring topo reads it: "v5e:4x4", "v5p:4x4x8_twisted", "v5litepod-16"
    #[arg(required_unless_present_any = ["table", "plan"])]
    slice: Option<String>,
    /// Operation
    #[arg(required_unless_present_any = ["table", "plan"])]
    op: Option<Op>,
    /// Bytes of the whole buffer of a rank: 4096, 64M
    #[arg(long, default_value = "64M", value_parser = crate::topo::args::bytes)]
    bytes: u64,
    /// Element type
    #[arg(long, default_value = "bfloat16", value_parser = parse_dtype)]
    dtype: DType,
    /// Reduction, where there is one
    #[arg(long, default_value = "sum", value_parser = parse_redop)]
    redop: Reduction,
    /// Group: "all", "axis:x" (every line along an axis), or ranks ("0,3,5", "0,1/2,3")
    #[arg(long, default_value = "all")]
    group: String,
    /// Compile as if every chip called at once, each in a group of its own; the engine has the members alone call
    #[arg(long)]
    everybody: bool,
    /// Sum 16-bit floats in f32 and round once
    #[arg(long)]
    exact: bool,
    /// all_to_all whose blocks differ in size: where they start is an operand
    #[arg(long)]
    uneven: bool,
    /// Seconds that a compile may take
    #[arg(long, default_value_t = 120)]
    timeout: u64,
    /// MiB of memory that a compile may take
    #[arg(long, default_value_t = 8192)]
    memory: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write the StableHLO to this file
    #[arg(long, value_name = "FILE")]
    mlir: Option<PathBuf>,
    /// Compile a table of slices and operations, as in docs/ici.md
    #[arg(long)]
    table: bool,
    /// Compile every program that a mesh and a model will need, as this file says
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = ["table", "slice", "op"])]
    plan: Option<PathBuf>,
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompileError {
    #[error("{0}")]
    Slice(#[from] podring_topology::TopologyError),
    #[error("{0}")]
    Plan(#[from] podring_ici::slice::SliceError),
    #[error("{0}")]
    Program(#[from] podring_ici::program::ProgramError),
    #[error("--group is \"{got}\": expected all, axis:x, axis:y, axis:z, or ranks such as 0,3,5")]
    Group { got: String },
    #[error("{slice} has no axis {axis} of two chips or more")]
    Axis { slice: String, axis: char },
    #[error("no single program: {why}")]
    NoProgram { why: &'static str },
    #[error("{0} (pip install libtpu, or set TPU_LIBRARY_PATH)")]
    Plugin(podring_ici::pjrt::PjrtError),
    #[error("{program}: refused: {error}")]
    Refused { program: String, error: String },
    #[error("{program}: libtpu took more than {seconds} s and was stopped (--timeout)")]
    TooLong { program: String, seconds: u64 },
    #[error("{program}: libtpu took more than {mebibytes} MiB and was stopped (--memory)")]
    TooLarge { program: String, mebibytes: u64 },
    #[error("{program}: libtpu ended its process ({status}); its last words: {words}")]
    Died { program: String, status: String, words: String },
    #[error("plan {file}: {reason}")]
    PlanFile { file: String, reason: String },
    #[error("{failed} of {programs} programs could not be compiled")]
    Some { failed: usize, programs: usize },
    #[error("{what}: {error}")]
    Io { what: &'static str, error: std::io::Error },
}

/// Runs the command; returns the exit code.
pub(crate) fn run(args: Args) -> Result<i32, CompileError> {
    if let Some(answer) = std::env::var_os(ANSWER) {
        child::answer(&args, &PathBuf::from(answer))?;
        return Ok(0);
    }
    if args.table {
        return table::run(&args);
    }
    if let Some(file) = &args.plan {
        return plan::run(&args, file);
    }
    let save = |text: &str| match &args.mlir {
        Some(file) => std::fs::write(file, text)
            .map_err(|error| CompileError::Io { what: "the StableHLO can't be written", error }),
        None => Ok(()),
    };
    let report = if let Some(across) = Across::of(&args)? {
        save(&across.text())?;
        across.compile(&args)?
    } else {
        let job = Job::of(&args)?;
        save(job.text().unwrap_or_default())?;
        child::compile(&args, &job)?
    };
    if args.json {
        terminal::out(&report.to_string());
    } else {
        terminal::out(&page(&report));
    }
    Ok(0)
}

/// A report as text, a line per fact.
fn page(report: &Value) -> String {
    let mut lines = Vec::new();
    for (name, value) in report.as_object().into_iter().flatten() {
        let text = match value {
            Value::Null => "-".to_owned(),
            Value::String(text) => text.clone(),
            Value::Array(items) if name == "parts" => {
                let what = |name: &str, part: &Value| part[name].as_str().unwrap_or("-").to_owned();
                let part = |part: &Value| {
                    let (place, op) = (what("where", part), what("op", part));
                    format!("{op} of {} bytes {place}: {} µs", part["bytes"], part["predicted_us"])
                };
                items.iter().map(part).collect::<Vec<_>>().join(", ")
            }
            Value::Object(fields) => fields
                .iter()
                .map(|(name, value)| format!("{name}: {}", value.as_str().map_or(value.to_string(), str::to_owned)))
                .collect::<Vec<_>>()
                .join("; "),
            Value::Array(items) => items
                .iter()
                .map(|item| item.as_str().map_or(item.to_string(), str::to_owned))
                .collect::<Vec<_>>()
                .join(" "),
            other => other.to_string(),
        };
        lines.push(format!("{name:18} {text}"));
    }
    lines.join("\n")
}
