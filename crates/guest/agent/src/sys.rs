//! The system calls that no safe wrapper covers: a few ioctls, waiting for any child,
//! registering a descriptor, and one allocator knob.

#![allow(unsafe_code, reason = "raw ioctls, waitid, fd registration and mallopt; each block says why it is sound")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::libc;
use rustix::ioctl;
use tokio::io::unix::AsyncFd;

use crate::process::Exit;

/// Tells the allocator to stay small: one arena for all threads, and freed memory goes back to the kernel early.
///
/// Call before the first thread is started.
pub(crate) fn keep_heap_small() {
    // SAFETY: mallopt only sets parameters of the allocator; these are documented ones with values in range.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 256 * 1024);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 256 * 1024);
    }
}

/// Feeds `seed` to the kernel's random pool, credits it in full, and makes the generator draw on it at once.
///
/// Needs CAP_SYS_ADMIN.
pub(crate) fn add_entropy(seed: &[u8]) -> io::Result<()> {
    const RNDADDENTROPY: ioctl::Opcode = ioctl::opcode::write::<[libc::c_int; 2]>(b'R', 0x03);
    const RNDRESEEDCRNG: ioctl::Opcode = ioctl::opcode::none(b'R', 0x07);
    /// Most bytes taken from one seed: the pool holds 256 bits, so more adds nothing.
    const MOST: usize = 512;

    /// `struct rand_pool_info` of linux/random.h with its trailing buffer.
    #[repr(C)]
    struct PoolInfo {
        entropy_bits: libc::c_int,
        bytes: libc::c_int,
        buffer: [u8; MOST],
    }

    let seed = &seed[..seed.len().min(MOST)];
    let mut info =
        PoolInfo { entropy_bits: 8 * seed.len() as libc::c_int, bytes: seed.len() as libc::c_int, buffer: [0; MOST] };
    info.buffer[..seed.len()].copy_from_slice(seed);
    let random = std::fs::OpenOptions::new().write(true).open("/dev/urandom")?;
    // SAFETY: RNDADDENTROPY reads a rand_pool_info and `bytes` bytes behind it, all inside `info`.
    unsafe { ioctl::ioctl(&random, ioctl::Setter::<RNDADDENTROPY, PoolInfo>::new(info)) }?;
    // SAFETY: RNDRESEEDCRNG takes no argument.
    unsafe { ioctl::ioctl(&random, ioctl::NoArg::<RNDRESEEDCRNG>::new()) }?;
    Ok(())
}

/// Makes a mounted ext4 file system `blocks` of its blocks long; `root` is any directory of it.
///
/// Needs CAP_SYS_RESOURCE. Errors: `EPERM` also for one that has errors, `EOPNOTSUPP` for layouts that only grow unmounted.
pub(crate) fn resize_ext4(root: impl AsFd, blocks: u64) -> io::Result<()> {
    const EXT4_IOC_RESIZE_FS: ioctl::Opcode = ioctl::opcode::write::<u64>(b'f', 16);
    // SAFETY: EXT4_IOC_RESIZE_FS reads one u64.
    unsafe { ioctl::ioctl(root, ioctl::Setter::<EXT4_IOC_RESIZE_FS, u64>::new(blocks)) }?;
    Ok(())
}

/// Sets an interface's address (`SIOCSIFADDR`), netmask (`SIOCSIFNETMASK`) or flags (`SIOCSIFFLAGS`): one `struct ifreq`.
pub(crate) fn set_interface<const REQUEST: ioctl::Opcode>(socket: impl AsFd, request: libc::ifreq) -> io::Result<()> {
    // SAFETY: the SIOCSIF* requests read one ifreq; `request` is a whole, initialised one.
    unsafe { ioctl::ioctl(socket, ioctl::Setter::<REQUEST, libc::ifreq>::new(request)) }?;
    Ok(())
}

/// Adds a route (`SIOCADDRT`).
pub(crate) fn add_route(socket: impl AsFd, route: libc::rtentry) -> io::Result<()> {
    const SIOCADDRT: ioctl::Opcode = libc::SIOCADDRT as ioctl::Opcode;
    // SAFETY: SIOCADDRT reads one rtentry whose only pointer, the device name, is null.
    unsafe { ioctl::ioctl(socket, ioctl::Setter::<SIOCADDRT, libc::rtentry>::new(route)) }?;
    Ok(())
}

/// A route with every field zero, for [`add_route`].
pub(crate) fn empty_route() -> libc::rtentry {
    // SAFETY: rtentry is plain C data (integers, socket addresses, a nullable pointer): all zeroes is a valid value.
    unsafe { std::mem::zeroed() }
}

/// Makes readiness of a descriptor awaitable. The descriptor must not block; call inside the runtime.
pub(crate) fn watch_descriptor(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd stays open as long as it lives, and AsyncFd deregisters it before dropping it; nobody takes it
    // out before that.
    unsafe { AsyncFd::register(descriptor) }.map_err(Into::into)
}

/// Waits until some child is dead and tells which and how, leaving it a zombie: its pid stays taken until [`reap`].
///
/// The wrappers in nix and rustix cannot say which child it was, or fail on real-time signals.
/// Errors: `ECHILD` when there are no children.
pub(crate) fn peek_dead_child() -> io::Result<(i32, Exit)> {
    // SAFETY: siginfo_t is plain C data, for which all zeroes is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is valid for writes for the whole call.
    let result = unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, libc::WEXITED | libc::WNOWAIT) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: after a successful waitid the SIGCHLD fields of the union are the ones that were written.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    Ok((pid, if info.si_code == libc::CLD_EXITED { Exit::Code(status) } else { Exit::Signal(status) }))
}

/// Reaps a child that [`peek_dead_child`] named.
pub(crate) fn reap(pid: i32) {
    let mut status = 0;
    // SAFETY: `status` is valid for writes; the child is a zombie of ours, so the call neither blocks nor fails.
    unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
}
