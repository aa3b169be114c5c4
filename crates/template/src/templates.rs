//! The registry of templates: names, records, running builds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aenv_durable::{Row, Store, StoreError, Table};
use aenv_image::ImageConfig;
use aenv_model::{BuildId, Bytes, CaptureId, MachineShape, TemplateId};
use aenv_repository::{RepositoryError, Resources};
use aenv_snapshot::{Capture, CaptureError, CaptureStore};
use aenv_tasks::{StillRunning, TaskScope};
use jiff::Timestamp;
use serde::Deserialize;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::build::{BuildLog, BuildRequest, BuildView, ImageRequest, LogEntry, LogLevel};
use crate::files::{RootfsLease, remove_dir};
use crate::image::{ImageProblem, ReadyImage, import};
use crate::make::at_work;
use crate::points::{Points, point_rows};
use crate::record::{BuildRecord, BuildStage, BuildState, DEFAULT_TAG, Recipe, SnapshotRecord, TemplateRecord};
use crate::seams::{ImportImage, Workshop};
use crate::shared::{Adopted, Shared, is_missing};
use crate::snapshots::{Kept, snapshot_rows};
use crate::uploads::Uploads;

/// Longest template name, as the API has it.
const NAME_LIMIT: usize = 128;

/// Builds that are at work or wait for their turn, at most.
const AT_WORK: usize = 256;

/// Tags that one build can be given, at most.
const TAGS: usize = 64;

/// Version of the template rows.
const ROW_VERSION: u32 = 1;

/// `[template_build]`: builds and their limits.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TemplateConfig {
    /// Builds at work at the same time; others wait their turn.
    pub max_concurrent_builds: usize,
    /// Longest time of one, from its turn on.
    #[serde(rename = "timeout_secs", deserialize_with = "secs")]
    pub timeout: Duration,
    /// Disks after steps that are kept for later builds. 0: none.
    pub max_cached_steps: usize,
    /// Longest archive that a client may send for a step, in MiB.
    pub max_upload_mb: u64,
    /// Most that all archives may have, in MiB; the oldest go.
    pub max_uploads_mb: u64,
}

impl Default for TemplateConfig {
    fn default() -> Self {
        Self {
            max_concurrent_builds: 4,
            timeout: Duration::from_secs(3600),
            max_cached_steps: 128,
            max_upload_mb: 2048,
            max_uploads_mb: 16 << 10,
        }
    }
}

fn secs<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    u64::deserialize(deserializer).map(Duration::from_secs)
}

/// What the registry is made of.
#[derive(Debug)]
pub struct Parts {
    /// Builds and their limits.
    pub config: TemplateConfig,
    /// Where root file systems live.
    pub dir: PathBuf,
    /// Turns images into root file systems.
    pub importer: Arc<dyn ImportImage>,
    /// Has the captures of builds and snapshots.
    pub captures: CaptureStore,
    /// Where archives of clients are kept.
    pub uploads_dir: PathBuf,
    /// Has machines to build in, and boots what sandboxes go on from. `None`: every sandbox boots, and nothing can be built
    /// on an image.
    pub workshop: Option<Arc<dyn Workshop>>,
    /// What nodes share. `None`: all is this node's alone.
    pub shared: Option<Shared>,
}

/// All templates of this node. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Templates {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) parts: Parts,
    pub(crate) rows: Table<TemplateRecord>,
    pub(crate) points: Points,
    pub(crate) uploads: Uploads,
    pub(crate) snapshot_rows: Table<SnapshotRecord>,
    /// Serialises changes: each is decided on the current records, made durable, then shown.
    pub(crate) writer: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    pub(crate) permits: Semaphore,
    pub(crate) scope: TaskScope,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) records: HashMap<TemplateId, TemplateRecord>,
    pub(crate) snapshots: HashMap<TemplateId, Kept>,
    /// Of ready builds.
    pub(crate) captures: HashMap<BuildId, Capture>,
    at_work: HashMap<BuildId, AtWork>,
    leases: HashMap<BuildId, RootfsLease>,
    pub(crate) adopted: Adopted,
}

#[derive(Debug, Clone)]
pub(crate) struct AtWork {
    pub(crate) log: Arc<BuildLog>,
    /// Ends it, as soon as what it has made is put away.
    pub(crate) cancel: CancellationToken,
    pub(crate) ended: CancellationToken,
}

/// What sandboxes can start from: a template, or a snapshot.
#[derive(Debug, Clone)]
pub struct ReadyTemplate {
    /// Its id.
    pub id: TemplateId,
    /// Its name.
    pub name: Option<String>,
    /// A machine to go on from.
    pub capture: Option<Capture>,
    /// A root file system to boot.
    pub image: Option<ReadyImageFiles>,
    /// Machine of sandboxes from it.
    pub shape: MachineShape,
    /// What processes get that name nothing else: the image's own settings, and what steps have made of them.
    pub config: ImageConfig,
    /// What builds on it inherit beside that.
    pub recipe: Option<Recipe>,
}

/// A root file system to boot.
#[derive(Debug, Clone)]
pub struct ReadyImageFiles {
    /// It.
    pub rootfs: PathBuf,
    /// Keeps `rootfs` in place, whatever becomes of the template.
    pub lease: RootfsLease,
    /// Its virtual size.
    pub disk_size: Bytes,
}

/// A name that no template can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameProblem {
    /// Empty or too long.
    #[error("template name must have 1 to {NAME_LIMIT} characters")]
    Length,
    /// A character outside the alphabet.
    #[error("template name {0:?} may hold only letters, digits, '-' and '_'")]
    Characters(String),
    /// No tag.
    #[error("tag {0:?} must have 1 to {NAME_LIMIT} letters, digits, '-', '_' and '.'")]
    Tag(String),
    /// Too many tags.
    #[error("{0} tags, expected at most {TAGS}")]
    TagCount(usize),
    /// What nodes share has the default tag only.
    #[error("templates in a repository that nodes share have no tag but '{DEFAULT_TAG}' in this version")]
    Shared,
}

/// Why a template was not created.
#[derive(Debug, thiserror::Error)]
pub enum CreateTemplateError {
    /// The name.
    #[error(transparent)]
    Name(#[from] NameProblem),
    /// A snapshot has that name.
    #[error("a snapshot has the name '{0}'")]
    Taken(String),
    /// What nodes share.
    #[error("announce the template to other nodes")]
    Repository(#[from] RepositoryError),
    /// The node store.
    #[error("record the template")]
    Store(#[from] StoreError),
}

/// Why a build was not started.
#[derive(Debug, thiserror::Error)]
pub enum StartBuildError {
    /// No such template, or no such build of it.
    #[error("template {template} has no build {build}")]
    NotFound { template: String, build: String },
    /// The build was started before.
    #[error("build {0} was started already")]
    AlreadyStarted(BuildId),
    /// Too many builds wait for their turn.
    #[error("{0} builds are at work or wait for their turn; start it later")]
    Busy(usize),
    /// What nodes share.
    #[error("claim the build among nodes")]
    Repository(#[from] RepositoryError),
    /// The node store.
    #[error("record the build")]
    Store(#[from] StoreError),
}

/// Why a template cannot be used for a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// Neither an id nor a name of ours.
    #[error("template '{0}' not found")]
    NotFound(String),
    /// It has no successful build yet.
    #[error("template '{0}' has no finished build")]
    NotReady(String),
    /// What nodes share.
    #[error("look for the template among what nodes share")]
    Repository(#[from] RepositoryError),
    /// What another node captured does not become a capture of this one.
    #[error("take over a capture of another node")]
    Adopt(#[from] CaptureError),
    /// What is gone elsewhere is not gone here.
    #[error(transparent)]
    Forget(#[from] DeleteTemplateError),
}

/// Why a template was not deleted.
#[derive(Debug, thiserror::Error)]
pub enum DeleteTemplateError {
    /// Neither an id nor a name of ours.
    #[error("template '{0}' not found")]
    NotFound(String),
    /// The node store; the template is still there.
    #[error("delete the template's record")]
    Store(#[from] StoreError),
    /// What nodes share; the template may still be there.
    #[error("delete the template for all nodes")]
    Repository(#[from] RepositoryError),
}

/// Why there are no templates.
#[derive(Debug, thiserror::Error)]
pub enum StartTemplatesError {
    /// The node store.
    #[error("read the templates")]
    Store(#[from] StoreError),
    /// The directory of uploads.
    #[error("open the directory of files for builds")]
    Uploads(#[source] std::io::Error),
}

/// Version of the snapshot rows.
pub(crate) const SNAPSHOT_VERSION: u32 = 1;

/// Captures that the templates and snapshots in `store` need. `None`: there are records that this version does not
/// understand, which may need any. Blocking, for a moment.
pub fn captures(store: &Store) -> Result<Option<BTreeSet<CaptureId>>, StoreError> {
    let mut needed = BTreeSet::new();
    for (_, row) in store.table::<TemplateRecord>("templates", ROW_VERSION).list_blocking()? {
        let Row::Known(record) = row else { return Ok(None) };
        needed.extend(record.builds.iter().filter_map(|build| match &build.state {
            BuildState::Ready { capture, .. } => *capture,
            _ => None,
        }));
    }
    for (_, row) in snapshot_rows(store).list_blocking()? {
        let Row::Known(record) = row else { return Ok(None) };
        needed.insert(record.capture);
    }
    for (_, row) in point_rows(store).list_blocking()? {
        let Row::Known(point) = row else { return Ok(None) };
        needed.insert(point.capture);
    }
    Ok(Some(needed))
}

impl Templates {
    /// Reads the records; builds that a former server left unfinished become errors, files without a record go.
    pub async fn start(parts: Parts, store: &Store) -> Result<Self, StartTemplatesError> {
        let rows: Table<TemplateRecord> = store.table("templates", ROW_VERSION);
        let (mut records, mut unfinished) = (HashMap::new(), Vec::new());
        let mut all_known = true;
        for (key, row) in rows.list_blocking()? {
            match row {
                Row::Known(mut record) => {
                    record.tag_if_untagged();
                    let failed = fail_unfinished(&mut record);
                    if !failed.is_empty() {
                        rows.put_blocking(&key, &record)?;
                    }
                    if record.shared {
                        unfinished.extend(failed.into_iter().map(|(build, state)| (record.id, build, state)));
                    }
                    records.insert(record.id, record);
                }
                Row::Unknown(why) => {
                    warn!(template_id = key, why, "kept a template record that this version does not understand");
                    all_known = false;
                }
            }
        }
        if all_known {
            // With unknown records we cannot tell garbage from theirs.
            sweep(&parts.dir, &records);
            let ready = records.values().flat_map(|record| record.ready_builds().map(|build| build.id.to_string()));
            parts.importer.release_all_but(ready.collect());
        }
        let mut captures = HashMap::new();
        for build in records.values().flat_map(TemplateRecord::ready_builds) {
            let BuildState::Ready { capture: Some(id), .. } = &build.state else { continue };
            match parts.captures.find(*id).await {
                Ok(capture) => _ = captures.insert(build.id, capture),
                Err(error) => warn!(build_id = %build.id, %error, "sandboxes of a template will boot"),
            }
        }
        let snapshot_rows = snapshot_rows(store);
        let snapshots = crate::snapshots::load(&snapshot_rows, &parts.captures).await?;
        let points = Points::load(store, &parts.captures, parts.config.max_cached_steps).await?;
        let TemplateConfig { max_upload_mb, max_uploads_mb, .. } = parts.config;
        let uploads = Uploads::open(parts.uploads_dir.clone(), Bytes::mib(max_upload_mb), Bytes::mib(max_uploads_mb));
        let uploads = uploads.map_err(StartTemplatesError::Uploads)?;
        let permits = Semaphore::new(parts.config.max_concurrent_builds.max(1));
        let state = Mutex::new(State { records, captures, snapshots, ..State::default() });
        let scope = TaskScope::new("template builds");
        let writer = tokio::sync::Mutex::new(());
        let inner = Inner { parts, rows, points, uploads, snapshot_rows, writer, state, permits, scope };
        let templates = Self { inner: Arc::new(inner) };
        templates.publish_unfinished();
        if templates.shared().is_some() {
            // Nobody waits for it: the repository may be out of reach.
            let (catching_up, stop) = (templates.clone(), templates.inner.scope.token());
            templates.inner.scope.spawn("catch up with other nodes", async move {
                _ = stop.run_until_cancelled(catching_up.catch_up(unfinished)).await;
            });
        }
        Ok(templates)
    }

    /// Tells other nodes what became of builds, and learns from them what is gone.
    async fn catch_up(&self, unfinished: Vec<(TemplateId, BuildId, BuildState)>) {
        for (template, build, state) in unfinished {
            self.tell_failure(template, build, &state).await;
        }
        if let Err(error) = self.reconcile().await {
            warn!(%error, "it is not known what other nodes have deleted");
        }
    }

    /// A fresh build for `name`, or `name:tag`, waiting to be started. The template is made if the name is new. Once the build
    /// is ready, its tags stand for it: that of the name and `tags`, or the default one.
    ///
    /// Cancel safety: if dropped, it is made all the same.
    pub async fn create(
        &self,
        name: &str,
        tags: &[String],
        shape: MachineShape,
    ) -> Result<(TemplateRecord, BuildId), CreateTemplateError> {
        let (name, tag) = split_tag(name);
        check_name(name)?;
        let tags: BTreeSet<String> = tags.iter().map(String::as_str).chain(tag).map(str::to_owned).collect();
        let mut tags: Vec<_> = tags.into_iter().collect();
        check_tags(&tags)?;
        if tags.is_empty() {
            tags.push(DEFAULT_TAG.to_owned());
        }
        let (templates, name) = (self.clone(), name.to_owned());
        let create = async move { templates.create_now(&name, tags, shape).await };
        self.detached(create).await.unwrap_or(Err(StoreError::Closed.into()))
    }

    async fn create_now(
        &self,
        name: &str,
        tags: Vec<String>,
        shape: MachineShape,
    ) -> Result<(TemplateRecord, BuildId), CreateTemplateError> {
        let taken = || CreateTemplateError::Taken(name.to_owned());
        if self.known_snapshot(name).is_some_and(|known| !known.shared) {
            return Err(taken());
        }
        let own = || self.known(name).filter(|known| !known.shared);
        if self.shared().is_some() && own().is_none() && tags != [DEFAULT_TAG] {
            return Err(NameProblem::Shared.into());
        }
        // Not under the lock: the repository may be slow, and decides races itself.
        let announced = match self.shared().filter(|_| own().is_none()) {
            None => None,
            Some(shared) => {
                let announced = shared.repository.announce(name, Resources::new(shape, Bytes(0))).await;
                Some(announced.map_err(|error| match error {
                    RepositoryError::Taken { .. } => taken(),
                    error => error.into(),
                })?)
            }
        };
        let _writer = self.inner.writer.lock().await;
        let now = Timestamp::now();
        let fresh = |id, created_at, shared| TemplateRecord {
            id,
            name: name.to_owned(),
            created_at,
            updated_at: now,
            builds: Vec::new(),
            tags: BTreeMap::new(),
            public: false,
            shared,
        };
        let (mut record, build_id) = match (announced, own()) {
            (Some((announced, build)), _) => {
                let known = self.known(&announced.id.to_string());
                (known.unwrap_or_else(|| fresh(announced.id, announced.created_at, true)), build)
            }
            (None, Some(own)) => (own, BuildId::new()),
            (None, None) if crate::snapshots::find(&self.state().snapshots, name).is_some() => return Err(taken()),
            (None, None) => {
                let id = TemplateId::new();
                (fresh(id, now, false), id.into())
            }
        };
        record.add(BuildRecord {
            id: build_id,
            created_at: now,
            updated_at: now,
            shape,
            state: BuildState::Waiting,
            logs: Vec::new(),
            tags,
        });
        record.updated_at = now;
        self.save(record.clone()).await?;
        Ok((record, build_id))
    }

    /// Starts a waiting build. Its progress and outcome are in [`Templates::build`].
    ///
    /// Cancel safety: if dropped, it is started all the same.
    pub async fn start_build(&self, template: &str, build: &str, request: BuildRequest) -> Result<(), StartBuildError> {
        let (templates, template, build) = (self.clone(), template.to_owned(), build.to_owned());
        let start = async move { templates.start_build_now(&template, &build, request).await };
        self.detached(start).await.unwrap_or(Err(StoreError::Closed.into()))
    }

    /// Runs a change to its end, also when whoever asked for it has gone: half a change would leave the records in
    /// memory and in the store apart. `None`: the change panicked.
    pub(crate) async fn detached<T: Send + 'static>(
        &self,
        change: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        self.inner.scope.spawn("template change", change).await.ok()
    }

    /// Where work goes on beside requests.
    pub(crate) fn scope(&self) -> &TaskScope {
        &self.inner.scope
    }

    async fn start_build_now(&self, template: &str, build: &str, request: BuildRequest) -> Result<(), StartBuildError> {
        let missing = || StartBuildError::NotFound { template: template.to_owned(), build: build.to_owned() };
        let build_id: BuildId = build.parse().map_err(|_| missing())?;
        let known = || self.known(template).filter(|known| known.build(build_id).is_some());
        let waiting = |record: &TemplateRecord| match record.build(build_id) {
            Some(build) if build.state == BuildState::Waiting => Ok(()),
            Some(_) => Err(StartBuildError::AlreadyStarted(build_id)),
            None => Err(missing()),
        };
        let found = match known() {
            Some(known) => known,
            None => self.find(template).await?.ok_or_else(missing)?, // announced to another node
        };
        waiting(&found)?;
        let busy = self.state().at_work.len();
        if busy >= AT_WORK {
            return Err(StartBuildError::Busy(busy));
        }
        if let Some(shared) = self.shared().filter(|_| found.shared) {
            // Not under the lock: of all nodes and requests that claim it, one succeeds.
            match shared.repository.claim(found.id, build_id).await {
                Ok(_) => {}
                Err(RepositoryError::Started) => return Err(StartBuildError::AlreadyStarted(build_id)),
                Err(error) if is_missing(&error) => return Err(missing()), // deleted, or a newer one was announced
                Err(error) => return Err(error.into()),
            }
        }
        let _writer = self.inner.writer.lock().await;
        let mut record = match known() {
            Some(known) => known,
            None if found.shared => found,
            None => return Err(missing()),
        };
        waiting(&record)?;
        let entry = record.builds.iter_mut().find(|entry| entry.id == build_id).ok_or_else(missing)?;
        entry.state = BuildState::Building;
        entry.updated_at = Timestamp::now();
        let template_id = record.id;
        self.save(record).await?;
        let work = at_work(&self.inner.scope.token());
        self.state().at_work.insert(build_id, work.clone());
        let templates = self.clone();
        self.inner.scope.spawn(format!("build {build_id}"), async move {
            templates.build_to_end(template_id, build_id, &request, &work).await;
            templates.state().at_work.remove(&build_id);
            work.ended.cancel();
        });
        Ok(())
    }

    pub(crate) async fn finish(
        &self,
        template: TemplateId,
        build: BuildId,
        state: BuildState,
        logs: Vec<LogEntry>,
    ) -> Result<(), StoreError> {
        let is_shared = self.state().records.get(&template).is_some_and(|record| record.shared);
        if is_shared {
            self.tell_failure(template, build, &state).await;
        }
        let _writer = self.inner.writer.lock().await;
        let known = self.state().records.get(&template).cloned();
        let Some(mut record) = known else {
            self.retire(template, build); // deleted meanwhile
            return Ok(());
        };
        let ready = matches!(state, BuildState::Ready { .. });
        let needs_image = matches!(state, BuildState::Ready { recipe: None, .. });
        info!(template_id = %template, build_id = %build, ready, "template build ended");
        let now = Timestamp::now();
        let mut tags = Vec::new();
        if let Some(entry) = record.builds.iter_mut().find(|entry| entry.id == build) {
            entry.state = state;
            entry.updated_at = now;
            entry.logs = logs;
            tags.clone_from(&entry.tags);
        }
        if tags.is_empty() {
            tags.push(DEFAULT_TAG.to_owned()); // announced by an older version
        }
        record.updated_at = now;
        if ready {
            record.assign_if_newest(&tags, build, now);
        }
        // Those that have lost their last tag: sandboxes that run from them have disks of their own.
        let replaced = record.drop_untagged();
        self.save(record).await?;
        for old in replaced {
            self.retire(template, old);
        }
        if !ready {
            self.retire(template, build);
        } else if !needs_image {
            self.lease(template, build).doom(); // the capture has all of it
        }
        Ok(())
    }

    /// A build that this node knows, with the log entries from `offset` on, at most `limit`, at least `level`.
    pub(crate) fn known_build(
        &self,
        template: &str,
        build: &str,
        offset: usize,
        limit: usize,
        level: LogLevel,
    ) -> Option<BuildView> {
        let build_id: BuildId = build.parse().ok()?;
        let record = self.known(template)?;
        let mut build = record.build(build_id)?.clone();
        if let Some(work) = self.state().at_work.get(&build_id) {
            build.logs = work.log.entries();
        }
        build.logs = build.logs.into_iter().filter(|entry| entry.level >= level).skip(offset).take(limit).collect();
        Some(BuildView { build })
    }

    /// The template by id or name, if this node knows it.
    pub(crate) fn known(&self, reference: &str) -> Option<TemplateRecord> {
        find(&self.state().records, reference).cloned()
    }

    /// Every template that this node knows.
    pub(crate) fn known_all(&self) -> Vec<TemplateRecord> {
        self.state().records.values().cloned().collect()
    }

    /// The template or snapshot by id or name, ready for a sandbox, if this node knows it.
    pub(crate) fn resolve_known(&self, reference: &str) -> Result<ReadyTemplate, ResolveError> {
        let mut state = self.state();
        let State { records, leases, captures, snapshots, .. } = &mut *state;
        if let Some(kept) = crate::snapshots::find(snapshots, reference) {
            return Ok(kept.ready());
        }
        let (name, tag) = split_tag(reference);
        let missing = || ResolveError::NotFound(reference.to_owned());
        let not_ready = || ResolveError::NotReady(reference.to_owned());
        let record = find(records, name).ok_or_else(missing)?;
        let build = match (record.tagged(tag.unwrap_or(DEFAULT_TAG)), tag) {
            (Some(build), _) => build,
            (None, None) if record.tags.is_empty() => return Err(not_ready()),
            (None, _) => return Err(missing()),
        };
        let BuildState::Ready { config, disk_size, recipe, .. } = &build.state else { return Err(not_ready()) };
        let image = recipe.is_none().then(|| {
            // Taken under the lock that retiring needs: a build found ready here keeps its files.
            let lease = leases.entry(build.id).or_insert_with(|| self.lease(record.id, build.id));
            ReadyImageFiles { rootfs: lease.rootfs(), lease: lease.clone(), disk_size: *disk_size }
        });
        Ok(ReadyTemplate {
            id: record.id,
            name: Some(record.name.clone()),
            capture: captures.get(&build.id).cloned(),
            image,
            shape: build.shape,
            config: config.clone(),
            recipe: recipe.clone(),
        })
    }

    /// An image without a template, ready for a sandbox: its files go with the lease.
    ///
    /// Cancel safety: if dropped, nothing is left.
    pub async fn import(&self, request: &ImageRequest) -> Result<ReadyImage, ImageProblem> {
        let parts = &self.inner.parts;
        let _permit = self.inner.permits.acquire().await;
        let owner = format!("image-{}", BuildId::new());
        let lease = RootfsLease::new(parts.dir.join(&owner), &owner, &parts.importer);
        lease.doom();
        import(parts.importer.as_ref(), request, lease, self.inner.scope.token().child_token()).await
    }

    /// Deletes what this node knows by id or name.
    pub(crate) async fn delete_known(&self, reference: &str) -> Result<(), DeleteTemplateError> {
        if self.delete_snapshot(reference).await? {
            return Ok(());
        }
        let (record, builds) = {
            let _writer = self.inner.writer.lock().await;
            let record = self.known(reference).ok_or_else(|| DeleteTemplateError::NotFound(reference.to_owned()))?;
            self.inner.rows.remove(record.id.to_string()).await?;
            let mut state = self.state();
            state.records.remove(&record.id);
            let at_work = |build: &BuildRecord| state.at_work.get(&build.id).cloned();
            let builds: Vec<AtWork> = record.builds.iter().filter_map(at_work).collect();
            (record, builds)
        };
        for work in builds {
            work.cancel.cancel();
            work.ended.cancelled().await;
        }
        for build in &record.builds {
            self.retire(record.id, build.id);
        }
        // Empty unless a lease is out; what a lease leaves behind is for the next start's sweep.
        _ = std::fs::remove_dir(self.inner.parts.dir.join(record.id.to_string()));
        Ok(())
    }

    /// Archives that clients send for their builds.
    #[must_use]
    pub fn uploads(&self) -> &Uploads {
        &self.inner.uploads
    }

    /// Removes a build's files, or leaves that to the last lease on them.
    pub(crate) fn retire(&self, template: TemplateId, build: BuildId) {
        let (known, capture) = {
            let mut state = self.state();
            (state.leases.remove(&build), state.captures.remove(&build))
        };
        if let Some(capture) = capture {
            capture.doom();
        }
        let lease = known.unwrap_or_else(|| self.lease(template, build));
        lease.doom();
    }

    pub(crate) fn lease(&self, template: TemplateId, build: BuildId) -> RootfsLease {
        RootfsLease::new(self.build_dir(template, build), build, &self.inner.parts.importer)
    }

    /// Cancels running builds and waits for them.
    pub async fn close(&self, patience: Duration) -> Result<(), StillRunning> {
        self.inner.scope.close(patience).await
    }

    pub(crate) async fn save(&self, record: TemplateRecord) -> Result<(), StoreError> {
        self.inner.rows.put(record.id.to_string(), record.clone()).await?;
        self.state().records.insert(record.id, record);
        Ok(())
    }

    /// Map operations only happen under it, so the maps are valid after any panic.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn build_dir(&self, template: TemplateId, build: BuildId) -> PathBuf {
        self.inner.parts.dir.join(template.to_string()).join(build.to_string())
    }
}

/// By id, else by name. Of two records with one name, which only a store from elsewhere can hold, the one that sandboxes
/// can start from.
fn find<'a>(records: &'a HashMap<TemplateId, TemplateRecord>, reference: &str) -> Option<&'a TemplateRecord> {
    let by_id = reference.parse().ok().and_then(|id: TemplateId| records.get(&id));
    let named = || records.values().filter(|record| record.name == reference);
    by_id.or_else(|| named().max_by_key(|record| (record.ready().is_some(), std::cmp::Reverse(record.id))))
}

/// A reference without its tag, and the tag.
pub(crate) fn split_tag(reference: &str) -> (&str, Option<&str>) {
    match reference.split_once(':') {
        Some((name, tag)) => (name, Some(tag)),
        None => (reference, None),
    }
}

pub(crate) fn check_tag(tag: &str) -> Result<(), NameProblem> {
    let fits = (1..=NAME_LIMIT).contains(&tag.len())
        && tag.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'));
    if fits { Ok(()) } else { Err(NameProblem::Tag(tag.to_owned())) }
}

pub(crate) fn check_tags(tags: &[String]) -> Result<(), NameProblem> {
    if tags.len() > TAGS {
        return Err(NameProblem::TagCount(tags.len()));
    }
    tags.iter().try_for_each(|tag| check_tag(tag))
}

pub(crate) fn check_name(name: &str) -> Result<(), NameProblem> {
    if name.is_empty() || name.len() > NAME_LIMIT {
        return Err(NameProblem::Length);
    }
    match name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_') {
        true => Ok(()),
        false => Err(NameProblem::Characters(name.to_owned())),
    }
}

/// Marks builds that were at work when their server ended, and gives them.
fn fail_unfinished(record: &mut TemplateRecord) -> Vec<(BuildId, BuildState)> {
    let mut failed = Vec::new();
    for build in &mut record.builds {
        if build.state == BuildState::Building {
            let message = "the server was restarted during the build; start it again".to_owned();
            let timestamp = Timestamp::now();
            let stage = BuildStage::Base;
            let entry = LogEntry { timestamp, level: LogLevel::Error, message: message.clone(), stage };
            build.logs.push(entry);
            build.state = BuildState::Error { message, step: stage };
            build.updated_at = timestamp;
            failed.push((build.id, build.state.clone()));
        }
    }
    failed
}

/// Removes directories that belong to no ready build: remains of builds that were cut short, or of interrupted deletes.
fn sweep(dir: &Path, records: &HashMap<TemplateId, TemplateRecord>) {
    let names = |dir: &Path| -> Vec<(PathBuf, String)> {
        std::fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| (entry.path(), entry.file_name().to_string_lossy().into_owned()))
            .collect()
    };
    for (path, name) in names(dir) {
        match name.parse::<TemplateId>().ok().and_then(|id| records.get(&id)) {
            None => remove_dir(&path),
            Some(record) => {
                let ready: BTreeSet<_> = record.ready_builds().map(|build| build.id.to_string()).collect();
                for (path, name) in names(&path) {
                    if !ready.contains(&name) {
                        remove_dir(&path);
                    }
                }
            }
        }
    }
}
