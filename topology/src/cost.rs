//! Predicted time of a collective on a group, by algorithm.
//!
//! Every device of the slice is taken to run the same collective at once, each in its own group, as SPMD programs do:
//! groups that interleave share their links.
//!
//! Notation: V bytes, P chips of the group, e the members along an axis, t their stride, b the rate of a link in one
//! direction (`constants::Rates::link` × `achieved`), m groups per chip (devices per chip ÷ devices of the group on a
//! chip), C devices per chip.
//!
//! - **Ring / bucket all-gather** (Austin et al., How to Scale Your Model, part 3, "AllGather"; Sack and Gropp, Collective
//!   algorithms for multiported torus networks, ACM TOPC 1(2), 2015): max(Σ hops · hop latency, V(1−1/P)·m / Σ rate) with
//!   rate = 2b/t on an axis that wraps and b/t on one that doesn't (an end chip has one link in), hops = ⌊e/2⌋·t or
//!   (e−1)·t. Reduce-scatter is its mirror; all-reduce is both, one after the other.
//! - **All-to-all**: dimension-ordered routes; the busiest link of an axis carries V·C·t·d/2 with d the mean distance
//!   round a ring (e/4 for even e), and V·C·t·e/4 across the middle of a line (ibid., "AllToAll": a quarter of the
//!   all-gather on a ring). On a whole twisted torus, which is edge-symmetric: V·C·mean distance / 6.
//! - **Swing** (De Sensi et al., Swing: Short-cutting Rings for Higher Bandwidth Allreduce, NSDI 2024, arXiv
//!   2401.09356): step s swaps with the peer δ(s) = |1−(−2)^(s+1)|/3 away, 2D mirrored copies on a D-dimensional torus.
//!   libtpu does not compile it; it is shown as what a schedule of collective-permutes could reach.
//!
//! One fixed launch cost is added per collective. `bytes` follows nccl-tests: the larger of the buffers of one rank
//! (all-gather: output; reduce-scatter: input).

use crate::{
    constants::Rates,
    error::TopologyError,
    group::{Extent, Group, check_ranks, classify_checked},
    loads::Loads,
    slice::Slice,
};

/// What a group does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets every rank's shard.
    AllGather,
    /// Every rank gets its shard of the sum.
    ReduceScatter,
    /// Every rank gets the sum.
    AllReduce,
    /// Every rank sends a different part to each.
    AllToAll,
    /// One rank's buffer to all.
    Broadcast,
    /// The sum to one rank.
    Reduce,
    /// Every rank's shard to one rank.
    Gather,
    /// One rank's shards to each.
    Scatter,
    /// Every rank sends its buffer to the next of the ring.
    Permute,
}

impl Collective {
    /// All of them.
    pub const ALL: [Collective; 9] = [
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllReduce,
        Collective::AllToAll,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::Gather,
        Collective::Scatter,
        Collective::Permute,
    ];

    /// The name on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllGather => "allgather",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::AllReduce => "allreduce",
            Collective::AllToAll => "all-to-all",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::Permute => "permute",
        }
    }
}

/// How it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// One ring (or line) through all chips.
    Ring,
    /// A ring per axis, all axes busy at once; libtpu's UniDirectionNDRing.
    Bucket,
    /// Swing, bandwidth-optimal.
    Swing,
    /// Swing, latency-optimal.
    SwingLatency,
    /// Every message straight to its target.
    Direct,
    /// Inside the slices first, then across the data-centre network.
    Hierarchical,
    /// Measured on the links one by one, for groups without a formula.
    LinkLoad,
}

impl Algorithm {
    /// The name in text and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::Bucket => "bucket",
            Algorithm::Swing => "swing",
            Algorithm::SwingLatency => "swing-latency",
            Algorithm::Direct => "direct",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::LinkLoad => "link-load",
        }
    }

    /// Whether libtpu compiles it.
    pub const fn in_libtpu(self) -> bool {
        !matches!(self, Algorithm::Swing | Algorithm::SwingLatency)
    }
}

/// Time of one algorithm, microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Which.
    pub algorithm: Algorithm,
    /// Fixed cost.
    pub launch_us: f64,
    /// Time if bytes were free.
    pub latency_us: f64,
    /// Time if hops were free.
    pub bandwidth_us: f64,
}

impl Estimate {
    /// Launch plus the larger of latency and bandwidth.
    pub fn total_us(&self) -> f64 {
        self.launch_us + self.latency_us.max(self.bandwidth_us)
    }

    /// Whether more bytes would take longer.
    pub fn bandwidth_bound(&self) -> bool {
        self.bandwidth_us >= self.latency_us
    }
}

/// What a collective takes, by every algorithm that applies.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// All estimates; the fastest that libtpu compiles comes first.
    pub estimates: Vec<Estimate>,
}

impl Prediction {
    /// The fastest algorithm that libtpu compiles, microseconds.
    pub fn total_us(&self) -> f64 {
        self.estimates.first().map_or(0.0, Estimate::total_us)
    }
}

/// The shape of a group as far as time depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Footprint {
    /// Members along x, y, z.
    pub extents: [Extent; 3],
    /// Devices of the group on each of its chips.
    pub cores: u32,
    /// Slices that the group spans.
    pub slices: u32,
}

impl Footprint {
    /// The footprint of a regular group; none for an irregular one.
    pub fn of(group: &Group) -> Option<Footprint> {
        group.extents.map(|extents| Footprint {
            extents: extents.map(|extent| Extent { start: 0, ..extent }),
            cores: group.cores,
            slices: group.slices,
        })
    }

    fn chips(&self) -> f64 {
        self.extents.iter().map(|extent| f64::from(extent.count)).product()
    }

    fn active(&self) -> impl Iterator<Item = &Extent> {
        self.extents.iter().filter(|extent| extent.count > 1)
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> u32 {
        self.extents.iter().map(|extent| extent.count).product::<u32>() * self.cores * self.slices
    }
}

/// Predicts a collective of `bytes` on the group of `ranks`, all like groups of the slice running at once.
///
/// For an irregular group the like groups are those of [`crate::cover::cover`] if it has one, else it runs alone.
pub fn predict(slice: &Slice, ranks: &[u32], collective: Collective, bytes: u64) -> Result<Prediction, TopologyError> {
    check_ranks(slice, ranks)?;
    let group = classify_checked(slice, ranks);
    if let Some(footprint) = Footprint::of(&group) {
        return Ok(predict_footprint(slice, &footprint, collective, bytes));
    }
    let groups = match crate::cover::cover(slice, &[ranks.to_vec()]) {
        Ok(cover) => cover.groups,
        Err(TopologyError::NoCover { .. }) => vec![ranks.to_vec()],
        Err(error) => return Err(error),
    };
    let loads = Loads::measure(slice, &groups)?;
    Ok(Prediction { estimates: vec![loads.estimate(slice, collective, bytes)] })
}

/// Predicts a collective on a regular group.
pub fn predict_footprint(slice: &Slice, footprint: &Footprint, collective: Collective, bytes: u64) -> Prediction {
    let model = Model::new(slice, footprint, bytes);
    let mut estimates: Vec<Estimate> = model.candidates(collective).into_iter().flatten().collect();
    estimates.sort_by(|a, b| {
        (!a.algorithm.in_libtpu()).cmp(&!b.algorithm.in_libtpu()).then(a.total_us().total_cmp(&b.total_us()))
    });
    Prediction { estimates }
}

/// The fastest that libtpu compiles, without allocating: what the mesh search minimises.
pub(crate) fn fastest_us(slice: &Slice, footprint: &Footprint, collective: Collective, bytes: u64) -> f64 {
    Model::new(slice, footprint, bytes)
        .candidates(collective)
        .into_iter()
        .flatten()
        .filter(|estimate| estimate.algorithm.in_libtpu())
        .map(|estimate| estimate.total_us())
        .fold(f64::INFINITY, f64::min)
}

struct Model<'a> {
    slice: &'a Slice,
    rates: &'a Rates,
    footprint: &'a Footprint,
    /// Bytes of the group's part inside one slice.
    bytes: f64,
    /// Rate of a link, bytes per microsecond.
    link: f64,
}

impl<'a> Model<'a> {
    fn new(slice: &'a Slice, footprint: &'a Footprint, bytes: u64) -> Self {
        let rates = slice.generation().rates();
        Model { slice, rates, footprint, bytes: bytes as f64, link: link_rate(rates) }
    }

    fn candidates(&self, collective: Collective) -> [Option<Estimate>; 4] {
        let twice = |estimate: Estimate| Estimate {
            latency_us: 2.0 * estimate.latency_us,
            bandwidth_us: 2.0 * estimate.bandwidth_us,
            ..estimate
        };
        if self.footprint.ranks() <= 1 {
            let nothing = self.estimate(Algorithm::Direct, 0.0, 0.0);
            return [Some(Estimate { launch_us: 0.0, ..nothing }), None, None, None];
        }
        match collective {
            Collective::AllToAll => [Some(self.all_to_all()), None, None, None],
            Collective::Permute => [Some(self.permute()), None, None, None],
            Collective::AllReduce => {
                [Some(twice(self.bucket())), self.ring().map(twice), self.swing(), self.swing_latency()]
            }
            // Broadcast and reduce pipeline the buffer over the same links; gather and scatter are bound by the
            // links of the root, which a corner chip has fewest of: the same sum of rates.
            Collective::AllGather
            | Collective::ReduceScatter
            | Collective::Broadcast
            | Collective::Reduce
            | Collective::Gather
            | Collective::Scatter => [Some(self.bucket()), self.ring(), None, None],
        }
    }

    fn estimate(&self, algorithm: Algorithm, latency_us: f64, bandwidth_us: f64) -> Estimate {
        Estimate { algorithm, launch_us: self.rates.launch.value, latency_us, bandwidth_us }
    }

    /// Groups that share a chip's links.
    fn groups_per_chip(&self) -> f64 {
        f64::from(self.slice.devices_per_chip()) / f64::from(self.footprint.cores)
    }

    /// Bytes that a chip takes in, over the rate, microseconds. Also the exchange between its cores, which overlaps.
    fn gather_time(&self, rate: f64) -> f64 {
        let chips = self.footprint.chips();
        let over_links =
            if chips > 1.0 { self.bytes * (1.0 - 1.0 / chips) * self.groups_per_chip() / rate } else { 0.0 };
        over_links.max(self.between_cores())
    }

    fn between_cores(&self) -> f64 {
        let cores = f64::from(self.footprint.cores);
        match self.rates.core_to_core {
            Some(rate) if cores > 1.0 => self.bytes * (1.0 - 1.0 / cores) / (rate.value * 1e-6),
            _ => 0.0,
        }
    }

    /// The part across slices of an all-gather: each device gets its shard's peers over its host's network.
    fn across_slices(&self) -> (f64, f64) {
        let slices = f64::from(self.footprint.slices);
        if slices <= 1.0 {
            return (0.0, 0.0);
        }
        let per_device = (slices - 1.0) * self.bytes / f64::from(self.footprint.ranks());
        let per_chip = per_device * f64::from(self.slice.devices_per_chip());
        let latency = self.rates.dcn_latency.value * slices.log2().ceil();
        (latency, per_chip / (self.rates.dcn.value * 1e-6))
    }

    fn axis_rate(&self, extent: &Extent) -> f64 {
        (if extent.wrap { 2.0 } else { 1.0 }) * self.link / f64::from(extent.stride)
    }

    fn axis_hops(extent: &Extent) -> f64 {
        f64::from(if extent.wrap { extent.count / 2 } else { extent.count - 1 } * extent.stride)
    }

    fn bucket(&self) -> Estimate {
        let rate: f64 = self.footprint.active().map(|extent| self.axis_rate(extent)).sum();
        let hops: f64 = self.footprint.active().map(Self::axis_hops).sum();
        let axes = self.footprint.active().count();
        let (far_latency, far_time) = self.across_slices();
        let algorithm = if self.footprint.slices > 1 {
            Algorithm::Hierarchical
        } else if axes > 1 {
            Algorithm::Bucket
        } else {
            Algorithm::Ring
        };
        self.estimate(algorithm, hops * self.rates.hop.value + far_latency, self.gather_time(rate) + far_time)
    }

    /// One cycle through a box of several axes: both directions of one link out of a chip are busy.
    fn ring(&self) -> Option<Estimate> {
        let axes = self.footprint.active().count();
        let closes = self.footprint.active().any(|extent| extent.wrap || extent.count % 2 == 0);
        if self.footprint.slices > 1 || axes < 2 || !closes {
            return None;
        }
        // Its steps are as long as the longest stride, and that many groups share the links there.
        let stride = f64::from(self.footprint.active().map(|extent| extent.stride).max().unwrap_or(1));
        let hops = (self.footprint.chips() / 2.0).floor() * stride;
        Some(self.estimate(Algorithm::Ring, hops * self.rates.hop.value, self.gather_time(2.0 * self.link / stride)))
    }

    fn swing_steps(&self) -> Option<(f64, f64, u32)> {
        let first = *self.footprint.active().next()?;
        let same = self.footprint.active().all(|extent| {
            extent.wrap && extent.stride == 1 && extent.count == first.count && extent.count.is_power_of_two()
        });
        let axes = self.footprint.active().count() as u32;
        (same && self.footprint.slices == 1).then(|| (f64::from(axes), f64::from(first.count).log2(), axes))
    }

    fn swing(&self) -> Option<Estimate> {
        let (axes, per_axis, axis_count) = self.swing_steps()?;
        let mut hops = 0.0;
        let mut loads = 0.0;
        for step in 0..(per_axis as u32 * axis_count) {
            let reach = swing_reach(step / axis_count);
            hops += reach;
            loads += reach / 2f64.powi(step as i32 + 1);
        }
        let bandwidth = 2.0 * loads * self.bytes * self.groups_per_chip() / (2.0 * axes) / self.link;
        Some(self.estimate(
            Algorithm::Swing,
            2.0 * hops * self.rates.hop.value,
            bandwidth.max(2.0 * self.between_cores()),
        ))
    }

    fn swing_latency(&self) -> Option<Estimate> {
        let (axes, per_axis, axis_count) = self.swing_steps()?;
        let reach: f64 = (0..(per_axis as u32 * axis_count)).map(|step| swing_reach(step / axis_count)).sum();
        let bandwidth = reach * self.bytes * self.groups_per_chip() / (2.0 * axes) / self.link;
        Some(self.estimate(
            Algorithm::SwingLatency,
            reach * self.rates.hop.value,
            bandwidth.max(2.0 * self.between_cores()),
        ))
    }

    fn all_to_all(&self) -> Estimate {
        let slices = f64::from(self.footprint.slices);
        let chips = self.footprint.chips();
        let near = self.bytes / slices;
        let per_chip = near * f64::from(self.slice.devices_per_chip());
        let twisted_whole = self.slice.twisted()
            && chips as u32 == self.slice.chips_per_slice()
            && self.footprint.active().all(|e| e.wrap);
        let (hops, mut bandwidth) = if twisted_whole {
            let (mean, furthest) = distances(self.slice);
            (f64::from(furthest), per_chip * mean / 6.0 / self.link)
        } else {
            let load = self.footprint.active().map(|extent| {
                let (count, stride) = (f64::from(extent.count), f64::from(extent.stride));
                let odd = if extent.count % 2 == 1 { 1.0 / (count * count) } else { 0.0 };
                let crossing = count / 4.0 * (1.0 - odd);
                per_chip * stride * if extent.wrap { crossing / 2.0 } else { crossing }
            });
            let busiest = load.fold(0.0, f64::max);
            (self.footprint.active().map(Self::axis_hops).sum(), busiest / self.link)
        };
        if chips <= 1.0
            && let (Some(rate), true) = (self.rates.core_to_core, self.footprint.cores > 1)
        {
            bandwidth = near * (1.0 - 1.0 / f64::from(self.footprint.cores)) / (rate.value * 1e-6);
        }
        let mut latency = hops * self.rates.hop.value;
        if self.footprint.slices > 1 {
            let far = self.bytes * (1.0 - 1.0 / slices) * f64::from(self.slice.devices_per_chip());
            bandwidth += far / (self.rates.dcn.value * 1e-6);
            latency += self.rates.dcn_latency.value;
        }
        let algorithm = if self.footprint.slices > 1 { Algorithm::Hierarchical } else { Algorithm::Direct };
        self.estimate(algorithm, latency, bandwidth)
    }

    fn permute(&self) -> Estimate {
        let stride = f64::from(self.footprint.active().map(|extent| extent.stride).max().unwrap_or(0));
        let lone_line = self.footprint.active().count() == 1 && self.footprint.active().all(|extent| !extent.wrap);
        let back = if lone_line { self.footprint.active().map(Self::axis_hops).sum() } else { 0.0 };
        let hops: f64 = stride.max(back);
        let per_chip = self.bytes * f64::from(self.slice.devices_per_chip());
        let mut bandwidth = if stride > 0.0 { per_chip * stride / self.link } else { self.between_cores() };
        let mut latency = hops * self.rates.hop.value;
        if self.footprint.slices > 1 {
            bandwidth = bandwidth.max(per_chip / (self.rates.dcn.value * 1e-6));
            latency = latency.max(self.rates.dcn_latency.value);
        }
        self.estimate(Algorithm::Direct, latency, bandwidth)
    }
}

/// Bytes per microsecond of one link in one direction.
pub(crate) fn link_rate(rates: &Rates) -> f64 {
    rates.link.value * rates.achieved.value * 1e-6
}

/// How far Swing's step reaches along its axis.
fn swing_reach(step: u32) -> f64 {
    (1.0 - (-2.0f64).powi(step as i32 + 1)).abs() / 3.0
}

/// Mean and largest distance from a chip to all of a slice that looks the same from every chip.
pub fn distances(slice: &Slice) -> (f64, u32) {
    let dims = slice.dims();
    let (mut sum, mut furthest) = (0u64, 0);
    for z in 0..dims[2] {
        for y in 0..dims[1] {
            for x in 0..dims[0] {
                let apart = slice.distance([0; 3], [x, y, z]);
                sum += u64::from(apart);
                furthest = furthest.max(apart);
            }
        }
    }
    (sum as f64 / f64::from(slice.chips_per_slice()), furthest)
}
