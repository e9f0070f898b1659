//! What this plugin itself refuses, and its errors in PJRT's form.

use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::LazyLock;

use parking_lot::Mutex;
use podring_topology::TopologyError;

use crate::sys::{self, Opaque};

/// A refusal of the interposer's own; what the wrapped plugin refuses keeps its own words.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum InterposeError {
    /// The wrapped plugin's file could not be used.
    #[error("cannot wrap the PJRT plugin {}: {reason}", file.display())]
    Plugin {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// No plugin to wrap was found.
    #[error("no PJRT plugin to wrap: {reason}")]
    NoPlugin {
        /// Where it was looked for.
        reason: String,
    },
    /// `PODRING_SLICE` names no slice.
    #[error("PODRING_SLICE={name}: {source}")]
    Slice {
        /// What was given.
        name: String,
        /// Why it is no slice.
        source: Box<TopologyError>,
    },
    /// A launcher's variable is no number.
    #[error("{variable}={value}: expected a whole number of 0 or more")]
    Variable {
        /// Its name.
        variable: &'static str,
        /// What it holds.
        value: String,
    },
    /// More ranks than virtual chips.
    #[error(
        "rank {rank} of {world}: the slice {slice} has {devices} devices, and each rank is one. Choose a larger \
         slice, or start at most {devices} ranks"
    )]
    TooManyRanks {
        /// This rank.
        rank: u32,
        /// Ranks in the job.
        world: u32,
        /// The slice.
        slice: String,
        /// Its devices.
        devices: u32,
    },
    /// A rank that the job doesn't have.
    #[error("RANK={rank} with WORLD_SIZE={world} (1 where it is not set): expected a rank below WORLD_SIZE")]
    RankBeyondWorld {
        /// This rank.
        rank: u32,
        /// Ranks in the job.
        world: u32,
    },
    /// A second client while the first is alive.
    #[error("a process has one client of a virtual slice, and it exists already (slice {slice}, rank {rank})")]
    SecondClient {
        /// The slice.
        slice: String,
        /// This rank.
        rank: u32,
    },
    /// A device that this process doesn't hold, or that the slice doesn't have.
    #[error("{what} {id} on rank {rank} of the virtual slice {slice}: expected {expected}")]
    NoSuchDevice {
        /// `device` or `local device`.
        what: &'static str,
        /// Which was asked for.
        id: i32,
        /// This rank.
        rank: u32,
        /// The slice.
        slice: String,
        /// What there is.
        expected: String,
    },
    /// A caller's struct is shorter than the interface's oldest version has it.
    #[error("{function} was called with {got} bytes of arguments, expected {expected} or more")]
    ShortArguments {
        /// The function.
        function: &'static str,
        /// Bytes.
        got: usize,
        /// Bytes.
        expected: usize,
    },
    /// The compile options are no such protobuf.
    #[error("the compile options cannot be read: {reason}")]
    Options {
        /// What is wrong.
        reason: &'static str,
    },
    /// A program of a virtual slice that can't be saved.
    #[error("{function} is not to be had on the virtual slice {slice} for {why}")]
    NotSaved {
        /// The function.
        function: &'static str,
        /// The slice.
        slice: String,
        /// Which program.
        why: &'static str,
    },
    /// Bytes that are no saved program.
    #[error("the compiled program can't be loaded: {reason}")]
    Saved {
        /// What is wrong.
        reason: String,
    },
    /// No framework has created a client through this plugin.
    #[error("there is no client of a virtual slice in this process")]
    NoClient,
    /// A buffer that is not dense in row-major order.
    #[error("expected a buffer in row-major order without tiles, got another layout")]
    Layout,
    /// XLA has no such element type.
    #[error("no buffer can have elements of {}", dtype.name())]
    Element {
        /// The type.
        dtype: podring_collective::DType,
    },
    /// A program with a collective that can't be run.
    #[error("{program} can't be run on a virtual slice: {why}")]
    Program {
        /// Its name.
        program: String,
        /// What in it.
        why: String,
    },
    /// A program with a collective before there is a group.
    #[error("a program with a collective was run before init_process_group(\"tpu\"), or after its end")]
    NoWorld,
    /// A collective of a program failed.
    #[error("{what}: {why}")]
    Failed {
        /// What was being done.
        what: &'static str,
        /// The group's words, or the plugin's.
        why: String,
    },
    /// A buffer that can't go to another chip, or come from one.
    #[error("{what}: {why}")]
    Transfer {
        /// What was asked for.
        what: &'static str,
        /// Why it can't be.
        why: String,
    },
    /// A bug, caught before it crosses into the caller.
    #[error("podring panicked in {function}: {reason}; this is a bug")]
    Panicked {
        /// The function.
        function: &'static str,
        /// The panic's words.
        reason: String,
    },
}

impl InterposeError {
    /// The status code that PJRT's callers see (those of absl).
    fn code(&self) -> c_int {
        match self {
            InterposeError::Slice { .. }
            | InterposeError::Variable { .. }
            | InterposeError::TooManyRanks { .. }
            | InterposeError::RankBeyondWorld { .. }
            | InterposeError::ShortArguments { .. }
            | InterposeError::Options { .. }
            | InterposeError::Saved { .. } => 3,
            InterposeError::NoSuchDevice { .. } => 5,
            InterposeError::SecondClient { .. } | InterposeError::NoClient | InterposeError::NoWorld => 9,
            InterposeError::NotSaved { .. }
            | InterposeError::Layout
            | InterposeError::Element { .. }
            | InterposeError::Transfer { .. }
            | InterposeError::Program { .. } => 12,
            InterposeError::Panicked { .. } | InterposeError::Failed { .. } => 13,
            InterposeError::Plugin { .. } | InterposeError::NoPlugin { .. } => 14,
        }
    }
}

/// Why an overridden function does not succeed.
pub enum Fault {
    /// A refusal of ours.
    Ours(InterposeError),
    /// The plugin's own error, to be handed on.
    Theirs(Opaque),
}

impl From<crate::wire::Damaged> for InterposeError {
    fn from(damaged: crate::wire::Damaged) -> InterposeError {
        InterposeError::Options { reason: damaged.0 }
    }
}

impl From<InterposeError> for Fault {
    fn from(error: InterposeError) -> Fault {
        Fault::Ours(error)
    }
}

/// One of our errors as a caller holds it.
struct Given {
    message: String,
    code: c_int,
}

/// Addresses of those that callers hold. Looked into only where an error is.
static GIVEN: LazyLock<Mutex<HashSet<usize>>> = LazyLock::new(Mutex::default);

/// Makes a `PJRT_Error`, which the caller releases through the table.
pub fn give(error: &InterposeError) -> Opaque {
    let raw = Box::into_raw(Box::new(Given { message: error.to_string(), code: error.code() }));
    GIVEN.lock().insert(raw as usize);
    raw.cast()
}

/// Ends an error that [`give`] made and that no caller holds any more.
pub fn take_back(error: Opaque) {
    if !error.is_null() {
        let mut args = sys::ErrorDestroy { error, ..Default::default() };
        // SAFETY: this function's arguments.
        unsafe { destroy((&raw mut args).cast()) };
    }
}

fn ours<'a>(error: Opaque) -> Option<&'a Given> {
    // SAFETY: in the set, so made by `give` and not destroyed yet.
    GIVEN.lock().contains(&(error as usize)).then(|| unsafe { &*error.cast::<Given>() })
}

/// `PJRT_Error_Destroy`: true if the error was ours.
///
/// # Safety
/// `args` points to this function's arguments.
pub unsafe fn destroy(args: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    let args = unsafe { &*args.cast::<sys::ErrorDestroy>() };
    if !GIVEN.lock().remove(&(args.error as usize)) {
        return false;
    }
    // SAFETY: it was in the set, so made by `give`; out of the set now, so destroyed once.
    drop(unsafe { Box::from_raw(args.error.cast::<Given>()) });
    true
}

/// `PJRT_Error_Message`: true if the error was ours.
///
/// # Safety
/// As for [`destroy`].
pub unsafe fn message(args: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    let args = unsafe { &mut *args.cast::<sys::ErrorMessage>() };
    let Some(given) = ours(args.error) else { return false };
    args.message = given.message.as_ptr().cast::<c_char>();
    args.message_size = given.message.len();
    true
}

/// `PJRT_Error_GetCode`: true if the error was ours.
///
/// # Safety
/// As for [`destroy`].
pub unsafe fn code(args: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    let args = unsafe { &mut *args.cast::<sys::ErrorGetCode>() };
    let Some(given) = ours(args.error) else { return false };
    args.code = given.code;
    true
}

/// `PJRT_Error_ForEachPayload`: true if the error was ours, which carries none.
///
/// # Safety
/// As for [`destroy`].
pub unsafe fn payloads(args: *mut c_void) -> bool {
    // SAFETY: the caller's promise; the error is the first field, as in the other functions.
    let args = unsafe { &*args.cast::<sys::ErrorDestroy>() };
    ours(args.error).is_some()
}

/// The slot of that function, which tables of 0.81 lack. torch_tpu 0.2.0 calls it on every error.
pub const PAYLOADS: usize = 132;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_read_and_released_through_the_interface() {
        let error = InterposeError::Options { reason: "cut short" };
        let raw = give(&error);
        let mut said = sys::ErrorMessage { error: raw, ..Default::default() };
        let mut number = sys::ErrorGetCode { error: raw, ..Default::default() };
        let mut end = sys::ErrorDestroy { error: raw, ..Default::default() };
        let end: *mut c_void = (&raw mut end).cast();
        // SAFETY: arguments of these functions.
        unsafe {
            assert!(message((&raw mut said).cast()));
            let text = std::slice::from_raw_parts(said.message.cast::<u8>(), said.message_size);
            assert_eq!(text, error.to_string().as_bytes());
            assert!(code((&raw mut number).cast()));
            assert_eq!(number.code, 3);
            assert!(destroy(end));
            // Not ours any more: whoever asks the plugin about it gets the plugin's answer.
            assert!(!destroy(end));
        }
    }
}
