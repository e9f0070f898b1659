//! Plays schedules: an operation's lanes, round by round, over the engine's messages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use podring_collective::{Collective, DType, Kind, Reduction, Tensor};
use podring_kernel::{self as kernel, Source, Target};
use smallvec::SmallVec;

use super::channel::{Planned, Record};
use super::endpoint::OpKey;
use super::engine::{Engine, MatchKey, Request, STEP};
use super::ticket::{Keep, Ticket};
use crate::memory::Buffer;
use crate::schedule::{self, Region, Space, Step};
use crate::wire::{Frame, Header};

/// The lane number of point-to-point operations, which have no schedule.
pub(crate) const DIRECT: u32 = u32::MAX;
/// Lanes of one operation under way at a time: enough to overlap one's messages with another's sums, few enough that
/// their scratch stays in the cache.
const WINDOW: usize = 4;
/// The same for coalesced operations, whose parts are often tiny.
const WIDE_WINDOW: usize = 16;
/// Bits of a message key: part, lane, tag.
const LANE_BITS: u32 = 24;
const TAG_BITS: u32 = 20;

/// Tells a message from an operation's others.
fn message_key(part: u32, lane: u32, tag: u32) -> u64 {
    (u64::from(part) << LANE_BITS | u64::from(lane)) << TAG_BITS | u64::from(tag)
}

/// Plain memory of each block: address and elements.
pub(crate) type Blocks = SmallVec<[(*mut u8, usize); 8]>;

/// A result to be spread into a tensor that isn't plain.
pub(crate) struct Unpack {
    pub from: *const u8,
    pub into: Tensor,
    pub dtype: DType,
    pub count: usize,
}

struct Part {
    plan: Arc<Planned>,
    dtype: DType,
    reduction: Reduction,
    inputs: Blocks,
    outputs: Blocks,
}

#[derive(Default)]
struct LaneState {
    part: u32,
    lane: u32,
    round: u32,
    /// Local steps of the round done, and how far the next one is, in elements.
    step: u32,
    offset: usize,
    posted: bool,
    outstanding: u32,
    /// In the engine's list of lanes to advance.
    queued: bool,
    scratch: Option<Buffer>,
    partial: Option<Buffer>,
    live: bool,
}

/// An operation under way.
pub(crate) struct Op {
    pub channel: u64,
    pub seq: u64,
    pub kind: Kind,
    pub fingerprint: u64,
    pub ticket: Arc<Ticket>,
    pub failed: bool,
    pub deadline: Instant,
    pub timeout: Duration,
    ranks: u32,
    parts: SmallVec<[Part; 1]>,
    lanes: SmallVec<[LaneState; WINDOW]>,
    next_part: u32,
    next_lane: u32,
    live: u32,
    record: Record,
    staging: SmallVec<[Buffer; 2]>,
    unpack: SmallVec<[Unpack; 1]>,
    unpacked: usize,
    keep: Option<Keep>,
}

// SAFETY: the addresses are tensors' memory, kept alive by `keep` and owned by the operation until it ends.
unsafe impl Send for Op {}

impl Op {
    pub fn describe(&self) -> String {
        self.record.to_string()
    }

    /// A message of the lane is complete; `true` if the lane is to be advanced.
    pub fn message_done(&mut self, lane: u32) -> bool {
        let state = &mut self.lanes[lane as usize];
        state.outstanding -= 1;
        let go = state.outstanding == 0 && !state.queued;
        state.queued |= go;
        go
    }

    /// Whether a step still to come exchanges something with `rank`. Messages under way are not counted.
    /// `came` tells of a message whether it is here already: of that one nothing is needed any more.
    pub fn still_needs(&self, rank: u32, came: impl Fn(u64) -> bool) -> bool {
        let names = |part: usize, lane: usize, step: &Step| match step {
            Step::Send { to, .. } => *to == rank,
            Step::Recv { from, tag, .. } => *from == rank && !came(message_key(part as u32, lane as u32, *tag)),
            Step::Copy { .. } | Step::Reduce { .. } => false,
        };
        let lane_needs = |part: usize, lane: usize, from: usize| {
            let rounds = &self.parts[part].plan.schedule.lanes[lane].rounds;
            rounds.iter().skip(from).flat_map(|round| &round.steps).any(|step| names(part, lane, step))
        };
        let later = self.lanes.iter().filter(|lane| lane.live).any(|lane| {
            lane_needs(lane.part as usize, lane.lane as usize, lane.round as usize + usize::from(lane.posted))
        });
        later
            || self.parts.iter().enumerate().skip(self.next_part as usize).any(|(index, part)| {
                let from = if index == self.next_part as usize { self.next_lane as usize } else { 0 };
                (from..part.plan.schedule.lanes.len()).any(|lane| lane_needs(index, lane, 0))
            })
    }
}

impl Engine {
    /// Makes an operation of a request; nothing moves yet.
    pub fn start(&mut self, request: Request) -> OpKey {
        let Request { channel: id, seq, fingerprint, collective, parts: blocks, staging, unpack, .. } = request;
        let record = Record::new(seq, fingerprint, &collective);
        let ranks = self.channels.get(&id).map_or(1, super::channel::Channel::size);
        let mut parts = SmallVec::new();
        if !collective.kind.is_point_to_point() {
            if collective.parts.is_empty() {
                let plan = self.plan(id, &collective, None);
                let none = (Blocks::new(), Blocks::new());
                let (dtype, reduction) = (DType::U8, Reduction::Sum);
                parts.push(Part { plan, dtype, reduction, inputs: none.0, outputs: none.1 });
            }
            for (index, (inputs, outputs)) in blocks.into_iter().enumerate() {
                let plan = self.plan(id, &collective, Some(index));
                let part = &collective.parts[index];
                let reduction = part.reduction.unwrap_or(Reduction::Sum);
                parts.push(Part { plan, dtype: part.dtype, reduction, inputs, outputs });
            }
        }
        self.ops.insert(Op {
            channel: id,
            seq,
            kind: collective.kind,
            fingerprint,
            ticket: request.ticket,
            failed: false,
            deadline: request.deadline,
            timeout: request.timeout,
            ranks,
            parts,
            lanes: SmallVec::new(),
            next_part: 0,
            next_lane: 0,
            live: 0,
            record,
            staging,
            unpack,
            unpacked: 0,
            keep: request.keep,
        })
    }

    /// The plan for one part, from the channel's cache.
    fn plan(&mut self, id: u64, collective: &Collective, part: Option<usize>) -> Arc<Planned> {
        let kind = collective.kind;
        let (element, accumulator, inputs, outputs): (usize, usize, &[usize], &[usize]) = match part {
            Some(index) => {
                let part = &collective.parts[index];
                let accumulator = part.dtype.accumulator().size();
                (part.dtype.size(), accumulator, &part.inputs.counts, &part.outputs.counts)
            }
            None => (1, 1, &[], &[]),
        };
        let mut hash = rustc_hash::FxHasher::default();
        {
            use std::hash::Hash;
            (kind, element, accumulator, inputs, outputs).hash(&mut hash);
        }
        let hash = std::hash::Hasher::finish(&hash);
        let deterministic = self.config.deterministic;
        let Some(channel) = self.channels.get_mut(&id) else {
            return Arc::new(Planned::empty(kind));
        };
        if let Some(plan) = channel.plans.get(&hash)
            && plan.kind == kind
            && plan.element == element
            && plan.accumulator == accumulator
            && plan.inputs.as_slice() == inputs
            && plan.outputs.as_slice() == outputs
        {
            return plan.clone();
        }
        let (me, ranks) = (channel.me, channel.size());
        let shape = schedule::Shape { ranks, me, hosts: &channel.hosts, element, accumulator, deterministic };
        let schedule = schedule::plan(kind, &shape, inputs, outputs, &self.config.tuning);
        let next = (me + 1) % ranks.max(1);
        let tells =
            schedule.lanes.first().and_then(|lane| lane.rounds.first()).is_some_and(|round| {
                round.steps.iter().any(|step| matches!(step, Step::Send { to, .. } if *to == next))
            });
        let plan = Arc::new(Planned {
            kind,
            element,
            accumulator,
            inputs: SmallVec::from_slice(inputs),
            outputs: SmallVec::from_slice(outputs),
            schedule,
            announce: !tells && ranks > 1,
        });
        if channel.plans.len() >= PLANS {
            channel.plans.clear();
        }
        channel.plans.insert(hash, plan.clone());
        plan
    }

    /// Sets an operation going.
    pub fn begin(&mut self, key: OpKey) {
        let Some(op) = self.ops.get_mut(key) else { return };
        let announce = op.parts.iter().all(|part| part.plan.announce);
        let window = if op.parts.len() > 1 { WIDE_WINDOW } else { WINDOW };
        let (id, seq, fingerprint) = (op.channel, op.seq, op.fingerprint);
        while op.lanes.len() < window {
            let mut lane = LaneState::default();
            if !op.next(&mut lane) {
                break;
            }
            lane.queued = true;
            op.lanes.push(lane);
            op.live += 1;
            self.ready.push_back((key, op.lanes.len() as u32 - 1));
        }
        let nothing = op.live == 0;
        if announce && let Some(channel) = self.channels.get(&id) {
            let next = channel.members[((channel.me + 1) % channel.size()) as usize];
            let mut header = Header::new(Frame::Announce, id);
            header.seq = seq;
            header.fingerprint = fingerprint;
            if !self.endpoints[next as usize].try_eager(&header, std::ptr::null(), 0) {
                self.push_item(next, super::endpoint::Item::Bare(header));
            }
        }
        if nothing {
            self.finish(key);
        }
    }

    /// Takes a lane as far as it goes without waiting.
    pub fn advance(&mut self, key: OpKey, slot: u32) {
        if let Some(lane) = self.ops.get_mut(key).and_then(|op| op.lanes.get_mut(slot as usize)) {
            lane.queued = false;
        }
        let mut budget = STEP;
        loop {
            let Some(op) = self.ops.get_mut(key) else { return };
            let lane = &mut op.lanes[slot as usize];
            if op.failed || !lane.live {
                return;
            }
            let plan = op.parts[lane.part as usize].plan.clone();
            let script = &plan.schedule.lanes[lane.lane as usize];
            let Some(round) = script.rounds.get(lane.round as usize) else {
                self.end_lane(key, slot);
                return;
            };
            if !lane.posted {
                lane.posted = true;
                // Held until all are posted, so that one completing at once doesn't end the round.
                lane.outstanding = 1;
                if lane.scratch.is_none() && script.scratch > 0 {
                    lane.scratch = Some(self.memory.take(script.scratch * plan.element));
                }
                if lane.partial.is_none() && script.partial > 0 {
                    lane.partial = Some(self.memory.take(script.partial * plan.accumulator));
                }
                for step in &round.steps {
                    if matches!(step, Step::Send { .. } | Step::Recv { .. }) && !self.post(key, slot, step) {
                        return;
                    }
                }
                let Some(op) = self.ops.get_mut(key) else { return };
                op.lanes[slot as usize].outstanding -= 1;
                continue;
            }
            // Local steps don't depend on messages of their own round, so they run while those are under way.
            let mut local = round.steps.iter().filter(|step| matches!(step, Step::Copy { .. } | Step::Reduce { .. }));
            if let Some(step) = local.nth(lane.step as usize) {
                if budget == 0 {
                    lane.queued = true;
                    self.ready.push_back((key, slot));
                    return;
                }
                budget = budget.saturating_sub(op.local(slot, step));
                continue;
            }
            if lane.outstanding > 0 {
                return;
            }
            lane.round += 1;
            lane.step = 0;
            lane.posted = false;
        }
    }

    /// Posts a message of a round. `false` if the operation failed over it.
    fn post(&mut self, key: OpKey, slot: u32, step: &Step) -> bool {
        let Some(op) = self.ops.get_mut(key) else { return false };
        let (id, seq, fingerprint) = (op.channel, op.seq, op.fingerprint);
        let lane = &op.lanes[slot as usize];
        let (rank, tag, region) = match step {
            Step::Send { to, tag, from } => (*to, *tag, from),
            Step::Recv { from, tag, into } => (*from, *tag, into),
            Step::Copy { .. } | Step::Reduce { .. } => return true,
        };
        let message = message_key(lane.part, lane.lane, tag);
        let (data, len) = op.region(slot, region);
        op.lanes[slot as usize].outstanding += 1;
        let sends = matches!(step, Step::Send { .. });
        let known = self.channels.get(&id).map_or(u32::MAX, |channel| channel.members[rank as usize]);
        let wanted = MatchKey { endpoint: known, channel: id, seq, key: message };
        // What a rank sent before it went is good.
        let endpoint = if !sends && self.came(&wanted) {
            known
        } else {
            let Some(endpoint) = self.peer(id, rank, key) else { return false };
            endpoint
        };
        let through = if sends {
            let mut header = Header::new(Frame::Eager, id);
            header.seq = seq;
            header.key = message;
            header.fingerprint = fingerprint;
            self.send(key, slot, endpoint, header, data, len)
        } else {
            self.receive(key, slot, wanted, data, len)
        };
        match self.ops.get_mut(key) {
            Some(op) if !op.failed => {
                if through {
                    op.lanes[slot as usize].outstanding -= 1;
                }
                true
            }
            _ => false,
        }
    }

    fn end_lane(&mut self, key: OpKey, slot: u32) {
        let Some(op) = self.ops.get_mut(key) else { return };
        let lane = &mut op.lanes[slot as usize];
        if let Some(buffer) = lane.scratch.take() {
            self.memory.give(buffer);
        }
        if let Some(buffer) = lane.partial.take() {
            self.memory.give(buffer);
        }
        lane.live = false;
        let mut next = LaneState::default();
        if op.next(&mut next) {
            next.queued = true;
            op.lanes[slot as usize] = next;
            self.ready.push_back((key, slot));
            return;
        }
        op.live -= 1;
        if op.live == 0 {
            self.finish(key);
        }
    }

    /// All messages are through: spreads packed results, then ends the operation.
    pub fn finish(&mut self, key: OpKey) {
        let Some(op) = self.ops.get_mut(key) else { return };
        while let Some(unpack) = op.unpack.last() {
            let piece = (STEP / unpack.dtype.size()).min(unpack.count - op.unpacked);
            // SAFETY: the packed memory and the tensor have `count` elements, and nobody else touches them now.
            unsafe {
                let range = op.unpacked..op.unpacked + piece;
                let from = unpack.from.add(op.unpacked * unpack.dtype.size());
                kernel::unpack(&unpack.into.layout, unpack.dtype, from, unpack.into.data, range);
            }
            op.unpacked += piece;
            if op.unpacked == unpack.count {
                op.unpack.pop();
                op.unpacked = 0;
            }
        }
        let (id, seq) = (op.channel, op.seq);
        let direct = op.kind.is_point_to_point();
        self.callbacks.extend(op.ticket.end(None));
        self.ended += 1;
        if let Some(channel) = self.channels.get_mut(&id) {
            channel.pending -= 1;
            if !direct {
                channel.active.retain(|(_, active)| *active != key);
                channel.mark_done(seq);
            }
        }
        self.retire(key);
    }

    /// Forgets an operation; its memory goes back.
    pub fn retire(&mut self, key: OpKey) {
        let Some(mut op) = self.ops.remove(key) else { return };
        self.garbage.extend(op.keep.take());
        for buffer in op.staging.drain(..) {
            self.memory.give(buffer);
        }
        for lane in &mut op.lanes {
            for buffer in [lane.scratch.take(), lane.partial.take()].into_iter().flatten() {
                self.memory.give(buffer);
            }
        }
    }
}

/// Plans kept per channel.
const PLANS: usize = 256;

impl Planned {
    fn empty(kind: Kind) -> Self {
        Planned {
            kind,
            element: 1,
            accumulator: 1,
            inputs: SmallVec::new(),
            outputs: SmallVec::new(),
            schedule: schedule::Schedule::default(),
            announce: false,
        }
    }
}

impl Op {
    /// Moves on to the next lane not started, if there is one.
    fn next(&mut self, lane: &mut LaneState) -> bool {
        while let Some(part) = self.parts.get(self.next_part as usize) {
            if (self.next_lane as usize) < part.plan.schedule.lanes.len() {
                lane.part = self.next_part;
                lane.lane = self.next_lane;
                lane.live = true;
                self.next_lane += 1;
                return true;
            }
            self.next_part += 1;
            self.next_lane = 0;
        }
        false
    }

    /// Address and bytes of a region.
    fn region(&self, slot: u32, region: &Region) -> (*mut u8, usize) {
        let lane = &self.lanes[slot as usize];
        let part = &self.parts[lane.part as usize];
        let temporary = |buffer: &Option<Buffer>| buffer.as_ref().map_or(std::ptr::null_mut(), Buffer::as_ptr);
        let (base, element) = match region.space {
            Space::Input => (part.inputs[region.block as usize].0, part.plan.element),
            Space::Output => (part.outputs[region.block as usize].0, part.plan.element),
            Space::Scratch => (temporary(&lane.scratch), part.plan.element),
            Space::Partial => (temporary(&lane.partial), part.plan.accumulator),
        };
        (base.wrapping_add(region.offset * element), region.len * element)
    }

    /// Does a piece of a local step; returns the bytes it touched.
    fn local(&mut self, slot: u32, step: &Step) -> usize {
        let offset = self.lanes[slot as usize].offset;
        let (len, piece, bytes) = match step {
            Step::Copy { from, into } => {
                let ((from, bytes), (into, _)) = (self.region(slot, from), self.region(slot, into));
                let piece = STEP.min(bytes - offset);
                if from != into && piece > 0 {
                    // SAFETY: regions of this operation, disjoint or the same.
                    unsafe { kernel::copy(into.add(offset), from.add(offset), piece) };
                }
                if from == into { (bytes, bytes - offset, 0) } else { (bytes, piece, piece) }
            }
            Step::Reduce { sources, into } => {
                let part = &self.parts[self.lanes[slot as usize].part as usize];
                let piece = (STEP / part.plan.accumulator).max(1).min(into.len - offset);
                let element = |space| if space == Space::Partial { part.plan.accumulator } else { part.plan.element };
                let from: SmallVec<[Source; 16]> = sources
                    .iter()
                    .map(|source| Source {
                        data: self.region(slot, source).0.wrapping_add(offset * element(source.space)),
                        partial: source.space == Space::Partial,
                    })
                    .collect();
                let data = self.region(slot, into).0.wrapping_add(offset * element(into.space));
                let target = if into.space == Space::Partial { Target::Partial(data) } else { Target::Raw(data) };
                // SAFETY: regions of this operation with that many elements; the target is apart from the sources or one
                // of them.
                unsafe { kernel::reduce(part.reduction, part.dtype, self.ranks, &from, target, piece) };
                (into.len, piece, piece * part.plan.accumulator * from.len())
            }
            Step::Send { .. } | Step::Recv { .. } => (0, 0, 0),
        };
        let lane = &mut self.lanes[slot as usize];
        lane.offset += piece;
        if lane.offset >= len {
            lane.offset = 0;
            lane.step += 1;
        }
        bytes
    }
}
