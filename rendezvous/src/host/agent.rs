//! The agent: one thread in the process of one of the host's ranks. It seats the host's ranks, speaks for all of them to
//! the coordinator, and passes on what that tells.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use podring_fork::Guarded;
use podring_proto as pb;
use podring_proto::agent_says::What as Says;
use podring_proto::rank_says::What as Said;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tokio::task::JoinHandle;

use super::frame::{Inbox, Line, Listener, encode};
use crate::coordinator::{Coordinator, Resident};
use crate::decide::roster::{About, Announcement, Event, Failure, World};
use crate::decide::seats::{Seated, Seats, Together};
use crate::refusal::{Lost, Refusal};
use crate::seldom::Seldom;
use crate::session::{Access, Connection, Error, Ranks, Session, Update, connect, fresh};
use crate::{runtime, wire};

/// Connections at a time; one more is closed.
const CONNECTIONS: usize = 4096;
/// Bytes of what a rank says.
const SAID: usize = 2 << 20;
/// How long the coordinator's own host waits for the others to hear of its end.
const FAREWELL: Duration = Duration::from_secs(1);
/// A rank is asked for a sign of life so many times in the silence that is allowed, and lost when it has answered none
/// of so many. What is counted is what was asked: an agent that was stopped itself has asked nothing meanwhile.
const PULSES: u32 = 4;
/// Number of the connection of the rank in whose process the agent runs.
const OWN: u64 = 0;

/// What the agent's thread is to do.
enum Command {
    Connected(Result<Connection, Error>),
    Update(Update),
}

/// Reaches the agent's thread.
#[derive(Clone)]
struct Handle {
    commands: mpsc::Sender<Command>,
    bell: Arc<Guarded>,
}

impl Handle {
    fn send(&self, command: Command) {
        let _ = self.commands.send(command);
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
    }
}

/// The way to the coordinator.
enum Upstream {
    /// On the way.
    Connecting(JoinHandle<()>),
    /// Found, with nobody seated to speak for yet.
    Connected(Connection),
    Session(Session),
    /// In this very process.
    Resident {
        coordinator: Coordinator,
        place: Resident,
    },
    /// Lost, or ended in order.
    Over,
}

/// Where the coordinator is.
pub(super) enum Where {
    Here(Coordinator),
    There(Access),
}

struct Caller {
    line: Line,
    inbox: Inbox,
    /// It answers pulses.
    answers: bool,
    /// How many it hasn't answered.
    unanswered: u32,
}

impl Caller {
    fn new(line: Line) -> Caller {
        Caller { line, inbox: Inbox::new(SAID), answers: false, unanswered: 0 }
    }
}

struct Agent {
    listener: Option<Listener>,
    handle: Handle,
    commands: mpsc::Receiver<Command>,
    access: Option<Access>,
    upstream: Upstream,
    callers: BTreeMap<u64, Caller>,
    next: u64,
    seats: Seats,
    speaker: u32,
    began: Instant,
    world: Option<Arc<World>>,
    /// Ranks that ended before this one heard of a world, and how: it may have formed already, with them.
    fallen: Vec<(Seated, String)>,
    /// How long who isn't heard is waited for, once a world has formed, and when the ranks are asked next.
    silence: Option<(Duration, Instant)>,
    over: bool,
    refusals: Seldom,
    /// Tells the own rank, which waits for it, that the agent goes on without it; ends with the thread.
    alive: mpsc::Sender<()>,
}

/// Starts the agent's thread. The receiver gets a message when the agent's own rank has left and the agent goes on for
/// others, and ends with the thread.
pub(super) fn start(listener: Listener, own: Line, speaker: u32, coordinator: Where) -> io::Result<mpsc::Receiver<()>> {
    let bell = Arc::new(Guarded::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
    let (sender, commands) = mpsc::channel();
    let handle = Handle { commands: sender, bell };
    let (access, upstream) = match coordinator {
        Where::Here(coordinator) => {
            let agent = fresh().map_err(io::Error::other)?;
            let place = coordinator.resident(agent);
            (None, Upstream::Resident { coordinator, place })
        }
        Where::There(access) => {
            let (to, handle) = (access.clone(), handle.clone());
            let connecting = async move { handle.send(Command::Connected(connect(&to).await)) };
            (Some(access), Upstream::Connecting(runtime::handle()?.spawn(connecting)))
        }
    };
    let (alive, ended) = mpsc::channel();
    let own = Caller::new(own);
    let agent = Agent {
        listener: Some(listener),
        handle,
        commands,
        access,
        upstream,
        callers: BTreeMap::from([(OWN, own)]),
        next: OWN + 1,
        seats: Seats::default(),
        speaker,
        began: Instant::now(),
        world: None,
        fallen: Vec::new(),
        silence: None,
        over: false,
        refusals: Seldom::default(),
        alive,
    };
    std::thread::Builder::new().name("podring-agent".into()).spawn(move || agent.run())?;
    Ok(ended)
}

impl Agent {
    fn run(mut self) {
        while !self.over {
            let (mut rung, mut called) = (false, false);
            let ready: Vec<u64> = {
                let mut fds = vec![PollFd::new(&*self.handle.bell, PollFlags::IN)];
                fds.extend(self.callers.values().map(|caller| PollFd::new(&caller.line.stream, PollFlags::IN)));
                fds.extend(self.listener.iter().map(|one| PollFd::new(&one.listener, PollFlags::IN)));
                let asked = self.silence.filter(|_| self.callers.values().any(|caller| caller.answers));
                let left = asked.map(|(_, next)| next.saturating_duration_since(Instant::now()));
                let left = left.and_then(|left| Timespec::try_from(left).ok());
                if poll(&mut fds, left.as_ref()).is_err() {
                    continue;
                }
                let mut flags = fds.iter().map(|fd| !fd.revents().is_empty());
                rung |= flags.next().unwrap_or(false);
                let ids: Vec<u64> = self.callers.keys().copied().filter(|_| flags.next().unwrap_or(false)).collect();
                called |= flags.next().unwrap_or(false);
                ids
            };
            if rung {
                let _ = rustix::io::read(&*self.handle.bell, &mut [0u8; 8]);
            }
            while let Ok(command) = self.commands.try_recv() {
                self.command(command);
            }
            for id in ready {
                self.read(id);
            }
            if called {
                self.accept();
            }
            self.pulse();
        }
        if let Upstream::Connecting(task) = self.upstream {
            task.abort();
        }
    }

    /// Asks the other ranks for a sign of life, if it is time to, and gives those up that have given none.
    fn pulse(&mut self) {
        let now = Instant::now();
        let Some((silence, _)) = self.silence.filter(|(_, next)| *next <= now) else { return };
        let every = silence / PULSES;
        self.silence = Some((silence, now + every));
        let every_ms = wire::milliseconds(every);
        let asked: Vec<u64> = self.callers.iter().filter(|(_, caller)| caller.answers).map(|(id, _)| *id).collect();
        for id in asked {
            let Some(caller) = self.callers.get_mut(&id) else { continue };
            let silent = caller.unanswered >= PULSES;
            caller.unanswered += 1;
            if !silent {
                // One that doesn't read it has ended, or is found silent.
                self.tell_one(id, &pb::AgentSays { what: Some(Says::Pulse(pb::Pulse { every_ms })) });
                continue;
            }
            let how = format!("silent for {silence:?}");
            // Should it come to again: it isn't the agent that has ended.
            let why = format!("given up by the agent of its host: {how}");
            self.tell_one(
                id,
                &pb::AgentSays { what: Some(Says::NoCoordinator(pb::NoCoordinator { why, lost: true })) },
            );
            self.tell_one(id, &pb::AgentSays { what: Some(Says::Closing(pb::Closing {})) });
            self.gone(id, Some(&how));
        }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn accept(&mut self) {
        while let Some(listener) = &self.listener {
            match listener.accept() {
                Ok(Some(line)) if self.callers.len() < CONNECTIONS => {
                    self.callers.insert(self.next, Caller::new(line));
                    self.next += 1;
                }
                Ok(Some(_)) => {
                    if self.refusals.may(Instant::now()) {
                        tracing::warn!("refusing ranks of this host: as many connections as may be are open");
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    if self.refusals.may(Instant::now()) {
                        tracing::warn!(%error, "a rank of this host can't be let in");
                    }
                    // Out of descriptors, perhaps: no reason to spin.
                    std::thread::sleep(Duration::from_millis(1));
                    return;
                }
            }
        }
    }

    fn read(&mut self, id: u64) {
        let Some(caller) = self.callers.get_mut(&id) else { return };
        let open = caller.line.read_into(&mut caller.inbox);
        caller.unanswered = 0;
        loop {
            let Some(caller) = self.callers.get_mut(&id) else { return };
            match caller.inbox.next::<pb::RankSays>() {
                Ok(Some(pb::RankSays { what: Some(said) })) => self.heard(id, said),
                // What a newer rank says.
                Ok(Some(pb::RankSays { what: None })) => {}
                Ok(None) => break,
                Err(why) => return self.gone(id, Some(&format!("it sent its agent what can't be read: {why}"))),
            }
        }
        match open {
            Ok(true) => {}
            Ok(false) => self.gone(id, Some("its process ended")),
            Err(error) => self.gone(id, Some(&format!("its connection to the agent broke: {error}"))),
        }
    }

    fn heard(&mut self, id: u64, said: Said) {
        match said {
            Said::Seat(seat) => {
                if let Some(says) = self.seat(id, seat) {
                    self.tell_one(id, &pb::AgentSays { what: Some(says) });
                    self.callers.remove(&id);
                }
            }
            Said::Report(failure) => {
                if self.seats.get(id).is_some_and(|seat| seat.rank == failure.by) {
                    self.report(id, wire::from_failure(failure));
                }
            }
            Said::Leave(pb::Leave {}) => self.gone(id, None),
            Said::Pulse(_) => {}
        }
    }

    /// Seats a rank, or gives what it is told instead.
    fn seat(&mut self, id: u64, seat: pb::Seat) -> Option<Says> {
        let pb::Seat { version, rank, world_size, host, detail, timeout_ms, hosts, expected, pulse } = seat;
        let refused = |refusal: &Refusal| Says::Refused(wire::refused(refusal).1);
        let major = |version: &str| version.split('.').next().map(str::to_owned);
        if major(&version) != major(wire::VERSION) {
            return Some(refused(&Refusal::Version { yours: version, ours: wire::VERSION.to_owned() }));
        }
        if self.world.is_some() {
            return Some(match self.seats.holder(rank) {
                Some(holder) => refused(&Refusal::Twin { rank, holder: holder.host.clone(), second: host }),
                None => Says::FormedBefore(pb::Closing {}),
            });
        }
        let deadline = self.now() + wire::duration(timeout_ms);
        let seated = Seated { rank, world_size, host, detail, deadline, hosts, expected };
        let sat = self.seats.sit(id, seated);
        if let Some(caller) = self.callers.get_mut(&id) {
            // The own rank is stopped when this thread is.
            caller.answers = pulse && id != OWN;
        }
        // Also for one that was refused: the others are told of it if they wait in vain.
        self.announce();
        sat.err().map(|refusal| refused(&refusal))
    }

    /// Tells the coordinator who is seated now.
    fn announce(&mut self) {
        let Some(together) = self.seats.together(self.now()) else { return };
        let Together { host, world_size, ranks, details, hosts, expected, timeout } = together;
        let refused = self.seats.refused().to_vec();
        let about = About { speaker: Some(self.speaker), expected, refused };
        match &self.upstream {
            Upstream::Session(session) => {
                session.announce(&Ranks { host, world_size, ranks, details, hosts }, about, timeout);
            }
            Upstream::Resident { place, .. } => {
                let announcement = Announcement {
                    agent: place.agent(),
                    host,
                    world_size,
                    ranks,
                    details,
                    last_epoch: 0,
                    timeout,
                    hosts,
                    about,
                };
                let handle = self.handle.clone();
                let tell = move |event| handle.send(Command::Update(Update::Event(event)));
                if let Err(refusal) = place.announce(announcement, tell) {
                    self.fail(Says::Refused(wire::refused(&refusal).1));
                }
            }
            Upstream::Connected(_) => {
                let Upstream::Connected(connection) = std::mem::replace(&mut self.upstream, Upstream::Over) else {
                    return;
                };
                let handle = self.handle.clone();
                let tell = Box::new(move |update| handle.send(Command::Update(update)));
                let Some(access) = &self.access else { return };
                let ranks = Ranks { host, world_size, ranks, details, hosts };
                let session = fresh()
                    .and_then(|agent| Session::over(access, connection, agent, ranks, about, timeout, Some(tell)));
                match session {
                    Ok(session) => self.upstream = Upstream::Session(session),
                    Err(error) => self.fail(no_coordinator(&error, false)),
                }
            }
            Upstream::Connecting(_) | Upstream::Over => {}
        }
    }

    fn report(&mut self, from: u64, failure: Failure) {
        let first = match &self.upstream {
            Upstream::Session(session) => {
                session.report_soon(failure.clone());
                failure
            }
            Upstream::Resident { place, .. } => {
                let epoch = self.world.as_ref().map_or(0, |world| world.epoch);
                match place.report(Failure { epoch, ..failure.clone() }) {
                    Ok(first) => first.as_ref().clone(),
                    Err(_) => failure,
                }
            }
            _ => failure,
        };
        self.tell(Says::Failed(wire::failure(&first)), Some(from));
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Connected(Ok(connection)) => {
                self.upstream = Upstream::Connected(connection);
                self.announce();
            }
            Command::Connected(Err(error)) => {
                let says = match &error {
                    Error::Refused { refusal, .. } => Says::Refused(wire::refused(refusal).1),
                    _ => no_coordinator(&error, false),
                };
                self.fail(says);
            }
            Command::Update(Update::Event(event)) => self.event(event),
            Command::Update(Update::Ended(error)) => {
                self.upstream = Upstream::Over;
                let says = match &error {
                    Error::Refused { refusal, .. } if self.world.is_none() => Says::Refused(wire::refused(refusal).1),
                    _ => no_coordinator(&error, true),
                };
                if self.world.is_some() { self.tell(says, None) } else { self.fail(says) }
            }
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Formed(world) => {
                let here = pb::FormedHere { world: Some(wire::world(&world)), speaker: self.speaker };
                self.world = Some(Arc::clone(&world));
                let silence = match &self.upstream {
                    Upstream::Session(session) => Some(session.silence()),
                    Upstream::Resident { place, .. } => Some(place.silence()),
                    _ => None,
                };
                self.silence = silence.map(|silence| (silence, Instant::now()));
                self.tell(Says::Formed(here), None);
                self.mourn(&world);
            }
            Event::Late(late) if self.world.is_none() => self.fail(Says::Late(wire::late(&late))),
            Event::Late(late) => {
                // The coordinator was restarted, and these never came back to it.
                self.upstream = Upstream::Over;
                for missing in &late.missing {
                    let host = missing.host.clone().unwrap_or_default();
                    let how = "it did not come back after the coordinator's restart".to_owned();
                    let lost = Lost { epoch: 0, host, ranks: vec![missing.rank], how, speaker: None };
                    self.tell(Says::Lost(wire::lost(&lost)), None);
                }
            }
            Event::Lost(lost) => self.tell(Says::Lost(wire::lost(&lost)), None),
            Event::Failed(failure) => self.tell(Says::Failed(wire::failure(&failure)), None),
            Event::Closing => self.fail(Says::Closing(pb::Closing {})),
        }
    }

    /// Tells the ranks here which of their own were gone before they heard of the world. The coordinator knows already.
    fn mourn(&mut self, world: &World) {
        let seated = |rank: &u32| self.seats.holder(*rank).is_some();
        let own = world.hosts.iter().find(|host| host.ranks.iter().any(seated));
        let own = own.map_or(&[][..], |host| &host.ranks);
        let gone = |(seat, _): &(Seated, String)| own.contains(&seat.rank) && !seated(&seat.rank);
        let fallen: Vec<_> = std::mem::take(&mut self.fallen).into_iter().filter(gone).collect();
        for (Seated { rank, host, .. }, how) in fallen {
            let lost = Lost { epoch: world.epoch, host, ranks: vec![rank], how, speaker: None };
            self.tell(Says::Lost(wire::lost(&lost)), None);
        }
    }

    /// Tells all who are seated, and ends.
    fn fail(&mut self, says: Says) {
        self.tell(says, None);
        self.end();
    }

    fn tell(&mut self, says: Says, but: Option<u64>) {
        let bytes = encode(&pb::AgentSays { what: Some(says) });
        for id in self.seats.ids().into_iter().filter(|id| Some(*id) != but) {
            let sent = self.callers.get(&id).map_or(Ok(()), |caller| caller.line.send_bytes(&bytes));
            match sent.map_err(|error| error.kind()) {
                // Its end is about to be read, and before that, perhaps, that it leaves.
                Ok(()) | Err(ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::NotConnected) => {}
                // Half a message may have gone out: nothing can be told it any more.
                Err(_) => {
                    self.callers.remove(&id);
                    self.rise(id, Some("it doesn't read what its agent tells it"));
                }
            }
        }
    }

    fn tell_one(&self, id: u64, says: &pb::AgentSays) {
        if let Some(caller) = self.callers.get(&id) {
            let _ = caller.line.send(says);
        }
    }

    /// A connection is over; `how` `None` if its rank said so itself.
    fn gone(&mut self, id: u64, how: Option<&str>) {
        self.callers.remove(&id);
        self.rise(id, how);
    }

    fn rise(&mut self, id: u64, how: Option<&str>) {
        // The process of the agent's own rank is this one.
        let how = how.filter(|_| id != OWN);
        let Some(seat) = self.seats.rise(id) else {
            self.over |= id == OWN;
            return;
        };
        if self.world.is_none() && (id == OWN || self.seats.is_empty()) {
            // Nothing has formed. Without its own rank there is no agent, and the others look for another.
            self.over = true;
            return;
        }
        let gone = [seat.rank];
        match &self.upstream {
            Upstream::Session(session) => session.part(&gone, how),
            Upstream::Resident { place, .. } => place.part(&gone, how),
            _ => {}
        }
        let Some(epoch) = self.world.as_ref().map(|world| world.epoch) else {
            self.fallen.extend(how.map(|how| (seat, how.to_owned())));
            return;
        };
        if let Some(how) = how {
            let lost = Lost { epoch, host: seat.host, ranks: gone.to_vec(), how: how.to_owned(), speaker: None };
            self.tell(Says::Lost(wire::lost(&lost)), None);
        }
        if id == OWN {
            self.own_left();
        }
        if self.seats.is_empty() && !self.callers.contains_key(&OWN) {
            self.end();
        }
    }

    /// The agent's own rank has left in order.
    fn own_left(&mut self) {
        // Another agent may take the name.
        self.listener = None;
        match &self.upstream {
            Upstream::Resident { .. } => {
                self.tell(Says::Closing(pb::Closing {}), None);
                self.end();
            }
            _ => self.tell(Says::Unmanned(pb::Closing {}), None),
        }
        if !self.over && !self.seats.is_empty() {
            let _ = self.alive.send(());
        }
    }

    fn end(&mut self) {
        self.over = true;
        match std::mem::replace(&mut self.upstream, Upstream::Over) {
            Upstream::Resident { coordinator, place } => {
                place.leave();
                coordinator.close(FAREWELL);
            }
            Upstream::Session(session) => session.leave(),
            Upstream::Connecting(task) => task.abort(),
            Upstream::Connected(_) | Upstream::Over => {}
        }
    }
}

fn no_coordinator(error: &Error, lost: bool) -> Says {
    Says::NoCoordinator(pb::NoCoordinator { why: error.to_string(), lost })
}

#[cfg(test)]
#[path = "agent_tests.rs"]
mod tests;
