//! The registry of templates: names, records, running builds.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aenv_durable::{Row, Store, StoreError, Table};
use aenv_image::ImageConfig;
use aenv_model::{BuildId, Bytes, MachineShape, TemplateId};
use aenv_tasks::{StillRunning, TaskScope};
use jiff::Timestamp;
use serde::Deserialize;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::build::{BuildLog, BuildRequest, BuildView, LogEntry, LogLevel, run};
use crate::record::{BuildRecord, BuildState, FailedAt, TemplateRecord};
use crate::seams::ImportImage;

/// Longest template name, as the API has it.
const NAME_LIMIT: usize = 128;

/// Version of the template rows.
const ROW_VERSION: u32 = 1;

/// `[template_build]`: builds and their limits.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TemplateConfig {
    /// Builds at work at the same time; others wait their turn.
    pub max_concurrent_builds: usize,
    /// Free space of a root file system whose builder asks for none. Sparse: it costs nothing until it is used.
    pub min_free_disk_mib: u64,
}

impl Default for TemplateConfig {
    fn default() -> Self {
        Self { max_concurrent_builds: 4, min_free_disk_mib: 1024 }
    }
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
}

/// All templates of this node. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Templates {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    parts: Parts,
    rows: Table<TemplateRecord>,
    /// Serialises changes: each is decided on the current records, made durable, then shown.
    writer: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    permits: Semaphore,
    scope: TaskScope,
}

#[derive(Debug, Default)]
struct State {
    records: HashMap<TemplateId, TemplateRecord>,
    at_work: HashMap<BuildId, AtWork>,
    leases: HashMap<BuildId, RootfsLease>,
}

/// Keeps a build's files in place. A build that was replaced or deleted loses them with the last lease.
#[derive(Debug, Clone)]
pub struct RootfsLease(Arc<BuildDir>);

#[derive(Debug)]
struct BuildDir {
    path: PathBuf,
    doomed: AtomicBool,
}

impl Drop for BuildDir {
    fn drop(&mut self) {
        if self.doomed.load(Ordering::Acquire) {
            remove_dir(&self.path);
        }
    }
}

#[derive(Debug, Clone)]
struct AtWork {
    log: Arc<BuildLog>,
    cancel: CancellationToken,
    ended: CancellationToken,
}

/// A template that sandboxes can start from.
#[derive(Debug, Clone)]
pub struct ReadyTemplate {
    /// Its id.
    pub id: TemplateId,
    /// Its name.
    pub name: String,
    /// Its root file system.
    pub rootfs: PathBuf,
    /// Keeps `rootfs` in place, whatever becomes of the template.
    pub lease: RootfsLease,
    /// Virtual size of the root file system.
    pub disk_size: Bytes,
    /// Machine of sandboxes from it.
    pub shape: MachineShape,
    /// The image's own settings.
    pub config: ImageConfig,
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
}

/// Why a template was not created.
#[derive(Debug, thiserror::Error)]
pub enum CreateTemplateError {
    /// The name.
    #[error(transparent)]
    Name(#[from] NameProblem),
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
    /// The node store.
    #[error("record the build")]
    Store(#[from] StoreError),
}

/// Why a template cannot be used for a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// Neither an id nor a name of ours.
    #[error("template '{0}' not found")]
    NotFound(String),
    /// It has no successful build yet.
    #[error("template '{0}' has no finished build")]
    NotReady(String),
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
}

impl Templates {
    /// Reads the records; builds that a former server left unfinished become errors, files without a record go.
    pub fn start(parts: Parts, store: &Store) -> Result<Self, StoreError> {
        let rows: Table<TemplateRecord> = store.table("templates", ROW_VERSION);
        let mut records = HashMap::new();
        let mut all_known = true;
        for (key, row) in rows.list_blocking()? {
            match row {
                Row::Known(mut record) => {
                    if fail_unfinished(&mut record) {
                        rows.put_blocking(&key, &record)?;
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
            sweep(&parts.dir, &records); // with unknown records we cannot tell garbage from theirs
        }
        let permits = Semaphore::new(parts.config.max_concurrent_builds.max(1));
        let state = Mutex::new(State { records, ..State::default() });
        let scope = TaskScope::new("template builds");
        let writer = tokio::sync::Mutex::new(());
        Ok(Self { inner: Arc::new(Inner { parts, rows, writer, state, permits, scope }) })
    }

    /// Settings.
    #[must_use]
    pub fn config(&self) -> &TemplateConfig {
        &self.inner.parts.config
    }

    /// A fresh build for `name`, waiting to be started. The template is made if the name is new.
    ///
    /// Cancel safety: if dropped, it is made all the same.
    pub async fn create(
        &self,
        name: &str,
        shape: MachineShape,
    ) -> Result<(TemplateRecord, BuildId), CreateTemplateError> {
        check_name(name)?;
        let (templates, name) = (self.clone(), name.to_owned());
        let create = async move { templates.create_now(&name, shape).await };
        Ok(self.detached(create).await.unwrap_or(Err(StoreError::Closed))?)
    }

    async fn create_now(&self, name: &str, shape: MachineShape) -> Result<(TemplateRecord, BuildId), StoreError> {
        let _writer = self.inner.writer.lock().await;
        let now = Timestamp::now();
        let (mut record, build_id) = match self.find(name) {
            Some(known) => (known, BuildId::new()),
            None => {
                let id = TemplateId::new();
                let fresh =
                    TemplateRecord { id, name: name.to_owned(), created_at: now, updated_at: now, builds: Vec::new() };
                (fresh, id.into())
            }
        };
        record.builds.push(BuildRecord {
            id: build_id,
            created_at: now,
            updated_at: now,
            shape,
            state: BuildState::Waiting,
            logs: Vec::new(),
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
    async fn detached<T: Send + 'static>(&self, change: impl Future<Output = T> + Send + 'static) -> Option<T> {
        self.inner.scope.spawn("template change", change).await.ok()
    }

    async fn start_build_now(&self, template: &str, build: &str, request: BuildRequest) -> Result<(), StartBuildError> {
        let missing = || StartBuildError::NotFound { template: template.to_owned(), build: build.to_owned() };
        let _writer = self.inner.writer.lock().await;
        let build_id: BuildId = build.parse().map_err(|_| missing())?;
        let mut record = self.find(template).ok_or_else(missing)?;
        let entry = record.builds.iter_mut().find(|entry| entry.id == build_id).ok_or_else(missing)?;
        if entry.state != BuildState::Waiting {
            return Err(StartBuildError::AlreadyStarted(build_id));
        }
        entry.state = BuildState::Building;
        entry.updated_at = Timestamp::now();
        let template_id = record.id;
        self.save(record).await?;
        let work = AtWork {
            log: Arc::default(),
            cancel: self.inner.scope.token().child_token(),
            ended: CancellationToken::new(),
        };
        self.state().at_work.insert(build_id, work.clone());
        let templates = self.clone();
        self.inner.scope.spawn(format!("build {build_id}"), async move {
            templates.build_to_end(template_id, build_id, &request, &work).await;
            templates.state().at_work.remove(&build_id);
            work.ended.cancel();
        });
        Ok(())
    }

    async fn build_to_end(&self, template: TemplateId, build: BuildId, request: &BuildRequest, work: &AtWork) {
        let rootfs = self.rootfs(template, build);
        let state = tokio::select! {
            permit = self.inner.permits.acquire() => {
                let _permit = permit;
                match rootfs.parent().map(std::fs::create_dir_all) {
                    Some(Err(error)) => BuildState::Error {
                        message: format!("the node cannot keep the template: {error}"),
                        step: FailedAt::Finalize,
                    },
                    _ => run(self.inner.parts.importer.as_ref(), request, &rootfs, &work.log, work.cancel.clone()).await,
                }
            }
            () = work.cancel.cancelled() => BuildState::Error {
                message: "the build was cancelled".to_owned(),
                step: FailedAt::Base,
            },
        };
        if let Err(error) = self.finish(template, build, state, work.log.entries()).await {
            warn!(build_id = %build, %error, "could not record the end of a build");
        }
    }

    async fn finish(
        &self,
        template: TemplateId,
        build: BuildId,
        state: BuildState,
        logs: Vec<LogEntry>,
    ) -> Result<(), StoreError> {
        let _writer = self.inner.writer.lock().await;
        let known = self.state().records.get(&template).cloned();
        let Some(mut record) = known else {
            remove_dir(&self.build_dir(template, build)); // deleted meanwhile
            return Ok(());
        };
        let ready = matches!(state, BuildState::Ready { .. });
        info!(template_id = %template, build_id = %build, ready, "template build ended");
        let now = Timestamp::now();
        if let Some(entry) = record.builds.iter_mut().find(|entry| entry.id == build) {
            entry.state = state;
            entry.updated_at = now;
            entry.logs = logs;
        }
        record.updated_at = now;
        // A newer success takes the place of older ones; sandboxes that run from them have disks of their own.
        let mut replaced = Vec::new();
        if ready {
            record.builds.retain(|entry| {
                let older = entry.id != build && matches!(entry.state, BuildState::Ready { .. });
                if older {
                    replaced.push(entry.id);
                }
                !older
            });
        }
        self.save(record).await?;
        for old in replaced {
            self.retire(template, old);
        }
        if !ready {
            remove_dir(&self.build_dir(template, build));
        }
        Ok(())
    }

    /// A build with the log entries from `offset` on, at most `limit`, at least `level`.
    #[must_use]
    pub fn build(
        &self,
        template: &str,
        build: &str,
        offset: usize,
        limit: usize,
        level: LogLevel,
    ) -> Option<BuildView> {
        let build_id: BuildId = build.parse().ok()?;
        let record = self.find(template)?;
        let mut build = record.build(build_id)?.clone();
        if let Some(work) = self.state().at_work.get(&build_id) {
            build.logs = work.log.entries();
        }
        build.logs = build.logs.into_iter().filter(|entry| entry.level >= level).skip(offset).take(limit).collect();
        Some(BuildView { build })
    }

    /// The template by id or name.
    #[must_use]
    pub fn find(&self, reference: &str) -> Option<TemplateRecord> {
        find(&self.state().records, reference).cloned()
    }

    /// Every template, in no particular order.
    #[must_use]
    pub fn list(&self) -> Vec<TemplateRecord> {
        self.state().records.values().cloned().collect()
    }

    /// The template by id or name, ready for a sandbox.
    pub fn resolve(&self, reference: &str) -> Result<ReadyTemplate, ResolveError> {
        let mut state = self.state();
        let State { records, leases, .. } = &mut *state;
        let record = find(records, reference).ok_or_else(|| ResolveError::NotFound(reference.to_owned()))?;
        let not_ready = || ResolveError::NotReady(reference.to_owned());
        let build = record.ready().ok_or_else(not_ready)?;
        let BuildState::Ready { config, disk_size, .. } = &build.state else { return Err(not_ready()) };
        // Taken under the lock that retiring needs: a build found ready here keeps its files.
        let lease = leases.entry(build.id).or_insert_with(|| self.lease(record.id, build.id));
        Ok(ReadyTemplate {
            id: record.id,
            name: record.name.clone(),
            rootfs: self.rootfs(record.id, build.id),
            lease: lease.clone(),
            disk_size: *disk_size,
            shape: build.shape,
            config: config.clone(),
        })
    }

    /// Deletes a template by id or name: its running builds are cancelled and awaited, its files removed (those that a
    /// sandbox is being made from, when that is done).
    ///
    /// Cancel safety: if dropped, it is deleted all the same.
    pub async fn delete(&self, reference: &str) -> Result<(), DeleteTemplateError> {
        let (templates, reference) = (self.clone(), reference.to_owned());
        let delete = async move { templates.delete_now(&reference).await };
        self.detached(delete).await.unwrap_or(Err(StoreError::Closed.into()))
    }

    async fn delete_now(&self, reference: &str) -> Result<(), DeleteTemplateError> {
        let (record, builds) = {
            let _writer = self.inner.writer.lock().await;
            let record = self.find(reference).ok_or_else(|| DeleteTemplateError::NotFound(reference.to_owned()))?;
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

    /// Removes a build's files, or leaves that to the last lease on them.
    fn retire(&self, template: TemplateId, build: BuildId) {
        let known = self.state().leases.remove(&build);
        let lease = known.unwrap_or_else(|| self.lease(template, build));
        lease.0.doomed.store(true, Ordering::Release);
    }

    fn lease(&self, template: TemplateId, build: BuildId) -> RootfsLease {
        let path = self.build_dir(template, build);
        RootfsLease(Arc::new(BuildDir { path, doomed: AtomicBool::new(false) }))
    }

    /// Cancels running builds and waits for them.
    pub async fn close(&self, patience: Duration) -> Result<(), StillRunning> {
        self.inner.scope.close(patience).await
    }

    async fn save(&self, record: TemplateRecord) -> Result<(), StoreError> {
        self.inner.rows.put(record.id.to_string(), record.clone()).await?;
        self.state().records.insert(record.id, record);
        Ok(())
    }

    /// Map operations only happen under it, so the maps are valid after any panic.
    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn build_dir(&self, template: TemplateId, build: BuildId) -> PathBuf {
        self.inner.parts.dir.join(template.to_string()).join(build.to_string())
    }

    fn rootfs(&self, template: TemplateId, build: BuildId) -> PathBuf {
        self.build_dir(template, build).join("rootfs.ext4")
    }
}

/// By id, else by name. Of two records with one name, which only a store from elsewhere can hold, the one that sandboxes
/// can start from.
fn find<'a>(records: &'a HashMap<TemplateId, TemplateRecord>, reference: &str) -> Option<&'a TemplateRecord> {
    let by_id = reference.parse().ok().and_then(|id: TemplateId| records.get(&id));
    let named = || records.values().filter(|record| record.name == reference);
    by_id.or_else(|| named().max_by_key(|record| (record.ready().is_some(), std::cmp::Reverse(record.id))))
}

fn check_name(name: &str) -> Result<(), NameProblem> {
    if name.is_empty() || name.len() > NAME_LIMIT {
        return Err(NameProblem::Length);
    }
    match name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_') {
        true => Ok(()),
        false => Err(NameProblem::Characters(name.to_owned())),
    }
}

/// Marks builds that were at work when their server ended. True if there were any.
fn fail_unfinished(record: &mut TemplateRecord) -> bool {
    let mut changed = false;
    for build in &mut record.builds {
        if build.state == BuildState::Building {
            let message = "the server was restarted during the build; start it again".to_owned();
            let timestamp = Timestamp::now();
            build.logs.push(LogEntry { timestamp, level: LogLevel::Error, message: message.clone() });
            build.state = BuildState::Error { message, step: FailedAt::Base };
            build.updated_at = timestamp;
            changed = true;
        }
    }
    changed
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
                let ready = record.ready().map(|build| build.id.to_string());
                for (path, name) in names(&path) {
                    if Some(&name) != ready.as_ref() {
                        remove_dir(&path);
                    }
                }
            }
        }
    }
}

/// A directory that will not go is garbage for the next sweep, not a failure of the caller.
fn remove_dir(path: &Path) {
    if let Err(error) = aenv_durable::remove_dir_if_present(path) {
        warn!(path = %path.display(), %error, "could not remove a template directory");
    }
}
