//! The state that whoever holds the driver token works on: links, messages, operations.
//!
//! Everything here runs under one lock and never waits. A step moves at most [`STEP`] bytes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use podring_collective::{Collective, Kind};
use rustc_hash::FxHashMap;
use slotmap::{Key, KeyData, SlotMap};
use smallvec::SmallVec;

use super::channel::{Body, Channel, Early, EarlyDirect, Inquest, Posted, Record};
use super::endpoint::{Endpoint, In, Item, OpKey, Out, RecvKey, SendKey, Stream};
use super::play::{Blocks, Op};
use super::ticket::{Callback, Keep, Ticket};
use super::{Config, net::Net};
use crate::error::Failure;
use crate::link::shm;
use crate::memory::{Buffer, SharedPool};
use crate::wire::{Frame, HEADER, Header, HubId, POINT_TO_POINT};

/// Bytes moved or combined in one go, so that the token is never held long without a look at the rest.
pub(crate) const STEP: usize = 256 << 10;
/// Frames read from one link before the next link's turn.
const BURST: usize = 64;
/// A failed channel waits this long for what the others have to say.
const INQUEST: Duration = Duration::from_millis(500);

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
struct Orphan {
    endpoint: u32,
    header: Header,
    body: Body,
}

pub(crate) struct Engine {
    pub config: Config,
    pub net: Net,
    pub endpoints: Vec<Endpoint>,
    pub by_hub: FxHashMap<HubId, u32>,
    pub channels: FxHashMap<u64, Channel>,
    closed: VecDeque<u64>,
    orphans: FxHashMap<u64, Vec<Orphan>>,
    pub ops: SlotMap<OpKey, Op>,
    pub sends: SlotMap<SendKey, Sending>,
    pub recvs: SlotMap<RecvKey, Receiving>,
    pub expected: FxHashMap<MatchKey, RecvKey>,
    unexpected: FxHashMap<MatchKey, Early>,
    pub ready: VecDeque<(OpKey, u32)>,
    pulls: VecDeque<RecvKey>,
    dirty: Vec<u32>,
    pub memory: SharedPool,
    sent: Vec<SendKey>,
    /// Callbacks of operations that ended, to be run without the lock.
    pub callbacks: Vec<Callback>,
    /// Keeps to be dropped without the lock.
    pub garbage: Vec<Keep>,
    /// Operations ended so far.
    pub ended: u64,
    /// Channels with an inquest open.
    pub inquests: usize,
    /// Peers were asked to ring when they write.
    pub armed: bool,
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
            armed: false,
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

    fn run_ready(&mut self) -> bool {
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

    // ---- output ----

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
            peer.items.push_back(item);
            self.mark_dirty(endpoint);
        }
    }

    fn push_owned(&mut self, endpoint: u32, mut header: Header, bytes: &[u8]) {
        // An error text that doesn't fit a frame is cut: it must never be the reason for another failure.
        let bytes = &bytes[..bytes.len().min(OWNED_LIMIT)];
        header.len = bytes.len() as u32;
        self.push_item(endpoint, Item::Owned { header, bytes: bytes.into() });
    }

    fn flush_dirty(&mut self) -> bool {
        if self.dirty.is_empty() {
            return false;
        }
        let now = Instant::now();
        let mut moved = false;
        let mut index = 0;
        while index < self.dirty.len() {
            let endpoint = self.dirty[index];
            if matches!(self.endpoints[endpoint as usize].out, Out::Idle | Out::Retry) {
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

    /// A send's memory is free again.
    pub fn send_done(&mut self, send: SendKey) {
        if let Some(sending) = self.sends.remove(send) {
            self.message_done(sending.op, sending.lane);
        }
    }

    // ---- input ----

    /// Reads frames from an endpoint's ring.
    pub fn read_ring(&mut self, endpoint: u32, burst: usize) -> bool {
        let mut moved = false;
        for _ in 0..burst {
            let In::Shm { reader, .. } = &mut self.endpoints[endpoint as usize].inbound else { return moved };
            let (header, first, second) = match reader.peek() {
                Ok(Some(slot)) => (slot.header, std::ptr::from_ref(slot.first), std::ptr::from_ref(slot.second)),
                Ok(None) => break,
                Err(error) => {
                    self.endpoints[endpoint as usize].inbound = In::None;
                    self.lose(endpoint, format!("corrupt shared memory: {error}"));
                    return true;
                }
            };
            moved = true;
            // SAFETY: the pieces stay untouched until `pop`, and the mapping lives as long as the endpoint's inbound,
            // which `handle` may drop only by losing the endpoint, after which the pieces are not used again.
            unsafe { self.handle(endpoint, &header, &*first, &*second) };
            let In::Shm { reader, bell, .. } = &mut self.endpoints[endpoint as usize].inbound else { return true };
            reader.pop(header.len as usize);
            if reader.writer_sleeps() {
                super::endpoint::ring(bell);
            }
        }
        moved
    }

    /// Acts on a frame whose payload is at hand, in two pieces.
    pub fn handle(&mut self, endpoint: u32, header: &Header, first: &[u8], second: &[u8]) {
        match header.frame {
            Frame::Eager => self.message(endpoint, header, Some((first, second))),
            Frame::Ready => self.message(endpoint, header, None),
            Frame::Data => {
                self.data(endpoint, header.cookie, first);
                self.data(endpoint, header.cookie, second);
            }
            Frame::Clear => {
                let send = SendKey::from(KeyData::from_ffi(header.cookie));
                if let Some(sending) = self.sends.get(send)
                    && sending.endpoint == endpoint
                {
                    let stream = Stream {
                        send,
                        data: sending.data,
                        len: sending.len,
                        offset: 0,
                        slot: header.addr,
                        channel: header.channel,
                    };
                    self.endpoints[endpoint as usize].streams.push_back(stream);
                    self.mark_dirty(endpoint);
                }
            }
            Frame::Ack => {
                let send = SendKey::from(KeyData::from_ffi(header.cookie));
                if self.sends.get(send).is_some_and(|sending| sending.endpoint == endpoint) {
                    self.send_done(send);
                }
            }
            Frame::Announce => {
                if let Some(rank) = self.rank_in(header.channel, endpoint) {
                    self.check(header.channel, rank, header.seq, header.fingerprint);
                } else {
                    self.orphan(endpoint, header, Body::Bytes { buffer: None, len: 0 });
                }
            }
            Frame::Abort => {
                let text = [first, second].concat();
                let failure = serde_json::from_slice(&text)
                    .unwrap_or_else(|_| Failure::Aborted { by: None, why: "a peer's unreadable report".into() });
                if self.channels.contains_key(&header.channel) {
                    self.fail_channel(header.channel, failure, false);
                }
            }
            Frame::Ledger => {
                if let Some(rank) = self.rank_in(header.channel, endpoint)
                    && let Some(channel) = self.channels.get_mut(&header.channel)
                    && let Some(inquest) = &mut channel.inquest
                    && inquest.seq == header.seq
                {
                    let text = [first, second].concat();
                    inquest.rows[rank as usize] = Some(String::from_utf8_lossy(&text).into_owned());
                }
            }
            Frame::Ping => {}
            Frame::Bye => {
                if let Some(rank) = self.rank_in(header.channel, endpoint) {
                    if let Some(channel) = self.channels.get_mut(&header.channel) {
                        channel.left[rank as usize] = true;
                    }
                    self.rank_gone(header.channel, rank, "it destroyed the group");
                } else {
                    self.orphan(endpoint, header, Body::Bytes { buffer: None, len: 0 });
                }
            }
        }
    }

    fn rank_in(&self, channel: u64, endpoint: u32) -> Option<u32> {
        self.channels.get(&channel)?.rank_of.get(&endpoint).copied()
    }

    fn orphan(&mut self, endpoint: u32, header: &Header, body: Body) {
        if self.closed.contains(&header.channel) || self.channels.contains_key(&header.channel) {
            self.refuse(endpoint, header.channel, &body);
            return;
        }
        self.orphans.entry(header.channel).or_default().push(Orphan { endpoint, header: *header, body });
    }

    /// Lets the sender of an offered message have its memory back unread, and forgets an early one.
    fn refuse(&mut self, endpoint: u32, channel: u64, body: &Body) {
        if let Body::Ready { cookie, .. } = body {
            self.ack(endpoint, channel, *cookie);
        }
    }

    fn ack(&mut self, endpoint: u32, channel: u64, cookie: u64) {
        let mut header = Header::new(Frame::Ack, channel);
        header.cookie = cookie;
        if !self.endpoints[endpoint as usize].try_eager(&header, std::ptr::null(), 0) {
            self.push_item(endpoint, Item::Bare(header));
        }
    }

    /// A message or the offer of one has come.
    fn message(&mut self, endpoint: u32, header: &Header, payload: Option<(&[u8], &[u8])>) {
        let Some(rank) = self.rank_in(header.channel, endpoint) else {
            let body = self.keep_body(header, payload);
            self.orphan(endpoint, header, body);
            return;
        };
        if header.flags & POINT_TO_POINT != 0 {
            let Some(channel) = self.channels.get_mut(&header.channel) else { return };
            if channel.failed.is_some() {
                if payload.is_none() {
                    self.ack(endpoint, header.channel, header.cookie);
                }
                return;
            }
            let wanted = channel
                .posted
                .iter()
                .position(|posted| posted.tag == header.key && posted.from.is_none_or(|from| from == rank));
            match wanted {
                Some(index) => {
                    let posted = channel.posted.remove(index);
                    self.deliver_direct(posted.recv, endpoint, rank, header, payload);
                }
                None => {
                    let body = self.keep_body(header, payload);
                    let early = Early { fingerprint: header.fingerprint, total: header.total, body };
                    if let Some(channel) = self.channels.get_mut(&header.channel) {
                        channel.early.push_back(EarlyDirect { from: rank, tag: header.key, early });
                    }
                }
            }
            return;
        }
        if !self.check(header.channel, rank, header.seq, header.fingerprint) {
            if payload.is_none() {
                self.ack(endpoint, header.channel, header.cookie);
            }
            return;
        }
        let key = MatchKey { endpoint, channel: header.channel, seq: header.seq, key: header.key };
        match self.expected.remove(&key) {
            Some(recv) => self.deliver(recv, endpoint, header, payload),
            None => {
                let body = self.keep_body(header, payload);
                self.unexpected.insert(key, Early { fingerprint: header.fingerprint, total: header.total, body });
            }
        }
    }

    fn keep_body(&mut self, header: &Header, payload: Option<(&[u8], &[u8])>) -> Body {
        match payload {
            Some((first, second)) if !first.is_empty() => {
                let len = first.len() + second.len();
                let buffer = self.memory.take(len);
                // SAFETY: the buffer has at least `len` bytes.
                unsafe {
                    std::ptr::copy_nonoverlapping(first.as_ptr(), buffer.as_ptr(), first.len());
                    std::ptr::copy_nonoverlapping(second.as_ptr(), buffer.as_ptr().add(first.len()), second.len());
                }
                Body::Bytes { buffer: Some(buffer), len }
            }
            Some(_) => Body::Bytes { buffer: None, len: 0 },
            None => Body::Ready { addr: header.addr, cookie: header.cookie },
        }
    }

    /// Compares what a rank called with what this one called or will call. `false` if they differ.
    fn check(&mut self, id: u64, rank: u32, seq: u64, fingerprint: u64) -> bool {
        let Some(channel) = self.channels.get_mut(&id) else { return false };
        if channel.failed.is_some() {
            return false;
        }
        if seq >= channel.started {
            let heard = channel.heard.entry(seq).or_default();
            if !heard.contains(&(rank, fingerprint)) {
                heard.push((rank, fingerprint));
            }
            return true;
        }
        match channel.fingerprint(seq) {
            Some(mine) if mine != fingerprint => {
                self.mismatch(id, seq, format!("rank {rank} differs from this one"));
                false
            }
            _ => true,
        }
    }

    pub fn mismatch(&mut self, id: u64, seq: u64, what: String) {
        let Some(channel) = self.channels.get(&id) else { return };
        let what = what.replace("this one", &format!("rank {}", channel.me));
        self.fail_channel(id, Failure::Mismatch { seq, what, ledger: Vec::new() }, true);
    }

    fn deliver_direct(
        &mut self,
        recv: RecvKey,
        endpoint: u32,
        rank: u32,
        header: &Header,
        payload: Option<(&[u8], &[u8])>,
    ) {
        if let Some(receiving) = self.recvs.get_mut(recv) {
            receiving.endpoint = endpoint;
            let op = receiving.op;
            if let Some(op) = self.ops.get(op) {
                op.ticket.set_source(rank);
                if op.fingerprint != header.fingerprint {
                    let (channel, seq) = (op.channel, op.seq);
                    if payload.is_none() {
                        self.ack(endpoint, header.channel, header.cookie);
                    }
                    self.mismatch(channel, seq, format!("rank {rank} sends another dtype than this one receives"));
                    return;
                }
            }
        }
        self.deliver(recv, endpoint, header, payload);
    }

    fn deliver(&mut self, recv: RecvKey, endpoint: u32, header: &Header, payload: Option<(&[u8], &[u8])>) {
        match payload {
            None => self.deliver_ready(recv, endpoint, header.total, header.addr, header.cookie),
            Some((first, second)) => {
                let Some(receiving) = self.recvs.get(recv) else { return };
                if header.total != receiving.len as u64 || first.len() + second.len() != receiving.len {
                    self.wrong_length(recv, endpoint, header.total);
                    return;
                }
                let (op, lane) = (receiving.op, receiving.lane);
                // SAFETY: the receive's memory has exactly that many bytes.
                unsafe {
                    std::ptr::copy_nonoverlapping(first.as_ptr(), receiving.data, first.len());
                    std::ptr::copy_nonoverlapping(second.as_ptr(), receiving.data.add(first.len()), second.len());
                }
                self.recvs.remove(recv);
                self.message_done(op, lane);
            }
        }
    }

    fn deliver_ready(&mut self, recv: RecvKey, endpoint: u32, total: u64, addr: u64, cookie: u64) {
        let Some(receiving) = self.recvs.get_mut(recv) else { return };
        let op = receiving.op;
        if total != receiving.len as u64 {
            let channel = self.ops.get(op).map_or(0, |op| op.channel);
            self.ack(endpoint, channel, cookie);
            self.wrong_length(recv, endpoint, total);
            return;
        }
        if self.config.cma && self.endpoints[endpoint as usize].readable.is_some() {
            receiving.stage = Stage::Pulling { addr, cookie };
            self.pulls.push_back(recv);
            return;
        }
        receiving.stage = Stage::Streaming;
        let channel = self.ops.get(op).map_or(0, |op| op.channel);
        let mut header = Header::new(Frame::Clear, channel);
        header.cookie = cookie;
        header.addr = recv.data().as_ffi();
        self.push_item(endpoint, Item::Bare(header));
    }

    fn wrong_length(&mut self, recv: RecvKey, endpoint: u32, total: u64) {
        let Some(receiving) = self.recvs.get(recv) else { return };
        let (len, op) = (receiving.len, receiving.op);
        if let Some(op) = self.ops.get(op) {
            let (id, seq, kind) = (op.channel, op.seq, op.kind);
            let rank = self.rank_in(id, endpoint).unwrap_or(u32::MAX);
            let what = format!("{}: rank {rank} sends {total} bytes where this one expects {len}", kind.name());
            self.mismatch(id, seq, what);
        }
    }

    /// The next bytes of a streamed message.
    pub fn data(&mut self, endpoint: u32, slot: u64, bytes: &[u8]) {
        if let Some((into, room)) = self.window(endpoint, slot) {
            let len = bytes.len().min(room);
            // SAFETY: the window is the receive's memory, `room` bytes long.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into, len) };
            self.filled(slot, len);
        }
    }

    /// Where the next bytes of a streamed message go, and how many are missing. `None`: nobody wants them.
    pub fn window(&mut self, endpoint: u32, slot: u64) -> Option<(*mut u8, usize)> {
        let receiving = self.recvs.get(RecvKey::from(KeyData::from_ffi(slot)))?;
        if receiving.endpoint != endpoint || receiving.stage != Stage::Streaming {
            return None;
        }
        // SAFETY: `got` is at most `len`.
        Some((unsafe { receiving.data.add(receiving.got) }, receiving.len - receiving.got))
    }

    /// Bytes were put into a window.
    pub fn filled(&mut self, slot: u64, bytes: usize) {
        let recv = RecvKey::from(KeyData::from_ffi(slot));
        if let Some(receiving) = self.recvs.get_mut(recv) {
            receiving.got += bytes;
            if receiving.got == receiving.len {
                let (op, lane) = (receiving.op, receiving.lane);
                self.recvs.remove(recv);
                self.message_done(op, lane);
            }
        }
    }

    /// Reads a piece of a peer's memory.
    fn pull(&mut self) -> bool {
        let Some(recv) = self.pulls.pop_front() else { return false };
        let Some(receiving) = self.recvs.get_mut(recv) else { return true };
        let Stage::Pulling { addr, cookie } = receiving.stage else { return true };
        let endpoint = receiving.endpoint;
        let Some(pid) = self.endpoints[endpoint as usize].readable else { return true };
        let piece = (receiving.len - receiving.got).min(STEP);
        // SAFETY: the receive's memory from `got` on has that many bytes.
        let got =
            unsafe { shm::read_memory(pid, addr + receiving.got as u64, receiving.data.add(receiving.got), piece) };
        let (op, lane) = (receiving.op, receiving.lane);
        match got {
            Ok(bytes) if bytes > 0 || piece == 0 => {
                receiving.got += bytes;
                if receiving.got < receiving.len {
                    self.pulls.push_back(recv);
                    return true;
                }
                self.recvs.remove(recv);
                let channel = self.ops.get(op).map_or(0, |op| op.channel);
                self.ack(endpoint, channel, cookie);
                self.message_done(op, lane);
            }
            Err(rustix::io::Errno::PERM) => {
                // Permission was there when the link opened and is gone: have it sent from now on.
                self.endpoints[endpoint as usize].readable = None;
                let (total, got) = (receiving.len as u64, receiving.got);
                if got == 0 {
                    self.deliver_ready(recv, endpoint, total, addr, cookie);
                } else {
                    self.lose(endpoint, "its memory may no longer be read".into());
                }
            }
            Ok(_) | Err(rustix::io::Errno::SRCH) => self.lose(endpoint, "its process ended".into()),
            Err(errno) => self.lose(endpoint, format!("its memory can't be read: {errno}")),
        }
        true
    }

    // ---- messages of operations ----

    /// Offers or sends a message. `true` if its memory is free again already.
    pub fn send(
        &mut self,
        op: OpKey,
        lane: u32,
        endpoint: u32,
        mut header: Header,
        data: *const u8,
        len: usize,
    ) -> bool {
        header.total = len as u64;
        let peer = &mut self.endpoints[endpoint as usize];
        let limit = match peer.out {
            Out::Tcp(_) | Out::Dialing { .. } => self.config.eager_tcp,
            _ => self.config.eager_shm,
        };
        if len <= limit {
            header.frame = Frame::Eager;
            header.len = len as u32;
            if peer.try_eager(&header, data, len) {
                return true;
            }
            let send = self.sends.insert(Sending { op, lane, endpoint, data, len });
            self.push_item(endpoint, Item::Eager { header, data, send });
            return false;
        }
        let send = self.sends.insert(Sending { op, lane, endpoint, data, len });
        header.frame = Frame::Ready;
        header.addr = data as u64;
        header.cookie = send.data().as_ffi();
        if !self.endpoints[endpoint as usize].try_eager(&header, std::ptr::null(), 0) {
            self.push_item(endpoint, Item::Bare(header));
        }
        false
    }

    /// Whether a whole message is here already.
    pub fn came(&self, key: &MatchKey) -> bool {
        matches!(self.unexpected.get(key), Some(Early { body: Body::Bytes { .. }, .. }))
    }

    /// Waits for a message. `true` if it is here already.
    pub fn receive(&mut self, op: OpKey, lane: u32, key: MatchKey, data: *mut u8, len: usize) -> bool {
        let endpoint = key.endpoint;
        let recv = |stage| Receiving { op, lane, endpoint, data, len, got: 0, stage };
        if !self.unexpected.is_empty()
            && let Some(early) = self.unexpected.remove(&key)
        {
            let slot = self.recvs.insert(recv(Stage::Waiting(key)));
            return self.deliver_early(slot, endpoint, early);
        }
        let slot = self.recvs.insert(recv(Stage::Waiting(key)));
        self.expected.insert(key, slot);
        false
    }

    /// Completes a receive from what came before. `true` if that was all; the operation is then not told.
    fn deliver_early(&mut self, recv: RecvKey, endpoint: u32, early: Early) -> bool {
        match early.body {
            Body::Ready { addr, cookie } => {
                self.deliver_ready(recv, endpoint, early.total, addr, cookie);
                false
            }
            Body::Bytes { buffer, len } => {
                let Some(receiving) = self.recvs.get(recv) else { return false };
                if len != receiving.len {
                    self.wrong_length(recv, endpoint, len as u64);
                    return false;
                }
                if let Some(buffer) = buffer {
                    // SAFETY: both have `len` bytes.
                    unsafe { std::ptr::copy_nonoverlapping(buffer.as_ptr(), receiving.data, len) };
                    self.memory.give(buffer);
                }
                self.recvs.remove(recv);
                true
            }
        }
    }

    fn message_done(&mut self, op: OpKey, lane: u32) {
        let Some(state) = self.ops.get_mut(op) else { return };
        if state.failed {
            if !self.sends.values().any(|sending| sending.op == op) {
                self.retire(op);
            }
            return;
        }
        if lane == super::play::DIRECT {
            self.finish(op);
        } else if state.message_done(lane) {
            self.ready.push_back((op, lane));
        }
    }

    // ---- starting ----

    /// Starts a call, or fails it.
    pub fn submit(&mut self, request: Request) {
        let id = request.channel;
        let Some(channel) = self.channels.get_mut(&id) else {
            let why = "the group was destroyed".to_owned();
            self.refuse_request(request, Arc::new(Failure::Aborted { by: None, why }));
            return;
        };
        if let Some(failure) = &channel.failed {
            let failure = failure.clone();
            self.refuse_request(request, failure);
            return;
        }
        let (seq, fingerprint, kind) = (request.seq, request.fingerprint, request.collective.kind);
        channel.record(Record::new(seq, fingerprint, &request.collective));
        channel.pending += 1;
        if kind.is_point_to_point() {
            self.start_direct(request);
            return;
        }
        channel.started = channel.started.max(seq + 1);
        let heard = if channel.heard.is_empty() { None } else { channel.heard.remove(&seq) };
        let op = self.start(request);
        if let Some(channel) = self.channels.get_mut(&id) {
            channel.active.push((seq, op));
        }
        let differs = heard.and_then(|heard| heard.into_iter().find(|&(_, theirs)| theirs != fingerprint));
        if let Some((rank, _)) = differs {
            self.mismatch(id, seq, format!("rank {rank} differs from this one"));
            return;
        }
        self.begin(op);
    }

    fn refuse_request(&mut self, request: Request, failure: Arc<Failure>) {
        self.callbacks.extend(request.ticket.end(Some(failure)));
        self.garbage.extend(request.keep);
        for buffer in request.staging {
            self.memory.give(buffer);
        }
        self.ended += 1;
    }

    fn start_direct(&mut self, request: Request) {
        let (id, seq, kind, fingerprint) = (request.channel, request.seq, request.collective.kind, request.fingerprint);
        let element = request.collective.parts.first().map_or(1, |part| part.dtype.size());
        let (source, target) =
            request.parts.first().map_or(((std::ptr::null_mut(), 0), (std::ptr::null_mut(), 0)), |p| {
                let first = |blocks: &Blocks| blocks.first().copied().unwrap_or((std::ptr::null_mut(), 0));
                (first(&p.0), first(&p.1))
            });
        let op = self.start(request);
        match kind {
            Kind::Send { to, tag } => {
                let Some(endpoint) = self.peer(id, to, op) else { return };
                let mut header = Header::new(Frame::Eager, id);
                header.flags = POINT_TO_POINT;
                header.seq = seq;
                header.key = u64::from(tag);
                header.fingerprint = fingerprint;
                if self.send(op, super::play::DIRECT, endpoint, header, source.0, source.1 * element) {
                    self.finish(op);
                }
            }
            Kind::Recv { from, tag } => {
                let tag = u64::from(tag);
                let Some(channel) = self.channels.get_mut(&id) else { return };
                let early = channel
                    .early
                    .iter()
                    .position(|early| early.tag == tag && from.is_none_or(|from| from == early.from));
                let endpoint = from.map_or(u32::MAX, |from| channel.members[from as usize]);
                let found = early.and_then(|index| channel.early.remove(index));
                let (data, len) = (target.0, target.1 * element);
                let lane = super::play::DIRECT;
                let recv = self.recvs.insert(Receiving { op, lane, endpoint, data, len, got: 0, stage: Stage::Posted });
                let Some(found) = found else {
                    // Nothing more can come from a dead process than what has come.
                    if let Some(from) = from
                        && self.peer(id, from, op).is_none()
                    {
                        return;
                    }
                    if let Some(channel) = self.channels.get_mut(&id) {
                        channel.posted.push(Posted { from, tag, recv });
                    }
                    return;
                };
                let endpoint = self.channels.get(&id).map_or(u32::MAX, |channel| channel.members[found.from as usize]);
                if let Some(receiving) = self.recvs.get_mut(recv) {
                    receiving.endpoint = endpoint;
                }
                if let Some(op) = self.ops.get(op) {
                    op.ticket.set_source(found.from);
                }
                if found.early.fingerprint != fingerprint {
                    self.refuse(endpoint, id, &found.early.body);
                    let what = format!("rank {} sends another dtype than this one receives", found.from);
                    self.mismatch(id, seq, what);
                } else if self.deliver_early(recv, endpoint, found.early) {
                    self.finish(op);
                }
            }
            _ => {}
        }
    }

    /// The endpoint of a rank; if it is gone, the operation that needs it fails.
    pub fn peer(&mut self, id: u64, rank: u32, op: OpKey) -> Option<u32> {
        let channel = self.channels.get(&id)?;
        let endpoint = channel.members[rank as usize];
        let how = if channel.left[rank as usize] {
            Some("it destroyed the group".to_owned())
        } else {
            self.endpoints[endpoint as usize].dead.clone()
        };
        let Some(how) = how else { return Some(endpoint) };
        let failure = self.lost(id, rank, how, Some(op));
        self.fail_channel(id, failure, true);
        None
    }

    fn lost(&self, id: u64, rank: u32, how: String, op: Option<OpKey>) -> Failure {
        let endpoint = self.channels.get(&id).map_or(u32::MAX, |channel| channel.members[rank as usize]);
        let host = self.endpoints.get(endpoint as usize).map_or_else(|| "unknown".into(), Endpoint::host);
        let (name, seq) = match op.and_then(|op| self.ops.get(op)) {
            Some(op) => (Some(op.describe()), op.seq),
            None => (None, 0),
        };
        Failure::PeerLost { rank, host, how, op: name, seq }
    }

    // ---- failing ----

    /// Nothing more comes from or goes to a process. What it sent before is used.
    pub fn lose(&mut self, endpoint: u32, how: String) {
        if self.endpoints[endpoint as usize].dead.is_some() {
            return;
        }
        tracing::debug!(endpoint, how, "peer lost");
        self.endpoints[endpoint as usize].dead = Some(how.clone());
        // What it wrote before it died is still in the ring.
        while self.read_ring(endpoint, BURST) {}
        let peer = &mut self.endpoints[endpoint as usize];
        if matches!(peer.out, Out::Shm { bell: None, .. }) {
            self.net.unwelcomed -= 1;
        }
        peer.items.clear();
        peer.streams.clear();
        peer.out = Out::Idle;
        peer.inbound = In::None;
        peer.readable = None;
        peer.pidfd = None;
        let concerned: SmallVec<[(u64, u32); 8]> = self
            .channels
            .iter()
            .filter_map(|(&id, channel)| channel.rank_of.get(&endpoint).map(|&rank| (id, rank)))
            .collect();
        for (id, rank) in concerned {
            self.rank_gone(id, rank, &how);
        }
        // Nobody reads this memory any more.
        let orphaned: Vec<SendKey> =
            self.sends.iter().filter(|(_, sending)| sending.endpoint == endpoint).map(|(key, _)| key).collect();
        for send in orphaned {
            let op = self.sends.remove(send).map(|sending| sending.op);
            if let Some(op) = op
                && self.ops.get(op).is_some_and(|state| state.failed)
                && !self.sends.values().any(|sending| sending.op == op)
            {
                self.retire(op);
            }
        }
    }

    /// Fails a channel whose operations under way need a rank that is gone; those that don't may still finish.
    fn rank_gone(&mut self, id: u64, rank: u32, how: &str) {
        if let Some(inquest) = self.channels.get_mut(&id).and_then(|channel| channel.inquest.as_mut()) {
            inquest.rows[rank as usize].get_or_insert_with(|| format!("gone: {how}"));
        }
        let needing = self.ops.iter().find(|(key, op)| op.channel == id && !op.failed && self.needs(*key, op, rank));
        if let Some((op, _)) = needing {
            let failure = self.lost(id, rank, how.to_owned(), Some(op));
            self.fail_channel(id, failure, true);
        }
    }

    fn needs(&self, key: OpKey, op: &Op, rank: u32) -> bool {
        let Some(channel) = self.channels.get(&op.channel) else { return false };
        let endpoint = channel.members[rank as usize];
        if self.sends.values().any(|sending| sending.op == key && sending.endpoint == endpoint) {
            return true;
        }
        if self.recvs.values().any(|receiving| receiving.op == key && receiving.endpoint == endpoint) {
            return true;
        }
        if let Kind::Recv { from: None, .. } = op.kind {
            let gone = |(rank, &endpoint): (usize, &u32)| {
                rank as u32 == channel.me
                    || channel.left[rank]
                    || self.endpoints.get(endpoint as usize).is_none_or(|peer| peer.dead.is_some())
            };
            return channel.members.iter().enumerate().all(gone);
        }
        op.still_needs(rank)
    }

    /// Fails a channel: at once, or, where a table of calls explains it, when the others have answered.
    pub fn fail_channel(&mut self, id: u64, failure: Failure, tell: bool) {
        let Some(channel) = self.channels.get_mut(&id) else { return };
        if channel.failed.is_some() {
            return;
        }
        if let Some(inquest) = &mut channel.inquest {
            if failure.weight() > inquest.failure.weight() {
                inquest.failure = failure;
            }
            return;
        }
        let mut failure = failure;
        let peers: SmallVec<[u32; 8]> = channel.members.iter().copied().filter(|&peer| peer != u32::MAX).collect();
        let seq = failure.ledger_mut().map(|(seq, _)| seq);
        let called = seq.map(|seq| channel.called(seq));
        if let (Some(seq), Some(called)) = (seq, &called) {
            let mut rows: Vec<Option<String>> = vec![None; channel.members.len()];
            rows[channel.me as usize] = Some(called.clone());
            for (rank, &endpoint) in channel.members.iter().enumerate() {
                if let Some(how) = self.endpoints.get(endpoint as usize).and_then(|peer| peer.dead.as_ref()) {
                    rows[rank] = Some(format!("gone: {how}"));
                } else if channel.left[rank] {
                    rows[rank] = Some("gone: it destroyed the group".into());
                }
            }
            channel.inquest = Some(Inquest { failure: failure.clone(), seq, rows, until: Instant::now() + INQUEST });
            self.inquests += 1;
        }
        if tell || called.is_some() {
            let report = serde_json::to_vec(&failure).unwrap_or_default();
            for &endpoint in &peers {
                // Everybody with a table to fill spreads it: the first report may have gone to some only.
                self.push_owned(endpoint, Header::new(Frame::Abort, id), &report);
                if let (Some(seq), Some(called)) = (seq, &called) {
                    let mut header = Header::new(Frame::Ledger, id);
                    header.seq = seq;
                    self.push_owned(endpoint, header, called.as_bytes());
                }
            }
        }
        if called.is_none() {
            self.end_channel(id, failure);
        }
    }

    fn end_channel(&mut self, id: u64, failure: Failure) {
        let Some(channel) = self.channels.get_mut(&id) else { return };
        let failure = Arc::new(failure);
        tracing::debug!(channel = channel.name, %failure, "group failed");
        channel.failed = Some(failure.clone());
        let early = std::mem::take(&mut channel.early);
        let members = channel.members.clone();
        channel.heard.clear();
        for direct in early {
            self.refuse(members[direct.from as usize], id, &direct.early.body);
        }
        let stale: Vec<MatchKey> = self.unexpected.keys().filter(|key| key.channel == id).copied().collect();
        for key in stale {
            if let Some(early) = self.unexpected.remove(&key) {
                self.refuse(key.endpoint, id, &early.body);
            }
        }
        let ops: Vec<OpKey> =
            self.ops.iter().filter(|(_, op)| op.channel == id && !op.failed).map(|(key, _)| key).collect();
        for op in ops {
            self.fail_op(op, &failure);
        }
    }

    /// Fails one operation. Its memory is kept while somebody may still read it.
    pub fn fail_op(&mut self, key: OpKey, failure: &Arc<Failure>) {
        let Some(op) = self.ops.get_mut(key) else { return };
        op.failed = true;
        let id = op.channel;
        self.callbacks.extend(op.ticket.end(Some(failure.clone())));
        self.ended += 1;
        if let Some(channel) = self.channels.get_mut(&id) {
            channel.pending -= 1;
            channel.active.retain(|(_, active)| *active != key);
        }
        let receives: Vec<RecvKey> =
            self.recvs.iter().filter(|(_, receiving)| receiving.op == key).map(|(recv, _)| recv).collect();
        for recv in receives {
            let Some(receiving) = self.recvs.remove(recv) else { continue };
            match receiving.stage {
                Stage::Waiting(wanted) => {
                    self.expected.remove(&wanted);
                }
                Stage::Posted => {
                    if let Some(channel) = self.channels.get_mut(&id) {
                        channel.posted.retain(|posted| posted.recv != recv);
                    }
                }
                Stage::Pulling { cookie, .. } => self.ack(receiving.endpoint, id, cookie),
                Stage::Streaming => {}
            }
        }
        let mut never = Vec::new();
        let sends = &self.sends;
        for peer in &mut self.endpoints {
            peer.purge(|send| sends.get(send).is_some_and(|sending| sending.op == key), &mut never);
        }
        for send in never {
            self.sends.remove(send);
        }
        if !self.sends.values().any(|sending| sending.op == key) {
            self.retire(key);
        }
    }

    // ---- channels ----

    /// Adds a channel; what came for it before is used.
    pub fn open(&mut self, id: u64, channel: Channel) {
        self.channels.insert(id, channel);
        for orphan in self.orphans.remove(&id).unwrap_or_default() {
            let Orphan { endpoint, header, body } = orphan;
            match body {
                Body::Bytes { buffer, len } => {
                    let bytes = match &buffer {
                        // SAFETY: filled with `len` bytes when kept.
                        Some(buffer) => unsafe { std::slice::from_raw_parts(buffer.as_ptr(), len) },
                        None => &[],
                    };
                    self.handle(endpoint, &header, bytes, &[]);
                    if let Some(buffer) = buffer {
                        self.memory.give(buffer);
                    }
                }
                Body::Ready { .. } => self.message(endpoint, &header, None),
            }
        }
    }

    /// Removes a channel. What is under way fails.
    pub fn close(&mut self, id: u64) {
        if !self.channels.contains_key(&id) {
            return;
        }
        self.end_channel(id, Failure::Aborted { by: None, why: "the group was destroyed".into() });
        if let Some(channel) = self.channels.remove(&id) {
            if channel.inquest.is_some() {
                self.inquests -= 1;
            }
            for &endpoint in channel.members.iter().filter(|&&endpoint| endpoint != u32::MAX) {
                // Only those who heard from this process before can be waiting for it.
                if !matches!(self.endpoints[endpoint as usize].out, Out::Idle) {
                    self.push_item(endpoint, Item::Bare(Header::new(Frame::Bye, id)));
                }
            }
        }
        if self.closed.len() == CLOSED {
            self.closed.pop_front();
        }
        self.closed.push_back(id);
    }

    // ---- time ----

    /// Acts on what time brings; returns when to look again.
    pub fn tick(&mut self, now: Instant) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let mut sooner = |at: Instant| next = Some(next.map_or(at, |other| other.min(at)));
        let mut overdue: SmallVec<[OpKey; 2]> = SmallVec::new();
        for (key, op) in &self.ops {
            if !op.failed {
                if now >= op.deadline { overdue.push(key) } else { sooner(op.deadline) }
            }
        }
        if self.inquests > 0 {
            let open: Vec<u64> =
                self.channels.iter().filter(|(_, channel)| channel.inquest.is_some()).map(|(&id, _)| id).collect();
            for id in open {
                let Some(channel) = self.channels.get_mut(&id) else { continue };
                if let Some(failure) = channel.verdict(now) {
                    self.inquests -= 1;
                    self.end_channel(id, failure);
                } else if let Some(inquest) = &channel.inquest {
                    sooner(inquest.until.min(now + Duration::from_millis(5)));
                }
            }
        }
        for key in overdue {
            self.overdue(key);
        }
        if let Some(at) = self.keep_alive(now) {
            next = Some(next.map_or(at, |other| other.min(at)));
        }
        next
    }

    fn overdue(&mut self, key: OpKey) {
        let Some(op) = self.ops.get(key) else { return };
        let Some(channel) = self.channels.get(&op.channel) else { return };
        if channel.inquest.is_some() {
            return;
        }
        let mut waiting_on: Vec<u32> = self
            .recvs
            .values()
            .filter(|receiving| receiving.op == key)
            .map(|receiving| receiving.endpoint)
            .chain(self.sends.values().filter(|sending| sending.op == key).map(|sending| sending.endpoint))
            .filter_map(|endpoint| channel.rank_of.get(&endpoint).copied())
            .collect();
        waiting_on.sort_unstable();
        waiting_on.dedup();
        let after_ms = u64::try_from(op.timeout.as_millis()).unwrap_or(u64::MAX);
        let failure = Failure::Timeout {
            op: op.describe(),
            seq: op.seq,
            by: channel.me,
            after_ms,
            waiting_on,
            ledger: Vec::new(),
        };
        let id = op.channel;
        let untouched = op.kind.is_point_to_point()
            && self.recvs.values().all(|receiving| receiving.op != key || receiving.stage == Stage::Posted);
        if untouched {
            // A message that never came leaves nothing half done: the group lives.
            self.fail_op(key, &Arc::new(failure));
        } else {
            self.fail_channel(id, failure, true);
        }
    }
}

/// The longest error text in one frame, in bytes.
const OWNED_LIMIT: usize = 16 << 10;
/// Channels remembered after they were closed, to know their late messages.
const CLOSED: usize = 4096;

const _: () = assert!(OWNED_LIMIT + HEADER < 64 << 10);
