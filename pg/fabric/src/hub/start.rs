//! Starting calls, and opening and closing the groups they belong to.

use std::sync::Arc;

use podring_collective::Kind;

use super::channel::{Body, Channel, Past, Posted, Record};
use super::endpoint::{In, Item, Out};
use super::engine::{Engine, Orphan, Receiving, Request, Stage};
use super::play::Blocks;
use crate::error::Failure;
use crate::wire::{Frame, Header, POINT_TO_POINT};

impl Engine {
    /// Starts a call, or fails it.
    pub fn submit(&mut self, request: Request) {
        let id = request.channel;
        let Some(channel) = self.channels.get_mut(&id) else {
            let why = "the group was destroyed".to_owned();
            self.refuse_request(request, Arc::new(Failure::Aborted { by: None, why }));
            return;
        };
        if let Some(failure) = &channel.failed {
            let record = Record::new(request.seq, request.fingerprint, &request.collective);
            let failure = channel.with_call(failure, &record);
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
        let asked = channel.inquest.is_some();
        let heard = if channel.heard.is_empty() { None } else { channel.heard.remove(&seq) };
        let op = self.start(request);
        if let Some(channel) = self.channels.get_mut(&id) {
            channel.active.push((seq, op));
        }
        if asked {
            self.testify(id, seq);
        }
        let differs = heard.and_then(|heard| heard.into_iter().find(|&(_, theirs)| theirs != fingerprint));
        if let Some((rank, _)) = differs {
            self.mismatch(id, seq, format!("rank {rank} differs from this one"));
            return;
        }
        self.begin(op);
    }

    pub fn refuse_request(&mut self, request: Request, failure: Arc<Failure>) {
        self.callbacks.extend(request.ticket.end(Some(failure)));
        self.garbage.extend(request.keep);
        for buffer in request.staging {
            self.memory.give(buffer);
        }
        self.ended += 1;
    }

    pub fn start_direct(&mut self, request: Request) {
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
                    let gone = match from {
                        Some(from) => self.peer(id, from, op).is_none(),
                        None => {
                            // All of them: the first is named.
                            let other = self.channels.get(&id).filter(|channel| self.nobody_left(channel));
                            let other = other.and_then(|channel| (0..channel.size()).find(|&rank| rank != channel.me));
                            other.is_some_and(|rank| self.peer(id, rank, op).is_none())
                        }
                    };
                    if gone {
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
                    self.unlike(recv, found.from, found.early.fingerprint, found.early.total);
                } else if self.deliver_early(recv, endpoint, found.early) {
                    self.finish(op);
                }
            }
            _ => {}
        }
    }

    /// Adds a channel; what came for it before is used.
    pub fn open(&mut self, id: u64, channel: Channel) {
        self.channels.insert(id, channel);
        for orphan in self.orphans.remove(&id).unwrap_or_default() {
            let Orphan { endpoint, header, body } = orphan;
            match body {
                Body::Bytes { buffer, len, cost } => {
                    // It is counted anew.
                    self.endpoints[endpoint as usize].held -= cost;
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
        let Some(channel) = self.channels.get(&id) else { return };
        // A failure with a table is spread by everybody who hears of it; of another, those who wait for this rank hear
        // the cause with its leaving, or they would take that for the cause.
        let failed = channel.failed.clone();
        let told = failed.clone().filter(|failure| !failure.has_ledger());
        let report = told.map(|failure| serde_json::to_vec(&*failure).unwrap_or_default());
        // Before anybody here takes the memory of what was offered for free.
        for endpoint in self.offered(id) {
            self.endpoints[endpoint as usize].withhold();
            self.mark_dirty(endpoint);
        }
        self.end_channel(id, Failure::Aborted { by: None, why: "the group was destroyed".into() });
        if let Some(channel) = self.channels.remove(&id) {
            if channel.inquest.is_some() {
                self.inquests -= 1;
            }
            for &endpoint in channel.members.iter().filter(|&&endpoint| endpoint != u32::MAX) {
                // Only those who heard from this process before, or have called it, can be waiting for it.
                let peer = &self.endpoints[endpoint as usize];
                if !matches!((&peer.out, &peer.inbound), (Out::Idle, In::None)) {
                    if let Some(report) = &report {
                        self.push_owned(endpoint, Header::new(Frame::Abort, id), report);
                    }
                    self.push_item(endpoint, Item::Bare(Header::new(Frame::Bye, id)));
                }
            }
            if let Some(failure) = failed {
                if self.past.len() == PAST {
                    self.past.pop_front();
                }
                self.past.push_back(Past::new(id, failure, channel));
            }
        }
        if self.closed.len() == CLOSED {
            self.closed.pop_front();
        }
        self.closed.push_back(id);
    }
}

/// Channels remembered after they were closed, to know their late messages.
const CLOSED: usize = 4096;
/// Those of them whose failure is remembered, for members that come to it later.
const PAST: usize = 16;
