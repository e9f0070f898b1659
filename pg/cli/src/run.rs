//! `podring run`: a program on every chip of a slice, through torch's launcher.
//!
//! Torch's launcher does the launching; this says how many processes there are, and that they make up a slice. Several
//! hosts are played on this machine, one launcher each, with links between them as between hosts.

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use podring_topology::{Slice, TopologyError};

use crate::python::{Interpreter, torch_tpu_hint};

/// Run a program on every chip of a slice: real where there is a TPU, else virtual.
///
/// Each rank is one process and one device "tpu:0". Without a TPU the chips are virtual (docs/virtual-slice.md): torch_tpu
/// runs on XLA's CPU plugin, and collectives on podring's fabric.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The slice, as in podring topo: v5e:2x2, v5p:4x4x8, v6e-16. Without it PODRING_SLICE.
    #[arg(long)]
    slice: Option<String>,
    /// Ranks on each host. Without it every device of the slice is a rank.
    #[arg(long, visible_alias = "nproc_per_node")]
    nproc_per_node: Option<u32>,
    /// Hosts to play on this machine, with TCP between them.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
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
            if each == 0 || ranks > u64::from(devices) {
                return Err(Error::TooMany { ranks, hosts, each, slice: slice.to_string(), devices });
            }
            Ok(each)
        }
    }
}

/// The launcher's arguments for host `host` of `hosts`, which meet at `port`; alone it finds a port of its own.
fn launcher(each: u32, host: u32, hosts: u32, port: u16, module: bool, program: &[OsString]) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["-m", "podring._launch"].map(Into::into).into();
    words.push(format!("--nproc-per-node={each}").into());
    if hosts == 1 {
        words.push("--standalone".into());
    } else {
        words.push(format!("--nnodes={hosts}").into());
        words.push(format!("--node-rank={host}").into());
        words.push("--master-addr=127.0.0.1".into());
        words.push(format!("--master-port={port}").into());
    }
    if module {
        words.push("--module".into());
    }
    words.extend_from_slice(program);
    words
}

pub(crate) fn run(args: Args) -> Result<i32, Error> {
    let set = || std::env::var("PODRING_SLICE").ok().filter(|name| !name.trim().is_empty());
    let name = args.slice.clone().or_else(set).ok_or(Error::NoSlice)?;
    let slice = podring_topology::parse(&name)?;
    let each = ranks_per_host(&slice, args.nproc_per_node, args.hosts)?;
    let interpreter = Interpreter::find(args.python.as_deref());
    // Torch's own switch: the ranks load no device, and CPU tensors work.
    if std::env::var_os("TORCH_DEVICE_BACKEND_AUTOLOAD").is_none_or(|value| value != "0") {
        expect_torch_tpu(&interpreter)?;
    }
    let port = if args.hosts == 1 { 0 } else { free_port()? };
    let command = |host: u32| {
        let mut command = Command::new(&interpreter.program);
        command.args(launcher(each, host, args.hosts, port, args.module, &args.program));
        command.env("PODRING_SLICE", slice.to_string());
        // One thread each, as torch's launcher has it, without its warning.
        if std::env::var_os("OMP_NUM_THREADS").is_none() {
            command.env("OMP_NUM_THREADS", "1");
        }
        if args.hosts > 1 {
            command.env("PODRING_HOST_ID", format!("host{host}"));
        }
        command
    };
    if args.hosts == 1 {
        // In this process's place: signals and the exit code are the launcher's.
        return Err(interpreter.start_error(command(0).exec()).into());
    }
    let mut launchers = Vec::new();
    for host in 0..args.hosts {
        match command(host).spawn() {
            Ok(child) => launchers.push(child),
            Err(error) => {
                end(&mut launchers);
                return Err(interpreter.start_error(error).into());
            }
        }
    }
    attend(&mut launchers)
}

/// Asks before anything starts: every rank would fail.
fn expect_torch_tpu(interpreter: &Interpreter) -> Result<(), Error> {
    let script = "from importlib.util import find_spec; print(find_spec('torch_tpu') is not None)";
    let said = interpreter.output(&["-c", script], "", Duration::from_secs(60))?;
    // Site hooks may print before us.
    if said.lines().last() == Some("True") {
        return Ok(());
    }
    Err(Error::NoTorchTpu { python: interpreter.name(), hint: torch_tpu_hint() })
}

fn free_port() -> Result<u16, Error> {
    let io = |source| Error::Io { what: "a port for the hosts to meet at", source };
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(io)?;
    Ok(listener.local_addr().map_err(io)?.port())
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
        assert!(matches!(ranks_per_host(&slice("v5e:2x2"), Some(0), 1), Err(Error::TooMany { .. })));
        assert!(matches!(ranks_per_host(&slice("v5e:2x2"), None, 3), Err(Error::Uneven { hosts: 3, .. })));
    }

    #[test]
    fn the_launcher_gets_the_program_as_it_is() {
        let program = ["train.py".into(), "--lr".into(), "-1".into()];
        let words = launcher(4, 0, 1, 0, false, &program);
        assert_eq!(words, ["-m", "podring._launch", "--nproc-per-node=4", "--standalone", "train.py", "--lr", "-1"]);
        let words = launcher(2, 1, 2, 4321, true, &program[..1]);
        let expected = [
            "-m",
            "podring._launch",
            "--nproc-per-node=2",
            "--nnodes=2",
            "--node-rank=1",
            "--master-addr=127.0.0.1",
            "--master-port=4321",
            "--module",
            "train.py",
        ];
        assert_eq!(words, expected);
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
