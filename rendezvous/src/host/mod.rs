//! The ranks of one host share one session: the agent, in the process of one of them, and a seat for each rank.
//!
//! The first rank of a host that comes takes an abstract Unix socket's name and is the agent; the others reach the
//! coordinator through it. Both ends of a connection must belong to the same user. Until the world has formed another
//! rank takes over if the agent's process ends; afterwards its end is the loss of its rank, told by name.

mod agent;
mod frame;

use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use podring_fork as fork;
use podring_proto as pb;
use podring_proto::agent_says::What as Says;
use podring_proto::rank_says::What as Said;
use rustc_hash::FxHashMap;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::coordinator::Coordinator;
use crate::decide::roster::{Failure, World};
use crate::refusal::{Late, Lost, Refusal};
use crate::session::Access;
use crate::wire;
use agent::Where;
use frame::{Inbox, Line, Listener};

/// How long an agent that has decided may take to say so.
const ANSWER: Duration = Duration::from_secs(2);
/// Pause between two attempts to find an agent.
const AGAIN: Duration = Duration::from_millis(2);
/// How often a waiting rank asks whether to go on.
const LOOK: Duration = Duration::from_millis(50);
/// An agent that had sent pulses is lost when so many in a row don't come: more than it waits for, so that of two that
/// can't hear each other it is the agent that says so.
const PULSES: u32 = 6;
/// How long leaving waits for the agent's thread.
const LEAVING: Duration = Duration::from_millis(2500);
/// Bytes of what an agent says: a world of 65,536 ranks and its details.
const TOLD: usize = 512 << 20;

/// Who becomes the agent.
pub enum Role {
    /// This rank, whose process has the coordinator.
    Coordinator(Box<Coordinator>),
    /// Another one on this host, whose process has the coordinator.
    Guest,
    /// The first one that comes; it finds the coordinator there.
    First(Access),
}

/// A rank that joins.
#[derive(Clone, Debug)]
pub struct Joining {
    /// Names the agent of this job on this host.
    pub agent: String,
    /// Its number.
    pub rank: u32,
    /// Ranks in the world.
    pub world_size: u32,
    /// Its host.
    pub host: String,
    /// What the others need to know of it; opaque here.
    pub detail: Vec<u8>,
    /// How long it waits for the others.
    pub timeout: Duration,
    /// The hosts of all ranks in order, where known: an equal number of ranks each.
    pub hosts: Vec<String>,
    /// Ranks that the launcher started on this host.
    pub expected: Vec<u32>,
}

/// Why a rank has no seat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SeatError {
    /// The world didn't form in time.
    #[error("{0}")]
    Late(Late),
    /// The agent or the coordinator said no.
    #[error("{0}")]
    Refused(Refusal),
    /// There is no coordinator, or none that takes us.
    #[error("{why}")]
    NoCoordinator {
        /// The session's words.
        why: String,
    },
    /// The process that has the coordinator ended while the world formed, and no other took its place.
    #[error("the coordinator's process ended while the world formed: {why}")]
    Ended {
        /// How that was noticed.
        why: String,
    },
    /// No agent answered.
    #[error("no agent on this host after {waited:?}: {why}")]
    NoAgent {
        /// For how long it was looked for.
        waited: Duration,
        /// What came last.
        why: String,
    },
    /// The caller said to stop.
    #[error("interrupted")]
    Interrupted,
    /// The caller said that this is the wrong place.
    #[error("given up: the job has another coordinator")]
    Stale,
    /// Sockets, threads.
    #[error("{what}: {why}")]
    System {
        /// What was wanted.
        what: &'static str,
        /// Why it can't be had.
        why: String,
    },
}

fn system(what: &'static str) -> impl Fn(io::Error) -> SeatError {
    move |error| SeatError::System { what, why: error.to_string() }
}

/// What a waiting rank is told by its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Go on.
    On,
    /// Stop: [`SeatError::Interrupted`].
    Interrupted,
    /// Stop: [`SeatError::Stale`].
    Stale,
}

/// News of the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Ranks are gone.
    Lost(Lost),
    /// A member reported a failure; the first of its group.
    Failed(Arc<Failure>),
    /// The coordinator is gone, and didn't come back in time.
    CoordinatorLost {
        /// How that was noticed.
        how: String,
    },
}

/// Takes notices.
pub type Listen = Box<dyn Fn(&Notice) + Send + Sync>;

struct State {
    epoch: u64,
    failures: FxHashMap<String, Arc<Failure>>,
    /// What came before anybody listened.
    backlog: Vec<Notice>,
    listen: Option<Arc<Listen>>,
    /// The agent's end is no loss.
    unmanned: bool,
    /// How often the agent gives a sign of life, once it has.
    pulse: Option<Duration>,
    /// This rank has left, or the coordinator has.
    over: bool,
}

struct Shared {
    rank: u32,
    speaker: u32,
    line: Line,
    state: Mutex<State>,
}

/// A rank's place in a formed world. Leaves when dropped.
pub struct Seat {
    shared: Arc<Shared>,
    world: Arc<World>,
    /// Ends with the agent's thread, if that is in this process.
    agent: Option<Mutex<mpsc::Receiver<()>>>,
    generation: u32,
}

impl Seat {
    /// Joins, and waits until the world has formed. `ready` is called once the agent can be found, if this rank is to
    /// be it from the start. `ask` is asked now and then whether to go on.
    pub fn take(
        mut role: Role,
        joining: &Joining,
        ready: impl FnOnce() -> Result<(), SeatError>,
        mut ask: impl FnMut() -> Wait,
    ) -> Result<Seat, SeatError> {
        fork::install();
        let began = Instant::now();
        let mut ready = Some(ready);
        let mut why = "nobody listens".to_owned();
        // When and how this rank first lost an agent that had the coordinator, which has no successor but in a new life
        // of the job.
        let mut orphaned: Option<(Instant, String)> = None;
        loop {
            let place = match role {
                Role::Coordinator(coordinator) => {
                    let listener = Listener::bind(&joining.agent).map_err(system("Unix socket"))?;
                    role = Role::Guest;
                    let made = found(listener, joining.rank, Where::Here(*coordinator))?;
                    if let Some(ready) = ready.take() {
                        ready()?;
                    }
                    Some(made)
                }
                Role::Guest => None,
                Role::First(access) => {
                    let left = joining.timeout.saturating_sub(began.elapsed());
                    let made = match Listener::bind(&joining.agent) {
                        Ok(listener) => {
                            let access = Access { timeout: left, ..access.clone() };
                            Some(found(listener, joining.rank, Where::There(access))?)
                        }
                        Err(error) if error.kind() == io::ErrorKind::AddrInUse => None,
                        Err(error) => return Err(system("Unix socket")(error)),
                    };
                    role = Role::First(access);
                    made
                }
            };
            let (line, agent) = match place {
                Some((line, agent)) => (Some(line), Some(agent)),
                None => match Line::connect(&joining.agent) {
                    Ok(line) => (Some(line), None),
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                        return Err(system("the agent of this host")(error));
                    }
                    Err(error) => {
                        why = error.to_string();
                        (None, None)
                    }
                },
            };
            if let Some(line) = line {
                match sit(line, joining, began, &mut ask) {
                    Ok(Ok((shared, world))) => return Seat::new(shared, world, agent),
                    // Its process ended, or its world is an earlier one: there will be another agent.
                    Ok(Err(how)) => {
                        if matches!(role, Role::Guest) && orphaned.is_none() {
                            orphaned = Some((Instant::now(), how.clone()));
                        }
                        why = how;
                    }
                    Err(error) => {
                        if let Some(agent) = agent {
                            // It tells this rank and the others in turn; this process may end as soon as it knows.
                            let _ = agent.recv_timeout(LEAVING);
                        }
                        return Err(error);
                    }
                }
            }
            let out_of_time = began.elapsed() >= joining.timeout + ANSWER;
            match orphaned {
                Some((since, why)) if out_of_time || since.elapsed() >= ANSWER => return Err(SeatError::Ended { why }),
                None if out_of_time => return Err(SeatError::NoAgent { waited: began.elapsed(), why }),
                kept => orphaned = kept,
            }
            answer(ask())?;
            std::thread::sleep(AGAIN);
        }
    }

    fn new(shared: Shared, world: World, agent: Option<mpsc::Receiver<()>>) -> Result<Seat, SeatError> {
        let (shared, world) = (Arc::new(shared), Arc::new(world));
        let (mine, known) = (Arc::clone(&shared), Arc::clone(&world));
        std::thread::Builder::new()
            .name("podring-seat".into())
            .spawn(move || mine.follow(&known))
            .map_err(system("thread"))?;
        Ok(Seat { shared, world, agent: agent.map(Mutex::new), generation: fork::generation() })
    }

    /// The world as it formed.
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// The present epoch: rises when a coordinator was restarted.
    pub fn epoch(&self) -> u64 {
        self.shared.state.lock().epoch
    }

    /// The failure that was reported of a group, if one was.
    pub fn failure(&self, group: &str) -> Option<Arc<Failure>> {
        self.shared.state.lock().failures.get(group).cloned()
    }

    /// Tells every rank that a group failed. The first report of a group stands.
    pub fn report(&self, mut failure: Failure) -> Result<(), SeatError> {
        failure.epoch = self.epoch();
        failure.by = self.shared.rank;
        let over = self.shared.state.lock().over;
        if over || self.generation != fork::generation() {
            let why = "this rank has left, or the coordinator has ended".to_owned();
            return Err(SeatError::NoCoordinator { why });
        }
        self.shared.say(Said::Report(wire::failure(&failure))).map_err(system("report"))
    }

    /// Calls `listen` for each notice, on a thread of the seat's; for those that came before at once.
    pub fn listen(&self, listen: Listen) {
        let listen = Arc::new(listen);
        let backlog = {
            let mut state = self.shared.state.lock();
            state.listen = Some(Arc::clone(&listen));
            std::mem::take(&mut state.backlog)
        };
        backlog.iter().for_each(|notice| listen(notice));
    }

    /// Leaves: no loss for the others.
    pub fn leave(&self) {
        // In a forked child the descriptors are closed, and the place is the parent's.
        if self.generation != fork::generation() || std::mem::replace(&mut self.shared.state.lock().over, true) {
            return;
        }
        let _ = self.shared.say(Said::Leave(pb::Leave {}));
        self.shared.state.lock().listen = None;
        if let Some(agent) = &self.agent {
            // The thread ends soon if this was the last of its ranks, or has the coordinator. Otherwise it says that it
            // goes on for the others.
            let _ = agent.lock().recv_timeout(LEAVING);
        }
        let _ = self.shared.line.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.leave();
    }
}

fn found(listener: Listener, rank: u32, coordinator: Where) -> Result<(Line, mpsc::Receiver<()>), SeatError> {
    let (mine, theirs) = Line::pair().map_err(system("Unix socket"))?;
    let agent = agent::start(listener, theirs, rank, coordinator).map_err(system("agent"))?;
    Ok((mine, agent))
}

fn answer(wait: Wait) -> Result<(), SeatError> {
    match wait {
        Wait::On => Ok(()),
        Wait::Interrupted => Err(SeatError::Interrupted),
        Wait::Stale => Err(SeatError::Stale),
    }
}

/// Waits for something to read, for at most `limit`; false if nothing came.
fn look(line: &Line, limit: Option<Duration>) -> bool {
    let time = limit.map(|limit| Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) });
    !matches!(poll(&mut [PollFd::new(&line.stream, PollFlags::IN)], time.as_ref()), Ok(0))
}

type Sat = Result<(Shared, World), String>;

/// Takes a seat with an agent. The inner error is worth another agent.
fn sit(line: Line, joining: &Joining, began: Instant, ask: &mut impl FnMut() -> Wait) -> Result<Sat, SeatError> {
    let left = joining.timeout.saturating_sub(began.elapsed());
    let seat = pb::Seat {
        version: wire::VERSION.to_owned(),
        rank: joining.rank,
        world_size: joining.world_size,
        host: joining.host.clone(),
        detail: joining.detail.clone(),
        timeout_ms: wire::milliseconds(left),
        hosts: joining.hosts.clone(),
        expected: joining.expected.clone(),
        pulse: true,
    };
    if let Err(error) = line.send(&pb::RankSays { what: Some(Said::Seat(seat)) }) {
        return Ok(Err(error.to_string()));
    }
    let mut inbox = Inbox::new(TOLD);
    loop {
        look(&line, Some(LOOK));
        let open = match line.read_into(&mut inbox) {
            Ok(open) => open,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let says = inbox.next::<pb::AgentSays>();
        let says = says.map_err(|why| SeatError::NoAgent { waited: began.elapsed(), why })?;
        match says.map(|says| says.what) {
            Some(Some(Says::Formed(pb::FormedHere { world: Some(world), speaker }))) => {
                let world = wire::from_world(world);
                let state = State {
                    epoch: world.epoch,
                    failures: FxHashMap::default(),
                    backlog: Vec::new(),
                    listen: None,
                    unmanned: false,
                    pulse: None,
                    over: false,
                };
                let shared = Shared { rank: joining.rank, speaker, line, state: Mutex::new(state) };
                // What came with it.
                shared.take_rest(&mut inbox);
                return Ok(Ok((shared, world)));
            }
            Some(Some(Says::Late(late))) => return Err(SeatError::Late(wire::from_late(late))),
            Some(Some(Says::Refused(refused))) => {
                return Err(match wire::from_refused(refused) {
                    Some(refusal) => SeatError::Refused(refusal),
                    None => SeatError::NoCoordinator { why: "refused for a reason of a newer podring's".to_owned() },
                });
            }
            Some(Some(Says::NoCoordinator(pb::NoCoordinator { why, .. }))) => {
                return Err(SeatError::NoCoordinator { why });
            }
            Some(Some(Says::Closing(_))) => {
                return Ok(Err("the coordinator ended before the world had formed".to_owned()));
            }
            Some(Some(Says::FormedBefore(_))) => return Ok(Err("its world has formed without this rank".to_owned())),
            // Nothing that concerns one who isn't seated yet, or what a newer agent says.
            Some(_) => continue,
            None => {}
        }
        if !open {
            return Ok(Err("its process ended".to_owned()));
        }
        if began.elapsed() >= joining.timeout + ANSWER {
            let why = "it took the connection and didn't answer".to_owned();
            return Err(SeatError::NoAgent { waited: began.elapsed(), why });
        }
        answer(ask())?;
    }
}

impl Shared {
    fn say(&self, said: Said) -> io::Result<()> {
        self.line.send(&pb::RankSays { what: Some(said) })
    }

    fn take_rest(&self, inbox: &mut Inbox) {
        while let Ok(Some(pb::AgentSays { what })) = inbox.next::<pb::AgentSays>() {
            if let Some(says) = what {
                self.heard(says);
            }
        }
    }

    /// Reads what the agent tells until the end.
    fn follow(&self, world: &World) {
        let (mut inbox, mut missed) = (Inbox::new(TOLD), 0);
        loop {
            let pulse = self.state.lock().pulse;
            // Counted, not timed: this process may have been stopped itself.
            missed = if look(&self.line, pulse) { 0 } else { missed + 1 };
            let open = self.line.read_into(&mut inbox);
            self.take_rest(&mut inbox);
            let how = match open {
                Ok(true) if missed < PULSES => continue,
                Ok(true) => format!("silent for {:?}", pulse.unwrap_or_default() * PULSES),
                Ok(false) => "its process ended".to_owned(),
                Err(error) => error.to_string(),
            };
            let (quiet, epoch) = {
                let mut state = self.state.lock();
                (state.unmanned | std::mem::replace(&mut state.over, true), state.epoch)
            };
            if !quiet {
                let host = world.host_of(self.speaker).unwrap_or_default().to_owned();
                let (ranks, speaker) = (vec![self.speaker], Some(self.speaker));
                self.tell(Notice::Lost(Lost { epoch, host, ranks, how, speaker }));
            }
            return;
        }
    }

    fn heard(&self, says: Says) {
        match says {
            Says::Formed(pb::FormedHere { world: Some(world), .. }) => self.state.lock().epoch = world.epoch,
            Says::Lost(lost) => self.tell(Notice::Lost(wire::from_lost(lost))),
            Says::Failed(failure) => {
                let failure = Arc::new(wire::from_failure(failure));
                let first = {
                    let mut state = self.state.lock();
                    let known = state.failures.len();
                    state.failures.entry(failure.group.clone()).or_insert_with(|| Arc::clone(&failure));
                    state.failures.len() > known
                };
                if first {
                    self.tell(Notice::Failed(failure));
                }
            }
            Says::NoCoordinator(pb::NoCoordinator { why, .. }) => self.tell(Notice::CoordinatorLost { how: why }),
            Says::Closing(_) => self.state.lock().over = true,
            // One that can't be told is about to be found dead anyhow.
            Says::Pulse(pulse) => {
                self.state.lock().pulse = Some(wire::duration(pulse.every_ms.max(1)));
                drop(self.say(Said::Pulse(pulse)));
            }
            Says::Unmanned(_) => self.state.lock().unmanned = true,
            _ => {}
        }
    }

    fn tell(&self, notice: Notice) {
        let listen = {
            let mut state = self.state.lock();
            match &state.listen {
                Some(listen) => Arc::clone(listen),
                None if state.over => return,
                None => {
                    state.backlog.push(notice);
                    return;
                }
            }
        };
        listen(&notice);
    }
}

#[cfg(test)]
#[path = "seat_tests.rs"]
mod tests;
