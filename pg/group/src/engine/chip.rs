//! The engine of a process that holds one device: each rank launches its own programs, and agrees with the others, where
//! it has to, over the hosts' network.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Reduction, Tensor};
use podring_fabric::error::Failure as HostFailure;
use podring_fabric::hub::{Call, ChannelSpec};
use podring_ici::cache::Share;
use podring_ici::engine::{self as ici, Chip, Failure, GroupSpec, Peers, Seat, Ticket};
use smallvec::SmallVec;

use super::across::{Across, Within};
use super::device::pack;
use super::{Broken, DeviceCall, DeviceError, Devices, Engine, Opening, Operation, Patience, StoreShare};
use crate::runtime::Process;
use crate::world::{World, channel};

/// The group's other members over the fabric.
struct Hosts {
    process: Arc<Process>,
    /// The group's own channel, whose failure is the group's, and this rank there.
    group: u64,
    me: u32,
    /// For sizes, apart from the collectives of tensors in the hosts' memory.
    sizes: u64,
    seq: AtomicU64,
    share: Option<StoreShare>,
}

impl Peers for Hosts {
    fn most(&self, numbers: &mut [u64], limit: Duration) -> Result<(), String> {
        let whole =
            || Blocks::whole(Tensor { data: numbers.as_ptr().cast_mut().cast(), layout: Layout::flat(numbers.len()) });
        let part = Part { dtype: DType::U64, reduction: Some(Reduction::Max), inputs: whole(), outputs: whole() };
        let call = Call {
            channel: self.sizes,
            seq: self.seq.fetch_add(1, Relaxed),
            collective: Collective { kind: Kind::AllReduce, parts: SmallVec::from_iter([part]) },
            keep: None,
            timeout: limit,
            sync: true,
            mark: 0,
        };
        let hub = &self.process.hub;
        let ticket = hub.post(call).map_err(|error| error.to_string())?;
        // Bounded by the call's own deadline.
        hub.wait_as_guest(&ticket, None, || false);
        let failure = ticket.failure();
        hub.recycle(ticket);
        failure.map_or(Ok(()), |failure| Err(failure.to_string()))
    }

    fn over(&self) -> Option<String> {
        self.process.hub.failure(self.group).map(|failure| failure.to_string())
    }

    fn fail(&self, why: &str) {
        self.process.hub.fail(self.group, HostFailure::Aborted { by: Some(self.me), why: why.to_owned() });
    }

    fn share(&self) -> Option<&dyn Share> {
        Some(self.share.as_ref()?)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if self.process.hub.check_fork().is_ok() {
            self.process.hub.close(self.sizes);
        }
    }
}

/// The engine of a group of chips; none if its device collectives have to go over the hosts' network.
pub(super) fn open(chip: &Arc<Chip>, opening: &Opening) -> Result<Option<Arc<dyn Engine>>, DeviceError> {
    let group = || opening.name.to_owned();
    let slice = chip.slice().filter(|slice| chip.devices() > slice.devices_per_slice());
    if opening.whole && opening.global.len() as u32 != chip.devices() {
        let (ranks, machine) = (opening.global.len() as u32, chip.name().to_owned());
        let (slices, devices) = match slice {
            Some(slice) => (slice.slices(), slice.devices_per_slice()),
            None => (1, chip.devices()),
        };
        return Err(DeviceError::Count { group: group(), ranks, slices, devices, machine });
    }
    let rank = opening.global[opening.me as usize];
    if rank != chip.rank() {
        let (device, slice) = (chip.rank(), chip.name().to_owned());
        return Err(DeviceError::Chip { group: group(), rank, device, slice });
    }
    // Known to every member without asking: all of them take the other way, or none.
    let aside = |parts: &[Vec<u32>]| {
        let why = parts.iter().find_map(|part| {
            let members: Vec<u32> = part.iter().map(|&position| opening.global[position as usize]).collect();
            chip.refuses(&members)
        });
        why.inspect(|why| chip.refuse(opening.name, why)).is_some()
    };
    let Some(slice) = slice else {
        let everybody: Vec<u32> = (0..opening.global.len() as u32).collect();
        if aside(std::slice::from_ref(&everybody)) {
            return Ok(None);
        }
        return Ok(Some(Arc::new(OnChip::open(chip, opening, "", &everybody)?)));
    };
    // The members of each slice, as positions in the group.
    let mut touched: Vec<(u32, Vec<u32>)> = Vec::new();
    for (position, rank) in (0..).zip(opening.global) {
        let of = rank / slice.devices_per_slice();
        match touched.binary_search_by_key(&of, |(slice, _)| *slice) {
            Ok(place) => touched[place].1.push(position),
            Err(place) => touched.insert(place, (of, vec![position])),
        }
    }
    let own = rank / slice.devices_per_slice();
    let touched: Vec<(bool, Vec<u32>)> = touched.into_iter().map(|(of, members)| (of == own, members)).collect();
    let Some((_, mine)) = touched.iter().find(|(own, _)| *own) else { return Ok(None) };
    if touched.iter().any(|(_, members)| members.len() != mine.len()) {
        return Ok(None);
    }
    let parts: Vec<Vec<u32>> = touched.iter().map(|(_, members)| members.clone()).collect();
    if aside(&parts) {
        return Ok(None);
    }
    let me = mine.iter().position(|&position| position == opening.me).unwrap_or(0) as u32;
    let inside = OnChip::open(chip, opening, &format!("/slice {own}"), mine)?;
    let touched = parts;
    let across = Across::open(opening, Box::new(inside), opening.process.line.clone(), &touched, me)?;
    Ok(Some(Arc::new(across)))
}

/// A group of chips of one slice.
struct OnChip {
    seat: Seat,
    hosts: Arc<Hosts>,
}

impl OnChip {
    /// Of the members at these positions of the group, this rank among them; `part` says which those are.
    fn open(chip: &Arc<Chip>, opening: &Opening, part: &str, positions: &[u32]) -> Result<OnChip, DeviceError> {
        let hub = &opening.process.hub;
        let name = format!("{}{part}/sizes", opening.name);
        let sizes = channel(opening.world.id, &name, opening.epoch);
        let me = positions.iter().position(|&position| position == opening.me).unwrap_or(0) as u32;
        let members = positions.iter().map(|&position| opening.world.members[position as usize].clone()).collect();
        let between = |reason: String| DeviceError::Between { group: opening.name.to_owned(), reason };
        hub.open(ChannelSpec { id: sizes, name, me, members }).map_err(|error| between(error.to_string()))?;
        let members = positions.len() as u32;
        let World { id, secret, .. } = opening.world;
        let share = StoreShare::new(opening.store.clone(), Patience::default(), secret).of(*id, members);
        let hosts = Arc::new(Hosts {
            process: opening.process.clone(),
            group: opening.channel,
            me: opening.me,
            sizes,
            seq: AtomicU64::new(0),
            share: Some(share).filter(|_| members > 1),
        });
        let devices = positions.iter().map(|&position| opening.global[position as usize]).collect();
        // Ranks in its failures are those of the part.
        let spec = GroupSpec { id: opening.channel, name: format!("{}{part}", opening.name), devices };
        let opened = chip.open(opening.world.id, &spec, me, hosts.clone(), Devices::runner(opening.process));
        let seat = opened.map_err(|error| super::numbered(error, opening.me))?;
        Ok(OnChip { seat, hosts })
    }
}

impl Within for OnChip {
    fn start(&self, seq: u64, mut call: DeviceCall, timeout: Duration) -> Arc<Ticket> {
        if let Some(why) = self.hosts.over() {
            self.seat.fail(Failure::Aborted { by: None, why });
        }
        let after = if call.inputs.is_none() { pack(&mut call.collective) } else { None };
        let DeviceCall { collective, inputs, donate, keep, .. } = call;
        self.seat.post(ici::Call { seq, collective, inputs, donate, keep, after, timeout })
    }

    fn fail_with(&self, failure: Failure) {
        self.seat.fail(failure);
    }

    fn exact_failure(&self) -> Option<Arc<Failure>> {
        self.seat.failure()
    }
}

impl Engine for OnChip {
    fn runs(&self, collective: &Collective) -> bool {
        self.seat.has_program(collective)
    }

    fn post(&self, seq: u64, call: DeviceCall, timeout: Duration) -> Arc<dyn Operation> {
        self.start(seq, call, timeout)
    }

    fn warm(&self, calls: &[Collective], progress: &mut dyn FnMut(usize, usize)) -> Result<(), Broken> {
        self.seat.warm(calls, progress).map_err(|failure| Broken::Device(Arc::new(failure)))
    }

    fn fail(&self, by: Option<u32>, why: &str) {
        self.seat.fail(Failure::Aborted { by, why: why.to_owned() });
    }

    fn broken(&self) -> Option<Broken> {
        self.seat.failure().map(Broken::Device)
    }

    fn pending(&self) -> usize {
        self.seat.pending()
    }

    fn close(&self) {
        self.seat.close();
    }
}
