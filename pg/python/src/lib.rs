//! `podring._core`: the core as an abi3 Python module.

use std::ffi::OsString;

use pyo3::prelude::*;

mod topology;

/// Runs the `podring` command line; `args` includes the program name. Returns the exit code.
#[pyfunction]
fn cli_main(py: Python<'_>, args: Vec<OsString>) -> i32 {
    py.detach(|| podring_cli::main_with(args))
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(cli_main, module)?)?;
    topology::add_to(module)?;
    Ok(())
}
