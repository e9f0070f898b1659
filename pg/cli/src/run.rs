//! `podring run`: a program on every chip of a slice, through torch's launcher.
//!
//! Torch's launcher does the launching; this says how many processes there are, and that they make up a slice. Several
//! machines run a command each and meet through podring's coordinator; or hosts are played on this one, a launcher each,
//! with links between them as between hosts. On TPU hosts the ranks get what torch_tpu wants of a launcher
//! ([`crate::pod`]).

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use podring_rendezvous::environment::Launch;
use podring_topology::{Slice, TopologyError};

use crate::pod::{self, Pod, PodError, Wish};
use crate::python::{Interpreter, torch_tpu_hint};

/// Run a program on every chip of a slice: real where there is a TPU, else virtual.
///
/// Each rank is one process and one device "tpu:0". Without a TPU the chips are virtual (docs/virtual-slice.md): torch_tpu
/// runs on XLA's CPU plugin, and collectives on podring's fabric. On several machines run it on each of them, with the
/// same words but for --node-rank.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The slice, as in podring topo: v5e:2x2, v5p:4x4x8, v6e-16. Without it PODRING_SLICE; on a TPU host then
    /// TPU_ACCELERATOR_TYPE and TPU_TOPOLOGY.
    #[arg(long)]
    slice: Option<String>,
    /// Ranks on each host. Without it every device of the slice is a rank; on a TPU host, every device of that host.
    #[arg(long, visible_alias = "nproc_per_node", value_parser = clap::value_parser!(u32).range(1..))]
    nproc_per_node: Option<u32>,
    /// Machines of the job. Without it 1; on a TPU host as many as TPU_WORKER_HOSTNAMES names.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    nnodes: Option<u32>,
    /// Which of them this is, from 0. Without it TPU_WORKER_ID.
    #[arg(long, visible_alias = "node_rank")]
    node_rank: Option<u32>,
    /// Where they meet, HOST:PORT: that host starts podring's coordinator there, unless there is one. Without it port
    /// 29400 of the first host in TPU_WORKER_HOSTNAMES.
    #[arg(long, visible_alias = "rdzv_endpoint", value_name = "HOST:PORT")]
    rdzv_endpoint: Option<String>,
    /// The job's name at that coordinator, for one that outlives jobs.
    #[arg(long, visible_alias = "rdzv_id", default_value = "podring", value_name = "NAME")]
    rdzv_id: String,
    /// Hosts to play on this machine, with TCP between them.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(conflicts_with_all = ["nnodes", "node_rank", "rdzv_endpoint"])]
    hosts: u32,
    /// Run a module, as python -m does; everything after its name goes to it.
    #[arg(short, long)]
    module: bool,
    /// The Python to run it with, which has torch_tpu. Without it PODRING_PYTHON, this command's own, VIRTUAL_ENV's.
    #[arg(long)]
    python: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM [ARGS]")]
    program: Vec<OsString>,
}

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("which slice? Give --slice v5e:2x2 or set PODRING_SLICE")]
    NoSlice,
    #[error("{0}")]
    Slice(#[from] TopologyError),
    #[error("{0}")]
    Pod(#[from] PodError),
    #[error("{nnodes} machines: give --node-rank and --rdzv-endpoint on each of them")]
    NoMeeting { nnodes: u32 },
    #[error("--node-rank is {host}, and there are {hosts} machines, counted from 0")]
    NoSuchHost { host: u32, hosts: u32 },
    #[error("--node-rank and --rdzv-endpoint are for several machines: give --nnodes too")]
    Alone,
    #[error(
        "{ranks} ranks ({hosts} hosts of {each}) on the slice {slice}, which has {devices} devices, and each rank is \
         one. Choose a larger slice, or fewer ranks"
    )]
    TooMany { ranks: u64, hosts: u32, each: u32, slice: String, devices: u32 },
    #[error(
        "the {devices} devices of {slice} don't divide over {hosts} hosts: choose another --hosts, or give \
         --nproc-per-node"
    )]
    Uneven { devices: u32, slice: String, hosts: u32 },
    #[error("{0}")]
    Python(#[from] crate::python::Error),
    #[error("{python} has no torch_tpu, which a rank of a slice needs: {hint}")]
    NoTorchTpu { python: String, hint: String },
    #[error("{what}: {source}")]
    Io { what: &'static str, source: std::io::Error },
}

/// Ranks on each host.
fn ranks_per_host(slice: &Slice, each: Option<u32>, hosts: u32) -> Result<u32, Error> {
    let devices = slice.devices();
    match each {
        None if !devices.is_multiple_of(hosts) => Err(Error::Uneven { devices, slice: slice.to_string(), hosts }),
        None => Ok(devices / hosts),
        Some(each) => {
            let ranks = u64::from(each) * u64::from(hosts);
            if ranks > u64::from(devices) {
                return Err(Error::TooMany { ranks, hosts, each, slice: slice.to_string(), devices });
            }
            Ok(each)
        }
    }
}

/// How the launchers of a job find each other.
#[derive(Debug, Clone)]
enum Meeting {
    /// There is one.
    Alone,
    /// Played hosts, at a port of this machine's.
    Played { host: u32, hosts: u32, port: u16 },
    /// Machines, through podring's coordinator, which keeps them in the order of their numbers.
    Machines { host: u32, hosts: u32, endpoint: String, job: String },
}

/// The launcher's arguments.
fn launcher(each: u32, meeting: &Meeting, module: bool, program: &[OsString]) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["-m", "podring._launch"].map(Into::into).into();
    words.push(format!("--nproc-per-node={each}").into());
    let how: Vec<String> = match meeting {
        Meeting::Alone => vec!["--standalone".to_owned()],
        Meeting::Played { host, hosts, port } => vec![
            format!("--nnodes={hosts}"),
            format!("--node-rank={host}"),
            "--master-addr=127.0.0.1".to_owned(),
            format!("--master-port={port}"),
        ],
        Meeting::Machines { host, hosts, endpoint, job } => vec![
            format!("--nnodes={hosts}"),
            "--rdzv-backend=podring".to_owned(),
            format!("--rdzv-endpoint={endpoint}"),
            format!("--rdzv-id={job}"),
            format!("--rdzv-conf=node_rank={host}"),
        ],
    };
    words.extend(how.into_iter().map(Into::into));
    if module {
        words.push("--module".into());
    }
    words.extend_from_slice(program);
    words
}

/// What this machine starts: launchers, with as many ranks each, and what the ranks find in their environment.
struct Job {
    each: u32,
    meetings: Vec<Meeting>,
    environment: Vec<(&'static str, String)>,
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// On virtual chips.
fn on_virtual_chips(args: &Args, slice: &Slice) -> Result<Job, Error> {
    let hosts = args.nnodes.unwrap_or(args.hosts);
    let each = ranks_per_host(slice, args.nproc_per_node, hosts)?;
    let meetings = match (args.nnodes, args.node_rank, &args.rdzv_endpoint) {
        (None | Some(1), None, None) if args.hosts == 1 => vec![Meeting::Alone],
        (None, None, None) => {
            let port = free_ports(1)?[0];
            (0..hosts).map(|host| Meeting::Played { host, hosts, port }).collect()
        }
        (None, _, _) => return Err(Error::Alone),
        (Some(hosts), Some(host), Some(_)) if host >= hosts => return Err(Error::NoSuchHost { host, hosts }),
        (Some(hosts), Some(host), Some(endpoint)) => {
            vec![Meeting::Machines { host, hosts, endpoint: endpoint.clone(), job: args.rdzv_id.clone() }]
        }
        (Some(nnodes), ..) => return Err(Error::NoMeeting { nnodes }),
    };
    Ok(Job { each, meetings, environment: Vec::new() })
}

/// On this host's `here` TPU devices.
fn on_chips(args: &Args, slice: &Slice, here: u32) -> Result<Job, Error> {
    if args.hosts > 1 {
        return Err(PodError::Played { hosts: args.hosts }.into());
    }
    let (each, endpoint) = (args.nproc_per_node, args.rdzv_endpoint.clone());
    let wish = Wish { each, hosts: args.nnodes, host: args.node_rank, endpoint };
    let pod = Pod::plan(slice, here, &wish, variable)?;
    let hosts = pod.hosts.len() as u32;
    let (ports, meeting) = match pod.endpoint {
        None => (free_ports(pod.each)?, Meeting::Alone),
        Some(endpoint) => {
            let job = args.rdzv_id.clone();
            (pod.ports, Meeting::Machines { host: pod.host, hosts, endpoint, job })
        }
    };
    let mut environment: Vec<_> = pod::environment(slice, &pod.hosts, &ports)?.into();
    // torch_tpu's name for what its profiler writes on the ranks of one launcher.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    environment.push(("TORCH_TPU_XPROF_SESSION_ID", now.as_nanos().to_string()));
    // What somebody has set stays, as with torch_tpu's own function.
    environment.retain(|(name, _)| std::env::var_os(name).is_none());
    Ok(Job { each: pod.each, meetings: vec![meeting], environment })
}

pub(crate) fn run(args: Args) -> Result<i32, Error> {
    let set = || variable("PODRING_SLICE").filter(|name| !name.trim().is_empty());
    let slice = match args.slice.clone().or_else(set) {
        Some(name) => Some(podring_topology::parse(&name)?),
        None => pod::named_slice(&Launch::from_env().map_err(PodError::from)?)?,
    };
    let slice = slice.ok_or(Error::NoSlice)?;
    let interpreter = Interpreter::find(args.python.as_deref());
    // Torch's own switch: the ranks load no device, and CPU tensors work.
    let autoload = variable("TORCH_DEVICE_BACKEND_AUTOLOAD").is_none_or(|value| value != "0");
    let job = match if autoload { ask(&interpreter)? } else { 0 } {
        0 => on_virtual_chips(&args, &slice)?,
        here => on_chips(&args, &slice, here)?,
    };
    let command = |meeting: &Meeting| {
        let mut command = Command::new(&interpreter.program);
        command.args(launcher(job.each, meeting, args.module, &args.program));
        command.env("PODRING_SLICE", slice.to_string());
        command.envs(job.environment.iter().map(|(name, value)| (name, value)));
        // One thread each, as torch's launcher has it, without its warning.
        if std::env::var_os("OMP_NUM_THREADS").is_none() {
            command.env("OMP_NUM_THREADS", "1");
        }
        if let Meeting::Played { host, .. } = meeting {
            command.env("PODRING_HOST_ID", format!("host{host}"));
        }
        command
    };
    if let [meeting] = &job.meetings[..] {
        // In this process's place: signals and the exit code are the launcher's.
        return Err(interpreter.start_error(command(meeting).exec()).into());
    }
    let mut launchers = Vec::new();
    for meeting in &job.meetings {
        match command(meeting).spawn() {
            Ok(child) => launchers.push(child),
            Err(error) => {
                end(&mut launchers);
                return Err(interpreter.start_error(error).into());
            }
        }
    }
    attend(&mut launchers)
}

/// How many TPU devices this host has. Asked before anything starts, and that torch_tpu is there: every rank would fail.
fn ask(interpreter: &Interpreter) -> Result<u32, Error> {
    let script = "from importlib.util import find_spec\n\
                  if find_spec('torch_tpu') is None: raise SystemExit(print(False))\n\
                  from podring import _early\n\
                  print(True, _early.tpu_devices())";
    let said = interpreter.output(&["-c", script], "", Duration::from_secs(60))?;
    // Site hooks may print before us.
    match said.lines().last().and_then(|line| line.strip_prefix("True ")?.parse().ok()) {
        Some(here) => Ok(here),
        None => Err(Error::NoTorchTpu { python: interpreter.name(), hint: torch_tpu_hint() }),
    }
}

/// Ports that are free now, each another one.
fn free_ports(count: u32) -> Result<Vec<u16>, Error> {
    let io = |source| Error::Io { what: "a port to meet at", source };
    let listeners: Vec<_> =
        (0..count).map(|_| TcpListener::bind(("127.0.0.1", 0))).collect::<Result<_, _>>().map_err(io)?;
    listeners.iter().map(|listener| Ok(listener.local_addr().map_err(io)?.port())).collect()
}

/// Waits for all launchers; the first that fails ends the others, and its code is ours.
fn attend(launchers: &mut Vec<Child>) -> Result<i32, Error> {
    while !launchers.is_empty() {
        let mut failed = None;
        let mut running = Vec::new();
        for mut child in launchers.drain(..) {
            match child.try_wait().map_err(|source| Error::Io { what: "waiting for a launcher", source })? {
                Some(status) if status.success() => {}
                Some(status) => failed = failed.or(Some(status)),
                None => running.push(child),
            }
        }
        *launchers = running;
        if let Some(status) = failed {
            end(launchers);
            return Ok(code(status));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(0)
}

/// Asks the launchers to end, which end their ranks, and waits for them.
fn end(launchers: &mut Vec<Child>) {
    for child in launchers.iter() {
        let pid = rustix::process::Pid::from_child(child);
        // One that has ended meanwhile needs no signal.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    for mut child in launchers.drain(..) {
        let _ = child.wait();
    }
}

fn code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt as _;
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(name: &str) -> Slice {
        podring_topology::parse(name).unwrap()
    }

    #[test]
    fn every_device_is_a_rank_unless_said_otherwise() {
        assert_eq!(ranks_per_host(&slice("v5e:2x2"), None, 1).unwrap(), 4);
        assert_eq!(ranks_per_host(&slice("v5e:4x4"), None, 4).unwrap(), 4);
        assert_eq!(ranks_per_host(&slice("v5e:4x4"), Some(2), 1).unwrap(), 2);
        assert_eq!(ranks_per_host(&slice("tpu7x:2x2x1"), None, 1).unwrap(), 8);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let error = ranks_per_host(&slice("v5e:2x2"), Some(3), 2).unwrap_err();
        assert!(error.to_string().starts_with("6 ranks (2 hosts of 3) on the slice v5e:2x2, which has 4"), "{error}");
        assert!(matches!(ranks_per_host(&slice("v5e:2x2"), None, 3), Err(Error::Uneven { hosts: 3, .. })));
    }

    #[test]
    fn the_launcher_gets_the_program_as_it_is() {
        let program = ["train.py".into(), "--lr".into(), "-1".into()];
        let rows: [(Meeting, &[&str]); 3] = [
            (Meeting::Alone, &["--standalone"]),
            (
                Meeting::Played { host: 1, hosts: 2, port: 4321 },
                &["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--master-port=4321"],
            ),
            (
                Meeting::Machines { host: 3, hosts: 4, endpoint: "t0:29400".to_owned(), job: "mine".to_owned() },
                &[
                    "--nnodes=4",
                    "--rdzv-backend=podring",
                    "--rdzv-endpoint=t0:29400",
                    "--rdzv-id=mine",
                    "--rdzv-conf=node_rank=3",
                ],
            ),
        ];
        for (meeting, expected) in rows {
            for module in [false, true] {
                let words = launcher(4, &meeting, module, &program);
                let start = ["-m", "podring._launch", "--nproc-per-node=4"];
                let module: &[&str] = if module { &["--module"] } else { &[] };
                assert_eq!(words, [&start, expected, module, &["train.py", "--lr", "-1"]].concat());
            }
        }
    }

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn said(words: &str) -> Args {
        clap::Parser::try_parse_from(words.split(' ')).map(|line: Line| line.args).unwrap()
    }

    #[test]
    fn machines_with_virtual_chips_meet_where_they_are_told() {
        let job = |words: &str| on_virtual_chips(&said(words), &slice("v5e:2x2"));
        let job_of_two = job("run --nnodes 2 --node_rank 1 --rdzv-endpoint a:1 x.py").unwrap();
        assert_eq!(job_of_two.each, 2);
        assert!(matches!(&job_of_two.meetings[..], [Meeting::Machines { host: 1, hosts: 2, .. }]));
        assert!(matches!(&job("run --nnodes 1 x.py").unwrap().meetings[..], [Meeting::Alone]));
        assert!(matches!(
            &job("run --hosts 2 x.py").unwrap().meetings[..],
            [Meeting::Played { host: 0, .. }, Meeting::Played { host: 1, hosts: 2, .. }]
        ));
        let refused = |words: &str| job(words).map(|_| ()).unwrap_err();
        assert!(matches!(refused("run --nnodes 2 x.py"), Error::NoMeeting { nnodes: 2 }));
        assert!(matches!(refused("run --node-rank 1 --rdzv-endpoint a:1 x.py"), Error::Alone));
        let beyond = refused("run --nnodes 2 --node-rank 2 --rdzv-endpoint a:1 x.py");
        assert!(matches!(beyond, Error::NoSuchHost { host: 2, hosts: 2 }));
        let both: Result<Line, _> = clap::Parser::try_parse_from(["run", "--hosts", "2", "--nnodes", "2", "x.py"]);
        assert!(both.is_err_and(|error| error.kind() == clap::error::ErrorKind::ArgumentConflict));
    }

    #[test]
    fn a_tpu_host_starts_its_chips() {
        let job = on_chips(&said("run x.py"), &slice("v5e:2x2"), 4).unwrap();
        assert_eq!(job.each, 4);
        assert!(matches!(&job.meetings[..], [Meeting::Alone]));
        let names: Vec<&str> = job.environment.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, [pod::ADDRESSES, pod::TOPOLOGY, "TORCH_TPU_XPROF_SESSION_ID"]);
        let played = on_chips(&said("run --hosts 2 x.py"), &slice("v5e:2x2"), 4).map(|_| ()).unwrap_err();
        assert!(matches!(played, Error::Pod(PodError::Played { hosts: 2 })));
    }

    #[test]
    fn free_ports_are_different_ones() {
        let mut ports = free_ports(8).unwrap();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 8);
    }

    #[test]
    fn the_first_failure_ends_the_others() {
        let shell = |script: &str| Command::new("/bin/sh").args(["-c", script]).spawn().unwrap();
        let begin = std::time::Instant::now();
        assert_eq!(attend(&mut vec![shell("exec sleep 60"), shell("exit 3")]).unwrap(), 3);
        assert_eq!(attend(&mut vec![shell("kill -9 $$"), shell("exit 0")]).unwrap(), 137);
        assert_eq!(attend(&mut vec![shell("exit 0"), shell("exit 0")]).unwrap(), 0);
        assert!(begin.elapsed() < Duration::from_secs(30));
    }
}
