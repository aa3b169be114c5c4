//! Templates and snapshots that nodes share.
//!
//! With a repository, that is where they are: it is asked at every look-up, so that what one node made or deleted, all know
//! at once. Rows of this node are then its own work (builds with their logs) and captures that need not be fetched. What was
//! made before there was a repository stays this node's alone.
//!
//! Captures of others are brought at the first start from them, and kept ready for a while; they go with their last user.
//! If the repository cannot be asked, this node goes on with what it has of its own, and says so where it has nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_image::ImageConfig;
use aenv_model::{BuildId, Bytes, CaptureId, MachineShape, TemplateId};
use aenv_repository::{
    ArtifactCache, BuildStatus, Committed, Content, Context, ErrorReason, FileKind, NewFile, Publication, Record,
    Repository, RepositoryError, RepositoryErrorKind, Resources, Source,
};
use aenv_snapshot::{Capture, CaptureContent, CaptureError, CaptureFileKind};
use tracing::{info, warn};

use crate::build::BuildView;
use crate::record::{
    BuildRecord, BuildStage, BuildState, DEFAULT_TAG, PublicationState, Recipe, SnapshotRecord, TemplateRecord,
};
use crate::templates::{DeleteTemplateError, ReadyTemplate, ResolveError, Templates, split_tag};

/// Captures of other nodes that are kept ready although nobody uses them now.
const MOST_ADOPTED: usize = 32;

/// How long a start waits for the repository before it goes on with what is here. It answers in milliseconds.
const QUICK: Duration = Duration::from_secs(3);

/// How often a record is looked for again that is replaced while it is fetched.
const ATTEMPTS: usize = 3;

/// What nodes share, as one of them has it.
#[derive(Debug, Clone)]
pub struct Shared {
    /// Records, and all that they name.
    pub repository: Repository,
    /// Files of it on this node.
    pub cache: ArtifactCache,
}

/// Captures of other nodes on this one.
#[derive(Debug, Default)]
pub(crate) struct Adopted {
    captures: HashMap<TemplateId, Adoptee>,
    /// Held while one is brought.
    fetching: HashMap<TemplateId, Arc<tokio::sync::Mutex<()>>>,
}

#[derive(Debug)]
struct Adoptee {
    record: Record,
    /// What the record calls it.
    of: CaptureId,
    capture: Capture,
    used: Instant,
}

/// Why something was not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// What there is of it here.
    #[error("read what was captured")]
    Capture(#[from] CaptureError),
    /// The repository.
    #[error("publish it")]
    Repository(#[from] RepositoryError),
}

impl PublishError {
    /// For whoever built it: `store` is where it was to go.
    pub(crate) fn told(&self, store: &str) -> String {
        match self {
            Self::Repository(RepositoryError::Deleted(_)) => "the template was deleted".to_owned(),
            Self::Repository(error) => format!("it could not be published to {store}: {}", error.report()),
            Self::Capture(error) => format!("what was captured could not be published: {error}"),
        }
    }
}

impl Adopted {
    fn get(&mut self, id: TemplateId, of: CaptureId) -> Option<Capture> {
        let found = self.captures.get_mut(&id).filter(|adoptee| adoptee.of == of)?;
        found.used = Instant::now();
        Some(found.capture.clone())
    }

    /// Gives what need not be kept any more, to be dropped outside of the lock.
    fn insert(&mut self, record: Record, of: CaptureId, capture: Capture) -> Vec<Adoptee> {
        let adoptee = Adoptee { of, capture, used: Instant::now(), record };
        let mut gone: Vec<_> = self.captures.insert(adoptee.record.id, adoptee).into_iter().collect();
        while self.captures.len() > MOST_ADOPTED
            && let Some(oldest) = self.captures.iter().min_by_key(|(_, adoptee)| adoptee.used).map(|(id, _)| *id)
        {
            gone.extend(self.captures.remove(&oldest));
        }
        gone
    }

    fn find(&self, reference: &str) -> Option<ReadyTemplate> {
        let by_id = reference.parse().ok().and_then(|id: TemplateId| self.captures.get(&id));
        let named = || self.captures.values().find(|adoptee| adoptee.record.alias.as_deref() == Some(reference));
        by_id.or_else(named).and_then(|adoptee| ready(&adoptee.record, adoptee.capture.clone()))
    }

    fn turn(&mut self, id: TemplateId) -> Arc<tokio::sync::Mutex<()>> {
        self.fetching.retain(|_, turn| Arc::strong_count(turn) > 1);
        Arc::clone(self.fetching.entry(id).or_default())
    }
}

/// There is no such thing, for sure.
pub(crate) fn is_missing(error: &RepositoryError) -> bool {
    error.kind() == RepositoryErrorKind::NotFound
}

impl Templates {
    /// The template or snapshot by id or name, ready for a sandbox. Brings it to this node if need be.
    ///
    /// Cancel safety: if dropped, nothing half-done is left.
    pub async fn resolve(&self, reference: &str) -> Result<ReadyTemplate, ResolveError> {
        let Some(shared) = self.shared() else { return self.resolve_known(reference) };
        let reference = match split_tag(reference) {
            (name, Some(DEFAULT_TAG)) => name,
            (_, Some(_)) => return self.resolve_known(reference), // what nodes share has no other
            (name, None) => name,
        };
        for _ in 0..ATTEMPTS {
            let record = match self.look_up(shared, reference).await {
                Ok(record) => record,
                Err(error) if is_missing(&error) => {
                    self.forget_gone(reference).await?;
                    return self.resolve_known(reference);
                }
                Err(error) => {
                    let known = self.resolve_known(reference).ok();
                    let known = known.or_else(|| self.state().adopted.find(reference));
                    let known = known.ok_or(ResolveError::Repository(error))?;
                    warn!(template_id = %known.id, "the repository cannot be asked: going on with what is here");
                    return Ok(known);
                }
            };
            match self.bring(shared, &record, reference).await {
                // Replaced or deleted meanwhile: look again.
                Err(ResolveError::Repository(RepositoryError::Deleted(_))) => {}
                brought => return brought,
            }
        }
        Err(ResolveError::NotFound(reference.to_owned()))
    }

    /// Asks the repository; not for long, if this node has something to go on with.
    async fn look_up(&self, shared: &Shared, reference: &str) -> Result<Record, RepositoryError> {
        let asked = shared.repository.find(reference);
        if self.resolve_known(reference).is_err() && self.state().adopted.find(reference).is_none() {
            return asked.await;
        }
        tokio::time::timeout(QUICK, asked).await.unwrap_or(Err(RepositoryError::Late { doing: "a look-up" }))
    }

    async fn bring(&self, shared: &Shared, record: &Record, reference: &str) -> Result<ReadyTemplate, ResolveError> {
        let not_ready = || ResolveError::NotReady(reference.to_owned());
        let committed = record.committed.as_ref().ok_or_else(not_ready)?;
        if let Some(here) = self.have(record, committed) {
            return Ok(here);
        }
        let turn = self.state().adopted.turn(record.id);
        let _turn = turn.lock().await;
        if let Some(here) = self.have(record, committed) {
            return Ok(here);
        }
        let begun = Instant::now();
        let fetched = shared.repository.fetch(record, &shared.cache).await?;
        let files = fetched.files.iter().map(|(name, pinned)| (name.clone(), pinned.path().to_owned())).collect();
        let capture = self.inner.parts.captures.adopt(files).await?;
        // It is a copy: it goes with its last user.
        capture.doom();
        let seconds = begun.elapsed().as_secs_f64();
        info!(template_id = %record.id, capture = %committed.capture, seconds, "brought a capture of another node");
        let gone = self.state().adopted.insert(record.clone(), committed.capture, capture.clone());
        drop(gone);
        ready(record, capture).ok_or_else(not_ready)
    }

    /// What sandboxes start from, if it is on this node.
    fn have(&self, record: &Record, committed: &Committed) -> Option<ReadyTemplate> {
        let known = self.resolve_known(&record.id.to_string()).ok();
        let is_it = |known: &ReadyTemplate| known.capture.as_ref().map(Capture::id) == Some(committed.capture);
        known.filter(is_it).or_else(|| {
            let capture = self.state().adopted.get(record.id, committed.capture);
            ready(record, capture?)
        })
    }

    /// Drops what this node has of a shared template or snapshot that is gone.
    pub(crate) async fn forget_gone(&self, reference: &str) -> Result<(), DeleteTemplateError> {
        let known = self.known(reference).filter(|known| known.shared).map(|known| known.id);
        let snapshot = || self.known_snapshot(reference).filter(|known| known.shared).map(|known| known.id);
        let id = known.or_else(snapshot).or_else(|| reference.parse().ok());
        let Some(id) = id else { return Ok(()) };
        if let Some(shared) = self.shared()
            && reference != id.to_string()
        {
            // The name is gone. Is it?
            match shared.repository.find(&id.to_string()).await {
                Err(error) if is_missing(&error) => {}
                _ => return Ok(()),
            }
        }
        self.forget(id).await
    }

    /// Drops what this node has of a shared template or snapshot.
    pub(crate) async fn forget(&self, id: TemplateId) -> Result<(), DeleteTemplateError> {
        let gone = self.state().adopted.captures.remove(&id);
        drop(gone);
        let reference = id.to_string();
        let shared = self.known(&reference).is_some_and(|known| known.shared)
            || self.known_snapshot(&reference).is_some_and(|known| known.shared);
        if !shared {
            return Ok(());
        }
        match self.delete_known(&reference).await {
            Err(DeleteTemplateError::NotFound(_)) => Ok(()),
            deleted => deleted,
        }
    }

    /// Drops what this node has of shared templates and snapshots that are gone.
    pub async fn reconcile(&self) -> Result<(), DeleteTemplateError> {
        let Some(shared) = self.shared() else { return Ok(()) };
        // Before the list: what is made meanwhile is in neither.
        let templates = self.known_all().into_iter().filter(|known| known.shared).map(|known| known.id);
        let snapshots = self.known_snapshots().into_iter().filter(|known| known.shared).map(|known| known.id);
        let known: Vec<_> = templates.chain(snapshots).collect();
        let listing = shared.repository.list().await?;
        if !listing.problems.is_empty() {
            return Ok(()); // one of those may be it
        }
        for id in known {
            if !listing.records.iter().any(|record| record.id == id) {
                info!(template_id = %id, "a template or snapshot was deleted by another node");
                self.forget(id).await?;
            }
        }
        Ok(())
    }

    /// The template by id or name; by a name with a tag, if it has that.
    pub async fn find(&self, reference: &str) -> Result<Option<TemplateRecord>, RepositoryError> {
        let (name, tag) = split_tag(reference);
        let found = self.find_untagged(name).await?;
        Ok(found.filter(|record| tag.is_none_or(|tag| record.tags.contains_key(tag))))
    }

    async fn find_untagged(&self, reference: &str) -> Result<Option<TemplateRecord>, RepositoryError> {
        let Some(shared) = self.shared() else { return Ok(self.known(reference)) };
        match shared.repository.find(reference).await {
            Ok(record) => Ok(self.template(&record)),
            Err(error) if is_missing(&error) => Ok(self.known(reference).filter(|known| !known.shared)),
            Err(error) => self.known(reference).map(Some).ok_or(error),
        }
    }

    /// Every template, in no particular order.
    pub async fn list(&self) -> Result<Vec<TemplateRecord>, RepositoryError> {
        let mut all = self.known_all();
        let Some(shared) = self.shared() else { return Ok(all) };
        all.retain(|known| !known.shared);
        all.extend(listed(shared).await?.iter().filter_map(|record| self.template(record)));
        Ok(all)
    }

    /// A build with the log entries from `offset` on, at most `limit`, at least `level`. One that another node does has none.
    pub async fn build(
        &self,
        template: &str,
        build: &str,
        offset: usize,
        limit: usize,
        level: crate::LogLevel,
    ) -> Result<Option<BuildView>, RepositoryError> {
        let known = self.known_build(template, build, offset, limit, level);
        // One that waits may be at work elsewhere.
        if self.shared().is_none() || known.as_ref().is_some_and(|known| known.build.state != BuildState::Waiting) {
            return Ok(known);
        }
        let found = self.find(template).await?;
        let found = found.and_then(|record| record.build(build.parse().ok()?).cloned());
        Ok(found.map(|build| BuildView { build: BuildRecord { logs: Vec::new(), ..build } }))
    }

    /// Every snapshot, in no particular order.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotRecord>, RepositoryError> {
        let mut all = self.known_snapshots();
        let Some(shared) = self.shared() else { return Ok(all) };
        let published: Vec<_> = listed(shared).await?.iter().filter_map(snapshot).collect();
        // One that has just been published may still be known as this node's own.
        all.retain(|known| !known.shared && !published.iter().any(|published| published.id == known.id));
        all.extend(published);
        Ok(all)
    }

    /// The snapshot by id or name.
    pub async fn snapshot(&self, reference: &str) -> Result<Option<SnapshotRecord>, RepositoryError> {
        let Some(shared) = self.shared() else { return Ok(self.known_snapshot(reference)) };
        match shared.repository.find(reference).await {
            Ok(record) => Ok(snapshot(&record)),
            Err(error) if is_missing(&error) => Ok(self.known_snapshot(reference).filter(|known| !known.shared)),
            Err(error) => self.known_snapshot(reference).map(Some).ok_or(error),
        }
    }

    /// Deletes a template or snapshot by id or name, for all nodes: its running builds here are cancelled and awaited, its
    /// files removed (those that a sandbox is being made from, when that is done).
    ///
    /// Cancel safety: if dropped, it is deleted all the same.
    pub async fn delete(&self, reference: &str) -> Result<(), DeleteTemplateError> {
        let (templates, reference) = (self.clone(), reference.to_owned());
        let delete = async move { templates.delete_everywhere(&reference).await };
        self.detached(delete).await.unwrap_or(Err(aenv_durable::StoreError::Closed.into()))
    }

    async fn delete_everywhere(&self, reference: &str) -> Result<(), DeleteTemplateError> {
        let Some(shared) = self.shared() else { return self.delete_known(reference).await };
        let deleted = async {
            let record = shared.repository.find(reference).await?;
            shared.repository.delete(record.id).await
        };
        match deleted.await {
            Ok(record) => self.forget(record.id).await,
            Err(error) if is_missing(&error) => {
                self.forget_gone(reference).await?;
                self.delete_known(reference).await
            }
            Err(error) => {
                let own = self.known(reference).is_some_and(|known| !known.shared)
                    || self.known_snapshot(reference).is_some_and(|known| !known.shared);
                if own { self.delete_known(reference).await } else { Err(error.into()) }
            }
        }
    }

    /// Publishes the capture of a build.
    pub(crate) async fn publish_build(
        &self,
        template: TemplateId,
        build: BuildId,
        capture: &Capture,
        config: &ImageConfig,
        recipe: Option<&Recipe>,
    ) -> Result<(), PublishError> {
        let Some(shared) = self.shared() else { return Ok(()) };
        let mut publication = publication(capture, config).await?;
        publication.context.recipe = recipe.map(|recipe| aenv_repository::Recipe {
            env_vars: recipe.env.iter().map(|(name, value)| format!("{name}={value}")).collect(),
            start_cmd: recipe.start.clone(),
            ready_cmd: recipe.ready.clone(),
        });
        shared.repository.publish_build(template, build, publication).await?;
        Ok(())
    }

    /// Publishes a snapshot. Gives it as all nodes see it.
    pub(crate) async fn publish_snapshot(
        &self,
        shared: &Shared,
        own: &SnapshotRecord,
        capture: &Capture,
    ) -> Result<SnapshotRecord, PublishError> {
        let publication = publication(capture, &own.config).await?;
        let (repository, name) = (&shared.repository, own.name.clone());
        let record = repository.publish_snapshot(own.id, name, own.sandbox, publication).await?;
        let publication = PublicationState::Ready;
        Ok(SnapshotRecord { created_at: record.created_at, shared: true, publication, ..own.clone() })
    }

    /// Tells other nodes that a build failed.
    pub(crate) async fn tell_failure(&self, template: TemplateId, build: BuildId, state: &BuildState) {
        let (Some(shared), BuildState::Error { message, step }) = (self.shared(), state) else { return };
        let reason = ErrorReason { message: message.clone(), step: step.name() };
        match shared.repository.fail(template, build, reason).await {
            Err(error) if !is_missing(&error) => {
                warn!(template_id = %template, build_id = %build, %error, "other nodes are not told that a build failed");
            }
            _ => {}
        }
    }

    /// What this node shows of a shared template: what all see, with what only this one knows.
    fn template(&self, record: &Record) -> Option<TemplateRecord> {
        let mut seen = template(record)?;
        if let Some(known) = self.known(&record.id.to_string()) {
            for build in known.builds {
                match seen.builds.iter_mut().find(|seen| seen.id == build.id) {
                    Some(seen) if build.state == BuildState::Waiting => seen.logs = build.logs,
                    Some(seen) => *seen = build,
                    None if build.is_ready() => {} // replaced by another node's
                    None => seen.builds.push(build),
                }
            }
            seen.builds.sort_by_key(|build| (build.created_at, build.id));
            seen.tags.clear();
            seen.tag_if_untagged();
        }
        Some(seen)
    }

    pub(crate) fn shared(&self) -> Option<&Shared> {
        self.inner.parts.shared.as_ref()
    }
}

/// Everything in the repository that is understood.
async fn listed(shared: &Shared) -> Result<Vec<Record>, RepositoryError> {
    let listing = shared.repository.list().await?;
    for problem in &listing.problems {
        warn!(key = problem.key, problem = problem.problem, "a record of the repository cannot be used; it is kept");
    }
    Ok(listing.records)
}

async fn publication(capture: &Capture, config: &ImageConfig) -> Result<Publication, PublishError> {
    let files = capture.files().await?.into_iter().map(|file| NewFile {
        name: file.name,
        content: match file.content {
            CaptureContent::File(path) => Content::File(path),
            CaptureContent::Text(text) => Content::Bytes(text.into()),
        },
        kind: match file.kind {
            CaptureFileKind::Own => FileKind::Own,
            CaptureFileKind::Common => FileKind::Common,
            CaptureFileKind::Layer => FileKind::Layer,
        },
    });
    let manifest = capture.manifest();
    Ok(Publication {
        resources: Resources::new(manifest.shape, manifest.disk_size),
        context: context(config),
        capture: capture.id(),
        files: files.collect(),
    })
}

fn context(config: &ImageConfig) -> Context {
    let ImageConfig { env, working_dir, user, entrypoint, cmd, labels, exposed_ports } = config.clone();
    Context { env_vars: env, workdir: working_dir, user, exposed_ports, entrypoint, cmd, labels, recipe: None }
}

fn recipe(context: &Context) -> Option<Recipe> {
    let aenv_repository::Recipe { env_vars, start_cmd, ready_cmd } = context.recipe.clone()?;
    let pair = |pair: &String| pair.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    Some(Recipe { env: env_vars.iter().filter_map(pair).collect(), start: start_cmd, ready: ready_cmd })
}

fn image_config(context: &Context) -> ImageConfig {
    let Context { env_vars, workdir, user, exposed_ports, entrypoint, cmd, labels, recipe: _ } = context.clone();
    ImageConfig { env: env_vars, working_dir: workdir, user, entrypoint, cmd, labels, exposed_ports }
}

/// What sandboxes start from, out of a capture that is here.
fn ready(record: &Record, capture: Capture) -> Option<ReadyTemplate> {
    let committed = record.committed.as_ref()?;
    Some(ReadyTemplate {
        id: record.id,
        name: record.alias.clone(),
        shape: capture.manifest().shape,
        capture: Some(capture),
        image: None,
        config: image_config(&committed.context),
        recipe: recipe(&committed.context),
    })
}

/// A record as the template that it is.
pub(crate) fn template(record: &Record) -> Option<TemplateRecord> {
    let Source::Template { build } = &record.source else { return None };
    let ready = |committed: &Committed| BuildState::Ready {
        image: String::new(),
        digest: String::new(),
        config: image_config(&committed.context),
        disk_size: Bytes::mib(record.resources.disk_size_mib),
        capture: Some(committed.capture),
        recipe: recipe(&committed.context),
    };
    let build_record = |id, created_at, updated_at, shape: MachineShape, state| BuildRecord {
        id,
        created_at,
        updated_at,
        shape,
        state,
        logs: Vec::new(),
        tags: vec![DEFAULT_TAG.to_owned()],
    };
    let mut builds = Vec::new();
    let of_newest = |committed: &&Committed| committed.build == Some(build.id);
    let committed = record.committed.as_ref();
    if let Some(older) = committed.filter(|committed| !of_newest(committed)) {
        let id = older.build.unwrap_or_else(|| record.id.into());
        let shape = record.resources.shape();
        builds.push(build_record(id, record.created_at, record.updated_at, shape, ready(older)));
    }
    let state = match (build.status, committed.filter(of_newest)) {
        (_, Some(committed)) => ready(committed),
        (BuildStatus::Waiting, None) => BuildState::Waiting,
        (BuildStatus::Building | BuildStatus::Ready, None) => BuildState::Building,
        (BuildStatus::Error, None) => {
            let reason = build.error_reason.clone();
            let reason = reason.unwrap_or(ErrorReason { message: "unknown".to_owned(), step: String::new() });
            BuildState::Error { message: reason.message, step: BuildStage::named(&reason.step) }
        }
    };
    let updated_at = build.finished_at.or(build.started_at).unwrap_or(build.created_at);
    builds.push(build_record(build.id, build.created_at, updated_at, build.resources.shape(), state));
    let mut seen = TemplateRecord {
        id: record.id,
        name: record.alias.clone().unwrap_or_default(),
        created_at: record.created_at,
        updated_at: record.updated_at,
        builds,
        tags: BTreeMap::new(),
        public: false,
        shared: true,
    };
    seen.tag_if_untagged();
    Some(seen)
}

/// A record as the snapshot that it is.
fn snapshot(record: &Record) -> Option<SnapshotRecord> {
    let Source::Sandbox { source_sandbox_id } = &record.source else { return None };
    let committed = record.committed.as_ref()?;
    Some(SnapshotRecord {
        id: record.id,
        name: record.alias.clone(),
        sandbox: *source_sandbox_id,
        created_at: record.created_at,
        shape: record.resources.shape(),
        disk_size: Bytes::mib(record.resources.disk_size_mib),
        config: image_config(&committed.context),
        capture: committed.capture,
        shared: true,
        memory: committed.files.iter().any(|file| file.name == aenv_snapshot::STATE_FILE),
        publication: PublicationState::Ready,
    })
}
