//! How ranks meet in a program's collective: over groups made of the one that the process lent.

use std::collections::HashMap;

use parking_lot::Mutex;
use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Tensor};
use podring_group::{Kind as ErrorKind, ProcessGroup, Work};
use podring_ici::engine::Launching;

use crate::error::InterposeError;
use crate::step::{Array, Step, What};

/// The group whose members are the job's ranks, and groups of some of them.
struct World {
    group: ProcessGroup,
    parts: HashMap<(Vec<u32>, Use), ProcessGroup>,
}

/// What a group is for: each use has groups of its own, whose operations have an order of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// A framework's programs.
    Programs,
    /// Programs that podring's own engine launches: it does so on threads of its own, so that their order among a
    /// framework's programs may be another on every rank.
    Launched,
    /// Buffers that go from chip to chip.
    Transfers,
}

impl Use {
    fn name(self) -> &'static str {
        match self {
            Use::Programs => "programs",
            Use::Launched => "launched",
            Use::Transfers => "transfers",
        }
    }
}

impl From<Option<&Launching>> for Use {
    fn from(launch: Option<&Launching>) -> Use {
        if launch.is_some() { Use::Launched } else { Use::Programs }
    }
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// Gives programs the group of all ranks, in the ranks' order, or takes it away.
pub fn set_world(group: Option<ProcessGroup>) {
    *WORLD.lock() = group.map(|group| World { group, parts: HashMap::new() });
}

/// Takes away the group that was lent, if it is this one, and ends those made of it.
pub fn end_world(group: &ProcessGroup) {
    let ended = {
        let mut world = WORLD.lock();
        if world.as_ref().is_some_and(|world| world.group.is(group)) { world.take() } else { None }
    };
    if let Some(world) = ended {
        world.parts.values().for_each(ProcessGroup::shutdown);
    }
}

/// The group of these ranks: made at the first program that needs it, with nobody waiting for anybody. Never the lent
/// group itself: its own operations have an order of their own.
fn group_of(members: &[u32], what_for: Use) -> Result<ProcessGroup, InterposeError> {
    let mut world = WORLD.lock();
    let world = world.as_mut().ok_or(InterposeError::NoWorld)?;
    let key = (members.to_vec(), what_for);
    if let Some(part) = world.parts.get(&key) {
        return Ok(part.clone());
    }
    let failed =
        |error: podring_group::Error| InterposeError::Failed { what: "forming a group", why: error.to_string() };
    let names: Vec<String> = members.iter().map(u32::to_string).collect();
    let name = format!("/{}[{}]", what_for.name(), names.join(","));
    let part = world.group.part_named(&name, members).map_err(failed)?;
    world.parts.insert(key, part.clone());
    Ok(part)
}

/// The group of all ranks, in order.
pub fn everybody(what_for: Use) -> Result<ProcessGroup, InterposeError> {
    let size = WORLD.lock().as_ref().map(|world| world.group.size()).ok_or(InterposeError::NoWorld)?;
    group_of(&(0..size).collect::<Vec<u32>>(), what_for)
}

/// Waits for an operation of the fabric's, unless the launch that it is part of is stopped. The thread is the framework's
/// or the plugin's.
fn finish(work: &Work, group: &ProcessGroup, launch: Option<&Launching>) -> Result<(), InterposeError> {
    let failed = |why| InterposeError::Failed { what: "a collective", why };
    let stopped = || launch.and_then(Launching::stopped);
    let Err(error) = work.wait_as_guest(None, || stopped().is_some()) else { return Ok(()) };
    match error.kind() {
        ErrorKind::Interrupted => {
            let why = stopped().unwrap_or_default();
            // The others hear of it, and the memory is let go of.
            group.abort(&why);
            let _ = work.wait_as_guest(None, || false);
            Err(failed(why))
        }
        ErrorKind::Mismatch if launch.is_some_and(|launch| launch.mark != 0) => Err(failed(format!(
            "{error}\n  (The programs may be alike: compared are also the calls that they were launched for, and the \
             order of calls among groups of which one contains the other.)"
        ))),
        _ => Err(failed(error.to_string())),
    }
}

/// Tells the others that this rank can't do its part in a collective, so that they don't wait for it.
pub fn refuse(rank: u32, step: &Step, what_for: Use, why: &str) {
    let group = match &step.what {
        What::Permute(_) => everybody(what_for),
        _ => match step.group_of(rank) {
            Some((members, _)) => group_of(members, what_for),
            None => return,
        },
    };
    // Without a group there is nobody to tell.
    if let Ok(group) = group {
        group.abort(&format!("rank {rank} of the job can't take part in a program: {why}"));
    }
}

/// The collective itself, on the memory of its operands and results: returns when this rank's part is done.
///
/// Within a launch of podring's own engine it takes no longer than that one may, and brings along what it says.
pub fn meet(
    rank: u32,
    step: &Step,
    inputs: &[*mut u8],
    outputs: &[*mut u8],
    launch: Option<&Launching>,
) -> Result<(), InterposeError> {
    let failed = |error: podring_group::Error| InterposeError::Failed { what: "a collective", why: error.to_string() };
    let (limit, mark) = (launch.map(Launching::left), launch.map_or(0, |launch| launch.mark));
    if let What::Permute(pairs) = &step.what {
        let group = everybody(launch.into())?;
        let array = &step.inputs[0];
        let count = array.dims.iter().map(|&dim| dim as usize).product();
        let one = |kind, data: *mut u8| {
            let tensor = Blocks::whole(Tensor { data, layout: Layout::flat(count) });
            let (inputs, outputs) =
                if matches!(kind, Kind::Send { .. }) { (tensor, Blocks::none()) } else { (Blocks::none(), tensor) };
            let part = Part { dtype: array.dtype, reduction: None, inputs, outputs };
            Collective { kind, parts: [part].into_iter().collect() }
        };
        let mut works = Vec::new();
        let post = |collective| group.post(collective, None, limit, false).map_err(failed);
        if let Some(&(from, _)) = pairs.iter().find(|(_, to)| *to == rank) {
            works.push(post(one(Kind::Recv { from: Some(from), tag: TAG }, outputs[0]))?);
        } else {
            // SAFETY: the result's own memory, as long as its array.
            unsafe { outputs[0].write_bytes(0, array.bytes()) };
        }
        if let Some(&(_, to)) = pairs.iter().find(|(from, _)| *from == rank) {
            works.push(post(one(Kind::Send { to, tag: TAG }, inputs[0]))?);
        }
        return works.iter().try_for_each(|work| finish(work, &group, launch));
    }
    let Some((members, _)) = step.group_of(rank) else {
        return Err(InterposeError::Failed { what: "a collective", why: format!("rank {rank} is in no group of it") });
    };
    let group = group_of(members, launch.into())?;
    let run = |collective| {
        let work = group.post_marked(collective, limit, mark).map_err(failed)?;
        finish(&work, &group, launch)
    };
    if step.what == What::Ragged {
        let done = ragged(step, members.len(), inputs, outputs[0], &run);
        // The first reason stands, so that what the group itself has failed of is not put otherwise.
        return done.inspect_err(|error| refuse(rank, step, launch.into(), &error.to_string()));
    }
    match step.collective(members.len(), inputs, outputs) {
        Some(collective) => run(collective),
        None => Ok(()),
    }
}

/// Rows of the operand to each member, of the sizes and to the places that the program computed. A row's place in the
/// result is its sender's to say: so those go around first.
fn ragged(
    step: &Step,
    count: usize,
    inputs: &[*mut u8],
    output: *mut u8,
    run: &dyn Fn(Collective) -> Result<(), InterposeError>,
) -> Result<(), InterposeError> {
    let failed = |why: String| InterposeError::Failed { what: "a ragged all-to-all", why };
    // SAFETY: the operands' own memory, of `count` numbers each by the program's types.
    let numbers = |place: usize| unsafe { numbers(&step.inputs[place], inputs[place]) };
    let (from, send, to, receive) = (numbers(2), numbers(3), numbers(4), numbers(5));
    let exchange = |dtype, ins: Blocks, outs: Blocks| {
        let part = Part { dtype, reduction: None, inputs: ins, outputs: outs };
        run(Collective { kind: Kind::AllToAll, parts: [part].into_iter().collect() })
    };
    let mut to = to;
    let mut at = vec![0i64; count];
    let each = |list: &mut [i64]| {
        let data: *mut i64 = list.as_mut_ptr();
        Blocks::list((0..count).map(|one| Tensor { data: data.wrapping_add(one).cast(), layout: Layout::flat(1) }))
    };
    exchange(DType::I64, each(&mut to), each(&mut at))?;
    // SAFETY: both are of the result's shape, and no memory is operand and result at once.
    unsafe { output.copy_from_nonoverlapping(inputs[1], step.outputs[0].bytes()) };
    let rows = |array: &Array, data: *mut u8, starts: &[i64], sizes: &[i64]| {
        let row: i64 = array.dims[1..].iter().product();
        let block = |(&start, &size): (&i64, &i64)| {
            if start < 0 || size < 0 || start.checked_add(size).is_none_or(|end| end > array.dims[0]) {
                return Err(failed(format!("{size} rows from {start} on don't lie within {:?}", array.dims)));
            }
            let offset = start as usize * row as usize * array.dtype.size();
            Ok(Tensor { data: data.wrapping_add(offset), layout: Layout::flat(size as usize * row as usize) })
        };
        starts.iter().zip(sizes).map(block).collect::<Result<Vec<Tensor>, _>>().map(Blocks::list)
    };
    let (given, taken) = (&step.inputs[0], &step.outputs[0]);
    // If this rank's don't fit it goes no further: the caller tells the others.
    let ins = rows(given, inputs[0], &from, &send)?;
    let outs = rows(taken, output, &at, &receive)?;
    exchange(given.dtype, ins, outs)
}

/// # Safety
/// `data` holds the array.
unsafe fn numbers(array: &Array, data: *const u8) -> Vec<i64> {
    let count = array.dims.iter().map(|&dim| dim as usize).product();
    // SAFETY: the caller's promise; XLA aligns its buffers.
    (0..count)
        .map(|index| unsafe {
            match array.dtype {
                DType::I32 => i64::from(data.cast::<i32>().add(index).read()),
                _ => data.cast::<i64>().add(index).read(),
            }
        })
        .collect()
}

/// Of messages between ranks that a program permutes; user code's tags start at 0.
const TAG: u32 = u32::MAX;
