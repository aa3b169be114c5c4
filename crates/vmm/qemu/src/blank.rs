//! A QEMU that has come up and waits for the machine it is to be.
//!
//! It has parsed its options, and stops before it makes its machine (`-preconfig`). What is not known until then comes by
//! QMP: memory, and what is behind the disks.

use std::path::{Path, PathBuf};

use aenv_vmm_driver::{Attachment, Blank, BlankSpec, Machine, MachineSpec, VmmError, VmmIdentity, VmmProcess};
use async_trait::async_trait;

use crate::Qemu;
use crate::arguments::{DiskBackend, MEMORY, blank_arguments, disk_backend, memory_backend};
use crate::commands::{BlockdevAdd, ExitPreconfig, ObjectAdd, QomSet};
use crate::console::Console;
use crate::machine::QemuMachine;
use crate::qmp::Qmp;
use crate::start::{QMP_SOCKET, SERIAL_SOCKET, connect, explain, load_state};

/// The process, with its control connection. It is killed when this is dropped.
pub(crate) struct QemuBlank {
    process: VmmProcess,
    qmp: Qmp,
    identity: VmmIdentity,
    work_dir: PathBuf,
    disks: usize,
    nics: usize,
}

impl Qemu {
    /// Cancel safety: if dropped, the process is killed.
    pub(crate) async fn start_blank(&self, spec: BlankSpec) -> Result<QemuBlank, VmmError> {
        let args = |listeners| blank_arguments(&spec, self.accel, listeners);
        let process = self.spawn(&spec.name, &spec.work_dir, spec.netns.clone(), args).await?;
        let control = async {
            let stream = connect(&spec.work_dir, QMP_SOCKET).await?;
            Qmp::open(stream, self.startup_timeout, self.call_timeout).await
        };
        let connected = tokio::select! {
            connected = control => connected,
            end = process.ended() => Err(VmmError::Ended { operation: "start", detail: end.to_string() }),
        };
        match connected {
            Ok(qmp) => Ok(QemuBlank {
                process,
                qmp,
                identity: self.identity.clone(),
                work_dir: spec.work_dir,
                disks: spec.disks,
                nics: spec.nics.len(),
            }),
            Err(error) => {
                let end = process.kill().await?;
                Err(explain(error, end, process.last_words()))
            }
        }
    }
}

impl QemuBlank {
    async fn make(&self, spec: &MachineSpec, memory: &Path, state: &Path) -> Result<Console, VmmError> {
        const OPERATION: &str = "make the machine";
        self.qmp.execute(OPERATION, &ObjectAdd(memory_backend(spec.shape, memory)?)).await?;
        let (path, property, value) = ("/machine", "memory-backend", &*format!("/objects/{MEMORY}"));
        self.qmp.execute(OPERATION, &QomSet { path, property, value }).await?;
        for (index, disk) in spec.disks.iter().enumerate() {
            let DiskBackend { image, limits, throttle } = disk_backend(index, disk)?;
            self.qmp.execute(OPERATION, &BlockdevAdd(image)).await?;
            self.qmp.execute(OPERATION, &ObjectAdd(limits)).await?;
            self.qmp.execute(OPERATION, &BlockdevAdd(throttle)).await?;
        }
        self.qmp.execute(OPERATION, &ExitPreconfig {}).await?;
        let serial = connect(&self.work_dir, SERIAL_SOCKET).await?;
        let console = Console::open(serial, &spec.serial_log, spec.serial_log_limit).await?;
        load_state(&self.qmp, state).await?;
        Ok(console)
    }
}

#[async_trait]
impl Blank for QemuBlank {
    async fn restore(self: Box<Self>, spec: MachineSpec, state: &Path) -> Result<Box<dyn Machine>, VmmError> {
        let made = async {
            let refused = |detail: String| VmmError::Refused { operation: "machine spec", detail };
            let memory =
                spec.memory_image.clone().ok_or_else(|| refused("there is no memory to restore".to_owned()))?;
            if (spec.disks.len(), spec.nics.len()) != (self.disks, self.nics) {
                return Err(refused(format!(
                    "its VMM waits for {} disks and {} network devices",
                    self.disks, self.nics
                )));
            }
            let console = tokio::select! {
                made = self.make(&spec, &memory, state) => made?,
                end = self.process.ended() => {
                    return Err(VmmError::Ended { operation: "start", detail: end.to_string() });
                }
            };
            Ok((memory, console))
        };
        match made.await {
            Ok((memory_image, console)) => {
                let attachment = Attachment {
                    vmm: self.identity,
                    serial_log: spec.serial_log,
                    serial_log_limit: spec.serial_log_limit,
                    memory_image,
                };
                self.process.release();
                Ok(Box::new(QemuMachine::new(self.process, self.qmp, console, attachment)))
            }
            Err(error) => {
                let end = self.process.kill().await?;
                Err(explain(error, end, self.process.last_words()))
            }
        }
    }

    async fn end(self: Box<Self>) -> Result<(), VmmError> {
        self.process.kill().await.map(drop)
    }
}
