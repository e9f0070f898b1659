//! A PJRT plugin over another one.
//!
//! Frameworks load it in libtpu's place ([`api`] is what `GetPjrtApi` returns). On a TPU host every entry of its table
//! is libtpu's own, one excepted: client creation, which it watches so that the process group can share the client.
//! With `PODRING_SLICE` set there need be no TPU: it wraps XLA's CPU plugin and presents a [`podring_topology::Slice`]
//! of virtual chips, of which this process holds the one of its rank.
//!
//! The table is a copy of the wrapped plugin's, as long as that one is, so that entries which this crate has never
//! heard of are forwarded too, at no cost: the caller gets the plugin's own function pointers.

mod chips;
mod error;
mod ffi;
mod hlo;
mod host_memory;
mod meet;
pub mod memory;
mod options;
mod plan;
mod presented;
mod programs;
mod rewrite;
mod saved;
mod settings;
mod step;
mod sys;
mod table;
mod transfers;
mod wire;

use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::OnceLock;

use parking_lot::Mutex;

pub use error::InterposeError;
pub use meet::{end_world, set_world};
pub use programs::{Counts, counts};
pub use settings::{Settings, Wrapped};

use table::Interposed;

static TABLE: OnceLock<Result<Interposed, InterposeError>> = OnceLock::new();
static GIVEN: Mutex<Option<Settings>> = Mutex::new(None);

/// Says what to wrap, for the first call of [`api`]. Without it the environment says.
///
/// Returns false if the table exists already: then nothing changes.
pub fn configure(settings: Settings) -> bool {
    let mut given = GIVEN.lock();
    if TABLE.get().is_some() {
        return false;
    }
    *given = Some(settings);
    true
}

/// The `PJRT_Api` table, made at the first call; null if nothing could be wrapped, for the reason that [`failure`]
/// gives and that is printed once.
pub fn api() -> *const c_void {
    let made = TABLE.get_or_init(|| {
        let settings = GIVEN.lock().clone().map_or_else(Settings::from_environment, Ok)?;
        Interposed::over(settings)
    });
    match made {
        Ok(interposed) => interposed.table(),
        Err(error) => {
            // The caller is a framework that knows only null: the reason would be lost.
            eprintln!("podring: {error}");
            std::ptr::null()
        }
    }
}

fn the_table() -> Option<&'static Interposed> {
    TABLE.get()?.as_ref().ok()
}

/// Whether [`api`] was called, that is, whether a framework has loaded this plugin.
pub fn is_loaded() -> bool {
    TABLE.get().is_some()
}

/// Whether a framework has libtpu through this plugin.
pub fn over_libtpu() -> bool {
    the_table().is_some_and(|on| on.wrapped == Wrapped::Libtpu)
}

/// Why [`api`] returned null.
pub fn failure() -> Option<String> {
    TABLE.get()?.as_ref().err().map(ToString::to_string)
}

/// The client that a framework created through this plugin: the wrapped plugin's table and its `PJRT_Client`.
///
/// Both pointers are null until there is one. The client is alive until the framework destroys it.
pub fn client() -> (*const c_void, *mut c_void) {
    the_table().map_or((std::ptr::null(), std::ptr::null_mut()), Interposed::client)
}

/// The client that a framework created through this plugin, for others in this process to run programs on as well.
pub struct Shared {
    /// This plugin's table: what is compiled through it is played on a virtual slice's fabric.
    pub table: *const c_void,
    /// Its `PJRT_Client`, the framework's to destroy.
    pub client: *mut c_void,
    /// The wrapped plugin's file.
    pub plugin: PathBuf,
    /// The virtual slice; none on a TPU.
    pub slice: Option<podring_topology::Slice>,
}

/// That client; none before a framework has created it.
pub fn shared() -> Option<Shared> {
    let on = the_table()?;
    let client = on.client().1;
    if client.is_null() {
        return None;
    }
    let slice = match &on.wrapped {
        Wrapped::Virtual(slice) => Some(*slice),
        Wrapped::Libtpu => None,
    };
    Some(Shared { table: on.table(), client, plugin: on.file.clone(), slice })
}

/// What the slice's devices say of themselves: libtpu's `device_kind`, and their memory in bytes.
pub fn device_facts(slice: &podring_topology::Slice) -> (&'static str, u64) {
    (chips::kind(slice.generation()), chips::memory(slice))
}
