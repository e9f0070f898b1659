//! Groups: `group_*`.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use podring_group::{Config, ProcessGroup, Runtime, Store};

use super::store::{ForeignStore, RawStore};
use super::{Interrupted, RawError, asks, duration, guarded, sheltered, text};
use crate::settings;

#[repr(C)]
pub(super) struct RawConfig {
    rank: u32,
    size: u32,
    name: *const c_char,
    global_ranks: *const u32,
    timeout_ms: i64,
    store: RawStore,
    interrupted: Interrupted,
    interrupted_ctx: *mut c_void,
}

pub(super) unsafe extern "C" fn group_create(
    raw: *const RawConfig,
    out: *mut *mut ProcessGroup,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        crate::log::begin();
        // SAFETY: a valid config by the header.
        let raw = unsafe { &*raw };
        if raw.global_ranks.is_null() {
            podring_log::set_rank(raw.rank);
        }
        let store: Arc<dyn Store> = Arc::new(ForeignStore::new(raw.store));
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
pub(super) unsafe fn group<'a>(handle: *mut ProcessGroup) -> &'a ProcessGroup {
    // SAFETY: promised by the caller.
    unsafe { &*handle }
}

pub(super) unsafe extern "C" fn group_abort(handle: *mut ProcessGroup, why: *const c_char) {
    // SAFETY: a live handle by the header.
    sheltered((), || unsafe { group(handle) }.abort(&text(why)));
}

pub(super) unsafe extern "C" fn group_shutdown(handle: *mut ProcessGroup) {
    sheltered((), || {
        // SAFETY: a live handle by the header.
        let group = unsafe { group(handle) };
        group.shutdown();
        podring_interposer::end_world(group);
    });
}

pub(super) unsafe extern "C" fn group_free(handle: *mut ProcessGroup) {
    if !handle.is_null() {
        // SAFETY: made by `group_create`, freed once.
        sheltered((), || drop(unsafe { Box::from_raw(handle) }));
    }
}

pub(super) unsafe extern "C" fn group_error(handle: *mut ProcessGroup, error: *mut RawError) -> i32 {
    // SAFETY: a live handle by the header.
    guarded(error, || unsafe { group(handle) }.error().map_or(Ok(()), Err))
}

pub(super) unsafe extern "C" fn group_set_timeout(handle: *mut ProcessGroup, ms: i64) {
    // SAFETY: a live handle by the header.
    sheltered((), || unsafe { group(handle) }.set_timeout(duration(ms)));
}

pub(super) unsafe extern "C" fn group_timeout(handle: *mut ProcessGroup) -> i64 {
    // SAFETY: a live handle by the header.
    sheltered(0, || i64::try_from(unsafe { group(handle) }.timeout().as_millis()).unwrap_or(i64::MAX))
}

pub(super) unsafe extern "C" fn group_sequence(handle: *mut ProcessGroup) -> u64 {
    // SAFETY: a live handle by the header.
    sheltered(0, || unsafe { group(handle) }.sequence())
}

pub(super) unsafe extern "C" fn group_monitored_barrier(
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

pub(super) unsafe extern "C" fn drain(timeout_ms: i64) -> i32 {
    sheltered(1, || i32::from(!Runtime::drain(duration(timeout_ms))))
}

pub(super) unsafe extern "C" fn group_memory(
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
