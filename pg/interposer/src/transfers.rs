//! Buffers that go from chip to chip: an extension that torch_tpu (0.2.0) has its process group's send and receive by,
//! and that XLA's CPU plugin lacks. Here the fabric carries them.
//!
//! Who receives says how it can be found (a descriptor), by a way of the framework's own; who sends names it with a
//! buffer. A buffer that is to be received is there at once, and gets its value when that has come.
//!
//! Laid out by hand from `pjrt_c_api_cross_host_transfers_extension.h` (versions 5 to 8 were read).

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use podring_collective::{Blocks, Collective, DType, Kind, Layout, Part, Tensor};
use podring_group::{Error, ProcessGroup, Work};

use crate::error::{self, Fault, InterposeError};
use crate::meet::{Use, everybody};
use crate::sys::{self, ExtensionBase, MemoryLayout, Opaque};
use crate::table::{Interposed, guarded};
use crate::{memory, the_table};

/// `CrossHostTransfers` among the interface's extensions.
const KIND: c_int = 12;
const RECEIVE: &str = "PJRT_Transfers_PJRT_Client_MakeCrossHostReceiveBuffers";
const SEND: &str = "PJRT_Transfers_PJRT_Buffer_CopyToRemoteDevice";
/// The code of an internal error among absl's.
const INTERNAL: c_int = 13;

#[repr(C)]
struct Extension {
    base: ExtensionBase,
    receive: unsafe extern "C" fn(*mut Receive) -> Opaque,
    send: unsafe extern "C" fn(*mut Send),
    receive_from: unsafe extern "C" fn(*mut c_void) -> Opaque,
    send_to: unsafe extern "C" fn(*mut c_void) -> Opaque,
}

// SAFETY: constant once made.
unsafe impl std::marker::Send for Extension {}
// SAFETY: as above.
unsafe impl Sync for Extension {}

/// Told of the descriptors, or of an error. Older headers have five parameters; whoever takes five doesn't see the rest.
type Notify = unsafe extern "C" fn(Opaque, *const *const c_char, *const usize, usize, *mut c_void, Cancel, *mut c_void);
/// Told that a transfer was given up.
type Canceled = unsafe extern "C" fn(Opaque, *mut c_void);
/// Gives a transfer up.
type Cancel =
    unsafe extern "C" fn(*const c_char, usize, c_int, *const c_char, usize, Option<Canceled>, *mut c_void, *mut c_void);

#[repr(C)]
struct Receive {
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

/// Told, once, how it ended: an error or null, and whether anything was sent.
type Sent = unsafe extern "C" fn(Opaque, bool, *mut c_void);

#[repr(C)]
struct Send {
    struct_size: usize,
    extension_start: Opaque,
    buffer: Opaque,
    /// When the descriptor is there; null if it is now.
    event: Opaque,
    descriptor: *mut *mut c_char,
    descriptor_size: *mut usize,
    argument: *mut c_void,
    sent: Sent,
    /// Since version 6: frees the two.
    free: Option<unsafe extern "C" fn(*mut *mut c_char, *mut usize)>,
}

/// Bytes of it before version 6.
const WITHOUT_FREE: usize = std::mem::offset_of!(Send, free);

/// The head of a list of extensions that continues with `others`.
pub fn extension(others: *mut ExtensionBase) -> *mut ExtensionBase {
    static EXTENSION: OnceLock<Extension> = OnceLock::new();
    let ours = EXTENSION.get_or_init(|| Extension {
        base: ExtensionBase { struct_size: size_of::<Extension>(), kind: KIND, next: others },
        receive,
        send,
        receive_from: by_key,
        send_to: by_key,
    });
    // The interface's types know no `const`; nobody writes to an extension.
    std::ptr::from_ref(&ours.base).cast_mut()
}

/// The extension's other two functions, which agree on a number instead of a descriptor: nobody was seen to use them.
unsafe extern "C" fn by_key(_args: *mut c_void) -> Opaque {
    error::give(&InterposeError::Transfer {
        what: "a transfer by key",
        why: "not to be had on a virtual slice; use MakeCrossHostReceiveBuffers and CopyToRemoteDevice".to_owned(),
    })
}

/// Where a receive can be found: the receiver's rank, and its number there, which is the message's tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Descriptor {
    rank: u32,
    number: u32,
}

impl Descriptor {
    fn text(self) -> String {
        format!("podring {} {}", self.rank, self.number)
    }

    fn parse(text: &[u8]) -> Option<Descriptor> {
        let mut words = std::str::from_utf8(text).ok()?.split(' ');
        let found = match (words.next()?, words.next()?.parse(), words.next()?.parse()) {
            ("podring", Ok(rank), Ok(number)) => Descriptor { rank, number },
            _ => return None,
        };
        words.next().is_none().then_some(found)
    }
}

/// A value in this process's memory, on its way.
struct Value {
    // The largest element type's alignment.
    memory: Vec<u128>,
    count: usize,
    dtype: DType,
}

impl Value {
    fn new(dims: &[i64], dtype: DType) -> Value {
        let count: usize = dims.iter().map(|&dim| dim.max(0) as usize).product();
        let memory = vec![0u128; (count * dtype.size()).div_ceil(size_of::<u128>())];
        Value { memory, count, dtype }
    }

    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// A message of it. It must stay until the message has ended.
    fn message(&mut self, kind: Kind) -> Collective {
        let data = self.memory.as_mut_ptr().cast();
        let whole = Blocks::whole(Tensor { data, layout: Layout::flat(self.count) });
        let (inputs, outputs) =
            if matches!(kind, Kind::Send { .. }) { (whole, Blocks::none()) } else { (Blocks::none(), whole) };
        let part = Part { dtype: self.dtype, reduction: None, inputs, outputs };
        Collective { kind, parts: [part].into_iter().collect() }
    }
}

/// Posts a message, and calls `ended` with the value when it has ended.
fn post(
    group: &ProcessGroup,
    kind: Kind,
    mut value: Value,
    ended: impl FnOnce(Value, Option<Error>) + std::marker::Send + 'static,
) -> Result<(), InterposeError> {
    let failed = |error: Error| InterposeError::Failed { what: "a transfer", why: error.to_string() };
    let message = value.message(kind);
    let work: Arc<Work> = Arc::new(group.post(message, None, None, false).map_err(failed)?);
    let mine = work.clone();
    work.on_end(Box::new(move || ended(value, mine.error())));
    Ok(())
}

// Receiving.

/// Buffers of the plugin's that get their values later.
struct Manager(Opaque);

// SAFETY: the plugin's objects may be used from any thread.
unsafe impl std::marker::Send for Manager {}
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

/// The words of what went wrong, which ends here.
fn taken(on: &Interposed, fault: Fault) -> String {
    match fault {
        Fault::Ours(error) => error.to_string(),
        Fault::Theirs(error) => on.take_message(error),
    }
}

unsafe extern "C" fn receive(args: *mut Receive) -> Opaque {
    guarded(RECEIVE, |on| {
        // SAFETY: every arguments struct starts with its size.
        let size = unsafe { args.cast::<usize>().read() };
        // A longer one is newer, or version 1's, which is another altogether and longer than any.
        if !(size_of::<Receive>()..size_of::<Receive>() + 16).contains(&size) {
            let expected = size_of::<Receive>();
            return Err(InterposeError::ShortArguments { function: RECEIVE, got: size, expected }.into());
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

// Sending.

/// What is to be told, once, of a buffer that is sent.
struct Report {
    sent: Sent,
    argument: *mut c_void,
}

// SAFETY: the caller's function and word, for any thread by the interface.
unsafe impl std::marker::Send for Report {}

impl Report {
    fn tell(self, outcome: Result<(), InterposeError>) {
        let error = outcome.as_ref().err().map_or(std::ptr::null_mut(), error::give);
        // SAFETY: the caller's function, called once, since this is used up. It reads the error and leaves it.
        unsafe { (self.sent)(error, outcome.is_ok(), self.argument) };
        error::take_back(error);
    }
}

/// A buffer on its way, until its receiver is known.
struct Sending {
    report: Report,
    /// Its value in this process's memory, and when it is there.
    copied: Result<(Value, Event), InterposeError>,
    descriptor: *mut *mut c_char,
    descriptor_size: *mut usize,
    free: Option<unsafe extern "C" fn(*mut *mut c_char, *mut usize)>,
}

// SAFETY: its pointers are the caller's, for whichever thread the descriptor's event comes on.
unsafe impl std::marker::Send for Sending {}

unsafe extern "C" fn send(args: *mut Send) {
    // SAFETY: every arguments struct starts with its size.
    let size = unsafe { args.cast::<usize>().read() };
    if size < WITHOUT_FREE {
        // Where it wants to be told so isn't known.
        tracing::error!("{SEND} was called with {size} bytes of arguments, expected {WITHOUT_FREE} or more");
        return;
    }
    // SAFETY: called through the extension, so with its arguments; the last field is read if there is one.
    let (buffer, event, sending) = unsafe {
        let free = if size >= size_of::<Send>() { (*args).free } else { None };
        let report = Report { sent: (*args).sent, argument: (*args).argument };
        let (descriptor, descriptor_size) = ((*args).descriptor, (*args).descriptor_size);
        let copied = Err(InterposeError::NoClient);
        ((*args).buffer, (*args).event, Sending { report, copied, descriptor, descriptor_size, free })
    };
    let refused = guarded(SEND, |on| {
        // Now, while the buffer is the caller's: it may end before its receiver is known.
        let copied = copy(on, buffer).map_err(|fault| failed_to_send(taken(on, fault)));
        let sending = Sending { copied, ..sending };
        if event.is_null() {
            sending.on_descriptor(on, None);
        } else {
            // Its caller's, to be ended here.
            Event(event).then(on, move |failed| sending.on_descriptor(on, failed));
        }
        Ok(())
    });
    error::take_back(refused);
}

fn failed_to_send(why: String) -> InterposeError {
    InterposeError::Failed { what: "a send of a buffer", why }
}

/// Has a buffer's value copied, once it is there.
fn copy(on: &Interposed, buffer: Opaque) -> Result<(Value, Event), Fault> {
    let mut layout = sys::BufferGetMemoryLayout { buffer, ..Default::default() };
    on.forward(&mut layout)?;
    if !memory::row_major(&layout.layout) {
        return Err(InterposeError::Layout.into());
    }
    let mut element = sys::BufferElementType { buffer, ..Default::default() };
    on.forward(&mut element)?;
    let Some(dtype) = memory::dtype(element.element_type) else {
        return Err(
            failed_to_send(format!("collectives don't know PJRT's element type {}", element.element_type)).into()
        );
    };
    let mut dims = sys::BufferDimensions { buffer, ..Default::default() };
    on.forward(&mut dims)?;
    let shape = match dims.num_dims {
        0 => &[],
        // SAFETY: the buffer's own list, alive with it.
        count => unsafe { std::slice::from_raw_parts(dims.dims, count) },
    };
    let mut value = Value::new(shape, dtype);
    let mut args = sys::BufferToHost {
        buffer,
        memory: value.memory.as_mut_ptr().cast(),
        size: value.bytes(),
        ..Default::default()
    };
    on.forward(&mut args)?;
    Ok((value, Event(args.event)))
}

impl Sending {
    /// The descriptor is there, or never will be.
    fn on_descriptor(self, on: &'static Interposed, failed: Option<String>) {
        let Sending { report, copied, descriptor, descriptor_size, free } = self;
        let found = match failed {
            Some(why) => Err(failed_to_send(format!("its receiver is not to be found: {why}"))),
            None => {
                // SAFETY: the caller's, set by now.
                let text = unsafe { std::slice::from_raw_parts((*descriptor).cast::<u8>(), *descriptor_size) };
                Descriptor::parse(text).ok_or_else(|| {
                    let text = String::from_utf8_lossy(&text[..text.len().min(80)]);
                    failed_to_send(format!("{text:?} names no receiver on a virtual slice"))
                })
            }
        };
        if let Some(free) = free {
            // SAFETY: the caller's function for these two, which nobody uses any more.
            unsafe { free(descriptor, descriptor_size) };
        }
        let to = match found {
            Ok(to) => to,
            Err(error) => {
                // The copy is written to until it is there.
                if let Ok((value, event)) = copied {
                    event.then(on, move |_| drop(value));
                }
                return report.tell(Err(error));
            }
        };
        match copied {
            Err(error) => give_up(on, report, error),
            Ok((value, event)) => event.then(on, move |failed| match failed {
                Some(why) => give_up(on, report, failed_to_send(why)),
                None => dispatch(on, to, value, report),
            }),
        }
    }
}

/// Tells the others that this rank sends them nothing more, so that they don't wait for it.
fn give_up(on: &Interposed, report: Report, error: InterposeError) {
    let rank = on.presented().map_or(0, |seen| seen.rank());
    if let Ok(group) = everybody(Use::Transfers) {
        group.abort(&format!("rank {rank} of the job: {error}"));
    }
    report.tell(Err(error));
}

/// Sends a value to who waits for it.
fn dispatch(on: &Interposed, to: Descriptor, value: Value, report: Report) {
    let group = match everybody(Use::Transfers) {
        Ok(group) if to.rank < group.size() => group,
        Ok(group) => {
            let why = format!("expected a rank below {}, got {}", group.size(), to.rank);
            return give_up(on, report, failed_to_send(why));
        }
        Err(error) => return report.tell(Err(error)),
    };
    // Told here if it can't even be posted, else when it has ended.
    let report = Arc::new(parking_lot::Mutex::new(Some(report)));
    let tell = |report: &parking_lot::Mutex<Option<Report>>, outcome| {
        if let Some(report) = report.lock().take() {
            report.tell(outcome);
        }
    };
    let later = report.clone();
    let ended = move |_: Value, failed: Option<Error>| {
        tell(&later, failed.map_or(Ok(()), |error| Err(failed_to_send(error.to_string()))));
    };
    if let Err(error) = post(&group, Kind::Send { to: to.rank, tag: to.number }, value, ended) {
        tell(&report, Err(error));
    }
}

/// An event, which ends when it has come.
struct Event(Opaque);

// SAFETY: the plugin's objects may be used from any thread.
unsafe impl std::marker::Send for Event {}

type Then = Box<dyn FnOnce(Option<String>) + std::marker::Send>;

struct Awaited {
    event: Event,
    then: Then,
}

impl Event {
    /// Calls `then` once when it has come: at once if it has. With the words of its error, if it has one.
    fn then(self, on: &Interposed, then: impl FnOnce(Option<String>) + std::marker::Send + 'static) {
        let event = self.0;
        let awaited = Box::into_raw(Box::new(Awaited { event: self, then: Box::new(then) }));
        let asked = on.forward(&mut sys::EventOnReady {
            event,
            callback: Some(came),
            argument: awaited.cast(),
            ..Default::default()
        });
        if let Err(fault) = asked {
            // SAFETY: made just now; a refusal calls nothing.
            let awaited = unsafe { Box::from_raw(awaited) };
            (awaited.then)(Some(taken(on, fault)));
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(on) = the_table() {
            let _ = on.forward(&mut sys::EventDestroy { event: self.0, ..Default::default() });
        }
    }
}

unsafe extern "C" fn came(error: Opaque, awaited: *mut c_void) {
    // SAFETY: what `then` gave, once.
    let Awaited { event, then } = *unsafe { Box::from_raw(awaited.cast::<Awaited>()) };
    drop(event);
    let refused = guarded("a callback of an event", |on| {
        then((!error.is_null()).then(|| on.take_message(error)));
        Ok(())
    });
    error::take_back(refused);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_header() {
        assert_eq!(size_of::<Extension>(), 56);
        assert_eq!(size_of::<Receive>(), 104);
        assert_eq!((WITHOUT_FREE, size_of::<Send>()), (64, 72));
    }

    #[test]
    fn a_descriptor_is_read_as_it_was_written() {
        let one = Descriptor { rank: 3, number: u32::MAX };
        assert_eq!(Descriptor::parse(one.text().as_bytes()), Some(one));
        for wrong in ["", "podring", "podring 1", "podring 1 2 3", "podring -1 2", "podring 1 4294967296", "other 1 2"]
        {
            assert_eq!(Descriptor::parse(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(Descriptor::parse(&[0xff, 0xfe]), None);
    }

    #[test]
    fn values_of_no_elements_and_of_none_of_a_dimension() {
        assert_eq!((Value::new(&[], DType::F64).count, Value::new(&[], DType::F64).bytes()), (1, 8));
        assert_eq!(Value::new(&[3, 0, 2], DType::BF16).bytes(), 0);
        assert_eq!(Value::new(&[3, 5], DType::C128).memory.len(), 15);
    }
}
