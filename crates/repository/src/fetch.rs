//! Bringing what a record is made of to this node.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use aenv_objects::{Key, ObjectErrorKind};
use futures::{StreamExt, TryStreamExt, stream};
use sha2::{Digest as _, Sha256};

use crate::cache::{ArtifactCache, CacheError, Pinned};
use crate::digest::Digest;
use crate::error::RepositoryError;
use crate::layout;
use crate::record::{Committed, Record};
use crate::repository::Repository;

/// Bytes of one request.
const PART: u64 = 8 << 20;
/// Requests of one file at a time.
const PARTS_AT_ONCE: usize = 4;
/// Files at a time.
const FILES_AT_ONCE: usize = 4;

/// What a record is made of, on this node for as long as this.
#[derive(Debug)]
pub struct Fetched {
    /// Each file's name, and where it is.
    pub files: Vec<(String, Pinned)>,
}

impl Repository {
    /// Brings what sandboxes start from to this node; what is in the cache is not asked for. Every byte is checked.
    ///
    /// Errors: [`NotFound`](RepositoryError::NotFound) if there is nothing to start from, and
    /// [`Deleted`](RepositoryError::Deleted) if the record, or this version of it, is gone meanwhile: look for it again.
    /// Cancel safety: if dropped, nothing half-done is left.
    pub async fn fetch(&self, record: &Record, cache: &ArtifactCache) -> Result<Fetched, RepositoryError> {
        let missing = || RepositoryError::NotFound(record.id.to_string());
        let committed = record.committed.as_ref().ok_or_else(missing)?;
        let fetched = self.fetch_all(record, committed, cache).await;
        match fetched {
            // Its files may be gone because it is; if not, a record leads to nothing, which should never be.
            Err(error) if is_gone(&error) => match self.existing(record.id).await {
                Ok((now, _)) if now.committed.as_ref().map(|now| now.capture) == Some(committed.capture) => Err(error),
                Ok(_) | Err(RepositoryError::NotFound(_)) => Err(RepositoryError::Deleted(record.id)),
                Err(error) => Err(error),
            },
            fetched => fetched,
        }
    }

    async fn fetch_all(
        &self,
        record: &Record,
        committed: &Committed,
        cache: &ArtifactCache,
    ) -> Result<Fetched, RepositoryError> {
        let (id, capture) = (record.id, committed.capture);
        let files = committed.files.clone().into_iter().map(|file| {
            let (repository, cache) = (self.clone(), cache.clone());
            async move {
                layout::component(&file.name)?;
                let key = layout::file(id, capture, &file)?;
                let size = file.size;
                let bring = |path| async move { repository.bring(&key, size, path).await };
                match cache.get(&file.digest, size, bring).await {
                    Ok(pinned) => Ok((file.name, pinned)),
                    Err(error) => Err(told(error, &file.digest)),
                }
            }
        });
        let files = stream::iter(files).buffered(FILES_AT_ONCE).try_collect().await?;
        Ok(Fetched { files })
    }

    /// Writes an object to a file, and says what it was.
    async fn bring(&self, key: &Key, size: u64, path: PathBuf) -> Result<(Digest, u64), CacheError> {
        let io = |source| CacheError::Io { doing: "write", path: path.clone(), source };
        let mut file = File::options().write(true).open(&path).map_err(io)?;
        let parts = (0..size.div_ceil(PART)).map(|part| part * PART).map(|from| {
            let (repository, key) = (self.clone(), key.clone());
            async move {
                let part = repository.store().get(&key, from..(from + PART).min(size)).await;
                part.map_err(|error| CacheError::Bring(error.into()))
            }
        });
        let mut parts = stream::iter(parts).buffered(PARTS_AT_ONCE);
        let mut hasher = Sha256::new();
        while let Some(part) = parts.try_next().await? {
            let work = move || {
                hasher.update(&part);
                file.write_all(&part).map(|()| (file, hasher))
            };
            let written = tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other).flatten();
            (file, hasher) = written.map_err(io)?;
        }
        Ok((Digest::finish(hasher), size))
    }
}

/// An object is not there.
fn is_gone(error: &RepositoryError) -> bool {
    match error {
        RepositoryError::Store(error) => error.kind() == ObjectErrorKind::NotFound,
        RepositoryError::Shared(shared) => matches!(&**shared, CacheError::Bring(error) if is_gone(error)),
        _ => false,
    }
}

/// What several may have waited for, as each of them is told.
fn told(error: Arc<CacheError>, digest: &Digest) -> RepositoryError {
    match Arc::try_unwrap(error) {
        Ok(CacheError::Bring(error)) => error,
        Ok(CacheError::Io { doing, path, source }) => RepositoryError::File { doing, path, source },
        Ok(error @ CacheError::Other { .. }) => {
            RepositoryError::Corrupt { what: digest.to_string(), problem: error.to_string() }
        }
        Err(shared) => RepositoryError::Shared(shared),
    }
}
