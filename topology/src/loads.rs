//! Cost of groups without a formula: what their rings put on each link, counted one by one.

use crate::{
    cost::{Algorithm, Collective, Estimate, link_rate},
    error::TopologyError,
    link::Direction,
    ring::ring_order,
    slice::Slice,
};

/// What groups without a formula put on each link when each passes data round its ring.
pub(crate) struct Loads {
    /// Ring edges over the busiest link in one direction.
    busiest: f64,
    /// Ring edges out of the busiest chip to other slices.
    across: f64,
    /// Longest step of any ring.
    longest: u32,
    /// Ranks per group.
    size: f64,
    /// Whether any group spans slices.
    far: bool,
}

impl Loads {
    /// Routes every step of every group's ring both ways over the links.
    pub(crate) fn measure(slice: &Slice, groups: &[Vec<u32>]) -> Result<Loads, TopologyError> {
        let chips = slice.chips_per_slice() * slice.slices();
        // Six ports a chip: axis and direction.
        let mut load = vec![0u32; chips as usize * 6];
        let mut across = vec![0u32; chips as usize];
        let mut longest = 0;
        let mut size = 1;
        for group in groups {
            let ring = ring_order(slice, group)?;
            longest = longest.max(ring.longest_step);
            size = size.max(group.len());
            let members: Vec<_> = ring.order.iter().filter_map(|&rank| slice.device(rank)).collect();
            if members.len() < 2 {
                continue;
            }
            for (index, from) in members.iter().enumerate() {
                let to = &members[(index + 1) % members.len()];
                for (a, b) in [(from, to), (to, from)] {
                    if a.slice != b.slice {
                        across[slice.chip_index(a.slice, a.coords) as usize] += 1;
                        continue;
                    }
                    for link in slice.route(a.coords, b.coords) {
                        let side = usize::from(link.direction == Direction::Minus);
                        load[slice.chip_index(a.slice, link.from) as usize * 6 + link.axis * 2 + side] += 1;
                    }
                }
            }
        }
        Ok(Loads {
            busiest: f64::from(load.iter().copied().max().unwrap_or(0)),
            across: f64::from(across.iter().copied().max().unwrap_or(0)),
            longest,
            size: size as f64,
            far: across.iter().any(|&edges| edges > 0),
        })
    }

    /// Time of a collective on these loads.
    pub(crate) fn estimate(&self, slice: &Slice, collective: Collective, bytes: u64) -> Estimate {
        let rates = slice.generation().rates();
        let bytes = bytes as f64;
        let launch_us = if self.size > 1.0 { rates.launch.value } else { 0.0 };
        // Half of the data goes each way round; every edge passes all shards but the receiver's own.
        let per_edge = bytes * (1.0 - 1.0 / self.size) / 2.0;
        let over = |edge_bytes: f64| {
            (self.busiest * edge_bytes / link_rate(rates)).max(self.across * edge_bytes / (rates.dcn.value * 1e-6))
        };
        let far = if self.far { rates.dcn_latency.value } else { 0.0 };
        let step = f64::from(self.longest) * rates.hop.value + far;
        let half_way = (self.size / 2.0).floor();
        let (latency_us, bandwidth_us) = match collective {
            Collective::AllReduce => (2.0 * half_way * step, 2.0 * over(per_edge)),
            // On a ring: a quarter of the all-gather of everybody's buffers.
            Collective::AllToAll => (half_way * step, over(per_edge * self.size / 4.0)),
            Collective::Permute => (step, over(bytes)),
            _ => (half_way * step, over(per_edge)),
        };
        Estimate { algorithm: Algorithm::LinkLoad, launch_us, latency_us, bandwidth_us }
    }
}
