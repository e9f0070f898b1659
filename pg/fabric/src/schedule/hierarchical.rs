//! Several hosts with several ranks: within hosts through memory, across hosts as few bytes as possible, and by several
//! ranks of a host side by side.
//!
//! Hosts may have different numbers of ranks. *Drivers* are the first ranks of each host, as many as the smallest host
//! has; driver s carries shard s across hosts, and the other ranks take part within their host only.

use super::draft::{Shards, Slices, after};
use super::plan::Planner;
use super::{Region, Schedule, Space, direct::longest};

struct Seats<'a> {
    hosts: &'a [Vec<u32>],
    host: usize,
    place: usize,
    drivers: usize,
    /// Ranks of the largest host. (Sizes must follow from what all ranks share, not from one's own host.)
    most: usize,
}

impl<'a> Seats<'a> {
    fn new(hosts: &'a [Vec<u32>], me: usize) -> Self {
        let find = |host: &Vec<u32>| host.iter().position(|&rank| rank as usize == me);
        let (host, place) =
            hosts.iter().enumerate().find_map(|(index, host)| Some((index, find(host)?))).unwrap_or_default();
        let sizes = || hosts.iter().map(Vec::len);
        Seats { hosts, host, place, drivers: sizes().min().unwrap_or(1), most: sizes().max().unwrap_or(1) }
    }

    fn local(&self) -> &'a [u32] {
        &self.hosts[self.host]
    }

    /// This rank's counterparts on all hosts, if it is a driver.
    fn across(&self) -> Option<Vec<u32>> {
        (self.place < self.drivers).then(|| self.hosts.iter().map(|host| host[self.place]).collect())
    }

    /// For each host and each of its ranks: the ranks of other hosts whose blocks it carries between the hosts. Place i
    /// of another host falls to place i modulo the host's size; hosts come in rotated order.
    fn duties(&self) -> Vec<Vec<Vec<u32>>> {
        let carried = |host: usize, place: usize| {
            after(host, self.hosts.len())
                .flat_map(|other| self.hosts[other].iter().skip(place).step_by(self.hosts[host].len()).copied())
                .collect()
        };
        (0..self.hosts.len())
            .map(|host| (0..self.hosts[host].len()).map(|place| carried(host, place)).collect())
            .collect()
    }

    /// Who carries this rank's block to or from each other host, and as which of its duties.
    fn carriers(&self, duties: &[Vec<Vec<u32>>]) -> Vec<Carrier> {
        let me = self.local()[self.place];
        after(self.host, self.hosts.len())
            .filter_map(|host| {
                let place = self.place % self.hosts[host].len();
                let duty = duties[host][place].iter().position(|&rank| rank == me)?;
                Some(Carrier { host, rank: self.hosts[host][place], duty })
            })
            .collect()
    }
}

struct Carrier {
    host: usize,
    rank: u32,
    duty: usize,
}

/// Reduce-scatter to the drivers within hosts, all-reduce across, all-gather within.
pub(super) fn all_reduce(planner: &Planner, count: usize) -> Schedule {
    let seats = Seats::new(&planner.hosts, planner.place);
    let (local, place) = (seats.local(), seats.place);
    let hosts = planner.hosts.len();
    let shards = Shards::new(Region::whole(Space::Input, 0, count), seats.drivers, planner.granule);
    let slices = planner.slices(shards.get(0).len, planner.width(), seats.most + hosts, 4 * seats.most + 4 * hosts);
    // One exchange of everything is a round less, and for two hosts no more bytes unless partial results are wider.
    let at_once = hosts == 2 && planner.accumulator <= planner.element
        || shards.get(0).len.saturating_mul(planner.accumulator) <= planner.tuning.one_shot / (hosts - 1);
    slices.schedule(|lane, draft| {
        let at = |place| slices.of(lane, shards.get(place));
        let output = |place| at(place).of(Space::Output);
        let sources = draft.exchange(0, local, place, at, at(place), Space::Scratch);
        if let Some(across) = seats.across() {
            let sum = draft.temporary(Space::Partial, at(place).len);
            draft.reduce(1, sources, sum);
            let sums = Shards::new(sum, if at_once { 1 } else { hosts }, planner.granule);
            if at_once {
                let sources = draft.exchange(2, &across, seats.host, |_| sum, sum, Space::Partial);
                draft.reduce(3, sources, output(place));
            } else {
                let part = |host| sums.get(host);
                let finals = Shards::new(output(place), hosts, planner.granule);
                let sources = draft.exchange(2, &across, seats.host, part, part(seats.host), Space::Partial);
                draft.reduce(3, sources, finals.get(seats.host));
                draft.share(4, &across, seats.host, finals.get(seats.host), |host| finals.get(host));
            }
        }
        draft.share(5, local, place, output(place), output);
    })
}

/// Reduce-scatter to the drivers within hosts, each shard's sums to the root's host, from its drivers to the root.
pub(super) fn reduce(planner: &Planner, root: u32, count: usize) -> Schedule {
    let hosts = planner.rooted(root);
    let seats = Seats::new(&hosts, planner.place);
    let (local, place) = (seats.local(), seats.place);
    let shards = Shards::new(Region::whole(Space::Input, 0, count), seats.drivers, planner.granule);
    let buffers = 2 * seats.most + hosts.len();
    let slices = planner.slices(shards.get(0).len, planner.width(), buffers, 4 * seats.most + hosts.len());
    slices.schedule(|lane, draft| {
        let at = |place| slices.of(lane, shards.get(place));
        let is_root = (seats.host, place) == (0, 0);
        let sources = draft.exchange(0, local, place, at, at(place), Space::Scratch);
        if let Some(across) = seats.across() {
            let sum = draft.temporary(Space::Partial, at(place).len);
            draft.reduce(1, sources, sum);
            let own = if seats.host == 0 { sum } else { Region::EMPTY };
            let to_root = |host| if host == 0 { sum } else { Region::EMPTY };
            let sources = draft.exchange(2, &across, seats.host, to_root, own, Space::Partial);
            if seats.host == 0 {
                draft.reduce(3, sources, if is_root { at(0).of(Space::Output) } else { sum });
            }
            if seats.host == 0 && !is_root {
                draft.send(4, root, sum);
            }
        }
        if is_root {
            for (driver, &rank) in local.iter().enumerate().take(seats.drivers).skip(1) {
                let arrived = draft.temporary(Space::Partial, at(driver).len);
                draft.recv(4, rank, arrived);
                draft.reduce(5, [arrived], at(driver).of(Space::Output));
            }
        }
    })
}

/// A large tensor: shards to the drivers of the root's host, from each to its counterparts on the other hosts, from
/// them to everybody. A small one: the root is its host's only driver.
pub(super) fn broadcast(planner: &Planner, root: u32, count: usize) -> Schedule {
    let hosts = planner.rooted(root);
    let seats = Seats::new(&hosts, planner.place);
    let (local, host, place) = (seats.local(), seats.host, seats.place);
    let large = count.saturating_mul(planner.element) >= planner.tuning.two_phase;
    let drivers = if large { seats.drivers } else { 1 };
    let shards = Shards::new(Region::whole(Space::Output, 0, count), drivers, planner.granule);
    let slices: Slices = if large {
        planner.slices(shards.get(0).len, planner.element, 1, 2 * (seats.most + hosts.len()))
    } else {
        Slices::new(count, count, planner.granule)
    };
    // Across: from the root's host in parts, one to each other host, which share them, if the link matters.
    let parts = if large { hosts.len() - 1 } else { 1 };
    let is_root = (host, place) == (0, 0);
    slices.schedule(|lane, draft| {
        let at = |driver| slices.of(lane, shards.get(driver));
        let held = |driver| if is_root { at(driver).of(Space::Input) } else { at(driver) };
        if is_root {
            for (driver, &rank) in local.iter().enumerate().take(drivers).skip(1) {
                draft.send(0, rank, held(driver));
            }
            for driver in 0..drivers {
                draft.copy(0, held(driver), at(driver));
            }
        } else if host == 0 && place < drivers {
            draft.recv(0, root, at(place));
        }
        if place < drivers {
            let part =
                |other: usize| Shards::new(held(place), parts, planner.granule).get(if large { other } else { 0 });
            let others: Vec<u32> = hosts[1..].iter().map(|host| host[place]).collect();
            if host == 0 {
                for (other, &rank) in others.iter().enumerate() {
                    draft.send(1, rank, part(other));
                }
            } else {
                draft.recv(1, hosts[0][place], part(host - 1));
                if large {
                    draft.share(2, &others, host - 1, part(host - 1), part);
                }
            }
        }
        // The root's host has no need to wait for the others. The root itself has everything.
        let round = if host == 0 { 1 } else { 3 };
        for other in after(place, local.len()) {
            if place < drivers && local[other] != root {
                draft.send(round, local[other], held(place));
            }
        }
        for driver in (0..drivers).filter(|&driver| driver != place && !is_root) {
            draft.recv(round, local[driver], at(driver));
        }
    })
}

/// Every block crosses to each other host once, to the rank that carries it there, and is passed on. A lane has at most
/// one carried block per rank.
pub(super) fn all_gather(planner: &Planner, counts: &[usize]) -> Schedule {
    let seats = Seats::new(&planner.hosts, planner.place);
    let (local, place) = (seats.local(), seats.place);
    let duties = seats.duties();
    let carriers = seats.carriers(&duties);
    let lanes = duties.iter().flatten().map(Vec::len).max().unwrap_or(0);
    let me = planner.place;
    let own = Region::whole(Space::Input, 0, counts[me]);
    let at = |rank: u32| Region::whole(Space::Output, rank, counts[rank as usize]);
    Slices { step: 1, lanes }.schedule(|lane, draft| {
        for carrier in carriers.iter().filter(|carrier| carrier.duty == lane) {
            draft.send(0, carrier.rank, own);
        }
        if lane == 0 {
            draft.share(0, local, place, own, |other| at(local[other]));
            draft.copy(0, own, at(me as u32));
        }
        let carried = |place: usize| duties[seats.host][place].get(lane).map_or(Region::EMPTY, |&rank| at(rank));
        if let Some(&rank) = duties[seats.host][place].get(lane) {
            draft.recv(0, rank, at(rank));
        }
        draft.share(1, local, place, carried(place), carried);
    })
}

/// The way of the all-gather backwards: each host sums up every other host's blocks, each at the rank that carries it,
/// which sends the sum to the block's owner.
pub(super) fn reduce_scatter(planner: &Planner, counts: &[usize]) -> Schedule {
    let seats = Seats::new(&planner.hosts, planner.place);
    let (local, place) = (seats.local(), seats.place);
    let duties = seats.duties();
    let carriers = seats.carriers(&duties);
    let most = duties.iter().flatten().map(Vec::len).max().unwrap_or(0);
    let hosts = planner.hosts.len();
    let steps = (2 * seats.most + 1) * (most + 1) + 2 * hosts;
    let slices = planner.slices(longest(counts), planner.width(), planner.ranks() + most + hosts, steps);
    slices.schedule(|lane, draft| {
        let at = |rank: u32| slices.of(lane, Region::whole(Space::Input, rank, counts[rank as usize]));
        // Duty after duty: gathered in round d, summed in d + 1, sent in d + 2. A host's own blocks come after those.
        for duty in 0..most {
            let carried = |place: usize| duties[seats.host][place].get(duty).map_or(Region::EMPTY, |&rank| at(rank));
            let sources = draft.exchange(duty, local, place, carried, carried(place), Space::Scratch);
            if let Some(&rank) = duties[seats.host][place].get(duty) {
                let sum = draft.temporary(Space::Partial, at(rank).len);
                draft.reduce(duty + 1, sources, sum);
                draft.send(duty + 2, rank, sum);
            }
        }
        let own = at(local[place]);
        let mut sums = vec![Region::EMPTY; hosts];
        for carrier in &carriers {
            sums[carrier.host] = draft.temporary(Space::Partial, own.len);
            draft.recv(carrier.duty + 2, carrier.rank, sums[carrier.host]);
        }
        let raw = draft.exchange(most, local, place, |other| at(local[other]), own, Space::Scratch);
        let sources: Vec<Region> =
            (0..hosts).flat_map(|host| if host == seats.host { raw.clone() } else { vec![sums[host]] }).collect();
        draft.reduce(most + 2, sources, Region { space: Space::Output, block: 0, ..own });
    })
}
