//! Collectives in the middle of a program: there a call of ours stands in their place, by XLA's foreign function
//! interface, which its CPU plugin offers as an extension of PJRT's.
//!
//! Laid out by hand from XLA's `ffi/api/c_api.h` (0.3 was read; it grows at the ends of structs only) and
//! `pjrt_c_api_ffi_extension.h`.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};

use parking_lot::{Mutex, RwLock};
use podring_ici::engine::{Launching, launching};

use crate::error::InterposeError;
use crate::meet::meet;
use crate::step::Step;
use crate::sys::{ExtensionBase, Opaque};
use crate::table::Interposed;

/// The function's name in programs.
pub const TARGET: &str = "podring.collective";
/// Its attribute: which of [`STEPS`] it is.
pub const INDEX: &str = "index";

/// A collective of a program, and this process's rank.
struct Placed {
    step: Step,
    rank: u32,
    launch: Launch,
}

/// The launch that a program runs in, for its calls, which come on other threads.
type Launch = Arc<Mutex<Option<Arc<Launching>>>>;

static STEPS: LazyLock<RwLock<HashMap<i64, Arc<Placed>>>> = LazyLock::new(RwLock::default);
static NEXT: AtomicI64 = AtomicI64::new(1);

/// The collectives of one program: callable by their numbers until this is dropped.
pub struct Callable {
    numbers: std::ops::Range<i64>,
    launch: Launch,
}

impl Callable {
    /// Numbers for as many collectives; what they are comes with [`Callable::fill`].
    pub fn reserve(count: usize) -> Callable {
        let first = NEXT.fetch_add(count as i64, Ordering::Relaxed);
        Callable { numbers: first..first + count as i64, launch: Launch::default() }
    }

    /// The first number.
    pub fn first(&self) -> i64 {
        self.numbers.start
    }

    /// How many.
    pub fn count(&self) -> usize {
        (self.numbers.end - self.numbers.start) as usize
    }

    /// Says what they are, in order.
    pub fn fill(&self, steps: Vec<Step>, rank: u32) {
        let placed = steps.into_iter().map(|step| Arc::new(Placed { step, rank, launch: self.launch.clone() }));
        STEPS.write().extend(self.numbers.clone().zip(placed));
    }

    /// Runs `act`, which runs the program, as the launch that this thread is in.
    pub fn during<R>(&self, act: impl FnOnce() -> R) -> R {
        *self.launch.lock() = launching();
        let result = act();
        *self.launch.lock() = None;
        result
    }
}

impl Drop for Callable {
    fn drop(&mut self) {
        let mut steps = STEPS.write();
        self.numbers.clone().for_each(|index| drop(steps.remove(&index)));
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
    let placed = STEPS.read().get(&index).cloned().ok_or_else(|| failed("the program is destroyed"))?;
    let (inputs, outputs) = (placed.step.inputs.len(), placed.step.outputs.len());
    // Behind both there may be the value that orders the calls.
    match (arguments.get(..inputs), results.get(..outputs)) {
        (Some(arguments), Some(results)) => {
            let launch = placed.launch.lock().clone();
            meet(placed.rank, &placed.step, arguments, results, launch.as_deref())
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
}
