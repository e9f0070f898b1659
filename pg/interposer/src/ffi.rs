//! Collectives in the middle of a program: there a call of ours stands in their place, by XLA's foreign function
//! interface, which its CPU plugin offers as an extension of PJRT's.
//!
//! Laid out by hand from XLA's `ffi/api/c_api.h` (0.3 was read; it grows at the ends of structs only) and
//! `pjrt_c_api_ffi_extension.h`.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, LazyLock, OnceLock, Weak};

use parking_lot::{Mutex, RwLock};
use podring_ici::engine::{Launching, launching};
use sha2::{Digest as _, Sha256};

use crate::error::InterposeError;
use crate::meet::meet;
use crate::rewrite::Call;
use crate::step::{Mesh, Step};
use crate::sys::{ExtensionBase, Opaque};
use crate::table::Interposed;

/// The function's name in programs.
pub const TARGET: &str = "podring.collective";
/// Its attribute: which of [`CALLS`] it is.
pub const INDEX: &str = "index";

/// A call of a program, and this process's rank.
struct Placed {
    call: Call,
    rank: u32,
    launch: Launch,
}

/// The launch that a program runs in, for its calls, which come on other threads.
type Launch = Arc<Mutex<Option<Arc<Launching>>>>;

static CALLS: LazyLock<RwLock<HashMap<i64, Arc<Placed>>>> = LazyLock::new(RwLock::default);
static PROGRAMS: LazyLock<Mutex<HashMap<i64, Weak<Numbered>>>> = LazyLock::new(Mutex::default);

/// What one program calls: callable by its numbers until this is dropped.
///
/// The numbers stand in the compiled program, which other ranks may have loaded from this one's bytes. So they follow
/// from the program, and whoever loads it twice has it once.
pub struct Callable(Arc<Numbered>);

struct Numbered {
    first: i64,
    calls: Vec<Call>,
    launch: Launch,
    /// Held while it runs: its calls find the launch by the program.
    running: Mutex<()>,
}

/// Calls of one program.
const MOST: usize = 1 << 16;

impl Callable {
    /// The number of a program's first call; the others follow.
    pub fn first(module: &[u8], mesh: &Mesh) -> i64 {
        let mut hash = Sha256::new();
        for number in [mesh.replicas, mesh.partitions] {
            hash.update((number as u64).to_le_bytes());
        }
        mesh.ranks.iter().for_each(|rank| hash.update(rank.to_le_bytes()));
        hash.update(module);
        let digest = hash.finalize();
        let head = digest.iter().take(8).fold(0u64, |number, &byte| number << 8 | u64::from(byte));
        (head >> 1) as i64 & -(MOST as i64)
    }

    /// The calls of a program, in the order of their numbers.
    pub fn new(first: i64, calls: Vec<Call>, rank: u32) -> Result<Callable, InterposeError> {
        let failed = |why: String| InterposeError::Failed { what: "calls out of a program", why };
        if calls.len() > MOST {
            return Err(failed(format!("expected at most {MOST}, got {}", calls.len())));
        }
        let mut programs = PROGRAMS.lock();
        if let Some(known) = programs.get(&first).and_then(Weak::upgrade) {
            // Its end may be here.
            drop(programs);
            // Else two programs have one digest.
            return if known.calls == calls {
                Ok(Callable(known))
            } else {
                Err(failed("their numbers are taken".into()))
            };
        }
        let launch = Launch::default();
        let placed = |call: &Call| Arc::new(Placed { call: call.clone(), rank, launch: launch.clone() });
        CALLS.write().extend((first..).zip(calls.iter().map(placed)));
        let numbered = Arc::new(Numbered { first, calls, launch, running: Mutex::default() });
        programs.insert(first, Arc::downgrade(&numbered));
        Ok(Callable(numbered))
    }

    /// The collectives among them.
    pub fn collectives(&self) -> impl Iterator<Item = &Step> {
        self.0.calls.iter().filter_map(|call| match call {
            Call::Collective(step) => Some(step),
            Call::Place(_) => None,
        })
    }

    /// Runs `act`, which runs the program, as the launch that this thread is in.
    pub fn during<R>(&self, act: impl FnOnce() -> R) -> R {
        let _alone = self.0.running.lock();
        *self.0.launch.lock() = launching();
        let result = act();
        *self.0.launch.lock() = None;
        result
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        let mut programs = PROGRAMS.lock();
        // Loaded anew meanwhile: then the numbers are another's.
        if programs.get(&self.first).is_some_and(|known| known.strong_count() == 0) {
            programs.remove(&self.first);
            let mut known = CALLS.write();
            (self.first..).take(self.calls.len()).for_each(|index| drop(known.remove(&index)));
        }
    }
}

/// `FFI` among the extensions of PJRT.
const KIND: c_int = 5;

#[repr(C)]
struct Extension {
    base: ExtensionBase,
    type_register: Opaque,
    user_data_add: Opaque,
    register_handler: Option<unsafe extern "C" fn(*mut c_void) -> Opaque>,
}

/// Arguments of `register_handler`: those of 0.115, and of 0.81.
#[repr(C)]
struct Register {
    struct_size: usize,
    target: *const c_char,
    target_size: usize,
    handler: *const c_void,
    platform: *const c_char,
    platform_size: usize,
    traits: c_int,
}

#[repr(C)]
struct OlderRegister {
    struct_size: usize,
    target: *const c_char,
    target_size: usize,
    /// 1: typed.
    api_version: c_int,
    handler: *const c_void,
    platform: *const c_char,
    platform_size: usize,
    traits: c_int,
}

#[repr(C)]
struct Version {
    struct_size: usize,
    extension_start: Opaque,
    major: c_int,
    minor: c_int,
}

#[repr(C)]
struct Api {
    struct_size: usize,
    extension_start: Opaque,
    version: Version,
    internal: Opaque,
    error_create: unsafe extern "C" fn(*mut ErrorCreate) -> Opaque,
}

#[repr(C)]
struct ErrorCreate {
    struct_size: usize,
    extension_start: Opaque,
    message: *const c_char,
    code: c_int,
}

/// An extension of a call that only asks what the function was made for.
#[repr(C)]
struct MetadataExtension {
    base: ExtensionBase,
    metadata: *mut Metadata,
}

#[repr(C)]
struct Metadata {
    struct_size: usize,
    version: Version,
    traits: u32,
}

/// Arguments, results or attributes of a call.
#[repr(C)]
struct List {
    struct_size: usize,
    extension_start: Opaque,
    size: i64,
    kinds: *const c_int,
    values: *const Opaque,
}

#[repr(C)]
struct Attributes {
    struct_size: usize,
    extension_start: Opaque,
    size: i64,
    kinds: *const c_int,
    names: *const *const Span,
    values: *const Opaque,
}

#[repr(C)]
struct Span {
    data: *const u8,
    size: usize,
}

#[repr(C)]
struct Scalar {
    dtype: c_int,
    value: *const i64,
}

#[repr(C)]
struct Buffer {
    struct_size: usize,
    extension_start: Opaque,
    dtype: c_int,
    data: *mut u8,
}

#[repr(C)]
struct Frame {
    struct_size: usize,
    extension_start: *const ExtensionBase,
    api: *const Api,
    context: Opaque,
    stage: c_int,
    arguments: List,
    results: List,
    attributes: Attributes,
}

const METADATA: c_int = 1;
const EXECUTE: c_int = 3;
const SCALAR: c_int = 3;
const INTERNAL: c_int = 13;

/// The interface's minor version that the function says it was made for, where the asker doesn't say which is its own.
static MINOR: AtomicI32 = AtomicI32::new(0);
/// The highest that is offered.
const LAST_MINOR: i32 = 32;

/// Makes the function known to the plugin, once.
pub fn register(on: &Interposed) -> Result<(), InterposeError> {
    static DONE: OnceLock<Result<(), InterposeError>> = OnceLock::new();
    DONE.get_or_init(|| try_register(on)).clone()
}

fn try_register(on: &Interposed) -> Result<(), InterposeError> {
    let failed = |why: String| InterposeError::Failed { what: "calls out of a program", why };
    let extension = on.extension(KIND).ok_or_else(|| failed("the CPU plugin has no FFI extension".to_owned()))?;
    // SAFETY: the extension of this kind, which has been as long since its first version.
    let function = unsafe { extension.cast::<Extension>().as_ref() }.register_handler;
    let function = function.ok_or_else(|| failed("the CPU plugin registers no functions".to_owned()))?;
    let platform = "Host";
    let handler = call as *const c_void;
    let mut args = Register {
        // A plugin that wants the older arguments refuses these by their size, which is smaller.
        struct_size: std::mem::offset_of!(Register, traits) + size_of::<c_int>(),
        target: TARGET.as_ptr().cast(),
        target_size: TARGET.len(),
        handler,
        platform: platform.as_ptr().cast(),
        platform_size: platform.len(),
        traits: 0,
    };
    let mut older = OlderRegister {
        struct_size: size_of::<OlderRegister>(),
        target: args.target,
        target_size: args.target_size,
        api_version: 1,
        handler,
        platform: args.platform,
        platform_size: args.platform_size,
        traits: 0,
    };
    let mut why = String::new();
    let mut chosen = (&raw mut args).cast::<c_void>();
    // Runtimes accept functions of their own version, some of older ones too.
    let mut minor = 0;
    while minor <= LAST_MINOR {
        MINOR.store(minor, Ordering::Relaxed);
        // SAFETY: this function's arguments, as long as they say; the name and the handler live for ever.
        let error = unsafe { function(chosen) };
        if error.is_null() {
            return Ok(());
        }
        why = on.take_message(error);
        let other = (&raw mut older).cast();
        if why.contains("size: expected") && chosen != other {
            chosen = other;
        } else {
            minor += 1;
        }
    }
    Err(failed(why))
}

/// What programs call.
unsafe extern "C" fn call(frame: *mut Frame) -> Opaque {
    // SAFETY: a call's frame, alive for the call.
    let frame = unsafe { &*frame };
    // SAFETY: null, or the head of an extension.
    if let Some(extension) = unsafe { frame.extension_start.as_ref() }
        && extension.kind == METADATA
    {
        // SAFETY: an extension of this kind; the metadata are the asker's, to be filled in.
        unsafe { describe(frame, &mut *(*frame.extension_start.cast::<MetadataExtension>()).metadata) };
        return std::ptr::null_mut();
    }
    if frame.stage != EXECUTE {
        return std::ptr::null_mut();
    }
    // SAFETY: the frame of a call of our function in a program that this crate wrote.
    let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { execute(frame) }));
    let said = match outcome {
        Ok(Ok(())) => return std::ptr::null_mut(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => InterposeError::Panicked { function: TARGET, reason: "while a program ran".to_owned() }.to_string(),
    };
    let message = CString::new(said.replace('\0', " ")).unwrap_or_default();
    let mut args = ErrorCreate {
        struct_size: size_of::<ErrorCreate>(),
        extension_start: std::ptr::null_mut(),
        message: message.as_ptr(),
        code: INTERNAL,
    };
    // SAFETY: the caller's table, and a message that is copied.
    unsafe { ((*frame.api).error_create)(&raw mut args) }
}

/// # Safety
/// The frame is that of a question.
unsafe fn describe(frame: &Frame, metadata: &mut Metadata) {
    // SAFETY: null, or the caller's table.
    let (major, minor) = match unsafe { frame.api.as_ref() } {
        Some(api) => (api.version.major, api.version.minor),
        None => (0, MINOR.load(Ordering::Relaxed)),
    };
    (metadata.version.major, metadata.version.minor) = (major, minor);
    metadata.traits = 0;
}

/// # Safety
/// The frame is that of a call in a program that `rewrite` wrote.
unsafe fn execute(frame: &Frame) -> Result<(), InterposeError> {
    let failed = |why: &str| InterposeError::Failed { what: "a collective", why: why.to_owned() };
    // SAFETY: the frame's own lists.
    let (index, arguments, results) =
        unsafe { (number(&frame.attributes), places(&frame.arguments), places(&frame.results)) };
    let index = index.ok_or_else(|| failed("the call has no number"))?;
    let placed = CALLS.read().get(&index).cloned().ok_or_else(|| failed("the program is destroyed"))?;
    let step = match &placed.call {
        Call::Collective(step) => step,
        Call::Place(number) => {
            let Some(&result) = results.first() else { return Err(failed("the call has no result")) };
            // SAFETY: the memory of the call's result, one number of 32 bits; XLA aligns its buffers.
            unsafe { result.cast::<u32>().write(*number) };
            return Ok(());
        }
    };
    let (inputs, outputs) = (step.inputs.len(), step.outputs.len());
    // Behind both there may be the value that orders the calls.
    match (arguments.get(..inputs), results.get(..outputs)) {
        (Some(arguments), Some(results)) => {
            let launch = placed.launch.lock().clone();
            meet(placed.rank, step, arguments, results, launch.as_deref())
        }
        _ => Err(failed("the call has too few arguments or results")),
    }
}

/// # Safety
/// A list of buffers as long as it says.
unsafe fn places(list: &List) -> Vec<*mut u8> {
    // SAFETY: the caller's promise.
    (0..list.size as usize).map(|index| unsafe { (*(*list.values.add(index)).cast::<Buffer>()).data }).collect()
}

/// # Safety
/// A list as long as it says.
unsafe fn number(attributes: &Attributes) -> Option<i64> {
    (0..attributes.size as usize).find_map(|index| {
        // SAFETY: the caller's promise; a scalar of this name is a 64-bit number, as `rewrite` wrote it.
        unsafe {
            let name = &**attributes.names.add(index);
            let name = std::slice::from_raw_parts(name.data, name.size);
            (name == INDEX.as_bytes() && *attributes.kinds.add(index) == SCALAR)
                .then(|| (*(*attributes.values.add(index)).cast::<Scalar>()).value.read())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_headers() {
        assert_eq!(std::mem::offset_of!(Register, traits), 48);
        assert_eq!(std::mem::offset_of!(OlderRegister, traits), 56);
        assert_eq!(size_of::<Extension>(), 48);
        assert_eq!(size_of::<Version>(), 24);
        assert_eq!(std::mem::offset_of!(Api, error_create), 48);
        assert_eq!(std::mem::offset_of!(Frame, arguments), 40);
        assert_eq!(std::mem::offset_of!(Frame, attributes), 120);
        assert_eq!(std::mem::offset_of!(Buffer, data), 24);
    }
    #[test]
    fn numbers_follow_from_the_program_and_go_with_its_last_holder() {
        let mesh = Mesh { replicas: 1, partitions: 2, ranks: vec![0, 1] };
        let first = Callable::first(b"module", &mesh);
        assert!(first >= 0 && first % MOST as i64 == 0);
        assert_eq!(first, Callable::first(b"module", &mesh));
        assert_ne!(first, Callable::first(b"another", &mesh));
        assert_ne!(first, Callable::first(b"module", &Mesh { ranks: vec![1, 0], ..mesh }));
        let calls = vec![Call::Place(3), Call::Place(4)];
        let known = |number: i64| CALLS.read().contains_key(&number);
        let one = Callable::new(first, calls.clone(), 0).unwrap();
        let two = Callable::new(first, calls, 0).unwrap();
        assert!(Callable::new(first, vec![Call::Place(5)], 0).is_err());
        drop(one);
        assert!(known(first) && known(first + 1));
        drop(two);
        assert!(!known(first) && !known(first + 1) && !PROGRAMS.lock().contains_key(&first));
        for _ in 0..1000 {
            drop(Callable::new(first, vec![Call::Place(5)], 0).unwrap());
        }
        assert!(!known(first));
    }
}
