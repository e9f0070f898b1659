//! A member's call, and its inputs' way to its device.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use podring_collective::{Collective, Keep, Kind, Part};
use smallvec::SmallVec;

use super::{
    failure::Failure,
    group::{Call, Group},
    key,
    launch::{Arrangement, Prepared, message},
    machine::Machine,
    stage::{self, Block, Lay, blocks},
    ticket::Ticket,
};
use crate::{
    pjrt::{Buffer, Event, PjrtError},
    program::{Op, layout::LANES, layout::TILE, layout::class_rows},
};

/// Results of up to as many bytes are copied to the caller's memory by the plugin's own thread. What is larger is lent to
/// devices where it can be.
pub(super) const AT_ONCE: usize = 64 << 10;

/// One member's call, its inputs on its device.
pub(super) struct Arrival {
    pub ticket: Arc<Ticket>,
    pub collective: Collective,
    pub keep: Option<Keep>,
    pub fingerprint: u64,
    pub after: Option<Box<dyn FnOnce() + Send>>,
    /// The member.
    pub me: u32,
    /// Its device, as the client's index.
    pub device: u32,
    pub wish: Arc<Prepared>,
    /// One per part; none where this member has nothing to give.
    pub inputs: SmallVec<[Option<Buffer>; 1]>,
    /// Of each argument that is the caller's own memory: the plugin is done with it.
    lent: SmallVec<[Event; 1]>,
    /// The inputs came from the caller, and results stay on the device.
    pub on_device: bool,
    pub donate: bool,
}

/// Blocks in memory, and how they lie in a device buffer.
type Side = (SmallVec<[Block; 8]>, Lay);

/// What this member puts in, and how it lies.
pub(super) fn gives(kind: Kind, me: u32, part: &Part, op: &Op, elements: usize) -> Option<Side> {
    let width = part.dtype.size();
    let lay = match op {
        Op::ReduceScatter => Lay::Slots(class_rows(elements, width) * LANES * width),
        Op::AllToAll | Op::Scatter { .. } => Lay::Slots(elements),
        Op::AllToAllUneven { .. } => Lay::Aligned(TILE),
        _ => Lay::Packed,
    };
    match kind {
        Kind::Broadcast { root } | Kind::Scatter { root } if root != me => None,
        Kind::Recv { .. } | Kind::Barrier => None,
        _ => Some((blocks(&part.inputs, width), lay)),
    }
}

fn view(side: &Option<Side>) -> Option<(&[Block], Lay)> {
    side.as_ref().map(|(blocks, lay)| (&blocks[..], *lay))
}

/// What this member takes out, and how it lies.
pub(super) fn takes(kind: Kind, me: u32, part: &Part, op: &Op, elements: usize) -> Option<Side> {
    let lay = match op {
        Op::AllGather | Op::AllToAll | Op::Gather { .. } => Lay::Slots(elements),
        Op::AllToAllUneven { .. } => Lay::Aligned(TILE),
        _ => Lay::Packed,
    };
    match kind {
        Kind::Reduce { root } | Kind::Gather { root } if root != me => None,
        Kind::Send { .. } | Kind::Barrier => None,
        _ => Some((blocks(&part.outputs, part.dtype.size()), lay)),
    }
}

impl Arrival {
    pub fn new(
        group: &Arc<Group>,
        arrangement: &Arc<Arrangement>,
        me: u32,
        call: Call,
        ticket: Arc<Ticket>,
    ) -> Result<Arrival, Arc<Failure>> {
        let Call { collective, inputs, donate, keep, after, .. } = call;
        let machine = &group.machine;
        let unsupported = |reason| Arc::new(Failure::Unsupported { op: collective.to_string(), reason });
        let wish = key::of(&collective, group.size(), machine.target).map_err(|reason| unsupported(reason.into()))?;
        let wish = if collective.kind.is_point_to_point() {
            // A pair's programs depend on nothing but the shape, which any arrangement of two says.
            Arc::new(message(machine, &wish).map_err(unsupported)?)
        } else {
            arrangement.prepared(machine.target, &wish).map_err(unsupported)?
        };
        let fingerprint = collective.fingerprint();
        let device = group.device(me);
        let mut arrival = Arrival {
            ticket,
            collective,
            keep,
            fingerprint,
            after,
            me,
            device,
            wish,
            inputs: SmallVec::new(),
            lent: SmallVec::new(),
            on_device: inputs.is_some(),
            donate: true,
        };
        match inputs {
            Some(buffers) => {
                arrival.donate = donate;
                arrival.inputs = buffers.into_iter().map(Some).collect();
                let (expected, got) = (arrival.collective.parts.len(), arrival.inputs.len());
                if expected != got {
                    let error = PjrtError::Argument {
                        what: "device buffers",
                        expected: format!("one for each of {expected} parts"),
                        got: got.to_string(),
                    };
                    return Err(arrival.fail(group, "taking", error));
                }
            }
            None => arrival.stage(group)?,
        }
        Ok(arrival)
    }

    pub fn fail(&self, group: &Group, doing: &'static str, error: PjrtError) -> Arc<Failure> {
        Arc::new(group.plugin_failure(doing, &self.collective.to_string(), Some(self.me), error))
    }

    /// Brings this member's inputs to its device, for the program it wishes.
    pub fn stage(&mut self, group: &Group) -> Result<(), Arc<Failure>> {
        let mut inputs = SmallVec::new();
        let mut lent = SmallVec::new();
        for (index, part) in self.collective.parts.iter().enumerate() {
            let brought = self.bring(&group.machine, index, part);
            let brought = brought.map_err(|error| self.fail(group, "copying to the device for", error))?;
            let (buffer, event) = brought.map_or((None, None), |(buffer, event)| (Some(buffer), event));
            inputs.push(buffer);
            lent.extend(event);
        }
        (self.inputs, self.lent) = (inputs, lent);
        Ok(())
    }

    /// A part's argument, and if it is the caller's own memory, when the plugin is done with that.
    fn bring(
        &self,
        machine: &Machine,
        index: usize,
        part: &Part,
    ) -> Result<Option<(Buffer, Option<Event>)>, PjrtError> {
        let (key, kind) = (&self.wish.key, self.collective.kind);
        let Some(shape) = self.wish.data_shape(index) else { return Ok(None) };
        let device = machine.client().devices()[self.device as usize];
        let given = gives(kind, self.me, part, &key.op, key.parts[index].elements);
        // Where devices are this process's CPUs, large tensors that lie as the program has them are lent. Packed copies of
        // strided ones (`after`) are not worth it.
        if machine.on_host() && self.after.is_none() && shape.bytes > AT_ONCE {
            let client = machine.client();
            // SAFETY: the caller of the collective leaves its tensors alone until the operation has ended. A launched
            // one whose memory is lent doesn't end before the event of each argument has happened; before the launch
            // nothing reads or writes them. No other argument is in a result's memory: inputs are lent only where
            // results are copied, and a part's input is moved only if there is no other part that might read there.
            let lent = unsafe {
                if key.in_place(machine.target) {
                    let taken = takes(kind, self.me, part, &key.op, key.parts[index].elements);
                    let moves = self.collective.parts.len() == 1;
                    match view(&taken) {
                        Some(taken) => stage::lend_result(client, &device, shape, view(&given), taken, moves)?,
                        None => None,
                    }
                } else {
                    match view(&given) {
                        Some(given) => stage::lend_input(client, &device, shape, given)?,
                        None => None,
                    }
                }
            };
            if let Some((buffer, event)) = lent {
                machine.lent.fetch_add(1, Relaxed);
                return Ok(Some((buffer, Some(event))));
            }
        }
        let Some((blocks, lay)) = given else { return Ok(None) };
        // SAFETY: the caller of the collective keeps its tensors readable until the operation has ended, which it
        // can't before this member has arrived, or while its ticket is held.
        let copied = unsafe { stage::to_device(machine.client(), &device, shape, &blocks, lay) }?;
        Ok(Some((copied, None)))
    }

    /// Whether arguments are the caller's own memory.
    pub fn lends(&self) -> bool {
        !self.lent.is_empty()
    }

    /// How many arguments are the caller's own memory.
    pub fn lent(&self) -> usize {
        self.lent.len()
    }

    /// Tells the ticket of each when the plugin is done with that memory; `false` if it can't.
    pub fn watch(&self, ticket: &Arc<Ticket>) -> bool {
        self.lent.iter().all(|event| event.on_released(ticket.clone()).is_ok())
    }

    /// Lets go of the arguments, and waits until the plugin is done with the caller's memory. Not on its own threads;
    /// after results that may be there have been dropped.
    pub fn take_back(&mut self) {
        self.inputs.clear();
        for event in &self.lent {
            if let Err(error) = event.wait() {
                tracing::warn!(%error, "memory that was lent to a device");
            }
        }
        self.lent.clear();
    }
}
