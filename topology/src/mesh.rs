//! Logical meshes: which device stands where, so that the axes that talk most get the best links.
//!
//! A mesh axis takes a factor of each physical axis (x, y, z, the cores of a chip, the slices). Which factors, and which
//! axis gets the adjacent chips of a shared physical axis, is chosen by predicted time: the sum over mesh axes of
//! traffic × time of the axis' collective. For a given order of nearness the choice is exact (dynamic programming over
//! what is left of the physical axes); orders are all tried up to four axes, and the sensible ones beyond.

use std::collections::HashMap;

use crate::{
    cost::{self, Collective, Footprint},
    error::TopologyError,
    group::{Extent, Group, check_ranks, classify_checked, close_rings},
    loads::Loads,
    ring::box_cycle,
    slice::Slice,
};

/// Physical axes that a mesh axis can take part of: x, y, z and the cores of a chip.
const PLACES: usize = 4;
/// Axes up to which every order of nearness is tried.
const ALL_ORDERS: usize = 4;
/// An axis talks this many times as much as the one before it, if nothing is said: the last axis talks most, as in
/// JAX's meshes and in (data, tensor) meshes of PyTorch.
pub const TRAFFIC_STEP: f64 = 4.0;
/// Bytes per collective if nothing is said.
pub const DEFAULT_BYTES: u64 = 64 << 20;

/// One axis of a mesh as asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size: i64,
    /// How much it talks, relative to the others; by default [`TRAFFIC_STEP`] times the axis before it.
    pub traffic: Option<f64>,
    /// The collective it mostly runs.
    pub talk: Collective,
}

impl Axis {
    /// An axis with default traffic that runs all-reduces.
    pub fn new(name: impl Into<String>, size: i64) -> Axis {
        Axis { name: name.into(), size, traffic: None, talk: Collective::AllReduce }
    }
}

/// A mesh as asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct MeshRequest {
    /// The axes, outermost first.
    pub axes: Vec<Axis>,
    /// Bytes of a collective: whether latency or bandwidth counts.
    pub bytes: u64,
    /// Along which axes the slices lie: (axis, slices along it). Default: as far out as they fit.
    pub dcn: Option<Vec<(String, u32)>>,
}

impl MeshRequest {
    /// A request with default traffic and bytes.
    pub fn new(axes: Vec<Axis>) -> MeshRequest {
        MeshRequest { axes, bytes: DEFAULT_BYTES, dcn: None }
    }
}

/// A mesh with a rank at every place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mesh {
    names: Vec<String>,
    sizes: Vec<u32>,
    ranks: Vec<u32>,
}

impl Mesh {
    /// A mesh of given ranks, row-major: the last axis is the fastest.
    pub fn from_ranks(slice: &Slice, axes: &[Axis], ranks: Vec<u32>) -> Result<Mesh, TopologyError> {
        let sizes = check_axes(slice, axes)?;
        check_ranks(slice, &ranks)?;
        if ranks.len() != slice.devices() as usize {
            return Err(mesh_size(slice, axes));
        }
        Ok(Mesh { names: axes.iter().map(|axis| axis.name.clone()).collect(), sizes, ranks })
    }

    /// Axis names, outermost first.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Axis sizes, outermost first.
    pub fn sizes(&self) -> &[u32] {
        &self.sizes
    }

    /// Ranks, row-major.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// The groups along an axis, one after the other: replica groups that cover every device.
    pub fn groups(&self, axis: usize) -> Groups {
        let size = self.sizes[axis] as usize;
        let inner: usize = self.sizes[axis + 1..].iter().map(|&size| size as usize).product();
        let mut ranks = Vec::with_capacity(self.ranks.len());
        for block in self.ranks.chunks_exact(size * inner) {
            for offset in 0..inner {
                ranks.extend((0..size).map(|index| block[index * inner + offset]));
            }
        }
        Groups { ranks, size }
    }

    /// What the groups along an axis look like and take.
    pub fn report(&self, slice: &Slice, axis: usize) -> Result<AxisReport, TopologyError> {
        let groups = self.groups(axis);
        let mut shapes = groups.iter().map(|group| classify_checked(slice, group));
        let Some(first) = shapes.next() else { return Err(TopologyError::EmptyGroup) };
        let footprint = Footprint::of(&first);
        let uniform = footprint.is_some() && shapes.all(|shape| Footprint::of(&shape) == footprint);
        let shape = match footprint.filter(|_| uniform) {
            Some(footprint) => AxisShape::Regular(footprint),
            None => {
                let all: Vec<Vec<u32>> = groups.iter().map(<[u32]>::to_vec).collect();
                AxisShape::Irregular(Loads::measure(slice, &all)?)
            }
        };
        Ok(AxisReport { group: first, uniform, shape })
    }
}

/// Equal groups in one flat list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Groups {
    ranks: Vec<u32>,
    size: usize,
}

impl Groups {
    /// Ranks of a group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Group after group.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        self.ranks.chunks_exact(self.size)
    }
}

/// The groups of one mesh axis.
pub struct AxisReport {
    /// The first group's shape.
    pub group: Group,
    /// Whether all groups are alike.
    pub uniform: bool,
    shape: AxisShape,
}

enum AxisShape {
    Regular(Footprint),
    Irregular(Loads),
}

impl AxisReport {
    /// Predicted time of a collective along the axis, microseconds.
    pub fn predict(&self, slice: &Slice, collective: Collective, bytes: u64) -> cost::Prediction {
        match &self.shape {
            AxisShape::Regular(footprint) => cost::predict_footprint(slice, footprint, collective, bytes),
            AxisShape::Irregular(loads) => {
                cost::Prediction { estimates: vec![loads.estimate(slice, collective, bytes)] }
            }
        }
    }
}

/// Traffic of each axis: as asked, or by the default.
pub fn traffic(axes: &[Axis]) -> Vec<f64> {
    axes.iter().enumerate().map(|(index, axis)| axis.traffic.unwrap_or(TRAFFIC_STEP.powi(index as i32))).collect()
}

/// Predicted cost of a mesh: the sum over its axes of traffic × time of the axis' collective, microseconds.
pub fn score(slice: &Slice, request: &MeshRequest, mesh: &Mesh) -> Result<f64, TopologyError> {
    let mut total = 0.0;
    for (index, (axis, weight)) in request.axes.iter().zip(traffic(&request.axes)).enumerate() {
        total += weight * mesh.report(slice, index)?.predict(slice, axis.talk, request.bytes).total_us();
    }
    Ok(total)
}

/// Lays the mesh over the slice's devices.
pub fn assign(slice: &Slice, request: &MeshRequest) -> Result<Mesh, TopologyError> {
    let sizes = check_axes(slice, &request.axes)?;
    let across = dcn_factors(slice, request, &sizes)?;
    let inner: Vec<u32> = sizes.iter().zip(&across).map(|(size, slices)| size / slices).collect();
    let plan = search(slice, request, &inner, &across);
    let ranks = fill(slice, &sizes, &across, &inner, &plan);
    Ok(Mesh { names: request.axes.iter().map(|axis| axis.name.clone()).collect(), sizes, ranks })
}

/// What one mesh axis takes of each place: how many, and how far apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Share {
    counts: [u32; PLACES],
    strides: [u32; PLACES],
}

fn places(slice: &Slice) -> [u32; PLACES] {
    let [x, y, z] = slice.dims();
    [x, y, z, slice.devices_per_chip()]
}

fn check_axes(slice: &Slice, axes: &[Axis]) -> Result<Vec<u32>, TopologyError> {
    if axes.is_empty() {
        return Err(TopologyError::BadAxisSize { name: String::new(), size: 0 });
    }
    let mut sizes = Vec::with_capacity(axes.len());
    for (index, axis) in axes.iter().enumerate() {
        if axis.size < 1 {
            return Err(TopologyError::BadAxisSize { name: axis.name.clone(), size: axis.size });
        }
        if axes[..index].iter().any(|other| other.name == axis.name) {
            return Err(TopologyError::DuplicateAxis { name: axis.name.clone() });
        }
        if axis.traffic.is_some_and(|traffic| !traffic.is_finite() || traffic < 0.0) {
            return Err(TopologyError::BadTraffic {
                name: axis.name.clone(),
                value: axis.traffic.unwrap_or_default().to_string(),
            });
        }
        match u32::try_from(axis.size) {
            Ok(size) => sizes.push(size),
            Err(_) => return Err(mesh_size(slice, axes)),
        }
    }
    let product = sizes.iter().try_fold(1u32, |product, &size| product.checked_mul(size));
    if product != Some(slice.devices()) {
        return Err(mesh_size(slice, axes));
    }
    Ok(sizes)
}

fn mesh_size(slice: &Slice, axes: &[Axis]) -> TopologyError {
    let devices = u64::from(slice.devices());
    let text = |sizes: &[u64]| {
        let parts: Vec<String> = axes.iter().zip(sizes).map(|(axis, size)| format!("{}={size}", axis.name)).collect();
        parts.join(",")
    };
    let sizes: Vec<u64> = axes.iter().map(|axis| axis.size.unsigned_abs()).collect();
    // Change one axis so that the product fits, outermost first; else the outermost takes what divides.
    let mut nearest = Vec::new();
    for index in 0..sizes.len() {
        let others = sizes.iter().enumerate().filter(|&(other, _)| other != index);
        let product = others.fold(1u64, |product, (_, &size)| product.saturating_mul(size));
        if product > 0 && devices % product == 0 {
            let mut fitted = sizes.clone();
            fitted[index] = devices / product;
            nearest.push(text(&fitted));
        }
    }
    if nearest.is_empty() {
        let mut fitted = vec![1; sizes.len()];
        let mut left = devices;
        for index in (1..sizes.len()).rev() {
            let size = (1..=sizes[index].min(left)).rev().find(|&size| left % size == 0).unwrap_or(1);
            fitted[index] = size;
            left /= size;
        }
        fitted[0] = left;
        nearest.push(text(&fitted));
    }
    nearest.truncate(3);
    TopologyError::MeshSize {
        mesh: text(&sizes),
        product: sizes.iter().fold(1u64, |product, &size| product.saturating_mul(size)),
        devices,
        nearest,
    }
}

/// How many slices lie along each axis.
fn dcn_factors(slice: &Slice, request: &MeshRequest, sizes: &[u32]) -> Result<Vec<u32>, TopologyError> {
    let slices = slice.slices();
    let mut factors = vec![1u32; sizes.len()];
    let fail = |reason| {
        let parts: Vec<String> = request.axes.iter().map(|axis| format!("{}={}", axis.name, axis.size)).collect();
        TopologyError::DcnAxes { slices, axes: parts.join(","), reason }
    };
    match &request.dcn {
        Some(asked) => {
            for (name, count) in asked {
                let index = request.axes.iter().position(|axis| axis.name == *name).ok_or_else(|| {
                    TopologyError::UnknownAxis {
                        name: name.clone(),
                        axes: request.axes.iter().map(|axis| axis.name.clone()).collect(),
                    }
                })?;
                if *count == 0 || !sizes[index].is_multiple_of(*count) {
                    return Err(fail("the slices along an axis must divide its size"));
                }
                factors[index] = *count;
            }
            let product = factors.iter().try_fold(1u32, |product, &factor| product.checked_mul(factor));
            if product != Some(slices) {
                return Err(fail("the slices along the axes must multiply to the number of slices"));
            }
        }
        None => {
            let mut left = slices;
            for (factor, &size) in factors.iter_mut().zip(sizes) {
                *factor = gcd(left, size);
                left /= *factor;
            }
            if left != 1 {
                return Err(fail("the sizes of the axes don't share the factors of the number of slices"));
            }
        }
    }
    Ok(factors)
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The footprint of a share.
fn footprint(slice: &Slice, share: &Share, slices: u32) -> Footprint {
    let mut extents: [Extent; 3] = std::array::from_fn(|axis| Extent {
        start: 0,
        count: share.counts[axis],
        stride: if share.counts[axis] > 1 { share.strides[axis] } else { 1 },
        wrap: false,
    });
    close_rings(slice, &mut extents);
    Footprint { extents, cores: share.counts[3], slices }
}

/// The best shares found, one per axis.
fn search(slice: &Slice, request: &MeshRequest, inner: &[u32], across: &[u32]) -> Vec<Share> {
    let weights = traffic(&request.axes);
    let busy: Vec<usize> = (0..inner.len()).filter(|&axis| inner[axis] > 1).collect();
    let idle = Share { counts: [1; PLACES], strides: [1; PLACES] };
    let mut best = (f64::INFINITY, vec![idle; inner.len()]);
    let mut times: HashMap<(usize, Share), f64> = HashMap::new();
    for order in orders(&busy, &weights) {
        let mut time = |axis: usize, share: Share| {
            *times.entry((axis, share)).or_insert_with(|| {
                let footprint = footprint(slice, &share, across[axis]);
                let us = cost::fastest_us(slice, &footprint, request.axes[axis].talk, request.bytes);
                // Axes that are said to be idle are still told apart, and of equal times the one over whole rings wins:
                // compilers do best on unsplit axes.
                let split = footprint.extents.iter().filter(|extent| extent.count > 1 && !extent.wrap).count();
                (weights[axis] + 1e-9) * us * (1.0 + 1e-9 * split as f64)
            })
        };
        if let Some((total, shares)) = cheapest(places(slice), inner, &order, best.0, &mut time)
            && total < best.0
        {
            best.0 = total;
            for (&axis, share) in order.iter().zip(shares) {
                best.1[axis] = share;
            }
        }
    }
    best.1
}

impl std::hash::Hash for Share {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.counts.hash(state);
        self.strides.hash(state);
    }
}

/// Orders of nearness to try: who takes adjacent chips first.
fn orders(busy: &[usize], weights: &[f64]) -> Vec<Vec<usize>> {
    let mut hottest_first = busy.to_vec();
    hottest_first.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]).then(b.cmp(&a)));
    if busy.len() > ALL_ORDERS {
        let inward: Vec<usize> = busy.iter().rev().copied().collect();
        let coldest_first: Vec<usize> = hottest_first.iter().rev().copied().collect();
        let mut orders = vec![hottest_first, inward, coldest_first, busy.to_vec()];
        orders.dedup();
        return orders;
    }
    let mut orders = vec![Vec::new()];
    for &axis in hottest_first.iter().rev() {
        orders = orders
            .iter()
            .flat_map(|order: &Vec<usize>| {
                (0..=order.len()).map(move |at| {
                    let mut longer = order.clone();
                    longer.insert(at, axis);
                    longer
                })
            })
            .collect();
    }
    orders
}

/// A partial plan: what is left, what it cost, and how it was reached.
#[derive(Clone)]
struct State {
    cost: f64,
    from: u32,
    share: Share,
}

/// The cheapest shares for axes that take adjacent chips in `order`, if cheaper than `limit`.
fn cheapest(
    places: [u32; PLACES],
    inner: &[u32],
    order: &[usize],
    limit: f64,
    time: &mut impl FnMut(usize, Share) -> f64,
) -> Option<(f64, Vec<Share>)> {
    let root = Share { counts: [1; PLACES], strides: [1; PLACES] };
    let mut stages: Vec<Vec<([u32; PLACES], State)>> = vec![vec![(places, State { cost: 0.0, from: 0, share: root })]];
    for (depth, &axis) in order.iter().enumerate() {
        let last = depth + 1 == order.len();
        let mut index: HashMap<[u32; PLACES], usize> = HashMap::new();
        let mut next: Vec<([u32; PLACES], State)> = Vec::new();
        let stage = stages.last()?;
        for (position, (left, state)) in stage.iter().enumerate() {
            let strides = std::array::from_fn(|place| places[place] / left[place]);
            each_share(*left, inner[axis], &mut |counts| {
                let after: [u32; PLACES] = std::array::from_fn(|place| left[place] / counts[place]);
                if last && after != [1; PLACES] {
                    return;
                }
                let share = Share { counts, strides };
                let cost = state.cost + time(axis, share);
                if cost >= limit {
                    return;
                }
                let state = State { cost, from: position as u32, share };
                match index.get(&after) {
                    Some(&at) if next[at].1.cost <= cost => {}
                    Some(&at) => next[at].1 = state,
                    None => {
                        index.insert(after, next.len());
                        next.push((after, state));
                    }
                }
            });
        }
        stages.push(next);
    }
    let mut at = stages.last()?.iter().position(|(left, _)| *left == [1; PLACES])?;
    let total = stages.last()?[at].1.cost;
    let mut shares = Vec::with_capacity(order.len());
    for stage in stages[1..].iter().rev() {
        let state = &stage[at].1;
        shares.push(state.share);
        at = state.from as usize;
    }
    shares.reverse();
    Some((total, shares))
}

/// Calls `found` with every way to take `size` as factors of what is left.
fn each_share(left: [u32; PLACES], size: u32, found: &mut impl FnMut([u32; PLACES])) {
    fn take(
        place: usize,
        left: &[u32; PLACES],
        size: u32,
        counts: &mut [u32; PLACES],
        found: &mut impl FnMut([u32; PLACES]),
    ) {
        if place + 1 == PLACES {
            if left[place].is_multiple_of(size) {
                counts[place] = size;
                found(*counts);
            }
            return;
        }
        let common = gcd(left[place], size);
        for count in (1..=common).filter(|count| common.is_multiple_of(*count)) {
            counts[place] = count;
            take(place + 1, left, size / count, counts, found);
        }
    }
    take(0, &left, size, &mut [1; PLACES], found);
}

/// Ranks, row-major, of a plan.
///
/// Inside an axis the members follow a ring through its chips, so that neighbours in the mesh are neighbours on links
/// wherever the box has a cycle; the slices are outermost, the cores of a chip innermost.
fn fill(slice: &Slice, sizes: &[u32], across: &[u32], inner: &[u32], plan: &[Share]) -> Vec<u32> {
    // Per axis and index: what it adds to slice, x, y, z, core.
    let mut steps: Vec<Vec<[u32; 5]>> = Vec::with_capacity(sizes.len());
    let mut slice_stride = slice.slices();
    for (axis, share) in plan.iter().enumerate() {
        slice_stride /= across[axis];
        let shape = footprint(slice, share, 1);
        let counts = [share.counts[0], share.counts[1], share.counts[2]];
        let wraps = std::array::from_fn(|place| shape.extents[place].wrap && slice.wraps_straight(place));
        // A lone line keeps its order: its ends are no neighbours, and folding it would part the others.
        let cells = if counts.iter().filter(|&&count| count > 1).count() <= 1 {
            let longest = counts.iter().copied().max().unwrap_or(1);
            (0..longest).map(|value| counts.map(|count| if count > 1 { value } else { 0 })).collect()
        } else {
            box_cycle(counts, wraps).0
        };
        let mut axis_steps = Vec::with_capacity(sizes[axis] as usize);
        for by_slice in 0..across[axis] {
            for cell in &cells {
                for core in 0..share.counts[3] {
                    axis_steps.push([
                        by_slice * slice_stride,
                        cell[0] * share.strides[0],
                        cell[1] * share.strides[1],
                        cell[2] * share.strides[2],
                        core * share.strides[3],
                    ]);
                }
            }
        }
        debug_assert_eq!(axis_steps.len() as u32, across[axis] * inner[axis]);
        steps.push(axis_steps);
    }
    let mut ranks = Vec::with_capacity(slice.devices() as usize);
    let mut index = vec![0usize; sizes.len()];
    loop {
        let mut at = [0u32; 5];
        for (axis, &place) in index.iter().enumerate() {
            for (sum, step) in at.iter_mut().zip(steps[axis][place]) {
                *sum += step;
            }
        }
        // The factors of each place multiply to its length, so the place exists.
        ranks.extend(slice.rank_at(at[0], [at[1], at[2], at[3]], at[4]));
        let mut axis = sizes.len();
        loop {
            if axis == 0 {
                return ranks;
            }
            axis -= 1;
            index[axis] += 1;
            if index[axis] < sizes[axis] as usize {
                break;
            }
            index[axis] = 0;
        }
    }
}
