//! What breaks: ranks that go, groups that fail, deadlines that pass.

use std::sync::Arc;
use std::time::{Duration, Instant};

use podring_collective::Kind;
use smallvec::SmallVec;

use super::Hub;
use super::channel::{Answer, Channel, Inquest};
use super::endpoint::{Endpoint, In, OpKey, Out, RecvKey, SendKey};
use super::engine::{BURST, Engine, MatchKey, OWNED_LIMIT, Sending, Stage};
use super::play::Op;
use crate::error::Failure;
use crate::wire::{ANSWER, Frame, Header, HubId, NOT_YET};

/// A failed channel waits this long for what the others have to say: long enough for a rank that lives but gets no
/// processor. Those known to be gone aren't waited for.
const INQUEST: Duration = Duration::from_secs(2);

/// How long the links have to tell of a process's end themselves, once somebody else has. What it sent before may be on
/// its way still.
const HEARSAY: Duration = Duration::from_millis(250);

/// The endpoints of a channel's other members.
fn peers(channel: &Channel) -> SmallVec<[u32; 8]> {
    channel.members.iter().copied().filter(|&peer| peer != u32::MAX).collect()
}

/// What is sent of a failure: without its table if that doesn't fit a frame.
fn report(failure: &Failure) -> Vec<u8> {
    let text = serde_json::to_vec(failure).unwrap_or_default();
    if text.len() <= OWNED_LIMIT {
        return text;
    }
    let mut short = failure.clone();
    if let Some((_, ledger)) = short.ledger_mut() {
        ledger.clear();
    }
    serde_json::to_vec(&short).unwrap_or_default()
}

impl Hub {
    /// Somebody who should know says that a process is gone. What needs it fails, a moment later: its links may know
    /// better by then, and bring what it sent before.
    pub fn lose(&self, id: HubId, how: String) {
        let hub = self.clone();
        let late = move || {
            std::thread::sleep(HEARSAY);
            if hub.check_fork().is_ok() {
                hub.with(|engine| {
                    let endpoint = engine.endpoint(id);
                    engine.lose(endpoint, how);
                    engine.drive();
                });
                hub.0.kick();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("podring-hearsay".into()).spawn(late) {
            tracing::warn!(%error, "a loss that the links have to find out themselves");
        }
    }
}

impl Engine {
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

    pub fn lost(&self, id: u64, rank: u32, how: String, op: Option<OpKey>) -> Failure {
        let endpoint = self.channels.get(&id).map_or(u32::MAX, |channel| channel.members[rank as usize]);
        let host = self.endpoints.get(endpoint as usize).map_or_else(|| "unknown".into(), Endpoint::host);
        let (name, seq) = match op.and_then(|op| self.ops.get(op)) {
            Some(op) => (Some(op.describe()), op.seq),
            None => (None, 0),
        };
        Failure::PeerLost { rank, host, how, op: name, seq }
    }

    /// Nothing more comes from or goes to a process. What it sent before is used.
    pub fn lose(&mut self, endpoint: u32, how: String) {
        let peer = &mut self.endpoints[endpoint as usize];
        if peer.dead.is_some() || std::mem::replace(&mut peer.ending, true) {
            return;
        }
        // It may have been the first to give up, and have said why.
        let how = self.hear_farewell(endpoint).unwrap_or(how);
        self.hear_out(endpoint);
        let how = self.explained(endpoint, how);
        tracing::debug!(endpoint, how, "peer lost");
        self.say_farewell(endpoint, &how);
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
        // Whoever still reads this memory finds the link closed, and uses nothing of it.
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
    pub fn rank_gone(&mut self, id: u64, rank: u32, how: &str) {
        if let Some(inquest) = self.channels.get_mut(&id).and_then(|channel| channel.inquest.as_mut()) {
            let row = &mut inquest.rows[rank as usize];
            match row {
                Some(Answer::Called(_)) => {}
                Some(Answer::NotYet(said)) => *row = Some(Answer::Gone(format!("{said}; gone: {how}"))),
                None | Some(Answer::Gone(_)) => *row = Some(Answer::Gone(format!("gone: {how}"))),
            }
        }
        let needing = self.ops.iter().find(|(key, op)| op.channel == id && !op.failed && self.needs(*key, op, rank));
        if let Some((op, _)) = needing {
            let failure = self.lost(id, rank, how.to_owned(), Some(op));
            self.fail_channel(id, failure, true);
        }
    }

    pub fn needs(&self, key: OpKey, op: &Op, rank: u32) -> bool {
        let Some(channel) = self.channels.get(&op.channel) else { return false };
        let endpoint = channel.members[rank as usize];
        if self.sends.values().any(|sending| sending.op == key && sending.endpoint == endpoint) {
            return true;
        }
        if self.recvs.values().any(|receiving| receiving.op == key && receiving.endpoint == endpoint) {
            return true;
        }
        if let Kind::Recv { from: None, .. } = op.kind {
            return self.nobody_left(channel);
        }
        let (channel, seq) = (op.channel, op.seq);
        op.still_needs(rank, |key| self.came(&MatchKey { endpoint, channel, seq, key }))
    }

    /// All other members are gone.
    pub fn nobody_left(&self, channel: &Channel) -> bool {
        let gone = |(rank, &endpoint): (usize, &u32)| {
            rank as u32 == channel.me
                || channel.left[rank]
                || self.endpoints.get(endpoint as usize).is_none_or(|peer| peer.dead.is_some())
        };
        channel.members.iter().enumerate().all(gone)
    }

    /// Fails a channel: at once, or, where a table of calls explains it, when the others have answered.
    pub fn fail_channel(&mut self, id: u64, mut failure: Failure, tell: bool) {
        let Some(channel) = self.channels.get_mut(&id) else { return };
        if channel.failed.is_some() {
            return;
        }
        if channel.inquest.is_some() {
            self.amend(id, failure, tell);
            return;
        }
        // Where another rank has gathered the table, that is it.
        let told = failure.is_told().then(|| channel.complete(failure.clone()));
        if let Some((_, ledger)) = failure.ledger_mut() {
            ledger.clear();
        }
        let peers = peers(channel);
        let seq = failure.ledger_mut().map(|(seq, _)| seq);
        let called = seq.map(|seq| channel.called(seq));
        if let (Some(seq), Some(called), None) = (seq, &called, &told) {
            let mut rows: Vec<Option<Answer>> = vec![None; channel.members.len()];
            rows[channel.me as usize] = Some(called.clone());
            for (rank, &endpoint) in channel.members.iter().enumerate() {
                if let Some(how) = self.endpoints.get(endpoint as usize).and_then(|peer| peer.dead.as_ref()) {
                    rows[rank] = Some(Answer::Gone(format!("gone: {how}")));
                } else if channel.left[rank] {
                    rows[rank] = Some(Answer::Gone("gone: it destroyed the group".into()));
                }
            }
            channel.inquest = Some(Inquest { failure: failure.clone(), seq, rows, until: Instant::now() + INQUEST });
            self.inquests += 1;
        }
        // Who told this rank has told the others too, who may hear of it later than they read what this one offered.
        let concerned = if tell || called.is_some() { peers } else { self.offered(id) };
        if !concerned.is_empty() {
            let report = report(&failure);
            for &endpoint in &concerned {
                // Everybody with a table to fill spreads it: the first report may have gone to some only.
                self.push_owned(endpoint, Header::new(Frame::Abort, id), &report);
                if let (Some(seq), Some(called)) = (seq, &called) {
                    self.answer(endpoint, id, seq, called);
                }
            }
        }
        if let Some(failure) = told {
            self.end_channel(id, failure);
        } else if called.is_none() {
            self.end_channel(id, failure);
        }
    }

    /// The processes that have yet to read what this one offered them in a channel.
    pub fn offered(&self, id: u64) -> SmallVec<[u32; 8]> {
        let of_channel = |sending: &&Sending| self.ops.get(sending.op).is_some_and(|op| op.channel == id);
        let mut offered: SmallVec<[u32; 8]> = self
            .sends
            .values()
            .filter(|sending| !sending.declined)
            .filter(of_channel)
            .map(|one| one.endpoint)
            .collect();
        offered.sort_unstable();
        offered.dedup();
        offered
    }

    /// Another failure of a channel that gathers its table: the one that tells more of the cause stays.
    fn amend(&mut self, id: u64, failure: Failure, tell: bool) {
        let Some(channel) = self.channels.get_mut(&id) else { return };
        let Some(inquest) = &mut channel.inquest else { return };
        if let Failure::PeerLost { rank, .. } = &failure
            && channel.knows.get(*rank as usize).is_some_and(|&knows| knows)
        {
            // It left because the group failed: that is no cause.
            return;
        }
        let (old, new) = (inquest.failure.weight(), failure.weight());
        if failure.is_told() && new >= old {
            let failure = channel.complete(failure);
            channel.inquest = None;
            self.inquests -= 1;
            self.end_channel(id, failure);
            return;
        }
        if new <= old {
            return;
        }
        inquest.failure = failure;
        let told = tell.then(|| report(&inquest.failure));
        // Its table may be one of other calls.
        let seq = inquest.failure.ledger_mut().map(|(seq, _)| seq).filter(|&seq| seq != inquest.seq);
        if let Some(seq) = seq {
            inquest.seq = seq;
            for row in &mut inquest.rows {
                row.take_if(|row| !matches!(row, Answer::Gone(_)));
            }
        }
        let peers = peers(channel);
        if let Some(report) = told {
            for &endpoint in &peers {
                self.push_owned(endpoint, Header::new(Frame::Abort, id), &report);
            }
        }
        if let Some(seq) = seq {
            self.testify(id, seq);
        }
    }

    /// A rank says that a channel failed, and, if that has a table, asks what this one had called.
    pub fn hear_failure(&mut self, endpoint: u32, header: &Header, mut failure: Failure, text: &[u8]) {
        let id = header.channel;
        let asked = failure.ledger_mut().map(|(seq, _)| seq).filter(|_| header.flags & ANSWER == 0);
        let Some(channel) = self.channels.get_mut(&id) else {
            match (self.past.iter().find(|past| past.id == id), asked) {
                (Some(past), Some(seq)) => {
                    let (failure, called) = (past.failure.clone(), past.called(seq));
                    self.retell(endpoint, id, seq, &failure, called);
                }
                _ => self.orphan_text(endpoint, header, text),
            }
            return;
        };
        if let Some(&rank) = channel.rank_of.get(&endpoint) {
            channel.knows[rank as usize] = true;
        }
        if let (Some(failed), Some(seq)) = (channel.failed.clone(), asked) {
            let called = channel.called(seq);
            self.retell(endpoint, id, seq, &failed, called);
            return;
        }
        self.fail_channel(id, failure, false);
        if let Some(seq) = asked
            && let Some(channel) = self.channels.get(&id)
            && channel.inquest.as_ref().is_some_and(|inquest| inquest.seq != seq)
        {
            let called = channel.called(seq);
            self.answer(endpoint, id, seq, &called);
        }
    }

    /// Tells who asks for a row how the channel ended here, with the row in case that it knows better.
    fn retell(&mut self, endpoint: u32, id: u64, seq: u64, failure: &Failure, called: Answer) {
        // Nothing more is called in it.
        self.answer(endpoint, id, seq, &Answer::Gone(called.text()));
        let mut header = Header::new(Frame::Abort, id);
        header.flags = ANSWER;
        self.push_owned(endpoint, header, &report(failure));
    }

    fn answer(&mut self, endpoint: u32, id: u64, seq: u64, answer: &Answer) {
        let mut header = Header::new(Frame::Ledger, id);
        header.seq = seq;
        let (Answer::Called(text) | Answer::Gone(text) | Answer::NotYet(text)) = answer;
        if matches!(answer, Answer::NotYet(_)) {
            header.flags = NOT_YET;
        }
        self.push_owned(endpoint, header, text.as_bytes());
    }

    /// The call that an inquest of this channel asks for has just come: all are told.
    pub fn testify(&mut self, id: u64, seq: u64) {
        let Some(channel) = self.channels.get_mut(&id) else { return };
        let called = channel.called(seq);
        let Some(inquest) = channel.inquest.as_mut().filter(|inquest| inquest.seq == seq) else { return };
        inquest.rows[channel.me as usize] = Some(called.clone());
        for endpoint in peers(channel) {
            self.answer(endpoint, id, seq, &called);
        }
    }

    pub fn end_channel(&mut self, id: u64, failure: Failure) {
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
                Stage::Pulling { cookie, .. } => self.decline(receiving.endpoint, id, cookie),
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
        self.sends.retain(|_, sending| sending.op != key || !sending.declined);
        if !self.sends.values().any(|sending| sending.op == key) {
            self.retire(key);
        }
    }

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

    pub fn overdue(&mut self, key: OpKey) {
        let Some(op) = self.ops.get(key).filter(|op| !op.failed) else { return };
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
            && self.recvs.values().all(|receiving| receiving.op != key || receiving.stage == Stage::Posted)
            && self
                .sends
                .iter()
                .all(|(send, sending)| sending.op != key || self.endpoints[sending.endpoint as usize].has_queued(send));
        if untouched {
            // A message that never came, or of which its receiver hasn't heard, leaves nothing half done: the group
            // lives. One that was offered could still be taken, with whatever is in its memory by then.
            self.fail_op(key, &Arc::new(failure));
        } else {
            self.fail_channel(id, failure, true);
        }
    }
}
