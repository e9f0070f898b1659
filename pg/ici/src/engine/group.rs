//! A group on a machine's devices: its members meet here.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use podring_collective::{Collective, Keep, Kind};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    arrival::Arrival,
    failure::{Called, Failure},
    key,
    launch::Arrangement,
    machine::Machine,
    ticket::{Free, Runner, Ticket, now},
};
use crate::{pjrt::Buffer, slice::SliceError};

/// What makes a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// The same on all members, different from every other live group of the machine.
    pub id: u64,
    /// For messages.
    pub name: String,
    /// Each member's device, as an index of the client's list.
    pub devices: Vec<u32>,
}

/// Why a group can't be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// A device that isn't there.
    #[error("group {group}: device {device} of {devices} ({machine})")]
    Device {
        /// The group's name.
        group: String,
        /// The device.
        device: u32,
        /// How many there are.
        devices: u32,
        /// The machine's name.
        machine: String,
    },
    /// The groups of this id differ, or this member has opened it.
    #[error("group {group}: rank {rank} opened it before, or others with other devices")]
    Disagree {
        /// The group's name.
        group: String,
        /// This rank.
        rank: u32,
    },
    /// The devices are no group that a program can have.
    #[error("group {group}: {source}")]
    Slice {
        /// The group's name.
        group: String,
        /// Why.
        source: Box<SliceError>,
    },
    /// There is no thread for its programs.
    #[error("group {group}: no thread for its programs: {why}")]
    Thread {
        /// The group's name.
        group: String,
        /// The system's words.
        why: String,
    },
    /// No program joins these devices.
    #[error("group {group} on slice {slice}: {why}")]
    NoProgram {
        /// The group's name.
        group: String,
        /// The slice.
        slice: String,
        /// Why.
        why: &'static str,
    },
}

/// An operation to run. Tensors must be plain (one after another in memory) and the collective validated.
pub struct Call {
    /// Its number in the group; the same on all members. Ignored for send and recv.
    pub seq: u64,
    /// What to do.
    pub collective: Collective,
    /// Inputs that lie on this rank's device already, one per part, in the layout of the program. Then results stay on the
    /// device as well ([`Ticket::take_outputs`]), and the collective's tensors only say how many elements there are.
    pub inputs: Option<SmallVec<[Buffer; 1]>>,
    /// `inputs` may be overwritten.
    pub donate: bool,
    /// Dropped when the memory is no longer used.
    pub keep: Option<Keep>,
    /// Called when results are in place, before the operation is done.
    pub after: Option<Box<dyn FnOnce() + Send>>,
    /// When it is overdue.
    pub timeout: Duration,
}

/// Ranks that wait for the others.
#[derive(Default)]
pub(super) struct Meeting {
    seq: u64,
    here: usize,
    pub arrivals: Vec<Option<Arrival>>,
}

/// A send or receive that waits for its other half.
struct Mail {
    send: bool,
    me: u32,
    peer: Option<u32>,
    tag: u32,
    arrival: Arrival,
}

/// Ranks that are all there, and for a message who is who.
type Ready = (Meeting, Option<(u32, u32)>);

struct State {
    joined: Vec<bool>,
    left: Vec<bool>,
    failed: Option<Arc<Failure>>,
    meetings: Vec<Meeting>,
    spare: Vec<Meeting>,
    mail: Vec<Mail>,
    /// What is under way, with its deadline and member.
    live: Vec<(Arc<Ticket>, Instant, u32, &'static str)>,
}

/// A group of a machine.
pub struct Group {
    pub(super) machine: Arc<Machine>,
    pub(super) name: String,
    id: u64,
    devices: Vec<u32>,
    all: Arc<Arrangement>,
    pairs: Mutex<FxHashMap<(u32, u32), Arc<Arrangement>>>,
    state: Mutex<State>,
}

/// One member's part of a group; closed when dropped.
pub struct Member {
    group: Arc<Group>,
    me: u32,
    runner: Runner,
    free: Free,
    closed: AtomicBool,
}

impl Group {
    pub(super) fn open(machine: &Arc<Machine>, spec: &GroupSpec, me: u32, runner: Runner) -> Result<Member, OpenError> {
        let size = spec.devices.len();
        let disagree = || OpenError::Disagree { group: spec.name.clone(), rank: me };
        if let Some(&device) = spec.devices.iter().find(|&&device| device >= machine.devices()) {
            let (group, machine_name) = (spec.name.clone(), machine.name().to_owned());
            return Err(OpenError::Device { group, device, devices: machine.devices(), machine: machine_name });
        }
        let mut groups = machine.groups.lock();
        let group = match groups.get(&spec.id) {
            Some(group) => group.clone(),
            None => {
                let all = Arc::new(machine.arrangement(&spec.name, &spec.devices)?);
                let group = Arc::new(Group {
                    machine: machine.clone(),
                    name: spec.name.clone(),
                    id: spec.id,
                    devices: spec.devices.clone(),
                    all,
                    pairs: Mutex::default(),
                    state: Mutex::new(State {
                        joined: vec![false; size],
                        left: vec![false; size],
                        failed: None,
                        meetings: Vec::new(),
                        spare: Vec::new(),
                        mail: Vec::new(),
                        live: Vec::new(),
                    }),
                });
                groups.insert(spec.id, group.clone());
                group
            }
        };
        drop(groups);
        {
            let mut state = group.state.lock();
            match state.joined.get_mut(me as usize) {
                Some(joined) if !*joined && group.devices == spec.devices => *joined = true,
                _ => return Err(disagree()),
            }
        }
        Ok(Member { group, me, runner, free: Free::default(), closed: AtomicBool::new(false) })
    }

    pub(super) fn size(&self) -> usize {
        self.devices.len()
    }

    /// Fails everything under way and to come, for all members. The first failure stands.
    pub(super) fn fail(&self, failure: Arc<Failure>) {
        let (tickets, meetings, mail) = {
            let mut state = self.state.lock();
            if state.failed.is_some() {
                return;
            }
            state.failed = Some(failure.clone());
            let tickets: Vec<Arc<Ticket>> = state.live.iter().map(|live| live.0.clone()).collect();
            (tickets, std::mem::take(&mut state.meetings), std::mem::take(&mut state.mail))
        };
        for ticket in tickets {
            ticket.end(Some(failure.clone()));
        }
        // Their memory's keepers may do anything, so that they go outside the lock.
        drop((meetings, mail));
    }

    pub(super) fn failure(&self) -> Option<Arc<Failure>> {
        self.state.lock().failed.clone()
    }

    /// Deadlines, and results that nobody waits for.
    pub(super) fn look(&self, now: Instant) {
        let (mut overdue, mut tickets) = (None, SmallVec::<[Arc<Ticket>; 8]>::new());
        {
            let mut state = self.state.lock();
            self.sweep(&mut state);
            for (ticket, deadline, ..) in &state.live {
                if now >= *deadline && !ticket.held() && overdue.is_none() {
                    overdue = Some(self.timeout(&state, ticket));
                }
                tickets.push(ticket.clone());
            }
        }
        for ticket in tickets {
            if ticket.waiters() == 0 {
                ticket.finish();
            }
        }
        if let Some(failure) = overdue {
            self.fail(Arc::new(failure));
        }
    }

    /// Forgets what has ended.
    fn sweep(&self, state: &mut State) {
        let before = state.live.len();
        state.live.retain(|(ticket, ..)| !ticket.ended());
        if before > state.live.len() {
            self.machine.ended(before - state.live.len());
        }
    }

    fn timeout(&self, state: &State, ticket: &Arc<Ticket>) -> Failure {
        let (seq, after_ms) = (ticket.seq(), u64::try_from(ticket.timeout().as_millis()).unwrap_or(u64::MAX));
        let name = state.live.iter().find(|live| Arc::ptr_eq(&live.0, ticket)).map_or("", |live| live.3);
        for meeting in &state.meetings {
            let mine = |arrival: &&Arrival| Arc::ptr_eq(&arrival.ticket, ticket);
            if let Some(arrival) = meeting.arrivals.iter().flatten().find(mine) {
                let absent = |(rank, arrival): (usize, &Option<Arrival>)| arrival.is_none().then_some(rank as u32);
                return Failure::Timeout {
                    op: arrival.collective.to_string(),
                    seq,
                    after_ms,
                    missing: meeting.arrivals.iter().enumerate().filter_map(absent).collect(),
                    called: calls(&meeting.arrivals),
                };
            }
        }
        if let Some(mail) = state.mail.iter().find(|mail| Arc::ptr_eq(&mail.arrival.ticket, ticket)) {
            let missing = mail.peer.into_iter().collect();
            return Failure::Timeout {
                op: mail.arrival.collective.to_string(),
                seq,
                after_ms,
                missing,
                called: Vec::new(),
            };
        }
        Failure::Timeout { op: name.to_owned(), seq, after_ms, missing: Vec::new(), called: Vec::new() }
    }

    fn leave(&self, me: u32) {
        let (failure, all) = {
            let mut state = self.state.lock();
            state.left[me as usize] = true;
            let needs = |meeting: &&Meeting| meeting.arrivals[me as usize].is_none();
            let waiting = state.meetings.iter().find(needs).and_then(|meeting| {
                let other = meeting.arrivals.iter().flatten().next()?;
                Some(Failure::Left { rank: me, op: other.collective.to_string(), seq: meeting.seq })
            });
            let mail = state.mail.iter().find(|mail| mail.peer == Some(me)).map(|mail| Failure::Left {
                rank: me,
                op: mail.arrival.collective.to_string(),
                seq: mail.arrival.ticket.seq(),
            });
            (waiting.or(mail), state.left.iter().all(|&left| left))
        };
        if let Some(failure) = failure {
            self.fail(Arc::new(failure));
        }
        if all {
            self.machine.groups.lock().remove(&self.id);
            let mut state = self.state.lock();
            self.sweep(&mut state);
            // What never ended (nobody can wait for it any more) is not under way either.
            self.machine.ended(std::mem::take(&mut state.live).len());
        }
    }

    /// The devices of two members.
    fn pair(self: &Arc<Self>, from: u32, to: u32) -> Result<Arc<Arrangement>, OpenError> {
        let mut pairs = self.pairs.lock();
        if let Some(pair) = pairs.get(&(from, to)) {
            return Ok(pair.clone());
        }
        let devices = [self.devices[from as usize], self.devices[to as usize]];
        let pair = Arc::new(self.machine.arrangement(&self.name, &devices)?);
        pairs.insert((from, to), pair.clone());
        Ok(pair)
    }
}

fn calls(arrivals: &[Option<Arrival>]) -> Vec<Called> {
    let call = |(rank, arrival): (usize, &Option<Arrival>)| Called {
        rank: rank as u32,
        call: arrival.as_ref().map_or("nothing yet".to_owned(), |arrival| arrival.collective.to_string()),
    };
    arrivals.iter().enumerate().map(call).collect()
}

impl Member {
    /// The group's size.
    pub fn size(&self) -> u32 {
        self.group.size() as u32
    }

    /// The machine.
    pub fn machine(&self) -> &Arc<Machine> {
        &self.group.machine
    }

    /// Why the group is broken, if it is.
    pub fn failure(&self) -> Option<Arc<Failure>> {
        self.group.failure()
    }

    /// Fails everything under way and to come, for all members.
    pub fn fail(&self, failure: Failure) {
        self.group.fail(Arc::new(failure));
    }

    /// Ends this member's part: who needs it fails. What it has come for goes on.
    pub fn close(&self) {
        if !self.closed.swap(true, SeqCst) {
            self.group.leave(self.me);
        }
    }

    /// This member's operations under way.
    pub fn pending(&self) -> usize {
        let mut state = self.group.state.lock();
        self.group.sweep(&mut state);
        state.live.iter().filter(|live| live.2 == self.me).count()
    }

    /// Gives a ticket back for reuse.
    pub fn recycle(&self, ticket: Arc<Ticket>) {
        self.free.give(ticket);
    }

    fn ticket(&self, seq: u64, timeout: Duration) -> Arc<Ticket> {
        let mut ticket = self.free.take(seq, timeout, &self.runner);
        if let Some(inner) = Arc::get_mut(&mut ticket) {
            inner.settle(&self.group.machine, Arc::downgrade(&self.group));
        }
        ticket
    }

    /// Compiles the programs of calls ahead of time; `progress` is told how many are ready, before the first and after
    /// each. The calls' memory is not touched. Calls of one class share a program.
    pub fn warm(&self, calls: &[Collective], mut progress: impl FnMut(usize, usize)) -> Result<(), Failure> {
        progress(0, calls.len());
        for (index, call) in calls.iter().enumerate() {
            let unsupported = |reason| Failure::Unsupported { op: call.to_string(), reason };
            let key = key::of(call, self.group.size(), self.group.machine.target)
                .map_err(|reason| unsupported(reason.into()))?;
            let prepared = self.group.all.prepared(self.group.machine.target, &key).map_err(unsupported)?;
            self.group
                .all
                .load(self.group.machine.cache(), &prepared, None)
                .map_err(|error| self.group.plugin_failure("compiling", &call.to_string(), None, error))?;
            progress(index + 1, calls.len());
        }
        Ok(())
    }

    /// Starts an operation; waits for nobody. The last to come launches.
    pub fn post(&self, call: Call) -> Arc<Ticket> {
        let ticket = self.ticket(call.seq, call.timeout);
        ticket.stamp(|times| times.called = now());
        let deadline = deadline(call.timeout);
        let outcome = self.arrive(call, &ticket, deadline);
        if let Err(failure) = outcome {
            self.group.fail(failure.clone());
            ticket.end_held(Some(self.group.failure().unwrap_or(failure)));
        }
        ticket
    }

    fn arrive(&self, call: Call, ticket: &Arc<Ticket>, deadline: Instant) -> Result<(), Arc<Failure>> {
        let group = &self.group;
        if let Some(failure) = group.failure() {
            return Err(failure);
        }
        let kind = call.collective.kind;
        let arrival = Arrival::new(group, &group.all, self.me, call, ticket.clone())?;
        ticket.stamp(|times| times.arrived = now());
        group.machine.begun();
        let ready = {
            let mut state = group.state.lock();
            if let Some(failure) = &state.failed {
                let failure = failure.clone();
                group.machine.ended(1);
                drop(state);
                drop(arrival);
                return Err(failure);
            }
            group.sweep(&mut state);
            state.live.push((ticket.clone(), deadline, self.me, kind.name()));
            match kind {
                Kind::Send { to, tag } => self.exchange(&mut state, true, Some(to), tag, arrival)?,
                Kind::Recv { from, tag } => self.exchange(&mut state, false, from, tag, arrival)?,
                _ => self.meet(&mut state, arrival)?.map(|meeting| (meeting, None)),
            }
        };
        let Some((mut meeting, pair)) = ready else { return Ok(()) };
        let arrangement = pair.map_or(Ok(group.all.clone()), |(from, to)| group.pair(from, to));
        let outcome = match arrangement {
            Ok(arrangement) => group.launch(&arrangement, &mut meeting),
            Err(error) => Err(Arc::new(Failure::Aborted { by: Some(self.me), why: error.to_string() })),
        };
        let failed = outcome.is_err();
        if let Err(failure) = outcome {
            group.fail(failure.clone());
            let failure = group.failure().unwrap_or(failure);
            for mut arrival in meeting.arrivals.iter_mut().filter_map(Option::take) {
                let held = arrival.ticket.clone();
                // A launch that failed on one device may have begun on others.
                arrival.take_back();
                // The memory's keeper first, then the news.
                drop(arrival);
                held.end_held(Some(failure.clone()));
            }
        }
        if !kind.is_point_to_point() && !failed {
            let mut state = group.state.lock();
            if state.spare.len() < 8 {
                state.spare.push(meeting);
            }
        }
        Ok(())
    }

    /// Joins the meeting of this number; gives it back when all are there.
    fn meet(&self, state: &mut State, arrival: Arrival) -> Result<Option<Meeting>, Arc<Failure>> {
        let (seq, me, size) = (arrival.ticket.seq(), self.me as usize, self.group.size());
        let index = match state.meetings.iter().position(|meeting| meeting.seq == seq) {
            Some(index) => index,
            None => {
                let mut meeting = state.spare.pop().unwrap_or_default();
                (meeting.seq, meeting.here) = (seq, 0);
                meeting.arrivals.clear();
                meeting.arrivals.resize_with(size, || None);
                state.meetings.push(meeting);
                state.meetings.len() - 1
            }
        };
        let meeting = &mut state.meetings[index];
        let different = meeting.arrivals.iter().flatten().any(|other| other.fingerprint != arrival.fingerprint);
        if meeting.arrivals[me].is_some() {
            let why = format!("rank {me} called two operations of number {seq}");
            return Err(Arc::new(Failure::Aborted { by: Some(self.me), why }));
        }
        meeting.arrivals[me] = Some(arrival);
        meeting.here += 1;
        if different {
            let what = "operation, type, reduction, root or sizes differ".to_owned();
            return Err(Arc::new(Failure::Mismatch { seq, what, called: calls(&meeting.arrivals) }));
        }
        let gone = (0..size).find(|&rank| state.left[rank] && meeting.arrivals[rank].is_none());
        if let (Some(rank), Some(arrival)) = (gone, &meeting.arrivals[me]) {
            let op = arrival.collective.to_string();
            return Err(Arc::new(Failure::Left { rank: rank as u32, op, seq }));
        }
        if meeting.here < size {
            return Ok(None);
        }
        let meeting = state.meetings.swap_remove(index);
        hold(&meeting);
        Ok(Some(meeting))
    }

    /// Finds a message's other half: the first in the order of calls.
    fn exchange(
        &self,
        state: &mut State,
        send: bool,
        peer: Option<u32>,
        tag: u32,
        arrival: Arrival,
    ) -> Result<Option<Ready>, Arc<Failure>> {
        let me = self.me;
        let fits = |mail: &Mail| {
            mail.send != send
                && mail.tag == tag
                && peer.is_none_or(|peer| peer == mail.me)
                && mail.peer.is_none_or(|peer| peer == me)
        };
        let Some(place) = state.mail.iter().position(fits) else {
            let gone = peer.filter(|&rank| state.left[rank as usize]);
            let failure = gone.map(|rank| {
                let (op, seq) = (arrival.collective.to_string(), arrival.ticket.seq());
                Arc::new(Failure::Left { rank, op, seq })
            });
            // Also then: what fails is dropped outside the lock, with the rest.
            state.mail.push(Mail { send, me, peer, tag, arrival });
            return failure.map_or(Ok(None), Err);
        };
        let other = state.mail.remove(place);
        let ((from, sender), (to, receiver)) =
            if send { ((me, arrival), (other.me, other.arrival)) } else { ((other.me, other.arrival), (me, arrival)) };
        receiver.ticket.set_source(from);
        let meeting = Meeting { seq: sender.ticket.seq(), here: 2, arrivals: vec![Some(sender), Some(receiver)] };
        hold(&meeting);
        Ok(Some((meeting, Some((from, to)))))
    }
}

/// From now on the members' memory is in use.
fn hold(meeting: &Meeting) {
    for arrival in meeting.arrivals.iter().flatten() {
        arrival.ticket.hold();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.close();
    }
}

/// When an operation is overdue.
fn deadline(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + Duration::from_secs(315_360_000))
}

impl Group {
    pub(super) fn plugin_failure(
        &self,
        doing: &'static str,
        program: &str,
        rank: Option<u32>,
        error: crate::pjrt::PjrtError,
    ) -> Failure {
        Failure::Plugin {
            doing,
            program: program.to_owned(),
            group: self.name.clone(),
            slice: self.machine.name().to_owned(),
            rank,
            error: Box::new(error),
        }
    }

    pub(super) fn device(&self, position: u32) -> u32 {
        self.devices[position as usize]
    }
}
