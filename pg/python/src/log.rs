//! podring's messages in a Python process.

use pyo3::prelude::*;

/// Called where podring's core first does something in a process; again is nothing.
pub(crate) fn begin() {
    // Where the group is made by a program that its launcher's variables don't count, it says so.
    if let Some(rank) = std::env::var("RANK").ok().and_then(|rank| rank.trim().parse().ok()) {
        podring_log::set_likely_rank(rank);
    }
    podring_log::install();
}

/// The least of Python's logging levels that PODRING_LOG shows of podring's Python modules; 100 for none.
#[pyfunction]
fn log_level() -> u8 {
    podring_log::python_level()
}

/// A line on stderr, if PODRING_LOG shows messages of this level (one of Python's logging).
#[pyfunction]
fn log(level: u8, message: &str) {
    begin();
    podring_log::from_python(level, message);
}

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(log_level, module)?)?;
    module.add_function(wrap_pyfunction!(log, module)?)?;
    Ok(())
}
