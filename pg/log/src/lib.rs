//! podring's messages on stderr: which ones (`PODRING_LOG`), and how a line looks.
//!
//! **Forks.** A child of a process whose other threads were logging must be able to log. Nothing that an event passes
//! through holds a lock. What is shown was settled when the subscriber was made, and a place in the code learns it once,
//! by atomics, as long as there is one subscriber (tracing-core 0.1.36). tracing-subscriber's fmt layer formats into a
//! buffer of the thread's own and writes the line with one call; its registry, and the locks of the thread numbers in
//! it, is for spans, and podring has none. The writer is write(2): std's stderr has a lock, which another thread may
//! have held at the fork. And who comes second doesn't wait for who installs the subscriber.

mod line;

use std::ffi::OsString;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use tracing::level_filters::LevelFilter;
use tracing::{Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{fmt, registry};

/// The variable that says what is shown.
pub const VARIABLE: &str = "PODRING_LOG";
/// Where the messages of podring's Python modules come from.
pub const PYTHON: &str = "podring::python";

/// What all of podring's own targets begin with.
const OURS: &str = "podring";
const NOBODY: i64 = -1;

static INSTALLED: AtomicBool = AtomicBool::new(false);
/// This process's rank in the default group, where it is known.
static RANK: AtomicI64 = AtomicI64::new(NOBODY);

/// Shows this process's messages from now on, as `PODRING_LOG` says; again is nothing. Where the program has a subscriber
/// of its own already, that one gets them.
pub fn install() {
    if INSTALLED.swap(true, Ordering::AcqRel) {
        return;
    }
    // The next descriptor that is opened gets the number: no line may go there.
    if rustix::io::fcntl_getfd(rustix::stdio::stderr()).is_err() {
        return;
    }
    let (shown, wrong) = asked();
    // Fails where there is one already.
    let _ = tracing::subscriber::set_global_default(subscriber(shown, || Stderr));
    if let Some(wrong) = wrong {
        let _ = io::Write::write_all(&mut Stderr, format!("podring: {wrong}\n").as_bytes());
    }
}

/// Says which rank this process is, for the lines to come.
pub fn set_rank(rank: u32) {
    RANK.store(rank.into(), Ordering::Relaxed);
}

/// The same, unless it is known already.
pub fn set_likely_rank(rank: u32) {
    let _ = RANK.compare_exchange(NOBODY, rank.into(), Ordering::Relaxed, Ordering::Relaxed);
}

fn rank() -> Option<u32> {
    u32::try_from(RANK.load(Ordering::Relaxed)).ok()
}

/// Python's numbers for levels; it has none for the least.
const LEVELS: [(u8, Level); 5] =
    [(5, Level::TRACE), (10, Level::DEBUG), (20, Level::INFO), (30, Level::WARN), (40, Level::ERROR)];

/// The least severe of podring's Python messages that are shown, as a number of Python's logging; 100 for none.
pub fn python_level() -> u8 {
    let (shown, _) = asked();
    LEVELS.iter().find(|(_, level)| shown.would_enable(PYTHON, level)).map_or(100, |(number, _)| *number)
}

/// A message of podring's Python modules; `level` is a number of Python's logging.
pub fn from_python(level: u8, message: &str) {
    match level {
        40.. => tracing::error!(target: PYTHON, "{message}"),
        30.. => tracing::warn!(target: PYTHON, "{message}"),
        20.. => tracing::info!(target: PYTHON, "{message}"),
        10.. => tracing::debug!(target: PYTHON, "{message}"),
        _ => tracing::trace!(target: PYTHON, "{message}"),
    }
}

fn subscriber<W>(shown: Targets, writer: W) -> impl Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = fmt::layer().with_writer(writer).with_ansi(false).event_format(line::Line(rank));
    registry().with(lines).with(shown)
}

/// What `PODRING_LOG` asks for, and what is wrong with it.
fn asked() -> (Targets, Option<String>) {
    let usual = || Targets::new().with_target(OURS, LevelFilter::WARN);
    match std::env::var_os(VARIABLE).map(OsString::into_string) {
        None => (usual(), None),
        Some(Ok(text)) => match shown(&text) {
            Some(shown) => (shown, None),
            None => (usual(), Some(wrong(&text))),
        },
        Some(Err(text)) => (usual(), Some(wrong(&text.to_string_lossy()))),
    }
}

fn wrong(got: &str) -> String {
    format!(
        "{VARIABLE}={got:?}: expected off, error, warn, info, debug or trace, or tracing's directives, such as \
         podring_fabric=debug; taken as warn"
    )
}

/// What a value asks for; none if it can't be read. A level alone is for podring's messages. Directives are tracing's,
/// and may be for the libraries below as well; if no level for everybody is among them, they add to what is usual.
fn shown(text: &str) -> Option<Targets> {
    let text = text.trim();
    if text.is_empty() {
        return Some(Targets::new().with_target(OURS, LevelFilter::WARN));
    }
    if let Ok(level) = text.parse::<LevelFilter>() {
        return Some(Targets::new().with_target(OURS, level));
    }
    // To tracing a word that is no level is a target, of which everything is shown. Here it is more likely a mistake.
    let known =
        |part: &str| part.contains('=') || part.trim().starts_with(OURS) || part.trim().parse::<LevelFilter>().is_ok();
    if !text.split(',').filter(|part| !part.trim().is_empty()).all(known) {
        return None;
    }
    let directives = text.parse::<Targets>().ok()?;
    if directives.default_level().is_some() {
        return Some(directives);
    }
    Some(Targets::new().with_target(OURS, LevelFilter::WARN).with_targets(directives))
}

/// Descriptor 2, with neither a lock nor a buffer. What can't be written is dropped.
struct Stderr;

impl io::Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::io::write(rustix::stdio::stderr(), bytes))?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
