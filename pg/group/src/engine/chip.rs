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
use podring_fabric::hub::{Call, ChannelSpec};
use podring_ici::engine::{self as ici, Chip, Failure, GroupSpec, Peers, Seat};
use smallvec::SmallVec;

use super::device::pack;
use super::{Broken, DeviceCall, DeviceError, Devices, Engine, Opening, Operation};
use crate::runtime::Process;
use crate::world::channel;

/// The group's other members over the fabric.
struct Hosts {
    process: Arc<Process>,
    /// The group's own channel, whose failure is the group's.
    group: u64,
    /// For sizes, apart from the collectives of tensors in the hosts' memory.
    sizes: u64,
    seq: AtomicU64,
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
        hub.wait(&ticket, None, || false);
        let failure = ticket.failure();
        hub.recycle(ticket);
        failure.map_or(Ok(()), |failure| Err(failure.to_string()))
    }

    fn over(&self) -> Option<String> {
        self.process.hub.failure(self.group).map(|failure| failure.to_string())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if self.process.hub.check_fork().is_ok() {
            self.process.hub.close(self.sizes);
        }
    }
}

/// A group of a chip.
pub(super) struct OnChip {
    seat: Seat,
    hosts: Arc<Hosts>,
}

impl OnChip {
    pub fn open(chip: &Arc<Chip>, opening: &Opening) -> Result<OnChip, DeviceError> {
        let group = || opening.name.to_owned();
        if opening.whole && opening.global.len() as u32 != chip.devices() {
            let (ranks, machine) = (opening.global.len() as u32, chip.name().to_owned());
            return Err(DeviceError::Count { group: group(), ranks, slices: 1, devices: chip.devices(), machine });
        }
        let rank = opening.global[opening.me as usize];
        if rank != chip.rank() {
            let (device, slice) = (chip.rank(), chip.name().to_owned());
            return Err(DeviceError::Chip { group: group(), rank, device, slice });
        }
        let hub = &opening.process.hub;
        let name = format!("{}/sizes", opening.name);
        let sizes = channel(opening.world.id, &name, opening.epoch);
        let members = opening.world.members.clone();
        let between = |reason: String| DeviceError::Between { group: group(), reason };
        hub.open(ChannelSpec { id: sizes, name, me: opening.me, members })
            .map_err(|error| between(error.to_string()))?;
        let hosts =
            Arc::new(Hosts { process: opening.process.clone(), group: opening.channel, sizes, seq: AtomicU64::new(0) });
        let spec = GroupSpec { id: opening.channel, name: group(), devices: opening.global.to_vec() };
        let seat = chip.open(&spec, opening.me, hosts.clone(), Devices::runner(opening.process))?;
        Ok(OnChip { seat, hosts })
    }
}

impl Engine for OnChip {
    fn runs(&self, collective: &Collective) -> bool {
        self.seat.has_program(collective)
    }

    fn post(&self, seq: u64, mut call: DeviceCall, timeout: Duration) -> Arc<dyn Operation> {
        if let Some(why) = self.hosts.over() {
            self.seat.fail(Failure::Aborted { by: None, why });
        }
        let after = if call.inputs.is_none() { pack(&mut call.collective) } else { None };
        let DeviceCall { collective, inputs, donate, keep, .. } = call;
        self.seat.post(ici::Call { seq, collective, inputs, donate, keep, after, timeout })
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
