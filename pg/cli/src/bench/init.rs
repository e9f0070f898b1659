//! The part of `podring bench rendezvous` that times init_process_group and new_group, beside gloo's. Measured by
//! `podring._bench_init`, which says how.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::python::{self, Interpreter};

/// Podring's and gloo's milliseconds, by number of ranks.
pub(super) type ByRanks = BTreeMap<u32, [f64; 2]>;

/// What was measured: medians in milliseconds.
#[derive(Debug, Deserialize)]
pub(super) struct Times {
    /// The part of `init` that is torch's search for the backend's name among the installed packages.
    discovery: ByRanks,
    /// The first init_process_group of a process.
    init: ByRanks,
    new_group: ByRanks,
    /// torch's own store barrier, which new_group holds if `barrier_held`.
    barrier: ByRanks,
    barrier_held: bool,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Python(#[from] python::Error),
    #[error("init_process_group could not be timed: {0}")]
    Io(#[from] std::io::Error),
    #[error("init_process_group could not be timed: {how}{}", indented(.stderr))]
    Failed { how: String, stderr: String },
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("\n  | {line}")).collect()
}

impl Times {
    /// First calls of a process.
    pub(super) fn init(&self) -> &ByRanks {
        &self.init
    }

    /// torch's own part of it.
    pub(super) fn discovery(&self) -> &ByRanks {
        &self.discovery
    }

    /// Without torch's own barrier.
    pub(super) fn new_group(&self) -> ByRanks {
        let held = |ranks: &u32, backend: usize| match self.barrier.get(ranks) {
            Some(barrier) if self.barrier_held => barrier[backend],
            _ => 0.0,
        };
        let net = |(ranks, times): (&u32, &[f64; 2])| {
            (*ranks, std::array::from_fn(|backend| (times[backend] - held(ranks, backend)).max(0.0)))
        };
        self.new_group.iter().map(net).collect()
    }

    /// torch's own, shown.
    pub(super) fn barrier(&self) -> &ByRanks {
        &self.barrier
    }

    /// Lines for people.
    pub(super) fn lines(&self) -> Vec<String> {
        let groups = self.new_group();
        let line = |(ranks, init): (&u32, &[f64; 2])| {
            let at = |by: &ByRanks| by.get(ranks).copied().unwrap_or([f64::NAN; 2]);
            let (group, barrier, search) = (at(&groups), at(&self.barrier), at(&self.discovery));
            format!(
                "{ranks} ranks: init_process_group {:.1} ms, gloo {:.1} ms, of it torch's search for the backend {:.1} ms, \
                 gloo {:.1} ms; new_group {:.2} ms, gloo {:.2} ms, without torch's own barrier ({:.2} ms{})",
                init[0],
                init[1],
                search[0],
                search[1],
                group[0],
                group[1],
                barrier[0],
                if self.barrier_held { "" } else { ", not held" }
            )
        };
        self.init.iter().map(line).collect()
    }
}

/// Starts the Python side and waits for it, at most `limit`.
pub(super) fn measure(interpreter: &Interpreter, ranks: &[u32], rounds: u32, limit: Duration) -> Result<Times, Error> {
    let plan = serde_json::json!({"ranks": ranks, "rounds": rounds, "groups": 16, "timeout_s": 60});
    let mut child = Command::new(&interpreter.program)
        .args(["-m", "podring._bench_init"])
        .env("PYTHONSAFEPATH", "1")
        .env("OMP_NUM_THREADS", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| interpreter.start_error(source))?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let read = |pipe: Option<Box<dyn std::io::Read + Send>>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            if let Some(mut pipe) = pipe {
                let _ = pipe.read_to_string(&mut text);
            }
            text
        })
    };
    let out = read(stdout.map(|pipe| Box::new(pipe) as _));
    let err = read(stderr.map(|pipe| Box::new(pipe) as _));
    if let Some(mut stdin) = stdin {
        // One that died at once (no torch, no podring) tells more by its stderr than this error would.
        let _ = writeln!(stdin, "{plan}");
    }
    let end = Instant::now() + limit;
    let how = loop {
        match child.try_wait()? {
            Some(status) if status.success() => break None,
            Some(status) => break Some(status.to_string()),
            None if Instant::now() > end => {
                child.kill()?;
                child.wait()?;
                break Some(format!("no end after {} s", limit.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let (out, stderr) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    match (how, serde_json::from_str(out.lines().last().unwrap_or_default())) {
        (None, Ok(times)) => Ok(times),
        (None, Err(error)) => Err(Error::Failed { how: format!("it printed {out:?}: {error}"), stderr }),
        (Some(how), _) => Err(Error::Failed { how, stderr }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_barrier_is_subtracted_where_torch_holds_it() {
        let text = |held: bool| {
            format!(
                r#"{{"discovery": {{"2": [9, 0]}}, "init": {{"2": [5, 20]}}, "new_group": {{"2": [1.5, 4]}},
                "barrier": {{"2": [1, 1]}}, "barrier_held": {held}}}"#
            )
        };
        let times: Times = serde_json::from_str(&text(true)).unwrap();
        assert_eq!(times.new_group()[&2], [0.5, 3.0]);
        let times: Times = serde_json::from_str(&text(false)).unwrap();
        assert_eq!(times.new_group()[&2], [1.5, 4.0]);
        assert!(times.lines()[0].contains("gloo 20.0 ms") && times.lines()[0].contains("not held"));
    }
}
