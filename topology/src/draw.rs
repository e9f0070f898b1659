//! A slice drawn as text, and which mesh axis each link serves (for other drawings).

use std::fmt::Write;

use crate::{
    link::{Direction, Link},
    mesh::Mesh,
    slice::Slice,
};

/// ANSI colours of mesh axes, outermost first; they repeat after six.
const COLOURS: [u8; 6] = [31, 34, 32, 35, 33, 36];

/// A slice with a mesh over it.
pub struct Drawing<'a> {
    slice: &'a Slice,
    mesh: Option<&'a Mesh>,
    /// Position in the mesh of each rank.
    place: Vec<u32>,
}

/// How to draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextOptions {
    /// Layers (z) drawn of each slice before the rest is summed up.
    pub layers: u32,
    /// Whether to colour mesh axes with ANSI escapes.
    pub colour: bool,
}

impl<'a> Drawing<'a> {
    /// Prepares a drawing.
    pub fn new(slice: &'a Slice, mesh: Option<&'a Mesh>) -> Drawing<'a> {
        let mut place = Vec::new();
        if let Some(mesh) = mesh {
            place = vec![0; mesh.ranks().len()];
            for (position, &rank) in mesh.ranks().iter().enumerate() {
                place[rank as usize] = position as u32;
            }
        }
        Drawing { slice, mesh, place }
    }

    /// Coordinates of a rank in the mesh, outermost first; empty without a mesh.
    pub fn mesh_coords(&self, rank: u32) -> Vec<u32> {
        let Some(mesh) = self.mesh else { return Vec::new() };
        let mut left = self.place[rank as usize];
        let mut coords = vec![0; mesh.sizes().len()];
        for (coord, &size) in coords.iter_mut().zip(mesh.sizes()).rev() {
            *coord = left % size;
            left /= size;
        }
        coords
    }

    /// The mesh axis that a link serves: the only one in which its ends differ (between devices of the same core).
    pub fn axis_of(&self, slice_index: u32, link: &Link) -> Option<usize> {
        self.mesh?;
        let from = self.mesh_coords(self.slice.rank_at(slice_index, link.from, 0)?);
        let to = self.mesh_coords(self.slice.rank_at(slice_index, link.to, 0)?);
        let mut differ = (0..from.len()).filter(|&axis| from[axis] != to[axis]);
        let axis = differ.next()?;
        differ.next().is_none().then_some(axis)
    }

    /// Whether both ends of a link are on one host.
    pub fn on_one_host(&self, link: &Link) -> bool {
        let host =
            |chip: [u32; 3]| -> [u32; 3] { std::array::from_fn(|axis| chip[axis] / self.slice.host_bounds()[axis]) };
        host(link.from) == host(link.to)
    }

    /// What stands at a chip: mesh coordinates of its devices, or their ids.
    pub fn label(&self, slice_index: u32, chip: [u32; 3]) -> String {
        let mut parts = Vec::new();
        for core in 0..self.slice.devices_per_chip() {
            let Some(rank) = self.slice.rank_at(slice_index, chip, core) else { continue };
            if self.mesh.is_some() {
                let coords: Vec<String> = self.mesh_coords(rank).iter().map(u32::to_string).collect();
                parts.push(coords.join(","));
            } else if let Some(device) = self.slice.device(rank) {
                parts.push(device.id.to_string());
            }
        }
        parts.join("|")
    }

    /// Letter that stands for a mesh axis on links: its initial, or its number if initials clash.
    pub fn letter(&self, axis: usize) -> char {
        let Some(mesh) = self.mesh else { return ' ' };
        let initial = |name: &String| name.chars().next();
        let own = initial(&mesh.names()[axis]);
        let clash = mesh.names().iter().enumerate().any(|(other, name)| other != axis && initial(name) == own);
        match own {
            Some(letter) if !clash => letter,
            _ => char::from_digit(axis as u32 % 36, 36).unwrap_or('?'),
        }
    }

    /// The slice layer by layer: chips with what stands on them, double lines inside a host, single between hosts, `↻` where
    /// a link wraps, and on each link the letter of the mesh axis that it serves (`·` if it serves none alone).
    pub fn text(&self, options: &TextOptions) -> String {
        let [_, _, depth] = self.slice.dims();
        let mut out = String::new();
        let width = self.widest_label();
        for slice_index in 0..self.slice.slices() {
            if self.slice.slices() > 1 {
                let _ = writeln!(out, "slice {slice_index}");
            }
            for z in 0..depth.min(options.layers) {
                if depth > 1 {
                    let _ = writeln!(out, "z={z}{}", self.upward(slice_index, z, options));
                }
                self.layer(&mut out, slice_index, z, width, options);
            }
            if depth > options.layers {
                let _ = writeln!(out, "… {} more layers", depth - options.layers);
            }
        }
        out
    }

    fn widest_label(&self) -> usize {
        let [x, y, z] = self.slice.dims();
        // Labels grow with coordinates: the last chips have the widest.
        let mut widest = 1;
        for slice_index in 0..self.slice.slices() {
            for chip in [[x - 1, y - 1, z - 1], [0, 0, 0]] {
                widest = widest.max(self.label(slice_index, chip).len());
            }
        }
        if let Some(mesh) = self.mesh {
            let digits: usize = mesh.sizes().iter().map(|&size| (size - 1).max(1).ilog10() as usize + 1).sum();
            widest = widest.max((digits + mesh.sizes().len() - 1) * self.slice.devices_per_chip() as usize + 1);
        }
        widest
    }

    fn paint(&self, axis: Option<usize>, options: &TextOptions) -> String {
        match axis {
            None if self.mesh.is_none() => String::new(),
            None => "·".to_owned(),
            Some(axis) if options.colour => {
                format!("\u{1b}[{}m{}\u{1b}[0m", COLOURS[axis % COLOURS.len()], self.letter(axis))
            }
            Some(axis) => self.letter(axis).to_string(),
        }
    }

    /// Which mesh axes the links from a layer to the next serve.
    fn upward(&self, slice_index: u32, z: u32, options: &TextOptions) -> String {
        let [width, height, _] = self.slice.dims();
        let mut axes: Vec<Option<usize>> = Vec::new();
        let mut wraps = false;
        for y in 0..height {
            for x in 0..width {
                if let Some(link) = self.slice.link([x, y, z], 2, Direction::Plus) {
                    axes.push(self.axis_of(slice_index, &link));
                    wraps |= link.wraps;
                }
            }
        }
        if axes.is_empty() {
            return String::new();
        }
        axes.sort_unstable();
        axes.dedup();
        let to = if wraps { " (↻ to z=0" } else { " (up" };
        let letters: Vec<String> = axes.into_iter().map(|axis| self.paint(axis, options)).collect();
        if self.mesh.is_some() { format!("{to}: {})", letters.join(" ")) } else { format!("{to})") }
    }

    fn layer(&self, out: &mut String, slice_index: u32, z: u32, width: usize, options: &TextOptions) {
        let [columns, rows, _] = self.slice.dims();
        for y in 0..rows {
            let mut line = String::new();
            let mut below = String::new();
            for x in 0..columns {
                let chip = [x, y, z];
                let _ = write!(line, "[{:^width$}]", self.label(slice_index, chip));
                match self.slice.link(chip, 0, Direction::Plus) {
                    Some(link) => {
                        let bar = if link.wraps {
                            '↻'
                        } else if self.on_one_host(&link) {
                            '═'
                        } else {
                            '─'
                        };
                        let letter = self.paint(self.axis_of(slice_index, &link), options);
                        let middle = if letter.is_empty() { bar.to_string() } else { letter };
                        let _ = write!(line, "{bar}{middle}{}", if link.wraps { ' ' } else { bar });
                    }
                    None => line.push_str("   "),
                }
                match self.slice.link(chip, 1, Direction::Plus) {
                    Some(link) => {
                        let bar = if link.wraps {
                            '↻'
                        } else if self.on_one_host(&link) {
                            '║'
                        } else {
                            '│'
                        };
                        let letter = self.paint(self.axis_of(slice_index, &link), options);
                        let left = width / 2;
                        let used = left + 1 + usize::from(!letter.is_empty());
                        let _ = write!(
                            below,
                            "{:left$} {bar}{letter}{:rest$}",
                            "",
                            "",
                            rest = (width + 5 - 1).saturating_sub(used)
                        );
                    }
                    None => {
                        let _ = write!(below, "{:1$}", "", width + 5);
                    }
                }
            }
            let _ = writeln!(out, "  {}", line.trim_end());
            if !below.trim().is_empty() {
                let _ = writeln!(out, "  {}", below.trim_end());
            }
        }
    }
}
