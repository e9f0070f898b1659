//! Versions, the C++ face against torch, and PJRT plugins. Python is asked in a process of its own, without torch.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Check;
use crate::python::{self, Interpreter};

const GROUP: &str = "Versions";
const PLUGINS: &str = "PJRT plugins";
const LIMIT: Duration = Duration::from_secs(20);

/// What facts.py prints.
#[derive(Debug, Deserialize)]
struct Facts {
    executable: String,
    version: String,
    implementation: String,
    bits: u32,
    torch: Option<String>,
    torch_found: bool,
    numpy: Option<String>,
    torch_tpu: Option<String>,
    podring: Option<String>,
    podring_folders: Vec<String>,
    core: Vec<String>,
    faces: Vec<Face>,
    entry_points: Vec<String>,
    plugins: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize, Serialize)]
struct Face {
    path: String,
    /// The torch minor it was built for, where its name says so.
    torch: Option<String>,
    loads_here: bool,
}

pub(super) fn checks(interpreter: &Interpreter) -> Vec<Check> {
    let (version, target, profile) =
        (env!("CARGO_PKG_VERSION"), env!("PODRING_BUILD_TARGET"), env!("PODRING_BUILD_PROFILE"));
    let own = Check::ok(
        GROUP,
        "podring",
        format!("{version}, {target}, {profile}"),
        json!({"version": version, "target": target, "profile": profile}),
    );
    let own = match profile {
        "release" => own,
        _ => own.warning("a debug build: many times slower. Build with --release before measuring"),
    };
    let mut checks = vec![own];
    let mut plugins = Vec::new();
    match facts(interpreter) {
        Ok(facts) => {
            checks.extend([python(&facts, interpreter.from), torch(&facts), package(&facts), face(&facts)]);
            checks.push(optional("numpy", facts.numpy.as_deref(), "podring does not need it"));
            let absent = format!("podring run and tpu tensors need it: {}", python::torch_tpu_hint());
            checks.push(optional("torch_tpu", facts.torch_tpu.as_deref(), &absent));
            plugins = facts.plugins.into_iter().collect();
        }
        Err(error) => checks.push(
            Check::ok(GROUP, "python", first_lines(&error.to_string()), json!({"from": interpreter.from}))
                .error("init_process_group(\"tpu\") needs Python 3.11 or later with torch: set PODRING_PYTHON to it"),
        ),
    }
    let named = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let variables = ["PODRING_PJRT_PLUGIN", "TPU_LIBRARY_PATH"].map(|name| (name, named(name)));
    checks.extend(plugin_checks(&variables, &plugins));
    checks
}

fn facts(interpreter: &Interpreter) -> Result<Facts, python::Error> {
    let text = interpreter.output(&["-c", include_str!("facts.py")], "", LIMIT)?;
    // Site hooks may print before us.
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(last)
        .map_err(|error| python::Error::Io { program: interpreter.name(), source: std::io::Error::from(error) })
}

/// An error with a traceback in one line: its first and last.
fn first_lines(text: &str) -> String {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    match (lines.next(), lines.next_back()) {
        (Some(first), Some(last)) => format!("{first} {last}"),
        (first, _) => first.unwrap_or("failed").to_owned(),
    }
}

fn python(facts: &Facts, from: &str) -> Check {
    let summary = format!("{} {}, {} (from {from})", facts.implementation, facts.version, facts.executable);
    let data = json!({"version": facts.version, "executable": facts.executable, "from": from});
    let check = Check::ok(GROUP, "python", summary, data);
    let mut numbers = facts.version.split('.').map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (3, 11) || facts.bits != 64 || facts.implementation != "CPython" {
        return check.error("podring needs 64-bit CPython 3.11 or later: set PODRING_PYTHON to one");
    }
    check
}

/// `2.15` of `2.15.0+cpu`.
fn minor(version: &str) -> Option<String> {
    let mut parts = version.split('.');
    let (major, minor) = (parts.next()?, parts.next()?);
    let minor: String = minor.chars().take_while(char::is_ascii_digit).collect();
    (!minor.is_empty()).then(|| format!("{major}.{minor}"))
}

fn torch(facts: &Facts) -> Check {
    let data = json!({"version": facts.torch, "minor": facts.torch.as_deref().and_then(minor)});
    match (&facts.torch, facts.torch_found) {
        (Some(version), true) => Check::ok(GROUP, "torch", version.clone(), data),
        (Some(version), false) => Check::ok(GROUP, "torch", format!("{version} is listed but not there"), data)
            .error("the installation is broken: install torch again"),
        (None, _) => Check::ok(GROUP, "torch", "not installed", data)
            .error("install torch into this Python, or set PODRING_PYTHON to one that has it"),
    }
}

fn package(facts: &Facts) -> Check {
    let data = json!({
        "version": facts.podring, "folders": facts.podring_folders, "core": facts.core,
        "entry_points": facts.entry_points,
    });
    let name = "podring package";
    let Some(folder) = facts.podring_folders.first() else {
        return Check::ok(GROUP, name, "not installed in this Python", data)
            .error("run make in podring's source tree, or install its wheel");
    };
    let version = facts.podring.as_deref().unwrap_or("unknown version");
    let check = Check::ok(GROUP, name, format!("{version}, {folder}"), data);
    if facts.core.is_empty() {
        return check.error("its core module (_core) is not built: run make");
    }
    if facts.entry_points.is_empty() {
        return check.error("torch finds no backend named tpu: its entry point is not installed; run make");
    }
    if facts.podring.as_deref().is_some_and(|found| found != env!("CARGO_PKG_VERSION")) {
        return check.warning(format!("this command is {}: the two should match", env!("CARGO_PKG_VERSION")));
    }
    check
}

/// The C++ extension must be built for this very torch minor and this Python.
fn face(facts: &Facts) -> Check {
    let wanted = facts.torch.as_deref().and_then(minor);
    let data = json!({"torch": wanted, "built": facts.faces});
    let name = "torch face";
    if facts.faces.is_empty() {
        return Check::ok(GROUP, name, "not built", data)
            .error("the C++ extension for this torch is missing: run make with this Python");
    }
    let usable: Vec<&Face> = facts.faces.iter().filter(|face| face.loads_here).collect();
    if usable.is_empty() {
        return Check::ok(GROUP, name, "built for another Python", data).error("run make with this Python");
    }
    let fits = |face: &&Face| face.torch.is_none() || face.torch == wanted;
    let file = |path: &str| Path::new(path).file_name().map_or(path.to_owned(), |name| name.to_string_lossy().into());
    if let Some(fitting) = usable.iter().copied().find(fits) {
        let torch = fitting.torch.as_ref().map_or(String::new(), |minor| format!(", for torch {minor}"));
        return Check::ok(GROUP, name, format!("{}{torch}", file(&fitting.path)), data);
    }
    let built: Vec<&str> = usable.iter().filter_map(|face| face.torch.as_deref()).collect();
    let summary = format!("built for torch {}, found {}", built.join(", "), wanted.as_deref().unwrap_or("none"));
    Check::ok(GROUP, name, summary, data).error("run make with this Python: the face fits one torch minor only")
}

fn optional(name: &str, version: Option<&str>, absent: &str) -> Check {
    let summary = version.map_or_else(|| format!("not installed: {absent}"), str::to_owned);
    Check::ok(GROUP, name, summary, json!({ "version": version }))
}

/// `variables`: name and value of those that name a plugin; `packages`: path and Python package.
fn plugin_checks(variables: &[(&str, Option<String>)], packages: &[(String, String)]) -> Vec<Check> {
    let mut checks = Vec::new();
    for (name, path) in variables.iter().filter_map(|(name, path)| Some((*name, path.as_ref()?))) {
        let check = Check::ok(PLUGINS, name, path.clone(), json!({ "path": path }));
        checks.push(if Path::new(path).is_file() { check } else { check.warning("there is no such file") });
    }
    for (path, package) in packages {
        checks.push(Check::ok(PLUGINS, package.clone(), path.clone(), json!({ "path": path })));
    }
    if checks.is_empty() {
        let summary = "none found: podring then moves CPU tensors only, which needs none";
        checks.push(Check::ok(PLUGINS, "plugins", summary, json!([])));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    fn complete() -> Facts {
        serde_json::from_value(json!({
            "executable": "/venv/bin/python", "version": "3.11.9", "implementation": "CPython", "bits": 64,
            "torch": "2.15.0+cpu", "torch_found": true, "numpy": null, "torch_tpu": null,
            "podring": env!("CARGO_PKG_VERSION"), "podring_folders": ["/site/podring"],
            "core": ["/site/podring/_core.abi3.so"],
            "faces": [{"path": "/site/podring/_face_2_15.so", "torch": "2.15", "loads_here": true}],
            "entry_points": ["podring:register"], "plugins": {},
        }))
        .unwrap()
    }

    #[test]
    fn a_complete_installation_is_ok() {
        let facts = complete();
        for check in [python(&facts, "PATH"), torch(&facts), package(&facts), face(&facts)] {
            assert_eq!(check.status, Status::Ok, "{check:?}");
        }
    }

    #[test]
    fn what_is_missing_is_an_error() {
        let change = |change: fn(&mut Facts), check: fn(&Facts) -> Check| {
            let mut facts = complete();
            change(&mut facts);
            check(&facts)
        };
        let error = |check: Check| assert_eq!(check.status, Status::Error, "{check:?}");
        error(change(|facts| facts.version = "3.10.4".into(), |facts| python(facts, "PATH")));
        error(change(|facts| facts.torch = None, torch));
        error(change(|facts| facts.torch_found = false, torch));
        error(change(|facts| facts.podring_folders.clear(), package));
        error(change(|facts| facts.core.clear(), package));
        error(change(|facts| facts.entry_points.clear(), package));
        error(change(|facts| facts.faces.clear(), face));
        error(change(|facts| facts.faces[0].loads_here = false, face));
        let check = change(|facts| facts.torch = Some("2.16.1".into()), face);
        assert_eq!((check.status, check.summary.as_str()), (Status::Error, "built for torch 2.15, found 2.16"));
    }

    #[test]
    fn minors() {
        assert_eq!(minor("2.15.0+cpu").as_deref(), Some("2.15"));
        assert_eq!(minor("2.16.0a0+git1").as_deref(), Some("2.16"));
        assert_eq!(minor("2.16rc1").as_deref(), Some("2.16"));
        assert_eq!(minor("main"), None);
    }

    #[test]
    fn plugins_named_or_installed() {
        let missing = [("TPU_LIBRARY_PATH", Some("/nonexistent/libtpu.so".to_owned())), ("PODRING_PJRT_PLUGIN", None)];
        let checks = plugin_checks(&missing, &[("/site/libtpu/libtpu.so".into(), "libtpu".into())]);
        assert_eq!(checks.iter().map(|check| check.status).collect::<Vec<_>>(), [Status::Warning, Status::Ok]);
        assert!(plugin_checks(&[], &[])[0].summary.contains("none found"));
    }

    #[test]
    fn no_python_is_an_error_and_not_a_crash() {
        let absent = Interpreter { program: "/nonexistent/python".into(), from: "test" };
        let checks = checks(&absent);
        assert!(checks.iter().any(|check| check.name == "python" && check.status == Status::Error));
    }
}
