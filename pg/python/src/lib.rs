//! `podring._core`: the core as an abi3 Python module.

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::prelude::*;

mod abi;
mod interposer;
mod launch;
mod log;
mod rendezvous;
mod settings;
mod topology;

/// Runs the `podring` command line of the interpreter `python`; `args` includes the program name. Returns the exit code.
#[pyfunction]
fn cli_main(py: Python<'_>, args: Vec<OsString>, python: PathBuf) -> i32 {
    py.detach(|| podring_cli::main_of(python, args))
}

/// The C function table for faces.
fn table(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let address = std::ptr::from_ref(&abi::CORE).cast_mut().cast();
    // SAFETY: a static table and a static name, both valid for ever; no destructor.
    unsafe { Bound::from_owned_ptr_or_err(py, pyo3::ffi::PyCapsule_New(address, abi::CAPSULE.as_ptr(), None)) }
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(cli_main, module)?)?;
    module.add("abi", table(module.py())?)?;
    launch::add_to(module)?;
    topology::add_to(module)?;
    interposer::add_to(module)?;
    log::add_to(module)?;
    Ok(())
}
