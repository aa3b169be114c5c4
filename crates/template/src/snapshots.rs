//! Snapshots of sandboxes: from outside, templates that nobody built.

use std::collections::HashMap;

use aenv_durable::{Row, Store, StoreError, Table, crash_point};
use aenv_image::ImageConfig;
use aenv_model::{Bytes, MachineShape, SandboxId, TemplateId};
use aenv_repository::RepositoryError;
use aenv_snapshot::{Capture, CaptureStore};
use jiff::Timestamp;
use tracing::{error, warn};

use crate::record::SnapshotRecord;
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
                Ok(capture) => _ = snapshots.insert(record.id, Kept { record, capture }),
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

    /// Keeps a capture of `sandbox` as a snapshot. On an error it is doomed.
    ///
    /// Cancel safety: if dropped, it is kept all the same.
    pub async fn add_snapshot(
        &self,
        sandbox: SandboxId,
        name: Option<String>,
        config: ImageConfig,
        capture: Capture,
    ) -> Result<SnapshotRecord, AddSnapshotError> {
        let templates = self.clone();
        let add = async move {
            let added = templates.add_now(sandbox, name, config, &capture).await;
            if added.is_err() {
                capture.doom();
            }
            added
        };
        self.detached(add).await.unwrap_or(Err(StoreError::Closed.into()))
    }

    async fn add_now(
        &self,
        sandbox: SandboxId,
        name: Option<String>,
        config: ImageConfig,
        capture: &Capture,
    ) -> Result<SnapshotRecord, AddSnapshotError> {
        let manifest = capture.manifest();
        let (created_at, shape, disk_size): (Timestamp, MachineShape, Bytes) =
            (manifest.captured_at, manifest.shape, manifest.disk_size);
        let (id, capture_id) = (TemplateId::new(), capture.id());
        let record = SnapshotRecord {
            id,
            name,
            sandbox,
            created_at,
            shape,
            disk_size,
            config,
            capture: capture_id,
            shared: false,
        };
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
