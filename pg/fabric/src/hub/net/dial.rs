//! Whom this process calls: shared memory within the host, else the peer's addresses, a few at a time.
//!
//! The next address is tried when all before it have failed, or after a short while, beside them: a dead interface's
//! address must not cost a timeout. What counts is not that a connection stands (another host may have the same private
//! address) but that its other end has proved itself the peer; the first that does is the link.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::super::endpoint::{Out, TcpOut};
use super::super::engine::Engine;
use super::{OUT, STRANGERS, add, attempt_token, token};
use crate::fork::Guarded;
use crate::handshake::{LocalOpening, Opening, REFUSED, REPLY, Reply};
use crate::link::interfaces;
use crate::link::ring::Writer;
use crate::link::{shm, tcp};

/// How long an address is tried alone.
const ALONE: Duration = Duration::from_millis(250);
/// The same once it is connected and only the peer's answer is missing.
const ALONE_CONNECTED: Duration = Duration::from_secs(1);
/// The least time in which an address must connect; else the silence that is allowed a peer.
const CONNECT: Duration = Duration::from_secs(3);
/// How many times the time to prove oneself a connected peer may take to answer: it may not have heard of the job yet.
const ANSWER: u32 = 3;

/// How long a peer that can't be reached isn't given up: it may have ended over what other ranks have still to tell.
pub(super) const HEARSAY: Duration = Duration::from_millis(500);

/// A connection under way.
struct Attempt {
    /// Which address.
    number: u32,
    to: SocketAddr,
    socket: Guarded,
    since: Instant,
    /// Sent when connected.
    opening: Option<Opening>,
    reply: [u8; REPLY],
    got: usize,
}

/// A call under way.
pub(crate) struct Dial {
    candidates: Vec<SocketAddr>,
    next: usize,
    attempts: Vec<Attempt>,
    failed: Vec<(SocketAddr, String)>,
    last: Instant,
    /// Since when there is nothing left to try.
    futile: Option<Instant>,
}

impl Dial {
    fn fail(&mut self, position: usize, why: String) {
        let attempt = self.attempts.remove(position);
        self.failed.push((attempt.to, why));
    }
}

/// How an attempt goes on.
enum Step {
    /// Something must come first.
    Wait,
    /// It is no use.
    Fail(String),
    /// The peer has answered.
    Answered(Opening, Reply),
}

impl Engine {
    /// Opens the link to a process, as far as that goes without waiting.
    pub fn open_out(&mut self, endpoint: u32, now: Instant) {
        let peer = &self.endpoints[endpoint as usize];
        let (id, Some(address)) = (peer.id, peer.address.clone()) else { return };
        let here = address.machine == self.net.address.machine;
        if here && address.host == self.net.address.host {
            match shm::dial(id) {
                Ok(socket) => {
                    if let Err(why) = self.open_shm(endpoint, Guarded::new(socket)) {
                        self.lose(endpoint, format!("no shared memory for the link to it: {why}"));
                    }
                    return;
                }
                Err(Errno::AGAIN) => {
                    self.endpoints[endpoint as usize].out = Out::Retry;
                    return;
                }
                // Not to be seen from here (another network namespace), another user's, or gone: TCP finds out which.
                Err(_) => {}
            }
        }
        let candidates = interfaces::candidates(&address.tcp, here, &self.net.found);
        let dial = Dial { candidates, next: 0, attempts: Vec::new(), failed: Vec::new(), last: now, futile: None };
        self.endpoints[endpoint as usize].out = Out::Dialing(Box::new(dial));
        self.dial_on(endpoint, now);
    }

    fn open_shm(&mut self, endpoint: u32, socket: Guarded) -> Result<(), String> {
        let system = |errno: Errno| errno.to_string();
        let capacity = self.config.ring;
        let (ring, mapping) = shm::create_ring(capacity).map_err(system)?;
        let (opening, job) = self.net.opening(self.endpoints[endpoint as usize].id)?;
        let place = self.net.proof.as_ptr() as u64;
        let signed = LocalOpening::new(&job.secret, opening, capacity as u64, place);
        shm::send_opening(&socket, &signed, &ring, &*self.net.bell).map_err(system)?;
        add(&self.net.epoll, &socket, token(OUT, endpoint), EventFlags::IN | EventFlags::RDHUP).map_err(system)?;
        // SAFETY: freshly mapped and zeroed, this is its only writer; dropped with it.
        let writer = unsafe { Writer::new(mapping.base(), capacity) };
        self.endpoints[endpoint as usize].out = Out::Shm { socket, writer, bell: None, _mapping: mapping };
        self.net.unwelcomed += 1;
        Ok(())
    }

    /// Gives up attempts whose time is over, starts those whose time has come. Returns when to look again.
    pub(super) fn dial_on(&mut self, endpoint: u32, now: Instant) -> Option<Instant> {
        let (connect, answer) = (self.config.silence.max(CONNECT), self.config.handshake * ANSWER);
        let Out::Dialing(dial) = &mut self.endpoints.get_mut(endpoint as usize)?.out else { return None };
        let ends = |attempt: &Attempt| attempt.since + if attempt.opening.is_some() { answer } else { connect };
        while let Some(position) = dial.attempts.iter().position(|attempt| now >= ends(attempt)) {
            let attempt = &dial.attempts[position];
            let waited = (now - attempt.since).as_millis();
            let why = match attempt.opening {
                Some(_) => format!("connected, but no answer within {waited} ms"),
                None => format!("no answer within {waited} ms"),
            };
            dial.fail(position, why);
        }
        let alone = |dial: &Dial| {
            let connected = dial.attempts.iter().any(|attempt| attempt.opening.is_some());
            dial.last + if connected { ALONE_CONNECTED } else { ALONE }
        };
        while let Some(&candidate) = dial.candidates.get(dial.next)
            && (dial.attempts.is_empty() || now >= alone(dial))
        {
            let number = dial.next as u32;
            dial.next += 1;
            dial.last = now;
            let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            let socket = tcp::dial(candidate).map(Guarded::new).and_then(|socket| {
                add(&self.net.epoll, &socket, attempt_token(OUT, number, endpoint), flags)?;
                Ok(socket)
            });
            match socket {
                Ok(socket) => dial.attempts.push(Attempt {
                    number,
                    to: candidate,
                    socket,
                    since: now,
                    opening: None,
                    reply: [0; REPLY],
                    got: 0,
                }),
                Err(errno) => dial.failed.push((candidate, errno.to_string())),
            }
        }
        if dial.attempts.is_empty() {
            let give_up = *dial.futile.get_or_insert(now) + HEARSAY;
            // An answer, if only a stranger's, is cause enough.
            if now < give_up && !dial.failed.iter().any(|(_, why)| why == STRANGERS) {
                return Some(give_up);
            }
            let how = unreachable(&dial.failed);
            self.lose(endpoint, how);
            return None;
        }
        let next = (dial.next < dial.candidates.len()).then(|| alone(dial));
        dial.attempts.iter().map(ends).chain(next).min()
    }

    /// Something happened to an attempt.
    pub(super) fn dial_event(&mut self, endpoint: u32, number: u32, flags: EventFlags, now: Instant) {
        let Some(peer) = self.endpoints.get_mut(endpoint as usize) else { return };
        let (id, silence) = (peer.id, self.config.silence);
        let Out::Dialing(dial) = &mut peer.out else { return };
        let Some(position) = dial.attempts.iter().position(|attempt| attempt.number == number) else { return };
        let attempt = &mut dial.attempts[position];
        let step = match attempt.opening {
            None => match tcp::connected(&attempt.socket) {
                Err(errno) => Step::Fail(errno.to_string()),
                Ok(()) if flags.intersects(EventFlags::HUP | EventFlags::ERR) => Step::Fail("closed at once".into()),
                Ok(()) if !flags.contains(EventFlags::OUT) => Step::Wait,
                Ok(()) => match self.net.opening(id) {
                    Err(why) => Step::Fail(why),
                    Ok((opening, _)) => {
                        tcp::limit_silence(&attempt.socket, silence);
                        attempt.since = now;
                        attempt.opening = Some(opening);
                        match tcp::write(&attempt.socket, &opening.encode()) {
                            Ok(wrote) if wrote == opening.encode().len() => attempt.listen(),
                            Ok(_) => Step::Fail("it takes nothing".into()),
                            Err(errno) => Step::Fail(errno.to_string()),
                        }
                    }
                },
            },
            Some(_) => attempt.listen(),
        };
        let step = match step {
            Step::Answered(opening, reply) => {
                match self.net.job(&opening).ok().flatten() {
                    Some(job) if opening.accepts(&job.secret, &reply) => {
                        let proof = opening.proof(&job.secret, &reply.nonce);
                        let Attempt { socket, number, .. } = dial.attempts.swap_remove(position);
                        // The other attempts are dropped with the call.
                        peer.out = Out::Tcp(TcpOut::new(socket, number, &proof));
                        peer.spoke = now;
                        self.net.tcp_links += 1;
                        self.mark_dirty(endpoint);
                        return;
                    }
                    Some(_) => {
                        // It hears so too: this process may have ended by the time that it calls.
                        let _ = tcp::write(&dial.attempts[position].socket, &REFUSED);
                        Step::Fail(STRANGERS.into())
                    }
                    None => Step::Fail("this process has left the job".into()),
                }
            }
            other => other,
        };
        match step {
            Step::Fail(why) => {
                dial.fail(position, why);
                self.dial_on(endpoint, now);
            }
            Step::Wait | Step::Answered(..) => {}
        }
    }
}

impl Attempt {
    /// Reads the peer's answer.
    fn listen(&mut self) -> Step {
        let Some(opening) = self.opening else { return Step::Wait };
        while self.got < REPLY {
            match tcp::read(&self.socket, &mut self.reply[self.got..]) {
                Ok(Some(0)) => return Step::Fail("it hung up instead of answering as a peer of this job".into()),
                Ok(Some(more)) => self.got += more,
                Ok(None) => return Step::Wait,
                Err(errno) => return Step::Fail(errno.to_string()),
            }
        }
        match Reply::decode(&self.reply) {
            Ok(reply) => Step::Answered(opening, reply),
            Err(error) => Step::Fail(error.to_string()),
        }
    }
}

fn unreachable(failed: &[(SocketAddr, String)]) -> String {
    if failed.is_empty() {
        return "can't be reached: it has no address that could be tried from here".to_owned();
    }
    let tried: Vec<String> = failed.iter().map(|(address, why)| format!("{address}: {why}")).collect();
    format!("can't be reached at any of its addresses: {}", tried.join("; "))
}
