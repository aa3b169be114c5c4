//! The two traits a VMM driver implements.

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{AdoptError, BlankSpec, GuestMemory, MachineRecord, MachineSpec};

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
    /// The binary's own version text, and the driver's word for the form of its machines (`7.2.22, form 2`).
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

/// What a machine's vCPUs do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunState {
    /// They run.
    Running,
    /// They are paused, and `resume_vcpus` lets them go on.
    Paused,
    /// They do not run and never should again: the machine was not yet wholly made when its server died, or its guest
    /// has failed. The text is the VMM's word for it.
    Unusable(String),
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

    /// A VMM that has come up before its machine is known, which is most of the time that a restore takes. `None`: there is
    /// no such thing here.
    ///
    /// Cancel safety: if dropped, there is none.
    async fn blank(&self, _spec: BlankSpec) -> Result<Option<Box<dyn Blank>>, VmmError> {
        Ok(None)
    }

    /// Takes over a machine that an earlier server, or an earlier owner in this one, has let go of or left by dying. It
    /// then does all that a fresh one does, but for telling its exit status and the VMM's last words.
    ///
    /// The vCPUs are left as they are: a server may have died between stopping them and letting them go on, so ask
    /// [`Machine::run_state`]. Console output since the former owner went away may be lost.
    ///
    /// Errors: `Gone`, `NotOurs`, `Unresponsive`, `Look`; nothing was done to the process. Cancel safety: drop it at any time.
    async fn adopt(&self, record: &MachineRecord) -> Result<Box<dyn Machine>, AdoptError>;
}

/// A VMM that waits for a machine to restore. If dropped, it is killed; not if the server is.
#[async_trait]
pub trait Blank: Send + Sync + 'static {
    /// Like [`Vmm::restore`]. `spec` has what the blank was told: name and console may be others. On an error there is no
    /// VMM any more, and its private directory is to be made anew.
    async fn restore(self: Box<Self>, spec: MachineSpec, state: &Path) -> Result<Box<dyn Machine>, VmmError>;

    /// Ends it, and waits until the kernel has let go of it.
    async fn end(self: Box<Self>) -> Result<(), VmmError>;
}

/// One live VMM process. Dropping it lets go of it like `disown`, but without waiting: it neither ends the process nor
/// tells its end any more.
#[async_trait]
pub trait Machine: Send + Sync + 'static {
    /// How to find this machine again after a restart of ours.
    fn record(&self) -> MachineRecord;

    /// The VMM that runs it. For an adopted machine this may be an older one than that which its driver starts now; what
    /// it saves is to be restored by its like.
    fn identity(&self) -> &VmmIdentity;

    /// Becomes `Some` as soon as the process ended, however it did.
    fn exit(&self) -> watch::Receiver<Option<MachineExit>>;

    /// Stops the vCPUs and drains block I/O. Idempotent.
    async fn pause_vcpus(&self) -> Result<(), VmmError>;

    /// Lets paused vCPUs go on. Idempotent.
    async fn resume_vcpus(&self) -> Result<(), VmmError>;

    /// What the vCPUs do now.
    async fn run_state(&self) -> Result<RunState, VmmError>;

    /// Writes the device state (no memory, no disks) to `to`. The vCPUs are paused.
    async fn save_device_state(&self, to: &Path) -> Result<(), VmmError>;

    /// Where guest memory lies in the VMM's address space.
    async fn guest_memory(&self) -> Result<GuestMemory, VmmError>;

    /// Asks the guest to power off, waits for at most `grace`, then kills.
    async fn shutdown(&self, grace: Duration) -> Result<MachineExit, VmmError>;

    /// Ends the process now and waits until the kernel has let go of it. Never needs the guest's cooperation.
    async fn kill(&self) -> Result<MachineExit, VmmError>;

    /// Leaves the machine running for a successor, who may adopt it once this returns. Whoever waits for its exit is told
    /// nothing more: the channel closes.
    async fn disown(self: Box<Self>) -> MachineRecord;
}
