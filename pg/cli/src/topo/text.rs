//! `podring topo` as text.

use std::fmt::Write;

use podring_topology::{
    draw::{Drawing, TextOptions},
    group::{Group, GroupKind},
    mesh::traffic,
};

use super::{MeshView, SHOWN, View};

/// Devices up to which the table is printed unasked.
const SHORT_TABLE: u32 = 16;

/// The whole page.
pub(super) fn page(view: &View<'_>, layers: u32, colour: bool, all_devices: bool) -> String {
    let slice = view.slice;
    let mut out = String::new();
    let plural = |count: u32, thing: &str| format!("{count} {thing}{}", if count == 1 { "" } else { "s" });
    let bounds = slice.host_bounds().map(|bound| bound.to_string()).join("x");
    let _ = writeln!(
        out,
        "{slice}: {}, {}, {} of {bounds} chips",
        plural(slice.chips_per_slice() * slice.slices(), "chip"),
        plural(slice.devices(), "device"),
        plural(slice.processes(), "host"),
    );
    let _ = writeln!(out, "{}", links(view));
    let drawing = Drawing::new(slice, view.mesh.as_ref().map(|mesh| &mesh.mesh));
    let what = if view.mesh.is_some() { "place in the mesh" } else { "device id" };
    let _ = writeln!(out, "\n[{what}]  ═ inside a host  ─ between hosts  ↻ wraps{}", legend(view, &drawing));
    out.push_str(&drawing.text(&TextOptions { layers, colour }));
    if let Some(mesh) = &view.mesh {
        out.push('\n');
        axes(&mut out, view, mesh);
    }
    out.push('\n');
    if all_devices || slice.devices() <= SHORT_TABLE {
        devices(&mut out, view, &drawing);
    } else {
        let _ = writeln!(out, "{} devices; --devices lists them.", slice.devices());
    }
    out
}

fn links(view: &View<'_>) -> String {
    let slice = view.slice;
    let rates = slice.generation().rates();
    let wrapped: String =
        ["x", "y", "z"].into_iter().zip(slice.wrap()).filter(|(_, wrap)| *wrap).map(|(axis, _)| axis).collect();
    let shape = match (slice.twisted(), wrapped.as_str()) {
        (true, _) => "twisted torus".to_owned(),
        (false, "") => "mesh, no wrap".to_owned(),
        (false, axes) => format!("torus, {} wrap", axes.chars().map(String::from).collect::<Vec<_>>().join(", ")),
    };
    let mut line = format!(
        "{}-D {shape}; {} links a chip, {:.0} GB/s each way, {:.0} us a hop",
        slice.generation().dimensions(),
        rates.links_per_chip.value,
        rates.link.value / 1e9,
        rates.hop.value,
    );
    if slice.slices() > 1 {
        let _ = write!(line, "; {} slices over DCN, {:.1} GB/s a chip", slice.slices(), rates.dcn.value / 1e9);
    }
    line
}

fn legend(view: &View<'_>, drawing: &Drawing<'_>) -> String {
    let Some(mesh) = &view.mesh else { return String::new() };
    let names = mesh.mesh.names().iter().enumerate();
    names.fold(String::new(), |mut text, (axis, name)| {
        let _ = write!(text, "  {} {name}", drawing.letter(axis));
        text
    })
}

fn shape_of(group: &Group) -> String {
    let Some(extents) = group.extents else { return "-".to_owned() };
    let mut parts: Vec<String> = ["x", "y", "z"]
        .into_iter()
        .zip(extents)
        .filter(|(_, extent)| extent.count > 1)
        .map(|(axis, extent)| {
            let stride = if extent.stride > 1 { format!("/{}", extent.stride) } else { String::new() };
            format!("{axis}{}{stride}{}", extent.count, if extent.wrap { "↻" } else { "" })
        })
        .collect();
    if group.cores > 1 {
        parts.push(format!("cores{}", group.cores));
    }
    if group.slices > 1 {
        parts.push(format!("slices{}", group.slices));
    }
    if parts.is_empty() { "-".to_owned() } else { parts.join(" ") }
}

fn axes(out: &mut String, view: &View<'_>, mesh: &MeshView) {
    let weights = traffic(&mesh.request.axes);
    let mut rows: Vec<Vec<String>> =
        vec![["axis", "size", "groups", "kind", "over", "traffic"].map(str::to_owned).into_iter().collect()];
    rows[0].extend(SHOWN.map(|collective| collective.name().to_owned()));
    for (axis, report) in mesh.reports.iter().enumerate() {
        let kind = if report.uniform { report.group.kind } else { GroupKind::Irregular };
        let mut row = vec![
            mesh.mesh.names()[axis].clone(),
            mesh.mesh.sizes()[axis].to_string(),
            (view.slice.devices() / mesh.mesh.sizes()[axis]).to_string(),
            kind.name().to_owned(),
            shape_of(&report.group),
            weights[axis].to_string(),
        ];
        row.extend(SHOWN.map(|collective| {
            let time = report.predict(view.slice, collective, view.bytes).total_us();
            if time < 100.0 { format!("{time:.1}") } else { format!("{time:.0}") }
        }));
        rows.push(row);
    }
    let _ = writeln!(out, "predicted microseconds at {} bytes a rank, every group at once:", view.bytes);
    table(out, &rows, 6);
}

fn devices(out: &mut String, view: &View<'_>, drawing: &Drawing<'_>) {
    let mut rows: Vec<Vec<String>> =
        vec![["rank", "id", "coords", "core", "slice", "process"].map(str::to_owned).into_iter().collect()];
    if view.mesh.is_some() {
        rows[0].push("mesh".to_owned());
    }
    let join = |numbers: &[u32]| numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    for (rank, device) in view.slice.list().enumerate() {
        let mut row = vec![
            rank.to_string(),
            device.id.to_string(),
            join(&device.coords),
            device.core.to_string(),
            device.slice.to_string(),
            device.process.to_string(),
        ];
        if view.mesh.is_some() {
            row.push(join(&drawing.mesh_coords(rank as u32)));
        }
        rows.push(row);
    }
    table(out, &rows, 0);
}

/// Aligned columns; those from `right` on to the right.
fn table(out: &mut String, rows: &[Vec<String>], right: usize) {
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> =
        (0..columns).map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)).collect();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            let _ = if column >= right { write!(line, "  {cell:>width$}") } else { write!(line, "  {cell:<width$}") };
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
}
