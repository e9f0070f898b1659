//! Sending: a buffer's value is copied, and goes when its receiver is known.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use parking_lot::Mutex;
use podring_collective::Kind;
use podring_group::Error;

use super::{Descriptor, Value, post, taken};
use crate::error::{self, Fault, InterposeError};
use crate::meet::{Use, everybody};
use crate::sys::{self, Opaque};
use crate::table::{Interposed, guarded};
use crate::{memory, the_table};

const FUNCTION: &str = "PJRT_Transfers_PJRT_Buffer_CopyToRemoteDevice";

/// Told, once, how it ended: an error or null, and whether anything was sent.
type Sent = unsafe extern "C" fn(Opaque, bool, *mut c_void);

#[repr(C)]
pub struct Send {
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
pub const WITHOUT_FREE: usize = std::mem::offset_of!(Send, free);

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

/// `PJRT_Transfers_PJRT_Buffer_CopyToRemoteDevice`.
pub unsafe extern "C" fn send(args: *mut Send) {
    // SAFETY: every arguments struct starts with its size.
    let size = unsafe { args.cast::<usize>().read() };
    if size < WITHOUT_FREE {
        // Where it wants to be told so isn't known.
        tracing::error!("{FUNCTION} was called with {size} bytes of arguments, expected {WITHOUT_FREE} or more");
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
    let refused = guarded(FUNCTION, |on| {
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
    let report = Arc::new(Mutex::new(Some(report)));
    let tell = |report: &Mutex<Option<Report>>, outcome| {
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
