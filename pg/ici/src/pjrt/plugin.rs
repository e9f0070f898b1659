//! A loaded plugin: its table, its version, and calls whose errors become Rust values.

use std::{
    collections::HashMap,
    ffi::{c_char, c_void},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;

use super::{
    error::{Code, PjrtError},
    sys::{self, Arguments, Entry, Opaque, TableHead},
};

/// The oldest minor version of the interface that was tried.
pub const OLDEST_MINOR: i32 = 81;

/// A PJRT plugin. Loaded once per file and never unloaded: plugins start threads that outlive any handle.
pub struct Plugin {
    table: *const TableHead,
    file: PathBuf,
    major: i32,
    minor: i32,
}

// SAFETY: the table is constant once loaded, and PJRT's functions may be called from any thread.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Plugin({}, {}.{})", self.file.display(), self.major, self.minor)
    }
}

/// The plugins of this process by their real path.
static LOADED: OnceLock<Mutex<HashMap<PathBuf, Arc<Plugin>>>> = OnceLock::new();

impl Plugin {
    /// Loads and initializes the plugin in `file`, or returns the one loaded before.
    ///
    /// # Safety
    /// The file's code runs in this process with all its rights: it must be a PJRT plugin that the caller trusts.
    pub unsafe fn load(file: &Path) -> Result<Arc<Plugin>, PjrtError> {
        let load_error = |reason: String| PjrtError::Load { file: file.to_owned(), reason };
        let real = file.canonicalize().map_err(|error| load_error(error.to_string()))?;
        // Held while loading: two threads must not initialize one plugin at once.
        let mut loaded = LOADED.get_or_init(Mutex::default).lock();
        if let Some(plugin) = loaded.get(&real) {
            return Ok(plugin.clone());
        }
        // SAFETY: the caller vouches for the file.
        let library = unsafe { libloading::Library::new(&real) }.map_err(|error| load_error(error.to_string()))?;
        // SAFETY: the symbol's type is given by the header.
        let get = unsafe { library.get::<unsafe extern "C" fn() -> *const TableHead>(b"GetPjrtApi\0") }
            .map_err(|_| PjrtError::NotAPlugin { file: real.clone(), reason: "it exports no GetPjrtApi" })?;
        // SAFETY: takes nothing; the caller vouches for the file.
        let table = unsafe { get() };
        // Never unloaded: its threads and its table live as long as the process.
        std::mem::forget(library);
        // SAFETY: the function returns a pointer to a constant table, or null.
        let plugin = Arc::new(unsafe { Plugin::from_table(table, real.clone()) }?);
        plugin.call(&mut sys::PluginInitialize::default())?;
        loaded.insert(real, plugin.clone());
        Ok(plugin)
    }

    /// A plugin that this process has loaded and initialized already, by its table. `file` is what it is called.
    ///
    /// # Safety
    /// `table` is null, or a whole PJRT table that stays as it is for ever.
    pub unsafe fn over(table: *const c_void, file: &Path) -> Result<Arc<Plugin>, PjrtError> {
        // SAFETY: the caller's promise.
        Ok(Arc::new(unsafe { Plugin::from_table(table.cast(), file.to_owned()) }?))
    }

    /// Checks a table's version and size.
    ///
    /// # Safety
    /// `table` is null, or points to at least a table's head that stays as it is for ever, with as many bytes as it
    /// says.
    unsafe fn from_table(table: *const TableHead, file: PathBuf) -> Result<Plugin, PjrtError> {
        // SAFETY: the caller's promise.
        let Some(head) = (unsafe { table.as_ref() }) else {
            return Err(PjrtError::NotAPlugin { file, reason: "its GetPjrtApi returned null" });
        };
        if head.struct_size < size_of::<TableHead>() {
            return Err(PjrtError::NotAPlugin { file, reason: "its table is shorter than its head" });
        }
        let (major, minor) = (head.major, head.minor);
        if major != 0 || minor < OLDEST_MINOR {
            return Err(PjrtError::Version { file, major, minor });
        }
        Ok(Plugin { table, file, major, minor })
    }

    /// Where it was loaded from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Major and minor version of its interface.
    pub fn version(&self) -> (i32, i32) {
        (self.major, self.minor)
    }

    /// The facts that the plugin tells of itself, such as `stablehlo_current_version`.
    pub fn attributes(&self) -> Result<Vec<(String, super::Value)>, PjrtError> {
        let mut args = sys::PluginAttributes::default();
        self.call(&mut args)?;
        // SAFETY: the plugin returned this list; it lives as long as the plugin.
        Ok(unsafe { super::value::read_all(args.attributes, args.num_attributes) })
    }

    fn entry<A: Arguments>(&self) -> Result<Entry, PjrtError> {
        let missing = || PjrtError::Missing { file: self.file.clone(), minor: self.minor, function: A::NAME };
        let end = size_of::<TableHead>() + (A::SLOT + 1) * size_of::<usize>();
        // SAFETY: the table lives for ever and its head was checked.
        if unsafe { (*self.table).struct_size } < end {
            return Err(missing());
        }
        // SAFETY: the slot lies inside the table by the check above, and holds a function pointer or null.
        let slot = unsafe { self.table.add(1).cast::<Option<Entry>>().add(A::SLOT).read() };
        slot.ok_or_else(missing)
    }

    /// Calls the function that `args` belongs to.
    pub(super) fn call<A: Arguments>(&self, args: &mut A) -> Result<(), PjrtError> {
        let entry = self.entry::<A>()?;
        // SAFETY: the arguments are those of the function in this slot (the trait's promise), sized and initialized.
        let error = unsafe { entry((args as *mut A).cast()) };
        if error.is_null() { Ok(()) } else { Err(self.take_error(error, A::NAME)) }
    }

    /// Calls a destructor: nothing can be done about its failure, so that it is only reported.
    pub(super) fn destroy<A: Arguments>(&self, args: &mut A) {
        if let Err(error) = self.call(args) {
            tracing::warn!(%error, "a PJRT object could not be destroyed");
        }
    }

    /// An error that the plugin handed over, destroyed.
    pub(super) fn take_error(&self, error: Opaque, function: &'static str) -> PjrtError {
        let mut code = sys::ErrorGetCode { error, ..Default::default() };
        // The code's own getter could fail in principle; then it stays 0, which reads as Unknown.
        if let Ok(entry) = self.entry::<sys::ErrorGetCode>() {
            // SAFETY: the error is alive; the arguments are this function's.
            unsafe { entry((&raw mut code).cast()) };
        }
        let mut message = sys::ErrorMessage { error, ..Default::default() };
        if let Ok(entry) = self.entry::<sys::ErrorMessage>() {
            // SAFETY: as above. This function returns nothing, and nothing is read of it.
            unsafe { entry((&raw mut message).cast()) };
        }
        // SAFETY: the message belongs to the error, which is destroyed only below.
        let text = unsafe { text(message.message, message.message_size) };
        if let Ok(entry) = self.entry::<sys::ErrorDestroy>() {
            let mut args = sys::ErrorDestroy { error, ..Default::default() };
            // SAFETY: the error is ours to destroy and isn't used afterwards. This function returns nothing.
            unsafe { entry((&raw mut args).cast()) };
        }
        PjrtError::Call { file: self.file.clone(), function, code: Code::from_number(code.code), message: text }
    }
}

/// A plugin's string.
///
/// # Safety
/// `data` is null or points to `size` bytes.
pub(super) unsafe fn text(data: *const c_char, size: usize) -> String {
    if data.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), size) };
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(struct_size: usize, major: i32, minor: i32) -> TableHead {
        TableHead {
            struct_size,
            extension_start: std::ptr::null_mut(),
            version_struct_size: 24,
            version_extension_start: std::ptr::null_mut(),
            major,
            minor,
        }
    }

    fn check(head: &TableHead) -> Result<Plugin, PjrtError> {
        // SAFETY: a head that says its own size.
        unsafe { Plugin::from_table(head, "x.so".into()) }
    }

    #[test]
    fn unknown_versions_and_short_tables_are_refused() {
        assert!(matches!(check(&head(40, 1, 0)), Err(PjrtError::Version { major: 1, minor: 0, .. })));
        assert!(matches!(check(&head(40, 0, 80)), Err(PjrtError::Version { major: 0, minor: 80, .. })));
        assert!(matches!(check(&head(8, 0, 90)), Err(PjrtError::NotAPlugin { .. })));
        // SAFETY: null is allowed.
        let null = unsafe { Plugin::from_table(std::ptr::null(), "x.so".into()) };
        assert!(matches!(null, Err(PjrtError::NotAPlugin { .. })));
    }

    #[test]
    fn a_function_beyond_the_table_is_missing() {
        let head = head(40, 0, 90);
        let plugin = check(&head).unwrap();
        let error = plugin.call(&mut sys::PluginInitialize::default()).unwrap_err();
        assert_eq!(error, PjrtError::Missing { file: "x.so".into(), minor: 90, function: "PJRT_Plugin_Initialize" });
    }

    #[test]
    fn files_that_are_no_plugin_are_named() {
        // SAFETY: neither file is loaded as a plugin: one doesn't exist, the other is text.
        let missing = unsafe { Plugin::load(Path::new("/nonexistent/plugin.so")) }.unwrap_err();
        assert!(matches!(missing, PjrtError::Load { ref file, .. } if file == Path::new("/nonexistent/plugin.so")));
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        // SAFETY: as above.
        let text = unsafe { Plugin::load(&manifest) }.unwrap_err();
        assert!(matches!(text, PjrtError::Load { .. }), "{text}");
    }
}
