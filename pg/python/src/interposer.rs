//! The interposer's side of this module: `GetPjrtApi`, so that `TPU_LIBRARY_PATH` can name this very file and both
//! handles on it are one instance, with one client.

use std::collections::HashMap;
use std::ffi::c_void;
use std::panic::catch_unwind;
use std::path::PathBuf;

use podring_group::engine::Wanted;
use podring_interposer::{Settings, Wrapped};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// What a framework looks up in a PJRT plugin.
// SAFETY: no other symbol of this name is linked into this module.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn GetPjrtApi() -> *const c_void {
    catch_unwind(podring_interposer::api).unwrap_or(std::ptr::null())
}

/// Says what to wrap before a framework asks: a virtual slice (`slice`) on `plugin`, or, without a slice, libtpu
/// (`plugin`) as it is. False if a framework has the table already.
///
/// Raises ValueError if the slice's name is none, or the launcher's RANK and WORLD_SIZE don't fit it.
#[pyfunction]
#[pyo3(signature = (plugin, slice=None))]
fn interpose(plugin: PathBuf, slice: Option<&str>) -> PyResult<bool> {
    let refused = |error: podring_interposer::InterposeError| PyValueError::new_err(error.to_string());
    let settings = match slice {
        Some(name) => Settings::virtual_slice(name, Some(&plugin)).map_err(refused)?,
        None => Settings { plugin, wrapped: Wrapped::Libtpu },
    };
    settings.check_place().map_err(refused)?;
    Ok(podring_interposer::configure(settings))
}

/// (loaded, reason): whether a framework has asked this module for its PJRT table, and why it got none, if so.
#[pyfunction]
fn interposed() -> (bool, Option<String>) {
    (podring_interposer::is_loaded(), podring_interposer::failure())
}

/// (device kind, memory of a device in bytes, devices, shape of one slice in chips, slices) of a slice by name.
#[pyfunction]
fn slice_facts(name: &str) -> PyResult<(String, u64, u32, [u32; 3], u32)> {
    let slice = podring_topology::parse(name).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let (kind, memory) = podring_interposer::device_facts(&slice);
    Ok((kind.to_owned(), memory, slice.devices(), slice.dims(), slice.slices()))
}

/// What torch_tpu wants in the environment of a rank on a TPU host, and it lacks.
///
/// Raises ValueError if that can't be told.
#[pyfunction]
fn tpu_environment() -> PyResult<HashMap<&'static str, String>> {
    let wanted = podring_cli::pod::of_rank(|name| std::env::var(name).ok());
    wanted.map(|found| found.into_iter().collect()).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// What runs collectives of tensors on devices in this process: "ici" or "fabric".
///
/// Raises ValueError if `PODRING_ENGINE` is something else.
#[pyfunction]
fn engine() -> PyResult<&'static str> {
    let chosen = crate::settings::engine().map_err(|bad| PyValueError::new_err(bad.to_string()))?;
    Ok(match chosen {
        Wanted::Ici => "ici",
        Wanted::Fabric => "fabric",
    })
}

/// What the engine for tensors on devices has done in this process so far: programs `launched`; programs `compiled`,
/// `received` from another rank that compiled them, `loaded` from files, and of these two `damaged`; groups `refused`,
/// whose collectives have no programs. None without such an engine, or before the first group.
#[pyfunction]
fn engine_counts() -> Option<HashMap<&'static str, u64>> {
    let chip = podring_group::Runtime::chip()?;
    let counts = chip.counts();
    let counts = [
        ("launched", chip.launched()),
        ("compiled", counts.compiled),
        ("received", counts.received),
        ("loaded", counts.loaded),
        ("damaged", counts.damaged),
        ("refused", chip.refused()),
    ];
    Some(counts.into())
}

/// What became of programs with collectives on a virtual slice, since the process began: how many were one collective
/// (`whole`), had some among other operations (`mixed`, with `inside` collectives in all), were refused, and were loaded
/// as another rank or an earlier process had compiled them (`loaded`).
#[pyfunction]
fn program_counts() -> HashMap<&'static str, u64> {
    let counts = podring_interposer::counts();
    [
        ("whole", counts.whole),
        ("mixed", counts.mixed),
        ("inside", counts.inside),
        ("refused", counts.refused),
        ("loaded", counts.loaded),
    ]
    .into()
}

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(interpose, module)?)?;
    module.add_function(wrap_pyfunction!(interposed, module)?)?;
    module.add_function(wrap_pyfunction!(slice_facts, module)?)?;
    module.add_function(wrap_pyfunction!(tpu_environment, module)?)?;
    module.add_function(wrap_pyfunction!(engine, module)?)?;
    module.add_function(wrap_pyfunction!(engine_counts, module)?)?;
    module.add_function(wrap_pyfunction!(program_counts, module)?)?;
    Ok(())
}
