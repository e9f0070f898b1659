//! Programs with collectives: read when they are compiled, played by the process group when they are executed.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fs;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use podring_ici::engine::{Launching, launching};
use prost::Message as _;

use crate::error::{Fault, InterposeError};
use crate::ffi::{self, Callable};
use crate::hlo::Module;
use crate::meet::{meet, refuse};
use crate::memory;
use crate::options;
use crate::plan::{self, Plan, Program};
use crate::presented::Presented;
use crate::rewrite::{self, Rewritten};
use crate::saved::Saved;
use crate::step::{Array, Mesh, Step};
use crate::sys::{self, Arguments as _, Opaque};
use crate::table::Interposed;
use crate::wire::Fields;

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

/// What became of programs with collectives, since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Programs that are one collective.
    pub whole: u64,
    /// Programs with collectives among other operations.
    pub mixed: u64,
    /// Collectives in the latter.
    pub inside: u64,
    /// Programs that were refused.
    pub refused: u64,
    /// Programs that were not compiled here: of a file, or of another rank.
    pub loaded: u64,
}

static COUNTS: Mutex<Counts> = Mutex::new(Counts { whole: 0, mixed: 0, inside: 0, refused: 0, loaded: 0 });

/// What became of programs with collectives.
pub fn counts() -> Counts {
    *COUNTS.lock()
}

/// A program with collectives.
struct Known {
    how: How,
    /// The compile options that the framework gave, and the program as XLA wrote it down: what it takes to save it.
    options: Vec<u8>,
    module: Vec<u8>,
    /// It is the same on all ranks.
    same: bool,
    /// It was compiled for podring's own engine. A framework keeps what can be saved for other jobs, in which the groups
    /// that its graphs name are others.
    own: bool,
}

/// How it runs.
enum How {
    /// It is a collective.
    Whole(Plan),
    /// It calls them. They are callable as long as the program is there.
    Calls(Callable),
}

/// The programs with a collective.
#[derive(Default)]
pub struct Programs {
    /// By their `PJRT_LoadedExecutable`.
    loaded: RwLock<HashMap<usize, Arc<Known>>>,
    /// By the `PJRT_Executable`s that callers hold of them.
    named: Mutex<HashMap<usize, Arc<Known>>>,
}

impl Programs {
    /// Compiles a program for this process's chip, and keeps what collectives it has.
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
        // XLA writes down what it was given, before any of its passes; also if it can't compile it.
        let folder = tempfile::tempdir().map_err(|error| failed(error.to_string()))?;
        let mesh = seen.mesh(asked)?;
        let compiled = forward(on, args, &options::with_dump(&ours, folder.path()));
        let written = match written(folder.path()) {
            Ok(written) => written,
            Err(why) => {
                compiled?;
                discard(on, args)?;
                return Err(failed(why).into());
            }
        };
        let module = Module::decode(&written[..]).map_err(|error| failed(error.to_string()))?;
        let (how, same) = match plan::read(&module, &mesh) {
            Ok(Program::Alone) => return compiled,
            Ok(Program::Collective(plan)) if compiled.is_ok() => {
                COUNTS.lock().whole += 1;
                tracing::debug!(program = module.name, "a program is one collective: played by the group");
                (How::Whole(*plan), true)
            }
            _ => {
                match compiled {
                    Ok(()) => discard(on, args)?,
                    Err(Fault::Theirs(error)) => drop(on.take_message(error)),
                    Err(ours) => return Err(ours),
                }
                let made = self.compile_calls(on, seen, args, &ours, &written, &module, &mesh);
                let (callable, same) = made.inspect_err(|_| COUNTS.lock().refused += 1)?;
                (How::Calls(callable), same)
            }
        };
        let known = Known { how, options: asked.to_vec(), module: written, same, own: launching().is_some() };
        self.loaded.write().insert(args.executable as usize, known.into());
        Ok(())
    }

    /// Compiles a program with calls in place of its collectives.
    #[expect(clippy::too_many_arguments, reason = "all of one compilation")]
    fn compile_calls(
        &self,
        on: &Interposed,
        seen: &Presented,
        args: &mut sys::ClientCompile,
        options: &[u8],
        written: &[u8],
        module: &Module,
        mesh: &Mesh,
    ) -> Result<(Callable, bool), Fault> {
        let (callable, made) = callable(on, seen, written, module, mesh)?;
        let format = "hlo";
        let program = sys::Program {
            struct_size: size_of::<sys::Program>(),
            extension_start: std::ptr::null_mut(),
            code: made.module.as_ptr().cast_mut().cast(),
            code_size: made.module.len(),
            format: format.as_ptr().cast(),
            format_size: format.len(),
        };
        let theirs = std::mem::replace(&mut args.program, &raw const program);
        let compiled = forward(on, args, options);
        args.program = theirs;
        compiled?;
        let inside = callable.collectives().count() as u64;
        tracing::debug!(program = module.name, inside, "collectives stay inside of a program");
        let mut counts = COUNTS.lock();
        counts.mixed += 1;
        counts.inside += inside;
        Ok((callable, made.same))
    }

    /// Forgets a program.
    pub fn forget(&self, executable: Opaque) {
        self.loaded.write().remove(&(executable as usize));
    }

    /// A caller has another handle of a program.
    pub fn named(&self, loaded: Opaque, executable: Opaque) {
        if let Some(known) = self.loaded.read().get(&(loaded as usize)) {
            self.named.lock().insert(executable as usize, known.clone());
        }
    }

    /// It has no longer.
    pub fn unnamed(&self, executable: Opaque) {
        self.named.lock().remove(&(executable as usize));
    }

    /// A program's bytes.
    pub fn serialize(
        &self,
        on: &Interposed,
        seen: &Presented,
        args: &mut sys::ExecutableSerialize,
    ) -> Result<(), Fault> {
        let function = sys::ExecutableSerialize::NAME;
        let refused = |why| InterposeError::NotSaved { function, slice: seen.name(), why };
        let known = self.named.lock().get(&(args.executable as usize)).cloned();
        let known = known.filter(|known| known.own);
        let known = known.ok_or_else(|| refused("programs other than those of podring's engine"))?;
        if !known.same {
            return Err(refused("programs whose loops or branches ask which rank they run on").into());
        }
        let mut theirs = sys::ExecutableSerialize { executable: args.executable, ..Default::default() };
        on.forward(&mut theirs)?;
        // SAFETY: the plugin's bytes, alive until its deleter runs below.
        let compiled = unsafe { bytes(theirs.serialized_bytes.cast(), theirs.serialized_bytes_size) };
        let saved = Saved { options: &known.options, module: &known.module, compiled }.encode();
        if let Some(delete) = theirs.deleter {
            // SAFETY: called once on what the plugin gave with it.
            unsafe { delete(theirs.backing) };
        }
        let backing = Box::new(saved);
        (args.serialized_bytes, args.serialized_bytes_size) = (backing.as_ptr().cast(), backing.len());
        args.backing = Box::into_raw(backing).cast();
        args.deleter = Some(delete_saved);
        Ok(())
    }

    /// A program from its bytes, for this process's chip.
    pub fn deserialize(
        &self,
        on: &Interposed,
        seen: &Presented,
        args: &mut sys::ExecutableDeserializeAndLoad,
    ) -> Result<(), Fault> {
        // What a framework has saved was not saved here, and nothing says that its groups are those of this job.
        if launching().is_none() {
            let (function, why) =
                (sys::ExecutableDeserializeAndLoad::NAME, "programs other than those of podring's engine");
            return Err(InterposeError::NotSaved { function, slice: seen.name(), why }.into());
        }
        let refused = |reason: String| InterposeError::Saved { reason };
        // SAFETY: the caller's bytes, as many as it says.
        let given = unsafe { bytes(args.serialized_executable.cast(), args.serialized_executable_size) };
        let saved = Saved::decode(given).map_err(|error| refused(error.to_string()))?;
        let mut asked = saved.options;
        if args.struct_size >= sys::DeserializeWithOptions::LEN {
            // SAFETY: the caller's struct is long enough to have them.
            let longer = unsafe { &*std::ptr::from_mut(args).cast::<sys::DeserializeWithOptions>() };
            if longer.options_size > 0 {
                // SAFETY: the caller's bytes, as many as it says.
                asked = unsafe { bytes(longer.options.cast(), longer.options_size) };
            }
        }
        let mesh = seen.mesh(asked)?;
        let ours = options::for_one(asked, u64::from(seen.rank()))?;
        let module = Module::decode(saved.module).map_err(|error| refused(error.to_string()))?;
        let (how, same) = match plan::read(&module, &mesh) {
            Ok(Program::Alone) => return Err(refused("it has no collective".to_owned()).into()),
            Ok(Program::Collective(plan)) => (How::Whole(*plan), true),
            Err(_) => {
                let (callable, made) = callable(on, seen, saved.module, &module, &mesh)?;
                (How::Calls(callable), made.same)
            }
        };
        let mut theirs = sys::DeserializeWithOptions {
            first: sys::ExecutableDeserializeAndLoad {
                struct_size: sys::DeserializeWithOptions::LEN,
                client: args.client,
                serialized_executable: saved.compiled.as_ptr().cast(),
                serialized_executable_size: saved.compiled.len(),
                ..Default::default()
            },
            options: ours.as_ptr().cast(),
            options_size: ours.len(),
        };
        on.forward(&mut theirs)?;
        args.loaded_executable = theirs.first.loaded_executable;
        let known = Known { how, options: asked.to_vec(), module: saved.module.to_vec(), same, own: true };
        self.loaded.write().insert(args.loaded_executable as usize, known.into());
        COUNTS.lock().loaded += 1;
        tracing::debug!(program = module.name, "a program was loaded, not compiled");
        Ok(())
    }

    /// Runs a program: a collective by the group, any other by the plugin.
    pub fn execute(
        &self,
        on: &Interposed,
        seen: &Presented,
        args: &mut sys::LoadedExecutableExecute,
    ) -> Result<(), Fault> {
        let known = self.loaded.read().get(&(args.executable as usize)).cloned();
        let Some(known) = known else { return on.forward(args) };
        let tell = |step: &Step, why: &str| refuse(seen.rank(), step, launching().as_deref().into(), why);
        match &known.how {
            How::Whole(plan) => {
                let ready = prepare(plan, args).inspect_err(|error| tell(&plan.step, &error.to_string()))?;
                play(on, seen, plan, ready, args)
            }
            How::Calls(callable) => {
                let (outcome, why) = callable.during(|| run(on, args));
                if let Some(why) = why {
                    // Whichever of its collectives this rank doesn't come to.
                    callable.collectives().for_each(|step| tell(step, &why));
                }
                outcome
            }
        }
    }
}

/// What a program calls, and the program that calls it.
fn callable(
    on: &Interposed,
    seen: &Presented,
    written: &[u8],
    module: &Module,
    mesh: &Mesh,
) -> Result<(Callable, Rewritten), InterposeError> {
    let refused = |why: String| InterposeError::Program { program: module.name.clone(), why };
    let first = Callable::first(written, mesh);
    let place = mesh.ranks.iter().position(|&rank| rank == seen.rank());
    let mut made = rewrite::rewrite(written, module, mesh, place, first).map_err(|error| refused(error.to_string()))?;
    if !made.calls.is_empty() {
        ffi::register(on).map_err(|error| refused(error.to_string()))?;
    }
    Ok((Callable::new(first, std::mem::take(&mut made.calls), seen.rank())?, made))
}

unsafe extern "C" fn delete_saved(backing: *mut c_void) {
    // SAFETY: from `serialize`, given back once.
    drop(unsafe { Box::from_raw(backing.cast::<Vec<u8>>()) });
}

/// Runs a program that calls collectives, to its end: so those of the next come behind it, on every rank. Also says what
/// went wrong, in whichever way the caller hears of it.
fn run(on: &Interposed, args: &mut sys::LoadedExecutableExecute) -> (Result<(), Fault>, Option<String>) {
    let mut own = std::ptr::null_mut();
    let asked = args.events;
    if asked.is_null() {
        args.events = &raw mut own;
    }
    let started = on.forward(args);
    let events = std::mem::replace(&mut args.events, asked);
    if let Err(fault) = started {
        let why = on.words(&fault);
        return (Err(fault), Some(why));
    }
    // SAFETY: the list for one device, which the plugin has filled: a virtual chip is alone in its process.
    let event = unsafe { events.read() };
    if event.is_null() {
        return (Ok(()), None);
    }
    let waited = on.forward(&mut sys::EventAwait { event, ..Default::default() });
    let why = waited.as_ref().err().map(|fault| on.words(fault));
    if asked.is_null() {
        let ended = on.forward(&mut sys::EventDestroy { event, ..Default::default() });
        return (ended.and(waited), why);
    }
    // The caller's event tells it of a failure, as do its buffers.
    if let Err(Fault::Theirs(error)) = waited {
        drop(on.take_message(error));
    }
    (Ok(()), why)
}

/// Destroys what was compiled: nobody else has it, and nobody shall run it.
fn discard(on: &Interposed, args: &mut sys::ClientCompile) -> Result<(), Fault> {
    let mut end = sys::LoadedExecutableDestroy { executable: args.executable, ..Default::default() };
    args.executable = std::ptr::null_mut();
    on.forward(&mut end)
}

fn forward(on: &Interposed, args: &mut sys::ClientCompile, options: &[u8]) -> Result<(), Fault> {
    let theirs = (args.compile_options, args.compile_options_size);
    (args.compile_options, args.compile_options_size) = (options.as_ptr().cast(), options.len());
    let compiled = on.forward(args);
    (args.compile_options, args.compile_options_size) = theirs;
    compiled
}

/// The module that XLA wrote into `folder`: an `xla.HloModuleProto`.
fn written(folder: &Path) -> Result<Vec<u8>, String> {
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
    for field in Fields(&bytes) {
        if let (MODULE, _, Some(module)) = field.map_err(|error| error.to_string())? {
            return Ok(module.to_vec());
        }
    }
    Err("it is empty".to_owned())
}

/// Field of `xla.HloProto`, as XLA writes it into files.
const MODULE: u64 = 1;

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
    /// Somebody else's, who outlives the buffer.
    lent: bool,
}

impl Held {
    fn new(bytes: usize) -> Result<Held, InterposeError> {
        let mut memory = std::ptr::null_mut();
        // SAFETY: a place for the result, a power of two, a size above zero.
        let failed = unsafe { libc::posix_memalign(&mut memory, 64, bytes.max(1)) } != 0;
        match NonNull::new(memory.cast()).filter(|_| !failed) {
            Some(data) => Ok(Held { data, bytes, lent: false }),
            None => Err(InterposeError::Failed {
                what: "a collective's result",
                why: format!("no memory of {bytes} bytes"),
            }),
        }
    }

    /// What the launch offers for the result `index`, or memory of its own.
    fn offered(launch: Option<&Launching>, index: Option<usize>, bytes: usize) -> Result<Held, InterposeError> {
        let offered = launch.zip(index).and_then(|(launch, index)| NonNull::new(launch.target(index, bytes)?));
        offered.map_or_else(|| Held::new(bytes), |data| Ok(Held { data, bytes, lent: true }))
    }

    fn view(&mut self) -> &mut [u8] {
        // SAFETY: this many bytes of its own; written by the group before they are read.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.bytes) }
    }

    fn into_buffer(self, shape: &Array) -> Result<Opaque, InterposeError> {
        let data = self.data.as_ptr();
        let release = if self.lent { leave } else { release };
        std::mem::forget(self);
        // SAFETY: 64-byte aligned, holds these elements, and nobody writes to it any more; `release` frees it, unless
        // it is lent.
        unsafe { memory::adopt(data.cast(), &shape.dims, shape.dtype, release, std::ptr::null_mut()) }
            .map_err(|why| InterposeError::Failed { what: "a collective's result", why })
    }
}

unsafe extern "C" fn release(memory: *mut c_void, _context: *mut c_void) {
    // SAFETY: from posix_memalign, released once.
    unsafe { libc::free(memory) };
}

unsafe extern "C" fn leave(_memory: *mut c_void, _context: *mut c_void) {}

impl Drop for Held {
    fn drop(&mut self) {
        if self.lent {
            return;
        }
        // SAFETY: from posix_memalign, freed once.
        unsafe { libc::free(self.data.as_ptr().cast()) };
    }
}

/// A collective's operands, and memory for its results.
struct Ready {
    inputs: Vec<*mut u8>,
    outputs: Vec<Held>,
    launch: Option<Arc<Launching>>,
}

/// What a collective needs, before anybody is met.
fn prepare(plan: &Plan, args: &sys::LoadedExecutableExecute) -> Result<Ready, InterposeError> {
    let failed = |what: &'static str, why: String| InterposeError::Failed { what, why };
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
        let found = unsafe { memory::of_buffer(buffer) }.map_err(|why| failed("a collective's operand", why))?;
        if found.dtype != Some(expected.dtype) || found.bytes < expected.bytes() {
            let got = format!("{} bytes of {:?}", found.bytes, found.dtype);
            return Err(failed("a collective's operand", format!("expected {expected:?}, got {got}")));
        }
        inputs.push(found.data.cast::<u8>());
    }
    let launch = launching();
    // An array that is a result as it stands may lie where the launch wants it.
    let result = |of: usize| plan.results.iter().position(|piece| piece.of == of && piece.is_whole(&plan.step));
    let outputs: Result<Vec<Held>, InterposeError> = plan
        .step
        .outputs
        .iter()
        .enumerate()
        .map(|(of, array)| Held::offered(launch.as_deref(), result(of), array.bytes()))
        .collect();
    Ok(Ready { inputs, outputs: outputs?, launch })
}

fn play(
    on: &Interposed,
    seen: &Presented,
    plan: &Plan,
    ready: Ready,
    args: &mut sys::LoadedExecutableExecute,
) -> Result<(), Fault> {
    let Ready { inputs, outputs, launch } = ready;
    let places: Vec<*mut u8> = outputs.iter().map(|held| held.data.as_ptr()).collect();
    meet(seen.rank(), &plan.step, &inputs, &places, launch.as_deref())?;

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
