//! The user's Python interpreter: which one, and short scripts in it. torch is never loaded into this process.

use std::ffi::OsStr;
use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Why a script gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot start Python ({program}, from {from}): {source}. Name one with --python or PODRING_PYTHON")]
    Start { program: String, from: &'static str, source: std::io::Error },
    #[error("{program} did not finish within {} s", limit.as_secs())]
    Slow { program: String, limit: Duration },
    #[error("{program} failed ({status}):\n{stderr}")]
    Failed { program: String, status: ExitStatus, stderr: String },
    #[error("talking to {program}: {source}")]
    Io { program: String, source: std::io::Error },
}

/// The torch_tpu that `podring run` needs: requirements/vchip.txt's.
pub(crate) const TORCH_TPU: &str = "0.2.0";

/// How to get torch_tpu.
pub(crate) fn torch_tpu_hint() -> String {
    format!("pip install torch_tpu=={TORCH_TPU} (in podring's repository scripts/venv vchip makes .venv-vchip)")
}

/// The interpreter that this command is a script of, if it is one.
static OWN: OnceLock<PathBuf> = OnceLock::new();

/// Says, once, that this command is a script of the interpreter `program`.
pub(crate) fn set_own(program: PathBuf) {
    // A second word on the same process says the same.
    let _ = OWN.set(program);
}

/// An interpreter and who named it.
#[derive(Debug, Clone)]
pub(crate) struct Interpreter {
    pub(crate) program: PathBuf,
    pub(crate) from: &'static str,
}

impl Interpreter {
    /// The first of: `explicit`, PODRING_PYTHON, the one this command is a script of, VIRTUAL_ENV's, python3 on PATH.
    pub(crate) fn find(explicit: Option<&Path>) -> Self {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self::choose(explicit, OWN.get().map(PathBuf::as_path), var)
    }

    fn choose(explicit: Option<&Path>, own: Option<&Path>, var: impl Fn(&str) -> Option<PathBuf>) -> Self {
        if let Some(path) = explicit {
            return Interpreter { program: path.to_owned(), from: "--python" };
        }
        if let Some(path) = var("PODRING_PYTHON") {
            return Interpreter { program: path, from: "PODRING_PYTHON" };
        }
        if let Some(path) = own {
            return Interpreter { program: path.to_owned(), from: "this command's own" };
        }
        if let Some(prefix) = var("VIRTUAL_ENV") {
            return Interpreter { program: prefix.join("bin/python"), from: "VIRTUAL_ENV" };
        }
        Interpreter { program: "python3".into(), from: "PATH" }
    }

    pub(crate) fn name(&self) -> String {
        self.program.display().to_string()
    }

    /// The error for an interpreter that could not be started.
    pub(crate) fn start_error(&self, source: std::io::Error) -> Error {
        Error::Start { program: self.name(), from: self.from, source }
    }

    /// Runs the interpreter with `args`, `input` on its stdin, and returns its stdout. Killed after `limit`.
    pub(crate) fn output<S: AsRef<OsStr>>(&self, args: &[S], input: &str, limit: Duration) -> Result<String, Error> {
        let mut child = Command::new(&self.program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|source| self.start_error(source))?;
        let io = |source| Error::Io { program: self.name(), source };
        if let Some(mut stdin) = child.stdin.take() {
            let input = input.to_owned();
            // In a thread: the child may wait for us to read before it reads. A child that reads nothing is no error.
            std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
        }
        let (sender, receiver) = mpsc::channel();
        let readers = [
            child.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
            child.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn Read + Send>),
        ];
        for (index, reader) in readers.into_iter().enumerate() {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                if let Some(mut reader) = reader {
                    let _ = reader.read_to_end(&mut bytes);
                }
                let _ = sender.send((index, String::from_utf8_lossy(&bytes).into_owned()));
            });
        }
        drop(sender);
        // Not joined: a grandchild that keeps a pipe open must not keep us past the limit.
        let deadline = Instant::now() + limit;
        let mut texts = [String::new(), String::new()];
        for _ in 0..2 {
            match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((index, text)) => texts[index] = text,
                Err(RecvTimeoutError::Timeout) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(Error::Slow { program: self.name(), limit });
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let status = loop {
            if let Some(status) = child.try_wait().map_err(io)? {
                break status;
            }
            if Instant::now() >= deadline {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Error::Slow { program: self.name(), limit });
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let [stdout, stderr] = texts;
        if status.success() {
            Ok(stdout)
        } else {
            Err(Error::Failed { program: self.name(), status, stderr: stderr.trim_end().to_owned() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_wins() {
        let var = |name: &str| match name {
            "PODRING_PYTHON" => Some(PathBuf::from("/a/python")),
            "VIRTUAL_ENV" => Some(PathBuf::from("/venv")),
            _ => None,
        };
        let own = Some(Path::new("/own/python"));
        assert_eq!(Interpreter::choose(Some(Path::new("/x")), own, var).from, "--python");
        assert_eq!(Interpreter::choose(None, own, var).program, Path::new("/a/python"));
        let only_venv = |name: &str| if name == "PODRING_PYTHON" { None } else { var(name) };
        assert_eq!(Interpreter::choose(None, own, only_venv).program, Path::new("/own/python"));
        assert_eq!(Interpreter::choose(None, None, only_venv).program, Path::new("/venv/bin/python"));
        assert_eq!(Interpreter::choose(None, None, |_| None).program, Path::new("python3"));
    }

    #[test]
    fn the_torch_tpu_that_is_named_is_the_pinned_one() {
        let pinned = include_str!("../../../requirements/vchip.txt");
        assert!(pinned.lines().any(|line| line == format!("torch_tpu=={TORCH_TPU}")), "{pinned}");
    }

    // The shell stands in for Python: only process handling is at stake.
    fn shell() -> Interpreter {
        Interpreter { program: "/bin/sh".into(), from: "test" }
    }

    #[test]
    fn output_and_failures() {
        let limit = Duration::from_secs(10);
        assert_eq!(shell().output(&["-c", "cat"], "hello", limit).unwrap(), "hello");
        let failed = shell().output(&["-c", "echo why >&2; exit 3"], "", limit).unwrap_err();
        assert!(matches!(&failed, Error::Failed { stderr, .. } if stderr == "why"), "{failed}");
        let absent = Interpreter { program: "/nonexistent/python".into(), from: "test" };
        assert!(matches!(absent.output::<&str>(&[], "", limit), Err(Error::Start { .. })));
    }

    #[test]
    fn a_hanging_script_is_ended() {
        let begin = Instant::now();
        let slow = shell().output(&["-c", "sleep 30"], "", Duration::from_millis(200));
        assert!(matches!(slow, Err(Error::Slow { .. })));
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
}
