//! What the node store keeps of a template.

use aenv_image::ImageConfig;
use aenv_model::{BuildId, Bytes, CaptureId, MachineShape, SandboxId, TemplateId};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::build::LogEntry;

/// A template with all its builds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TemplateRecord {
    /// Its id.
    pub id: TemplateId,
    /// Its name, unique on the node.
    pub name: String,
    /// When it was first asked for.
    pub created_at: Timestamp,
    /// When a build of it last changed.
    pub updated_at: Timestamp,
    /// Its builds, oldest first. At most one is ready: a newer success replaces it.
    pub builds: Vec<BuildRecord>,
    /// Whether it is in the repository that nodes share: that says what there is of it.
    #[serde(default)]
    pub shared: bool,
}

impl TemplateRecord {
    /// The build that sandboxes start from.
    #[must_use]
    pub fn ready(&self) -> Option<&BuildRecord> {
        self.builds.iter().rev().find(|build| matches!(build.state, BuildState::Ready { .. }))
    }

    /// What lists show of the template: the ready build, else the newest.
    #[must_use]
    pub fn shown(&self) -> Option<&BuildRecord> {
        self.ready().or_else(|| self.builds.last())
    }

    /// The build with this id.
    #[must_use]
    pub fn build(&self, id: BuildId) -> Option<&BuildRecord> {
        self.builds.iter().find(|build| build.id == id)
    }
}

/// One build.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BuildRecord {
    /// Its id.
    pub id: BuildId,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// When its state last changed.
    pub updated_at: Timestamp,
    /// The machine of sandboxes from it.
    pub shape: MachineShape,
    /// Where it stands.
    pub state: BuildState,
    /// What it said; complete once the build has ended.
    pub logs: Vec<LogEntry>,
}

/// Where a build stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "state")]
#[expect(clippy::large_enum_variant, reason = "a template has a few builds, and most of those kept are ready")]
pub enum BuildState {
    /// Created, not started.
    Waiting,
    /// At work.
    Building,
    /// Sandboxes can start from it.
    Ready {
        /// The image as it was named.
        image: String,
        /// The manifest digest it had.
        digest: String,
        /// The image's own settings.
        config: ImageConfig,
        /// Virtual size of the root file system.
        disk_size: Bytes,
        /// A machine booted on it that sandboxes go on from.
        #[serde(default)]
        capture: Option<CaptureId>,
    },
    /// It failed.
    Error {
        /// Why, for the user.
        message: String,
        /// At which step.
        step: FailedAt,
    },
}

/// The step a build failed at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailedAt {
    /// The base image.
    Base,
    /// Publishing the result.
    Finalize,
}

impl FailedAt {
    /// As records of other nodes have it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Finalize => "finalize",
        }
    }

    /// What [`name`](Self::name) gave; a step of another version is the last.
    pub(crate) fn named(name: &str) -> Self {
        if name == Self::Base.name() { Self::Base } else { Self::Finalize }
    }
}

/// A snapshot of a sandbox, from which others start as from a template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SnapshotRecord {
    /// Its id, among those of templates.
    pub id: TemplateId,
    /// Its name, among those of templates.
    pub name: Option<String>,
    /// The sandbox it was taken of.
    pub sandbox: SandboxId,
    /// The instant of it.
    pub created_at: Timestamp,
    /// The machine of sandboxes from it.
    pub shape: MachineShape,
    /// Virtual size of the disk.
    pub disk_size: Bytes,
    /// What processes get that name nothing else.
    pub config: ImageConfig,
    /// What there is of it.
    pub capture: CaptureId,
    /// Whether it is in the repository that nodes share: that says whether it is there.
    #[serde(default)]
    pub shared: bool,
}
