//! Buffers of a virtual chip as memory of this process, and memory of this process as buffers: the wrapped plugin's
//! device memory is the host's.

use std::ffi::{c_int, c_void};

use podring_collective::DType;

use crate::error::{Fault, InterposeError};
use crate::settings::Wrapped;
use crate::sys::{self, Opaque};
use crate::table::Interposed;
use crate::the_table;

/// Where a buffer's elements lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Its first element.
    pub data: *mut c_void,
    /// Bytes from there on.
    pub bytes: usize,
    /// Its element type; none for one that collectives don't know.
    pub dtype: Option<DType>,
}

/// Called when adopted memory is used no more: with the memory, and with what was given along with it.
pub type Release = unsafe extern "C" fn(*mut c_void, *mut c_void);

/// `PJRT_Buffer_Type` of an element type, as far as XLA has it.
pub const fn element_type(dtype: DType) -> Option<c_int> {
    Some(match dtype {
        DType::Bool => 1,
        DType::I8 => 2,
        DType::I16 => 3,
        DType::I32 => 4,
        DType::I64 => 5,
        DType::U8 => 6,
        DType::U16 => 7,
        DType::U32 => 8,
        DType::U64 => 9,
        DType::F16 => 10,
        DType::F32 => 11,
        DType::F64 => 12,
        DType::BF16 => 13,
        DType::C64 => 14,
        DType::C128 => 15,
        DType::F8E5M2 => 16,
        DType::F8E4M3FN => 17,
        DType::F8E5M2FNUZ => 19,
        DType::F8E4M3FNUZ => 20,
        DType::F8E8M0FNU => 28,
        DType::C32 => return None,
    })
}

/// The element type of a `PJRT_Buffer_Type`, if collectives know it.
pub(crate) fn dtype(element: c_int) -> Option<DType> {
    DType::ALL.iter().copied().find(|&dtype| element_type(dtype) == Some(element))
}

/// The client of a virtual slice, null if there is none: only of such a client are buffers memory of this process.
pub fn virtual_client() -> *mut c_void {
    match the_table() {
        Some(on) if matches!(on.wrapped, Wrapped::Virtual(_)) => on.client().1,
        _ => std::ptr::null_mut(),
    }
}

/// What a caller is told in place of a result.
pub type Refusal = String;

fn told(on: &Interposed, fault: Fault) -> Refusal {
    match fault {
        Fault::Ours(error) => error.to_string(),
        Fault::Theirs(error) => on.take_message(error),
    }
}

fn in_place() -> Result<&'static Interposed, Refusal> {
    the_table().ok_or_else(|| InterposeError::NoClient.to_string())
}

/// The memory of a buffer that is dense in row-major order; waits until it has its value.
///
/// # Safety
/// `buffer` is a live `PJRT_Buffer` of the client of this process's virtual slice.
pub unsafe fn of_buffer(buffer: *mut c_void) -> Result<Memory, Refusal> {
    let on = in_place()?;
    let read = || -> Result<Memory, Fault> {
        wait(on, buffer)?;
        let mut layout = sys::BufferGetMemoryLayout { buffer, ..Default::default() };
        on.forward(&mut layout)?;
        if !row_major(&layout.layout) {
            return Err(InterposeError::Layout.into());
        }
        let mut element = sys::BufferElementType { buffer, ..Default::default() };
        on.forward(&mut element)?;
        let mut size = sys::BufferOnDeviceSize { buffer, ..Default::default() };
        on.forward(&mut size)?;
        let mut pointer = sys::BufferUnsafePointer { buffer, ..Default::default() };
        on.forward(&mut pointer)?;
        let data = pointer.pointer as *mut c_void;
        Ok(Memory { data, bytes: size.bytes, dtype: dtype(element.element_type) })
    };
    read().map_err(|fault| told(on, fault))
}

/// Waits until a buffer has its value: a computation that gives it may be under way, or not have begun.
fn wait(on: &Interposed, buffer: Opaque) -> Result<(), Fault> {
    let mut ready = sys::BufferReadyEvent { buffer, ..Default::default() };
    on.forward(&mut ready)?;
    let waited = on.forward(&mut sys::EventAwait { event: ready.event, ..Default::default() });
    on.forward(&mut sys::EventDestroy { event: ready.event, ..Default::default() })?;
    waited
}

/// Whether elements lie dense in row-major order.
pub(crate) fn row_major(layout: &sys::MemoryLayout) -> bool {
    const TILED: c_int = 0;
    if layout.kind != TILED || layout.num_tiles != 0 {
        return false;
    }
    if layout.minor_to_major_size == 0 {
        return true;
    }
    // SAFETY: the buffer's own list, alive with it.
    let order = unsafe { std::slice::from_raw_parts(layout.minor_to_major, layout.minor_to_major_size) };
    order.iter().rev().enumerate().all(|(index, &dimension)| dimension == index as i64)
}

/// Makes memory of this process a buffer of its virtual chip, with no copy. `release` is called once, also if this
/// fails.
///
/// # Safety
/// `memory` is 64-byte aligned and holds the elements of `dims`, constant from now until `release`, which may be called
/// on any thread.
pub unsafe fn adopt(
    memory: *mut c_void,
    dims: &[i64],
    dtype: DType,
    release: Release,
    context: *mut c_void,
) -> Result<*mut c_void, Refusal> {
    let adopt = || {
        let on = in_place()?;
        let Some(element_type) = element_type(dtype) else {
            return Err(InterposeError::Element { dtype }.to_string());
        };
        let (client, device) = on.own().ok_or_else(|| InterposeError::NoClient.to_string())?;
        let mut args = sys::ClientCreateView {
            client,
            memory,
            dims: dims.as_ptr(),
            num_dims: dims.len(),
            element_type,
            device,
            on_delete: Some(release),
            on_delete_argument: context,
            ..Default::default()
        };
        on.forward(&mut args).map_err(|fault| told(on, fault))?;
        Ok::<Opaque, Refusal>(args.buffer)
    };
    let adopted = adopt();
    if adopted.is_err() {
        // SAFETY: the caller's promise; nobody uses the memory.
        unsafe { release(memory, context) };
    }
    adopted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_types_are_one_to_one() {
        for &one in DType::ALL {
            if let Some(code) = element_type(one) {
                assert_eq!(dtype(code), Some(one));
            }
        }
        assert_eq!(dtype(22), None);
    }
}
