//! `podring doctor`: what podring needs of this machine, and whether it is there.

mod address;
mod environment;
mod kernel;
mod memory;
mod software;

use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Value, json};

use crate::python::Interpreter;
use crate::terminal;

const EXIT: &str = "\
Exit code: 0, also with warnings; 1 if something makes podring unusable here.
The JSON is {\"podring\", \"usable\", \"checks\": [{\"group\", \"name\", \"status\", \"summary\", \"advice\", \"data\"}]};
status is ok, warning or error, advice is null where there is nothing to do.";

/// Check this machine and its Python for what podring needs
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The Python to look into; else PODRING_PYTHON, this command's own, VIRTUAL_ENV's, python3
    #[arg(long, value_name = "EXE")]
    python: Option<PathBuf>,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot write the report as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Warning,
    Error,
}

/// One line of the report.
#[derive(Debug, Serialize)]
struct Check {
    group: &'static str,
    name: String,
    status: Status,
    /// What was found, in one line.
    summary: String,
    /// What to do about it.
    advice: Option<String>,
    /// The facts behind the summary.
    data: Value,
}

impl Check {
    fn ok(group: &'static str, name: impl Into<String>, summary: impl Into<String>, data: Value) -> Self {
        Check { group, name: name.into(), status: Status::Ok, summary: summary.into(), advice: None, data }
    }

    fn warning(self, advice: impl Into<String>) -> Self {
        Check { status: Status::Warning, advice: Some(advice.into()), ..self }
    }

    fn error(self, advice: impl Into<String>) -> Self {
        Check { status: Status::Error, advice: Some(advice.into()), ..self }
    }
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<i32, Error> {
    let interpreter = Interpreter::find(args.python.as_deref());
    let checks: Vec<Check> =
        [software::checks(&interpreter), kernel::checks(), memory::checks(), address::checks(), environment::checks()]
            .into_iter()
            .flatten()
            .collect();
    let usable = checks.iter().all(|check| check.status != Status::Error);
    if args.json {
        let report = json!({"podring": env!("CARGO_PKG_VERSION"), "usable": usable, "checks": checks});
        terminal::out(&serde_json::to_string_pretty(&report)?);
    } else {
        for line in render(&checks) {
            terminal::out(&line);
        }
    }
    Ok(i32::from(!usable))
}

const WIDTH: usize = 80;

/// The report for people: a group's title, then `status  name  summary`, its advice below.
fn render(checks: &[Check]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut group = "";
    for check in checks {
        if check.group != group {
            if !group.is_empty() {
                lines.push(String::new());
            }
            group = check.group;
            lines.push(group.to_owned());
        }
        let mark = match check.status {
            Status::Ok => "ok",
            Status::Warning => "WARN",
            Status::Error => "ERROR",
        };
        let head = format!("  {mark:<5}  {:<17} ", check.name);
        let indent = head.chars().count();
        let mut wrapped = terminal::wrap(&check.summary, if indent > 40 { 9 } else { indent }, WIDTH).into_iter();
        match wrapped.next() {
            Some(first) if indent <= 40 => lines.push(format!("{head}{}", first.trim_start())),
            first => lines.extend([Some(head.trim_end().to_owned()), first].into_iter().flatten()),
        }
        lines.extend(wrapped);
        if let Some(advice) = &check.advice {
            lines.extend(terminal::wrap(&format!("→ {advice}"), 9, WIDTH));
        }
    }
    let count = |status| checks.iter().filter(|check| check.status == status).count();
    let (errors, warnings) = (count(Status::Error), count(Status::Warning));
    lines.push(String::new());
    lines.push(match (errors, warnings) {
        (0, 0) => "podring is usable here.".to_owned(),
        (0, _) => format!("podring is usable here; warnings: {warnings}."),
        _ => format!("podring is not usable here; errors: {errors}, warnings: {warnings}."),
    });
    lines
}

/// `bytes` with a binary unit, for people.
fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value.fract() == 0.0 {
        format!("{value:.0} {}", units[unit])
    } else {
        format!("{value:.1} {}", units[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_for_people() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(8 << 20), "8 MiB");
        assert_eq!(size(3 << 29), "1.5 GiB");
    }

    #[test]
    fn lines_fit_80_columns_and_say_the_worst() {
        let long = "word ".repeat(60);
        let checks = [
            Check::ok("Versions", "podring", &long, Value::Null),
            Check::ok("Kernel", "process_vm_readv", "refused", Value::Null).warning(&long),
            Check::ok("Kernel", "a_name_far_longer_than_its_column_is_wide", &long, Value::Null).error("do this"),
        ];
        let lines = render(&checks);
        assert!(lines.iter().all(|line| line.chars().count() <= WIDTH), "{lines:#?}");
        assert!(lines.last().unwrap().contains("not usable here; errors: 1, warnings: 1"));
        assert_eq!(render(&checks[..1]).last().unwrap(), "podring is usable here.");
    }

    #[test]
    fn every_check_says_something() {
        let all = [kernel::checks(), memory::checks(), address::checks(), environment::checks()];
        assert!(all.iter().all(|checks| !checks.is_empty()));
        for check in all.iter().flatten() {
            assert!(!check.summary.is_empty(), "{check:?}");
            assert_eq!(check.advice.is_some(), check.status != Status::Ok, "{check:?}");
        }
    }
}
