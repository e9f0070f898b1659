//! `podring._core.topology_*`: the topology crate for Python. Plain lists and tuples; no numpy, no torch.

use pyo3::{exceptions::PyValueError, prelude::*};

use podring_topology::{
    Slice, SliceOptions, TopologyError,
    cost::Collective,
    from_accelerator,
    mesh::{Axis, Mesh, MeshRequest, assign},
};

fn to_python(error: TopologyError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn slice_of(name: Option<&str>, topology: Option<&str>) -> PyResult<Slice> {
    from_accelerator(name, topology, &SliceOptions::default()).map_err(to_python)
}

/// A mesh as Python gives it: sizes, and per axis its name, traffic and collective.
fn request(
    sizes: Vec<i64>,
    names: Vec<String>,
    traffic: Option<Vec<f64>>,
    talk: Option<Vec<String>>,
    dcn: Option<Vec<(String, u32)>>,
    bytes: u64,
) -> PyResult<MeshRequest> {
    let per_axis = |what: &str, count: usize| {
        if count == sizes.len() {
            Ok(())
        } else {
            Err(PyValueError::new_err(format!("{what}: expected {} (one per mesh axis), got {count}", sizes.len())))
        }
    };
    per_axis("names", names.len())?;
    per_axis("traffic", traffic.as_ref().map_or(sizes.len(), Vec::len))?;
    per_axis("talk", talk.as_ref().map_or(sizes.len(), Vec::len))?;
    let mut axes: Vec<Axis> = names.into_iter().zip(&sizes).map(|(name, &size)| Axis::new(name, size)).collect();
    for (axis, weight) in axes.iter_mut().zip(traffic.into_iter().flatten()) {
        axis.traffic = Some(weight);
    }
    for (axis, name) in axes.iter_mut().zip(talk.into_iter().flatten()) {
        let known = Collective::ALL.into_iter().find(|known| known.name() == name);
        axis.talk = known.ok_or_else(|| {
            let names = Collective::ALL.map(Collective::name).join(", ");
            PyValueError::new_err(format!("talk of mesh axis \"{}\" is \"{name}\"; expected one of {names}", axis.name))
        })?;
    }
    Ok(MeshRequest { axes, bytes, dcn })
}

/// Ranks of the best mesh, row-major. `name` is a slice name or accelerator type, `topology` a shape.
#[pyfunction]
#[pyo3(signature = (name, topology, sizes, names, traffic=None, talk=None, dcn=None, bytes=podring_topology::mesh::DEFAULT_BYTES))]
#[expect(clippy::too_many_arguments, reason = "one Python call; podring.mesh gives it its friendly form")]
fn topology_mesh(
    py: Python<'_>,
    name: Option<&str>,
    topology: Option<&str>,
    sizes: Vec<i64>,
    names: Vec<String>,
    traffic: Option<Vec<f64>>,
    talk: Option<Vec<String>>,
    dcn: Option<Vec<(String, u32)>>,
    bytes: u64,
) -> PyResult<Vec<u32>> {
    let slice = slice_of(name, topology)?;
    let request = request(sizes, names, traffic, talk, dcn, bytes)?;
    py.detach(|| assign(&slice, &request)).map(|mesh| mesh.ranks().to_vec()).map_err(to_python)
}

/// Per axis of a given mesh: (group kind, whether all groups are alike, predicted microseconds of its all-reduce).
#[pyfunction]
#[pyo3(signature = (name, topology, sizes, ranks, bytes=podring_topology::mesh::DEFAULT_BYTES))]
fn topology_judge(
    py: Python<'_>,
    name: Option<&str>,
    topology: Option<&str>,
    sizes: Vec<i64>,
    ranks: Vec<u32>,
    bytes: u64,
) -> PyResult<Vec<(&'static str, bool, f64)>> {
    let slice = slice_of(name, topology)?;
    let axes: Vec<Axis> =
        sizes.iter().enumerate().map(|(index, &size)| Axis::new(format!("axis{index}"), size)).collect();
    py.detach(|| {
        let mesh = Mesh::from_ranks(&slice, &axes, ranks)?;
        (0..axes.len())
            .map(|axis| {
                let report = mesh.report(&slice, axis)?;
                let time = report.predict(&slice, Collective::AllReduce, bytes).total_us();
                Ok((report.group.kind.name(), report.uniform, time))
            })
            .collect::<Result<Vec<_>, TopologyError>>()
    })
    .map_err(to_python)
}

/// One device: (id, coords, core, slice, process).
type DeviceRow = (u32, [u32; 3], u32, u32, u32);

/// Devices in libtpu's list order, which is rank order.
#[pyfunction]
#[pyo3(signature = (name, topology=None))]
fn topology_devices(name: Option<&str>, topology: Option<&str>) -> PyResult<Vec<DeviceRow>> {
    let slice = slice_of(name, topology)?;
    Ok(slice.list().map(|d| (d.id, d.coords, d.core, d.slice, d.process)).collect())
}

/// Adds the functions to `podring._core`.
pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(topology_mesh, module)?)?;
    module.add_function(wrap_pyfunction!(topology_judge, module)?)?;
    module.add_function(wrap_pyfunction!(topology_devices, module)?)?;
    Ok(())
}
