//! Snapshots of sandboxes: from outside, templates that nobody built.

use std::collections::HashMap;

use aenv_durable::{Row, Store, StoreError, Table, crash_point};
use aenv_image::ImageConfig;
use aenv_model::{Bytes, MachineShape, SandboxId, TemplateId};
use aenv_repository::RepositoryError;
use aenv_snapshot::{Capture, CaptureStore};
use jiff::Timestamp;
use tracing::{error, warn};

use crate::record::{PublicationState, SnapshotRecord};
use crate::shared::{PublishError, is_missing};
use crate::templates::{DeleteTemplateError, NameProblem, ReadyTemplate, SNAPSHOT_VERSION, Templates, check_name};

/// A snapshot, and what keeps it.
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    pub(crate) record: SnapshotRecord,
    capture: Capture,
}

impl Kept {
    pub(crate) fn ready(&self) -> ReadyTemplate {
        ReadyTemplate {
            id: self.record.id,
            name: self.record.name.clone(),
            capture: Some(self.capture.clone()),
            image: None,
            shape: self.record.shape,
            config: self.record.config.clone(),
            recipe: None,
        }
    }
}

/// A snapshot to be.
#[derive(Debug, Clone)]
pub struct NewSnapshot {
    /// The sandbox it was taken of.
    pub sandbox: SandboxId,
    /// Its name, if it is to have one.
    pub name: Option<String>,
    /// What processes get that name nothing else.
    pub config: ImageConfig,
}

impl NewSnapshot {
    fn record(self, capture: &Capture, publication: PublicationState) -> SnapshotRecord {
        let Self { sandbox, name, config } = self;
        let manifest = capture.manifest();
        let (created_at, shape, disk_size): (Timestamp, MachineShape, Bytes) =
            (manifest.captured_at, manifest.shape, manifest.disk_size);
        SnapshotRecord {
            id: TemplateId::new(),
            name,
            sandbox,
            created_at,
            shape,
            disk_size,
            config,
            capture: capture.id(),
            shared: false,
            memory: manifest.machine.is_some(),
            publication,
        }
    }
}

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum AddSnapshotError {
    /// The name.
    #[error(transparent)]
    Name(#[from] NameProblem),
    /// A template or another snapshot has it.
    #[error("the name '{0}' is taken")]
    Taken(String),
    /// The node store.
    #[error("record the snapshot")]
    Store(#[from] StoreError),
    /// What nodes share.
    #[error("publish the snapshot to other nodes")]
    Publish(#[from] PublishError),
}

pub(crate) fn snapshot_rows(store: &Store) -> Table<SnapshotRecord> {
    store.table("snapshots", SNAPSHOT_VERSION)
}

/// All snapshots whose captures are there. One that is not there hides no other.
pub(crate) async fn load(
    rows: &Table<SnapshotRecord>,
    captures: &CaptureStore,
) -> Result<HashMap<TemplateId, Kept>, StoreError> {
    let mut snapshots = HashMap::new();
    for (key, row) in rows.list_blocking()? {
        match row {
            Row::Known(record) => match captures.find(record.capture).await {
                Ok(capture) => {
                    // Records of older versions do not say so.
                    let record = SnapshotRecord { memory: capture.manifest().machine.is_some(), ..record };
                    snapshots.insert(record.id, Kept { record, capture });
                }
                Err(problem) => error!(snapshot_id = key, %problem, "a snapshot cannot be used; its record is kept"),
            },
            Row::Unknown(why) => {
                warn!(snapshot_id = key, why, "kept a snapshot record that this version does not understand");
            }
        }
    }
    Ok(snapshots)
}

/// By id, else by name.
pub(crate) fn find<'a>(snapshots: &'a HashMap<TemplateId, Kept>, reference: &str) -> Option<&'a Kept> {
    let by_id = reference.parse().ok().and_then(|id: TemplateId| snapshots.get(&id));
    by_id.or_else(|| snapshots.values().find(|kept| kept.record.name.as_deref() == Some(reference)))
}

/// What a publication came to that had no success: for the user, and for the log.
fn failed(error: &PublishError) -> (PublicationState, String) {
    let (reason, report) = match error {
        PublishError::Repository(RepositoryError::Taken { alias }) => {
            let reason = format!("the name '{alias}' is taken");
            (reason.clone(), reason)
        }
        PublishError::Repository(error) => {
            ("what nodes share could not be written; it stays on this node".to_owned(), error.report())
        }
        PublishError::Capture(error) => ("what was captured could not be read".to_owned(), error.to_string()),
    };
    (PublicationState::Failed { reason }, report)
}

impl Templates {
    /// Can a snapshot have this name now? Asked before a sandbox is stopped for it.
    pub async fn check_snapshot_name(&self, name: &str) -> Result<(), AddSnapshotError> {
        check_name(name)?;
        let taken = || Err(AddSnapshotError::Taken(name.to_owned()));
        let Some(shared) = self.shared() else {
            let free = self.known(name).is_none() && self.known_snapshot(name).is_none();
            return if free { Ok(()) } else { taken() };
        };
        let own = self.known(name).is_some_and(|known| !known.shared)
            || self.known_snapshot(name).is_some_and(|known| !known.shared);
        match shared.repository.find(name).await {
            _ if own => taken(),
            Ok(_) => taken(),
            Err(error) if is_missing(&error) => Ok(()),
            Err(error) => Err(PublishError::from(error).into()),
        }
    }

    /// Keeps a capture as a snapshot, on return for all nodes. On an error it is doomed.
    ///
    /// Cancel safety: if dropped, it is kept all the same.
    pub async fn add_snapshot(
        &self,
        snapshot: NewSnapshot,
        capture: Capture,
    ) -> Result<SnapshotRecord, AddSnapshotError> {
        self.add(snapshot, capture, true).await
    }

    /// Keeps a capture as a snapshot of this node, and gives it to other nodes after that: its record says how far that is.
    /// On an error it is doomed.
    ///
    /// Cancel safety: if dropped, it is kept all the same.
    pub async fn add_snapshot_soon(
        &self,
        snapshot: NewSnapshot,
        capture: Capture,
    ) -> Result<SnapshotRecord, AddSnapshotError> {
        self.add(snapshot, capture, false).await
    }

    async fn add(
        &self,
        snapshot: NewSnapshot,
        capture: Capture,
        published: bool,
    ) -> Result<SnapshotRecord, AddSnapshotError> {
        let templates = self.clone();
        let add = async move {
            let added = match templates.shared().is_some() && !published {
                false => templates.add_now(snapshot.record(&capture, PublicationState::Ready), &capture).await,
                true => templates.keep_now(snapshot.record(&capture, PublicationState::Publishing), &capture).await,
            };
            if added.is_err() {
                capture.doom();
            }
            added
        };
        self.detached(add).await.unwrap_or(Err(StoreError::Closed.into()))
    }

    async fn add_now(&self, record: SnapshotRecord, capture: &Capture) -> Result<SnapshotRecord, AddSnapshotError> {
        let id = record.id;
        let Some(shared) = self.shared() else {
            let _writer = self.inner.writer.lock().await;
            if let Some(name) = &record.name {
                self.check_snapshot_name(name).await?;
            }
            self.keep(&record, capture).await?;
            return Ok(record);
        };
        if let Some(name) = &record.name {
            self.check_snapshot_name(name).await?;
        }
        // First for all nodes, then for this one: another may be asked for it next.
        let published = self.publish_snapshot(shared, &record, capture).await;
        let record = published.map_err(|error| match error {
            PublishError::Repository(RepositoryError::Taken { alias }) => AddSnapshotError::Taken(alias),
            error => error.into(),
        })?;
        let _writer = self.inner.writer.lock().await;
        if let Err(problem) = self.keep(&record, capture).await {
            warn!(snapshot_id = %id, %problem, "a snapshot is there for all nodes, and its copy here is not kept");
        }
        Ok(record)
    }

    /// Keeps a snapshot here, and begins to publish it.
    async fn keep_now(&self, record: SnapshotRecord, capture: &Capture) -> Result<SnapshotRecord, AddSnapshotError> {
        if let Some(name) = &record.name {
            self.check_snapshot_name(name).await?;
        }
        let _writer = self.inner.writer.lock().await;
        // Once more among this node's own: that does not wait for the repository.
        if let Some(name) = &record.name
            && (self.known(name).is_some_and(|known| !known.shared) || self.known_snapshot(name).is_some())
        {
            return Err(AddSnapshotError::Taken(name.clone()));
        }
        self.keep(&record, capture).await?;
        self.publish_later(record.id);
        Ok(record)
    }

    /// Publishes those that a former server did not finish.
    pub(crate) fn publish_unfinished(&self) {
        let unfinished = |record: &SnapshotRecord| record.publication == PublicationState::Publishing;
        for record in self.known_snapshots().into_iter().filter(unfinished) {
            self.publish_later(record.id);
        }
    }

    fn publish_later(&self, id: TemplateId) {
        let templates = self.clone();
        let publish = async move { Box::pin(templates.publish_kept(id)).await };
        self.scope().spawn(format!("publish snapshot {id}"), publish);
    }

    async fn publish_kept(&self, id: TemplateId) {
        let kept = self.state().snapshots.get(&id).cloned();
        let Some(Kept { record, capture }) = kept else { return }; // deleted before it was begun
        let ready = |shared| SnapshotRecord { publication: PublicationState::Ready, shared, ..record.clone() };
        let publishing = async {
            let Some(shared) = self.shared() else { return Ok(ready(false)) }; // there is no repository any more
            match shared.repository.find(&id.to_string()).await {
                // The server ended between its record there and its row here.
                Ok(_) => Ok(ready(true)),
                Err(_) => self.publish_snapshot(shared, &record, &capture).await,
            }
        };
        // Cut short by the node's stop, it is begun again by the next server; what it came to is dealt with in any case.
        let publishing = Box::pin(publishing);
        let Some(published) = self.scope().token().run_until_cancelled(publishing).await else { return };
        crash_point("snapshot.published");
        let _writer = self.inner.writer.lock().await;
        let is_there = self.state().snapshots.contains_key(&id);
        let record = match (published, is_there) {
            (Ok(published), true) => published,
            (Err(error), true) => {
                let (publication, reason) = failed(&error);
                warn!(snapshot_id = %id, reason, "a snapshot stays on this node");
                SnapshotRecord { publication, ..record }
            }
            // Deleted while it was on its way.
            (Ok(SnapshotRecord { shared: true, .. }), false) => {
                if let Some(shared) = self.shared()
                    && let Err(error) = shared.repository.delete(id).await
                {
                    warn!(snapshot_id = %id, error = error.report(), "a deleted snapshot is still there for all nodes");
                }
                return;
            }
            (_, false) => return,
        };
        if let Err(problem) = self.keep(&record, &capture).await {
            warn!(snapshot_id = %id, %problem, "it is not recorded what became of a snapshot's publication");
        }
    }

    /// Keeps a snapshot on this node.
    async fn keep(&self, record: &SnapshotRecord, capture: &Capture) -> Result<(), StoreError> {
        self.inner.snapshot_rows.put(record.id.to_string(), record.clone()).await?;
        crash_point("snapshot.recorded");
        let kept = Kept { record: record.clone(), capture: capture.clone() };
        self.state().snapshots.insert(record.id, kept);
        Ok(())
    }

    /// Every snapshot that this node knows.
    pub(crate) fn known_snapshots(&self) -> Vec<SnapshotRecord> {
        self.state().snapshots.values().map(|kept| kept.record.clone()).collect()
    }

    /// The snapshot by id or name, if this node knows it.
    pub(crate) fn known_snapshot(&self, reference: &str) -> Option<SnapshotRecord> {
        find(&self.state().snapshots, reference).map(|kept| kept.record.clone())
    }

    /// Deletes a snapshot by id or name. False if there is none. Sandboxes that run on it keep what they need of it.
    pub(crate) async fn delete_snapshot(&self, reference: &str) -> Result<bool, DeleteTemplateError> {
        let _writer = self.inner.writer.lock().await;
        let Some(record) = self.known_snapshot(reference) else { return Ok(false) };
        self.inner.snapshot_rows.remove(record.id.to_string()).await?;
        if let Some(kept) = self.state().snapshots.remove(&record.id) {
            kept.capture.doom();
        }
        Ok(true)
    }
}
