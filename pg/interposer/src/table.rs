//! The table: a copy of the wrapped plugin's with a few entries of ours.

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use parking_lot::RwLock;

use crate::error::{self, Fault, InterposeError};
use crate::presented::{self, Presented};
use crate::settings::{Settings, Wrapped};
use crate::sys::{self, Arguments, Entry, Opaque, TableHead};
use crate::{host_memory, the_table, transfers};

/// The oldest minor version of the interface that was tried.
const OLDEST_MINOR: i32 = 81;

/// One overridden function.
pub trait Handler {
    /// Its arguments, which say which slot it is in.
    type Args: Arguments;
    /// What it does in the plugin's place.
    fn handle(on: &Interposed, args: &mut Self::Args) -> Result<(), Fault>;
}

/// A wrapped plugin and the table over it. Made once, never freed: frameworks keep pointers into it.
pub struct Interposed {
    original: NonNull<TableHead>,
    table: NonNull<TableHead>,
    pub(crate) wrapped: Wrapped,
    /// The wrapped plugin's file.
    pub(crate) file: PathBuf,
    /// What callers see of the slice; there from client creation to its end.
    presented: RwLock<Option<Arc<Presented>>>,
    client: AtomicPtr<c_void>,
}

// SAFETY: both tables are constant once made, and PJRT's functions may be called from any thread.
unsafe impl Send for Interposed {}
// SAFETY: as above.
unsafe impl Sync for Interposed {}

impl Interposed {
    /// Loads the plugin and makes the table.
    pub fn over(settings: Settings) -> Result<Interposed, InterposeError> {
        let original = load(&settings.plugin)?;
        // SAFETY: a table as `load` checked it.
        let table = unsafe { copy(original) };
        let mut interposed = Interposed {
            original,
            table,
            wrapped: settings.wrapped,
            file: settings.plugin,
            presented: RwLock::new(None),
            client: AtomicPtr::new(std::ptr::null_mut()),
        };
        interposed.set::<WatchCreate>();
        interposed.set::<WatchDestroy>();
        interposed.put(sys::ErrorDestroy::SLOT, destroy_error);
        interposed.put(sys::ErrorMessage::SLOT, error_message);
        interposed.put(sys::ErrorGetCode::SLOT, error_code);
        if interposed.has(error::PAYLOADS) {
            interposed.put(error::PAYLOADS, error_payloads);
        }
        if matches!(interposed.wrapped, Wrapped::Virtual(_)) {
            presented::install(&mut interposed);
            // SAFETY: our own copy, not shared yet.
            let head = unsafe { interposed.table.as_mut() };
            head.extension_start = transfers::extension(host_memory::extension(head.extension_start));
        }
        Ok(interposed)
    }

    /// What `GetPjrtApi` returns.
    pub fn table(&self) -> *const c_void {
        self.table.as_ptr().cast()
    }

    /// The plugin's table and the client.
    pub fn client(&self) -> (*const c_void, *mut c_void) {
        let client = self.client.load(Ordering::Acquire);
        if client.is_null() { (std::ptr::null(), client) } else { (self.original.as_ptr().cast(), client) }
    }

    /// Puts a handler into its slot.
    pub fn set<H: Handler>(&mut self) {
        self.put(H::Args::SLOT, enter::<H>);
    }

    fn put(&mut self, slot: usize, entry: Entry) {
        // SAFETY: our own copy, which nobody else has yet; every overridden slot is below the length that `load` asks
        // for.
        unsafe { self.table.as_ptr().add(1).cast::<Entry>().add(slot).write(entry) };
    }

    /// Whether the plugin's table is long enough to have a slot, and has something in it.
    fn has(&self, slot: usize) -> bool {
        // SAFETY: a plugin's table starts with this head.
        let size = unsafe { self.original.as_ref() }.struct_size;
        // SAFETY: read only if the slot lies within the table.
        size >= size_of::<TableHead>() + (slot + 1) * size_of::<Entry>()
            && unsafe { self.original.as_ptr().add(1).cast::<Option<Entry>>().add(slot).read() }.is_some()
    }

    /// The plugin's extension of a kind.
    pub fn extension(&self, kind: c_int) -> Option<NonNull<sys::ExtensionBase>> {
        // SAFETY: a plugin's table starts with this head.
        let mut next = NonNull::new(unsafe { self.original.as_ref() }.extension_start);
        while let Some(one) = next {
            // SAFETY: one of the plugin's list, alive as long as the plugin.
            let head = unsafe { one.as_ref() };
            if head.kind == kind {
                return Some(one);
            }
            next = NonNull::new(head.next);
        }
        None
    }

    fn original(&self, slot: usize) -> Entry {
        // SAFETY: as in `put`; `load` found these slots filled.
        unsafe { self.original.as_ptr().add(1).cast::<Entry>().add(slot).read() }
    }

    /// Calls the plugin's own function.
    pub fn forward<A: Arguments>(&self, args: &mut A) -> Result<(), Fault> {
        // SAFETY: the arguments are those of the function in this slot (the trait's promise).
        let error = unsafe { self.original(A::SLOT)(std::ptr::from_mut(args).cast()) };
        if error.is_null() { Ok(()) } else { Err(Fault::Theirs(error)) }
    }

    /// The client and this process's device in it.
    pub fn own(&self) -> Option<(Opaque, Opaque)> {
        let device = self.presented()?.own_device();
        Some((self.client().1, device))
    }

    /// The words of a plugin's error.
    pub fn message(&self, error: Opaque) -> String {
        let mut said = sys::ErrorMessage { error, ..Default::default() };
        // SAFETY: this function's arguments, for an error that is alive. What it returns is nothing; its text lives as
        // long as the error.
        unsafe {
            self.original(sys::ErrorMessage::SLOT)((&raw mut said).cast());
            match said.message_size {
                0 => String::new(),
                size => {
                    String::from_utf8_lossy(std::slice::from_raw_parts(said.message.cast::<u8>(), size)).into_owned()
                }
            }
        }
    }

    /// The words of a plugin's error, which this ends.
    pub fn take_message(&self, error: Opaque) -> String {
        let text = self.message(error);
        let mut end = sys::ErrorDestroy { error, ..Default::default() };
        // SAFETY: this function's arguments, for an error that is ours to end. What it returns is nothing.
        unsafe { self.original(sys::ErrorDestroy::SLOT)((&raw mut end).cast()) };
        text
    }

    /// The words of what went wrong.
    pub fn words(&self, fault: &Fault) -> String {
        match fault {
            Fault::Ours(error) => error.to_string(),
            Fault::Theirs(error) => self.message(*error),
        }
    }

    /// The slice as callers see it. There is one as soon as there is a client, without which none of the functions that
    /// ask can be called.
    pub fn presented(&self) -> Option<Arc<Presented>> {
        self.presented.read().clone()
    }
}

/// Slots that are overridden or called must be there: up to `PJRT_Client_CreateViewOfDeviceBuffer`.
const SLOTS: usize = 94;

fn load(file: &Path) -> Result<NonNull<TableHead>, InterposeError> {
    let refused = |reason: String| InterposeError::Plugin { file: file.to_owned(), reason };
    if let (Some(own), Ok(given)) = (own_file(), file.canonicalize())
        && own == given
    {
        return Err(refused("it is podring's own interposer".to_owned()));
    }
    // SAFETY: the file is what the user's settings name as a PJRT plugin, to be run in this process.
    let library = unsafe { libloading::Library::new(file) }.map_err(|error| refused(error.to_string()))?;
    let table = {
        // SAFETY: the symbol's type is given by the header.
        let get = unsafe { library.get::<unsafe extern "C" fn() -> *mut TableHead>(b"GetPjrtApi\0") }
            .map_err(|_| refused("it exports no GetPjrtApi".to_owned()))?;
        // SAFETY: takes nothing.
        unsafe { get() }
    };
    // Never unloaded: plugins start threads that outlive any handle.
    std::mem::forget(library);
    let Some(table) = NonNull::new(table) else { return Err(refused("its GetPjrtApi returned null".to_owned())) };
    // SAFETY: a plugin's table starts with this head.
    let head = unsafe { table.as_ref() };
    if head.major != 0 || head.minor < OLDEST_MINOR {
        return Err(refused(format!(
            "it speaks PJRT {}.{}, expected 0.{OLDEST_MINOR} or a later 0.x",
            head.major, head.minor
        )));
    }
    let expected = size_of::<TableHead>() + SLOTS * size_of::<Entry>();
    if head.struct_size < expected {
        return Err(refused(format!("its table has {} bytes, expected {expected} or more", head.struct_size)));
    }
    for slot in 0..SLOTS {
        // SAFETY: within the table's size, checked above.
        if unsafe { table.as_ptr().add(1).cast::<Option<Entry>>().add(slot).read() }.is_none() {
            return Err(refused(format!("slot {slot} of its table is empty")));
        }
    }
    Ok(table)
}

/// The file that this code is in.
fn own_file() -> Option<PathBuf> {
    // SAFETY: plain pointers; all of them may be zero.
    let mut about: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: an address within this file, and a place for the answer.
    if unsafe { libc::dladdr(own_file as *const c_void, &mut about) } == 0 || about.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's own string.
    let name = unsafe { CStr::from_ptr(about.dli_fname) };
    Path::new(OsStr::from_bytes(name.to_bytes())).canonicalize().ok()
}

/// A copy of a table that lives for ever.
///
/// # Safety
/// `original` points to as many bytes as its head says.
unsafe fn copy(original: NonNull<TableHead>) -> NonNull<TableHead> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { original.as_ref() }.struct_size;
    // In words, so that it is aligned as the original is.
    let words = Box::leak(vec![0usize; bytes.div_ceil(size_of::<usize>())].into_boxed_slice());
    // SAFETY: the copy has at least `bytes` bytes, and nobody else has it.
    unsafe { std::ptr::copy_nonoverlapping(original.as_ptr().cast::<u8>(), words.as_mut_ptr().cast(), bytes) };
    NonNull::from(words).cast()
}

/// The entry of every overridden function but those of errors.
unsafe extern "C" fn enter<H: Handler>(args: *mut c_void) -> Opaque {
    guarded(H::Args::NAME, |on| {
        // SAFETY: every arguments struct starts with its size.
        let size = unsafe { args.cast::<usize>().read() };
        if size < H::Args::LEN {
            let function = H::Args::NAME;
            return Err(InterposeError::ShortArguments { function, got: size, expected: H::Args::LEN }.into());
        }
        // SAFETY: this slot's arguments, long enough by the check above, and the caller's for the call.
        H::handle(on, unsafe { &mut *args.cast::<H::Args>() })
    })
}

/// Runs `act`; what goes wrong, a panic too, becomes a `PJRT_Error`.
pub fn guarded(function: &'static str, act: impl FnOnce(&'static Interposed) -> Result<(), Fault>) -> Opaque {
    let outcome = catch_unwind(AssertUnwindSafe(|| the_table().map_or(Ok(()), act)));
    match outcome {
        Ok(Ok(())) => std::ptr::null_mut(),
        Ok(Err(Fault::Theirs(error))) => error,
        Ok(Err(Fault::Ours(refused))) => error::give(&refused),
        Err(panic) => {
            let said = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(|s| &**s));
            let reason = said.unwrap_or("no message").to_owned();
            error::give(&InterposeError::Panicked { function, reason })
        }
    }
}

macro_rules! of_errors {
    ($($entry:ident = $ours:path, $slot:expr;)*) => { $(
        unsafe extern "C" fn $entry(args: *mut c_void) -> Opaque {
            // SAFETY: called through this slot of the table, so with its arguments.
            if !unsafe { $ours(args) } && let Some(on) = the_table() {
                // SAFETY: as above; handed on as they came.
                return unsafe { on.original($slot)(args) };
            }
            std::ptr::null_mut()
        }
    )* };
}

of_errors! {
    destroy_error = error::destroy, sys::ErrorDestroy::SLOT;
    error_message = error::message, sys::ErrorMessage::SLOT;
    error_code = error::code, sys::ErrorGetCode::SLOT;
    error_payloads = error::payloads, error::PAYLOADS;
}

/// Client creation: watched always; on a virtual slice with the options that the CPU plugin knows.
struct WatchCreate;

impl Handler for WatchCreate {
    type Args = sys::ClientCreate;

    fn handle(on: &Interposed, args: &mut sys::ClientCreate) -> Result<(), Fault> {
        if let Wrapped::Virtual(slice) = &on.wrapped {
            let mut presented = on.presented.write();
            *presented = Some(Arc::new(presented::create(on, slice, presented.is_some(), args)?));
        } else {
            on.forward(args)?;
        }
        on.client.store(args.client, Ordering::Release);
        Ok(())
    }
}

struct WatchDestroy;

impl Handler for WatchDestroy {
    type Args = sys::ClientDestroy;

    fn handle(on: &Interposed, args: &mut sys::ClientDestroy) -> Result<(), Fault> {
        let watched = args.client;
        if on.client.compare_exchange(watched, std::ptr::null_mut(), Ordering::AcqRel, Ordering::Acquire).is_ok() {
            *on.presented.write() = None;
        }
        on.forward(args)
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
