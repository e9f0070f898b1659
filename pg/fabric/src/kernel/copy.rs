//! Contiguous copies.

/// Copies `bytes` bytes.
///
/// # Safety
/// `src` must be readable and `dst` writable for `bytes` bytes; they must be disjoint, or start at the same address.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, bytes: usize) {
    if dst.cast_const() != src {
        // SAFETY: the caller's promise; not the same start, so disjoint.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) };
    }
}
