//! `podring._core.launch_*`: what the launcher's variables say, for Python.

use podring_rendezvous::environment::{EnvironmentError, Numbered};
use pyo3::{exceptions::PyValueError, prelude::*};

fn to_python(error: EnvironmentError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Rank, world size, rank 0's host, and where they were looked for.
type Place = (Option<u32>, Option<u32>, Option<String>, String);

/// What was given goes before any variable.
#[pyfunction]
#[pyo3(signature = (rank=None, world_size=None))]
fn launch_place(py: Python<'_>, rank: Option<u32>, world_size: Option<u32>) -> PyResult<Place> {
    let numbered = py.detach(|| Numbered::from_env(rank, world_size)).map_err(to_python)?;
    let first = numbered.launch.first_host().map(|host| host.value);
    Ok((numbered.rank, numbered.world_size, first, numbered.sought()))
}

/// Adds the functions to `podring._core`.
pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(launch_place, module)?)?;
    Ok(())
}
