//! Receiving: a buffer that is there at once and has its value later.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use podring_collective::Kind;
use podring_group::Error;

use super::{Descriptor, Value, post, taken};
use crate::error::{Fault, InterposeError};
use crate::meet::{Use, everybody};
use crate::sys::{self, MemoryLayout, Opaque};
use crate::table::{Interposed, guarded};
use crate::{memory, the_table};

const FUNCTION: &str = "PJRT_Transfers_PJRT_Client_MakeCrossHostReceiveBuffers";
/// The code of an internal error among absl's.
const INTERNAL: c_int = 13;

/// Told of the descriptors, or of an error. Older headers have five parameters; whoever takes five doesn't see the rest.
type Notify = unsafe extern "C" fn(Opaque, *const *const c_char, *const usize, usize, *mut c_void, Cancel, *mut c_void);
/// Told that a transfer was given up.
type Canceled = unsafe extern "C" fn(Opaque, *mut c_void);
/// Gives a transfer up.
type Cancel =
    unsafe extern "C" fn(*const c_char, usize, c_int, *const c_char, usize, Option<Canceled>, *mut c_void, *mut c_void);

#[repr(C)]
pub struct Receive {
    struct_size: usize,
    extension_start: Opaque,
    client: Opaque,
    num_shapes: usize,
    shape_num_dims: *const usize,
    shape_dims: *const *const i64,
    element_types: *const c_int,
    layouts: *const *const MemoryLayout,
    device: Opaque,
    argument: *mut c_void,
    notify: Notify,
    /// Out: as many as shapes.
    buffers: *mut Opaque,
    /// Out.
    num_buffers: usize,
}

/// Buffers of the plugin's that get their values later.
struct Manager(Opaque);

// SAFETY: the plugin's objects may be used from any thread.
unsafe impl Send for Manager {}
// SAFETY: as above.
unsafe impl Sync for Manager {}

impl Manager {
    fn new(on: &Interposed, client: Opaque, device: Opaque, shapes: &[sys::ShapeSpec]) -> Result<Manager, Fault> {
        let mut memory = sys::DeviceDefaultMemory { device, ..Default::default() };
        on.forward(&mut memory)?;
        let mut args = sys::ClientCreateLater {
            client,
            shapes: shapes.as_ptr(),
            num_shapes: shapes.len(),
            memory: memory.memory,
            ..Default::default()
        };
        on.forward(&mut args)?;
        Ok(Manager(args.manager))
    }

    fn buffer(&self, on: &Interposed, index: usize) -> Result<Opaque, Fault> {
        let mut args = sys::TransferRetrieve { manager: self.0, index: index as c_int, ..Default::default() };
        on.forward(&mut args)?;
        Ok(args.buffer)
    }

    /// Gives a buffer its value.
    fn fill(&self, on: &Interposed, index: usize, value: &Value) -> Result<(), Fault> {
        let mut args = sys::TransferData {
            manager: self.0,
            index: index as c_int,
            data: value.memory.as_ptr().cast(),
            size: value.bytes() as i64,
            is_last: true,
            ..Default::default()
        };
        on.forward(&mut args)?;
        let event = args.event;
        let waited = on.forward(&mut sys::EventAwait { event, ..Default::default() });
        on.forward(&mut sys::EventDestroy { event, ..Default::default() })?;
        waited
    }

    /// Gives a buffer an error instead.
    fn fail(&self, on: &Interposed, index: usize, why: &str) {
        let mut args = sys::TransferFail {
            manager: self.0,
            index: index as c_int,
            code: INTERNAL,
            message: why.as_ptr().cast(),
            message_size: why.len(),
            ..Default::default()
        };
        if let Err(fault) = on.forward(&mut args) {
            tracing::error!("a buffer's receive failed, and can't be told so: {}; {why}", taken(on, fault));
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        if let Some(on) = the_table() {
            let _ = on.forward(&mut sys::TransferDestroy { manager: self.0, ..Default::default() });
        }
    }
}

/// `PJRT_Transfers_PJRT_Client_MakeCrossHostReceiveBuffers`.
pub unsafe extern "C" fn receive(args: *mut Receive) -> Opaque {
    guarded(FUNCTION, |on| {
        // SAFETY: every arguments struct starts with its size.
        let size = unsafe { args.cast::<usize>().read() };
        // A longer one is newer, or version 1's, which is another altogether and longer than any.
        if !(size_of::<Receive>()..size_of::<Receive>() + 16).contains(&size) {
            let (what, expected) = ("a receive of a buffer", size_of::<Receive>());
            let why =
                format!("expected {expected} bytes of arguments, got {size}: of another version of the extension");
            return Err(InterposeError::Transfer { what, why }.into());
        }
        // SAFETY: called through the extension, so with its arguments, of this version by the check above.
        unsafe { receive_all(on, &mut *args) }
    })
}

/// # Safety
/// The arguments' lists are as long as they say.
unsafe fn receive_all(on: &'static Interposed, args: &mut Receive) -> Result<(), Fault> {
    let refused = |why: String| InterposeError::Transfer { what: "a receive of a buffer", why };
    let seen = on.presented().ok_or(InterposeError::NoClient)?;
    if args.device != seen.own_device() {
        return Err(refused("expected the device of this process, got another".to_owned()).into());
    }
    let group = everybody(Use::Transfers)?;
    let mut shapes = Vec::new();
    let mut values = Vec::new();
    for index in 0..args.num_shapes {
        // SAFETY: the caller's promise; a list of no dimensions may be null.
        let (dims, element_type, layout) = unsafe {
            let dims: &[i64] = match *args.shape_num_dims.add(index) {
                0 => &[],
                count => std::slice::from_raw_parts(*args.shape_dims.add(index), count),
            };
            (dims, *args.element_types.add(index), (*args.layouts.add(index)).as_ref())
        };
        if layout.is_some_and(|layout| !memory::row_major(layout)) {
            return Err(InterposeError::Layout.into());
        }
        let Some(dtype) = memory::dtype(element_type) else {
            return Err(refused(format!("collectives don't know PJRT's element type {element_type}")).into());
        };
        let (struct_size, extension_start) = (size_of::<sys::ShapeSpec>(), std::ptr::null_mut());
        let (dims_at, num_dims) = (dims.as_ptr(), dims.len());
        shapes.push(sys::ShapeSpec { struct_size, extension_start, dims: dims_at, num_dims, element_type });
        values.push(Value::new(dims, dtype));
    }
    let manager = Arc::new(Manager::new(on, args.client, args.device, &shapes)?);
    let mut buffers = Vec::new();
    let mut descriptors = Vec::new();
    let made = values.into_iter().enumerate().try_for_each(|(index, value)| -> Result<(), Fault> {
        buffers.push(manager.buffer(on, index)?);
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let descriptor = Descriptor { rank: seen.rank(), number: NUMBER.fetch_add(1, Ordering::Relaxed) };
        descriptors.push(descriptor.text());
        let manager = manager.clone();
        let kind = Kind::Recv { from: None, tag: descriptor.number };
        let ended = move |value: Value, failed: Option<Error>| match failed {
            None => {
                if let Err(fault) = manager.fill(on, index, &value) {
                    let why = taken(on, fault);
                    manager.fail(on, index, &why);
                }
            }
            Some(error) => manager.fail(on, index, &error.to_string()),
        };
        Ok(post(&group, kind, value, ended)?)
    });
    if let Err(fault) = made {
        // What was posted goes on and ends with its group; nobody has the buffers.
        for buffer in buffers {
            let _ = on.forward(&mut sys::BufferDestroy { buffer, ..Default::default() });
        }
        return Err(fault);
    }
    // SAFETY: the caller's list, as long as its shapes'.
    buffers.iter().enumerate().for_each(|(index, &buffer)| unsafe { args.buffers.add(index).write(buffer) });
    args.num_buffers = buffers.len();
    let texts: Vec<*const c_char> = descriptors.iter().map(|text| text.as_ptr().cast()).collect();
    let sizes: Vec<usize> = descriptors.iter().map(String::len).collect();
    let (texts, sizes) = (texts.as_ptr(), sizes.as_ptr());
    let (none, nobody) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the caller's function, once, with lists that live until it returns.
    unsafe { (args.notify)(none, texts, sizes, descriptors.len(), args.argument, cancel, nobody) };
    Ok(())
}

/// A receive that nobody sends to ends with its group's timeout.
unsafe extern "C" fn cancel(
    _descriptor: *const c_char,
    _descriptor_size: usize,
    _reason: c_int,
    _message: *const c_char,
    _message_size: usize,
    canceled: Option<Canceled>,
    argument: *mut c_void,
    _ours: *mut c_void,
) {
    if let Some(canceled) = canceled {
        // SAFETY: the caller's function with the caller's word.
        unsafe { canceled(std::ptr::null_mut(), argument) };
    }
}
