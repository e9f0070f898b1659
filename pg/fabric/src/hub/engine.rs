//! The state that whoever holds the driver token works on: links, messages, operations.
//!
//! Everything here runs under one lock and never waits. A step moves at most [`STEP`] bytes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use podring_collective::Collective;
use rustc_hash::FxHashMap;
use slotmap::SlotMap;
use smallvec::SmallVec;

use super::channel::{Body, Channel, Early, Past};
use super::endpoint::{Endpoint, In, Item, OpKey, Out, RecvKey, SendKey};
use super::play::{Blocks, Op};
use super::ticket::{Callback, Keep, Ticket};
use super::{Config, net::Net};
use crate::memory::{Buffer, SharedPool};
use crate::wire::{HEADER, Header, HubId};

/// Bytes moved or combined in one go, so that the token is never held long without a look at the rest.
pub(crate) const STEP: usize = 256 << 10;
/// Frames read from one link before the next link's turn.
pub(crate) const BURST: usize = 64;
/// The longest error text in one frame, in bytes.
pub(crate) const OWNED_LIMIT: usize = 16 << 10;

const _: () = assert!(OWNED_LIMIT + HEADER < 64 << 10);

/// Identifies a message within a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatchKey {
    pub endpoint: u32,
    pub channel: u64,
    pub seq: u64,
    pub key: u64,
}

/// A long message offered, until the receiver has read it.
pub(crate) struct Sending {
    pub op: OpKey,
    pub lane: u32,
    pub endpoint: u32,
    pub data: *const u8,
    pub len: usize,
    /// Nobody will read it. Its operation ends when this process hears why.
    pub declined: bool,
}

/// A message being waited for or read.
pub(crate) struct Receiving {
    pub op: OpKey,
    pub lane: u32,
    /// The sender's; `u32::MAX` while any may send.
    pub endpoint: u32,
    pub data: *mut u8,
    pub len: usize,
    pub got: usize,
    pub stage: Stage,
}

/// How far a receive is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nothing has come.
    Waiting(MatchKey),
    /// Point-to-point, nothing has come.
    Posted,
    /// This process reads the sender's memory.
    Pulling { addr: u64, cookie: u64 },
    /// The sender sends pieces.
    Streaming,
}

// SAFETY: addresses of operations' memory, kept alive by the operation; the engine runs under one lock.
unsafe impl Send for Sending {}
// SAFETY: as above.
unsafe impl Send for Receiving {}

/// A call, ready to run: tensors packed, addresses known.
pub(crate) struct Request {
    pub channel: u64,
    pub seq: u64,
    pub fingerprint: u64,
    pub collective: Collective,
    pub parts: SmallVec<[(Blocks, Blocks); 1]>,
    pub staging: SmallVec<[Buffer; 2]>,
    pub unpack: SmallVec<[super::play::Unpack; 1]>,
    pub ticket: Arc<Ticket>,
    pub keep: Option<Keep>,
    pub deadline: Instant,
    pub timeout: Duration,
}

// SAFETY: the addresses are the operation's memory, which `keep` keeps alive.
unsafe impl Send for Request {}

/// A message for a channel that doesn't exist here yet.
pub(crate) struct Orphan {
    pub endpoint: u32,
    pub header: Header,
    pub body: Body,
}

pub(crate) struct Engine {
    pub config: Config,
    pub net: Net,
    pub endpoints: Vec<Endpoint>,
    pub by_hub: FxHashMap<HubId, u32>,
    pub channels: FxHashMap<u64, Channel>,
    pub closed: VecDeque<u64>,
    /// The last closed channels that had failed.
    pub past: VecDeque<Past>,
    pub orphans: FxHashMap<u64, Vec<Orphan>>,
    pub ops: SlotMap<OpKey, Op>,
    pub sends: SlotMap<SendKey, Sending>,
    pub recvs: SlotMap<RecvKey, Receiving>,
    pub expected: FxHashMap<MatchKey, RecvKey>,
    pub unexpected: FxHashMap<MatchKey, Early>,
    pub ready: VecDeque<(OpKey, u32)>,
    pub pulls: VecDeque<RecvKey>,
    pub dirty: Vec<u32>,
    pub memory: SharedPool,
    pub sent: Vec<SendKey>,
    /// Callbacks of operations that ended, to be run without the lock.
    pub callbacks: Vec<Callback>,
    /// Keeps to be dropped without the lock.
    pub garbage: Vec<Keep>,
    /// Operations ended so far.
    pub ended: u64,
    /// Channels with an inquest open.
    pub inquests: usize,
    /// Looks since a failure was last told to somebody at whether that has left, by those who wait for it.
    pub settling: u32,
    /// Peers were asked to ring when they write.
    pub armed: bool,
    /// The message being handled was put aside for later.
    pub kept: bool,
}

impl Engine {
    pub fn new(config: Config, net: Net, memory: SharedPool) -> Self {
        Engine {
            config,
            net,
            endpoints: Vec::new(),
            by_hub: FxHashMap::default(),
            channels: FxHashMap::default(),
            closed: VecDeque::new(),
            past: VecDeque::new(),
            orphans: FxHashMap::default(),
            ops: SlotMap::with_key(),
            sends: SlotMap::with_key(),
            recvs: SlotMap::with_key(),
            expected: FxHashMap::default(),
            unexpected: FxHashMap::default(),
            ready: VecDeque::new(),
            pulls: VecDeque::new(),
            dirty: Vec::new(),
            memory,
            sent: Vec::new(),
            callbacks: Vec::new(),
            garbage: Vec::new(),
            ended: 0,
            inquests: 0,
            settling: 0,
            armed: false,
            kept: false,
        }
    }

    /// Something is under way that a sleeper must be woken for.
    pub fn busy(&self) -> bool {
        !self.ops.is_empty() || self.inquests > 0 || !self.dirty.is_empty() || self.net.unwelcomed > 0
    }

    /// One round of work; `true` if anything moved.
    pub fn drive(&mut self) -> bool {
        let mut moved = self.run_ready();
        moved |= self.pull();
        moved |= self.flush_dirty();
        for endpoint in 0..self.endpoints.len() {
            if let In::Shm { reader, .. } = &self.endpoints[endpoint].inbound
                && reader.has_frame()
            {
                moved |= self.read_ring(endpoint as u32, BURST);
            }
        }
        moved |= self.run_ready();
        moved
    }

    /// Asks peers to ring this process's bell. `false`, and nothing asked, if there is work already.
    pub fn arm(&mut self) -> bool {
        self.armed = true;
        let mut work = !self.ready.is_empty() || !self.pulls.is_empty();
        for peer in &mut self.endpoints {
            let waiting = peer.has_output();
            if let Out::Shm { writer, .. } = &mut peer.out
                && waiting
            {
                writer.set_sleeping(true);
                work |= writer.room().is_some_and(|room| room >= super::endpoint::SHM_PIECE);
            }
        }
        for peer in &self.endpoints {
            if let In::Shm { reader, .. } = &peer.inbound {
                reader.set_sleeping(true);
                work |= reader.has_frame();
            }
        }
        if work {
            self.disarm();
        }
        !work
    }

    /// Withdraws what [`Engine::arm`] asked.
    pub fn disarm(&mut self) {
        if !std::mem::take(&mut self.armed) {
            return;
        }
        for peer in &self.endpoints {
            if let In::Shm { reader, .. } = &peer.inbound {
                reader.set_sleeping(false);
            }
            if let Out::Shm { writer, .. } = &peer.out {
                writer.set_sleeping(false);
            }
        }
    }

    /// Bytes of shared memory this process made for its links.
    pub fn shared_memory(&self) -> usize {
        let ring = |peer: &Endpoint| if matches!(peer.out, Out::Shm { .. }) { self.config.ring } else { 0 };
        self.endpoints.iter().map(ring).sum()
    }

    /// Steps that wait for nobody.
    pub fn runnable(&self) -> bool {
        !self.ready.is_empty() || !self.pulls.is_empty()
    }

    pub fn run_ready(&mut self) -> bool {
        let mut moved = false;
        // Only what is ready now: a long local step queues itself again.
        for _ in 0..self.ready.len() {
            let Some((op, lane)) = self.ready.pop_front() else { break };
            self.advance(op, lane);
            moved = true;
        }
        moved
    }

    /// The endpoint of a hub, made if it wasn't known.
    pub fn endpoint(&mut self, hub: HubId) -> u32 {
        if let Some(&index) = self.by_hub.get(&hub) {
            return index;
        }
        let index = self.endpoints.len() as u32;
        self.endpoints.push(Endpoint::new(hub, Instant::now()));
        self.by_hub.insert(hub, index);
        index
    }

    pub fn mark_dirty(&mut self, endpoint: u32) {
        let peer = &mut self.endpoints[endpoint as usize];
        if !peer.dirty {
            peer.dirty = true;
            self.dirty.push(endpoint);
        }
    }

    pub fn push_item(&mut self, endpoint: u32, item: Item) {
        let peer = &mut self.endpoints[endpoint as usize];
        if peer.dead.is_none() {
            if item.takes_back() {
                peer.withhold();
            }
            peer.items.push_back(item);
            self.mark_dirty(endpoint);
        }
    }

    pub fn push_owned(&mut self, endpoint: u32, mut header: Header, bytes: &[u8]) {
        // An error text that doesn't fit a frame is cut: it must never be the reason for another failure.
        let bytes = &bytes[..bytes.len().min(OWNED_LIMIT)];
        header.len = bytes.len() as u32;
        self.settling = 0;
        self.push_item(endpoint, Item::Owned { header, bytes: bytes.into() });
    }

    pub fn flush_dirty(&mut self) -> bool {
        if self.dirty.is_empty() {
            return false;
        }
        let now = Instant::now();
        let mut moved = false;
        let mut index = 0;
        while index < self.dirty.len() {
            let endpoint = self.dirty[index];
            let peer = &self.endpoints[endpoint as usize];
            if peer.dead.is_none() && matches!(peer.out, Out::Idle | Out::Retry) {
                self.open_out(endpoint, now);
            }
            let mut sent = std::mem::take(&mut self.sent);
            let flushed = self.endpoints[endpoint as usize].flush(&mut sent, now);
            for send in sent.drain(..) {
                self.send_done(send);
            }
            self.sent = sent;
            match flushed {
                Ok(any) => moved |= any,
                Err(errno) => self.lose(endpoint, format!("connection lost: {errno}")),
            }
            let peer = &mut self.endpoints[endpoint as usize];
            if peer.has_output() && peer.dead.is_none() {
                index += 1;
            } else {
                peer.dirty = false;
                self.dirty.swap_remove(index);
            }
        }
        moved
    }

    /// A message won't be read: something has failed over there, or the group was left.
    pub fn send_declined(&mut self, send: SendKey) {
        let Some(sending) = self.sends.get_mut(send) else { return };
        sending.declined = true;
        if self.ops.get(sending.op).is_none_or(|op| op.failed) {
            self.send_done(send);
        }
    }

    /// A send's memory is free again.
    pub fn send_done(&mut self, send: SendKey) {
        if let Some(sending) = self.sends.remove(send) {
            self.message_done(sending.op, sending.lane);
        }
    }
}
