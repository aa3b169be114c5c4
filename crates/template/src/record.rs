//! What the node store keeps of a template.

use std::collections::BTreeMap;

use aenv_image::ImageConfig;
use aenv_model::{BuildId, Bytes, CaptureId, MachineShape, SandboxId, TemplateId};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::build::LogEntry;

/// Builds of a template that are remembered although nobody can start from them: failed ones, and replaced ones.
const PAST: usize = 16;

/// Builds of a template that wait for their start. Of more, the oldest are forgotten: their clients are gone.
const WAITING: usize = 64;

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
    /// Its builds, oldest first. Of those that are ready, each has a tag: one that loses its last is replaced.
    pub builds: Vec<BuildRecord>,
    /// What its tags stand for.
    #[serde(default)]
    pub tags: BTreeMap<String, Tag>,
    /// Told to whoever asks; everybody who may ask may use it anyway.
    #[serde(default)]
    pub public: bool,
    /// Whether it is in the repository that nodes share: that says what there is of it.
    #[serde(default)]
    pub shared: bool,
}

/// The tag of those who name none.
pub const DEFAULT_TAG: &str = "default";

/// What a tag stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tag {
    /// The build.
    pub build: BuildId,
    /// Since when.
    pub created_at: Timestamp,
}

impl TemplateRecord {
    /// The build that sandboxes start from whose creator names no tag.
    #[must_use]
    pub fn ready(&self) -> Option<&BuildRecord> {
        self.tagged(DEFAULT_TAG)
    }

    /// The build that a tag stands for.
    #[must_use]
    pub fn tagged(&self, tag: &str) -> Option<&BuildRecord> {
        self.build(self.tags.get(tag)?.build).filter(|build| build.is_ready())
    }

    /// Every build that sandboxes can start from.
    pub fn ready_builds(&self) -> impl Iterator<Item = &BuildRecord> {
        self.builds.iter().filter(|build| build.is_ready())
    }

    /// Lets tags stand for a build from now on.
    pub(crate) fn assign(&mut self, tags: &[String], build: BuildId, now: Timestamp) {
        for tag in tags {
            self.tags.insert(tag.clone(), Tag { build, created_at: now });
        }
    }

    /// As [`assign`](Self::assign), for a build that has just become ready: a tag that stands for a newer build keeps to that.
    pub(crate) fn assign_if_newest(&mut self, tags: &[String], build: BuildId, now: Timestamp) {
        let place = |id| self.builds.iter().position(|build| build.id == id);
        let is_behind = |tag: &&String| self.tags.get(*tag).is_none_or(|known| place(known.build) <= place(build));
        let tags: Vec<_> = tags.iter().filter(is_behind).cloned().collect();
        self.assign(&tags, build, now);
    }

    /// Ready builds that have no tag any more are replaced, and given: nothing but their names is left. Of builds that nobody
    /// can start from, the oldest are forgotten.
    pub(crate) fn drop_untagged(&mut self) -> Vec<BuildId> {
        let Self { builds, tags, .. } = self;
        let mut dropped = Vec::new();
        for build in builds.iter_mut().filter(|build| build.is_ready()) {
            if !tags.values().any(|tag| tag.build == build.id) {
                build.state = BuildState::Replaced;
                dropped.push(build.id);
            }
        }
        forget(builds, PAST, |state| matches!(state, BuildState::Error { .. } | BuildState::Replaced));
        dropped
    }

    /// Adds a build that waits for its start.
    pub(crate) fn add(&mut self, build: BuildRecord) {
        self.builds.push(build);
        forget(&mut self.builds, WAITING, |state| *state == BuildState::Waiting);
    }

    /// A record of the time before there were tags: its ready build was what is tagged now.
    pub(crate) fn tag_if_untagged(&mut self) {
        if self.tags.is_empty()
            && let Some(ready) = self.ready_builds().last()
        {
            let tag = Tag { build: ready.id, created_at: ready.updated_at };
            self.tags.insert(DEFAULT_TAG.to_owned(), tag);
        }
    }

    /// What lists show of the template: the build that sandboxes start from, else the newest.
    #[must_use]
    pub fn shown(&self) -> Option<&BuildRecord> {
        self.ready().or_else(|| self.ready_builds().last()).or_else(|| self.builds.last())
    }

    /// The build with this id.
    #[must_use]
    pub fn build(&self, id: BuildId) -> Option<&BuildRecord> {
        self.builds.iter().find(|build| build.id == id)
    }
}

/// Keeps the newest `most` of the builds in such a state.
fn forget(builds: &mut Vec<BuildRecord>, most: usize, is_such: impl Fn(&BuildState) -> bool) {
    let mut surplus = builds.iter().filter(|build| is_such(&build.state)).count().saturating_sub(most);
    builds.retain(|build| {
        let goes = surplus > 0 && is_such(&build.state);
        surplus -= usize::from(goes);
        !goes
    });
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
    /// Tags that are to stand for it once it is ready. None: the default one.
    #[serde(default)]
    pub tags: Vec<String>,
}

impl BuildRecord {
    /// Sandboxes can start from it.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self.state, BuildState::Ready { .. })
    }
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
        /// What was done on top of the image. If anything was, the capture alone has it.
        #[serde(default)]
        recipe: Option<Recipe>,
    },
    /// It was ready once. Its tags stand for others now, and its files are gone.
    Replaced,
    /// It failed.
    Error {
        /// Why, for the user.
        message: String,
        /// Where.
        step: BuildStage,
    },
}

/// What a build leaves behind for templates that are built on it, beside its files and its image's settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// Variables of its steps, on top of those of its image.
    pub env: BTreeMap<String, String>,
    /// What runs in every sandbox from the start.
    #[serde(default)]
    pub start: Option<String>,
    /// What succeeds when that is up.
    #[serde(default)]
    pub ready: Option<String>,
}

/// A part of a build: what a log line tells of, or what failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BuildStage {
    /// The image or template below.
    #[default]
    Base,
    /// A step, counted from 1.
    Step(u32),
    /// What comes after the steps.
    Finalize,
}

impl BuildStage {
    /// As the API and the records of other nodes have it.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Base => "base".to_owned(),
            Self::Step(number) => number.to_string(),
            Self::Finalize => "finalize".to_owned(),
        }
    }

    /// What [`name`](Self::name) gave; that of another version is the last.
    pub(crate) fn named(name: &str) -> Self {
        match name {
            "base" => Self::Base,
            name => name.parse().map_or(Self::Finalize, Self::Step),
        }
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
    /// Whether it holds memory, or the disk alone.
    #[serde(default)]
    pub memory: bool,
    /// What is to become of it among other nodes.
    #[serde(default)]
    pub publication: PublicationState,
}

impl SnapshotRecord {
    /// The instant of which it is, in whole milliseconds.
    #[must_use]
    pub fn captured_at(&self) -> Timestamp {
        let millis = i64::try_from(self.capture.minted_at().as_millis()).unwrap_or_default();
        Timestamp::from_millisecond(millis).unwrap_or(self.created_at)
    }
}

/// Where a snapshot stands on its way to other nodes. Sandboxes start from it on its own in any case.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "state")]
pub enum PublicationState {
    /// All who are to have it have it.
    #[default]
    Ready,
    /// It is on its way. A server that ends meanwhile leaves it to the next one.
    Publishing,
    /// It stays on its own node.
    Failed {
        /// Why, for the user.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(state: BuildState) -> BuildRecord {
        let shape = MachineShape { vcpus: 1, memory: Bytes::mib(128) };
        let now = Timestamp::UNIX_EPOCH;
        BuildRecord { id: BuildId::new(), created_at: now, updated_at: now, shape, state, logs: vec![], tags: vec![] }
    }

    fn ready() -> BuildState {
        let (config, recipe) = (ImageConfig::default(), None);
        BuildState::Ready { image: "i".into(), digest: "d".into(), config, disk_size: Bytes(0), capture: None, recipe }
    }

    fn template() -> TemplateRecord {
        let now = Timestamp::UNIX_EPOCH;
        TemplateRecord {
            id: TemplateId::new(),
            name: "t".into(),
            created_at: now,
            updated_at: now,
            builds: vec![],
            tags: BTreeMap::new(),
            public: false,
            shared: false,
        }
    }

    #[test]
    fn a_build_that_ends_after_a_newer_one_takes_no_tag_from_it() {
        let mut record = template();
        record.builds = vec![build(BuildState::Building), build(BuildState::Building)];
        let [older, newer] = [record.builds[0].id, record.builds[1].id];
        let tags = [DEFAULT_TAG.to_owned()];
        for id in [newer, older] {
            record.builds.iter_mut().find(|build| build.id == id).unwrap().state = ready();
            record.assign_if_newest(&tags, id, Timestamp::UNIX_EPOCH);
            assert_eq!(record.ready().unwrap().id, newer);
            let dropped = record.drop_untagged();
            assert_eq!(dropped, if id == older { vec![older] } else { vec![] });
        }
        assert_eq!(record.build(older).unwrap().state, BuildState::Replaced, "it is still known");
    }

    #[test]
    fn builds_that_nobody_can_start_from_are_forgotten_in_time() {
        let mut record = template();
        for _ in 0..2 * WAITING {
            record.add(build(BuildState::Waiting));
        }
        assert_eq!(record.builds.len(), WAITING);
        for _ in 0..2 * PAST {
            record.add(build(BuildState::Replaced));
        }
        let newest = record.builds.last().unwrap().id;
        assert_eq!(record.drop_untagged(), []);
        assert_eq!(record.builds.len(), WAITING + PAST);
        assert!(record.build(newest).is_some());
    }
}
