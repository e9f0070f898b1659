//! Where plugins are.

use std::{
    env,
    path::{Path, PathBuf},
};

use super::PjrtError;

/// What a plugin is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// libtpu: TPUs, or compiling for them.
    Tpu,
    /// XLA's CPU devices.
    Cpu,
    /// libtpu if it is there, else a CPU plugin.
    Any,
}

/// libtpu inside its package.
const TPU: &[&str] = &["libtpu/libtpu.so"];
/// CPU plugins inside their packages, best first: the newer interface first.
const CPU: &[&str] = &["lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so", "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"];

/// The plugin's file, by `PODRING_PJRT_PLUGIN`, then (for libtpu) `TPU_LIBRARY_PATH`, then the packages of the Python
/// environment that this process belongs to: `VIRTUAL_ENV`, the program's own prefix, and those of `more`.
pub fn find(want: Want, more: &[PathBuf]) -> Result<PathBuf, PjrtError> {
    let mut prefixes: Vec<PathBuf> = env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    // Both names of the program: inside a virtual environment the first is its link, the second what it links to.
    for program in [env::args_os().next().map(PathBuf::from), env::current_exe().ok()].into_iter().flatten() {
        prefixes.extend(program.parent().and_then(Path::parent).map(Path::to_owned));
    }
    prefixes.extend_from_slice(more);
    let settings = [
        ("PODRING_PJRT_PLUGIN", env::var_os("PODRING_PJRT_PLUGIN").map(PathBuf::from)),
        ("TPU_LIBRARY_PATH", env::var_os("TPU_LIBRARY_PATH").filter(|_| want != Want::Cpu).map(PathBuf::from)),
    ];
    search(want, &settings, &prefixes)
}

fn search(want: Want, settings: &[(&str, Option<PathBuf>)], prefixes: &[PathBuf]) -> Result<PathBuf, PjrtError> {
    let mut looked_at = Vec::new();
    for (name, value) in settings {
        match value {
            // A file that was asked for by name is never replaced by another: loading it tells what is wrong with it.
            Some(file) if !file.as_os_str().is_empty() => return Ok(file.clone()),
            _ => looked_at.push(format!("{name} (not set)")),
        }
    }
    let names: Vec<&str> = match want {
        Want::Tpu => TPU.to_vec(),
        Want::Cpu => CPU.to_vec(),
        Want::Any => [TPU, CPU].concat(),
    };
    let mut packages: Vec<PathBuf> = Vec::new();
    for prefix in prefixes {
        for directory in site_packages(prefix) {
            if !packages.contains(&directory) {
                packages.push(directory);
            }
        }
    }
    for name in &names {
        for directory in &packages {
            let file = directory.join(name);
            if file.is_file() {
                return Ok(file);
            }
        }
    }
    let places = if packages.is_empty() {
        "no Python environment (VIRTUAL_ENV is not set)".to_owned()
    } else {
        packages.iter().map(|directory| directory.display().to_string()).collect::<Vec<_>>().join(", ")
    };
    looked_at.push(format!("{} in {places}", names.join(", ")));
    Err(PjrtError::NoPlugin { looked_at })
}

/// `<prefix>/lib/python3*/site-packages`, those that exist.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = prefix.join("lib").read_dir() else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path().join("site-packages"))
        .filter(|directory| directory.is_dir())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join("lib/python3.11/site-packages").join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        root
    }

    #[test]
    fn settings_win_then_libtpu_then_cpu() {
        let root = environment(&[TPU[0], CPU[0], CPU[1]]);
        let prefixes = [root.path().to_owned()];
        let unset = [("PODRING_PJRT_PLUGIN", None), ("TPU_LIBRARY_PATH", None)];
        let found = |want| search(want, &unset, &prefixes).unwrap();
        assert!(found(Want::Any).ends_with(TPU[0]));
        assert!(found(Want::Tpu).ends_with(TPU[0]));
        assert!(found(Want::Cpu).ends_with(CPU[0]));
        let set = [("PODRING_PJRT_PLUGIN", Some("/a/b.so".into())), ("TPU_LIBRARY_PATH", Some("/c.so".into()))];
        assert_eq!(search(Want::Any, &set, &prefixes).unwrap(), PathBuf::from("/a/b.so"));
        let second = [("PODRING_PJRT_PLUGIN", None), ("TPU_LIBRARY_PATH", Some("/c.so".into()))];
        assert_eq!(search(Want::Any, &second, &prefixes).unwrap(), PathBuf::from("/c.so"));
    }

    #[test]
    fn nothing_found_says_where_it_looked() {
        let root = environment(&[CPU[1]]);
        let prefixes = [root.path().to_owned()];
        assert!(search(Want::Any, &[], &prefixes).unwrap().ends_with(CPU[1]));
        let Err(PjrtError::NoPlugin { looked_at }) = search(Want::Tpu, &[("PODRING_PJRT_PLUGIN", None)], &prefixes)
        else {
            panic!("found one");
        };
        assert_eq!(looked_at[0], "PODRING_PJRT_PLUGIN (not set)");
        assert!(looked_at[1].contains("libtpu.so") && looked_at[1].contains("site-packages"), "{looked_at:?}");
    }
}
