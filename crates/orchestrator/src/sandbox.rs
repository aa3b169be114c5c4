//! Sandboxes as the layers above see them: what is asked for, what is known, what can go wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aenv_model::{Bytes, LeaseId, MachineShape, Phase, SandboxId, TemplateId};
use aenv_network::EgressPolicy;
use aenv_snapshot::{Capture, CaptureError};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::activity::InUse;
use crate::seams::GuestDialer;

/// What processes of the guest get when their caller names nothing else.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestDefaults {
    /// Environment, in the order of the image.
    pub env: BTreeMap<String, String>,
    /// User name or numeric id, as an image's `User` has it.
    pub user: Option<String>,
    /// Working directory.
    pub workdir: Option<String>,
}

/// Whatever keeps a sandbox's source in place until its disk is made.
pub type Keep = Box<dyn std::any::Any + Send + Sync>;

/// A sandbox to be created.
#[derive(Debug, Clone)]
pub struct NewSandbox {
    /// What it is to be.
    pub spec: SandboxSpec,
    /// What its disk, and perhaps its memory, begins with.
    pub source: Source,
}

/// What a sandbox is, from its creation to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// The template it comes from.
    pub template: TemplateId,
    /// The template's name, for lists.
    pub alias: Option<String>,
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
    /// What it may reach. Changes while it runs.
    #[serde(default)]
    pub egress: EgressPolicy,
    /// What its deadline does.
    pub on_expiry: OnExpiry,
    /// Traffic resumes it.
    pub auto_resume: bool,
    /// How long nobody uses it before it is paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout: Option<Duration>,
    /// It ends with this lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseId>,
    /// Of the node itself: users neither see nor reach it.
    pub internal: bool,
}

impl SandboxSpec {
    /// A sandbox of the node itself, which nothing outside reaches.
    #[must_use]
    pub fn internal(template: TemplateId, shape: MachineShape) -> Self {
        Self {
            template,
            alias: None,
            shape,
            defaults: GuestDefaults::default(),
            metadata: BTreeMap::new(),
            timeout: None,
            secure: false,
            private_traffic: true,
            egress: EgressPolicy::default(),
            on_expiry: OnExpiry::Delete,
            auto_resume: false,
            idle_timeout: None,
            lease: None,
            internal: true,
        }
    }
}

/// What a sandbox's deadline does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnExpiry {
    /// It is deleted.
    #[default]
    Delete,
    /// It is paused.
    Pause,
    /// It is paused, and only its disk is kept.
    PauseDisk,
}

/// What a new sandbox begins with.
#[derive(Debug, Clone, Default)]
pub struct Source {
    /// A machine to go on from, on a VMM like that of its capture. Else the image is booted.
    pub capture: Option<Capture>,
    /// A root file system to boot.
    pub image: Option<Image>,
}

/// A root file system to boot.
#[derive(Clone)]
pub struct Image {
    /// What the disk is put over.
    pub rootfs: PathBuf,
    /// Least size of the disk.
    pub disk_size: Option<Bytes>,
    /// Keeps `rootfs` in place.
    pub keep: Arc<Keep>,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("rootfs", &self.rootfs).finish_non_exhaustive()
    }
}

/// How a sandbox is paused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HowToPause {
    /// Only its disk is kept, and a resume boots.
    pub disk_only: bool,
    /// Only if its guest answers.
    pub if_responsive: bool,
}

/// What was copied of a running sandbox.
#[derive(Debug, Clone)]
pub struct Taken {
    /// The copy. Doom it if nobody is to keep it.
    pub capture: Capture,
    /// What the sandbox is.
    pub spec: Arc<SandboxSpec>,
    /// How long its machine stood still.
    pub stall: Duration,
}

/// What became of a fork.
#[derive(Debug)]
pub struct Forked {
    /// The children, in no particular order.
    pub children: Vec<Result<SandboxInfo, CreateError>>,
    /// The instant of which they are copies.
    pub captured_at: Timestamp,
    /// How long the source's machine stood still.
    pub stall: Duration,
}

/// Where the time of a start went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StartTimes {
    /// Directory, network slot, disk, memory.
    pub prepare: Duration,
    /// From there to a machine that goes.
    pub machine: Duration,
    /// From there to a guest that is ready.
    pub guest: Duration,
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
    /// What its deadline does.
    pub on_expiry: OnExpiry,
    /// Traffic resumes it.
    pub auto_resume: bool,
    /// It is paused, and only its disk was kept.
    pub disk_only: bool,
    /// It is paused, and its guest did not answer then.
    pub unresponsive: bool,
    /// Where the time of its last start went.
    pub start_times: StartTimes,
    /// Token of the agent's port, for secure sandboxes.
    pub access_token: Option<String>,
    /// Token of other ports, for private sandboxes.
    pub traffic_token: Option<String>,
    /// What it may reach.
    pub egress: Arc<EgressPolicy>,
}

/// What sandboxes own outside the server's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owned {
    /// Private directories, in which their VMMs run.
    pub work_dirs: BTreeSet<PathBuf>,
    /// Disks, by name.
    pub disks: BTreeSet<String>,
    /// How many network slots.
    pub slots: usize,
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
    /// To be kept for as long as the sandbox is used this way.
    pub in_use: InUse,
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
    /// Its lease was not renewed, or was given up.
    #[error("its lease ended")]
    LeaseEnded,
    /// Its VMM ended by itself.
    #[error("its machine ended: {0}")]
    MachineEnded(String),
    /// Its machine stood still for a copy, and would not go on.
    #[error("its machine did not go on after it was copied: {0}")]
    Stuck(String),
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
    /// The source cannot be used on this node.
    #[error("{why}")]
    Source { why: String },
    /// The lease that it was to be under has ended.
    #[error("lease {0} has ended, or never was")]
    NoLease(LeaseId),
    /// Too many wait for their start.
    #[error("{starting} sandboxes are being started, and there is room for {room} more")]
    Full { starting: usize, room: usize },
    /// It was deleted before it was ready.
    #[error("sandbox {id} was deleted while it was starting")]
    Deleted { id: SandboxId },
    /// The node is shutting down.
    #[error("the node is shutting down")]
    ShuttingDown,
}

impl CreateError {
    /// The failure of a step in the start of `id`.
    pub(crate) fn in_step<E>(id: SandboxId, step: &'static str) -> impl FnOnce(E) -> Self + use<E>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        move |source| Self::Step { id, step, source: Box::new(source) }
    }
}

/// Why an ask about an existing sandbox had no success.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AskError {
    /// No such sandbox; if it once was here and is remembered, with why it ended.
    #[error("sandbox {id} not found{}", ended.as_ref().map(|why| format!(": {why}")).unwrap_or_default())]
    NotFound { id: SandboxId, ended: Option<Ended> },
    /// It cannot be done in the phase that the sandbox is in.
    #[error("sandbox {id} is {}: cannot {asked} it now", name(*phase))]
    Busy { id: SandboxId, phase: Phase, asked: &'static str },
    /// Its guest is to answer before it is paused, and does not. It runs on.
    #[error("the guest of sandbox {id} does not answer; it is not paused")]
    Unresponsive { id: SandboxId },
    /// Its machine could not be copied. It runs on, unless it is told to have ended.
    #[error("sandbox {id} could not be captured")]
    Capture { id: SandboxId, source: Arc<CaptureError> },
    /// What was captured could not be recorded. It runs on.
    #[error("sandbox {id} could not be paused: {why}")]
    Unrecorded { id: SandboxId, why: String },
    /// No machine could be put in the place of its own. It runs on.
    #[error("sandbox {id} could not be rolled back")]
    Rollback { id: SandboxId, source: Arc<CreateError> },
    /// What it may reach could not be changed. It is as it was.
    #[error("the network of sandbox {id} could not be changed: {why}")]
    Network { id: SandboxId, why: String },
    /// It could not be started again. It stays paused.
    #[error("sandbox {id} could not be resumed")]
    Resume { id: SandboxId, source: Arc<CreateError> },
}

/// A phase in a sentence.
fn name(phase: Phase) -> String {
    match phase {
        Phase::Snapshotting => "being captured".to_owned(),
        Phase::Forking => "being forked".to_owned(),
        Phase::RollingBack => "being rolled back".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
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
    /// The rows of a former server cannot be changed.
    #[error(transparent)]
    Store(#[from] aenv_durable::StoreError),
    /// A directory of ours cannot be used.
    #[error("prepare {path}")]
    Directory { path: PathBuf, source: std::io::Error },
}
