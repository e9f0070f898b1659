//! Sockets: who may connect, who is called, who has gone.

mod accept;
mod dial;
mod read;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use super::config::Config;
use super::endpoint::{Address, Endpoint, In, Item, Out, new_bell};
use super::engine::Engine;
use crate::error::HubError;
use crate::fork::Guarded;
use crate::handshake::{Job, Opening};
use crate::link::interfaces::{self, Local};
use crate::link::{shm, tcp};
use crate::wire::{Frame, HEADER, Header, HubId};
use accept::Guests;

pub(crate) use dial::Dial;
pub(crate) use read::BUFFER;

/// Epoll tokens: a kind in the upper byte, which attempt of a call in the next three, an index in the lower half.
const BELL: u64 = 0;
const LOCAL: u64 = 1;
const REMOTE: u64 = 2;
const GUEST: u64 = 3;
const OUT: u64 = 4;
const IN: u64 = 5;
const PIDFD: u64 = 6;

fn token(kind: u64, index: u32) -> EventData {
    attempt_token(kind, 0, index)
}

fn attempt_token(kind: u64, attempt: u32, index: u32) -> EventData {
    EventData::new_u64(kind << 56 | u64::from(attempt & 0xff_ffff) << 32 | u64::from(index))
}

/// The longest reason of a farewell, in bytes.
const FAREWELL: usize = 2048;

/// What to say when the two ends of a link don't hold the same secret.
const STRANGERS: &str = "it doesn't hold this job's secret (have all ranks the same PODRING_TOKEN_FILE?)";

/// The same of a peer that can't prove it any more.
const DOUBTED: &str = "a call in its name and this process didn't have the same secret (have all ranks the same \
                       PODRING_TOKEN_FILE?)";

/// Jobs remembered, the newest last: more than a process is in at a time.
const JOBS: usize = 1024;

/// The hub's own sockets.
pub(crate) struct Net {
    pub me: HubId,
    pub address: Address,
    jobs: VecDeque<Job>,
    pub epoll: Arc<Guarded>,
    pub bell: Arc<Guarded>,
    local: Guarded,
    remote: Guarded,
    guests: Guests,
    /// This host's addresses, as they were when the hub started.
    found: Vec<Local>,
    /// This hub's id, at an address that peers read to prove that they can.
    proof: Box<[u8; 16]>,
    /// TCP links exist: sockets must be looked at while polling.
    pub tcp_links: usize,
    /// Links whose reader's bell isn't known yet: it can't be woken.
    pub unwelcomed: usize,
}

fn add(epoll: &Guarded, fd: impl AsFd, data: EventData, flags: EventFlags) -> Result<(), Errno> {
    epoll::add(epoll, fd, data, flags)
}

impl Net {
    /// Opens the hub's sockets. `host` and `machine` as in [`Address`].
    pub fn new(me: HubId, config: &Config, host: String, machine: String, name: String) -> Result<Self, HubError> {
        let found = interfaces::local().map_err(|source| HubError::System { what: "interface addresses", source })?;
        let published = interfaces::publish(&found, &config.interfaces)?;
        let epoll = Guarded::new(epoll::create(CreateFlags::CLOEXEC).map_err(HubError::system("epoll_create"))?);
        let bell = new_bell().map_err(HubError::system("eventfd"))?;
        let local = Guarded::new(shm::listener(me).map_err(HubError::system("Unix socket"))?);
        let (first, last) = (*config.ports.start(), *config.ports.end());
        let (remote, port) = tcp::listener(&config.ports).map_err(|errno| match (first, last) {
            (0, 0) => HubError::system("TCP listener")(errno),
            (first, last) if first == last => HubError::Port { ports: first.to_string(), source: errno.into() },
            (first, last) => HubError::Port { ports: format!("{first}-{last}"), source: errno.into() },
        })?;
        let remote = Guarded::new(remote);
        let watch = HubError::system("epoll_ctl");
        add(&epoll, &bell, token(BELL, 0), EventFlags::IN).map_err(&watch)?;
        add(&epoll, &local, token(LOCAL, 0), EventFlags::IN).map_err(&watch)?;
        add(&epoll, &remote, token(REMOTE, 0), EventFlags::IN).map_err(&watch)?;
        let tcp = published.into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
        Ok(Net {
            me,
            address: Address { hub: me, host, machine, name, tcp },
            jobs: VecDeque::new(),
            epoll: Arc::new(epoll),
            bell: Arc::new(bell),
            local,
            remote,
            guests: Guests::default(),
            found,
            proof: Box::new(me.0.to_le_bytes()),
            tcp_links: 0,
            unwelcomed: 0,
        })
    }

    /// The job that an opening names, if this process is in it; `Err` if it names no members of it.
    fn job(&self, opening: &Opening) -> Result<Option<&Job>, ()> {
        match self.jobs.iter().rev().find(|job| job.id == opening.job) {
            Some(job) if job.knows(opening) => Ok(Some(job)),
            Some(_) => Err(()),
            None => Ok(None),
        }
    }

    /// An opening of a link to a peer, and the job in which both know each other: the newest.
    fn opening(&self, to: HubId) -> Result<(Opening, &Job), String> {
        let nonce = crate::handshake::nonce().map_err(|error| error.to_string())?;
        let known = self.jobs.iter().rev().find_map(|job| Some((job.opening(self.me, to, nonce)?, job)));
        known.ok_or_else(|| "it is in no job with this process".to_owned())
    }
}

impl Engine {
    /// Lets the members of a job in, and calls them as such from now on.
    pub fn trust(&mut self, job: Job) {
        let jobs = &mut self.net.jobs;
        jobs.retain(|known| known.id != job.id);
        if jobs.len() == JOBS {
            jobs.pop_front();
        }
        jobs.push_back(job);
        self.look_at_guests();
    }

    /// Looks at all sockets without waiting; `true` if something happened.
    pub fn poll_sockets(&mut self) -> bool {
        let mut buffer = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        let zero = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [(0u64, EventFlags::empty()); 64];
        let epoll = self.net.epoll.clone();
        let count = match epoll::wait(&*epoll, &mut buffer, Some(&zero)) {
            Ok((found, _)) => {
                for (slot, event) in events.iter_mut().zip(found.iter()) {
                    *slot = (event.data.u64(), event.flags);
                }
                found.len()
            }
            Err(_) => 0,
        };
        for &(data, flags) in &events[..count] {
            let (kind, attempt, index) = (data >> 56, (data >> 32) as u32 & 0xff_ffff, data as u32);
            match kind {
                BELL => {
                    let mut count = [0u8; 8];
                    // Empty it; EAGAIN means that somebody else did.
                    let _ = rustix::io::read(&*self.net.bell, &mut count);
                }
                LOCAL => {
                    self.welcome(true);
                }
                REMOTE => {
                    self.welcome(false);
                }
                GUEST => self.guest(index),
                OUT => self.out_event(index, attempt, flags),
                IN => self.in_event(index, flags),
                PIDFD => self.lose(index, "its process ended".into()),
                _ => {}
            }
        }
        count > 0
    }

    /// Reads what a process had sent before it ended, which may be all that this one needs of it: a rank leaves when its
    /// own part is done. Its connection may not even have been accepted yet.
    pub fn hear_out(&mut self, endpoint: u32) {
        if matches!(self.endpoints[endpoint as usize].inbound, In::None) {
            while self.welcome(true) {}
            while self.welcome(false) {}
            self.look_at_guests();
        }
        while matches!(self.endpoints[endpoint as usize].inbound, In::Tcp { .. }) && self.read_tcp(endpoint) {}
    }

    /// How a process was lost, with what is known of its secret.
    pub fn explained(&self, endpoint: u32, how: String) -> String {
        match self.endpoints[endpoint as usize].doubted && !how.contains(STRANGERS) {
            true => format!("{how}; {DOUBTED}"),
            false => how,
        }
    }

    fn out_event(&mut self, endpoint: u32, attempt: u32, flags: EventFlags) {
        let gone = EventFlags::HUP | EventFlags::ERR | EventFlags::RDHUP;
        let Some(peer) = self.endpoints.get_mut(endpoint as usize) else { return };
        match &mut peer.out {
            Out::Shm { socket, writer, bell, .. } => match shm::recv_welcome(&*socket) {
                Ok(Some(fd)) => {
                    let fd = Guarded::new(fd);
                    // It may have gone to sleep before its bell was known here.
                    if writer.reader_sleeps() {
                        super::endpoint::ring(&fd);
                    }
                    if bell.replace(fd).is_none() {
                        self.net.unwelcomed -= 1;
                    }
                }
                Ok(None) => {}
                Err(Errno::ACCESS) => self.lose(endpoint, STRANGERS.into()),
                Err(_) => self.lose(endpoint, "its process ended".into()),
            },
            Out::Dialing(_) => self.dial_event(endpoint, attempt, flags, Instant::now()),
            // An event of an attempt that has been given up may come with the batch in which it was.
            Out::Tcp(out) if out.attempt == attempt => {
                if flags.contains(EventFlags::OUT) {
                    out.blocked = false;
                }
                let farewell = flags.contains(EventFlags::IN) && tcp::has_bytes(&out.socket);
                // While the other direction is open it will tell, after all that was sent on it.
                if farewell || flags.intersects(gone) && !matches!(peer.inbound, In::Tcp { .. }) {
                    self.lose(endpoint, "its connection ended".into());
                }
            }
            Out::Tcp(_) | Out::Idle | Out::Retry => {}
        }
    }

    fn in_event(&mut self, endpoint: u32, flags: EventFlags) {
        let Some(peer) = self.endpoints.get_mut(endpoint as usize) else { return };
        match &peer.inbound {
            In::Shm { .. } => {
                if flags.intersects(EventFlags::HUP | EventFlags::ERR | EventFlags::RDHUP) {
                    self.lose(endpoint, "its process ended".into());
                }
            }
            In::Tcp { .. } => {
                self.read_tcp(endpoint);
            }
            In::None => {}
        }
    }

    /// Tells a process at the other end of a TCP link why it is given up, as far as that goes without waiting.
    pub fn say_farewell(&self, endpoint: u32, why: &str) {
        let In::Tcp { socket, .. } = &self.endpoints[endpoint as usize].inbound else { return };
        let text = &why.as_bytes()[..why.len().min(FAREWELL)];
        let mut header = Header::new(Frame::Farewell, 0);
        header.len = text.len() as u32;
        // If it isn't there to hear it, that is why.
        let _ = tcp::write_both(socket, &header.encode(), text);
    }

    /// Why a process has given this one up, if it has said so.
    pub fn hear_farewell(&self, endpoint: u32) -> Option<String> {
        let Out::Tcp(out) = &self.endpoints[endpoint as usize].out else { return None };
        let mut bytes = [0u8; HEADER + FAREWELL];
        let got = tcp::read(&out.socket, &mut bytes).ok().flatten()?;
        let (head, text) = bytes[..got].split_first_chunk::<HEADER>()?;
        let header = Header::decode(head).ok().filter(|header| header.frame == Frame::Farewell)?;
        let text = String::from_utf8_lossy(&text[..text.len().min(header.len as usize)]).into_owned();
        Some(format!("it gave this process up: {text}"))
    }

    /// Signs of life over TCP: sends them, misses them, and gives up on calls that nobody answers. Returns when to look
    /// again.
    pub fn keep_alive(&mut self, now: Instant) -> Option<Instant> {
        let mut next = self.expire_guests(now);
        let mut sooner = |at: Instant| next = Some(next.map_or(at, |other| other.min(at)));
        for index in 0..self.endpoints.len() {
            let peer: &Endpoint = &self.endpoints[index];
            match &peer.out {
                Out::Dialing(_) => {
                    if let Some(at) = self.dial_on(index as u32, now) {
                        sooner(at);
                    }
                }
                Out::Retry => sooner(now + Duration::from_millis(2)),
                Out::Tcp(_) => {
                    let every = self.config.silence / 4;
                    if now - peer.spoke >= every && peer.items.is_empty() {
                        self.endpoints[index].spoke = now;
                        self.push_item(index as u32, Item::Bare(Header::new(Frame::Ping, 0)));
                    }
                    sooner(now + every);
                }
                Out::Idle | Out::Shm { .. } => {}
            }
            if matches!(self.endpoints[index].inbound, In::Tcp { .. }) {
                let silence = self.config.silence;
                if now.saturating_duration_since(self.endpoints[index].heard) > silence {
                    // It may have been this process that stood still: then what came meanwhile is there to be read.
                    self.read_tcp(index as u32);
                }
                let silent = now.saturating_duration_since(self.endpoints[index].heard);
                if silent > silence {
                    self.lose(index as u32, format!("silent for {} ms", silent.as_millis()));
                } else {
                    sooner(self.endpoints[index].heard + silence + Duration::from_millis(1));
                }
            }
        }
        next
    }
}

#[cfg(test)]
mod tests;
