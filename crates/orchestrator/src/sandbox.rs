//! Sandboxes as the layers above see them: what is asked for, what is known, what can go wrong.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aenv_model::{Bytes, MachineShape, Phase, SandboxId, TemplateId};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::seams::GuestDialer;

/// What processes of the guest get when their caller names nothing else.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GuestDefaults {
    /// Environment, in the order of the image.
    pub env: BTreeMap<String, String>,
    /// User name or numeric id, as an image's `User` has it.
    pub user: Option<String>,
    /// Working directory.
    pub workdir: Option<String>,
}

/// Whatever keeps a sandbox's source in place until its disk is made.
pub type Keep = Box<dyn std::any::Any + Send>;

/// A sandbox to be created.
#[derive(Debug, Clone)]
pub struct NewSandbox {
    /// The template it comes from.
    pub template: TemplateId,
    /// The template's name, for lists.
    pub alias: Option<String>,
    /// Root file system to put a writable disk over.
    pub rootfs: PathBuf,
    /// Least size of its disk.
    pub disk_size: Option<Bytes>,
    /// Its machine.
    pub shape: MachineShape,
    /// Defaults from the template, with the creator's environment already on top.
    pub defaults: GuestDefaults,
    /// Free-form labels.
    pub metadata: BTreeMap<String, String>,
    /// Life from readiness on; `None`: the node's default.
    pub timeout: Option<Duration>,
    /// The guest agent's port asks for a token.
    pub secure: bool,
    /// Other ports ask for a token.
    pub private_traffic: bool,
}

/// A sandbox as it is now.
#[derive(Debug, Clone)]
pub struct SandboxInfo {
    /// Its id.
    pub id: SandboxId,
    /// Where it stands.
    pub phase: Phase,
    /// The template it came from.
    pub template: TemplateId,
    /// The template's name at creation.
    pub alias: Option<String>,
    /// When it was asked for.
    pub started_at: Timestamp,
    /// When it will expire.
    pub end_at: Timestamp,
    /// Its machine.
    pub shape: MachineShape,
    /// Virtual size of its disk.
    pub disk_size: Bytes,
    /// Its labels.
    pub metadata: BTreeMap<String, String>,
    /// Token of the agent's port, for secure sandboxes.
    pub access_token: Option<String>,
    /// Token of other ports, for private sandboxes.
    pub traffic_token: Option<String>,
}

/// The way into a running sandbox.
#[derive(Debug, Clone)]
pub struct Route {
    /// Opens connections to it.
    pub dialer: Arc<dyn GuestDialer>,
    /// Token of ports other than the agent's, for private sandboxes.
    pub traffic_token: Option<String>,
    /// Cancelled when it stops accepting traffic: connections through it are to be cut.
    pub ended: CancellationToken,
}

/// A sandbox that is no more, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Ended {
    /// A delete call.
    #[error("it was deleted")]
    Deleted,
    /// Its deadline passed.
    #[error("it reached its timeout")]
    Expired,
    /// Its VMM ended by itself.
    #[error("its machine ended: {0}")]
    MachineEnded(String),
    /// It never became ready.
    #[error("it could not be started")]
    StartFailed,
    /// The node was shut down.
    #[error("the node was shut down")]
    NodeShutdown,
}

/// Why a sandbox was not created. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The host's disk is full.
    #[error("not enough disk space on the node for the sandbox's disk")]
    NoSpace { source: aenv_block_device::CreateDiskError },
    /// The asked disk size cannot be had.
    #[error("disk size cannot be had")]
    DiskSize { source: aenv_block_device::CreateDiskError },
    /// A step failed.
    #[error("{step} for sandbox {id}")]
    Step { id: SandboxId, step: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
    /// A step took too long.
    #[error("{step} for sandbox {id} took longer than {deadline:?}")]
    Deadline { id: SandboxId, step: &'static str, deadline: Duration },
    /// It was deleted before it was ready.
    #[error("sandbox {id} was deleted while it was starting")]
    Deleted { id: SandboxId },
    /// The node is shutting down.
    #[error("the node is shutting down")]
    ShuttingDown,
}

/// Why an ask about an existing sandbox had no success.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No such sandbox; if it once was here and is remembered, with why it ended.
    #[error("sandbox {id} not found{}", ended.as_ref().map(|why| format!(": {why}")).unwrap_or_default())]
    NotFound { id: SandboxId, ended: Option<Ended> },
}

/// Why a delete had no success. The sandbox goes on being deleted; another call joins.
#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    /// No such sandbox.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// Something could not be given back yet; it is tried again in the background.
    #[error("sandbox {id} is being deleted, but could not be taken down yet: {failures}")]
    Unfinished { id: SandboxId, failures: String },
}

/// Why the orchestrator did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartOrchestratorError {
    /// A directory of ours cannot be used.
    #[error("prepare {path}")]
    Directory { path: PathBuf, source: std::io::Error },
}
