//! Programs with collectives: read when they are compiled, played by the process group when they are executed.
//!
//! A program that is one collective is played on its arguments' memory; any other is cut at its collectives
//! ([`crate::cut`]), and the wrapped plugin runs what lies between.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fs;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use podring_collective::{Blocks, Collective, Kind, Layout, Part, Tensor};
use podring_group::{Kind as ErrorKind, ProcessGroup, Work};
use podring_ici::engine::{Launching, launching};
use prost::Message as _;

use crate::cut::{self, Cut, Value};
use crate::error::{Fault, InterposeError};
use crate::hlo::{Module, ModuleFile};
use crate::memory;
use crate::options;
use crate::plan::{self, Plan, Program};
use crate::presented::Presented;
use crate::step::{Array, Step, What};
use crate::sys::{self, Opaque};
use crate::table::Interposed;
use crate::the_table;

/// The group whose members are the job's ranks, and groups of some of them.
struct World {
    group: ProcessGroup,
    parts: HashMap<Vec<u32>, ProcessGroup>,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// Gives programs the group of all ranks, in the ranks' order, or takes it away.
pub fn set_world(group: Option<ProcessGroup>) {
    *WORLD.lock() = group.map(|group| World { group, parts: HashMap::new() });
}

/// The group of these ranks: made at the first program that needs it, with nobody waiting for anybody.
fn group_of(members: &[u32]) -> Result<ProcessGroup, InterposeError> {
    let mut world = WORLD.lock();
    let world = world.as_mut().ok_or(InterposeError::NoWorld)?;
    let size = world.group.size();
    if members.len() == size as usize && members.iter().copied().eq(0..size) {
        return Ok(world.group.clone());
    }
    if let Some(part) = world.parts.get(members) {
        return Ok(part.clone());
    }
    let failed =
        |error: podring_group::Error| InterposeError::Failed { what: "forming a group", why: error.to_string() };
    let part = world.group.part(members).map_err(failed)?;
    world.parts.insert(members.to_vec(), part.clone());
    Ok(part)
}

/// Names of operations that make ranks meet, or know their place, as programs spell them: an operation that is used is
/// named in the program, whatever its form, so that one that isn't named isn't used.
const NAMES: &[&str] = &[
    "all_reduce",
    "all-reduce",
    "all_gather",
    "all-gather",
    "reduce_scatter",
    "reduce-scatter",
    "all_to_all",
    "all-to-all",
    "collective_permute",
    "collective-permute",
    "collective_broadcast",
    "collective-broadcast",
    "partition_id",
    "partition-id",
    "replica_id",
    "replica-id",
];

fn mentions_ranks(code: &[u8]) -> bool {
    NAMES.iter().any(|name| code.windows(name.len()).any(|window| window == name.as_bytes()))
}

/// How a program with a collective is played.
enum Played {
    /// It is one collective.
    Whole(Plan),
    /// Pieces, and the executable of each stage's computation.
    Pieces(Cut, Vec<Option<Executable>>),
}

/// A `PJRT_LoadedExecutable` of this module's own.
struct Executable(usize);

impl Drop for Executable {
    fn drop(&mut self) {
        let mut end = sys::LoadedExecutableDestroy { executable: self.0 as Opaque, ..Default::default() };
        if let Some(on) = the_table()
            && let Err(Fault::Theirs(error)) = on.forward(&mut end)
        {
            tracing::warn!(error = on.take_message(error), "a program's part could not be destroyed");
        }
    }
}

/// The programs with a collective, by their `PJRT_LoadedExecutable`.
#[derive(Default)]
pub struct Programs(RwLock<HashMap<usize, Arc<Played>>>);

impl Programs {
    /// Compiles a program for this process's chip, and keeps what collective it is.
    pub fn compile(&self, on: &Interposed, seen: &Presented, args: &mut sys::ClientCompile) -> Result<(), Fault> {
        // SAFETY: the caller's bytes, as many as it says.
        let asked = unsafe { bytes(args.compile_options.cast(), args.compile_options_size) };
        let ours = options::for_one(asked, u64::from(seen.rank()))?;
        // SAFETY: the caller's program.
        let program = unsafe { &*args.program };
        // SAFETY: its bytes, as many as it says.
        let code = unsafe { bytes(program.code.cast(), program.code_size) };
        if seen.world() == 1 || !mentions_ranks(code) {
            return forward(on, args, &ours);
        }
        let failed = |why: String| InterposeError::Failed { what: "reading a program", why };
        // XLA writes down what it was given, before any of its passes.
        let folder = tempfile::tempdir().map_err(|error| failed(error.to_string()))?;
        let mesh = seen.mesh(asked)?;
        forward(on, args, &options::with_dump(&ours, folder.path()))?;
        let played = module(folder.path()).map_err(|why| failed(why).into()).and_then(|(raw, module)| {
            let named = |why: String| InterposeError::Program { program: module.name.clone(), why };
            match plan::read(&module, &mesh) {
                Ok(Program::Alone) => Ok(None),
                Ok(Program::Collective(plan)) => Ok(Some(Played::Whole(*plan))),
                Err(_) => {
                    let cut = cut::cut(&raw, &module, &mesh, seen.rank());
                    let cut = cut.map_err(|refused| named(refused.to_string()))?;
                    pieces(on, args.client, &ours, cut).map(Some)
                }
            }
        });
        match played {
            Ok(None) => {}
            Ok(Some(played)) => drop(self.0.write().insert(args.executable as usize, played.into())),
            Err(error) => {
                // Nobody else has it, and nobody shall run it.
                let mut end = sys::LoadedExecutableDestroy { executable: args.executable, ..Default::default() };
                on.forward(&mut end)?;
                args.executable = std::ptr::null_mut();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Forgets a program.
    pub fn forget(&self, executable: Opaque) {
        self.0.write().remove(&(executable as usize));
    }

    /// Runs a program: a collective by the group, any other by the plugin.
    pub fn execute(
        &self,
        on: &Interposed,
        seen: &Presented,
        args: &mut sys::LoadedExecutableExecute,
    ) -> Result<(), Fault> {
        let played = self.0.read().get(&(args.executable as usize)).cloned();
        match played.as_deref() {
            None => on.forward(args),
            Some(Played::Whole(plan)) => play(on, seen, plan, args),
            Some(Played::Pieces(cut, parts)) => play_pieces(on, seen, cut, parts, args),
        }
    }
}

/// Compiles what lies between a program's collectives.
fn pieces(on: &Interposed, client: Opaque, options: &[u8], cut: Cut) -> Result<Played, Fault> {
    const FORMAT: &str = "hlo";
    let compile = |module: &[u8]| {
        let program = sys::Program {
            struct_size: size_of::<sys::Program>(),
            extension_start: std::ptr::null_mut(),
            // The plugin only reads it; the header's type serves both directions.
            code: module.as_ptr().cast_mut().cast(),
            code_size: module.len(),
            format: FORMAT.as_ptr().cast(),
            format_size: FORMAT.len(),
        };
        let mut args = sys::ClientCompile {
            client,
            program: &program,
            compile_options: options.as_ptr().cast(),
            compile_options_size: options.len(),
            ..Default::default()
        };
        on.forward(&mut args)?;
        Ok::<Executable, Fault>(Executable(args.executable as usize))
    };
    let parts: Result<Vec<_>, Fault> =
        cut.stages.iter().map(|stage| stage.segment.as_ref().map(|one| compile(&one.module)).transpose()).collect();
    Ok(Played::Pieces(cut, parts?))
}

fn forward(on: &Interposed, args: &mut sys::ClientCompile, options: &[u8]) -> Result<(), Fault> {
    let theirs = (args.compile_options, args.compile_options_size);
    (args.compile_options, args.compile_options_size) = (options.as_ptr().cast(), options.len());
    let compiled = on.forward(args);
    (args.compile_options, args.compile_options_size) = theirs;
    compiled
}

/// The module that XLA wrote into `folder`, and its bytes.
fn module(folder: &Path) -> Result<(Vec<u8>, Module), String> {
    let entries = folder.read_dir().map_err(|error| error.to_string())?;
    let files: Vec<_> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.to_string_lossy().ends_with(".before_optimizations.hlo.pb"))
        .collect();
    let [file] = &files[..] else {
        return Err(format!("expected XLA to write one module, it wrote {}", files.len()));
    };
    let bytes = fs::read(file).map_err(|error| error.to_string())?;
    let file = ModuleFile::decode(&bytes[..]).map_err(|error| error.to_string())?;
    let module = file.module.ok_or_else(|| "it is empty".to_owned())?;
    // `xla.HloProto`'s first field.
    let raw = options::Fields(&bytes).flatten().find_map(|(number, _, payload)| payload.filter(|_| number == 1));
    Ok((raw.unwrap_or_default().to_vec(), module))
}

/// # Safety
/// `data` is null or points to `size` bytes.
unsafe fn bytes<'a>(data: *const c_void, size: usize) -> &'a [u8] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data.cast(), size) }
}

/// Memory for a result, until a buffer takes it over.
struct Held {
    data: NonNull<u8>,
    bytes: usize,
}

impl Held {
    fn new(bytes: usize) -> Result<Held, InterposeError> {
        let mut memory = std::ptr::null_mut();
        // SAFETY: a place for the result, a power of two, a size above zero.
        let failed = unsafe { libc::posix_memalign(&mut memory, 64, bytes.max(1)) } != 0;
        match NonNull::new(memory.cast()).filter(|_| !failed) {
            Some(data) => Ok(Held { data, bytes }),
            None => Err(InterposeError::Failed {
                what: "a collective's result",
                why: format!("no memory of {bytes} bytes"),
            }),
        }
    }

    fn view(&mut self) -> &mut [u8] {
        // SAFETY: this many bytes of its own; written by the group or by `zero` before they are read.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.bytes) }
    }

    fn zero(&mut self) {
        // SAFETY: its own memory.
        unsafe { self.data.as_ptr().write_bytes(0, self.bytes) };
    }

    fn into_buffer(self, shape: &Array) -> Result<Opaque, InterposeError> {
        let data = self.data.as_ptr();
        std::mem::forget(self);
        // SAFETY: 64-byte aligned, holds these elements, and nobody writes to it any more; `release` frees it.
        unsafe { memory::adopt(data.cast(), &shape.dims, shape.dtype, release, std::ptr::null_mut()) }
            .map_err(|why| InterposeError::Failed { what: "a collective's result", why })
    }
}

unsafe extern "C" fn release(memory: *mut c_void, _context: *mut c_void) {
    // SAFETY: from posix_memalign, released once.
    unsafe { libc::free(memory) };
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: from posix_memalign, freed once.
        unsafe { libc::free(self.data.as_ptr().cast()) };
    }
}

fn play(on: &Interposed, seen: &Presented, plan: &Plan, args: &mut sys::LoadedExecutableExecute) -> Result<(), Fault> {
    let failed = |what: &'static str, why: String| Fault::Ours(InterposeError::Failed { what, why });
    if args.num_devices != 1 {
        return Err(failed("a collective", format!("expected one device to run on, got {}", args.num_devices)));
    }
    // SAFETY: one device's list of arguments, as many as the caller says.
    let arguments = unsafe { std::slice::from_raw_parts(*args.argument_lists, args.num_args) };
    let mut inputs = Vec::new();
    for (&index, expected) in plan.arguments.iter().zip(&plan.step.inputs) {
        let Some(&buffer) = arguments.get(index) else {
            return Err(failed("a collective", format!("argument {index} is missing of {}", arguments.len())));
        };
        // SAFETY: an argument of the caller's, a live buffer of this client.
        inputs.push(unsafe { operand(buffer, expected) }?);
    }
    let outputs: Result<Vec<Held>, InterposeError> =
        plan.step.outputs.iter().map(|array| Held::new(array.bytes())).collect();
    let mut outputs = outputs?;
    meet(seen.rank(), &plan.step, &inputs, &mut outputs)?;

    let mut buffers = Vec::new();
    let mut outputs: Vec<Option<Held>> = outputs.into_iter().map(Some).collect();
    for (index, piece) in plan.results.iter().enumerate() {
        let last = plan.results[index + 1..].iter().all(|other| other.of != piece.of);
        let whole = &plan.step.outputs[piece.of];
        let made = match outputs[piece.of].take_if(|_| last && piece.is_whole(&plan.step)) {
            Some(held) => held.into_buffer(&piece.shape),
            None => Held::new(piece.shape.bytes()).and_then(|mut part| {
                if let Some(held) = &mut outputs[piece.of] {
                    piece.copy(held.view(), whole, part.view());
                }
                part.into_buffer(&piece.shape)
            }),
        };
        match made {
            Ok(buffer) => buffers.push(buffer),
            Err(error) => {
                for buffer in buffers {
                    on.forward(&mut sys::BufferDestroy { buffer, ..Default::default() })?;
                }
                return Err(error.into());
            }
        }
    }
    let mut done = std::ptr::null_mut();
    if !args.events.is_null()
        && let Some(&buffer) = buffers.first()
    {
        let mut ready = sys::BufferReadyEvent { buffer, ..Default::default() };
        on.forward(&mut ready)?;
        done = ready.event;
    }
    // SAFETY: the caller's lists for one device: as many results as the program has, and one event.
    unsafe {
        std::ptr::copy_nonoverlapping(buffers.as_ptr(), *args.output_lists, buffers.len());
        if !args.events.is_null() {
            *args.events = done;
        }
    }
    Ok(())
}

/// The memory of a collective's operand, once it has its value.
///
/// # Safety
/// `buffer` is a live buffer of the client.
unsafe fn operand(buffer: Opaque, expected: &Array) -> Result<*mut u8, InterposeError> {
    let failed = |why| InterposeError::Failed { what: "a collective's operand", why };
    // SAFETY: the caller's promise.
    let found = unsafe { memory::of_buffer(buffer) }.map_err(failed)?;
    if found.dtype != Some(expected.dtype) || found.bytes < expected.bytes() {
        let got = format!("{} bytes of {:?}", found.bytes, found.dtype);
        return Err(failed(format!("expected {expected:?}, got {got}")));
    }
    Ok(found.data.cast())
}

/// Buffers of a program that is being played, destroyed at its end unless they are taken.
struct Made<'a> {
    on: &'a Interposed,
    buffers: HashMap<Value, Opaque>,
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        for (_, buffer) in self.buffers.drain() {
            let ended = self.on.forward(&mut sys::BufferDestroy { buffer, ..Default::default() });
            if let Err(Fault::Theirs(error)) = ended {
                tracing::warn!(error = self.on.take_message(error), "a buffer could not be destroyed");
            }
        }
    }
}

/// Stage by stage: what the plugin computes, then what the fabric exchanges.
fn play_pieces(
    on: &Interposed,
    seen: &Presented,
    cut: &Cut,
    parts: &[Option<Executable>],
    args: &mut sys::LoadedExecutableExecute,
) -> Result<(), Fault> {
    let failed = |why: String| Fault::Ours(InterposeError::Failed { what: "a program in pieces", why });
    if args.num_devices != 1 {
        return Err(failed(format!("expected one device to run on, got {}", args.num_devices)));
    }
    let given: &[Opaque] = match args.num_args {
        0 => &[],
        // SAFETY: one device's list of arguments, as many as the caller says.
        count => unsafe { std::slice::from_raw_parts(*args.argument_lists, count) },
    };
    let mut arguments: HashMap<Value, Opaque> = HashMap::new();
    for &(number, value) in &cut.arguments {
        let Some(&buffer) = given.get(number) else {
            return Err(failed(format!("argument {number} is missing of {}", given.len())));
        };
        arguments.insert(value, buffer);
    }
    let mut made = Made { on, buffers: HashMap::new() };
    let mut last = std::ptr::null_mut();
    let missing = |value: &Value| failed(format!("nothing has given value {value:?}"));
    for (stage, part) in cut.stages.iter().zip(parts) {
        let find = |made: &Made, value: &Value| {
            made.buffers.get(value).or_else(|| arguments.get(value)).copied().ok_or_else(|| missing(value))
        };
        if let (Some(segment), Some(part)) = (&stage.segment, part) {
            let takes = segment.takes.iter().map(|value| find(&made, value)).collect::<Result<Vec<Opaque>, Fault>>()?;
            let mut gives = vec![std::ptr::null_mut(); segment.gives.len()];
            let (lists, places) = (takes.as_ptr(), gives.as_mut_ptr());
            let mut run = sys::LoadedExecutableExecute {
                executable: part.0 as Opaque,
                options: args.options,
                argument_lists: &lists,
                num_devices: 1,
                num_args: takes.len(),
                output_lists: &places,
                ..Default::default()
            };
            on.forward(&mut run)?;
            last = gives.last().copied().unwrap_or(last);
            made.buffers.extend(segment.gives.iter().copied().zip(gives));
        }
        for meeting in &stage.meetings {
            let mut inputs = Vec::new();
            for (value, expected) in meeting.takes.iter().zip(&meeting.step.inputs) {
                // SAFETY: an argument of the caller's or a buffer made above, alive until the end.
                inputs.push(unsafe { operand(find(&made, value)?, expected) }?);
            }
            let outputs: Result<Vec<Held>, InterposeError> =
                meeting.step.outputs.iter().map(|array| Held::new(array.bytes())).collect();
            let mut outputs = outputs?;
            meet(seen.rank(), &meeting.step, &inputs, &mut outputs)?;
            for (index, (held, array)) in outputs.into_iter().zip(&meeting.step.outputs).enumerate() {
                last = held.into_buffer(array)?;
                made.buffers.insert((meeting.id, index), last);
            }
        }
    }
    let mut results = Vec::new();
    for value in &cut.results {
        results.push(find_result(&made, value).ok_or_else(|| missing(value))?);
    }
    let mut done = std::ptr::null_mut();
    if !args.events.is_null() && !last.is_null() {
        // A computation's results are ready together, and earlier ones were waited for.
        let mut ready = sys::BufferReadyEvent { buffer: last, ..Default::default() };
        on.forward(&mut ready)?;
        done = ready.event;
    }
    for value in &cut.results {
        made.buffers.remove(value);
    }
    // SAFETY: the caller's lists for one device: as many results as the program has, and one event.
    unsafe {
        std::ptr::copy_nonoverlapping(results.as_ptr(), *args.output_lists, results.len());
        if !args.events.is_null() {
            *args.events = done;
        }
    }
    Ok(())
}

fn find_result(made: &Made, value: &Value) -> Option<Opaque> {
    made.buffers.get(value).copied()
}

/// Waits for an operation of the fabric's, at most as long as the launch that it is part of may take.
fn finish(work: &Work, group: &ProcessGroup, launch: Option<&Launching>) -> Result<(), InterposeError> {
    let failed = |why| InterposeError::Failed { what: "a collective", why };
    let Err(error) = work.wait(None, || launch.is_some_and(|launch| launch.stopped().is_some())) else { return Ok(()) };
    match error.kind() {
        ErrorKind::Interrupted => {
            let why = launch.and_then(Launching::stopped).unwrap_or_default();
            // The others hear of it, and the memory is let go of.
            group.abort(&why);
            let _ = work.wait(None, || false);
            Err(failed(why))
        }
        ErrorKind::Mismatch if launch.is_some_and(|launch| launch.mark != 0) => Err(failed(format!(
            "{error}\n  (The programs may be alike: compared are also the calls that they were launched for, and the \
             order of calls among groups of which one contains the other.)"
        ))),
        _ => Err(failed(error.to_string())),
    }
}

/// The collective itself: returns when this rank's part is done.
fn meet(rank: u32, step: &Step, inputs: &[*mut u8], outputs: &mut [Held]) -> Result<(), InterposeError> {
    let failed = |error: podring_group::Error| InterposeError::Failed { what: "a collective", why: error.to_string() };
    let launch = launching();
    let launch = launch.as_deref();
    let (limit, mark) = (launch.map(Launching::left), launch.map_or(0, |launch| launch.mark));
    if let What::Permute(pairs) = &step.what {
        let group = WORLD.lock().as_ref().map(|world| world.group.clone()).ok_or(InterposeError::NoWorld)?;
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
            works.push(post(one(Kind::Recv { from: Some(from), tag: TAG }, outputs[0].data.as_ptr()))?);
        } else {
            outputs[0].zero();
        }
        if let Some(&(_, to)) = pairs.iter().find(|(from, _)| *from == rank) {
            works.push(post(one(Kind::Send { to, tag: TAG }, inputs[0]))?);
        }
        return works.iter().try_for_each(|work| finish(work, &group, launch));
    }
    let Some((members, _)) = step.group_of(rank) else {
        return Err(InterposeError::Failed { what: "a collective", why: format!("rank {rank} is in no group of it") });
    };
    let group = group_of(members)?;
    let places: Vec<*mut u8> = outputs.iter().map(|held| held.data.as_ptr()).collect();
    match step.collective(members.len(), inputs, &places) {
        Some(collective) => {
            let work = group.post_marked(collective, limit, mark).map_err(failed)?;
            finish(&work, &group, launch)
        }
        None => Ok(()),
    }
}

/// Of messages between ranks that a program permutes; user code's tags start at 0.
const TAG: u32 = u32::MAX;
