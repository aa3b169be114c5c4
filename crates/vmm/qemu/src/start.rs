//! From a machine's spec to a machine: a cold boot, or a restore; and from its record, if it runs already.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aenv_vmm_driver::{
    AdoptError, Attachment, Blank, BlankSpec, Machine, MachineRecord, MachineSpec, ProcessEnd, ProcessSpec, Vmm,
    VmmError, VmmIdentity, VmmKind, VmmProcess,
};
use async_trait::async_trait;
use rustix::process::Signal;
use tokio::net::UnixStream;
use tracing::debug;

use crate::arguments::{Accel, Listeners, arguments};
use crate::commands::{
    Cont, Getfd, MigrateIncoming, MigrateSetCapabilities, MigrationCapability, MigrationStatus, QueryMigrate,
};
use crate::console::Console;
use crate::machine::QemuMachine;
use crate::qmp::Qmp;
use crate::socket;

/// Socket for control, in the work dir.
pub(crate) const QMP_SOCKET: &str = "qmp.sock";
/// Socket of the guest's console, in the work dir.
pub(crate) const SERIAL_SOCKET: &str = "serial.sock";
/// The memory image of a cold boot, in the work dir.
const MEMORY_IMAGE: &str = "memory";

/// QEMU, ready to start machines. Made by [`Qemu::probe`].
#[derive(Debug)]
pub struct Qemu {
    pub(crate) identity: VmmIdentity,
    pub(crate) binary: PathBuf,
    pub(crate) accel: Accel,
    pub(crate) startup_timeout: Duration,
    pub(crate) call_timeout: Duration,
    pub(crate) why_emulated: Option<String>,
}

impl Qemu {
    pub(crate) fn kind(accel: Accel) -> VmmKind {
        match accel {
            Accel::Kvm => VmmKind::QemuKvm,
            Accel::Tcg { .. } => VmmKind::QemuTcg,
        }
    }

    /// Why guests do not run on KVM, for people; `None` if they do.
    #[must_use]
    pub fn why_emulated(&self) -> Option<&str> {
        self.why_emulated.as_deref()
    }

    /// Cancel safety: if dropped, the process is killed.
    pub(crate) async fn start(&self, spec: MachineSpec, state: Option<&Path>) -> Result<QemuMachine, VmmError> {
        let memory_image = match &spec.memory_image {
            Some(image) => image.clone(),
            None => empty_memory_image(&spec)?,
        };
        let args = |listeners| arguments(&spec, &memory_image, self.accel, listeners, state.is_some());
        let process = self.spawn(&spec.name, &spec.work_dir, spec.netns.clone(), args).await?;

        let attachment = Attachment {
            vmm: self.identity.clone(),
            serial_log: spec.serial_log.clone(),
            serial_log_limit: spec.serial_log_limit,
            memory_image,
        };
        let set_up = async {
            tokio::select! {
                connected = self.set_up(&spec.work_dir, &attachment, state) => connected,
                end = process.ended() => Err(VmmError::Ended { operation: "start", detail: end.to_string() }),
            }
        };
        match set_up.await {
            Ok((qmp, console)) => {
                process.release();
                Ok(QemuMachine::new(process, qmp, console, attachment))
            }
            Err(error) => {
                let end = process.kill().await?;
                Err(explain(error, end, process.last_words()))
            }
        }
    }

    /// Starts the process, which inherits its sockets.
    ///
    /// Cancel safety: if dropped, the process is killed.
    pub(crate) async fn spawn(
        &self,
        name: &str,
        work_dir: &Path,
        netns: Option<PathBuf>,
        args: impl FnOnce(Listeners) -> Result<Vec<OsString>, VmmError>,
    ) -> Result<VmmProcess, VmmError> {
        let (qmp, serial) = (listen(work_dir, QMP_SOCKET)?, listen(work_dir, SERIAL_SOCKET)?);
        VmmProcess::spawn(ProcessSpec {
            name: name.to_owned(),
            work_dir: work_dir.to_owned(),
            binary: self.binary.clone(),
            args: args(Listeners { qmp: qmp.as_raw_fd(), serial: serial.as_raw_fd() })?,
            netns,
            inherit: vec![qmp, serial],
        })
        .await
    }

    /// Connects to a new process and brings the machine to where its caller wants it.
    async fn set_up(
        &self,
        work_dir: &Path,
        attachment: &Attachment,
        state: Option<&Path>,
    ) -> Result<(Qmp, Console), VmmError> {
        let (qmp, console) = self.connect(work_dir, attachment, self.startup_timeout).await?;
        match state {
            None => _ = qmp.execute("boot", &Cont {}).await?,
            Some(state) => load_state(&qmp, state).await?,
        }
        Ok((qmp, console))
    }

    async fn connect(
        &self,
        work_dir: &Path,
        attachment: &Attachment,
        patience: Duration,
    ) -> Result<(Qmp, Console), VmmError> {
        let qmp = Qmp::open(connect(work_dir, QMP_SOCKET).await?, patience, self.call_timeout).await?;
        let serial = connect(work_dir, SERIAL_SOCKET).await?;
        let console = Console::open(serial, &attachment.serial_log, attachment.serial_log_limit).await?;
        Ok((qmp, console))
    }

    /// Both sockets take the next client as soon as the former one has closed its connection. While that lives on they
    /// are silent, and we do not wait longer for a greeting than for any answer of a QEMU that runs.
    async fn take_over(&self, record: &MachineRecord) -> Result<QemuMachine, AdoptError> {
        let process = VmmProcess::adopt(record.clone()).await?;
        let (name, pid) = (record.name.clone(), record.pid);
        let Some(attachment) = record.attachment.clone() else {
            let detail = "its record does not say where its console log and its memory are".into();
            return Err(AdoptError::Unresponsive {
                name,
                pid,
                source: VmmError::Refused { operation: "adoption", detail },
            });
        };
        match self.connect(&record.work_dir, &attachment, self.call_timeout).await {
            Ok((qmp, console)) => {
                debug!(machine = name, pid, "machine adopted");
                Ok(QemuMachine::new(process, qmp, console, attachment))
            }
            // Its end closes the connection; then that is the news.
            Err(source) => match VmmProcess::adopt(record.clone()).await {
                Ok(_) => Err(AdoptError::Unresponsive { name, pid, source }),
                Err(error) => Err(error),
            },
        }
    }
}

/// A socket in a work dir, for QEMU to inherit.
fn listen(work_dir: &Path, name: &str) -> Result<OwnedFd, VmmError> {
    let error = |source| VmmError::Io { operation: "listen on", path: work_dir.join(name), source };
    socket::listen(work_dir, name).map_err(error)
}

/// A connection to a socket in a work dir.
pub(crate) async fn connect(work_dir: &Path, name: &str) -> Result<UnixStream, VmmError> {
    let error = |source| VmmError::Io { operation: "connect to", path: work_dir.join(name), source };
    socket::connect(work_dir, name).await.map_err(error)
}

/// If QEMU ended by itself, that is what went wrong, however it showed, and only QEMU's own words say why.
pub(crate) fn explain(error: VmmError, end: ProcessEnd, words: String) -> VmmError {
    let we_killed_it = matches!(end, ProcessEnd::Status(status) if status.signal() == Some(Signal::KILL.as_raw()));
    let operation = match &error {
        VmmError::Ended { operation, .. } => operation,
        _ if we_killed_it => return error,
        _ => "start",
    };
    VmmError::Ended { operation, detail: if words.is_empty() { end.to_string() } else { words } }
}

/// Loads device state; the memory it belongs to is mapped already.
///
/// The state is handed over as an open descriptor, which any QEMU takes, and which works for a process that may
/// neither start helpers nor, one day, open files. (`xen-load-devices-state` would be the counterpart of how it was
/// saved, but QEMU 10.0 crashes on it.)
pub(crate) async fn load_state(qmp: &Qmp, state: &Path) -> Result<(), VmmError> {
    const OPERATION: &str = "load device state";
    let io_error = |source| VmmError::Io { operation: "open device state", path: state.to_owned(), source };
    let file: OwnedFd = std::fs::File::open(state).map_err(io_error)?.into();
    let capabilities = ["x-ignore-shared", "events"].map(|capability| MigrationCapability { capability, state: true });
    qmp.execute(OPERATION, &MigrateSetCapabilities { capabilities: &capabilities }).await?;
    qmp.execute_with(OPERATION, &Getfd { fdname: "state" }, file).await?;
    qmp.execute(OPERATION, &MigrateIncoming { uri: "fd:state" }).await?;

    let mut notices = qmp.notices();
    let over =
        notices.wait_for(|seen| matches!(seen.migration, Some(MigrationStatus::Completed | MigrationStatus::Failed)));
    let status = match tokio::time::timeout(qmp.call_timeout(), over).await {
        Ok(Ok(seen)) => seen.migration,
        Ok(Err(_)) => return Err(VmmError::Ended { operation: OPERATION, detail: "control connection closed".into() }),
        Err(_) => return Err(VmmError::Deadline { operation: OPERATION, deadline: qmp.call_timeout() }),
    };
    if status == Some(MigrationStatus::Completed) {
        return Ok(());
    }
    let info = qmp.execute(OPERATION, &QueryMigrate {}).await?;
    let detail = info.error_desc.unwrap_or_else(|| "it does not fit this machine".into());
    Err(VmmError::Refused { operation: OPERATION, detail })
}

fn empty_memory_image(spec: &MachineSpec) -> Result<PathBuf, VmmError> {
    let path = spec.work_dir.join(MEMORY_IMAGE);
    let create = || -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        file.set_len(spec.shape.memory.get())
    };
    create().map_err(|source| VmmError::Io { operation: "create memory image", path: path.clone(), source })?;
    Ok(path)
}

#[async_trait]
impl Vmm for Qemu {
    fn identity(&self) -> &VmmIdentity {
        &self.identity
    }

    async fn boot(&self, spec: MachineSpec) -> Result<Box<dyn Machine>, VmmError> {
        Ok(Box::new(self.start(spec, None).await?))
    }

    async fn restore(&self, spec: MachineSpec, state: &Path) -> Result<Box<dyn Machine>, VmmError> {
        Ok(Box::new(self.start(spec, Some(state)).await?))
    }

    async fn blank(&self, spec: BlankSpec) -> Result<Option<Box<dyn Blank>>, VmmError> {
        Ok(Some(Box::new(self.start_blank(spec).await?)))
    }

    async fn adopt(&self, record: &MachineRecord) -> Result<Box<dyn Machine>, AdoptError> {
        Ok(Box::new(self.take_over(record).await?))
    }
}
