//! The launcher's store, which C++ gives as functions.

use std::ffi::{CStr, CString, c_char, c_void};

use parking_lot::Mutex;
use podring_group::{Store, StoreError};

/// Room for a store's reason.
const WHY: usize = 1024;

type Sink = unsafe extern "C" fn(*mut c_void, *const u8, usize);

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawStore {
    ctx: *mut c_void,
    set: unsafe extern "C" fn(*mut c_void, *const c_char, *const u8, usize, *mut c_char, usize) -> i32,
    get: unsafe extern "C" fn(*mut c_void, *const c_char, Sink, *mut c_void, *mut c_char, usize) -> i32,
    check: unsafe extern "C" fn(*mut c_void, *const *const c_char, usize, *mut i32, *mut c_char, usize) -> i32,
    add: unsafe extern "C" fn(*mut c_void, *const c_char, i64, *mut i64, *mut c_char, usize) -> i32,
    release: unsafe extern "C" fn(*mut c_void),
}

/// The launcher's store behind C functions. "One at a time" is kept by the lock.
pub(super) struct ForeignStore(Mutex<RawStore>);

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
    pub(super) fn new(raw: RawStore) -> ForeignStore {
        ForeignStore(Mutex::new(raw))
    }

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
