//! `podring._core`: the core as an abi3 Python module.

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::prelude::*;
use tracing_subscriber::filter::LevelFilter;

mod abi;
mod interposer;
mod rendezvous;
mod settings;
mod store_abi;
mod topology;

/// Runs the `podring` command line of the interpreter `python`; `args` includes the program name. Returns the exit code.
#[pyfunction]
fn cli_main(py: Python<'_>, args: Vec<OsString>, python: PathBuf) -> i32 {
    py.detach(|| podring_cli::main_of(python, args))
}

/// Messages of the core on stderr: warnings, or as `PODRING_LOG` says.
fn log() {
    let named = std::env::var("PODRING_LOG").ok().and_then(|level| level.trim().parse::<LevelFilter>().ok());
    let level = named.unwrap_or(LevelFilter::WARN);
    let lines = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_ansi(false);
    // If another instance of this module writes them already, that one goes on.
    let _ = lines.without_time().try_init();
}

/// The C function table for faces.
fn table(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let address = std::ptr::from_ref(&abi::CORE).cast_mut().cast();
    // SAFETY: a static table and a static name, both valid for ever; no destructor.
    unsafe { Bound::from_owned_ptr_or_err(py, pyo3::ffi::PyCapsule_New(address, abi::CAPSULE.as_ptr(), None)) }
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    log();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(cli_main, module)?)?;
    module.add("abi", table(module.py())?)?;
    topology::add_to(module)?;
    interposer::add_to(module)?;
    Ok(())
}
