//! The C function table of `pg/torch/podring.h`, and its translation into the core's terms.
//!
//! Layouts here mirror that header field by field. Every function is wrapped so that a panic becomes
//! PODRING_INTERNAL: nothing unwinds into C++.

mod call;
mod device;
mod group;
mod kv;
mod store;
mod work;

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use podring_group::{Error, Kind, ProcessGroup, Work};
use podring_interposer::memory::Release;

use call::{RawCollective, RawSized};
use device::RawMemory;
use group::RawConfig;
use kv::Kv;

/// PODRING_ABI.
pub const ABI: u32 = 1;
/// PODRING_CAPSULE.
pub const CAPSULE: &CStr = c"podring._core.abi";

#[repr(C)]
pub(crate) struct RawError {
    status: i32,
    message: *mut c_char,
}

pub(crate) type Interrupted = Option<unsafe extern "C" fn(*mut c_void) -> i32>;

/// The table. Its address goes into the capsule.
#[repr(C)]
pub(crate) struct Core {
    abi: u32,
    size: u32,
    version: *const c_char,
    error_free: unsafe extern "C" fn(*mut RawError),
    group_create: unsafe extern "C" fn(*const RawConfig, *mut *mut ProcessGroup, *mut RawError) -> i32,
    group_abort: unsafe extern "C" fn(*mut ProcessGroup, *const c_char),
    group_shutdown: unsafe extern "C" fn(*mut ProcessGroup),
    group_free: unsafe extern "C" fn(*mut ProcessGroup),
    group_error: unsafe extern "C" fn(*mut ProcessGroup, *mut RawError) -> i32,
    group_set_timeout: unsafe extern "C" fn(*mut ProcessGroup, i64),
    group_timeout: unsafe extern "C" fn(*mut ProcessGroup) -> i64,
    group_sequence: unsafe extern "C" fn(*mut ProcessGroup) -> u64,
    group_monitored_barrier:
        unsafe extern "C" fn(*mut ProcessGroup, i64, i32, Interrupted, *mut c_void, *mut RawError) -> i32,
    post: unsafe extern "C" fn(
        *mut ProcessGroup,
        *const RawCollective,
        *mut c_void,
        unsafe extern "C" fn(*mut c_void),
        *mut *mut Work,
        *mut RawError,
    ) -> i32,
    work_wait: unsafe extern "C" fn(*mut Work, i64, Interrupted, *mut c_void, *mut RawError) -> i32,
    work_state: unsafe extern "C" fn(*mut Work) -> i32,
    work_error: unsafe extern "C" fn(*mut Work, *mut RawError) -> i32,
    work_sequence: unsafe extern "C" fn(*mut Work) -> u64,
    work_key: unsafe extern "C" fn(*mut Work) -> u64,
    work_timeout: unsafe extern "C" fn(*mut Work) -> i64,
    work_source: unsafe extern "C" fn(*mut Work) -> i32,
    work_on_done: unsafe extern "C" fn(*mut Work, unsafe extern "C" fn(*mut c_void), *mut c_void),
    work_abort: unsafe extern "C" fn(*mut Work),
    work_free: unsafe extern "C" fn(*mut Work),
    drain: unsafe extern "C" fn(i64) -> i32,
    group_memory:
        unsafe extern "C" fn(*mut ProcessGroup, unsafe extern "C" fn(*mut c_void, *const c_char, u64), *mut c_void),
    kv_open: unsafe extern "C" fn(*const kv::RawConfig, *mut *mut Kv, *mut RawError) -> i32,
    kv_clone: unsafe extern "C" fn(*const Kv) -> *mut Kv,
    kv_free: unsafe extern "C" fn(*mut Kv),
    kv_info: unsafe extern "C" fn(*const Kv, *mut kv::RawInfo),
    kv_call: unsafe extern "C" fn(*const Kv, *const kv::RawCall, *mut i64, *mut RawError) -> i32,
    device_client: unsafe extern "C" fn() -> *mut c_void,
    device_memory: unsafe extern "C" fn(*mut c_void, *mut RawMemory, *mut RawError) -> i32,
    device_adopt: unsafe extern "C" fn(
        *mut c_void,
        *const i64,
        u64,
        u8,
        Release,
        *mut c_void,
        *mut *mut c_void,
        *mut RawError,
    ) -> i32,
    device_world: unsafe extern "C" fn(*mut ProcessGroup),
    group_warm_up: unsafe extern "C" fn(*mut ProcessGroup, *const RawSized, u64, *mut u64, *mut RawError) -> i32,
}

// SAFETY: function pointers and a pointer to a static string.
unsafe impl Sync for Core {}

/// The one table of the process.
pub(crate) static CORE: Core = Core {
    abi: ABI,
    size: size_of::<Core>() as u32,
    version: concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast(),
    error_free,
    group_create: group::group_create,
    group_abort: group::group_abort,
    group_shutdown: group::group_shutdown,
    group_free: group::group_free,
    group_error: group::group_error,
    group_set_timeout: group::group_set_timeout,
    group_timeout: group::group_timeout,
    group_sequence: group::group_sequence,
    group_monitored_barrier: group::group_monitored_barrier,
    post: call::post,
    work_wait: work::work_wait,
    work_state: work::work_state,
    work_error: work::work_error,
    work_sequence: work::work_sequence,
    work_key: work::work_key,
    work_timeout: work::work_timeout,
    work_source: work::work_source,
    work_on_done: work::work_on_done,
    work_abort: work::work_abort,
    work_free: work::work_free,
    drain: group::drain,
    group_memory: group::group_memory,
    kv_open: kv::open,
    kv_clone: kv::clone,
    kv_free: kv::free,
    kv_info: kv::info,
    kv_call: kv::call,
    device_client: device::device_client,
    device_memory: device::device_memory,
    device_adopt: device::device_adopt,
    device_world: device::device_world,
    group_warm_up: call::group_warm_up,
};

pub(crate) fn write_error(out: *mut RawError, status: i32, message: &str) -> i32 {
    let clean: Vec<u8> = message.bytes().filter(|&byte| byte != 0).collect();
    let text = CString::new(clean).unwrap_or_default();
    if !out.is_null() {
        // SAFETY: the caller gave a PodringError to write to.
        unsafe { out.write(RawError { status, message: text.into_raw() }) };
    }
    status
}

fn panicked(panic: &(dyn Any + Send)) -> String {
    let said = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("podring panicked: {}; this is a bug", said.unwrap_or("no message"))
}

/// Runs `act`; its error, or its panic, becomes a status and a text.
fn guarded(error: *mut RawError, act: impl FnOnce() -> Result<(), Error>) -> i32 {
    shielded(error, || match act() {
        Ok(()) => 0,
        Err(failed) => write_error(error, failed.kind() as i32, &failed.to_string()),
    })
}

/// Runs `act`, which gives a status; its panic becomes one.
pub(crate) fn shielded(error: *mut RawError, act: impl FnOnce() -> i32) -> i32 {
    catch_unwind(AssertUnwindSafe(act))
        .unwrap_or_else(|panic| write_error(error, Kind::Internal as i32, &panicked(&*panic)))
}

/// Runs `act`; a panic gives `otherwise`.
fn sheltered<R>(otherwise: R, act: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or(otherwise)
}

unsafe extern "C" fn error_free(error: *mut RawError) {
    // SAFETY: a PodringError that this core wrote, or an empty one.
    unsafe {
        if let Some(error) = error.as_mut()
            && !error.message.is_null()
        {
            drop(CString::from_raw(error.message));
            error.message = std::ptr::null_mut();
        }
    }
}

fn asks(interrupted: Interrupted, ctx: *mut c_void) -> impl FnMut() -> bool {
    // SAFETY: the header lets the core call it while it waits, on the waiting thread.
    move || interrupted.is_some_and(|ask| unsafe { ask(ctx) != 0 })
}

fn duration(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// `None` for null and for nothing.
pub(crate) fn optional_text(pointer: *const c_char) -> Option<String> {
    Some(text(pointer)).filter(|text| !text.is_empty())
}

pub(crate) fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: a NUL-terminated string by the header.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
