//! The coordinator as a process: killed, restarted, ended by a signal.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use podring_rendezvous::refusal::Refusal;
use podring_rendezvous::secret::Token;
use podring_rendezvous::session::{Access, Ranks, Session, Store};

const SOON: Duration = Duration::from_secs(20);

/// Killed when dropped.
struct Process(Child, String);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(args: &[&str]) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_podring"));
    command.args(["coordinator", "--silence", "2"]).args(args).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}")).to_owned();
    Process(child, address)
}

fn ranks() -> Ranks {
    Ranks { host: "a".into(), world_size: 1, ranks: vec![0], details: vec![vec![]], hosts: vec![] }
}

#[test]
fn killed_and_restarted_with_and_without_its_state() {
    let dir = tempfile::tempdir().unwrap();
    let token = Token::fresh().unwrap();
    let path = dir.path().join("token");
    std::fs::File::create(&path).unwrap().write_all(token.reveal().as_bytes()).unwrap();
    let (path, state) = (path.to_str().unwrap(), dir.path().join("state"));
    let state = state.to_str().unwrap();
    for kept in [true, false] {
        let mut extra = vec!["--token-file", path];
        if kept {
            extra.extend(["--state-dir", state]);
        }
        let first = start(&extra);
        let address = first.1.clone();
        let access = Access { token: Some(token.clone()), timeout: SOON, ..Access::new(&address) };
        let session = Session::join(&access, ranks(), SOON).unwrap();
        let store = session.store();
        store.set("k", b"v").unwrap();
        drop(first);
        extra.extend(["--bind", &address]);
        let _second = start(&extra);
        let (began, mut seen) = (Instant::now(), 0);
        while session.world().unwrap().epoch < 2 {
            assert!(began.elapsed() < SOON, "{:?}", session.error());
            session.changed(&mut seen, SOON).unwrap();
        }
        let read = session.store().get("k", Duration::ZERO);
        if kept {
            assert_eq!(read.unwrap(), b"v");
        } else {
            assert!(matches!(read.unwrap_err().refusal(), Some(Refusal::KeysMissing { .. })));
            let lost = store.get("k", Duration::ZERO).unwrap_err();
            assert!(matches!(lost.refusal(), Some(Refusal::StoreLost { .. })), "{lost}");
        }
    }
}

fn status(args: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_podring"));
    // The variables of whoever runs the tests aren't meant.
    for name in ["PODRING_COORDINATOR", "PODRING_TOKEN_FILE", "PODRING_TLS_CERT", "PODRING_TLS_KEY", "PODRING_TLS_CA"] {
        command.env_remove(name);
    }
    command.arg("status").args(args).output().unwrap()
}

#[test]
fn status_tells_who_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let token = Token::fresh().unwrap();
    let path = dir.path().join("token");
    std::fs::write(&path, token.reveal()).unwrap();
    let path = path.to_str().unwrap();
    let process = start(&["--token-file", path]);
    let access = Access { token: Some(token), timeout: SOON, ..Access::new(&process.1) };
    let session = Session::join(&access, ranks(), SOON).unwrap();
    session.store().set("k", b"v").unwrap();
    let asked = status(&["--coordinator", &process.1, "--token-file", path, "--json"]);
    assert!(asked.status.success(), "{asked:?}");
    let seen: serde_json::Value = serde_json::from_slice(&asked.stdout).unwrap();
    assert_eq!(seen["agents"][0]["host"], "a", "{seen}");
    assert_eq!(seen["agents"][0]["ranks"], serde_json::json!([0]), "{seen}");
    assert_eq!((&seen["epoch"], &seen["keys"], &seen["forming"]), (&1.into(), &1.into(), &false.into()), "{seen}");
    assert!(seen["agents"][0]["silent_ms"].as_u64().unwrap() < 2000, "{seen}");
    let asked = status(&["--coordinator", &process.1, "--token-file", path]);
    let text = String::from_utf8(asked.stdout).unwrap();
    assert!(text.contains("epoch 1, all of 1 ranks") && text.contains("store: 1 keys, "), "{text}");
    // Without what it takes: one line that says what is wrong.
    let address = process.1.clone();
    let refused = status(&["--coordinator", &address]);
    drop(process);
    for (asked, words) in [
        (refused, "token"),
        (status(&["--coordinator", &address, "--timeout", "0.3"]), "no coordinator at 127.0.0.1:"),
        (status(&[]), "give --coordinator HOST:PORT, or set PODRING_COORDINATOR"),
    ] {
        let error = String::from_utf8(asked.stderr).unwrap();
        assert!(asked.status.code() == Some(1) && asked.stdout.is_empty(), "{error}");
        assert!(error.starts_with("podring: ") && error.contains(words) && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn a_signal_ends_it_with_0() {
    let mut process = start(&[]);
    Store::connect(&Access { timeout: SOON, ..Access::new(&process.1) }).unwrap().set("k", b"v").unwrap();
    let pid = rustix::process::Pid::from_child(&process.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let began = Instant::now();
    let status = loop {
        if let Some(status) = process.0.try_wait().unwrap() {
            break status;
        }
        assert!(began.elapsed() < SOON, "it doesn't end");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(0));
}
