//! The C function table of `pg/torch/podring.h`, and its translation into the core's terms.
//!
//! Layouts here mirror that header field by field. Every function is wrapped so that a panic becomes
//! PODRING_INTERNAL: nothing unwinds into C++.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use podring_collective::{Blocks, Collective, DType, Kind as Op, Layout, Part, Reduction, Tensor};
use podring_group::engine::DeviceCall;
use podring_group::{Config, Error, Keep, Kind, ProcessGroup, Runtime, State, Store, StoreError, Work};
use podring_interposer::memory;
use smallvec::SmallVec;

use crate::settings;
use crate::store_abi::{self, Kv};

/// PODRING_ABI.
pub const ABI: u32 = 1;
/// PODRING_CAPSULE.
pub const CAPSULE: &CStr = c"podring._core.abi";

const SYNC: u32 = 1;
const DEVICE: u32 = 2;
const CONJ: u32 = 1;
const NEG: u32 = 2;
const NO_REDUCTION: u8 = 255;
/// Room for a store's reason.
const WHY: usize = 1024;

#[repr(C)]
pub(crate) struct RawError {
    status: i32,
    message: *mut c_char,
}

pub(crate) type Interrupted = Option<unsafe extern "C" fn(*mut c_void) -> i32>;
type Sink = unsafe extern "C" fn(*mut c_void, *const u8, usize);

#[repr(C)]
#[derive(Clone, Copy)]
struct RawStore {
    ctx: *mut c_void,
    set: unsafe extern "C" fn(*mut c_void, *const c_char, *const u8, usize, *mut c_char, usize) -> i32,
    get: unsafe extern "C" fn(*mut c_void, *const c_char, Sink, *mut c_void, *mut c_char, usize) -> i32,
    check: unsafe extern "C" fn(*mut c_void, *const *const c_char, usize, *mut i32, *mut c_char, usize) -> i32,
    add: unsafe extern "C" fn(*mut c_void, *const c_char, i64, *mut i64, *mut c_char, usize) -> i32,
    release: unsafe extern "C" fn(*mut c_void),
}

#[repr(C)]
struct RawConfig {
    rank: u32,
    size: u32,
    name: *const c_char,
    global_ranks: *const u32,
    timeout_ms: i64,
    store: RawStore,
    interrupted: Interrupted,
    interrupted_ctx: *mut c_void,
}

#[repr(C)]
struct RawTensor {
    data: *mut c_void,
    sizes: *const i64,
    strides: *const i64,
    dims: u32,
    flags: u32,
}

#[repr(C)]
struct RawSide {
    tensors: *const RawTensor,
    n_tensors: u64,
    counts: *const u64,
    n_counts: u64,
}

#[repr(C)]
struct RawPart {
    dtype: u8,
    reduction: u8,
    factor: f64,
    inputs: RawSide,
    outputs: RawSide,
}

#[repr(C)]
struct RawCollective {
    kind: u32,
    root: i32,
    tag: u32,
    n_parts: u32,
    parts: *const RawPart,
    timeout_ms: i64,
    flags: u32,
}

#[repr(C)]
struct RawMemory {
    data: *mut c_void,
    bytes: u64,
    dtype: u8,
}

#[repr(C)]
struct RawSized {
    kind: u32,
    dtype: u8,
    reduction: u8,
    bytes: u64,
}

/// RawMemory's dtype for an element type that no collective knows.
const NO_DTYPE: u8 = 255;

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
    kv_open: unsafe extern "C" fn(*const store_abi::RawConfig, *mut *mut Kv, *mut RawError) -> i32,
    kv_clone: unsafe extern "C" fn(*const Kv) -> *mut Kv,
    kv_free: unsafe extern "C" fn(*mut Kv),
    kv_info: unsafe extern "C" fn(*const Kv, *mut store_abi::RawInfo),
    kv_call: unsafe extern "C" fn(*const Kv, *const store_abi::RawCall, *mut i64, *mut RawError) -> i32,
    device_client: unsafe extern "C" fn() -> *mut c_void,
    device_memory: unsafe extern "C" fn(*mut c_void, *mut RawMemory, *mut RawError) -> i32,
    device_adopt: unsafe extern "C" fn(
        *mut c_void,
        *const i64,
        u64,
        u8,
        memory::Release,
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
    group_create,
    group_abort,
    group_shutdown,
    group_free,
    group_error,
    group_set_timeout,
    group_timeout,
    group_sequence,
    group_monitored_barrier,
    post,
    work_wait,
    work_state,
    work_error,
    work_sequence,
    work_key,
    work_timeout,
    work_source,
    work_on_done,
    work_abort,
    work_free,
    drain,
    group_memory,
    kv_open: store_abi::open,
    kv_clone: store_abi::clone,
    kv_free: store_abi::free,
    kv_info: store_abi::info,
    kv_call: store_abi::call,
    device_client,
    device_memory,
    device_adopt,
    device_world,
    group_warm_up,
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

/// As [`guarded`], for the interposer, which says in words what a framework or a plugin refused.
fn guarded_device(error: *mut RawError, act: impl FnOnce() -> Result<(), String>) -> i32 {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(())) => 0,
        Ok(Err(refused)) => write_error(error, Kind::Unsupported as i32, &refused),
        Err(panic) => write_error(error, Kind::Internal as i32, &panicked(&*panic)),
    }
}

unsafe extern "C" fn device_client() -> *mut c_void {
    sheltered(std::ptr::null_mut(), memory::virtual_client)
}

unsafe extern "C" fn device_world(handle: *mut ProcessGroup) {
    // SAFETY: null or a live handle by the header.
    sheltered((), || podring_interposer::set_world(unsafe { handle.as_ref() }.cloned()));
}

unsafe extern "C" fn device_memory(buffer: *mut c_void, out: *mut RawMemory, error: *mut RawError) -> i32 {
    guarded_device(error, || {
        // SAFETY: a live buffer of the client by the header.
        let found = unsafe { memory::of_buffer(buffer) }?;
        let dtype = found.dtype.map_or(NO_DTYPE, |dtype| dtype as u8);
        // SAFETY: the caller's place for the answer.
        unsafe { out.write(RawMemory { data: found.data, bytes: found.bytes as u64, dtype }) };
        Ok(())
    })
}

unsafe extern "C" fn device_adopt(
    data: *mut c_void,
    sizes: *const i64,
    dims: u64,
    dtype: u8,
    release: memory::Release,
    context: *mut c_void,
    buffer: *mut *mut c_void,
    error: *mut RawError,
) -> i32 {
    guarded_device(error, || {
        let sizes = match dims {
            0 => &[],
            // SAFETY: that many sizes by the header.
            dims => unsafe { std::slice::from_raw_parts(sizes, dims as usize) },
        };
        let Some(dtype) = DType::from_code(dtype) else {
            // SAFETY: the header's promise to call it, also now.
            unsafe { release(data, context) };
            return Err(format!("unknown dtype {dtype}"));
        };
        // SAFETY: aligned memory that stays until `release` by the header.
        let made = unsafe { memory::adopt(data, sizes, dtype, release, context) }?;
        // SAFETY: the caller's place for the answer.
        unsafe { buffer.write(made) };
        Ok(())
    })
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

/// The launcher's store behind C functions. "One at a time" is kept by the lock.
struct ForeignStore(parking_lot::Mutex<RawStore>);

// SAFETY: the header promises that calls may come from any thread, one at a time; the lock sees to that.
unsafe impl Send for ForeignStore {}
// SAFETY: as above.
unsafe impl Sync for ForeignStore {}

impl Drop for ForeignStore {
    fn drop(&mut self) {
        let raw = self.0.get_mut();
        // SAFETY: called once, at the end.
        unsafe { (raw.release)(raw.ctx) }
    }
}

impl ForeignStore {
    fn call(
        &self,
        call: &'static str,
        key: &str,
        act: impl FnOnce(&RawStore, *const c_char, *mut c_char) -> i32,
    ) -> Result<(), StoreError> {
        let failed = |why: String| Err(StoreError { call, key: key.to_owned(), why });
        let Ok(name) = CString::new(key) else { return failed("a key can't contain NUL".into()) };
        let mut why: [c_char; WHY] = [0; WHY];
        if act(&self.0.lock(), name.as_ptr(), why.as_mut_ptr()) == 0 {
            return Ok(());
        }
        why[WHY - 1] = 0;
        // SAFETY: NUL-terminated by the store, or by the line above.
        failed(unsafe { CStr::from_ptr(why.as_ptr()) }.to_string_lossy().into_owned())
    }
}

unsafe extern "C" fn collect(ctx: *mut c_void, bytes: *const u8, len: usize) {
    // SAFETY: `ctx` is the vector passed in `get`; the bytes are the store's for this call.
    unsafe {
        let into = &mut *ctx.cast::<Vec<u8>>();
        if len > 0 {
            into.extend_from_slice(std::slice::from_raw_parts(bytes, len));
        }
    }
}

impl Store for ForeignStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.call("set", key, |raw, key, why| {
            // SAFETY: valid strings and buffers for the call.
            unsafe { (raw.set)(raw.ctx, key, value.as_ptr(), value.len(), why, WHY) }
        })
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, StoreError> {
        let mut value = Vec::new();
        self.call("get", key, |raw, key, why| {
            let into = std::ptr::from_mut(&mut value).cast();
            // SAFETY: as above; `collect` is called before this returns.
            unsafe { (raw.get)(raw.ctx, key, collect, into, why, WHY) }
        })?;
        Ok(value)
    }

    fn check(&self, keys: &[String]) -> Result<bool, StoreError> {
        let names: Vec<CString> = keys.iter().map(|key| CString::new(key.as_str()).unwrap_or_default()).collect();
        let pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let mut present = 0;
        self.call("check", keys.first().map_or("", String::as_str), |raw, _, why| {
            // SAFETY: as above.
            unsafe { (raw.check)(raw.ctx, pointers.as_ptr(), pointers.len(), &mut present, why, WHY) }
        })?;
        Ok(present != 0)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        let mut value = 0;
        self.call("add", key, |raw, key, why| {
            // SAFETY: as above.
            unsafe { (raw.add)(raw.ctx, key, amount, &mut value, why, WHY) }
        })?;
        Ok(value)
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

unsafe extern "C" fn group_create(raw: *const RawConfig, out: *mut *mut ProcessGroup, error: *mut RawError) -> i32 {
    guarded(error, || {
        crate::log::begin();
        // SAFETY: a valid config by the header.
        let raw = unsafe { &*raw };
        if raw.global_ranks.is_null() {
            podring_log::set_rank(raw.rank);
        }
        let store: Arc<dyn Store> = Arc::new(ForeignStore(parking_lot::Mutex::new(raw.store)));
        let global_ranks = (!raw.global_ranks.is_null()).then(|| {
            // SAFETY: `size` entries by the header.
            unsafe { std::slice::from_raw_parts(raw.global_ranks, raw.size as usize) }.to_vec()
        });
        let config = Config {
            rank: raw.rank,
            size: raw.size,
            name: text(raw.name),
            global_ranks,
            timeout: duration(raw.timeout_ms),
            store,
            // Only the default group needs one: others are functions of its members.
            rendezvous: if raw.global_ranks.is_null() { crate::rendezvous::road()? } else { None },
        };
        let group = ProcessGroup::form(
            &Runtime::global(settings::process)?,
            config,
            asks(raw.interrupted, raw.interrupted_ctx),
        )?;
        // SAFETY: the caller's place for the handle.
        unsafe { out.write(Box::into_raw(Box::new(group))) };
        Ok(())
    })
}

/// The group behind a handle.
///
/// # Safety
/// A handle from `group_create` that wasn't freed.
unsafe fn group<'a>(handle: *mut ProcessGroup) -> &'a ProcessGroup {
    // SAFETY: promised by the caller.
    unsafe { &*handle }
}

unsafe extern "C" fn group_abort(handle: *mut ProcessGroup, why: *const c_char) {
    // SAFETY: a live handle by the header.
    sheltered((), || unsafe { group(handle) }.abort(&text(why)));
}

unsafe extern "C" fn group_shutdown(handle: *mut ProcessGroup) {
    sheltered((), || {
        // SAFETY: a live handle by the header.
        let group = unsafe { group(handle) };
        group.shutdown();
        podring_interposer::end_world(group);
    });
}

unsafe extern "C" fn group_free(handle: *mut ProcessGroup) {
    if !handle.is_null() {
        // SAFETY: made by `group_create`, freed once.
        sheltered((), || drop(unsafe { Box::from_raw(handle) }));
    }
}

unsafe extern "C" fn group_error(handle: *mut ProcessGroup, error: *mut RawError) -> i32 {
    // SAFETY: a live handle by the header.
    guarded(error, || unsafe { group(handle) }.error().map_or(Ok(()), Err))
}

unsafe extern "C" fn group_set_timeout(handle: *mut ProcessGroup, ms: i64) {
    // SAFETY: a live handle by the header.
    sheltered((), || unsafe { group(handle) }.set_timeout(duration(ms)));
}

unsafe extern "C" fn group_timeout(handle: *mut ProcessGroup) -> i64 {
    // SAFETY: a live handle by the header.
    sheltered(0, || i64::try_from(unsafe { group(handle) }.timeout().as_millis()).unwrap_or(i64::MAX))
}

unsafe extern "C" fn group_sequence(handle: *mut ProcessGroup) -> u64 {
    // SAFETY: a live handle by the header.
    sheltered(0, || unsafe { group(handle) }.sequence())
}

unsafe extern "C" fn group_monitored_barrier(
    handle: *mut ProcessGroup,
    timeout_ms: i64,
    all: i32,
    interrupted: Interrupted,
    ctx: *mut c_void,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        let limit = (timeout_ms >= 0).then(|| duration(timeout_ms));
        // SAFETY: a live handle by the header.
        unsafe { group(handle) }.monitored_barrier(limit, all != 0, asks(interrupted, ctx))
    })
}

/// What C gave, as the core's own request. A part the core can't express is an error that names it.
///
/// # Safety
/// `raw` and all it points to must be valid, as the header describes.
unsafe fn collective(raw: &RawCollective, rank: u32) -> Result<Collective, Error> {
    let root = raw.root as u32;
    let invalid = |what: &'static str, expected: &str, got: String| Error::Invalid {
        rank,
        source: podring_collective::Invalid { op: "post", what, expected: expected.to_owned(), got },
    };
    let kind = match raw.kind {
        0 => Op::AllReduce,
        1 => Op::Broadcast { root },
        2 => Op::Reduce { root },
        3 => Op::AllGather,
        4 => Op::ReduceScatter,
        5 => Op::AllToAll,
        6 => Op::Gather { root },
        7 => Op::Scatter { root },
        8 => Op::Barrier,
        9 => Op::Send { to: root, tag: raw.tag },
        10 => Op::Recv { from: u32::try_from(raw.root).ok(), tag: raw.tag },
        other => return Err(invalid("kind", "0 to 10", other.to_string())),
    };
    let mut parts = SmallVec::new();
    for index in 0..raw.n_parts as usize {
        // SAFETY: `n_parts` parts by the header.
        let part = unsafe { &*raw.parts.add(index) };
        let dtype = DType::from_code(part.dtype)
            .ok_or_else(|| invalid("dtype code", "one of PodringDType", part.dtype.to_string()))?;
        let reduction = match part.reduction {
            NO_REDUCTION => None,
            code => Some(
                Reduction::from_code(code, part.factor)
                    .ok_or_else(|| invalid("reduction code", "0 to 8", code.to_string()))?,
            ),
        };
        // SAFETY: passed on.
        let (inputs, outputs) = unsafe { (side(&part.inputs), side(&part.outputs)) };
        parts.push(Part { dtype, reduction, inputs, outputs });
    }
    Ok(Collective { kind, parts })
}

/// # Safety
/// As for `collective`.
unsafe fn side(raw: &RawSide) -> Blocks {
    let tensors = (0..raw.n_tensors as usize).map(|index| {
        // SAFETY: `n_tensors` tensors, each with `dims` sizes and strides, by the header.
        unsafe {
            let tensor = &*raw.tensors.add(index);
            let dims = |from: *const i64| {
                if tensor.dims == 0 {
                    SmallVec::new()
                } else {
                    SmallVec::from_slice(std::slice::from_raw_parts(from, tensor.dims as usize))
                }
            };
            let layout = Layout {
                sizes: dims(tensor.sizes),
                strides: dims(tensor.strides),
                conj: tensor.flags & CONJ != 0,
                neg: tensor.flags & NEG != 0,
            };
            Tensor { data: tensor.data.cast(), layout }
        }
    });
    if raw.counts.is_null() {
        return Blocks::list(tensors);
    }
    // SAFETY: `n_counts` counts by the header.
    let counts = unsafe { std::slice::from_raw_parts(raw.counts, raw.n_counts as usize) };
    Blocks { tensors: tensors.collect(), counts: counts.iter().map(|&count| count as usize).collect() }
}

unsafe extern "C" fn post(
    handle: *mut ProcessGroup,
    raw: *const RawCollective,
    keep: *mut c_void,
    release: unsafe extern "C" fn(*mut c_void),
    out: *mut *mut Work,
    error: *mut RawError,
) -> i32 {
    // SAFETY: the header says that drop(keep) may be called once on any thread. From here on it will be.
    let keep = unsafe { Keep::new(keep, release) };
    guarded(error, || {
        // SAFETY: a live handle and a valid description by the header.
        let (group, raw) = unsafe { (group(handle), &*raw) };
        // SAFETY: as above.
        let collective = unsafe { collective(raw, group.rank()) }?;
        let timeout = (raw.timeout_ms > 0).then(|| duration(raw.timeout_ms));
        let work = if raw.flags & DEVICE != 0 && group.has_devices() {
            group.post_device(DeviceCall { keep: Some(keep), timeout, ..DeviceCall::staged(collective) })?
        } else {
            group.post(collective, Some(keep), timeout, raw.flags & SYNC != 0)?
        };
        // SAFETY: the caller's place for the handle.
        unsafe { out.write(Box::into_raw(Box::new(work))) };
        Ok(())
    })
}

unsafe extern "C" fn group_warm_up(
    handle: *mut ProcessGroup,
    calls: *const RawSized,
    n_calls: u64,
    ready: *mut u64,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        // SAFETY: a live handle by the header.
        let group = unsafe { group(handle) };
        let raw = match n_calls {
            0 => &[],
            // SAFETY: that many calls by the header.
            count => unsafe { std::slice::from_raw_parts(calls, count as usize) },
        };
        let calls = raw.iter().map(|raw| sized(raw, group)).collect::<Result<Vec<Collective>, Error>>()?;
        let mut done = 0;
        group.warm(&calls, |count, _| done = count)?;
        // SAFETY: the caller's place for the number.
        unsafe { ready.write(done as u64) };
        Ok(())
    })
}

/// A call to come, as the core's own.
fn sized(raw: &RawSized, group: &ProcessGroup) -> Result<Collective, Error> {
    let invalid = |what: &'static str, expected: &str, got: String| Error::Invalid {
        rank: group.rank(),
        source: podring_collective::Invalid { op: "warm_up", what, expected: expected.to_owned(), got },
    };
    let dtype = DType::from_code(raw.dtype)
        .ok_or_else(|| invalid("dtype code", "one of PodringDType", raw.dtype.to_string()))?;
    let kind = match raw.kind {
        0 => Op::AllReduce,
        1 => Op::Broadcast { root: 0 },
        2 => Op::Reduce { root: 0 },
        3 => Op::AllGather,
        4 => Op::ReduceScatter,
        5 => Op::AllToAll,
        8 => Op::Barrier,
        other => return Err(invalid("kind", "0 to 5, or 8", other.to_string())),
    };
    // PREMUL_SUM's factor is an operand of its program.
    let reduction = Reduction::from_code(raw.reduction, 1.0);
    if kind.reduces() && reduction.is_none() {
        return Err(invalid("reduction code", "0 to 8", raw.reduction.to_string()));
    }
    let bytes = usize::try_from(raw.bytes).ok().filter(|&bytes| bytes <= isize::MAX as usize / 2);
    let bytes = bytes.ok_or_else(|| invalid("bytes", "at most 2^62", raw.bytes.to_string()))?;
    Collective::sized(kind, dtype, reduction, bytes, group.size() as usize)
        .ok_or_else(|| invalid("kind", "no message", kind.name().to_owned()))
}

/// The work behind a handle.
///
/// # Safety
/// A handle from `post` that wasn't freed.
unsafe fn work<'a>(handle: *mut Work) -> &'a Work {
    // SAFETY: promised by the caller.
    unsafe { &*handle }
}

unsafe extern "C" fn work_wait(
    handle: *mut Work,
    timeout_ms: i64,
    interrupted: Interrupted,
    ctx: *mut c_void,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        let limit = (timeout_ms >= 0).then(|| duration(timeout_ms));
        // SAFETY: a live handle by the header.
        unsafe { work(handle) }.wait(limit, asks(interrupted, ctx))
    })
}

unsafe extern "C" fn work_state(handle: *mut Work) -> i32 {
    // SAFETY: a live handle by the header.
    match unsafe { work(handle) }.state() {
        State::Pending => 0,
        State::Done => 1,
        State::Failed => 2,
    }
}

unsafe extern "C" fn work_error(handle: *mut Work, error: *mut RawError) -> i32 {
    // SAFETY: a live handle by the header.
    guarded(error, || unsafe { work(handle) }.error().map_or(Ok(()), Err))
}

unsafe extern "C" fn work_sequence(handle: *mut Work) -> u64 {
    // SAFETY: a live handle by the header.
    unsafe { work(handle) }.sequence()
}

unsafe extern "C" fn work_key(handle: *mut Work) -> u64 {
    // SAFETY: a live handle by the header.
    unsafe { work(handle) }.key()
}

unsafe extern "C" fn work_timeout(handle: *mut Work) -> i64 {
    // SAFETY: a live handle by the header.
    i64::try_from(unsafe { work(handle) }.timeout().as_millis()).unwrap_or(i64::MAX)
}

unsafe extern "C" fn work_source(handle: *mut Work) -> i32 {
    // SAFETY: a live handle by the header.
    unsafe { work(handle) }.source().map_or(-1, |rank| rank as i32)
}

/// A callback and its context, movable to the thread that calls it.
struct Done(unsafe extern "C" fn(*mut c_void), *mut c_void);

// SAFETY: the header says that it may be called on any thread.
unsafe impl Send for Done {}

impl Done {
    fn call(self) {
        // SAFETY: called once, as the header says.
        unsafe { (self.0)(self.1) }
    }
}

unsafe extern "C" fn work_on_done(handle: *mut Work, function: unsafe extern "C" fn(*mut c_void), ctx: *mut c_void) {
    let done = Done(function, ctx);
    // SAFETY: a live handle by the header.
    sheltered((), || unsafe { work(handle) }.on_end(Box::new(move || done.call())));
}

unsafe extern "C" fn work_abort(handle: *mut Work) {
    // SAFETY: a live handle by the header.
    sheltered((), || unsafe { work(handle) }.abort());
}

unsafe extern "C" fn work_free(handle: *mut Work) {
    if !handle.is_null() {
        // SAFETY: made by `post`, freed once.
        sheltered((), || drop(unsafe { Box::from_raw(handle) }));
    }
}

unsafe extern "C" fn drain(timeout_ms: i64) -> i32 {
    sheltered(1, || i32::from(!Runtime::drain(duration(timeout_ms))))
}

unsafe extern "C" fn group_memory(
    handle: *mut ProcessGroup,
    each: unsafe extern "C" fn(*mut c_void, *const c_char, u64),
    ctx: *mut c_void,
) {
    sheltered((), || {
        // SAFETY: a live handle by the header.
        for (name, bytes) in unsafe { group(handle) }.memory() {
            // SAFETY: the callback of the caller, with a NUL-terminated name.
            unsafe { each(ctx, name.as_ptr(), bytes) };
        }
    });
}
