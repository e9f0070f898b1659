//! Messages: what comes, what it is for, and what goes out for an operation.

use podring_collective::DType;
use rustix::io::Errno;
use slotmap::{Key, KeyData};

use super::channel::{Answer, Body, Channel, Early, EarlyDirect};
use super::endpoint::{CREDIT, In, Item, OpKey, Out, RecvKey, SendKey, Stream, cost};
use super::engine::{BURST, Engine, MatchKey, Orphan, Receiving, STEP, Sending, Stage};
use crate::error::{Extent, Failure};
use crate::link::shm;
use crate::wire::{DECLINED, Frame, HEADER, Header, NOT_YET, POINT_TO_POINT};

/// What is known of an offer whose memory has been read.
enum Offer {
    /// It was what was offered.
    Stands,
    /// It may have been taken back: the peer is about to say.
    InDoubt,
    /// It was taken back, or isn't wanted any more.
    Gone,
}

impl Engine {
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
            Frame::Eager => {
                self.kept = false;
                self.message(endpoint, header, Some((first, second)));
                if !self.kept {
                    self.credit(endpoint, cost(first.len() + second.len()));
                } else if self.endpoints[endpoint as usize].held > CREDIT {
                    let how = format!("it sent over {CREDIT} bytes that were not asked for, more than it may");
                    self.lose(endpoint, how);
                }
            }
            Frame::Ready => self.message(endpoint, header, None),
            Frame::Data => {
                self.data(endpoint, header.cookie, first);
                self.data(endpoint, header.cookie, second);
            }
            Frame::Clear => {
                let send = SendKey::from(KeyData::from_ffi(header.cookie));
                let Some(sending) = self.sends.get(send).filter(|sending| sending.endpoint == endpoint) else { return };
                if self.ops.get(sending.op).is_none_or(|op| op.failed) {
                    // It was told so before it asked, or is about to be.
                    self.send_declined(send);
                } else {
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
                    if header.flags & DECLINED == 0 { self.send_done(send) } else { self.send_declined(send) }
                }
            }
            Frame::Announce => {
                if let Some(rank) = self.rank_in(header.channel, endpoint) {
                    self.check(header.channel, rank, header.seq, header.fingerprint);
                } else {
                    self.orphan(endpoint, header, Body::Bytes { buffer: None, len: 0, cost: 0 });
                }
            }
            Frame::Abort => {
                let text = [first, second].concat();
                let failure = serde_json::from_slice(&text)
                    .unwrap_or_else(|_| Failure::Aborted { by: None, why: "a peer's unreadable report".into() });
                self.hear_failure(endpoint, header, failure, &text);
            }
            Frame::Ledger => {
                if !self.channels.contains_key(&header.channel) {
                    self.orphan_text(endpoint, header, &[first, second].concat());
                } else if let Some(rank) = self.rank_in(header.channel, endpoint)
                    && let Some(channel) = self.channels.get_mut(&header.channel)
                    && let Some(inquest) = &mut channel.inquest
                    && inquest.seq == header.seq
                {
                    let text = [first, second].concat();
                    let text = String::from_utf8_lossy(&text).into_owned();
                    let answer = if header.flags & NOT_YET == 0 { Answer::Called(text) } else { Answer::NotYet(text) };
                    inquest.rows[rank as usize] = Some(answer);
                }
            }
            Frame::Credit => {
                let peer = &mut self.endpoints[endpoint as usize];
                let more = usize::try_from(header.total).unwrap_or(CREDIT);
                peer.credit = peer.credit.saturating_add(more).min(CREDIT);
            }
            Frame::Ping | Frame::Farewell => {}
            Frame::Bye => {
                if let Some(rank) = self.rank_in(header.channel, endpoint) {
                    if let Some(channel) = self.channels.get_mut(&header.channel) {
                        channel.left[rank as usize] = true;
                    }
                    self.rank_gone(header.channel, rank, "it destroyed the group");
                } else {
                    self.orphan(endpoint, header, Body::Bytes { buffer: None, len: 0, cost: 0 });
                }
            }
        }
    }

    pub fn rank_in(&self, channel: u64, endpoint: u32) -> Option<u32> {
        self.channels.get(&channel)?.rank_of.get(&endpoint).copied()
    }

    pub fn orphan(&mut self, endpoint: u32, header: &Header, body: Body) {
        if self.closed.contains(&header.channel) || self.channels.contains_key(&header.channel) {
            self.refuse(endpoint, header.channel, &body);
            return;
        }
        self.orphans.entry(header.channel).or_default().push(Orphan { endpoint, header: *header, body });
    }

    /// Keeps what is said of a group that isn't open here yet. The last of each kind from each rank is enough.
    pub fn orphan_text(&mut self, endpoint: u32, header: &Header, text: &[u8]) {
        if let Some(orphans) = self.orphans.get_mut(&header.channel) {
            orphans.retain(|orphan| orphan.endpoint != endpoint || orphan.header.frame != header.frame);
        }
        let buffer = self.memory.take(text.len().max(1));
        // SAFETY: the buffer has at least as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.as_ptr(), text.len()) };
        self.orphan(endpoint, header, Body::Bytes { buffer: Some(buffer), len: text.len(), cost: 0 });
    }

    /// Lets the sender of an offered message have its memory back unread, and forgets an early one.
    pub fn refuse(&mut self, endpoint: u32, channel: u64, body: &Body) {
        match body {
            Body::Ready { cookie, .. } => self.decline(endpoint, channel, *cookie),
            Body::Bytes { cost, .. } => self.release(endpoint, *cost),
        }
    }

    /// An early message is no longer held.
    pub fn release(&mut self, endpoint: u32, cost: usize) {
        self.endpoints[endpoint as usize].held -= cost;
        self.credit(endpoint, cost);
    }

    /// Bytes of eager messages were used; their sender is told when they have become many.
    fn credit(&mut self, endpoint: u32, cost: usize) {
        let peer = &mut self.endpoints[endpoint as usize];
        peer.owed += cost;
        if peer.owed < CREDIT / 4 {
            return;
        }
        let mut header = Header::new(Frame::Credit, 0);
        header.total = std::mem::take(&mut peer.owed) as u64;
        if !peer.try_eager(&header, std::ptr::null(), 0) {
            self.push_item(endpoint, Item::Bare(header));
        }
    }

    /// A message has been read.
    fn ack(&mut self, endpoint: u32, channel: u64, cookie: u64) {
        self.answer_offer(endpoint, channel, cookie, 0);
    }

    /// A message won't be read. Its sender has its memory back, but hasn't sent anything.
    pub fn decline(&mut self, endpoint: u32, channel: u64, cookie: u64) {
        self.answer_offer(endpoint, channel, cookie, DECLINED);
    }

    fn answer_offer(&mut self, endpoint: u32, channel: u64, cookie: u64, flags: u8) {
        let mut header = Header::new(Frame::Ack, channel);
        (header.cookie, header.flags) = (cookie, flags);
        if !self.endpoints[endpoint as usize].try_eager(&header, std::ptr::null(), 0) {
            self.push_item(endpoint, Item::Bare(header));
        }
    }

    /// A message or the offer of one has come.
    pub fn message(&mut self, endpoint: u32, header: &Header, payload: Option<(&[u8], &[u8])>) {
        let Some(rank) = self.rank_in(header.channel, endpoint) else {
            let body = self.keep_body(endpoint, header, payload);
            self.orphan(endpoint, header, body);
            return;
        };
        if header.flags & POINT_TO_POINT != 0 {
            let Some(channel) = self.channels.get_mut(&header.channel) else { return };
            if channel.failed.is_some() {
                if payload.is_none() {
                    self.decline(endpoint, header.channel, header.cookie);
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
                    let body = self.keep_body(endpoint, header, payload);
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
                self.decline(endpoint, header.channel, header.cookie);
            }
            return;
        }
        let key = MatchKey { endpoint, channel: header.channel, seq: header.seq, key: header.key };
        match self.expected.remove(&key) {
            Some(recv) => self.deliver(recv, endpoint, header, payload),
            None => {
                let body = self.keep_body(endpoint, header, payload);
                let early = Early { fingerprint: header.fingerprint, total: header.total, body };
                if let Some(twin) = self.unexpected.insert(key, early) {
                    self.refuse(endpoint, header.channel, &twin.body);
                }
            }
        }
    }

    /// What is kept of a message that nobody here has asked for yet.
    fn keep_body(&mut self, endpoint: u32, header: &Header, payload: Option<(&[u8], &[u8])>) -> Body {
        let Some((first, second)) = payload else {
            return Body::Ready { addr: header.addr, cookie: header.cookie };
        };
        let len = first.len() + second.len();
        let cost = cost(len);
        self.kept = true;
        self.endpoints[endpoint as usize].held += cost;
        if len == 0 {
            return Body::Bytes { buffer: None, len, cost };
        }
        let buffer = self.memory.take(len);
        // SAFETY: the buffer has at least `len` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(first.as_ptr(), buffer.as_ptr(), first.len());
            std::ptr::copy_nonoverlapping(second.as_ptr(), buffer.as_ptr().add(first.len()), second.len());
        }
        Body::Bytes { buffer: Some(buffer), len, cost }
    }

    /// Compares what a rank called with what this one called or will call. `false` if they differ.
    pub fn check(&mut self, id: u64, rank: u32, seq: u64, fingerprint: u64) -> bool {
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

    pub fn deliver_direct(
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
                    if payload.is_none() {
                        self.decline(endpoint, header.channel, header.cookie);
                    }
                    self.unlike(recv, rank, header.fingerprint, header.total);
                    return;
                }
            }
        }
        self.deliver(recv, endpoint, header, payload);
    }

    pub fn deliver(&mut self, recv: RecvKey, endpoint: u32, header: &Header, payload: Option<(&[u8], &[u8])>) {
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

    pub fn deliver_ready(&mut self, recv: RecvKey, endpoint: u32, total: u64, addr: u64, cookie: u64) {
        let Some(receiving) = self.recvs.get_mut(recv) else { return };
        let op = receiving.op;
        if total != receiving.len as u64 {
            let channel = self.ops.get(op).map_or(0, |op| op.channel);
            self.decline(endpoint, channel, cookie);
            self.wrong_length(recv, endpoint, total);
            return;
        }
        if let Some(how) = self.endpoints[endpoint as usize].dead.clone() {
            // What it offered is gone with it.
            let id = self.ops.get(op).map_or(0, |op| op.channel);
            if let Some(rank) = self.rank_in(id, endpoint) {
                let failure = self.lost(id, rank, how, Some(op));
                self.fail_channel(id, failure, true);
            }
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

    pub fn wrong_length(&mut self, recv: RecvKey, endpoint: u32, total: u64) {
        let Some(receiving) = self.recvs.get(recv) else { return };
        let (len, op) = (receiving.len, receiving.op);
        if let Some(op) = self.ops.get(op) {
            let (id, seq, kind) = (op.channel, op.seq, op.kind);
            let fingerprint = op.fingerprint;
            let rank = self.rank_in(id, endpoint).unwrap_or(u32::MAX);
            if kind.is_point_to_point() {
                self.unlike(recv, rank, fingerprint, total);
                return;
            }
            let what = format!("{}: rank {rank} sends {total} bytes where this one expects {len}", kind.name());
            self.mismatch(id, seq, what);
        }
    }

    /// A point-to-point message isn't what its receive expects. No table of calls explains it.
    pub fn unlike(&mut self, recv: RecvKey, from: u32, fingerprint: u64, total: u64) {
        let Some(receiving) = self.recvs.get(recv) else { return };
        let Some(op) = self.ops.get(receiving.op) else { return };
        let Some(channel) = self.channels.get(&op.channel) else { return };
        let expected = extent(op.fingerprint, receiving.len as u64);
        let (id, seq, rank) = (op.channel, op.seq, channel.me);
        self.fail_channel(id, Failure::Message { seq, rank, from, expected, sent: extent(fingerprint, total) }, true);
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
    pub fn pull(&mut self) -> bool {
        let Some(recv) = self.pulls.pop_front() else { return false };
        let Some(receiving) = self.recvs.get_mut(recv) else { return true };
        let Stage::Pulling { addr, cookie } = receiving.stage else { return true };
        let endpoint = receiving.endpoint;
        let Some(pid) = self.endpoints[endpoint as usize].readable else {
            self.unreadable(recv, addr, cookie);
            return true;
        };
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
                } else {
                    match self.offer(recv) {
                        Offer::Stands => {
                            self.recvs.remove(recv);
                            let channel = self.ops.get(op).map_or(0, |op| op.channel);
                            self.ack(endpoint, channel, cookie);
                            self.message_done(op, lane);
                        }
                        Offer::InDoubt => self.pulls.push_back(recv),
                        Offer::Gone => {}
                    }
                }
            }
            Err(Errno::PERM) => {
                // Permission was there when the link opened and is gone: have it sent from now on.
                self.endpoints[endpoint as usize].readable = None;
                self.unreadable(recv, addr, cookie);
            }
            Ok(_) | Err(Errno::SRCH) => self.lose(endpoint, "its process ended".into()),
            Err(errno) => match self.offer(recv) {
                Offer::Stands => self.lose(endpoint, format!("its memory can't be read: {errno}")),
                Offer::InDoubt => self.pulls.push_back(recv),
                Offer::Gone => {}
            },
        }
        true
    }

    /// A peer's memory, of which a message may have been read in part, can no longer be read.
    fn unreadable(&mut self, recv: RecvKey, addr: u64, cookie: u64) {
        let Some(receiving) = self.recvs.get(recv) else { return };
        let (endpoint, total, got) = (receiving.endpoint, receiving.len as u64, receiving.got);
        if self.endpoints[endpoint as usize].dead.is_some() {
            return;
        }
        if got == 0 {
            self.deliver_ready(recv, endpoint, total, addr, cookie);
        } else {
            self.lose(endpoint, "its memory may no longer be read".into());
        }
    }

    /// Whether what was just read of a peer's memory is what it offered. A sender that gives an operation up says so
    /// before its memory may change, and one that gives this process up closes the link; both may have happened while
    /// this process stood still. Where the ring had no room for it, a word beside the ring says that something is to come.
    fn offer(&mut self, recv: RecvKey) -> Offer {
        let Some(receiving) = self.recvs.get(recv) else { return Offer::Gone };
        let (endpoint, op) = (receiving.endpoint, receiving.op);
        // Before the ring is read, or it could be said in between.
        let withheld = match &self.endpoints[endpoint as usize].inbound {
            In::Shm { reader, .. } => reader.withheld(),
            _ => false,
        };
        // All that was in the ring when the memory had been read; more may come meanwhile.
        for _ in 0..=self.config.ring / HEADER / BURST {
            if !self.read_ring(endpoint, BURST) {
                break;
            }
        }
        let stands = |channel: &Channel| channel.failed.is_none() && channel.inquest.is_none();
        let channel = self.ops.get(op).and_then(|op| self.channels.get(&op.channel));
        if !self.recvs.contains_key(recv) || !channel.is_some_and(stands) {
            return Offer::Gone;
        }
        let peer = &self.endpoints[endpoint as usize];
        if peer.dead.is_none() && peer.has_hung_up() {
            self.lose(endpoint, "its process ended".into());
        }
        match self.endpoints[endpoint as usize].dead.is_none() && self.recvs.contains_key(recv) {
            true if withheld => Offer::InDoubt,
            true => Offer::Stands,
            false => Offer::Gone,
        }
    }

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
            Out::Tcp(_) | Out::Dialing(_) => self.config.eager_tcp,
            _ => self.config.eager_shm,
        };
        if len <= limit && cost(len) <= peer.credit {
            peer.credit -= cost(len);
            header.frame = Frame::Eager;
            header.len = len as u32;
            if peer.try_eager(&header, data, len) {
                return true;
            }
            let send = self.sends.insert(Sending { op, lane, endpoint, data, len, declined: false });
            self.push_item(endpoint, Item::Eager { header, data, send });
            return false;
        }
        let send = self.sends.insert(Sending { op, lane, endpoint, data, len, declined: false });
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
    pub fn deliver_early(&mut self, recv: RecvKey, endpoint: u32, early: Early) -> bool {
        match early.body {
            Body::Ready { addr, cookie } => {
                self.deliver_ready(recv, endpoint, early.total, addr, cookie);
                false
            }
            Body::Bytes { buffer, len, cost } => {
                self.release(endpoint, cost);
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

    pub fn message_done(&mut self, op: OpKey, lane: u32) {
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
}

/// What a point-to-point message carries; its fingerprint is its dtype's code plus one.
fn extent(fingerprint: u64, bytes: u64) -> Extent {
    let code = fingerprint.checked_sub(1).and_then(|code| u8::try_from(code).ok());
    match code.and_then(DType::from_code) {
        Some(dtype) => Extent { bytes, count: bytes / dtype.size() as u64, dtype: dtype.name().to_owned() },
        None => Extent { bytes, count: 0, dtype: "elements".to_owned() },
    }
}
