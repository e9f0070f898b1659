//! ICI links: who is next to whom, how far apart two chips are, and which way a message goes.
//!
//! A twisted torus is modelled as a cubic crystal lattice (Camarero, Martínez and Beivide, Lattice Graphs for High-Scale
//! Interconnection Topologies, IEEE TPDS 26(9), 2015): crossing the wrap of a short axis (length k) also moves by k along
//! every long axis (length 2k). k×k×2k is then the face-centred lattice, k×2k×2k the body-centred one; both are
//! edge-symmetric. That TPUs are wired so is an assumption: Google publishes which shapes twist and what that gains
//! (Jouppi et al., arXiv 2304.01433); the offsets were found in no text of Google's that could be read.

use crate::slice::Slice;

/// Direction along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Towards larger coordinates.
    Plus,
    /// Towards smaller coordinates.
    Minus,
}

impl Direction {
    /// Both directions.
    pub const BOTH: [Direction; 2] = [Direction::Plus, Direction::Minus];
}

/// A link in one direction, out of a chip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Link {
    /// Chip it leaves.
    pub from: [u32; 3],
    /// Chip it enters.
    pub to: [u32; 3],
    /// Axis of the port: 0 to 2.
    pub axis: usize,
    /// Side of the port.
    pub direction: Direction,
    /// Whether it crosses a wrap.
    pub wraps: bool,
}

impl Slice {
    /// The link out of a chip's port, if something is connected there.
    ///
    /// An axis of length 1 has no links; an axis of length 2 has one link between its two chips, wrap or not.
    pub fn link(&self, from: [u32; 3], axis: usize, direction: Direction) -> Option<Link> {
        let dims = self.dims();
        let length = dims[axis];
        let mut to = from;
        let inside = match direction {
            Direction::Plus => from[axis] + 1 < length,
            Direction::Minus => from[axis] > 0,
        };
        if inside {
            to[axis] = if direction == Direction::Plus { from[axis] + 1 } else { from[axis] - 1 };
            return Some(Link { from, to, axis, direction, wraps: false });
        }
        if !self.wrap()[axis] || length < 3 {
            return None;
        }
        to[axis] = if direction == Direction::Plus { 0 } else { length - 1 };
        for other in 0..3 {
            let shift = self.twist(axis, other);
            to[other] = (to[other] + shift) % dims[other];
        }
        Some(Link { from, to, axis, direction, wraps: true })
    }

    /// All links out of a chip.
    pub fn links_of(&self, from: [u32; 3]) -> impl Iterator<Item = Link> + '_ {
        (0..3).flat_map(move |axis| Direction::BOTH.into_iter().filter_map(move |side| self.link(from, axis, side)))
    }

    /// How far crossing the wrap of `axis` moves along `other`: half of a long axis' length, or nothing.
    pub fn twist(&self, axis: usize, other: usize) -> u32 {
        let dims = self.dims();
        let is_short = |axis: usize| dims.iter().any(|&dim| dim > dims[axis]);
        if self.twisted() && is_short(axis) && !is_short(other) { dims[other] / 2 } else { 0 }
    }

    /// Whether an axis closes onto itself: it wraps, and not onto another row of a twisted torus.
    pub fn wraps_straight(&self, axis: usize) -> bool {
        self.wrap()[axis] && (0..3).all(|other| self.twist(axis, other) == 0)
    }

    /// Hops between two chips of one slice.
    pub fn distance(&self, a: [u32; 3], b: [u32; 3]) -> u32 {
        if !self.twisted() {
            return (0..3).map(|axis| straight(a[axis], b[axis], self.dims()[axis], self.wrap()[axis])).sum();
        }
        self.crossings(a, b).0
    }

    /// The links of a shortest path, x first, then y, then z (libtpu's routers are dimension-ordered too).
    pub fn route(&self, a: [u32; 3], b: [u32; 3]) -> Vec<Link> {
        let mut path = Vec::new();
        let mut at = a;
        let displacement = if self.twisted() {
            self.crossings(a, b).1
        } else {
            std::array::from_fn(|axis| signed(a[axis], b[axis], self.dims()[axis], self.wrap()[axis]))
        };
        for (axis, steps) in displacement.into_iter().enumerate() {
            let direction = if steps < 0 { Direction::Minus } else { Direction::Plus };
            for _ in 0..steps.unsigned_abs() {
                let Some(link) = self.link(at, axis, direction) else { return path };
                at = link.to;
                path.push(link);
            }
        }
        path
    }

    /// Twisted distance and the signed steps per axis that reach it: the best of crossing each short wrap at most once
    /// either way.
    fn crossings(&self, a: [u32; 3], b: [u32; 3]) -> (u32, [i64; 3]) {
        let dims = self.dims().map(i64::from);
        let delta: [i64; 3] = std::array::from_fn(|axis| i64::from(b[axis]) - i64::from(a[axis]));
        let mut best = (u32::MAX, [0; 3]);
        let short: Vec<usize> = (0..3).filter(|&axis| (0..3).any(|other| self.twist(axis, other) > 0)).collect();
        let combinations = 3usize.pow(short.len() as u32);
        for combination in 0..combinations {
            let mut steps = delta;
            let mut rest = combination;
            for &axis in &short {
                let crossing = (rest % 3) as i64 - 1;
                rest /= 3;
                // Crossing +1 means leaving at the top: the walk is one length longer than the difference.
                steps[axis] += crossing * dims[axis];
                for (other, step) in steps.iter_mut().enumerate() {
                    *step -= crossing * i64::from(self.twist(axis, other));
                }
            }
            for axis in 0..3 {
                if !short.contains(&axis) {
                    let length = dims[axis];
                    steps[axis] = steps[axis].rem_euclid(length);
                    if steps[axis] * 2 > length {
                        steps[axis] -= length;
                    }
                }
            }
            let hops = steps.iter().map(|step| step.unsigned_abs() as u32).sum();
            if hops < best.0 {
                best = (hops, steps);
            }
        }
        best
    }
}

/// Hops along one untwisted axis.
pub(crate) fn straight(a: u32, b: u32, length: u32, wrap: bool) -> u32 {
    let apart = a.abs_diff(b);
    if wrap { apart.min(length - apart) } else { apart }
}

fn signed(a: u32, b: u32, length: u32, wrap: bool) -> i64 {
    let apart = i64::from(b) - i64::from(a);
    let length = i64::from(length);
    if !wrap || apart.abs() * 2 <= length {
        apart
    } else if apart > 0 {
        apart - length
    } else {
        apart + length
    }
}
