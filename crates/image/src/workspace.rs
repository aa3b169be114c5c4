//! The temporary directory of one import.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_model::Bytes;
use tempfile::TempDir;

use crate::error::ImportError;

const PREFIX: &str = "import-";

/// A directory that goes when its last holder does: a cancelled import's blocking work may outlive its future.
#[derive(Debug, Clone)]
pub(crate) struct Workspace(Arc<TempDir>);

impl Workspace {
    /// Makes a fresh one in `work_dir`, which is made if need be.
    pub(crate) fn create(work_dir: &Path) -> Result<Self, ImportError> {
        std::fs::create_dir_all(work_dir).map_err(|source| ImportError::io("create", work_dir, source))?;
        let dir = tempfile::Builder::new()
            .prefix(PREFIX)
            .tempdir_in(work_dir)
            .map_err(|source| ImportError::io("create a directory in", work_dir, source))?;
        Ok(Self(Arc::new(dir)))
    }

    /// The path of `name` in it.
    pub(crate) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Removes it, unless blocking work still holds it: then that removes it at its end. Blocking.
    pub(crate) fn close(self) {
        let path = self.path().to_owned();
        if let Some(dir) = Arc::into_inner(self.0)
            && let Err(error) = dir.close()
        {
            tracing::warn!(path = %path.display(), %error, "could not remove an import's directory");
        }
    }
}

/// Removes what imports of a process that was killed left in `work_dir`, and says what.
pub(crate) fn sweep(work_dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(work_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut removed = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX) && entry.file_type()?.is_dir() {
            std::fs::remove_dir_all(entry.path())?;
            removed.push(entry.path());
        }
    }
    Ok(removed)
}

/// What is free on the file system of `path`, for a process like this one.
pub(crate) fn free_space(path: &Path) -> io::Result<Bytes> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(Bytes(stat.f_bavail.saturating_mul(stat.f_frsize)))
}
