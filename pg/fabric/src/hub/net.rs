//! Sockets: who may connect, who is called, who has gone.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};

use super::endpoint::{Address, Endpoint, In, Out, TcpOut, new_bell};
use super::engine::Engine;
use crate::error::HubError;
use crate::fork::Guarded;
use crate::link::ring::{Reader, Writer};
use crate::link::{shm, tcp};
use crate::wire::{Frame, HEADER, HELLO, Header, Hello, HubId, same_token};

/// Epoll tokens: a kind in the upper half, an index in the lower.
const BELL: u64 = 0;
const LOCAL: u64 = 1;
const REMOTE: u64 = 2;
const GUEST: u64 = 3;
const OUT: u64 = 4;
const IN: u64 = 5;
const PIDFD: u64 = 6;

fn token(kind: u64, index: u32) -> EventData {
    EventData::new_u64(kind << 32 | u64::from(index))
}

/// How long one address of a peer is tried.
const DIAL: Duration = Duration::from_secs(3);
/// Connections that haven't said who they are.
const GUESTS: usize = 4096;
/// How long they have to do so.
const GUEST_TIME: Duration = Duration::from_secs(30);
/// Bytes read from one socket before the next one's turn.
const READ_BURST: usize = 1 << 20;
/// Size of a TCP link's read buffer: holds the largest eager frame.
const BUFFER: usize = 256 << 10;

/// A connection whose hello hasn't come, or whose job isn't known here yet.
struct Guest {
    socket: Guarded,
    local: bool,
    since: Instant,
    tcp: Vec<u8>,
    opened: Option<shm::Opened>,
}

/// The hub's own sockets.
pub(crate) struct Net {
    pub me: HubId,
    pub address: Address,
    tokens: Vec<[u8; 16]>,
    pub epoll: Arc<Guarded>,
    pub bell: Arc<Guarded>,
    local: Guarded,
    remote: Guarded,
    guests: Vec<Option<Guest>>,
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
    pub fn new(me: HubId, host: String, machine: String, name: String, port: u16) -> Result<Self, HubError> {
        let epoll = Guarded::new(epoll::create(CreateFlags::CLOEXEC).map_err(HubError::system("epoll_create"))?);
        let bell = new_bell().map_err(HubError::system("eventfd"))?;
        let local = Guarded::new(shm::listener(me).map_err(HubError::system("Unix socket"))?);
        let (remote, port) = tcp::listener(port).map_err(|errno| match port {
            0 => HubError::system("TCP listener")(errno),
            port => HubError::Port { port, source: errno.into() },
        })?;
        let remote = Guarded::new(remote);
        let found = tcp::addresses().map_err(|source| HubError::System { what: "interface addresses", source })?;
        let watch = HubError::system("epoll_ctl");
        add(&epoll, &bell, token(BELL, 0), EventFlags::IN).map_err(&watch)?;
        add(&epoll, &local, token(LOCAL, 0), EventFlags::IN).map_err(&watch)?;
        add(&epoll, &remote, token(REMOTE, 0), EventFlags::IN).map_err(&watch)?;
        let tcp = found.into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
        Ok(Net {
            me,
            address: Address { hub: me, host, machine, name, tcp },
            tokens: Vec::new(),
            epoll: Arc::new(epoll),
            bell: Arc::new(bell),
            local,
            remote,
            guests: Vec::new(),
            proof: Box::new(me.0.to_le_bytes()),
            tcp_links: 0,
            unwelcomed: 0,
        })
    }

    fn trusted(&self, presented: &[u8; 16]) -> bool {
        self.tokens.iter().fold(false, |found, token| found | same_token(token, presented))
    }

    fn seat(&mut self, guest: Guest) {
        let free = self.guests.iter().position(Option::is_none);
        let index = match free {
            Some(index) => index,
            None if self.guests.len() < GUESTS => {
                self.guests.push(None);
                self.guests.len() - 1
            }
            None => return,
        };
        if add(&self.epoll, &guest.socket, token(GUEST, index as u32), EventFlags::IN).is_ok() {
            self.guests[index] = Some(guest);
        }
    }
}

impl Engine {
    /// Lets processes in that present this token, and presents it to those called from now on.
    pub fn trust(&mut self, token: [u8; 16]) {
        if !self.net.tokens.contains(&token) {
            self.net.tokens.push(token);
        }
        for index in 0..self.net.guests.len() {
            self.guest(index as u32);
        }
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
            let (kind, index) = (data >> 32, data as u32);
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
                OUT => self.out_event(index, flags),
                IN => self.in_event(index, flags),
                PIDFD => self.lose(index, "its process ended".into()),
                _ => {}
            }
        }
        count > 0
    }

    /// Accepts some connections; `true` if there may be more.
    fn welcome(&mut self, local: bool) -> bool {
        for _ in 0..64 {
            let accepted = if local { shm::accept(&self.net.local) } else { tcp::accept(&self.net.remote) };
            match accepted {
                Ok(socket) => {
                    let guest = Guest {
                        socket: Guarded::new(socket),
                        local,
                        since: Instant::now(),
                        tcp: Vec::new(),
                        opened: None,
                    };
                    self.net.seat(guest);
                }
                Err(Errno::AGAIN) => return false,
                Err(_) => {}
            }
        }
        true
    }

    /// Reads what a process had sent before it ended, which may be all that this one needs of it: a rank leaves when its
    /// own part is done. Its connection may not even have been accepted yet.
    pub fn hear_out(&mut self, endpoint: u32) {
        if matches!(self.endpoints[endpoint as usize].inbound, In::None) {
            while self.welcome(true) {}
            while self.welcome(false) {}
            for index in 0..self.net.guests.len() {
                self.guest(index as u32);
            }
        }
        while matches!(self.endpoints[endpoint as usize].inbound, In::Tcp { .. }) && self.read_tcp(endpoint) {}
    }

    /// Reads a guest's hello; lets it in, keeps it waiting, or turns it away.
    fn guest(&mut self, index: u32) {
        let Some(mut guest) = self.net.guests.get_mut(index as usize).and_then(Option::take) else { return };
        let hello = if guest.local {
            if guest.opened.is_none() {
                match shm::recv_hello(&guest.socket) {
                    Ok(Some(opened)) => guest.opened = Some(opened),
                    Ok(None) => {
                        self.net.guests[index as usize] = Some(guest);
                        return;
                    }
                    Err(_) => return,
                }
            }
            guest.opened.as_ref().map(|opened| opened.hello)
        } else {
            while guest.tcp.len() < HELLO {
                let have = guest.tcp.len();
                let mut bytes = [0u8; HELLO];
                match tcp::read(&guest.socket, &mut bytes[..HELLO - have]) {
                    Ok(Some(0)) | Err(_) => return,
                    Ok(Some(got)) => guest.tcp.extend_from_slice(&bytes[..got]),
                    Ok(None) => {
                        self.net.guests[index as usize] = Some(guest);
                        return;
                    }
                }
            }
            match Hello::decode(&guest.tcp) {
                Ok(hello) => Some(hello),
                Err(_) => return,
            }
        };
        let Some(hello) = hello else { return };
        if hello.to != self.net.me {
            return;
        }
        if !self.net.trusted(&hello.token) {
            // This process may not have read the job's token yet; `trust` looks again. No more events meanwhile.
            let _ = epoll::modify(&*self.net.epoll, &guest.socket, token(GUEST, index), EventFlags::empty());
            self.net.guests[index as usize] = Some(guest);
            return;
        }
        let _ = epoll::delete(&*self.net.epoll, &guest.socket);
        self.admit(guest, hello);
    }

    fn admit(&mut self, guest: Guest, hello: Hello) {
        let endpoint = self.endpoint(hello.from);
        let peer = &mut self.endpoints[endpoint as usize];
        if peer.dead.is_some() || !matches!(peer.inbound, In::None) {
            return;
        }
        peer.heard = Instant::now();
        let watch = EventFlags::IN | EventFlags::RDHUP;
        match guest.opened {
            Some(opened) => {
                let Ok(mapping) = shm::map_ring(&opened.ring, hello.capacity) else {
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
                    let read = unsafe { shm::read_memory(pid, hello.proof, seen.as_mut_ptr(), 16) };
                    if self.config.cma && read == Ok(16) && seen == hello.from.0.to_le_bytes() {
                        peer.readable = Some(pid);
                    }
                }
                // SAFETY: just mapped with this capacity, zeroed and written by the peer only; dropped with the reader.
                let reader = unsafe { Reader::new(mapping.base(), hello.capacity as usize) };
                let _ = shm::send_welcome(&guest.socket, &*self.net.bell);
                let _ = add(&self.net.epoll, &guest.socket, token(IN, endpoint), watch);
                peer.inbound =
                    In::Shm { _socket: guest.socket, reader, bell: Guarded::new(opened.bell), _mapping: mapping };
            }
            None => {
                let _ = add(&self.net.epoll, &guest.socket, token(IN, endpoint), watch);
                self.net.tcp_links += 1;
                peer.inbound =
                    In::Tcp { socket: guest.socket, buffer: Vec::with_capacity(BUFFER), start: 0, data: None };
            }
        }
    }

    fn hello(&self, to: HubId, capacity: u64) -> Hello {
        Hello {
            from: self.net.me,
            to,
            token: self.net.tokens.last().copied().unwrap_or_default(),
            capacity,
            proof: self.net.proof.as_ptr() as u64,
            pid: std::process::id(),
        }
    }

    /// Opens the link to a process, as far as that goes without waiting.
    pub fn open_out(&mut self, endpoint: u32, now: Instant) {
        let peer = &self.endpoints[endpoint as usize];
        let (id, Some(address)) = (peer.id, peer.address.clone()) else { return };
        if address.host == self.net.address.host && address.machine == self.net.address.machine {
            match shm::dial(id) {
                Ok(socket) => {
                    if let Err(errno) = self.open_shm(endpoint, Guarded::new(socket)) {
                        self.lose(endpoint, format!("no shared memory for the link to it: {errno}"));
                    }
                    return;
                }
                Err(Errno::AGAIN) => {
                    self.endpoints[endpoint as usize].out = Out::Retry;
                    return;
                }
                // Not to be seen from here (another network namespace), or gone: TCP finds out which.
                Err(_) => {}
            }
        }
        self.dial(endpoint, 0, now);
    }

    fn open_shm(&mut self, endpoint: u32, socket: Guarded) -> Result<(), Errno> {
        let capacity = self.config.ring;
        let (ring, mapping) = shm::create_ring(capacity)?;
        let peer = &self.endpoints[endpoint as usize];
        shm::send_hello(&socket, &self.hello(peer.id, capacity as u64), &ring, &*self.net.bell)?;
        add(&self.net.epoll, &socket, token(OUT, endpoint), EventFlags::IN | EventFlags::RDHUP)?;
        // SAFETY: freshly mapped and zeroed, this is its only writer; dropped with it.
        let writer = unsafe { Writer::new(mapping.base(), capacity) };
        self.endpoints[endpoint as usize].out = Out::Shm { socket, writer, bell: None, _mapping: mapping };
        self.net.unwelcomed += 1;
        Ok(())
    }

    /// Tries the addresses of a process from number `next` on.
    fn dial(&mut self, endpoint: u32, mut next: usize, now: Instant) {
        let Some(address) = self.endpoints[endpoint as usize].address.clone() else { return };
        // Loopback means the same only on the same machine; there it is the surest.
        let here = address.machine == self.net.address.machine;
        let loopback = address.tcp.iter().filter(|tcp| here && tcp.ip().is_loopback());
        let others = address.tcp.iter().filter(|tcp| !tcp.ip().is_loopback());
        let candidates: Vec<SocketAddr> = loopback.chain(others).copied().collect();
        while let Some(&candidate) = candidates.get(next) {
            next += 1;
            let Ok(socket) = tcp::dial(candidate) else { continue };
            let socket = Guarded::new(socket);
            let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            if add(&self.net.epoll, &socket, token(OUT, endpoint), flags).is_ok() {
                self.endpoints[endpoint as usize].out = Out::Dialing { socket, next, since: now };
                return;
            }
        }
        let tried: Vec<String> = candidates.iter().map(ToString::to_string).collect();
        self.lose(endpoint, format!("can't be reached at {}", tried.join(", ")));
    }

    fn out_event(&mut self, endpoint: u32, flags: EventFlags) {
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
                Err(_) => self.lose(endpoint, "its process ended".into()),
            },
            Out::Dialing { socket, next, .. } => {
                if tcp::connected(&*socket).is_err() || flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                    let next = *next;
                    self.dial(endpoint, next, Instant::now());
                } else if flags.contains(EventFlags::OUT) {
                    let id = peer.id;
                    let hello = self.hello(id, 0).encode();
                    let peer = &mut self.endpoints[endpoint as usize];
                    if let Out::Dialing { socket, .. } = std::mem::replace(&mut peer.out, Out::Idle) {
                        peer.out = Out::Tcp(TcpOut::new(socket, &hello));
                        self.net.tcp_links += 1;
                        self.mark_dirty(endpoint);
                    }
                }
            }
            Out::Tcp(out) => {
                if flags.contains(EventFlags::OUT) {
                    out.blocked = false;
                }
                // While the other direction is open it will tell, after all that was sent on it.
                if flags.intersects(gone) && !matches!(peer.inbound, In::Tcp { .. }) {
                    self.lose(endpoint, "its connection ended".into());
                }
            }
            Out::Idle | Out::Retry => {}
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

    /// Reads what a TCP link brought, up to a limit; `true` if there may be more.
    fn read_tcp(&mut self, endpoint: u32) -> bool {
        let peer = &mut self.endpoints[endpoint as usize];
        peer.heard = Instant::now();
        // Taken out so that frames can be acted on while the buffer is read; put back below.
        let In::Tcp { socket, mut buffer, mut start, mut data } = std::mem::replace(&mut peer.inbound, In::None) else {
            return false;
        };
        let (mut ended, mut empty) = (None, false);
        let mut budget = READ_BURST;
        while budget > 0 && ended.is_none() {
            match self.understand(endpoint, &buffer, &mut start, &mut data) {
                Ok(()) => {}
                Err(why) => {
                    ended = Some(why);
                    break;
                }
            }
            if start == buffer.len() {
                buffer.clear();
                start = 0;
            }
            let got = if let Some((slot, left)) = data
                && left >= HEADER
                && start == buffer.len()
                && let Some((into, room)) = self.window(endpoint, slot)
            {
                // Straight into the tensor.
                // SAFETY: the window is `room` bytes of the receive's memory.
                let window = unsafe { std::slice::from_raw_parts_mut(into, room.min(left)) };
                let got = tcp::read(&socket, window);
                if let Ok(Some(bytes)) = got {
                    self.filled(slot, bytes);
                    data = (left > bytes).then_some((slot, left - bytes));
                }
                got
            } else {
                if start > 0 {
                    buffer.drain(..start);
                    start = 0;
                }
                let have = buffer.len();
                buffer.resize(BUFFER, 0);
                let got = tcp::read(&socket, &mut buffer[have..]);
                buffer.truncate(have + got.ok().flatten().unwrap_or(0));
                got
            };
            match got {
                Ok(Some(0)) => ended = Some("its connection ended".to_owned()),
                Ok(Some(bytes)) => budget = budget.saturating_sub(bytes),
                Ok(None) => {
                    empty = true;
                    break;
                }
                Err(errno) => ended = Some(format!("connection lost: {errno}")),
            }
        }
        let more = ended.is_none() && !empty;
        let peer = &mut self.endpoints[endpoint as usize];
        if peer.dead.is_none() {
            peer.inbound = In::Tcp { socket, buffer, start, data };
        }
        if let Some(why) = ended {
            self.lose(endpoint, why);
        }
        more
    }

    /// Acts on the whole frames in `buffer` from `start` on, and on parts of streamed ones.
    fn understand(
        &mut self,
        endpoint: u32,
        buffer: &[u8],
        start: &mut usize,
        data: &mut Option<(u64, usize)>,
    ) -> Result<(), String> {
        loop {
            let rest = &buffer[*start..];
            if let Some((slot, left)) = *data {
                let piece = left.min(rest.len());
                self.data(endpoint, slot, &rest[..piece]);
                *start += piece;
                *data = (left > piece).then_some((slot, left - piece));
                if data.is_some() {
                    return Ok(());
                }
                continue;
            }
            let Some(head) = rest.first_chunk::<HEADER>() else { return Ok(()) };
            let header = Header::decode(head).map_err(|error| format!("it sent what is no frame: {error}"))?;
            let len = header.len as usize;
            if header.frame == Frame::Data {
                *start += HEADER;
                *data = (len > 0).then_some((header.cookie, len));
                continue;
            }
            if len > BUFFER - HEADER {
                return Err(format!("it sent a frame of {len} bytes, more than the {} allowed", BUFFER - HEADER));
            }
            let Some(payload) = rest.get(HEADER..HEADER + len) else { return Ok(()) };
            self.handle(endpoint, &header, payload, &[]);
            *start += HEADER + len;
        }
    }

    /// Signs of life over TCP: sends them, misses them, and gives up on calls that nobody answers. Returns when to look
    /// again.
    pub fn keep_alive(&mut self, now: Instant) -> Option<Instant> {
        for slot in &mut self.net.guests {
            if slot.as_ref().is_some_and(|guest| now - guest.since > GUEST_TIME) {
                *slot = None;
            }
        }
        let mut next: Option<Instant> = None;
        for index in 0..self.endpoints.len() {
            let peer: &Endpoint = &self.endpoints[index];
            match &peer.out {
                Out::Dialing { next: candidate, since, .. } => {
                    if now - *since > DIAL {
                        let candidate = *candidate;
                        self.dial(index as u32, candidate, now);
                    }
                    next = Some(now + DIAL / 4);
                }
                Out::Retry => next = Some(now + Duration::from_millis(2)),
                Out::Tcp(_) => {
                    let every = self.config.silence / 4;
                    if now - peer.spoke >= every && peer.items.is_empty() {
                        self.endpoints[index].spoke = now;
                        self.push_item(index as u32, super::endpoint::Item::Bare(Header::new(Frame::Ping, 0)));
                    }
                    let again = now + every;
                    next = Some(next.map_or(again, |other| other.min(again)));
                }
                Out::Idle | Out::Shm { .. } => {}
            }
            let peer = &self.endpoints[index];
            if matches!(peer.inbound, In::Tcp { .. }) && now - peer.heard > self.config.silence {
                let how = format!("silent for {} ms", (now - peer.heard).as_millis());
                self.lose(index as u32, how);
            }
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::Config;
    use super::super::endpoint::Item;
    use super::*;
    use crate::memory::SharedPool;

    fn engine(host: &str) -> Engine {
        let mut id = [0u8; 16];
        getrandom::fill(&mut id).unwrap();
        let me = HubId(u128::from_le_bytes(id));
        let net = Net::new(me, host.into(), "machine".into(), host.into(), 0).unwrap();
        let mut engine = Engine::new(Config::default(), net, SharedPool::default());
        engine.trust([7; 16]);
        engine
    }

    /// A process sends, and ends before its peer has so much as accepted its connection.
    fn message_outlives_its_sender(hosts: [&str; 2]) {
        const CHANNEL: u64 = 5;
        let [mut sender, mut receiver] = hosts.map(engine);
        let from = receiver.endpoint(sender.net.me);
        receiver.endpoints[from as usize].address = Some(sender.net.address.clone());
        let to = sender.endpoint(receiver.net.me);
        sender.endpoints[to as usize].address = Some(receiver.net.address.clone());
        let mut header = Header::new(Frame::Eager, CHANNEL);
        header.len = 4;
        sender.push_item(to, Item::Owned { header, bytes: (*b"last").into() });
        let end = Instant::now() + Duration::from_secs(5);
        while sender.endpoints[to as usize].has_output() {
            sender.drive();
            sender.poll_sockets();
            assert!(Instant::now() < end);
        }
        drop(sender);
        receiver.lose(from, "its process ended".into());
        assert!(receiver.endpoints[from as usize].dead.is_some());
        assert_eq!(receiver.orphans.get(&CHANNEL).map(Vec::len), Some(1));
    }

    #[test]
    fn addresses_that_nobody_answers_at_are_passed_over() {
        let [mut caller, mut called] = ["a", "b"].map(engine);
        let unused = tcp::listener(0).unwrap().1;
        let to = caller.endpoint(called.net.me);
        let mut address = called.net.address.clone();
        address.tcp.retain(|tcp| tcp.ip().is_loopback());
        address.tcp.insert(0, ([127, 0, 0, 2], unused).into());
        caller.endpoints[to as usize].address = Some(address);
        caller.push_item(to, Item::Bare(Header::new(Frame::Ping, 0)));
        let end = Instant::now() + Duration::from_secs(5);
        while called.net.tcp_links == 0 {
            caller.drive();
            caller.poll_sockets();
            called.poll_sockets();
            assert!(Instant::now() < end);
        }
    }

    #[test]
    fn taken_port_is_named() {
        let (_taken, port) = tcp::listener(0).unwrap();
        let net = Net::new(HubId(1), "a".into(), "machine".into(), "a".into(), port);
        assert!(net.is_err_and(|error| error.to_string().contains(&port.to_string())));
    }

    #[test]
    fn message_outlives_its_sender_in_shared_memory() {
        message_outlives_its_sender(["a", "a"]);
    }

    #[test]
    fn message_outlives_its_sender_over_tcp() {
        message_outlives_its_sender(["a", "b"]);
    }
}
