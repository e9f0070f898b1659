//! What is shown, and how.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::{Arc, Mutex, PoisonError};

use tracing::subscriber::with_default;

use super::*;

/// Which of these are shown: podring_fabric's, podring_group's, h2's.
fn levels(text: &str) -> [LevelFilter; 3] {
    let shown = shown(text).unwrap();
    let levels = [Level::TRACE, Level::DEBUG, Level::INFO, Level::WARN, Level::ERROR];
    ["podring_fabric::hub", "podring_group", "h2::client"].map(|target| {
        let least = levels.into_iter().find(|level| shown.would_enable(target, level));
        least.map_or(LevelFilter::OFF, LevelFilter::from_level)
    })
}

#[test]
fn what_a_value_shows() {
    const OFF: LevelFilter = LevelFilter::OFF;
    const WARN: LevelFilter = LevelFilter::WARN;
    const INFO: LevelFilter = LevelFilter::INFO;
    const DEBUG: LevelFilter = LevelFilter::DEBUG;
    for (text, expected) in [
        ("", [WARN, WARN, OFF]),
        (" Info ", [INFO, INFO, OFF]),
        ("off", [OFF; 3]),
        ("trace", [LevelFilter::TRACE, LevelFilter::TRACE, OFF]),
        ("podring_fabric=debug", [DEBUG, WARN, OFF]),
        ("podring=off,podring_group=info", [OFF, INFO, OFF]),
        ("h2=debug", [WARN, WARN, DEBUG]),
        ("podring_group", [WARN, LevelFilter::TRACE, OFF]),
        ("error,podring_fabric=info", [INFO, LevelFilter::ERROR, LevelFilter::ERROR]),
    ] {
        assert_eq!(levels(text), expected, "{text:?}");
    }
    for text in ["verbose", "2x", "podring_fabric=loud", "info,loud", "a=b=c"] {
        assert!(shown(text).is_none(), "{text:?}");
    }
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What is written, without the times.
fn written(value: &str, act: impl FnOnce()) -> Vec<String> {
    let lines = Lines::default();
    let writer = lines.clone();
    with_default(subscriber(shown(value).unwrap(), move || writer.clone()), act);
    let bytes = lines.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let text = String::from_utf8(bytes).unwrap();
    text.lines().map(|line| line.split_once(' ').unwrap().1.to_owned()).collect()
}

#[test]
fn a_message_is_one_line() {
    let speak = || {
        tracing::warn!(target: "podring_fabric::hub", host = %"a\nb", "lost");
        tracing::info!(target: "podring_group", "formed");
        from_python(40, "no graph \x1b[31m");
        tracing::error!(target: "h2", "not ours");
    };
    let lines = written("", speak);
    assert_eq!(lines[0], "podring WARN fabric: lost host=a\\nb");
    assert!(lines[1].starts_with("podring ERROR python: no graph ") && !lines[1].contains('\x1b'), "{lines:?}");
    assert_eq!(lines.len(), 2);
    assert_eq!(written("info", speak).len(), 3);
    assert_eq!(written("off", speak), [""; 0]);
    set_likely_rank(3);
    set_likely_rank(4);
    assert!(written("error", speak)[0].starts_with("podring[rank 3] ERROR python: "));
    set_rank(4);
    assert!(written("error", speak)[0].starts_with("podring[rank 4] "));
}
