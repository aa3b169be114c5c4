//! A file system that one thread has mounted and nobody else can see.
//!
//! The thread takes a mount namespace of its own, which ends with it: whatever ends the process also ends the mount, and
//! with it the loop device. The host's other mounts are seen in it as they come and go, so that it keeps none of them in use.
//!
//! The kernel's ext4 places files by their contents and names, and by three things that are as they happen to be: the CPU
//! that a thread runs on, its number, and when dirty pages are written. Layers of equal content are to be equal bytes, so
//! the thread stays on one CPU, has a number that is a multiple of 16 (where threads are numbered per container, ext4 sees
//! another one, and layers may differ from other hosts'), and blocks are placed when they are written to.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use backon::{BlockingRetryable, ConstantBuilder};
use nix::sched::{CloneFlags, unshare};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount};
use rustix::thread::{CpuSet, gettid, sched_getcpu, sched_setaffinity};
use tokio::sync::oneshot;

use super::loopdev::LoopDevice;
use crate::ext4::BLOCK;

/// Blocks are placed at once; freed ones are given back to the layer; nothing is done in the background; equal attributes of
/// files are not shared by chance; once something can't be written, nothing more is.
const OPTIONS: &CStr =
    c"nodelalloc,discard,noinit_itable,no_prefetch_block_bitmaps,no_mbcache,errors=remount-ro,nobarrier";
/// What ext4 takes a thread's number modulo of.
const COLOURS: i32 = 16;
/// How often, and how far apart, to try to unmount what nothing of this process uses any more: a child that another thread
/// starts has a copy of every open file until it becomes its program.
const TRIES: usize = 2_000;
const PAUSE: Duration = Duration::from_millis(5);
/// Threads that are started until one has a number that fits.
const ATTEMPTS: usize = 128;

/// Why a file system could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    #[error("start a thread")]
    Thread(#[source] io::Error),
    #[error("take a mount namespace")]
    Namespace(#[source] io::Error),
    #[error("open {path}", path = .path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("make a loop device of {path}", path = .path.display())]
    Loop { path: PathBuf, source: io::Error },
    #[error("mount {path}", path = .path.display())]
    Mount { path: PathBuf, source: io::Error },
    #[error("write out the file system")]
    Sync(#[source] io::Error),
    #[error("unmount {path}", path = .path.display())]
    Unmount { path: PathBuf, source: io::Error },
    #[error("the thread ended without a result")]
    Lost,
}

/// Runs `work` in a thread of its own, with the ext4 file system of `device` (a file or block device) mounted at the empty
/// directory `at`, where only that thread sees it. All is written out and unmounted when the result is there.
///
/// Cancel safety: if dropped, the work goes on to its end.
pub(super) async fn mounted<T: Send + 'static>(
    device: PathBuf,
    at: PathBuf,
    work: impl FnOnce(&Path) -> T + Send + 'static,
) -> Result<T, MountError> {
    let (send, receive) = oneshot::channel();
    let whole = move || {
        let result = run(&device, &at, work);
        let _ = send.send(result); // nobody may wait for it any more
    };
    spawn(Box::new(whole)).map_err(MountError::Thread)?;
    receive.await.map_err(|_| MountError::Lost)?
}

/// Runs `work` in a thread whose number fits.
fn spawn(work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    let mut work = work;
    for attempt in 1..=ATTEMPTS {
        let (back, taken) = mpsc::channel();
        let body = move || {
            if attempt < ATTEMPTS && gettid().as_raw_nonzero().get() % COLOURS != 0 {
                let _ = back.send(work); // the receiver waits for it
                return;
            }
            drop(back);
            work();
        };
        thread::Builder::new().name("aenv-unpack".to_owned()).spawn(body)?;
        match taken.recv() {
            Ok(returned) => work = returned,
            Err(_) => return Ok(()), // it is at work
        }
    }
    Ok(())
}

fn run<T>(device: &Path, at: &Path, work: impl FnOnce(&Path) -> T) -> Result<T, MountError> {
    let open = |path: &Path, write: bool| {
        let file = File::options().read(true).write(write).open(path);
        file.map_err(|source| MountError::Open { path: path.to_owned(), source })
    };
    let file = open(device, true)?;
    let is_block = file.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
    unshare(CloneFlags::CLONE_NEWNS).map_err(|error| MountError::Namespace(error.into()))?;
    let downstream = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", downstream).map_err(|error| MountError::Namespace(error.into()))?;
    stay_on_one_cpu();
    let attached = match is_block {
        true => None,
        false => {
            let scratch = at.parent().unwrap_or(at);
            let attached = LoopDevice::attach(&file, BLOCK as u32, scratch);
            Some(attached.map_err(|source| MountError::Loop { path: device.to_owned(), source })?)
        }
    };
    let source = attached.as_ref().map_or(device, LoopDevice::path);
    let flags = MountFlags::NOATIME | MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    mount(source, at, "ext4", flags, OPTIONS)
        .map_err(|error| MountError::Mount { path: source.to_owned(), source: error.into() })?;
    let guard = Mounted { at };
    // Opened before anything is written, so that it learns of every error since.
    let root = open(at, false)?;
    let result = work(at);
    let synced = rustix::fs::syncfs(&root).map_err(|error| MountError::Sync(error.into()));
    drop(root);
    guard.unmount()?;
    synced?;
    Ok(result)
}

/// Only the equality of layers depends on it, so it may fail.
fn stay_on_one_cpu() {
    let cpu = sched_getcpu();
    if cpu < CpuSet::MAX_CPU {
        let mut set = CpuSet::new();
        set.set(cpu);
        let _ = sched_setaffinity(None, &set);
    }
}

/// A mount, taken away when dropped.
struct Mounted<'a> {
    at: &'a Path,
}

impl Mounted<'_> {
    fn unmount(self) -> Result<(), MountError> {
        let unmounted = (|| unmount(self.at, UnmountFlags::empty()))
            .retry(ConstantBuilder::new().with_delay(PAUSE).with_max_times(TRIES))
            .when(|error| *error == Errno::BUSY)
            .call();
        let at = self.at;
        if unmounted.is_ok() {
            std::mem::forget(self); // there is nothing left to take away
        }
        unmounted.map_err(|error| MountError::Unmount { path: at.to_owned(), source: error.into() })
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.at, UnmountFlags::DETACH); // the namespace ends with the thread anyway
    }
}
