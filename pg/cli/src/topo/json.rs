//! `podring topo --json`.

use podring_topology::{cost::Prediction, mesh::traffic};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{MeshView, SHOWN, View};

#[derive(Serialize)]
struct DeviceRow {
    id: u32,
    coords: [u32; 3],
    core: u32,
    slice: u32,
    process: u32,
}

/// The whole answer.
pub(super) fn document(view: &View<'_>) -> Value {
    let slice = view.slice;
    let devices: Vec<DeviceRow> = slice
        .list()
        .map(|device| DeviceRow {
            id: device.id,
            coords: device.coords,
            core: device.core,
            slice: device.slice,
            process: device.process,
        })
        .collect();
    json!({
        "slice": slice.to_string(),
        "generation": slice.generation().name(),
        "shape": slice.dims(),
        "wrap": slice.wrap(),
        "twisted": slice.twisted(),
        "slices": slice.slices(),
        "chips": slice.chips_per_slice() * slice.slices(),
        "devices_per_chip": slice.devices_per_chip(),
        "processes": slice.processes(),
        "chips_per_host_bounds": slice.host_bounds(),
        "bytes": view.bytes,
        "devices": devices,
        "mesh": view.mesh.as_ref().map(|mesh| nested_ids(view, mesh)),
        "axes": view.mesh.as_ref().map_or(Vec::new(), |mesh| axes(view, mesh)),
    })
}

fn nested_ids(view: &View<'_>, mesh: &MeshView) -> Value {
    fn nest(ids: &[u32], sizes: &[u32]) -> Value {
        match sizes {
            [] | [_] => ids.into(),
            [outer, rest @ ..] => ids.chunks(ids.len() / *outer as usize).map(|chunk| nest(chunk, rest)).collect(),
        }
    }
    let ids: Vec<u32> =
        mesh.mesh.ranks().iter().filter_map(|&rank| view.slice.device(rank)).map(|device| device.id).collect();
    nest(&ids, mesh.mesh.sizes())
}

fn axes(view: &View<'_>, mesh: &MeshView) -> Vec<Value> {
    let weights = traffic(&mesh.request.axes);
    mesh.reports
        .iter()
        .enumerate()
        .map(|(axis, report)| {
            let mut times = Map::new();
            let mut algorithms = Map::new();
            for collective in SHOWN {
                let prediction = report.predict(view.slice, collective, view.bytes);
                times.insert(collective.name().to_owned(), prediction.total_us().into());
                algorithms.insert(collective.name().to_owned(), estimates(&prediction));
            }
            json!({
                "name": mesh.mesh.names()[axis],
                "size": mesh.mesh.sizes()[axis],
                "kind": report.group.kind.name(),
                "uniform": report.uniform,
                "groups": view.slice.devices() / mesh.mesh.sizes()[axis],
                "extents": report.group.extents.map(|extents| extents.map(|extent| json!({
                    "count": extent.count, "stride": extent.stride, "wrap": extent.wrap,
                }))),
                "cores": report.group.cores,
                "slices": report.group.slices,
                "traffic": weights[axis],
                "talk": mesh.request.axes[axis].talk.name(),
                "us": times,
                "algorithms": algorithms,
            })
        })
        .collect()
}

fn estimates(prediction: &Prediction) -> Value {
    prediction
        .estimates
        .iter()
        .map(|estimate| {
            json!({
                "algorithm": estimate.algorithm.name(),
                "in_libtpu": estimate.algorithm.in_libtpu(),
                "us": estimate.total_us(),
                "bound": if estimate.bandwidth_bound() { "bandwidth" } else { "latency" },
            })
        })
        .collect()
}
