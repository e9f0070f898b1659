//! Who comes: connections that haven't proved yet whose they are.
//!
//! Anybody who can reach the port can connect. Until a connection has proved itself it costs a descriptor and some 300
//! bytes, for a bounded time; nothing it says reaches the hub's state. A crowd is thinned where it is thickest, so that a
//! flood from one address turns nobody else away.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, Resource, getrlimit, pidfd_open};

use super::super::endpoint::{In, Out};
use super::super::engine::Engine;
use super::{BUFFER, GUEST, IN, LOCAL, PIDFD, REMOTE, add, token};
use crate::fork::Guarded;
use crate::handshake::{self, MAC, OPENING, Opening, REFUSED};
use crate::link::ring::Reader;
use crate::link::{shm, tcp};
use crate::wire::HubId;

/// Connections that haven't proved themselves, at most; fewer where the process may have few descriptors.
const GUESTS: usize = 4096;
/// Connections accepted before other work's turn.
const BATCH: usize = 64;
/// How many times as long as for the rest one may wait for this process to hear of its job: ranks learn of it at
/// different moments.
const EARLY: u32 = 3;
/// How long no connection is accepted after the system had no descriptor or memory for one.
const PAUSE: Duration = Duration::from_millis(100);

/// How far a guest is.
enum Stage {
    /// Over TCP: its opening is coming.
    Opening { bytes: [u8; OPENING], got: usize },
    /// Over TCP: its opening is here, but this process isn't in that job, or not yet.
    Early(Opening),
    /// Over TCP: answered; its proof is coming.
    Proof { opening: Opening, nonce: [u8; MAC], bytes: [u8; MAC], got: usize },
    /// Within the host; what it opened, if its job isn't known here yet.
    Local(Option<Box<shm::Opened>>),
}

struct Guest {
    socket: Guarded,
    since: Instant,
    /// `None` within the host.
    from: Option<IpAddr>,
    stage: Stage,
}

impl Guest {
    fn early(&self) -> bool {
        matches!(self.stage, Stage::Early(_) | Stage::Local(Some(_)))
    }

    fn ends(&self, limit: Duration) -> Instant {
        self.since + if self.early() { limit * EARLY } else { limit }
    }
}

/// The connections that haven't proved themselves.
#[derive(Default)]
pub(super) struct Guests {
    seats: Vec<Option<Guest>>,
    taken: usize,
    /// When connections are accepted again.
    resume: Option<Instant>,
}

/// What a look at a guest found.
enum Look {
    /// It stays.
    Stay,
    /// It is turned away.
    Away,
    /// It has proved itself.
    In(Opening),
}

impl Guests {
    /// How many there may be: a quarter of the process's descriptors, so that links find some.
    fn limit() -> usize {
        let descriptors = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| limit as usize);
        (descriptors / 4).clamp(64, GUESTS)
    }

    fn take(&mut self, index: usize) -> Option<Guest> {
        let guest = self.seats.get_mut(index)?.take()?;
        self.taken -= 1;
        Some(guest)
    }

    fn put(&mut self, index: usize, guest: Guest) {
        if self.seats[index].replace(guest).is_none() {
            self.taken += 1;
        }
    }

    /// A seat for one more. If there is none, the oldest of those who have the most from one address goes.
    fn free(&mut self) -> usize {
        if self.taken >= Self::limit() {
            self.thin();
        }
        match self.seats.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.seats.push(None);
                self.seats.len() - 1
            }
        }
    }

    /// Turns one away; `false` if there is none.
    fn thin(&mut self) -> bool {
        let mut crowd: FxHashMap<Option<IpAddr>, usize> = FxHashMap::default();
        for guest in self.seats.iter().flatten() {
            *crowd.entry(guest.from).or_default() += 1;
        }
        let most = crowd.values().copied().max().unwrap_or(0);
        let thickest = |guest: &Guest| crowd.get(&guest.from) == Some(&most);
        let seats = self.seats.iter().enumerate().filter_map(|(index, seat)| Some((index, seat.as_ref()?)));
        let oldest = seats.filter(|(_, guest)| thickest(guest)).min_by_key(|(_, guest)| guest.since);
        match oldest.map(|(index, _)| index) {
            Some(index) => self.take(index).is_some(),
            None => false,
        }
    }

    /// How many there are.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.taken
    }
}

impl Engine {
    /// Accepts some connections; `true` if there may be more.
    pub(super) fn welcome(&mut self, local: bool) -> bool {
        for _ in 0..BATCH {
            let accepted = match local {
                true => shm::accept(&self.net.local).map(|socket| (socket, None)),
                false => tcp::accept(&self.net.remote).map(|(socket, from)| (socket, Some(from))),
            };
            match accepted {
                Ok((socket, from)) => {
                    let stage = match local {
                        true => Stage::Local(None),
                        false => Stage::Opening { bytes: [0; OPENING], got: 0 },
                    };
                    let guest = Guest { socket: Guarded::new(socket), since: Instant::now(), from, stage };
                    let index = self.net.guests.free();
                    if add(&self.net.epoll, &guest.socket, token(GUEST, index as u32), EventFlags::IN).is_ok() {
                        self.net.guests.put(index, guest);
                        // Most have said their piece when they are accepted.
                        self.guest(index as u32);
                    }
                }
                Err(Errno::AGAIN) => return false,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    if !self.net.guests.thin() {
                        self.listen(false);
                        self.net.guests.resume = Some(Instant::now() + PAUSE);
                        return false;
                    }
                }
                // Refused, or gone already: the next.
                Err(_) => {}
            }
        }
        true
    }

    /// Whether connections are waited for.
    fn listen(&self, listens: bool) {
        let flags = if listens { EventFlags::IN } else { EventFlags::empty() };
        for (socket, kind) in [(&self.net.local, LOCAL), (&self.net.remote, REMOTE)] {
            // If this fails the sockets stay as they were: too eager at worst.
            let _ = epoll::modify(&*self.net.epoll, socket, token(kind, 0), flags);
        }
    }

    pub(super) fn look_at_guests(&mut self) {
        for index in 0..self.net.guests.seats.len() {
            self.guest(index as u32);
        }
    }

    /// Turns away those whose time is up; returns when the next one's is.
    pub(super) fn expire_guests(&mut self, now: Instant) -> Option<Instant> {
        let mut next = None;
        if let Some(resume) = self.net.guests.resume {
            if now >= resume {
                self.net.guests.resume = None;
                self.listen(true);
            } else {
                next = Some(resume);
            }
        }
        if self.net.guests.taken == 0 {
            return next;
        }
        let limit = self.config.handshake;
        for index in 0..self.net.guests.seats.len() {
            let Some(ends) = self.net.guests.seats[index].as_ref().map(|guest| guest.ends(limit)) else { continue };
            if now < ends {
                next = Some(next.map_or(ends, |other: Instant| other.min(ends)));
                continue;
            }
            // It may have been this process that stood still: then what came meanwhile is there to be read.
            self.guest(index as u32);
            let late = |guest: &Guest| now >= guest.ends(limit);
            if self.net.guests.seats[index].as_ref().is_some_and(late) {
                self.net.guests.take(index);
            }
        }
        next
    }

    /// Reads what a guest has said; lets it in, keeps it waiting, or turns it away.
    pub(super) fn guest(&mut self, index: u32) {
        let Some(mut guest) = self.net.guests.take(index as usize) else { return };
        match self.look(&mut guest) {
            Look::Away => {}
            Look::Stay => {
                // Nothing it says is of use before its job is known: `trust` looks again. Until then no more events,
                // which would come without end.
                let flags = if guest.early() { EventFlags::empty() } else { EventFlags::IN };
                if epoll::modify(&*self.net.epoll, &guest.socket, token(GUEST, index), flags).is_ok() {
                    self.net.guests.put(index as usize, guest);
                }
            }
            Look::In(opening) => {
                let _ = epoll::delete(&*self.net.epoll, &guest.socket);
                self.admit(guest, opening);
            }
        }
    }

    fn look(&mut self, guest: &mut Guest) -> Look {
        loop {
            match &mut guest.stage {
                Stage::Opening { bytes, got } => {
                    match fill(&guest.socket, bytes, got) {
                        Some(true) => {}
                        Some(false) if Opening::may_begin(&bytes[..*got]) => return Look::Stay,
                        _ => return Look::Away,
                    }
                    match Opening::decode(bytes) {
                        Ok(opening) if opening.to == self.net.me => guest.stage = Stage::Early(opening),
                        _ => return Look::Away,
                    }
                }
                Stage::Early(opening) => {
                    let opening = *opening;
                    let job = match self.net.job(&opening) {
                        Ok(Some(job)) => job,
                        Ok(None) if tcp::is_quiet(&guest.socket) => return Look::Stay,
                        _ => return Look::Away,
                    };
                    let Ok(nonce) = handshake::nonce() else { return Look::Away };
                    let reply = opening.reply(&job.secret, nonce).encode();
                    // The first bytes on the connection: it has room for them.
                    if tcp::write(&guest.socket, &reply) != Ok(reply.len()) {
                        return Look::Away;
                    }
                    guest.stage = Stage::Proof { opening, nonce, bytes: [0; MAC], got: 0 };
                }
                Stage::Proof { opening, nonce, bytes, got } => {
                    match fill(&guest.socket, bytes, got) {
                        Some(true) => {}
                        Some(false) => return Look::Stay,
                        None => return Look::Away,
                    }
                    match self.net.job(opening) {
                        Ok(Some(job)) if opening.proves(&job.secret, nonce, bytes) => return Look::In(*opening),
                        Ok(Some(_)) if *bytes == REFUSED => self.doubt(opening.from),
                        _ => {}
                    }
                    return Look::Away;
                }
                Stage::Local(opened) => {
                    if opened.is_none() {
                        match shm::recv_opening(&guest.socket) {
                            Ok(Some(new)) => *opened = Some(Box::new(new)),
                            Ok(None) => return Look::Stay,
                            Err(_) => return Look::Away,
                        }
                    }
                    let Some(opened) = opened else { return Look::Away };
                    let opening = opened.by.opening;
                    return match self.net.job(&opening) {
                        _ if opening.to != self.net.me => Look::Away,
                        Ok(Some(job)) if opened.by.proves(&job.secret) => Look::In(opening),
                        Ok(Some(_)) => {
                            // So that a rank with another secret is told that, and not that this process has gone.
                            let _ = shm::send_refusal(&guest.socket);
                            self.doubt(opening.from);
                            Look::Away
                        }
                        Ok(None) if tcp::is_quiet(&guest.socket) => Look::Stay,
                        _ => Look::Away,
                    };
                }
            }
        }
    }

    /// Somebody calls in a member's name and has another secret. That is no proof of anything: a call of this process's own
    /// brings one, or finds that the member has given up and gone.
    fn doubt(&mut self, member: HubId) {
        let endpoint = self.endpoint(member);
        let peer = &mut self.endpoints[endpoint as usize];
        peer.doubted = true;
        if peer.dead.is_none() && !peer.ending && matches!(peer.out, Out::Idle) {
            self.open_out(endpoint, Instant::now());
        }
    }

    /// Answers whoever has called, as far as that goes without waiting.
    pub fn answer_callers(&mut self) {
        self.welcome(true);
        self.welcome(false);
        self.look_at_guests();
    }

    fn admit(&mut self, guest: Guest, opening: Opening) {
        let endpoint = self.endpoint(opening.from);
        let peer = &mut self.endpoints[endpoint as usize];
        if peer.dead.is_some() || !matches!(peer.inbound, In::None) {
            return;
        }
        peer.heard = Instant::now();
        let watch = EventFlags::IN | EventFlags::RDHUP;
        match guest.stage {
            Stage::Local(Some(opened)) => {
                let shm::Opened { by, ring, bell } = *opened;
                let Ok(mapping) = shm::map_ring(&ring, by.capacity) else {
                    self.lose(endpoint, "its shared memory can't be mapped here".into());
                    return;
                };
                if let Some(pid) = shm::peer_pid(&guest.socket) {
                    if let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) {
                        let fd = Guarded::new(fd);
                        let _ = add(&self.net.epoll, &fd, token(PIDFD, endpoint), EventFlags::IN);
                        peer.pidfd = Some(fd);
                    }
                    let mut seen = [0u8; 16];
                    // SAFETY: `seen` has 16 bytes.
                    let read = unsafe { shm::read_memory(pid, by.place, seen.as_mut_ptr(), 16) };
                    // It hadn't ended when that was read: its number was its own.
                    if self.config.cma && read == Ok(16) && seen == opening.from.0.to_le_bytes() && !peer.ended() {
                        peer.readable = Some(pid);
                    }
                }
                // SAFETY: just mapped with this capacity, zeroed and written by the peer only; dropped with the reader.
                let reader = unsafe { Reader::new(mapping.base(), by.capacity as usize) };
                let _ = shm::send_welcome(&guest.socket, &*self.net.bell);
                let _ = add(&self.net.epoll, &guest.socket, token(IN, endpoint), watch);
                peer.inbound = In::Shm { socket: guest.socket, reader, bell: Guarded::new(bell), _mapping: mapping };
            }
            _ => {
                let _ = add(&self.net.epoll, &guest.socket, token(IN, endpoint), watch);
                self.net.tcp_links += 1;
                peer.inbound = In::Tcp { socket: guest.socket, buffer: vec![0; BUFFER], start: 0, end: 0, data: None };
            }
        }
    }
}

/// Reads up to the end of `bytes` and no further: what follows is the link's. `Some(true)` when full, `None` if the
/// connection ended before.
fn fill(socket: &Guarded, bytes: &mut [u8], got: &mut usize) -> Option<bool> {
    while *got < bytes.len() {
        match tcp::read(socket, &mut bytes[*got..]) {
            Ok(Some(0)) | Err(_) => return None,
            Ok(Some(more)) => *got += more,
            Ok(None) => return Some(false),
        }
    }
    Some(true)
}
