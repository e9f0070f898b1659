//! The Python processes of one measurement: started together, watched, and ended whatever happens.

use std::collections::VecDeque;
use std::fmt;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::python::{self, Interpreter};
use crate::terminal;

/// How long the other ranks get to fail by themselves after one has.
const GRACE: Duration = Duration::from_secs(2);
const TAIL_LINES: usize = 60;
const TAIL_COLUMNS: usize = 400;

/// Which processes to start.
pub(super) struct Set<'a> {
    pub(super) interpreter: &'a Interpreter,
    pub(super) ranks: u32,
    pub(super) hosts: u32,
    /// Give up after so long without a word from rank 0.
    pub(super) limit: Duration,
    /// Pass on the ranks' stderr.
    pub(super) verbose: bool,
}

/// What rank 0 says.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Said {
    Ready,
    Alive,
    Start { id: usize },
    Result { id: usize, backends: Vec<Timing> },
    Done,
}

/// What the caller is told.
#[derive(Debug)]
pub(super) enum Event {
    /// All ranks are connected.
    Ready,
    /// Case `id` begins.
    Start { id: usize },
    /// Case `id` is measured: one timing per backend.
    Result { id: usize, backends: Vec<Timing> },
}

/// One backend's result.
#[derive(Debug, PartialEq, Deserialize)]
pub(super) struct Timing {
    /// Median over batches of the slowest rank's time per iteration, µs.
    pub(super) p50_us: f64,
    /// Wrong elements, all ranks, before and after timing.
    pub(super) wrong: u64,
}

/// Why the processes did not finish.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Python(#[from] python::Error),
    #[error("cannot start or watch rank {rank}: {source}")]
    Io { rank: u32, source: std::io::Error },
    #[error("{}", describe(.ranks, .reports))]
    Ranks { ranks: u32, reports: Vec<Report> },
}

/// How one rank ended, and the end of its stderr.
#[derive(Debug)]
pub(crate) struct Report {
    rank: u32,
    how: How,
    stderr: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    /// By itself, with this status.
    Exited(ExitStatus),
    /// Ended by us because no rank had reported for this long.
    Silent(Duration),
    /// Ended by us because another rank had failed.
    Stopped,
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            How::Exited(status) if status.success() => f.write_str("left before the end"),
            How::Exited(status) => write!(f, "failed ({status})"),
            How::Silent(limit) => write!(f, "no progress for {} s, ended", limit.as_secs()),
            How::Stopped => f.write_str("still running, ended after the other's failure"),
        }
    }
}

fn describe(ranks: &u32, reports: &[Report]) -> String {
    let mut text = format!("the benchmark with {ranks} ranks failed");
    for (index, report) in reports.iter().enumerate() {
        // The first is the one that failed first; of the others a few lines tell enough.
        let shown = if index == 0 { TAIL_LINES } else { 12 };
        text.push_str(&format!("\nrank {}: {}", report.rank, report.how));
        if report.stderr.is_empty() {
            text.push_str("\n  (nothing on stderr)");
        }
        for line in report.stderr.iter().skip(report.stderr.len().saturating_sub(shown)) {
            text.push_str(&format!("\n  | {line}"));
        }
    }
    text
}

enum Message {
    Out(String),
    Err(u32, String),
    /// A pipe has ended.
    Eof,
}

struct Worker {
    rank: u32,
    child: Child,
    /// Open as long as we live: its end tells the worker to leave.
    _stdin: Option<ChildStdin>,
    status: Option<ExitStatus>,
    tail: VecDeque<String>,
}

impl Worker {
    fn poll(&mut self) -> Result<Option<ExitStatus>, Failure> {
        if self.status.is_none() {
            self.status = self.child.try_wait().map_err(|source| Failure::Io { rank: self.rank, source })?;
        }
        Ok(self.status)
    }

    fn keep(&mut self, line: String) {
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line.chars().take(TAIL_COLUMNS).collect());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.status.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// The host that plays for `rank`, and the rank's place on it: consecutive ranks share a host, sizes differ by one.
fn place(rank: u32, ranks: u32, hosts: u32) -> (u32, u32, u32) {
    let first = |host: u32| (host * ranks).div_ceil(hosts);
    let host = rank * hosts / ranks;
    (host, rank - first(host), first(host + 1) - first(host))
}

fn start(set: &Set<'_>, rank: u32, plan: &str, sender: &Sender<Message>) -> Result<Worker, Failure> {
    let (host, local_rank, local_size) = place(rank, set.ranks, set.hosts);
    let mut command = Command::new(&set.interpreter.program);
    command
        .args(["-m", "podring._bench_worker"])
        // The working directory is no place to find podring or torch in.
        .env("PYTHONSAFEPATH", "1")
        .env("OMP_NUM_THREADS", "1")
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", set.ranks.to_string())
        .env("LOCAL_RANK", local_rank.to_string())
        .env("LOCAL_WORLD_SIZE", local_size.to_string())
        .env("GROUP_RANK", host.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env_remove("MASTER_PORT")
        .env_remove("TORCHELASTIC_USE_AGENT_STORE")
        .stdin(Stdio::piped())
        .stdout(if rank == 0 { Stdio::piped() } else { Stdio::null() })
        .stderr(Stdio::piped());
    if std::env::var_os("GLOO_SOCKET_IFNAME").is_none() {
        // Else gloo resolves the host's name, which fails on machines that don't know their own.
        command.env("GLOO_SOCKET_IFNAME", "lo");
    }
    if set.hosts > 1 {
        command.env("PODRING_HOST_ID", format!("bench-{host}"));
    }
    let mut child = command.spawn().map_err(|source| set.interpreter.start_error(source))?;
    let mut stdin = child.stdin.take();
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let worker = |stdin| Worker { rank, child, _stdin: stdin, status: None, tail: VecDeque::new() };
    let written = stdin.as_mut().map(|stdin| writeln!(stdin, "{plan}"));
    if let Some(out) = out {
        read(out, sender.clone(), Message::Out);
    }
    if let Some(err) = err {
        read(err, sender.clone(), move |line| Message::Err(rank, line));
    }
    match written {
        // A worker that died at once (no torch, no podring) tells more by its stderr than the pipe's error would.
        Some(Err(source)) if source.kind() != std::io::ErrorKind::BrokenPipe => {
            drop(worker(stdin));
            Err(Failure::Io { rank, source })
        }
        _ => Ok(worker(stdin)),
    }
}

fn read(pipe: impl Read + Send + 'static, sender: Sender<Message>, wrap: impl Fn(String) -> Message + Send + 'static) {
    std::thread::spawn(move || {
        let mut reader = BufReader::new(pipe);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            if sender.send(wrap(text)).is_err() {
                return;
            }
        }
        let _ = sender.send(Message::Eof);
    });
}

/// Starts the ranks, hands them the plan, and calls `on` for what they report until all have ended.
pub(super) fn run(set: &Set<'_>, plan: &impl Serialize, mut on: impl FnMut(Event)) -> Result<(), Failure> {
    let plan = serde_json::to_string(plan).map_err(|source| Failure::Io { rank: 0, source: source.into() })?;
    let (sender, receiver) = mpsc::channel();
    let mut workers = Vec::new();
    for rank in 0..set.ranks {
        workers.push(start(set, rank, &plan, &sender)?);
    }
    drop(sender);
    let mut pipes = set.ranks + 1;
    let mut done = false;
    let mut last = Instant::now();
    loop {
        match receiver.recv_timeout(Duration::from_millis(20)) {
            Ok(Message::Eof) => pipes -= 1,
            Ok(Message::Err(rank, line)) => keep(&mut workers, rank, line, set.verbose),
            Ok(Message::Out(line)) => match serde_json::from_str(&line) {
                Ok(said) => {
                    last = Instant::now();
                    match said {
                        Said::Ready => on(Event::Ready),
                        Said::Alive => {}
                        Said::Start { id } => on(Event::Start { id }),
                        Said::Result { id, backends } => on(Event::Result { id, backends }),
                        Said::Done => done = true,
                    }
                }
                // Something printed while it was imported.
                Err(_) => keep(&mut workers, 0, line, set.verbose),
            },
            Err(RecvTimeoutError::Timeout) => {}
            // All pipes are closed: only the exits are missing, and there is nothing to wait on for them.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(20)),
        }
        let mut ended = 0;
        for index in 0..workers.len() {
            match workers[index].poll()? {
                Some(status) if status.success() && (done || pipes > 0) => ended += 1,
                Some(_) => return Err(fail(set, workers, &receiver, Some(index), pipes)),
                None => {}
            }
        }
        if ended == workers.len() && done {
            return Ok(());
        }
        if last.elapsed() > set.limit {
            return Err(fail(set, workers, &receiver, None, pipes));
        }
    }
}

fn keep(workers: &mut [Worker], rank: u32, line: String, verbose: bool) {
    if verbose {
        terminal::err(&format!("[{rank}] {line}"));
    }
    if let Some(worker) = workers.get_mut(rank as usize) {
        worker.keep(line);
    }
}

/// Ends every rank and collects what each has to say. `first` failed; without it nobody had reported for too long.
fn fail(
    set: &Set<'_>,
    mut workers: Vec<Worker>,
    receiver: &Receiver<Message>,
    first: Option<usize>,
    mut pipes: u32,
) -> Failure {
    let drain = |workers: &mut Vec<Worker>, until: Instant, pipes: &mut u32| {
        while *pipes > 0 {
            match receiver.recv_timeout(until.saturating_duration_since(Instant::now()).min(Duration::from_millis(20)))
            {
                Ok(Message::Eof) => *pipes -= 1,
                Ok(Message::Err(rank, line)) => keep(workers, rank, line, set.verbose),
                Ok(Message::Out(_)) => {}
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(_) => return,
            }
        }
    };
    if first.is_some() {
        drain(&mut workers, Instant::now() + GRACE, &mut pipes);
    }
    let mut stopped = vec![false; workers.len()];
    for (worker, stopped) in workers.iter_mut().zip(&mut stopped) {
        if matches!(worker.poll(), Ok(None)) {
            *stopped = true;
            // The worker answers with the stacks of its threads: where it hangs.
            if let Some(pid) = rustix::process::Pid::from_raw(worker.child.id() as i32) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::USR1);
            }
        }
    }
    drain(&mut workers, Instant::now() + Duration::from_millis(300), &mut pipes);
    for worker in &mut workers {
        if worker.status.is_none() {
            let _ = worker.child.kill();
            worker.status = worker.child.wait().ok();
        }
    }
    drain(&mut workers, Instant::now() + Duration::from_millis(500), &mut pipes);
    let mut reports: Vec<(usize, Report)> = Vec::new();
    for (index, worker) in workers.iter_mut().enumerate() {
        let how = match (stopped[index], first, worker.status) {
            (true, Some(_), _) | (false, _, None) => How::Stopped,
            (true, None, _) => How::Silent(set.limit),
            (false, _, Some(status)) => How::Exited(status),
        };
        let order = match how {
            How::Exited(_) if first == Some(index) => 0,
            How::Exited(status) if !status.success() => 1,
            How::Silent(_) => 1,
            _ => 2,
        };
        reports.push((order, Report { rank: worker.rank, how, stderr: worker.tail.drain(..).collect() }));
    }
    reports.sort_by_key(|(order, report)| (*order, report.rank));
    Failure::Ranks { ranks: set.ranks, reports: reports.into_iter().map(|(_, report)| report).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_spread_over_hosts_in_order() {
        let all = |ranks, hosts| (0..ranks).map(|rank| place(rank, ranks, hosts)).collect::<Vec<_>>();
        assert_eq!(all(4, 2), [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]);
        assert_eq!(all(3, 2), [(0, 0, 2), (0, 1, 2), (1, 0, 1)]);
        assert_eq!(all(2, 1), [(0, 0, 2), (0, 1, 2)]);
        for ranks in 1..=20 {
            for hosts in 1..=ranks {
                let places = all(ranks, hosts);
                assert!(places.iter().all(|&(host, local, size)| host < hosts && local < size));
                assert_eq!(places.iter().filter(|&&(_, local, _)| local == 0).count() as u32, hosts);
            }
        }
    }

    #[test]
    fn reads_what_rank_0_says() {
        let said = |text: &str| serde_json::from_str::<Said>(text).ok();
        assert_eq!(said(r#"{"event": "alive"}"#), Some(Said::Alive));
        assert_eq!(said(r#"{"event": "start", "id": 3}"#), Some(Said::Start { id: 3 }));
        assert_eq!(
            said(r#"{"event": "result", "id": 1, "backends": [{"p50_us": 2.5, "wrong": 0}]}"#),
            Some(Said::Result { id: 1, backends: vec![Timing { p50_us: 2.5, wrong: 0 }] })
        );
        assert_eq!(said("a banner"), None);
    }

    /// A stand-in for Python that ignores the module's name.
    fn script(body: &str) -> (tempfile::TempDir, Interpreter) {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("python");
        std::fs::write(&program, format!("#!/bin/sh\nread plan\n{body}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        (directory, Interpreter { program, from: "test" })
    }

    fn run_script(body: &str, limit: Duration) -> (Result<(), Failure>, usize) {
        let (_directory, interpreter) = script(body);
        let mut events = 0;
        let set = Set { interpreter: &interpreter, ranks: 2, hosts: 1, limit, verbose: false };
        (run(&set, &serde_json::json!({"a": 1}), |_| events += 1), events)
    }

    #[test]
    fn a_full_run_reports_and_ends() {
        let body = r#"[ $RANK = 0 ] && echo banner && echo '{"event":"ready"}' && echo '{"event":"done"}'; exit 0"#;
        let (outcome, events) = run_script(body, Duration::from_secs(20));
        outcome.unwrap();
        assert_eq!(events, 1);
    }

    #[test]
    fn the_failed_rank_comes_first_with_its_stderr() {
        let (outcome, _) =
            run_script("[ $RANK = 1 ] && echo broken >&2 && exit 7; exec sleep 60", Duration::from_secs(20));
        let Err(Failure::Ranks { reports, .. }) = outcome else { panic!("{outcome:?}") };
        assert_eq!((reports[0].rank, reports[0].stderr.as_slice()), (1, &["broken".to_owned()][..]));
        assert!(matches!(reports[0].how, How::Exited(status) if status.code() == Some(7)));
        assert_eq!((reports[1].rank, reports[1].how), (0, How::Stopped));
    }

    #[test]
    fn silence_is_ended() {
        let begin = Instant::now();
        let (outcome, _) = run_script("exec sleep 60", Duration::from_secs(1));
        let Err(Failure::Ranks { reports, .. }) = outcome else { panic!("{outcome:?}") };
        assert!(reports.iter().all(|report| report.how == How::Silent(Duration::from_secs(1))));
        assert!(begin.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn leaving_without_a_word_is_a_failure() {
        let (outcome, _) = run_script("exit 0", Duration::from_secs(20));
        let Err(failure) = outcome else { panic!("a run that measured nothing succeeded") };
        assert!(failure.to_string().contains("left before the end"), "{failure}");
    }
}
