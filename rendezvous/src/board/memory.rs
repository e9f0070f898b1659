//! Memory that several processes share: a sealed memfd, reached through atomics only.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// What may lie in shared memory.
///
/// # Safety
/// Any bits are a valid value, and all of it is atomics: others write there at any time.
pub(super) unsafe trait Shared {}

// SAFETY: an atomic integer.
unsafe impl Shared for AtomicU32 {}
// SAFETY: as above.
unsafe impl Shared for AtomicU64 {}

/// The memory, in this process's address space.
pub(super) struct Mapping {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is reached through atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// A new one, of zeros. Nobody can change its size, which would end those who read it with SIGBUS; `seals` are added
    /// to that.
    pub(super) fn create(name: &str, bytes: usize, seals: SealFlags) -> io::Result<(OwnedFd, Mapping)> {
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        // All of it now: memory that can't be had later would end its readers too.
        fallocate(&fd, FallocateFlags::empty(), 0, bytes as u64)?;
        let mapping = Mapping::map(&fd, bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        fcntl_add_seals(&fd, seals | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((fd, mapping))
    }

    /// Somebody else's, made with the same arguments.
    pub(super) fn open(fd: &OwnedFd, bytes: usize, seals: SealFlags, access: ProtFlags) -> io::Result<Mapping> {
        let seals = seals | SealFlags::SHRINK | SealFlags::GROW;
        if !fcntl_get_seals(fd)?.contains(seals) || fstat(fd)?.st_size as u64 != bytes as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Mapping::map(fd, bytes, access)
    }

    fn map(fd: &OwnedFd, bytes: usize, access: ProtFlags) -> io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address the kernel picks, of a file that has these bytes and, sealed, keeps them.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, fd.as_fd(), 0)? };
        let at = NonNull::new(at.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { at, bytes })
    }

    /// What lies at an offset.
    pub(super) fn at<T: Shared>(&self, offset: usize) -> &T {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.bytes, "outside the memory");
        // SAFETY: within the mapping, which begins at a page and lives as long as `self`; aligned; any bits will do.
        unsafe { self.at.add(offset).cast::<T>().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}
