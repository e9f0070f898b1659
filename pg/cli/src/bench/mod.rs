//! `podring bench`: collectives timed through `torch.distributed`, in nccl-tests' columns. See docs/bench.md.
//!
//! This side plans, starts one Python process per rank (`podring._bench_worker`), and turns what they report into
//! tables, JSON and a picture. It never talks to a backend itself.

mod ici;
mod init;
pub(crate) mod op;
mod rendezvous;
mod row;
mod size;
mod versus;
mod workers;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use podring_collective::{DType, Reduction};
use serde::Serialize;

use crate::python::{self, Interpreter};
use crate::terminal::{self, Progress};
use op::Op;
use row::Row;
use workers::{Event, Set};

const EXAMPLES: &str = "\
Examples:
  podring bench --ranks 2,4 --vs gloo
  podring bench --ops all_reduce --sizes 8:64M --dtype bfloat16 --redop avg
  podring bench --ops all_to_all,sendrecv --ranks 4 --hosts 2 --json out.json --plot out.png

Bytes are nccl-tests' convention: the whole buffer per rank (all_gather's output, reduce_scatter's input),
rounded up to whole elements on every rank. Times are the median over batches of the slowest rank's average;
bandwidths are GB/s (1e9 bytes). With --vs the backends take turns, batch by batch, in the same processes, and
the ratio is the other backend's time over the first's. #wrong counts elements that differ from the exact
result. docs/bench.md says how each is measured.";

/// How long ranks may take beyond their own time limit to say where they hang.
const SLACK: Duration = Duration::from_secs(15);

/// Time collectives through torch.distributed, in nccl-tests' columns
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    /// What to measure
    #[arg(long, value_enum, value_delimiter = ',', default_value = "all_reduce,all_gather,reduce_scatter")]
    ops: Vec<Op>,
    /// Bytes, as a list of sizes (8,64K,1M) and ranges FIRST:LAST[:FACTOR] (8:64M doubles, 8:64M:4 quadruples)
    #[arg(long, value_delimiter = ',', value_parser = Sizes::parse, default_value = "8:64M:8")]
    sizes: Vec<Sizes>,
    /// Element type, by torch's name (float32) or nccl-tests' (float)
    #[arg(long, value_parser = op::parse_dtype, default_value = "float32")]
    dtype: DType,
    /// Reduction, for operations that have one; premul_sum multiplies by one half
    #[arg(long, value_parser = op::parse_redop, default_value = "sum")]
    redop: Reduction,
    /// Numbers of ranks, each a run of its own
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=256), default_value = "2")]
    ranks: Vec<u32>,
    /// Numbers of played hosts to spread the ranks over (PODRING_HOST_ID): between hosts podring uses TCP
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=256), default_value = "1")]
    hosts: Vec<u32>,
    /// The backend to measure
    #[arg(long, value_enum, default_value_t = Backend::Podring)]
    backend: Backend,
    /// A second backend that takes turns with the first
    #[arg(long, value_enum)]
    vs: Option<Backend>,
    /// Iterations per size and backend, at least; without it as many as fit --seconds
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iters: Option<u32>,
    /// Warm-up iterations per size and backend; without it up to 20, about 50 ms
    #[arg(long)]
    warmup: Option<u32>,
    /// About how long to measure each size, all backends together
    #[arg(long, value_parser = positive, default_value = "1.0")]
    seconds: f64,
    /// Give up when nothing has moved for so many seconds
    #[arg(long, value_parser = positive, default_value = "60")]
    timeout: f64,
    /// Write the rows as a JSON list (- for stdout; the table then goes to stderr)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw bandwidth and time against size (needs matplotlib)
    #[arg(long, value_name = "FILE.png")]
    plot: Option<PathBuf>,
    /// The Python that has torch and podring; else PODRING_PYTHON, this command's own, VIRTUAL_ENV's, python3
    #[arg(long, value_name = "EXE")]
    python: Option<PathBuf>,
    /// Show what the ranks write to stderr as they run
    #[arg(long, short)]
    verbose: bool,
}

/// What isn't a collective.
#[derive(Debug, clap::Subcommand)]
enum Other {
    Rendezvous(rendezvous::Args),
    Ici(ici::Args),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Backend {
    Podring,
    Gloo,
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Backend::Podring => "podring",
            Backend::Gloo => "gloo",
        }
    }

    /// The name that init_process_group takes.
    fn torch_name(self) -> &'static str {
        match self {
            Backend::Podring => "tpu",
            Backend::Gloo => "gloo",
        }
    }
}

/// One item of --sizes.
#[derive(Clone, Debug)]
struct Sizes(Vec<u64>);

impl Sizes {
    fn parse(text: &str) -> Result<Self, size::SizeError> {
        size::parse(text).map(Sizes)
    }
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|&value: &f64| value > 0.0 && value <= 86_400.0).ok_or_else(|| {
        // clap puts the value and the option before this.
        "expected seconds: a number above 0, at most 86400".to_owned()
    })
}

/// Why nothing, or not everything, was measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Usage(#[from] Usage),
    #[error(transparent)]
    Rendezvous(#[from] rendezvous::Error),
    #[error(transparent)]
    Ici(#[from] ici::Error),
    #[error(transparent)]
    Python(#[from] python::Error),
    #[error(transparent)]
    Workers(#[from] workers::Failure),
    #[error("cannot write {path}: {source}")]
    Write { path: String, source: std::io::Error },
    #[error("cannot make a temporary file: {0}")]
    Temporary(std::io::Error),
    #[error("--plot needs matplotlib in {python}: {python} -m pip install matplotlib")]
    NoMatplotlib { python: String },
    #[error("--plot: {0}")]
    Plot(python::Error),
    #[error("{wrong} wrong elements in {rows} of {all} rows (see the #wrong column)")]
    Wrong { wrong: u64, rows: usize, all: usize },
}

/// Options that are each right but not together. Exit code 2, as for clap's own.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum Usage {
    #[error("{redop} is not defined for {dtype}")]
    Reduction { redop: &'static str, dtype: DType },
    #[error("--hosts {hosts} needs at least as many ranks, and --ranks asks for {ranks}")]
    Hosts { hosts: u32, ranks: u32 },
    #[error("sendrecv needs 2 ranks or more: a rank does not send to itself")]
    LoneSend,
    #[error("--vs {0} is the backend that is measured already")]
    SamePeer(&'static str),
    #[error("--{option} {path}: there is no such directory as {directory}")]
    Directory { option: &'static str, path: String, directory: String },
    #[error("--plot {0}: the file's name must end in .png")]
    NotPng(String),
}

/// One operation at one size, as the workers read it.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Case {
    id: usize,
    #[serde(skip)]
    kind: Op,
    op: &'static str,
    dtype: &'static str,
    redop: Option<&'static str>,
    count: u64,
    #[serde(skip)]
    bytes: u64,
}

/// What every rank is told.
#[derive(Debug, Serialize)]
struct Plan<'a> {
    board: &'a Path,
    timeout_s: f64,
    backends: Vec<&'static str>,
    cases: &'a [Case],
    iters: Option<u32>,
    warmup: Option<u32>,
    seconds: f64,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<i32, Error> {
    match &args.other {
        Some(Other::Rendezvous(args)) => return Ok(rendezvous::run(args)?),
        Some(Other::Ici(args)) => return Ok(ici::run(args)?),
        None => {}
    }
    if let Err(usage) = args.check() {
        terminal::err(&format!("error: {usage}\n\nFor more information, try 'podring bench --help'."));
        return Ok(2);
    }
    let interpreter = Interpreter::find(args.python.as_deref());
    if args.plot.is_some() {
        has_matplotlib(&interpreter)?;
    }
    let mut rows = Vec::new();
    for &ranks in &args.ranks {
        for &hosts in &args.hosts {
            rows.extend(args.measure(&interpreter, ranks, hosts)?);
        }
    }
    let wrong = rows.iter().map(|row| row.wrong).sum();
    args.say(&format!("\n# {} rows, {wrong} wrong elements", rows.len()));
    if let Some(path) = &args.json {
        write_json(path, &rows)?;
    }
    if let Some(path) = &args.plot {
        plot(&interpreter, path, &rows)?;
    }
    if wrong > 0 {
        return Err(Error::Wrong { wrong, rows: rows.iter().filter(|row| row.wrong > 0).count(), all: rows.len() });
    }
    Ok(0)
}

impl Args {
    fn check(&self) -> Result<(), Usage> {
        if self.ops.iter().any(|op| op.reduces()) && !self.redop.supports(self.dtype) {
            return Err(Usage::Reduction { redop: self.redop.name(), dtype: self.dtype });
        }
        for &ranks in &self.ranks {
            if let Some(&hosts) = self.hosts.iter().find(|&&hosts| hosts > ranks) {
                return Err(Usage::Hosts { hosts, ranks });
            }
            if ranks == 1 && self.ops.contains(&Op::SendRecv) {
                return Err(Usage::LoneSend);
            }
        }
        if self.vs == Some(self.backend) {
            return Err(Usage::SamePeer(self.backend.name()));
        }
        let files = [("json", &self.json), ("plot", &self.plot)];
        for (option, path) in files.into_iter().filter_map(|(option, path)| Some((option, path.as_ref()?))) {
            if let Some(directory) = path.parent().filter(|parent| !parent.as_os_str().is_empty() && !parent.is_dir()) {
                let (path, directory) = (path.display().to_string(), directory.display().to_string());
                return Err(Usage::Directory { option, path, directory });
            }
        }
        match &self.plot {
            Some(path) if path.extension().is_none_or(|extension| extension != "png") => {
                Err(Usage::NotPng(path.display().to_string()))
            }
            _ => Ok(()),
        }
    }

    fn backends(&self) -> Vec<Backend> {
        std::iter::once(self.backend).chain(self.vs).collect()
    }

    /// The table's output: stdout, unless the JSON is there.
    fn say(&self, line: &str) {
        if self.json.as_deref() == Some(Path::new("-")) { terminal::err(line) } else { terminal::out(line) }
    }

    fn cases(&self, ranks: u32) -> Vec<Case> {
        let mut cases: Vec<Case> = Vec::new();
        for &kind in &self.ops {
            for bytes in self.sizes.iter().flat_map(|sizes| sizes.0.iter().copied()) {
                let count = kind.count(bytes, self.dtype, ranks);
                // Small sizes may round to the same count, and a barrier has none.
                if cases.iter().any(|case| case.kind == kind && case.count == count) {
                    continue;
                }
                cases.push(Case {
                    id: cases.len(),
                    kind,
                    op: kind.name(),
                    dtype: self.dtype.name(),
                    redop: kind.reduces().then(|| self.redop.name()),
                    count,
                    bytes: count * self.dtype.size() as u64,
                });
            }
        }
        cases
    }

    /// One set of ranks, over every operation and size; rows are shown as they come.
    fn measure(&self, interpreter: &Interpreter, ranks: u32, hosts: u32) -> Result<Vec<Row>, Error> {
        let cases = self.cases(ranks);
        let backends = self.backends();
        let board = tempfile::NamedTempFile::with_prefix("podring-bench-").map_err(Error::Temporary)?;
        // 64 bytes, a cache line, per rank: podring._bench_worker.Board.
        board.as_file().set_len(u64::from(ranks) * 64).map_err(Error::Temporary)?;
        let path = board.path().to_owned();
        let plan = Plan {
            board: &path,
            timeout_s: self.timeout,
            backends: backends.iter().map(|backend| backend.torch_name()).collect(),
            cases: &cases,
            iters: self.iters,
            warmup: self.warmup,
            seconds: self.seconds,
        };
        let mut progress = Progress::new();
        let on = format!("{ranks} rank{}, {hosts} host{}", plural(ranks), plural(hosts));
        progress.show(&format!("starting {on}"));
        let limit = Duration::from_secs_f64(self.timeout) + SLACK;
        let set = Set { interpreter, ranks, hosts, limit, verbose: self.verbose };
        let mut rows = Vec::new();
        let mut section = None;
        let mut board = Some(board);
        workers::run(&set, &plan, |event| match event {
            Event::Ready => {
                // Every rank has mapped it: removed now, it is not left behind by an interrupted run.
                board = None;
                progress.show(&format!("{on}: connected"));
            }
            Event::Start { id } => {
                if let Some(case) = cases.get(id) {
                    let size = size::display(case.bytes);
                    progress.show(&format!("[{}/{}] {} {size}, {on}", id + 1, cases.len(), case.op));
                }
            }
            Event::Result { id, backends: results } => {
                let Some(case) = cases.get(id) else { return };
                progress.clear();
                if section != Some(case.kind) {
                    section = Some(case.kind);
                    self.say(&format!("\n# {}: {on}\n{}", case.op, row::header(self.vs.is_some())));
                }
                let ratio = match results.as_slice() {
                    [first, second] if first.p50_us > 0.0 => Some(second.p50_us / first.p50_us),
                    _ => None,
                };
                for (index, (backend, result)) in backends.iter().zip(&results).enumerate() {
                    let (algbw_gbps, busbw_gbps) = row::bandwidth(case.kind, case.bytes, ranks, result.p50_us);
                    let row = Row {
                        backend: backend.name(),
                        op: case.op,
                        dtype: case.dtype,
                        bytes: case.bytes,
                        ranks,
                        hosts,
                        p50_us: result.p50_us,
                        algbw_gbps,
                        busbw_gbps,
                        wrong: result.wrong,
                    };
                    self.say(&row.line(case.count, case.redop.unwrap_or("-"), ratio.filter(|_| index == 0)));
                    rows.push(row);
                }
            }
        })?;
        drop(board);
        Ok(rows)
    }
}

fn plural(count: u32) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn write_json(path: &Path, rows: &[Row]) -> Result<(), Error> {
    let error = |source: std::io::Error| Error::Write { path: path.display().to_string(), source };
    let text = serde_json::to_string_pretty(rows).map_err(|source| error(source.into()))?;
    if path == Path::new("-") {
        terminal::out(&text);
        return Ok(());
    }
    std::fs::write(path, text + "\n").map_err(error)
}

fn has_matplotlib(interpreter: &Interpreter) -> Result<(), Error> {
    let probe = "import importlib.util as u; print(u.find_spec('matplotlib') is not None)";
    let found = interpreter.output(&["-c", probe], "", Duration::from_secs(30))?;
    match found.trim() {
        "True" => Ok(()),
        _ => Err(Error::NoMatplotlib { python: interpreter.name() }),
    }
}

fn plot(interpreter: &Interpreter, path: &Path, rows: &[Row]) -> Result<(), Error> {
    let error = |source: std::io::Error| Error::Write { path: path.display().to_string(), source };
    let text = serde_json::to_string(rows).map_err(|source| error(source.into()))?;
    let args = ["-m".as_ref(), "podring._bench_plot".as_ref(), path.as_os_str()];
    interpreter.output(&args, &text, Duration::from_secs(120)).map_err(Error::Plot)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &[&str]) -> Result<Args, String> {
        Line::try_parse_from([&["bench"], line].concat()).map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn the_issues_line_is_read() {
        let args =
            parse(&["--ops", "all_reduce,all_gather,reduce_scatter", "--sizes", "8,64K,1M,64M", "--ranks", "2,4"])
                .unwrap();
        assert_eq!(args.check(), Ok(()));
        let cases = args.cases(4);
        assert_eq!(cases.len(), 12);
        assert_eq!(cases.iter().map(|case| case.bytes).take(4).collect::<Vec<_>>(), [8, 65536, 1 << 20, 64 << 20]);
        // Two floats cannot be spread over four ranks: rounded up to one each.
        assert_eq!((cases[4].op, cases[4].count, cases[4].bytes), ("all_gather", 4, 16));
        assert_eq!((cases[0].redop, cases[4].redop), (Some("SUM"), None));
    }

    #[test]
    fn equal_cases_are_measured_once() {
        let args = parse(&["--ops", "all_gather,barrier", "--sizes", "1,2,8,1K"]).unwrap();
        let cases = args.cases(2);
        assert_eq!(
            cases.iter().map(|case| (case.op, case.bytes)).collect::<Vec<_>>(),
            [("all_gather", 8), ("all_gather", 1024), ("barrier", 0)]
        );
    }

    #[test]
    fn wrong_values_list_the_right_ones() {
        assert!(parse(&["--ops", "all_reduec"]).unwrap_err().contains("reduce_scatter"));
        assert!(parse(&["--sizes", "8:64Q"]).unwrap_err().contains("K, M or G"));
        assert!(parse(&["--dtype", "float12"]).unwrap_err().contains("bfloat16"));
        assert!(parse(&["--redop", "mean"]).unwrap_err().contains("avg"));
        assert!(parse(&["--ranks", "0"]).is_err());
        assert!(parse(&["--vs", "nccl"]).unwrap_err().contains("gloo"));
        assert!(parse(&["--seconds", "0"]).unwrap_err().contains("above 0"));
    }

    #[test]
    fn combinations_are_checked() {
        let check = |line: &[&str]| parse(line).unwrap().check().unwrap_err();
        assert_eq!(
            check(&["--dtype", "bool", "--redop", "avg"]),
            Usage::Reduction { redop: "AVG", dtype: DType::Bool }
        );
        assert_eq!(check(&["--ranks", "2", "--hosts", "4"]), Usage::Hosts { hosts: 4, ranks: 2 });
        assert_eq!(check(&["--ranks", "1", "--ops", "sendrecv"]), Usage::LoneSend);
        assert_eq!(check(&["--backend", "gloo", "--vs", "gloo"]), Usage::SamePeer("gloo"));
        assert!(matches!(check(&["--json", "/nonexistent/x.json"]), Usage::Directory { option: "json", .. }));
        assert_eq!(check(&["--plot", "x.pdf"]), Usage::NotPng("x.pdf".into()));
        assert_eq!(parse(&["--dtype", "bool", "--redop", "avg", "--ops", "broadcast"]).unwrap().check(), Ok(()));
    }

    #[test]
    fn the_plan_is_what_the_worker_reads() {
        let args = parse(&["--sizes", "64", "--ops", "reduce", "--iters", "3"]).unwrap();
        let cases = args.cases(2);
        let plan = Plan {
            board: Path::new("/b"),
            timeout_s: 60.0,
            backends: vec!["tpu"],
            cases: &cases,
            iters: args.iters,
            warmup: args.warmup,
            seconds: 1.0,
        };
        assert_eq!(
            serde_json::to_value(&plan).unwrap(),
            serde_json::json!({
                "board": "/b", "timeout_s": 60.0, "backends": ["tpu"], "iters": 3, "warmup": null, "seconds": 1.0,
                "cases": [{"id": 0, "op": "reduce", "dtype": "float32", "redop": "SUM", "count": 16}],
            })
        );
    }
}
