//! Supervision of VMM processes: how one is started or found again, watched, and ended.

#![allow(unsafe_code, reason = "a pidfd is registered with the reactor; the block says why it is sound")]

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::libc;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use tokio::io::AsyncReadExt;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tracing::{debug, warn};

use crate::identity::{Sighting, look_at, start_time};
use crate::launch::launch;
use crate::tail::Tail;
use crate::{MachineRecord, ProcessSpec, VmmError};

/// How much of a VMM's output is kept to explain its end: a few screens of messages.
const OUTPUT_KEPT: usize = 8 << 10;
/// How long a killed process may take until the kernel has let go of it. Giving back the memory of a large guest
/// takes about 100 ms a GiB; more than this means a device that does not let go.
const KILL_DEADLINE: Duration = Duration::from_secs(20);

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessEnd {
    /// It ended with this status.
    Status(ExitStatus),
    /// It was not our child, so the kernel does not tell.
    Unknown,
}

impl ProcessEnd {
    /// It exited by itself with code 0, or may have.
    #[must_use]
    pub fn may_be_success(self) -> bool {
        match self {
            Self::Status(status) => status.success(),
            Self::Unknown => true,
        }
    }
}

impl std::fmt::Display for ProcessEnd {
    /// `exit status: 1`, `signal: 9 (SIGKILL)`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => status.fmt(f),
            Self::Unknown => f.write_str("exit status unknown"),
        }
    }
}

/// Why a recorded machine cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// It ended.
    #[error("machine {name} (pid {pid}) has ended")]
    Gone { name: String, pid: u32 },
    /// The pid belongs to another process by now.
    #[error("pid {pid} is not machine {name} any more")]
    NotOurs { name: String, pid: u32 },
    /// The kernel did not tell.
    #[error("look at machine {name} (pid {pid})")]
    Look { name: String, pid: u32, source: io::Error },
    /// The process is the machine's and lives, but cannot be talked to: it hangs, another server is connected to it, or
    /// the record does not tell enough. It was left as it is; [`end_orphan`](crate::end_orphan) ends it.
    #[error("machine {name} (pid {pid}) lives but does not answer")]
    Unresponsive { name: String, pid: u32, source: VmmError },
}

/// A live VMM process and the task that watches it.
///
/// Its end is noticed at once, through a pidfd, whether it is our child or was adopted. It is reaped by the watching
/// task, which ends with the process or with the runtime. Dropping a `VmmProcess` leaves the process running, with one
/// exception: between [`VmmProcess::spawn`] and [`VmmProcess::release`] it is killed, so that an abandoned start
/// leaves nothing.
#[derive(Debug)]
pub struct VmmProcess {
    record: MachineRecord,
    pidfd: Arc<AsyncFd<OwnedFd>>,
    end: watch::Receiver<Option<ProcessEnd>>,
    output: Arc<Mutex<Tail>>,
    kill_on_drop: AtomicBool,
}

impl VmmProcess {
    /// Starts a process. On an error there is none.
    ///
    /// Cancel safety: if dropped, the process is killed.
    pub async fn spawn(spec: ProcessSpec) -> Result<Self, VmmError> {
        let binary = spec.binary.clone();
        tokio::task::spawn_blocking(move || Self::spawn_blocking(spec))
            .await
            .unwrap_or_else(|e| Err(VmmError::Spawn { binary, source: io::Error::other(e) }))
    }

    fn spawn_blocking(spec: ProcessSpec) -> Result<Self, VmmError> {
        let (name, work_dir, binary) = (spec.name.clone(), spec.work_dir.clone(), spec.binary.clone());
        let spawn_error = |source| VmmError::Spawn { binary: binary.clone(), source };
        let (output, their_output) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|e| spawn_error(e.into()))?;
        // The child's end stays blocking: whoever writes there may not expect otherwise.
        rustix::io::ioctl_fionbio(&output, true).map_err(|e| spawn_error(e.into()))?;
        let mut child = launch(spec, their_output)?;
        let watched = || -> io::Result<Self> {
            let pid = child.id();
            // Our child is not reaped before its watcher does it: the pid cannot be another's.
            let started = start_time(pid)?
                .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no /proc entry of the child"))?;
            let record = MachineRecord { name, pid, start_time: started, work_dir, attachment: None };
            let output = pipe::Receiver::from_owned_fd(output)?;
            Self::watch(record, open_pidfd(pid)?, Some(output), true)
        };
        watched().map_err(|source| {
            // Not watched means lost: better no process at all.
            let _ = child.kill();
            let _ = child.wait();
            spawn_error(source)
        })
    }

    /// Takes over a process that an earlier server started, after making sure that it still is the one recorded.
    /// Its exit status and its output are not to be had. Whether it answers is not tried: that is its driver's to do.
    pub async fn adopt(record: MachineRecord) -> Result<Self, AdoptError> {
        let (name, pid) = (record.name.clone(), record.pid);
        let pidfd = match verified_pidfd(&record) {
            Ok(Verified::Ours(pidfd)) => pidfd,
            Ok(Verified::Gone) => return Err(AdoptError::Gone { name, pid }),
            Ok(Verified::NotOurs) => return Err(AdoptError::NotOurs { name, pid }),
            Err(source) => return Err(AdoptError::Look { name, pid, source }),
        };
        Self::watch(record, pidfd, None, false).map_err(|source| AdoptError::Look { name, pid, source })
    }

    fn watch(
        record: MachineRecord,
        pidfd: OwnedFd,
        pipe: Option<pipe::Receiver>,
        kill_on_drop: bool,
    ) -> io::Result<Self> {
        // SAFETY: an `OwnedFd` answers `as_raw_fd` always with the descriptor that it keeps open.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, tokio::io::Interest::READABLE) }
            .map_err(|e| e.into_parts().1)?;
        let pidfd = Arc::new(pidfd);
        let output = Arc::new(Mutex::new(Tail::new(OUTPUT_KEPT)));
        let (announce, end) = watch::channel(None);
        let process = Self { record, pidfd, end, output, kill_on_drop: kill_on_drop.into() };
        tokio::spawn(supervise(process.record.clone(), process.pidfd.clone(), pipe, process.output.clone(), announce));
        Ok(process)
    }

    /// From now on the process stays when this value is dropped.
    pub fn release(&self) {
        self.kill_on_drop.store(false, Ordering::Relaxed);
    }

    /// How to find this process again.
    #[must_use]
    pub fn record(&self) -> &MachineRecord {
        &self.record
    }

    /// Becomes `Some` as soon as the process ended.
    #[must_use]
    pub fn end(&self) -> watch::Receiver<Option<ProcessEnd>> {
        self.end.clone()
    }

    /// Waits until the process ended. Cancel safety: nothing is lost.
    pub async fn ended(&self) -> ProcessEnd {
        let mut end = self.end.clone();
        // The watcher goes away unheard only with the runtime.
        end.wait_for(Option::is_some).await.ok().and_then(|end| *end).unwrap_or(ProcessEnd::Unknown)
    }

    /// The newest output of the process (8 KiB at most), standard output and error together; empty if it was adopted.
    #[must_use]
    pub fn last_words(&self) -> String {
        self.output.lock().unwrap_or_else(PoisonError::into_inner).text()
    }

    /// Ends the process now and waits until the kernel has let go of it: memory, files and devices are free then.
    ///
    /// Errors: `Deadline` if that takes longer than 20 s; the process has its signal and is still watched.
    pub async fn kill(&self) -> Result<ProcessEnd, VmmError> {
        self.signal_kill();
        tokio::time::timeout(KILL_DEADLINE, self.ended())
            .await
            .map_err(|_| VmmError::Deadline { operation: "kill", deadline: KILL_DEADLINE })
    }

    pub(crate) fn signal_kill(&self) {
        match rustix::process::pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(e) => warn!(machine = %self.record.name, pid = self.record.pid, error = %e, "cannot signal the VMM"),
        }
    }
}

impl Drop for VmmProcess {
    fn drop(&mut self) {
        if *self.kill_on_drop.get_mut() && self.end.borrow().is_none() {
            debug!(machine = %self.record.name, pid = self.record.pid, "start abandoned: killing the VMM");
            self.signal_kill();
        }
    }
}

/// Watches one process until it ended: collects its output, reaps it, announces its end.
async fn supervise(
    record: MachineRecord,
    pidfd: Arc<AsyncFd<OwnedFd>>,
    mut pipe: Option<pipe::Receiver>,
    output: Arc<Mutex<Tail>>,
    announce: watch::Sender<Option<ProcessEnd>>,
) {
    let mut buffer = [0; 4096];
    let keep = |bytes: &[u8]| output.lock().unwrap_or_else(PoisonError::into_inner).push(bytes);
    loop {
        let read = async {
            match &mut pipe {
                Some(pipe) => pipe.read(&mut buffer).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // An error here can only come from the runtime's end; then nobody waits for news any more.
            _ = pidfd.readable() => break,
            read = read => match read {
                Ok(0) | Err(_) => pipe = None,
                Ok(n) => keep(&buffer[..n]),
            },
        }
    }
    // What was written just before the end. Without waiting: a child of the VMM may hold the pipe open.
    while let Some(Ok(n @ 1..)) = pipe.as_ref().map(|pipe| pipe.try_read(&mut buffer)) {
        keep(&buffer[..n]);
    }
    let end = match rustix::process::waitid(
        WaitId::PidFd(std::os::fd::AsFd::as_fd(pidfd.get_ref())),
        WaitIdOptions::EXITED,
    ) {
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => ProcessEnd::Status(ExitStatus::from_raw(code << 8)),
            (None, Some(signal)) => ProcessEnd::Status(ExitStatus::from_raw(signal)),
            (None, None) => ProcessEnd::Unknown,
        },
        Ok(None) | Err(_) => ProcessEnd::Unknown,
    };
    debug!(machine = %record.name, pid = record.pid, %end, "VMM process ended");
    announce.send_replace(Some(end));
}

enum Verified {
    Ours(OwnedFd),
    Gone,
    NotOurs,
}

/// A pidfd of the recorded process, if it lives. The pidfd is opened before the look, so it cannot come to mean
/// another process between the two.
fn verified_pidfd(record: &MachineRecord) -> io::Result<Verified> {
    let pidfd = match open_pidfd(record.pid) {
        Ok(pidfd) => pidfd,
        // EINVAL, ENOENT: no pid at all, or by now that of a mere thread.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ESRCH | libc::EINVAL | libc::ENOENT)) => {
            return Ok(Verified::Gone);
        }
        Err(e) => return Err(e),
    };
    Ok(match look_at(record.pid)? {
        Sighting::Gone => Verified::Gone,
        Sighting::Machine(found) if found.is_same_process(record) => Verified::Ours(pidfd),
        Sighting::Machine(_) | Sighting::Stranger => Verified::NotOurs,
    })
}

fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(invalid)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}
