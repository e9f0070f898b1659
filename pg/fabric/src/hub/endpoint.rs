//! Another process, as this one sees it: the link to it, the link from it, and what waits to be sent.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::Pid;
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use slotmap::{Key as _, KeyData};
use smallvec::SmallVec;

use super::net::Dial;
use crate::fork::Guarded;
use crate::link::ring::{Reader, Writer};
use crate::link::shm::{self, Mapping};
use crate::link::tcp;
use crate::wire::{Frame, HEADER, Header, HubId};

slotmap::new_key_type! {
    /// A message being sent.
    pub(crate) struct SendKey;
    /// A message being received.
    pub(crate) struct RecvKey;
    /// An operation under way.
    pub(crate) struct OpKey;
}

/// Where a process is to be found, as it publishes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// Its hub.
    pub hub: HubId,
    /// Its host, or what PODRING_HOST_ID says it is: ranks with the same are taken to share memory.
    pub host: String,
    /// Its machine and network namespace, whatever PODRING_HOST_ID says: where loopback means the same.
    pub machine: String,
    /// A name for messages.
    pub name: String,
    /// Where its TCP listener may be reached.
    pub tcp: Vec<SocketAddr>,
}

/// A frame to send.
pub(crate) enum Item {
    /// Without payload.
    Bare(Header),
    /// With a payload in the operation's memory, which is free again once it is written.
    Eager { header: Header, data: *const u8, send: SendKey },
    /// With a payload of its own.
    Owned { header: Header, bytes: Box<[u8]> },
}

// SAFETY: the address is the operation's memory, kept alive until the send is complete or purged.
unsafe impl Send for Item {}

impl Item {
    /// Tells the peer that messages it was offered may not be there any more.
    pub fn takes_back(&self) -> bool {
        match self {
            Item::Owned { .. } => true,
            Item::Bare(header) => header.frame == Frame::Bye,
            Item::Eager { .. } => false,
        }
    }
}

/// A long message that the receiver asked for, sent piece by piece.
pub(crate) struct Stream {
    pub send: SendKey,
    pub data: *const u8,
    pub len: usize,
    pub offset: usize,
    /// The receiver's slot.
    pub slot: u64,
    pub channel: u64,
}

// SAFETY: as for Item.
unsafe impl Send for Stream {}

/// A payload written to a socket straight from the operation's memory.
struct Body {
    data: *const u8,
    len: usize,
    offset: usize,
    send: SendKey,
    /// The message ends with it.
    last: bool,
}

/// A TCP connection this process sends on.
pub(crate) struct TcpOut {
    pub socket: Guarded,
    /// Headers and short payloads on their way.
    staged: Vec<u8>,
    written: usize,
    body: Option<Body>,
    /// The socket took no more; it says when it will.
    pub blocked: bool,
    /// Which of the peer's addresses it goes to.
    pub attempt: u32,
}

// SAFETY: Body's address is the operation's memory, as for Item.
unsafe impl Send for TcpOut {}

/// The link to a process.
pub(crate) enum Out {
    /// Nothing sent yet.
    Idle,
    /// Its host's queue was full; try again.
    Retry,
    /// TCP connections under way.
    Dialing(Box<Dial>),
    /// Shared memory.
    Shm { socket: Guarded, writer: Writer, bell: Option<Guarded>, _mapping: Mapping },
    /// TCP.
    Tcp(TcpOut),
}

/// The link from a process.
pub(crate) enum In {
    /// None yet.
    None,
    /// Shared memory.
    Shm { socket: Guarded, reader: Reader, bell: Guarded, _mapping: Mapping },
    /// TCP: bytes read but not yet understood are `buffer[start..end]`; the slot and rest of the message being read.
    Tcp { socket: Guarded, buffer: Vec<u8>, start: usize, end: usize, data: Option<(u64, usize)> },
}

/// A process.
pub(crate) struct Endpoint {
    pub id: HubId,
    /// Known once a channel has it as a member.
    pub address: Option<Address>,
    /// Why nothing more can come from it or go to it.
    pub dead: Option<String>,
    /// It is about to be: what it still had to say is being read.
    pub ending: bool,
    /// Who called in its name had another secret than this process.
    pub doubted: bool,
    pub out: Out,
    pub inbound: In,
    pub items: VecDeque<Item>,
    pub streams: VecDeque<Stream>,
    /// Its process, if its memory has been proven readable and `pidfd` tells when it ends.
    pub readable: Option<Pid>,
    pub pidfd: Option<Guarded>,
    pub heard: Instant,
    pub spoke: Instant,
    /// Bytes of eager messages that it may still be sent before it says that it has used earlier ones.
    pub credit: usize,
    /// Bytes of its eager messages that nobody here has asked for yet.
    pub held: usize,
    /// Bytes of its eager messages that were used since it was last told.
    pub owed: usize,
    /// In the engine's list of endpoints with something to send.
    pub dirty: bool,
}

/// Bytes of one process's eager messages that another holds for it, at most: those sent before they are asked for. What
/// is beyond that is only offered, as long messages are, and sent when it is asked for.
pub(crate) const CREDIT: usize = 4 << 20;

/// What an eager message counts: about what holding it takes, however short it is.
pub(crate) fn cost(len: usize) -> usize {
    len.max(LEAST - HEADER) + HEADER
}

/// The least buffer, see [`crate::memory`].
const LEAST: usize = 256;

/// Payloads up to this many bytes are copied next to their header before a socket write.
const COALESCE: usize = 16 << 10;
/// Bytes collected for one socket write.
const STAGED: usize = 64 << 10;
/// Bytes of a streamed message per frame on TCP.
pub(crate) const TCP_PIECE: usize = 256 << 10;

impl Endpoint {
    pub fn new(id: HubId, now: Instant) -> Self {
        Endpoint {
            id,
            address: None,
            dead: None,
            ending: false,
            doubted: false,
            out: Out::Idle,
            inbound: In::None,
            items: VecDeque::new(),
            streams: VecDeque::new(),
            readable: None,
            pidfd: None,
            heard: now,
            spoke: now,
            credit: CREDIT,
            held: 0,
            owed: 0,
            dirty: false,
        }
    }

    pub fn host(&self) -> String {
        self.address.as_ref().map_or_else(|| "unknown".into(), |address| address.name.clone())
    }

    pub fn has_output(&self) -> bool {
        if !self.items.is_empty() || !self.streams.is_empty() {
            return true;
        }
        matches!(&self.out, Out::Tcp(tcp) if tcp.body.is_some() || tcp.written < tcp.staged.len())
    }

    /// A process of this host has closed its link to this one, or ended. Pids are used again: only while the process
    /// lives that is behind the link does its number mean it.
    pub fn has_hung_up(&self) -> bool {
        let In::Shm { socket, .. } = &self.inbound else { return false };
        let mut fds: SmallVec<[PollFd<'_>; 2]> = SmallVec::new();
        fds.push(PollFd::new(socket, PollFlags::RDHUP));
        fds.extend(self.pidfd.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        retry_on_intr(|| poll(&mut fds, Some(&now))) != Ok(0)
    }

    /// Says in shared memory that offers may be taken back, until what says which has been written.
    pub fn withhold(&mut self) {
        if let Out::Shm { writer, .. } = &mut self.out {
            writer.set_withheld(true);
        }
    }

    /// Reports of failures wait to be sent.
    pub fn has_reports(&self) -> bool {
        let staged = matches!(&self.out, Out::Tcp(tcp) if tcp.written < tcp.staged.len());
        self.dead.is_none() && (staged || self.items.iter().any(|item| matches!(item, Item::Owned { .. })))
    }

    /// Whether its process has ended, after which its number may become another's; also where no pidfd tells.
    pub fn ended(&self) -> bool {
        self.pidfd.as_ref().is_none_or(shm::has_ended)
    }

    /// Writes one eager message at once if nothing is ahead of it and it fits. The caller keeps `data` readable.
    pub fn try_eager(&mut self, header: &Header, data: *const u8, len: usize) -> bool {
        if !self.items.is_empty() || self.dead.is_some() {
            return false;
        }
        let Out::Shm { writer, bell, .. } = &mut self.out else { return false };
        // SAFETY: `data` is readable for `len` bytes: it is a region of a live operation.
        let pushed = unsafe { writer.push(header, data, len) };
        if pushed {
            ring_bell(writer, bell.as_ref());
        }
        pushed
    }

    /// Sends what the link takes now. Sends that are thereby complete are added to `sent`. `Ok(true)` if anything moved.
    pub fn flush(&mut self, sent: &mut Vec<SendKey>, now: Instant) -> Result<bool, Errno> {
        match &mut self.out {
            Out::Shm { writer, bell, .. } => {
                let (mut moved, mut urgent) = (false, false);
                while let Some(item) = self.items.front() {
                    let (header, data) = match item {
                        Item::Bare(header) => (header, std::ptr::null()),
                        Item::Eager { header, data, .. } => (header, *data),
                        Item::Owned { header, bytes } => (header, bytes.as_ptr()),
                    };
                    // SAFETY: the payload is the item's own or a live operation's memory.
                    if !unsafe { writer.push(header, data, header.len as usize) } {
                        break;
                    }
                    match item {
                        Item::Eager { send, .. } => sent.push(*send),
                        // Reports of failures: an idle peer must hear of them now, not when it next calls something.
                        Item::Owned { .. } => urgent = true,
                        Item::Bare(_) => {}
                    }
                    self.items.pop_front();
                    moved = true;
                }
                while self.items.is_empty()
                    && let Some(stream) = self.streams.front_mut()
                {
                    let left = stream.len - stream.offset;
                    let room = writer.room().unwrap_or(0);
                    let piece = left.min(room).min(SHM_PIECE);
                    if piece < left.min(4096) || piece == 0 && left > 0 {
                        break;
                    }
                    let mut header = Header::new(Frame::Data, stream.channel);
                    header.cookie = stream.slot;
                    header.len = piece as u32;
                    // SAFETY: within the live operation's memory; fits by the room check.
                    if !unsafe { writer.push(&header, stream.data.add(stream.offset), piece) } {
                        break;
                    }
                    stream.offset += piece;
                    moved = true;
                    if stream.offset == stream.len {
                        sent.push(stream.send);
                        self.streams.pop_front();
                    } else if self.streams.len() > 1 {
                        self.streams.rotate_left(1);
                    }
                }
                match bell {
                    Some(bell) if urgent => ring(bell),
                    bell if moved => ring_bell(writer, bell.as_ref()),
                    _ => {}
                }
                if writer.withheld() && !self.items.iter().any(Item::takes_back) {
                    writer.set_withheld(false);
                }
                Ok(moved)
            }
            Out::Tcp(tcp) => {
                let moved = tcp.flush(&mut self.items, &mut self.streams, sent)?;
                if moved {
                    self.spoke = now;
                }
                Ok(moved)
            }
            Out::Idle | Out::Retry | Out::Dialing(_) => Ok(false),
        }
    }

    /// A send of which the receiver has not heard.
    pub fn has_queued(&self, send: SendKey) -> bool {
        self.items.iter().any(|item| match item {
            Item::Eager { send: queued, .. } => *queued == send,
            Item::Bare(header) => header.frame == Frame::Ready && header.cookie == send.data().as_ffi(),
            Item::Owned { .. } => false,
        })
    }

    /// Forgets output whose memory is about to go: sends for which `unwanted` says so. Those of which the receiver has
    /// not heard are added to `never`.
    pub fn purge(&mut self, mut unwanted: impl FnMut(SendKey) -> bool, never: &mut Vec<SendKey>) {
        let credit = &mut self.credit;
        self.items.retain(|item| {
            let (send, unused) = match item {
                Item::Eager { send, header, .. } => (*send, cost(header.len as usize)),
                Item::Bare(header) if header.frame == Frame::Ready => {
                    (SendKey::from(KeyData::from_ffi(header.cookie)), 0)
                }
                _ => return true,
            };
            let drop = unwanted(send);
            if drop {
                never.push(send);
                *credit += unused;
            }
            !drop
        });
        self.streams.retain(|stream| {
            let drop = unwanted(stream.send);
            if drop {
                never.push(stream.send);
            }
            !drop
        });
        if let Out::Tcp(tcp) = &mut self.out
            && let Some(body) = &mut tcp.body
            && unwanted(body.send)
        {
            // The header promised these bytes, so they must be sent; from a copy, because the memory goes.
            // SAFETY: the memory is still there during this call.
            let rest = unsafe { std::slice::from_raw_parts(body.data.add(body.offset), body.len - body.offset) };
            tcp.staged.drain(..tcp.written);
            tcp.written = 0;
            tcp.staged.extend_from_slice(rest);
            if body.last {
                never.push(body.send);
            }
            tcp.body = None;
        }
    }
}

/// Bytes of a streamed message per frame in shared memory: a part of the ring, so that reader and writer overlap.
pub(crate) const SHM_PIECE: usize = 64 << 10;

fn ring_bell(writer: &Writer, bell: Option<&Guarded>) {
    if let Some(bell) = bell
        && writer.reader_sleeps()
    {
        ring(bell);
    }
}

/// Adds one to an eventfd.
pub(crate) fn ring(bell: &Guarded) {
    // EAGAIN would mean that 2^64 - 2 rings are unread: it is ringing.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// A bell: an eventfd.
pub(crate) fn new_bell() -> Result<Guarded, Errno> {
    use rustix::event::EventfdFlags;
    Ok(Guarded::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

impl TcpOut {
    /// A link over a connection, to which `first` is sent before all else.
    pub fn new(socket: Guarded, attempt: u32, first: &[u8]) -> Self {
        let mut staged = Vec::with_capacity(STAGED + COALESCE + HEADER);
        staged.extend_from_slice(first);
        TcpOut { socket, staged, written: 0, body: None, blocked: false, attempt }
    }

    fn flush(
        &mut self,
        items: &mut VecDeque<Item>,
        streams: &mut VecDeque<Stream>,
        sent: &mut Vec<SendKey>,
    ) -> Result<bool, Errno> {
        let mut moved = false;
        while !self.blocked {
            let head = &self.staged[self.written..];
            let body: &[u8] = match &self.body {
                // SAFETY: a live operation's memory.
                Some(body) => unsafe { std::slice::from_raw_parts(body.data.add(body.offset), body.len - body.offset) },
                None => &[],
            };
            let (ahead, all) = (head.len(), head.len() + body.len());
            let wrote = match (ahead, body.len()) {
                (0, 0) => {
                    self.staged.clear();
                    self.written = 0;
                    self.stage(items, streams, sent);
                    if self.staged.is_empty() {
                        break;
                    }
                    continue;
                }
                (_, 0) => tcp::write(&self.socket, head)?,
                (0, _) => tcp::write(&self.socket, body)?,
                // A header goes in one packet with what follows it.
                _ => tcp::write_both(&self.socket, head, body)?,
            };
            self.written += wrote.min(ahead);
            if let Some(body) = &mut self.body {
                body.offset += wrote.saturating_sub(ahead);
                if body.offset == body.len {
                    if body.last {
                        sent.push(body.send);
                    }
                    self.body = None;
                }
            }
            moved |= wrote > 0;
            self.blocked = wrote < all;
        }
        Ok(moved)
    }

    /// Fills the staging buffer with whole frames, up to one whose payload is sent from its own place.
    fn stage(&mut self, items: &mut VecDeque<Item>, streams: &mut VecDeque<Stream>, sent: &mut Vec<SendKey>) {
        while self.staged.len() < STAGED {
            match items.pop_front() {
                Some(Item::Bare(header)) => self.staged.extend_from_slice(&header.encode()),
                Some(Item::Owned { header, bytes }) => {
                    self.staged.extend_from_slice(&header.encode());
                    self.staged.extend_from_slice(&bytes);
                }
                Some(Item::Eager { header, data, send }) => {
                    self.staged.extend_from_slice(&header.encode());
                    let len = header.len as usize;
                    if len > COALESCE {
                        self.body = Some(Body { data, len, offset: 0, send, last: true });
                        return;
                    }
                    if len > 0 {
                        // SAFETY: a live operation's memory.
                        self.staged.extend_from_slice(unsafe { std::slice::from_raw_parts(data, len) });
                    }
                    sent.push(send);
                }
                None => {
                    let Some(mut stream) = streams.pop_front() else { return };
                    let piece = (stream.len - stream.offset).min(TCP_PIECE);
                    let mut header = Header::new(Frame::Data, stream.channel);
                    header.cookie = stream.slot;
                    header.len = piece as u32;
                    self.staged.extend_from_slice(&header.encode());
                    // SAFETY: an offset within the live operation's memory, or none.
                    let data = unsafe { stream.data.add(stream.offset) };
                    stream.offset += piece;
                    let last = stream.offset == stream.len;
                    if piece == 0 {
                        // A message of no bytes; its memory may be nowhere.
                        sent.push(stream.send);
                        continue;
                    }
                    self.body = Some(Body { data, len: piece, offset: 0, send: stream.send, last });
                    if !last {
                        streams.push_back(stream);
                    }
                    return;
                }
            }
        }
    }
}
