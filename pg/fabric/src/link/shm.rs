//! Links inside a host: a ring in a memfd passed over a Unix socket, and reads straight from the peer's memory.
//!
//! A memfd has no name: nothing is left behind by a kill, and /dev/shm's limit doesn't apply. It is allocated up front
//! and sealed against shrinking, so that touching it can't raise SIGBUS.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg,
    socket_with, sockopt,
};

use super::ring::CONTROL;
use crate::handshake::{LOCAL_OPENING, LocalOpening};
use crate::wire::{HubId, WireError};

/// Shared memory mapped into this process, not inherited by forked children.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping is owned; what may be done with the bytes is the ring's business.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(fd: &OwnedFd, len: usize) -> Result<Self, Errno> {
        // SAFETY: a fresh mapping at an address the kernel picks.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd.as_fd(), 0)?
        };
        let mapping = Mapping { base: base.cast(), len };
        // SAFETY: the range was just mapped; the advice only affects fork.
        unsafe { madvise(base, len, Advice::LinuxDontFork)? };
        Ok(mapping)
    }

    /// Its first byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; rings over it are dropped with their endpoint before it.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

/// Allocates a ring of `capacity` data bytes.
pub fn create_ring(capacity: usize) -> Result<(OwnedFd, Mapping), Errno> {
    let len = CONTROL + capacity;
    let fd = memfd_create("podring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fallocate(&fd, FallocateFlags::empty(), 0, len as u64)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let mapping = Mapping::new(&fd, len)?;
    Ok((fd, mapping))
}

/// Maps a ring that a peer made, after checking that it is what it claims.
pub fn map_ring(fd: &OwnedFd, capacity: u64) -> Result<Mapping, Errno> {
    let valid = capacity.is_power_of_two() && (4096..=1 << 30).contains(&capacity);
    let len = CONTROL as u64 + capacity;
    if !valid || fstat(fd)?.st_size as u64 != len || !fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
        return Err(Errno::INVAL);
    }
    Mapping::new(fd, len as usize)
}

fn address(hub: HubId) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(format!("podring-{:032x}", hub.0).as_bytes())
}

fn socket() -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

/// The socket on which peers of this host find this hub.
pub fn listener(hub: HubId) -> Result<OwnedFd, Errno> {
    let fd = socket()?;
    bind(&fd, &address(hub)?)?;
    listen(&fd, 4096)?;
    Ok(fd)
}

/// Accepts one connection; the peer must be the same user, else `ACCESS`.
pub fn accept(listener: impl AsFd) -> Result<OwnedFd, Errno> {
    let fd = accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    same_user(&fd)?;
    Ok(fd)
}

/// The kernel vouches for who bound or connected the other end. An abstract name has no mode that would say who may use
/// it, so this does.
fn same_user(fd: &OwnedFd) -> Result<(), Errno> {
    if sockopt::socket_peercred(fd)?.uid == rustix::process::geteuid() { Ok(()) } else { Err(Errno::ACCESS) }
}

/// Connects to a hub. `CONNREFUSED`: it isn't on this host (or is gone). `AGAIN`: its queue is full. `ACCESS`: it is
/// another user's, which shares no memory with this one.
pub fn dial(hub: HubId) -> Result<OwnedFd, Errno> {
    let fd = socket()?;
    connect(&fd, &address(hub)?)?;
    same_user(&fd)?;
    Ok(fd)
}

/// The process at the other end, as this pid namespace counts; `None` if it can't be seen from here.
pub fn peer_pid(fd: impl AsFd) -> Option<rustix::process::Pid> {
    let credentials = sockopt::socket_peercred(fd).ok()?;
    // The kernel reports 0 for a process outside this pid namespace, which Pid can't hold; rustix checks for it.
    (credentials.pid.as_raw_nonzero().get() > 0).then_some(credentials.pid)
}

/// Opens a link: sends the ring and the sender's bell.
pub fn send_opening(fd: impl AsFd, opening: &LocalOpening, ring: &OwnedFd, bell: impl AsFd) -> Result<(), Errno> {
    send_with(fd, &opening.encode(), &[ring.as_fd(), bell.as_fd()])
}

/// Answers an opening with this side's bell.
pub fn send_welcome(fd: impl AsFd, bell: impl AsFd) -> Result<(), Errno> {
    send_with(fd, b"w", &[bell.as_fd()])
}

/// Answers an opening that proves nothing. Whoever is told so could have found out by other means.
pub fn send_refusal(fd: impl AsFd) -> Result<(), Errno> {
    send_with(fd, REFUSAL, &[])
}

const REFUSAL: &[u8; 1] = b"r";

fn send_with(fd: impl AsFd, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::NOBUFS);
    }
    sendmsg(fd, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// What opening a link brought.
#[derive(Debug)]
pub struct Opened {
    /// Who opened it.
    pub by: LocalOpening,
    /// The ring's memory.
    pub ring: OwnedFd,
    /// The opener's bell.
    pub bell: OwnedFd,
}

/// Reads an opening. `Ok(None)`: nothing there yet.
pub fn recv_opening(fd: impl AsFd) -> Result<Option<Opened>, WireError> {
    let mut bytes = [0u8; LOCAL_OPENING + 1];
    match recv_with(fd, &mut bytes) {
        Ok((len, mut fds)) => {
            let by = LocalOpening::decode(&bytes[..len])?;
            match (fds.pop(), fds.pop()) {
                (Some(bell), Some(ring)) => Ok(Some(Opened { by, ring, bell })),
                _ => Err(WireError::Hello),
            }
        }
        Err(Errno::AGAIN) => Ok(None),
        Err(_) => Err(WireError::Hello),
    }
}

/// Reads the answer to an opening: the peer's bell. `Ok(None)`: nothing there yet. `ACCESS`: the opening proved nothing to
/// the peer. Another error means that it is gone.
pub fn recv_welcome(fd: impl AsFd) -> Result<Option<OwnedFd>, Errno> {
    let mut bytes = [0u8; 1];
    match recv_with(fd, &mut bytes) {
        Ok((1, _)) if bytes == *REFUSAL => Err(Errno::ACCESS),
        Ok((1, mut fds)) => fds.pop().map(Some).ok_or(Errno::CONNRESET),
        Ok(_) => Err(Errno::CONNRESET),
        Err(Errno::AGAIN) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn recv_with(fd: impl AsFd, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(fd, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((got.bytes, fds))
}

/// Copies `len` bytes at `from` in process `pid` to `into`; returns how many came.
///
/// # Safety
/// `into` must be writable for `len` bytes. Nothing is asked of `from`: the kernel checks it.
pub unsafe fn read_memory(pid: rustix::process::Pid, from: u64, into: *mut u8, len: usize) -> Result<usize, Errno> {
    let local = libc::iovec { iov_base: into.cast(), iov_len: len };
    let remote = libc::iovec { iov_base: from as *mut libc::c_void, iov_len: len };
    // SAFETY: one valid local vector of writable memory; the remote one is checked by the kernel.
    let got = unsafe { libc::process_vm_readv(pid.as_raw_nonzero().get(), &local, 1, &remote, 1, 0) };
    match usize::try_from(got) {
        Ok(got) => Ok(got),
        Err(_) => Err(std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)),
    }
}

/// Whether the process of a pidfd has ended; also where the kernel doesn't say.
pub fn has_ended(pidfd: impl AsFd) -> bool {
    let mut one = [PollFd::new(&pidfd, PollFlags::IN)];
    retry_on_intr(|| poll(&mut one, Some(&Timespec::default()))) != Ok(0)
}

/// Lets the other processes of this user read this one's memory where Yama would refuse siblings. Failure is no error:
/// where there is no Yama there is nothing to permit, and a refused read falls back to staging.
pub fn permit_reads() {
    const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;
    // SAFETY: prctl with integer arguments.
    unsafe { libc::prctl(PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::{Opening, Secret};
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn an_opening_carries_ring_and_bell() {
        let mut raw = [0u8; 16];
        getrandom::fill(&mut raw).unwrap();
        let to = HubId(u128::from_le_bytes(raw));
        let listening = listener(to).unwrap();
        let out = dial(to).unwrap();
        let accepted = accept(&listening).unwrap();
        assert_eq!(peer_pid(&accepted), Some(rustix::process::getpid()));
        assert!(recv_opening(&accepted).unwrap().is_none());
        let (ring, _mapping) = create_ring(4096).unwrap();
        let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let opening = Opening { job: 1, from: HubId(1), to, ranks: [0, 1], nonce: [3; 32] };
        let sent = LocalOpening::new(&Secret::new([4; 32]), opening, 4096, 0);
        send_opening(&out, &sent, &ring, &bell).unwrap();
        let opened = recv_opening(&accepted).unwrap().unwrap();
        assert_eq!(opened.by, sent);
        assert_eq!(map_ring(&opened.ring, 4096).unwrap().len(), CONTROL + 4096);
        assert!(map_ring(&opened.ring, 8192).is_err());
        assert!(recv_welcome(&out).unwrap().is_none());
        send_welcome(&accepted, &bell).unwrap();
        assert!(recv_welcome(&out).unwrap().is_some());
        send_refusal(&accepted).unwrap();
        drop(accepted);
        assert_eq!(recv_welcome(&out).unwrap_err(), Errno::ACCESS);
        assert_eq!(recv_welcome(&out).unwrap_err(), Errno::CONNRESET);
    }

    #[test]
    fn nobody_listens() {
        assert_eq!(dial(HubId(42)).unwrap_err(), Errno::CONNREFUSED);
    }

    #[test]
    fn an_ended_process_is_told_from_a_live_one() {
        use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
        assert!(!has_ended(pidfd_open(getpid(), PidfdFlags::empty()).unwrap()));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        assert!(!has_ended(&pidfd));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(has_ended(&pidfd));
    }

    #[test]
    fn reads_own_memory() {
        let (from, mut into) = ([1u8, 2, 3, 4], [0u8; 4]);
        // SAFETY: `into` has four bytes.
        let got = unsafe { read_memory(rustix::process::getpid(), from.as_ptr() as u64, into.as_mut_ptr(), 4) };
        assert_eq!((got, into), (Ok(4), from));
        // SAFETY: as above; the remote address is unmapped and the kernel says so.
        assert_eq!(unsafe { read_memory(rustix::process::getpid(), 16, into.as_mut_ptr(), 4) }, Err(Errno::FAULT));
    }
}
