//! Works: `work_*`.

use std::ffi::c_void;

use podring_group::{State, Work};

use super::{Interrupted, RawError, asks, duration, guarded, sheltered};

/// The work behind a handle.
///
/// # Safety
/// A handle from `post` that wasn't freed.
unsafe fn work<'a>(handle: *mut Work) -> &'a Work {
    // SAFETY: promised by the caller.
    unsafe { &*handle }
}

pub(super) unsafe extern "C" fn work_wait(
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

pub(super) unsafe extern "C" fn work_state(handle: *mut Work) -> i32 {
    // SAFETY: a live handle by the header.
    match unsafe { work(handle) }.state() {
        State::Pending => 0,
        State::Done => 1,
        State::Failed => 2,
    }
}

pub(super) unsafe extern "C" fn work_error(handle: *mut Work, error: *mut RawError) -> i32 {
    // SAFETY: a live handle by the header.
    guarded(error, || unsafe { work(handle) }.error().map_or(Ok(()), Err))
}

pub(super) unsafe extern "C" fn work_sequence(handle: *mut Work) -> u64 {
    // SAFETY: a live handle by the header.
    unsafe { work(handle) }.sequence()
}

pub(super) unsafe extern "C" fn work_key(handle: *mut Work) -> u64 {
    // SAFETY: a live handle by the header.
    unsafe { work(handle) }.key()
}

pub(super) unsafe extern "C" fn work_timeout(handle: *mut Work) -> i64 {
    // SAFETY: a live handle by the header.
    i64::try_from(unsafe { work(handle) }.timeout().as_millis()).unwrap_or(i64::MAX)
}

pub(super) unsafe extern "C" fn work_source(handle: *mut Work) -> i32 {
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

pub(super) unsafe extern "C" fn work_on_done(
    handle: *mut Work,
    function: unsafe extern "C" fn(*mut c_void),
    ctx: *mut c_void,
) {
    let done = Done(function, ctx);
    // SAFETY: a live handle by the header.
    sheltered((), || unsafe { work(handle) }.on_end(Box::new(move || done.call())));
}

pub(super) unsafe extern "C" fn work_abort(handle: *mut Work) {
    // SAFETY: a live handle by the header.
    sheltered((), || unsafe { work(handle) }.abort());
}

pub(super) unsafe extern "C" fn work_free(handle: *mut Work) {
    if !handle.is_null() {
        // SAFETY: made by `post`, freed once.
        sheltered((), || drop(unsafe { Box::from_raw(handle) }));
    }
}
