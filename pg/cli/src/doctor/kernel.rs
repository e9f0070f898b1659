//! What the fabric asks of the kernel, tried and not guessed.

use std::fs;
use std::io::{Error, Result};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::epoll;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use serde_json::json;

use super::Check;

const GROUP: &str = "Kernel";
/// Far more than any of these takes.
const LIMIT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

pub(super) fn checks() -> Vec<Check> {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    let machine = name.machine().to_string_lossy().into_owned();
    let mut checks = vec![
        Check::ok(
            GROUP,
            "release",
            format!("Linux {release}, {machine}"),
            json!({"release": release, "arch": machine}),
        ),
        ptrace_scope(),
    ];
    let probe = Probe::run();
    checks.push(readv(&probe));
    checks.push(judge(
        "pidfd",
        probe.and_then(|probe| probe.death),
        "a child's death is seen through pidfd_open and epoll",
        "peers' deaths are watched through pidfds: Linux 5.3 or later is needed, and a sandbox that allows pidfd_open",
    ));
    checks.push(judge(
        "memfd",
        memfd(),
        "memfd_create, fallocate and seals work",
        "ranks share memory through sealed memfds: allow memfd_create and fcntl(F_ADD_SEALS) in this sandbox",
    ));
    checks.push(judge(
        "epoll, eventfd",
        wake_up(),
        "a write wakes an epoll set",
        "ranks sleep in epoll and are woken by eventfds: allow both in this sandbox",
    ));
    checks
}

fn judge(name: &str, outcome: Result<()>, works: &str, advice: &str) -> Check {
    match outcome {
        Ok(()) => Check::ok(GROUP, name, works, json!({"works": true})),
        Err(error) => {
            let data = json!({"works": false, "error": error.to_string()});
            Check::ok(GROUP, name, format!("does not work: {error}"), data).error(advice)
        }
    }
}

fn ptrace_scope() -> Check {
    let Ok(text) = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") else {
        return Check::ok(GROUP, "ptrace_scope", "no Yama: not restricted", json!({"scope": null}));
    };
    describe_scope(text.trim())
}

fn describe_scope(scope: &str) -> Check {
    let meaning = match scope {
        "0" => "any process of this user may be read",
        "1" => "restricted to descendants; ranks permit each other by prctl(PR_SET_PTRACER)",
        "2" => "restricted to CAP_SYS_PTRACE",
        "3" => "no process may be read",
        _ => "unknown to podring",
    };
    let check = Check::ok(GROUP, "ptrace_scope", format!("{scope}: {meaning}"), json!({ "scope": scope }));
    match scope {
        "0" | "1" => check,
        _ => {
            check.warning("sysctl kernel.yama.ptrace_scope=1 lets ranks read each other's memory; see process_vm_readv")
        }
    }
}

fn readv(probe: &Result<Probe>) -> Check {
    let staged = "large messages are staged through shared memory instead, at about half the speed: allow it by \
                  ptrace_scope 0 or 1, or in a container by --cap-add=SYS_PTRACE or its seccomp profile";
    let name = "process_vm_readv";
    match probe {
        Ok(Probe { read: Ok(()), .. }) => {
            Check::ok(GROUP, name, "allowed: one process read another's memory", json!({"allowed": true}))
        }
        Ok(Probe { read: Err(error), .. }) | Err(error) => {
            let data = json!({"allowed": false, "error": error.to_string()});
            Check::ok(GROUP, name, format!("refused: {error}"), data).warning(staged)
        }
    }
}

/// A memfd as the fabric makes it: allocated up front, sealed against shrinking, and the seal holds.
fn memfd() -> Result<()> {
    let file = rustix::fs::memfd_create("podring-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 64 << 10)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
    match rustix::fs::ftruncate(&file, 0) {
        Err(rustix::io::Errno::PERM) => Ok(()),
        Err(other) => Err(other.into()),
        Ok(()) => Err(Error::other("a sealed memfd could be shrunk")),
    }
}

fn wake_up() -> Result<()> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let set = watching(event.as_fd())?;
    rustix::io::write(&event, &1u64.to_ne_bytes())?;
    readable(&set)
}

fn watching(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    Ok(set)
}

fn readable(set: &OwnedFd) -> Result<()> {
    let mut events = [MaybeUninit::uninit(); 1];
    let (ready, _) = epoll::wait(set, &mut events, Some(&LIMIT))?;
    if ready.is_empty() { Err(Error::other("epoll reported nothing")) } else { Ok(()) }
}

/// A forked child, killed and reaped when dropped.
struct ForkedChild(Pid);

impl ForkedChild {
    /// Forks; `body` runs in the child, which leaves with `_exit` after it.
    ///
    /// # Safety
    /// Other threads may have held any lock at the fork: `body` must call async-signal-safe functions only, so it must
    /// not allocate or panic.
    unsafe fn start(body: impl FnOnce()) -> Result<Self> {
        // SAFETY: the child runs `body` alone, which the caller vouches for, and then only _exit.
        match unsafe { libc::fork() } {
            -1 => Err(Error::last_os_error()),
            0 => {
                body();
                // SAFETY: _exit runs no handlers and touches no lock.
                unsafe { libc::_exit(0) }
            }
            child => Pid::from_raw(child).map(ForkedChild).ok_or_else(|| Error::other("fork returned no process id")),
        }
    }
}

impl Drop for ForkedChild {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
        let _ = waitpid(Some(self.0), WaitOptions::empty());
    }
}

/// Two children, as two ranks are: siblings, of which one reads the other's memory and then one dies.
struct Probe {
    read: Result<()>,
    death: Result<()>,
}

const BEFORE: u64 = 0x706f_6472;
const AFTER: u64 = 0x696e_6721;

impl Probe {
    fn run() -> Result<Probe> {
        // Copied at the fork: the target's copy lies at the same address and alone holds AFTER.
        let word = Box::new(AtomicU64::new(BEFORE));
        let (ready, ready_in) = pipe_with(PipeFlags::CLOEXEC)?;
        let (result, result_in) = pipe_with(PipeFlags::CLOEXEC)?;
        // SAFETY: atomic store, prctl, write and pause are async-signal-safe and allocate nothing.
        let target = unsafe {
            ForkedChild::start(|| {
                word.store(AFTER, Ordering::SeqCst);
                libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0);
                libc::write(ready_in.as_raw_fd(), [1u8].as_ptr().cast(), 1);
                // Until it is killed; an alarm ends it if the parent dies first.
                libc::alarm(30);
                libc::pause();
            })
        }?;
        receive::<1>(ready.as_fd())?;
        let pidfd = pidfd_open(target.0, PidfdFlags::empty());
        let pid = target.0.as_raw_nonzero().get();
        let address = (&raw const *word).cast_mut();
        // SAFETY: process_vm_readv and write are async-signal-safe and allocate nothing.
        let reader = unsafe { ForkedChild::start(|| report(result_in.as_raw_fd(), pid, address)) }?;
        let answer = receive::<16>(result.as_fd())?;
        drop(reader);
        let [errno, value] = [0, 8].map(|at| u64::from_ne_bytes(std::array::from_fn(|index| answer[at + index])));
        let read = match (errno, value) {
            (0, AFTER) => Ok(()),
            (0, other) => Err(Error::other(format!("read {other:#x} where {AFTER:#x} was"))),
            (errno, _) => Err(Error::from_raw_os_error(errno as i32)),
        };
        let death = pidfd.map_err(Error::from).and_then(|pidfd| {
            let set = watching(pidfd.as_fd())?;
            kill_process(target.0, Signal::KILL)?;
            readable(&set)
        });
        Ok(Probe { read, death })
    }
}

/// In a forked child: reads the word at `address` of process `pid`, and writes (errno, word) to `out`.
fn report(out: i32, pid: i32, address: *mut AtomicU64) {
    let mut value = 0u64;
    let local = libc::iovec { iov_base: (&raw mut value).cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: address.cast(), iov_len: 8 };
    // SAFETY: `local` is this frame's word; the remote address is only interpreted in the other process.
    let count = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    let errno = match count {
        8 => 0,
        -1 => Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        _ => libc::EIO,
    };
    let answer = [errno as u64, value];
    // SAFETY: `answer` is 16 readable bytes; a short or failed write shows as a missing answer in the parent.
    unsafe { libc::write(out, answer.as_ptr().cast(), 16) };
}

/// Exactly `N` bytes that a child wrote at once (less than PIPE_BUF, so whole), within the time limit.
fn receive<const N: usize>(pipe: BorrowedFd<'_>) -> Result<[u8; N]> {
    let mut fds = [PollFd::new(&pipe, PollFlags::IN)];
    if poll(&mut fds, Some(&LIMIT))? == 0 {
        return Err(Error::other("a forked child did not answer"));
    }
    let mut bytes = [0; N];
    match rustix::io::read(pipe, &mut bytes[..])? {
        count if count == N => Ok(bytes),
        _ => Err(Error::other("a forked child's answer is short")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn the_fabrics_needs_are_met_where_its_tests_run() {
        let probe = Probe::run().unwrap();
        probe.death.unwrap();
        memfd().unwrap();
        wake_up().unwrap();
    }

    #[test]
    fn refusals_are_told_with_their_reason() {
        let refused = || Error::from_raw_os_error(libc::EPERM);
        let check = readv(&Ok(Probe { read: Err(refused()), death: Ok(()) }));
        assert_eq!((check.status, check.data["allowed"].as_bool()), (Status::Warning, Some(false)));
        assert!(check.summary.contains("not permitted"), "{}", check.summary);
        assert_eq!(judge("memfd", Err(refused()), "works", "do").status, Status::Error);
    }

    #[test]
    fn a_dead_process_cannot_be_read() {
        let word = Box::new(AtomicU64::new(BEFORE));
        let (result, result_in) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        // Above the largest process id Linux gives (2^22).
        report(result_in.as_raw_fd(), 1 << 30, (&raw const *word).cast_mut());
        let answer = receive::<16>(result.as_fd()).unwrap();
        assert_eq!(u64::from_ne_bytes(answer[..8].try_into().unwrap()), libc::ESRCH as u64);
    }

    #[test]
    fn scopes() {
        assert_eq!(describe_scope("0").status, Status::Ok);
        assert_eq!(describe_scope("1").status, Status::Ok);
        assert_eq!(describe_scope("2").status, Status::Warning);
        assert_eq!(describe_scope("3").status, Status::Warning);
    }
}
