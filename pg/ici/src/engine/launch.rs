//! From ranks that are all there to a running program, and back.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use podring_collective::{Collective, Kind, Part, Reduction};
use podring_topology::Slice;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    arrival::{AT_ONCE, Arrival},
    constants::Constants,
    failure::{Called, Failure},
    group::{Group, Meeting, OpenError},
    key::{self, Key, Target},
    machine::Machine,
    stage::{self, Shape},
    ticket::{Ticket, now},
};
use crate::{
    cache::{Cache, Shared},
    pjrt::{Buffer, Client, Element, Event, Loaded, PjrtError},
    program::{self, Groups, Program, ProgramError, Role, layout::TILE},
    slice::{Callers, How, plan},
};

pub(super) use super::arrival::{gives, takes};

/// The devices of a program, and the programs on them.
pub(super) struct Arrangement {
    /// The group's name.
    name: String,
    /// The client's index of each replica's device.
    pub(super) devices: Vec<u32>,
    /// The plugin's ids of the same.
    ids: Vec<i64>,
    groups: Groups,
    /// The replica of each member.
    replica_of: Vec<u32>,
    programs: Mutex<FxHashMap<Key, Arc<Prepared>>>,
}

/// A program, compiled when first needed.
pub(super) struct Prepared {
    pub key: Key,
    pub program: Program,
    pub inputs: Vec<Shape>,
    pub outputs: Vec<Shape>,
    loaded: OnceLock<Arc<Loaded>>,
}

impl Prepared {
    pub fn data_shape(&self, part: usize) -> Option<&Shape> {
        let place = self.program.inputs.iter().position(|port| port.role == Role::Data(part))?;
        self.inputs.get(place)
    }
}

impl Arrangement {
    /// For these devices, in the members' order; `id` is the plugin's number of one.
    pub fn new(
        slice: Option<&Slice>,
        id: impl Fn(u32) -> i64,
        group: &str,
        members: &[u32],
    ) -> Result<Arrangement, OpenError> {
        let (devices, groups) = match slice {
            None => (members.to_vec(), Groups::all(members.len() as u32)),
            Some(slice) => {
                let wrong = |source| OpenError::Slice { group: group.to_owned(), source: Box::new(source) };
                let planned = plan(slice, &[members.to_vec()], Callers::Members).map_err(wrong)?;
                match planned.how {
                    How::Whole(launch) | How::Cover { launch, .. } | How::Members { launch, .. } => {
                        (launch.ranks, launch.groups)
                    }
                    How::Steps(_) | How::AcrossSlices { .. } | How::Host => {
                        let (group, slice) = (group.to_owned(), slice.to_string());
                        return Err(OpenError::NoProgram { group, slice, why: planned.why });
                    }
                }
            }
        };
        let ids = devices.iter().map(|&device| id(device)).collect();
        let replica_of = groups.groups[0].clone();
        Ok(Arrangement { name: group.to_owned(), devices, ids, groups, replica_of, programs: Mutex::default() })
    }

    /// The program of a key, not necessarily compiled.
    pub fn prepared(&self, target: Target, key: &Key) -> Result<Arc<Prepared>, ProgramError> {
        if let Some(known) = self.programs.lock().get(key) {
            return Ok(known.clone());
        }
        let program = program::build(&key.spec(&self.groups, target))?;
        let shapes = |ports: &[program::Port]| {
            let shape = |port: &program::Port| Shape {
                element: port.element,
                dims: port.dims.iter().map(|&dim| dim as i64).collect(),
                bytes: port.bytes(),
            };
            ports.iter().map(shape).collect::<Vec<Shape>>()
        };
        let (inputs, outputs) = (shapes(&program.inputs), shapes(&program.outputs));
        let prepared = Arc::new(Prepared { key: key.clone(), program, inputs, outputs, loaded: OnceLock::new() });
        Ok(self.programs.lock().entry(key.clone()).or_insert(prepared).clone())
    }

    /// Compiles it, unless it has been; or has it from another member, if `shared` says how.
    pub fn load(&self, cache: &Cache, prepared: &Prepared, shared: Option<Shared>) -> Result<Arc<Loaded>, PjrtError> {
        if let Some(loaded) = prepared.loaded.get() {
            return Ok(loaded.clone());
        }
        let loaded = match shared {
            Some(shared) => cache.get_with(&self.name, &prepared.program, &self.ids, Some(shared)),
            None => cache.get_for(&self.name, &prepared.program, &self.ids),
        }?;
        Ok(prepared.loaded.get_or_init(|| loaded).clone())
    }
}

/// The program of a message of this class, not to be run: its shapes.
pub(super) fn message(machine: &Machine, key: &Key) -> Result<Prepared, ProgramError> {
    let program = program::build(&key.spec(&Groups::all(2), machine.target))?;
    let shape = |port: &program::Port| Shape {
        element: port.element,
        dims: port.dims.iter().map(|&dim| dim as i64).collect(),
        bytes: port.bytes(),
    };
    let (inputs, outputs) = (program.inputs.iter().map(shape).collect(), program.outputs.iter().map(shape).collect());
    Ok(Prepared { key: key.clone(), program, inputs, outputs, loaded: OnceLock::new() })
}

/// What is left to do when the device is done.
pub(super) struct Task {
    pub arrival: Arrival,
    prepared: Arc<Prepared>,
    group: Arc<Group>,
    /// The device's failure, if the operation couldn't end with it at once.
    pub failure: Option<Arc<Failure>>,
}

impl Task {
    pub fn failed(&self, doing: &'static str, error: PjrtError) -> Failure {
        self.group.plugin_failure(doing, &self.arrival.collective.to_string(), Some(self.arrival.me), error)
    }

    /// Whether results are to be copied to the caller's memory.
    pub fn copies(&self) -> bool {
        let Arrival { collective, me, on_device, after, .. } = &self.arrival;
        let nothing = match collective.kind {
            Kind::Reduce { root } | Kind::Gather { root } => root != *me,
            Kind::Send { .. } | Kind::Barrier => true,
            _ => false,
        };
        after.is_some() || !*on_device && !nothing
    }

    /// Whether that is so little that the plugin's thread does it: waking whoever waits takes longer. Where the devices'
    /// memory is another's, it never does: reading it would wait for it.
    pub fn copies_at_once(&self, machine: &Machine) -> bool {
        let bytes: usize = self.prepared.outputs.iter().map(|shape| shape.bytes).sum();
        machine.on_host() && self.arrival.after.is_none() && bytes <= AT_ONCE
    }

    /// Whether every result is where it is to be.
    pub fn landed(&self, outputs: &[Buffer]) -> bool {
        let (Arrival { collective, me, .. }, key) = (&self.arrival, &self.prepared.key);
        collective.parts.iter().enumerate().all(|(index, part)| {
            let taken = takes(collective.kind, *me, part, &key.op, key.parts[index].elements);
            match (taken, outputs.get(index), self.prepared.outputs.get(index)) {
                (Some((blocks, lay)), Some(buffer), Some(shape)) => stage::landed(buffer, shape.bytes, &blocks, lay),
                _ => true,
            }
        })
    }

    pub fn copy_out(&mut self, machine: &Machine, outputs: &[Buffer]) -> Result<(), Failure> {
        let key = &self.prepared.key;
        for (index, part) in self.arrival.collective.parts.iter().enumerate() {
            let taken = takes(self.arrival.collective.kind, self.arrival.me, part, &key.op, key.parts[index].elements);
            let Some((blocks, lay)) = taken else { continue };
            let (Some(buffer), Some(shape)) = (outputs.get(index), self.prepared.outputs.get(index)) else { continue };
            // SAFETY: the caller keeps its tensors until the operation has ended, which it can't while this thread holds
            // it; validation has refused outputs that overlap.
            let copied = unsafe { stage::from_device(machine.on_host(), buffer, shape.bytes, &blocks, lay) };
            copied.map_err(|error| self.failed("copying from the device after", error))?;
        }
        if let Some(after) = self.arrival.after.take() {
            after();
        }
        Ok(())
    }
}

/// What a replica gives back, and when.
type Results = (SmallVec<[Buffer; 1]>, Option<Event>);

/// Where a replica's argument comes from.
enum Argument {
    /// The part's buffer of a member.
    Own(usize, usize),
    /// One of the launch's further buffers.
    Other(usize),
}

impl Group {
    /// Launches the program of a meeting whose members are all there; their tickets are held. On success they fly; on
    /// failure the caller ends them.
    pub(super) fn launch(
        self: &Arc<Self>,
        arrangement: &Arrangement,
        meeting: &mut Meeting,
    ) -> Result<(), Arc<Failure>> {
        let gathered = now();
        let machine = &self.machine;
        let prepared = self.agree(arrangement, meeting)?;
        // Nobody else may end what has lent its memory, from here on until the plugin is done with it.
        if let Some(ended) = meeting.arrivals.iter().flatten().find(|one| one.lends() && !one.ticket.held()) {
            let why = format!("{} had ended before its launch", ended.collective);
            return Err(self.failure().unwrap_or_else(|| Arc::new(Failure::Aborted { by: Some(ended.me), why })));
        }
        let arrivals: SmallVec<[&Arrival; 16]> = meeting.arrivals.iter().flatten().collect();
        let call = |arrivals: &[&Arrival]| arrivals.first().map_or(String::new(), |one| one.collective.to_string());
        let plugin = |doing, rank, error, arrivals: &[&Arrival]| {
            Arc::new(self.plugin_failure(doing, &call(arrivals), rank, error))
        };
        let loaded = arrangement
            .load(machine.cache(), &prepared, None)
            .map_err(|error| plugin("compiling", None, error, &arrivals))?;
        let mut others: SmallVec<[Arc<Buffer>; 8]> = SmallVec::new();
        let mut list: SmallVec<[Argument; 32]> = SmallVec::new();
        let mut donate = arrivals.iter().all(|arrival| arrival.donate);
        let replicas = arrangement.devices.len();
        let mut member_of: SmallVec<[usize; 16]> = smallvec::smallvec![usize::MAX; replicas];
        for (member, &replica) in arrangement.replica_of.iter().enumerate() {
            member_of[replica as usize] = member;
        }
        for &member in &member_of {
            let Some(arrival) = arrivals.get(member) else { continue };
            for (port, shape) in prepared.program.inputs.iter().zip(&prepared.inputs) {
                let own = match port.role {
                    Role::Data(part) => arrival.inputs.get(part).is_some_and(Option::is_some).then_some(part),
                    _ => None,
                };
                if let Some(part) = own {
                    list.push(Argument::Own(member, part));
                    continue;
                }
                donate &= !matches!(port.role, Role::Data(_));
                let from = Place { client: machine.client(), constants: &machine.constants, device: arrival.device };
                let other = other(&from, &arrival.collective, port.role, shape);
                let other =
                    other.map_err(|error| plugin("copying to the device for", Some(arrival.me), error, &arrivals))?;
                list.push(Argument::Other(others.len()));
                others.push(other);
            }
        }
        let mut arguments: SmallVec<[&Buffer; 32]> = SmallVec::new();
        for argument in &list {
            match *argument {
                Argument::Own(member, part) => arguments.extend(arrivals[member].inputs[part].as_ref()),
                Argument::Other(index) => arguments.push(&others[index]),
            }
        }
        let mut results: SmallVec<[Results; 8]> = (0..replicas).map(|_| (SmallVec::new(), None)).collect();
        let (launched, returned) = {
            // Every device gets programs in one order.
            let _order = machine.launching.lock();
            let launched = now();
            // Both callbacks want the results.
            let mut events: SmallVec<[(usize, Event); 16]> = SmallVec::new();
            let outcome = loaded.launch_flat(
                replicas,
                &arguments,
                donate,
                |replica, _, buffer| results[replica].0.push(buffer),
                |replica, event| events.push((replica, event)),
            );
            outcome.map_err(|error| plugin("launching", None, error, &arrivals))?;
            for (replica, event) in events {
                results[replica].1 = Some(event);
            }
            (launched, now())
        };
        drop(arguments);
        drop(arrivals);
        let mut flying: SmallVec<[(Arc<Ticket>, Event); 16]> = SmallVec::new();
        for ((outputs, event), &member) in results.into_iter().zip(&member_of) {
            let Some(arrival) = meeting.arrivals.get_mut(member).and_then(Option::take) else { continue };
            let ticket = arrival.ticket.clone();
            ticket.stamp(|times| (times.gathered, times.launched, times.returned) = (gathered, launched, returned));
            if arrival.lends() {
                ticket.lends(arrival.lent(), arrival.watch(&ticket));
            }
            let task = Task { arrival, prepared: prepared.clone(), group: self.clone(), failure: None };
            ticket.flying(task, outputs);
            flying.extend(event.map(|event| (ticket, event)));
        }
        // The group may have failed meanwhile, when these tickets were held.
        if let Some(failure) = self.failure() {
            for (ticket, _) in &flying {
                ticket.end(Some(failure.clone()));
            }
        }
        for (ticket, event) in flying {
            let outcome = event.on_ready(ticket.clone());
            ticket.keep_event(event);
            if let Err(error) = outcome {
                let failure = Arc::new(self.plugin_failure("watching", "a launched program", None, error));
                self.fail(failure.clone());
                if !ticket.end_unwatched(&failure) {
                    ticket.end(Some(failure));
                }
            }
        }
        Ok(())
    }

    /// The program for all; whoever wished another is laid out again.
    fn agree(&self, arrangement: &Arrangement, meeting: &mut Meeting) -> Result<Arc<Prepared>, Arc<Failure>> {
        let arrivals = &mut meeting.arrivals;
        let unsupported = |arrivals: &[Option<Arrival>], reason| {
            let op = arrivals.iter().flatten().next().map_or(String::new(), |one| one.collective.to_string());
            Arc::new(Failure::Unsupported { op, reason })
        };
        self.agree_on_counts(arrivals)?;
        let first = arrivals.iter().flatten().next().map(|arrival| arrival.wish.clone());
        let message = arrivals.iter().flatten().any(|arrival| arrival.collective.kind.is_point_to_point());
        if let Some(first) = first
            && !message
            && arrivals.iter().flatten().all(|arrival| Arc::ptr_eq(&arrival.wish, &first))
        {
            return Ok(first);
        }
        let joined = {
            let keys: SmallVec<[&Key; 16]> = arrivals.iter().flatten().map(|arrival| &arrival.wish.key).collect();
            let calls: SmallVec<[&Collective; 16]> =
                arrivals.iter().flatten().map(|arrival| &arrival.collective).collect();
            key::join(&keys, &calls)
        };
        let Some(joined) = joined else {
            return Err(self.mismatch(arrivals, "types or numbers of tensors differ".to_owned()));
        };
        let prepared =
            arrangement.prepared(self.machine.target, &joined).map_err(|reason| unsupported(arrivals, reason))?;
        for arrival in arrivals.iter_mut().flatten() {
            if arrival.wish.key == joined {
                continue;
            }
            if arrival.on_device {
                let error = PjrtError::Argument {
                    what: "size class of a device buffer",
                    expected: format!("{:?}, the largest of all ranks", joined.parts),
                    got: format!("{:?}", arrival.wish.key.parts),
                };
                return Err(arrival.fail(self, "joining", error));
            }
            arrival.wish = prepared.clone();
            arrival.stage(self)?;
        }
        Ok(prepared)
    }

    fn mismatch(&self, arrivals: &[Option<Arrival>], what: String) -> Arc<Failure> {
        let seq = arrivals.iter().flatten().next().map_or(0, |arrival| arrival.ticket.seq());
        let called = arrivals
            .iter()
            .flatten()
            .map(|arrival| Called { rank: arrival.me, call: arrival.collective.to_string() })
            .collect();
        Arc::new(Failure::Mismatch { seq, what, called })
    }

    /// What fingerprints don't hold: sizes that only two ranks know.
    fn agree_on_counts(&self, arrivals: &[Option<Arrival>]) -> Result<(), Arc<Failure>> {
        let all: SmallVec<[&Arrival; 16]> = arrivals.iter().flatten().collect();
        let Some(first) = all.first() else { return Ok(()) };
        let differ = |index: usize, from: u32, sends: usize, to: u32, expects: usize| {
            let what =
                format!("tensor {index}: rank {from} sends {sends} elements to rank {to}, which expects {expects}");
            Err(self.mismatch(arrivals, what))
        };
        for index in 0..first.collective.parts.len() {
            let part = |arrival: &&Arrival| arrival.collective.parts.get(index).cloned();
            match first.collective.kind {
                Kind::AllToAll => {
                    for (i, from) in all.iter().enumerate() {
                        for (j, to) in all.iter().enumerate() {
                            let sends = from.collective.parts[index].inputs.counts.get(j).copied().unwrap_or(0);
                            let expects = to.collective.parts[index].outputs.counts.get(i).copied().unwrap_or(0);
                            if sends != expects {
                                return differ(index, from.me, sends, to.me, expects);
                            }
                        }
                    }
                }
                Kind::Gather { root } | Kind::Scatter { root } => {
                    let Some(at_root) = all.get(root as usize).and_then(part) else { continue };
                    let gather = matches!(first.collective.kind, Kind::Gather { .. });
                    for (rank, other) in all.iter().enumerate() {
                        let other = &other.collective.parts[index];
                        let (here, there) = if gather {
                            (other.inputs.total(), at_root.outputs.counts.get(rank).copied().unwrap_or(0))
                        } else {
                            (at_root.inputs.counts.get(rank).copied().unwrap_or(0), other.outputs.total())
                        };
                        let (from, to) = if gather { (rank as u32, root) } else { (root, rank as u32) };
                        if here != there {
                            return differ(index, from, here, to, there);
                        }
                    }
                }
                Kind::Send { .. } | Kind::Recv { .. } => {
                    if let [from, to] = all[..] {
                        let (sent, got) = (&from.collective.parts[index], &to.collective.parts[index]);
                        if sent.dtype != got.dtype {
                            let what =
                                format!("rank {} sends {}, rank {} expects {}", from.me, sent.dtype, to.me, got.dtype);
                            return Err(self.mismatch(arrivals, what));
                        }
                        if sent.inputs.total() != got.outputs.total() {
                            return differ(index, from.me, sent.inputs.total(), to.me, got.outputs.total());
                        }
                    }
                }
                _ => return Ok(()),
            }
        }
        Ok(())
    }
}

/// Where an argument is to lie.
pub(super) struct Place<'a> {
    pub client: &'a Client,
    pub constants: &'a Constants,
    /// The client's index.
    pub device: u32,
}

/// An argument that is not a member's data.
pub(super) fn other(
    place: &Place,
    collective: &Collective,
    role: Role,
    shape: &Shape,
) -> Result<Arc<Buffer>, PjrtError> {
    let starts = |part: usize, counts: &dyn Fn(&Part) -> SmallVec<[usize; 8]>| {
        let Some(part) = collective.parts.get(part) else { return SmallVec::<[u8; 64]>::new() };
        let mut at = 0i32;
        let mut bytes = SmallVec::new();
        for count in counts(part) {
            bytes.extend_from_slice(&at.to_le_bytes());
            at += (count * part.dtype.size()).div_ceil(TILE) as i32;
        }
        bytes
    };
    let constant = |value: Option<&[u8]>| place.constants.get(place.client, place.device, shape, value);
    let device = &place.client.devices()[place.device as usize];
    match role {
        // Nobody reads it, or (a barrier's) its value doesn't matter.
        Role::Data(_) => constant(None),
        Role::Root => constant(Some(&collective.kind.root().unwrap_or(0).to_le_bytes())),
        Role::Factor(part) => {
            let reduction = collective.parts.get(part).and_then(|part| part.reduction);
            let factor = if let Some(Reduction::PreMulSum(factor)) = reduction { factor } else { 1.0 };
            constant(Some(&scalar(shape.element, factor)))
        }
        Role::InputStarts(part) => {
            let bytes = starts(part, &|part| part.inputs.counts.clone());
            place.client.buffer(&bytes, shape.element, &shape.dims, device).map(Arc::new)
        }
        Role::OutputStarts(part) => {
            let bytes = starts(part, &|part| part.outputs.counts.clone());
            place.client.buffer(&bytes, shape.element, &shape.dims, device).map(Arc::new)
        }
    }
}

/// A number in the type that a reduction computes in.
fn scalar(element: Element, value: f64) -> SmallVec<[u8; 16]> {
    let mut bytes = SmallVec::new();
    match element {
        Element::F64 => bytes.extend_from_slice(&value.to_le_bytes()),
        Element::C128 => {
            bytes.extend_from_slice(&value.to_le_bytes());
            bytes.extend_from_slice(&0f64.to_le_bytes());
        }
        Element::C64 => {
            bytes.extend_from_slice(&(value as f32).to_le_bytes());
            bytes.extend_from_slice(&0f32.to_le_bytes());
        }
        _ => bytes.extend_from_slice(&(value as f32).to_le_bytes()),
    }
    bytes
}
