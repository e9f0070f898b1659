//! A call's way to the chip and back: copied there, launched, waited for, copied out.

use std::{
    sync::{Arc, Weak, atomic::Ordering::Relaxed, mpsc},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use podring_collective::Keep;
use smallvec::SmallVec;

use super::{Chip, Group, queue::Queue};
use crate::{
    cache::Shared,
    engine::{
        failure::Failure,
        group::Call,
        key,
        launch::{self, Place, Prepared},
        launching::Launching,
        stage,
        ticket::{Runner, Ticket, now},
    },
    pjrt::{Buffer, Event, OnReady, PjrtError, Plugin, VIEW_ALIGNMENT},
    program::{Role, Unsupported},
};

/// How often deadlines of running programs are looked at.
const TICK: Duration = Duration::from_millis(20);

/// What failed when a program did.
const RUNNING: &str = "running";

/// A call on its way to the device.
pub(super) struct Job {
    pub group: Arc<Group>,
    pub call: Call,
    pub ticket: Arc<Ticket>,
    pub deadline: Instant,
    pub mark: u64,
}

/// A launched program that was not done at once.
pub(super) struct Flight {
    job: Job,
    prepared: Arc<Prepared>,
    outputs: SmallVec<[Buffer; 1]>,
    event: Event,
}

/// A program on its way: its results, and when they are there.
type Launched = (Arc<Prepared>, SmallVec<[Buffer; 1]>, Event);

pub(super) enum Landed {
    Started(Box<Flight>),
    /// Some program is done, or there is something else to look at.
    Some,
}

/// Tells the thread that waits for programs.
struct Bell(mpsc::Sender<Landed>, Arc<Plugin>);

impl OnReady for Bell {
    fn plugin(&self) -> Option<&Arc<Plugin>> {
        Some(&self.1)
    }

    fn ready(&self, _: Result<(), PjrtError>) {
        // The outcome is asked for again by whoever hears this; nobody hears it only when the chip is gone.
        let _ = self.0.send(Landed::Some);
    }
}

/// Waits for programs that were not done when they were launched, and for their deadlines and those of calls whose turn
/// hasn't come.
pub(super) fn land(landed: &mpsc::Receiver<Landed>, queue: &Mutex<Queue>, chip: &Weak<Chip>) {
    let mut flights: Vec<Box<Flight>> = Vec::new();
    loop {
        let idle = flights.is_empty() && !queue.lock().watched();
        let limit = if idle { Duration::from_secs(5) } else { TICK };
        match landed.recv_timeout(limit) {
            Ok(Landed::Started(flight)) => flights.push(flight),
            Ok(Landed::Some) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => {
                queue.lock().idle();
                flights.iter().for_each(|flight| flight.job.group.heed());
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
        // The thread that held the last flight of a chip that is gone is this one.
        if flights.is_empty() && chip.strong_count() == 0 {
            return;
        }
        let now = Instant::now();
        let overdue = queue.lock().overdue(now);
        for (group, failure) in overdue {
            group.fail_all(Arc::new(failure));
        }
        let mut index = 0;
        while let Some(flight) = flights.get(index) {
            match flight.event.is_ready() {
                Ok(false) => {
                    if now >= flight.job.deadline {
                        flight.job.group.fail_all(Arc::new(flight.job.overdue()));
                    }
                    index += 1;
                }
                Ok(true) | Err(_) => flights.swap_remove(index).end(),
            }
        }
    }
}

impl Job {
    fn overdue(&self) -> Failure {
        Failure::Timeout {
            op: self.call.collective.to_string(),
            seq: self.ticket.seq(),
            after_ms: u64::try_from(self.ticket.timeout().as_millis()).unwrap_or(u64::MAX),
            missing: Vec::new(),
            called: Vec::new(),
        }
    }

    fn never_launched(&self) -> Failure {
        Failure::Queued {
            op: self.call.collective.to_string(),
            seq: self.ticket.seq(),
            after_ms: u64::try_from(self.ticket.timeout().as_millis()).unwrap_or(u64::MAX),
            ahead: None,
        }
    }

    fn plugin_failure(&self, doing: &'static str, error: PjrtError) -> Arc<Failure> {
        Arc::new(Failure::Plugin {
            doing,
            program: self.call.collective.to_string(),
            group: self.group.name.clone(),
            slice: self.group.chip.name.clone(),
            rank: Some(self.group.me),
            error: Box::new(error),
        })
    }

    /// On a thread of the chip's.
    pub fn run(self) {
        let group = self.group.clone();
        group.chip.queue.lock().leave(&self.ticket);
        let launching = Launching::until(self.deadline, self.mark).watching({
            let peers = group.peers.clone();
            move || peers.over()
        });
        let launching = Arc::new(launching);
        {
            let mut state = group.state.lock();
            if let Some(failure) = state.failed.clone() {
                drop(state);
                return self.end(Some(failure));
            }
            state.current = Some(launching.clone());
        }
        let outcome = match self.deadline.checked_duration_since(Instant::now()) {
            None => Err(Arc::new(self.never_launched())),
            Some(_) => launching.run(|| self.launch(&launching)),
        };
        group.state.lock().current = None;
        match outcome {
            Err(failure) => {
                group.fail_of(failure.clone());
                self.end(Some(failure));
            }
            Ok((prepared, outputs, event)) => {
                let flight = Box::new(Flight { job: self, prepared, outputs, event });
                // On a virtual slice the launch is the whole of it.
                if flight.event.is_ready().unwrap_or(true) {
                    return flight.end();
                }
                let chip = &group.chip;
                let bell = Arc::new(Bell(chip.landing.clone(), chip.client.plugin().clone()));
                if let Err(error) = flight.event.on_ready(bell) {
                    // The thread looks at the event all the same, now and then.
                    tracing::warn!(%error, "a program's end is not told");
                }
                if let Err(refused) = chip.landing.send(Landed::Started(flight))
                    && let Landed::Started(flight) = refused.0
                {
                    flight.end();
                }
            }
        }
    }

    /// The program for this call, as all members know it.
    fn key(&self, launching: &Launching) -> Result<key::Key, Arc<Failure>> {
        let (group, collective) = (&self.group, &self.call.collective);
        let unsupported =
            |reason: Unsupported| Arc::new(Failure::Unsupported { op: collective.to_string(), reason: reason.into() });
        let target = group.chip.target;
        let mut numbers = key::unknown_to_others(collective);
        if !numbers.is_empty() && group.size > 1 {
            let why =
                |why| Arc::new(Failure::Aborted { by: None, why: format!("{collective}: agreeing on sizes: {why}") });
            group.peers.most(&mut numbers, launching.left()).map_err(why)?;
        }
        key::agreed(collective, group.size, target, &numbers).map_err(unsupported)
    }

    fn launch(&self, launching: &Launching) -> Result<Launched, Arc<Failure>> {
        let (group, Call { collective, .. }) = (&self.group, &self.call);
        let chip = &group.chip;
        let key = self.key(launching)?;
        let unsupported = |reason| Arc::new(Failure::Unsupported { op: collective.to_string(), reason });
        let prepared = group.arrangement.prepared(chip.target, &key).map_err(unsupported)?;
        // As long as the call may take: then it is compiled here, whoever else was to do it.
        let go_on = || launching.stopped().is_none() && Instant::now() < self.deadline;
        let shared = group.peers.share().map(|share| Shared { share, go_on: &go_on });
        let loaded = group.arrangement.load(&chip.cache, &prepared, shared);
        let loaded = loaded.map_err(|error| self.plugin_failure("compiling", error))?;
        let device = chip.client.devices()[0];
        let place = Place { client: &chip.client, constants: &chip.constants, device: 0 };
        let mut own: SmallVec<[Buffer; 4]> = SmallVec::new();
        let mut shared: SmallVec<[Arc<Buffer>; 4]> = SmallVec::new();
        // Whose: this call's buffers, copies made here, or such as are shared.
        let mut list: SmallVec<[(u8, usize); 8]> = SmallVec::new();
        let mut donate = self.call.inputs.is_none() || self.call.donate;
        for (port, shape) in prepared.program.inputs.iter().zip(&prepared.inputs) {
            if let Role::Data(part) = port.role {
                if let Some(inputs) = &self.call.inputs
                    && part < inputs.len()
                {
                    list.push((0, part));
                    continue;
                }
                let given = collective.parts.get(part).and_then(|one| {
                    launch::gives(collective.kind, group.me, one, &prepared.key.op, prepared.key.parts[part].elements)
                });
                if let (Some((blocks, lay)), None) = (given, &self.call.inputs) {
                    let lies = stage::lies(&blocks, lay, shape.bytes)
                        .filter(|data| data.addr().is_multiple_of(VIEW_ALIGNMENT));
                    let copied = match lies.filter(|_| chip.played && chip.on_host) {
                        Some(data) => {
                            donate = false;
                            // SAFETY: aligned, as many bytes as the buffer has, and the caller's to stay as they are
                            // until `keep` is dropped; the launch is over when it returns.
                            unsafe { chip.client.view(data, shape.element, &shape.dims, &device) }
                        }
                        // SAFETY: the caller keeps its tensors readable until `keep` is dropped, which this job holds.
                        None => unsafe { stage::to_device(&chip.client, &device, shape, &blocks, lay) },
                    };
                    list.push((1, own.len()));
                    own.push(copied.map_err(|error| self.plugin_failure("copying to the device for", error))?);
                    continue;
                }
                // Others use it as well.
                donate = false;
            }
            let other = launch::other(&place, collective, port.role, shape);
            list.push((2, shared.len()));
            shared.push(other.map_err(|error| self.plugin_failure("copying to the device for", error))?);
        }
        let given = self.call.inputs.as_deref().unwrap_or_default();
        let arguments: SmallVec<[&Buffer; 8]> = list
            .iter()
            .map(|&(whose, index)| match whose {
                0 => &given[index],
                1 => &own[index],
                _ => &*shared[index],
            })
            .collect();
        if chip.played && chip.on_host && self.call.inputs.is_none() {
            self.offer(launching, &prepared);
        }
        self.ticket.stamp(|times| {
            times.launched = now();
            times.gathered = times.launched;
        });
        let (mut outputs, mut done) = (SmallVec::new(), None);
        let outcome = loaded.launch_flat(
            1,
            &arguments,
            donate,
            |_, _, buffer| outputs.push(buffer),
            |_, event| done = Some(event),
        );
        outcome.map_err(|error| self.plugin_failure(RUNNING, error))?;
        self.ticket.stamp(|times| times.returned = now());
        chip.launched.fetch_add(1, Relaxed);
        match done {
            Some(event) => Ok((prepared, outputs, event)),
            None => Err(Arc::new(Failure::Aborted { by: None, why: "the launch gave no event".to_owned() })),
        }
    }

    /// Lets results be written where they are to be, if they lie there as the program has them.
    fn offer(&self, launching: &Launching, prepared: &Prepared) {
        let (group, collective) = (&self.group, &self.call.collective);
        for (index, part) in collective.parts.iter().enumerate() {
            let elements = prepared.key.parts[index].elements;
            let taken = launch::takes(collective.kind, group.me, part, &prepared.key.op, elements);
            let (Some((blocks, lay)), Some(shape)) = (taken, prepared.outputs.get(index)) else { continue };
            let lies = stage::lies(&blocks, lay, shape.bytes);
            if let Some(data) = lies.filter(|data| data.addr().is_multiple_of(VIEW_ALIGNMENT)) {
                launching.offer(index, data, shape.bytes);
            }
        }
    }

    /// Lets go of the memory, and tells the caller.
    fn end(self, failure: Option<Arc<Failure>>) {
        let Job { group, call, ticket, .. } = self;
        group.forget(&ticket);
        ticket.end(failure);
        if let Some(keep) = call.keep {
            release(&group.runner, keep);
        }
    }
}

impl Group {
    /// Fails if another member has told of a failure.
    fn heed(&self) {
        if let Some(why) = self.peers.over() {
            self.fail(Arc::new(Failure::Aborted { by: None, why }));
        }
    }

    /// Fails the group of a call that failed. Whoever plays a program has told the others of what failed in it.
    fn fail_of(&self, failure: Arc<Failure>) {
        if self.chip.played && matches!(*failure, Failure::Plugin { doing: RUNNING, .. }) {
            self.fail(failure);
        } else {
            self.fail_all(failure);
        }
    }
}

/// What lets go of memory may do anything: never on the chip's own threads.
pub(super) fn release(runner: &Runner, keep: Keep) {
    runner(Box::new(move || drop(keep)));
}

impl Flight {
    /// The device is done: results are copied out.
    fn end(self) {
        let Flight { mut job, prepared, mut outputs, event } = self;
        let group = job.group.clone();
        let outcome = event.wait().map_err(|error| job.plugin_failure(RUNNING, error));
        job.ticket.stamp(|times| times.computed = now());
        let outcome = outcome.and_then(|()| {
            if job.call.inputs.is_some() {
                job.ticket.deliver(std::mem::take(&mut outputs));
                return Ok(());
            }
            let collective = &job.call.collective;
            for (index, part) in collective.parts.iter().enumerate() {
                let elements = prepared.key.parts[index].elements;
                let taken = launch::takes(collective.kind, group.me, part, &prepared.key.op, elements);
                let Some((blocks, lay)) = taken else { continue };
                let (Some(buffer), Some(shape)) = (outputs.get(index), prepared.outputs.get(index)) else { continue };
                // SAFETY: the caller keeps its tensors until `keep` is dropped, which this job holds; validation has
                // refused outputs that overlap.
                let copied = unsafe { stage::from_device(group.chip.on_host, buffer, shape.bytes, &blocks, lay) };
                copied.map_err(|error| job.plugin_failure("copying from the device after", error))?;
            }
            if let Some(after) = job.call.after.take() {
                after();
            }
            Ok(())
        });
        drop(outputs);
        if let Err(failure) = &outcome {
            group.fail_of(failure.clone());
        }
        job.end(outcome.err());
    }
}
