//! Pinned host memory: an extension that torch_tpu (0.2.0) asks for where tensors are pinned or saved, and that XLA's
//! CPU plugin lacks. On a CPU any memory of the host will do.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use crate::sys::{ExtensionBase, Opaque};

/// `HostMemoryAllocator` among the interface's extensions.
const KIND: c_int = 23;
/// A page: what a pinned allocation of a real plugin is aligned to.
const ALIGNMENT: usize = 4096;

#[repr(C)]
struct Extension {
    base: ExtensionBase,
    allocate: unsafe extern "C" fn(*mut Allocate) -> Opaque,
}

// SAFETY: constant once made.
unsafe impl Send for Extension {}
// SAFETY: as above.
unsafe impl Sync for Extension {}

/// Arguments of `allocate`; found by reading what torch_tpu 0.2.0 passes.
#[repr(C)]
struct Allocate {
    struct_size: usize,
    extension_start: Opaque,
    client: Opaque,
    size: usize,
    numa_node: c_int,
    /// Out: null if there is no memory.
    memory: *mut c_void,
    /// Out: to be called with the memory and `argument`.
    deleter: Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>,
    /// Out.
    argument: *mut c_void,
}

/// The head of a list of extensions that continues with the plugin's own.
pub fn extension(plugins: *mut ExtensionBase) -> *mut ExtensionBase {
    static EXTENSION: OnceLock<Extension> = OnceLock::new();
    let ours = EXTENSION.get_or_init(|| Extension {
        base: ExtensionBase { struct_size: size_of::<Extension>(), kind: KIND, next: plugins },
        allocate,
    });
    // The interface's types know no `const`; nobody writes to an extension.
    std::ptr::from_ref(&ours.base).cast_mut()
}

unsafe extern "C" fn allocate(args: *mut Allocate) -> Opaque {
    // SAFETY: called through the extension, so with its arguments.
    let args = unsafe { &mut *args };
    let mut memory = std::ptr::null_mut();
    // SAFETY: a place for the result, a power of two, and a size.
    if unsafe { libc::posix_memalign(&mut memory, ALIGNMENT, args.size.max(1)) } != 0 {
        memory = std::ptr::null_mut();
    }
    args.memory = memory;
    args.deleter = Some(release);
    args.argument = std::ptr::null_mut();
    std::ptr::null_mut()
}

unsafe extern "C" fn release(memory: *mut c_void, _argument: *mut c_void) {
    // SAFETY: what `allocate` gave, once; or null, which is allowed.
    unsafe { libc::free(memory) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_usable_and_released() {
        let head = extension(std::ptr::null_mut());
        // SAFETY: the extension made just now.
        let ours = unsafe { &*head.cast::<Extension>() };
        assert_eq!((ours.base.kind, ours.base.struct_size), (23, 32));
        let mut args = Allocate {
            struct_size: size_of::<Allocate>(),
            extension_start: std::ptr::null_mut(),
            client: std::ptr::null_mut(),
            size: 12_345,
            numa_node: -1,
            memory: std::ptr::null_mut(),
            deleter: None,
            argument: std::ptr::null_mut(),
        };
        // SAFETY: its arguments; the memory is used within its size and released once.
        unsafe {
            assert!((ours.allocate)(&mut args).is_null());
            assert!(!args.memory.is_null() && (args.memory as usize).is_multiple_of(ALIGNMENT));
            args.memory.cast::<u8>().write_bytes(7, 12_345);
            args.deleter.unwrap()(args.memory, args.argument);
        }
    }
}
