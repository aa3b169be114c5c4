//! The repository that nodes share, as configured, and its upkeep.

use std::sync::Arc;
use std::time::Duration;

use aenv_model::Bytes;
use aenv_objects::{LocalStore, ObjectStore, S3Store};
use aenv_repository::{ArtifactCache, Clock, Options, Repository, RepositoryError};
use aenv_template::{Shared, Templates};
use anyhow::{Context as _, Result};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::{BackendKind, Config};
use crate::metrics::{MeteredStore, Metrics};

/// What nodes share. `None`: nothing is configured. The store is not asked anything yet: a node whose store is out of reach
/// starts, with what it has of its own. Blocking, for a moment.
pub(crate) fn open(config: &Config, metrics: &Metrics) -> Result<Option<Shared>> {
    let store: Arc<dyn ObjectStore> = match config.snapshot.repository_backend {
        None => return Ok(None),
        Some(BackendKind::PosixFs) => {
            let dir = config.backend.posix_fs.snapshot_store.join("repository");
            let opened = LocalStore::open(&dir);
            Arc::new(opened.with_context(|| format!("open {} (backend.posix_fs.snapshot_store)", dir.display()))?)
        }
        Some(BackendKind::Oss) => Arc::new(S3Store::open(&config.backend.oss.store()).context("[backend.oss]")?),
    };
    let dir = &config.snapshot.local_cache_path;
    // A name that no file of the cache has. What a killed server left there is nobody's.
    let packing_dir = dir.join("packing");
    aenv_durable::remove_dir_if_present(&packing_dir)?;
    let packing = match config.snapshot.repository_backend {
        Some(BackendKind::Oss) => config.snapshot.publish_compression.packing(packing_dir),
        _ => None,
    };
    let cache = ArtifactCache::open(dir, Bytes::gib(config.backend.oss.cache_max_size_gb));
    let cache = cache.with_context(|| format!("open {} (snapshot.local_cache_path)", dir.display()))?;
    info!(repository = store.name(), "templates and snapshots are shared");
    let store = Arc::new(MeteredStore { store, metrics: metrics.clone() });
    let repository = Repository::new(store, Options { packing, ..Options::default() }, Clock::system());
    Ok(Some(Shared { repository, cache }))
}

/// Removes garbage from the repository now and then, and drops what other nodes have deleted. Ends with `stop`.
pub(crate) async fn keep_up(repository: Repository, templates: Templates, every: Duration, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(every)).await.is_some() {
        let swept = stop.run_until_cancelled(repository.sweep()).await;
        match swept {
            None => return,
            Some(Ok(swept)) if swept == Default::default() => {}
            Some(Ok(swept)) => info!(?swept, "removed garbage from the repository"),
            Some(Err(RepositoryError::Busy)) => {} // another node does it
            Some(Err(error)) => warn!(error = error.report(), "garbage stays in the repository"),
        }
        if let Some(Err(error)) = stop.run_until_cancelled(templates.reconcile()).await {
            warn!(%error, "it is not known what other nodes have deleted");
        }
    }
}
