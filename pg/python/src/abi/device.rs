//! What the interposer knows of devices and their memory: `device_*`.

use std::ffi::c_void;

use podring_collective::DType;
use podring_group::{Kind, ProcessGroup};
use podring_interposer::memory;

use super::{RawError, sheltered, shielded, write_error};

#[repr(C)]
pub(super) struct RawMemory {
    data: *mut c_void,
    bytes: u64,
    dtype: u8,
}

/// RawMemory's dtype for an element type that no collective knows.
const NO_DTYPE: u8 = 255;

/// As [`super::guarded`], for the interposer, which says in words what a framework or a plugin refused.
fn guarded_device(error: *mut RawError, act: impl FnOnce() -> Result<(), String>) -> i32 {
    shielded(error, || match act() {
        Ok(()) => 0,
        Err(refused) => write_error(error, Kind::Unsupported as i32, &refused),
    })
}

pub(super) unsafe extern "C" fn device_client() -> *mut c_void {
    sheltered(std::ptr::null_mut(), memory::virtual_client)
}

pub(super) unsafe extern "C" fn device_world(handle: *mut ProcessGroup) {
    // SAFETY: null or a live handle by the header.
    sheltered((), || podring_interposer::set_world(unsafe { handle.as_ref() }.cloned()));
}

pub(super) unsafe extern "C" fn device_memory(buffer: *mut c_void, out: *mut RawMemory, error: *mut RawError) -> i32 {
    guarded_device(error, || {
        // SAFETY: a live buffer of the client by the header.
        let found = unsafe { memory::of_buffer(buffer) }?;
        let dtype = found.dtype.map_or(NO_DTYPE, |dtype| dtype as u8);
        // SAFETY: the caller's place for the answer.
        unsafe { out.write(RawMemory { data: found.data, bytes: found.bytes as u64, dtype }) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn device_adopt(
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
