//! Contiguous copies.

/// Copies `bytes` bytes.
///
/// By the platform's memcpy, whatever the size: it streams past the caches by itself from some size on. Streaming
/// earlier won about a fifth at 16 MiB, and lost at 4 MiB and 128 MiB, when the copy was read afterwards.
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
