//! Who is told that a collective's memory is free again.

/// Calls a function when the engine has no more use for the operation's memory. The function may do anything, so it
/// never runs under a lock of the engine. (A function and a word rather than a box: it costs no allocation.)
pub struct Keep {
    context: *mut std::ffi::c_void,
    release: unsafe extern "C" fn(*mut std::ffi::c_void),
}

// SAFETY: `new` demands that the function may be called on any thread.
unsafe impl Send for Keep {}

impl Keep {
    /// Will call `release(context)` once.
    ///
    /// # Safety
    /// `release(context)` must be callable once, on any thread.
    pub unsafe fn new(context: *mut std::ffi::c_void, release: unsafe extern "C" fn(*mut std::ffi::c_void)) -> Self {
        Keep { context, release }
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        // SAFETY: promised by whoever made it; dropped once.
        unsafe { (self.release)(self.context) }
    }
}
