//! The two traits a VMM driver implements.

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{GuestMemory, MachineRecord, MachineSpec};

/// Which VMM, and how it runs guest code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmmKind {
    /// QEMU, hardware virtualisation.
    QemuKvm,
    /// QEMU, emulated CPU: slower, same semantics.
    QemuTcg,
    /// Firecracker on KVM.
    Firecracker,
}

/// What a snapshot must match to be restored: VMM kind and version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmmIdentity {
    /// Kind and accelerator.
    pub kind: VmmKind,
    /// The binary's own version text (`7.2.22`).
    pub version: String,
}

/// How a machine's process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineExit {
    /// The guest powered off, or the VMM was told to quit.
    Shutdown,
    /// The VMM was killed on request.
    Killed,
    /// The VMM ended by itself; the text says how (exit status, last words on stderr).
    Crashed(String),
}

/// What can go wrong with a machine.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The VMM's binary is missing, unusable, or too old.
    #[error("VMM {binary} cannot be used: {why}")]
    Unusable { binary: PathBuf, why: String },
    /// The process could not be started.
    #[error("start VMM {binary}")]
    Spawn { binary: PathBuf, source: std::io::Error },
    /// The process ended while it was needed.
    #[error("VMM ended during {operation}: {detail}")]
    Ended { operation: &'static str, detail: String },
    /// A control call had no answer within its deadline.
    #[error("VMM did not answer {operation} within {deadline:?}")]
    Deadline { operation: &'static str, deadline: Duration },
    /// The VMM refused a control call.
    #[error("VMM refused {operation}: {detail}")]
    Refused { operation: &'static str, detail: String },
    /// A file or socket of the machine failed.
    #[error("{operation} {path}")]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
}

/// Starts machines of one kind.
#[async_trait]
pub trait Vmm: Send + Sync + 'static {
    /// Kind and version, found out when the driver was made.
    fn identity(&self) -> &VmmIdentity;

    /// Cold boot. Returns when the vCPUs run; the guest's own readiness is the caller's to observe.
    ///
    /// On an error nothing of the machine is left but files in its work dir.
    async fn boot(&self, spec: MachineSpec) -> Result<Box<dyn Machine>, VmmError>;

    /// A machine that goes on from `state` (written by [`Machine::save_device_state`]) with `spec.memory_image` as the
    /// memory of that instant. Returns with the vCPUs still paused.
    async fn restore(&self, spec: MachineSpec, state: &Path) -> Result<Box<dyn Machine>, VmmError>;
}

/// One live VMM process. Dropping it neither ends nor waits for the process: that is what `shutdown`, `kill` and the
/// record are for.
#[async_trait]
pub trait Machine: Send + Sync + 'static {
    /// How to find this machine again after a restart of ours.
    fn record(&self) -> MachineRecord;

    /// Becomes `Some` as soon as the process ended, however it did.
    fn exit(&self) -> watch::Receiver<Option<MachineExit>>;

    /// Stops the vCPUs and drains block I/O. Idempotent.
    async fn pause_vcpus(&self) -> Result<(), VmmError>;

    /// Lets paused vCPUs go on. Idempotent.
    async fn resume_vcpus(&self) -> Result<(), VmmError>;

    /// Writes the device state (no memory, no disks) to `to`. The vCPUs are paused.
    async fn save_device_state(&self, to: &Path) -> Result<(), VmmError>;

    /// Where guest memory lies in the VMM's address space.
    async fn guest_memory(&self) -> Result<GuestMemory, VmmError>;

    /// Asks the guest to power off, waits for at most `grace`, then kills.
    async fn shutdown(&self, grace: Duration) -> Result<MachineExit, VmmError>;

    /// Ends the process now and waits until the kernel has let go of it. Never needs the guest's cooperation.
    async fn kill(&self) -> Result<MachineExit, VmmError>;
}
