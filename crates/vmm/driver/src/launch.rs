//! How a VMM process comes into the world.
//!
//! It starts in its own session and the machine's network namespace, with nothing of ours but the descriptors it was
//! given, and stays when we go: no parent-death signal, no terminal, no broken pipe that could end it.

#![allow(unsafe_code, reason = "work between fork and exec; each block says why it is sound")]

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::libc;
use rustix::io::FdFlags;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, LinkNameSpaceType};

use crate::VmmError;
use crate::identity::{NAME_MARK, WORK_DIR_MARK};

/// A VMM process to be.
#[derive(Debug)]
pub struct ProcessSpec {
    /// The machine's name; goes into the environment as its mark, `args` should show it too, for people.
    pub name: String,
    /// The machine's private directory; the process's current directory, and in its environment as its mark.
    pub work_dir: PathBuf,
    /// The VMM's executable.
    pub binary: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// The network namespace it runs in, as a path that `setns` opens; `None`: ours.
    pub netns: Option<PathBuf>,
    /// Descriptors it inherits under the same numbers, which `args` may therefore name.
    pub inherit: Vec<OwnedFd>,
}

/// What the process may still do as root: read and write files regardless of their owner, for images and work dirs
/// may belong to another user. The namespaces, taps and devices it uses were prepared by others.
const KEPT_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::DAC_READ_SEARCH);

/// Starts the process; its output goes to `output`. Blocking: forks, and waits until the new program runs.
pub(crate) fn launch(spec: ProcessSpec, output: OwnedFd) -> Result<Child, VmmError> {
    let spawn_error = |source| VmmError::Spawn { binary: spec.binary.clone(), source };
    let netns = match &spec.netns {
        Some(path) => Some(File::open(path).map_err(|source| VmmError::Io {
            operation: "open network namespace",
            path: path.clone(),
            source,
        })?),
        None => None,
    };
    let inherit: Vec<_> = spec.inherit.iter().map(AsRawFd::as_raw_fd).collect();

    let mut command = Command::new(&spec.binary);
    command
        .args(&spec.args)
        .current_dir(&spec.work_dir)
        .env_clear() // our secrets come in the environment; whoever breaks into a VMM must not find them there
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env(NAME_MARK, &spec.name)
        .env(WORK_DIR_MARK, &spec.work_dir)
        .stdin(Stdio::null())
        .stdout(output.try_clone().map_err(spawn_error)?)
        .stderr(output);
    let prepare = move || prepare(netns.as_ref().map(AsFd::as_fd), &inherit);
    // SAFETY: `prepare` runs between fork and exec, where only what is safe in a signal handler is allowed: it makes
    // system calls and neither allocates nor locks, and the descriptors it uses are open in the child.
    unsafe { command.pre_exec(prepare) };
    command.spawn().map_err(spawn_error)
    // `spec.inherit` and the namespace are closed here, in our process only.
}

/// In the child, before exec.
fn prepare(netns: Option<BorrowedFd<'_>>, inherit: &[i32]) -> io::Result<()> {
    rustix::process::setsid()?;
    if let Some(netns) = netns {
        rustix::thread::move_into_link_name_space(netns, Some(LinkNameSpaceType::Network))?;
    }
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?; // guest memory
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    rustix::thread::set_no_new_privs(true)?;
    drop_capabilities()?;
    // SAFETY: plain system calls on integers. SIGPIPE stays ignored across exec: once we are gone nobody reads the
    // output any more, and the VMM must not die of a warning.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        if libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    for &fd in inherit {
        // SAFETY: the parent holds these descriptors open until the spawn is over.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
    }
    Ok(())
}

/// Takes all but [`KEPT_CAPABILITIES`] out of the bounding set, so that exec as root does not give them back.
fn drop_capabilities() -> io::Result<()> {
    for capability in CapabilitySet::all().difference(KEPT_CAPABILITIES).iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            Err(rustix::io::Errno::PERM) => return Ok(()), // not root: there is nothing to take away
            Err(rustix::io::Errno::INVAL) => {}            // the kernel is older than this capability
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}
