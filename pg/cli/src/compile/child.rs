//! The child that holds libtpu, and its parent.

use std::{
    fs,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use podring_ici::{
    pjrt::{CompileOptions, PjrtError, Plugin, Topology, Value as OptionValue, Want, find},
    readback,
};
use serde_json::{Value, json};

use super::{ANSWER, Args, CompileError, job::Job};

const fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> CompileError {
    move |error| CompileError::Io { what, error }
}

/// Compiles in a child of bounded time and memory; returns its report.
pub(super) fn compile(args: &Args, job: &Job) -> Result<Value, CompileError> {
    if job.work.is_none() {
        return Ok(facts(args, job));
    }
    // Found here, so that its absence is told before anything is started.
    find(Want::Tpu, &[]).map_err(CompileError::Plugin)?;
    let folder = tempfile::tempdir().map_err(io("no temporary folder"))?;
    let (answer, words) = (folder.path().join("answer"), folder.path().join("stderr"));
    let stderr = fs::File::create(&words).map_err(io("no temporary file"))?;
    let program = name(args, job);
    let mut child = command(args)?
        .env(ANSWER, &answer)
        // libtpu would ask the cloud's metadata server about this machine, and wait for it.
        .env("TPU_SKIP_MDS_QUERY", "1")
        // libtpu lets one process at a time have a machine's TPUs; a compiler takes none.
        .env("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .map_err(io("the compiler can't be started"))?;
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().map_err(io("the compiler can't be waited for"))? {
            break status;
        }
        let over = started.elapsed().as_secs() >= args.timeout;
        let large = resident_mebibytes(child.id(), "VmRSS:") > args.memory;
        if over || large {
            // It may have ended just now: then there is nothing to stop.
            let _ = child.kill();
            let _ = child.wait();
            return Err(if over {
                CompileError::TooLong { program, seconds: args.timeout }
            } else {
                CompileError::TooLarge { program, mebibytes: args.memory }
            });
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let text = fs::read(&answer).unwrap_or_default();
    match serde_json::from_slice::<Value>(&text) {
        Ok(value) if value["error"].is_string() => {
            Err(CompileError::Refused { program, error: value["error"].as_str().unwrap_or_default().to_owned() })
        }
        Ok(value) => Ok(value),
        Err(_) => Err(CompileError::Died { program, status: describe(status), words: last_words(&words) }),
    }
}

/// This command again, as it was started (by name, or by a Python that holds it), for one program.
fn command(args: &Args) -> Result<Command, CompileError> {
    let line = fs::read("/proc/self/cmdline").map_err(io("this command's own line can't be read"))?;
    let words: Vec<String> =
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    let end = words.iter().position(|word| word == "compile").unwrap_or(0);
    let mut command = Command::new("/proc/self/exe");
    command.arg0(&words[0]).args(&words[1.min(end)..end]);
    command.args(["compile", args.slice.as_deref().unwrap_or_default()]);
    command.arg(args.op.map_or("all_reduce", |op| op.name()));
    command.args(["--bytes", &args.bytes.to_string(), "--dtype", args.dtype.name(), "--group", &args.group]);
    command.args(["--redop", &args.redop.name().to_ascii_lowercase()]);
    for (flag, set) in [("--everybody", args.everybody), ("--exact", args.exact), ("--uneven", args.uneven)] {
        if set {
            command.arg(flag);
        }
    }
    Ok(command)
}

/// What an error calls the program.
fn name(args: &Args, job: &Job) -> String {
    // All groups of a large slice would fill pages.
    let group = if args.group.len() > 60 { format!("of {}", job.ranks.len()) } else { args.group.clone() };
    format!("{} of {} {} on {} (group {group})", job.op.name(), job.bytes, args.dtype, job.slice)
}

fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("signal {signal}"),
        None => status.to_string(),
    }
}

fn last_words(file: &Path) -> String {
    let text = String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).into_owned();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(6)..].join(" | ")
}

/// A line of `/proc/<pid>/status`, in MiB; 0 if the process is gone.
fn resident_mebibytes(pid: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap_or_default();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap_or(0) / 1024
}

/// The child's part: compiles, and leaves a report or an error in the file.
pub(super) fn answer(args: &Args, file: &Path) -> Result<(), CompileError> {
    let job = Job::of(args)?;
    let value = match report(args, &job) {
        Ok(value) => value,
        Err(error) => json!({ "error": error.to_string() }),
    };
    fs::write(file, value.to_string()).map_err(io("the answer can't be written"))
}

#[derive(Debug, thiserror::Error)]
enum ReportError {
    #[error(transparent)]
    Pjrt(#[from] PjrtError),
    #[error(transparent)]
    Read(#[from] readback::ReadError),
}

/// What is known without compiling; the rest is null.
fn facts(args: &Args, job: &Job) -> Value {
    let way = |(plan, why): (&str, &str)| json!({ "plan": plan, "why": why });
    let mut members = way(job.members);
    (members["groups"], members["by_host"]) = (json!(job.groups.0), json!(job.groups.1));
    let mut report = json!({
        "slice": job.slice.to_string(),
        "op": job.op.name(),
        "bytes": job.bytes,
        "dtype": args.dtype.name(),
        "group": args.group,
        "ranks": job.ranks.len(),
        "plan": job.how,
        "why": job.why,
        "members": members,
        "everybody": way(job.everybody),
        "predicted_us": job.work.as_ref().map(|work| (work.predicted_us * 10.0).round() / 10.0),
    });
    for compiled in [
        "compile_s",
        "peak_rss_mib",
        "code_bytes",
        "peak_memory_bytes",
        "hlo_ops",
        "collectives",
        "emitter",
        "strategy",
        "colors",
        "phases",
        "dim_sizes",
        "async",
        "compiler",
    ] {
        report[compiled] = Value::Null;
    }
    report
}

fn report(args: &Args, job: &Job) -> Result<Value, ReportError> {
    let mut report = facts(args, job);
    let Some(work) = &job.work else { return Ok(report) };
    // SAFETY: libtpu, from the file that the user's settings or Python environment name.
    let plugin = unsafe { Plugin::load(&find(Want::Tpu, &[])?) }?;
    let slice = &job.slice;
    let mut options = Vec::new();
    if slice.slices() > 1 {
        options.push(("num_slices", OptionValue::Int(slice.slices().into())));
    }
    if slice.wrap().contains(&true) {
        options.push(("wrap", OptionValue::Ints(slice.wrap().map(i64::from).to_vec())));
    }
    if slice.config() == podring_topology::ChipConfig::Megacore {
        options.push(("chip_config_name", OptionValue::Text("megacore".to_owned())));
    }
    if work.alone {
        // What counts for a part of a slice: the engine's processes hold a chip each.
        options.push(("chips_per_host_bounds", OptionValue::Ints(vec![1, 1, 1])));
    }
    let topology = Topology::create(&plugin, &job.topology(), &options)?;
    let started = Instant::now();
    let executable = topology.compile(&work.program.text, &CompileOptions::on(work.launch.device_ids(slice)))?;
    let seconds = started.elapsed().as_secs_f64();
    let (code, memory) = (executable.code_bytes()?, executable.memory()?);
    let (module, format) = executable.optimized()?;
    let optimized = readback::read(&module, &format)?;
    // The collective that carries the most: the first that has a strategy, else the first.
    let main = optimized.collectives.iter().find(|one| one.strategy.is_some()).or(optimized.collectives.first());
    let opcodes: Vec<&str> = optimized.collectives.iter().map(|one| one.opcode.as_str()).collect();
    let compiled = [
        ("compile_s", json!((seconds * 1000.0).round() / 1000.0)),
        ("peak_rss_mib", json!(resident_mebibytes(std::process::id(), "VmHWM:"))),
        ("code_bytes", json!(code)),
        ("peak_memory_bytes", json!(memory.peak)),
        ("hlo_ops", json!(optimized.opcodes.len())),
        ("collectives", json!(opcodes)),
        ("emitter", json!(main.and_then(|main| main.emitter.as_deref()))),
        ("strategy", json!(main.and_then(|main| main.strategy.as_deref()))),
        ("colors", json!(main.and_then(|main| main.colors))),
        ("phases", json!(main.and_then(|main| main.phases))),
        ("dim_sizes", json!(main.and_then(|main| main.dim_sizes.as_deref()))),
        ("async", json!(optimized.collectives.iter().any(|one| one.asynchronous))),
        ("compiler", json!(topology.platform_version()?.lines().collect::<Vec<_>>().join(", "))),
    ];
    for (name, value) in compiled {
        report[name] = value;
    }
    Ok(report)
}
