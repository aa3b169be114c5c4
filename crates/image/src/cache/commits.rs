//! Converted layers, by their content.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use aenv_model::Bytes;

use super::layout::COMMIT;
use super::lease::Operation;
use super::staging::Staging;
use super::{CacheError, ImageCache};
use crate::digest::Digest;

/// A layer of the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Commit {
    pub(crate) digest: Digest,
    pub(crate) size: Bytes,
}

impl ImageCache {
    /// The file of a layer, whether or not it is there.
    pub(crate) fn commit_path(&self, digest: &Digest) -> PathBuf {
        self.layout.commit(digest)
    }

    /// The directory of a layer's file, whether or not it is there.
    pub(crate) fn commit_dir(&self, digest: &Digest) -> PathBuf {
        self.layout.commit_dir(digest)
    }

    /// Whether a layer is there and `size` bytes long.
    pub(super) fn has_commit(&self, digest: &Digest, size: Bytes) -> bool {
        matches!(self.commit_meta(digest), Ok(Some((found, _))) if found == size)
    }

    /// Whether a layer is there.
    pub(super) fn is_there(&self, digest: &Digest) -> bool {
        matches!(self.commit_meta(digest), Ok(Some(_)))
    }

    /// Length of a layer's file, and when it was last used. `None` for anything but a file in a directory of its own: a link
    /// may lead anywhere.
    pub(super) fn commit_meta(&self, digest: &Digest) -> io::Result<Option<(Bytes, SystemTime)>> {
        let is_dir = |path: &Path| fs::symlink_metadata(path).map(|meta| meta.is_dir());
        let found = is_dir(&self.layout.commit_dir(digest))
            .and_then(|is_dir| Ok((is_dir, fs::symlink_metadata(self.layout.commit(digest))?)));
        match found {
            Ok((true, meta)) if meta.is_file() => Ok(Some((Bytes(meta.len()), meta.modified()?))),
            Ok(_) => Ok(None),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Puts the finished layer `file` of `staging` in its place, kept by `operation`. Its bytes are durable already; on
    /// return, its name is too. If the layer is there already, that one stays. Blocking.
    pub(crate) fn publish(
        &self,
        file: &Path,
        commit: &Commit,
        staging: &Staging,
        operation: &mut Operation,
    ) -> Result<(), CacheError> {
        let (dir, to) = (self.layout.commit_dir(&commit.digest), self.layout.commit(&commit.digest));
        let io = |source| CacheError::io("put a layer to", &to, source);
        let _shared = self.share()?;
        operation.extend(&commit.digest)?;
        if self.has_commit(&commit.digest, commit.size) {
            touch(&to).map_err(io)?;
            return fs::remove_file(file).map_err(io);
        }
        // The directory appears with the file in it.
        let fresh = tempfile::Builder::new().prefix("commit-").tempdir_in(staging.path()).map_err(io)?;
        set_mode(fresh.path(), 0o755).map_err(io)?;
        fs::rename(file, fresh.path().join(COMMIT)).map_err(io)?;
        aenv_durable::sync_dir(fresh.path()).map_err(io)?;
        match fs::rename(fresh.path(), &dir) {
            Ok(()) => drop(fresh.keep()),
            // Something else is there that is not this layer: a part of it, or a foreign file.
            Err(error) if matches!(error.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists) => {
                fs::rename(fresh.path().join(COMMIT), &to).map_err(io)?;
                aenv_durable::sync_dir(&dir).map_err(io)?;
            }
            Err(error) => return Err(io(error)),
        }
        aenv_durable::sync_dir(&self.layout.commits()).map_err(io)
    }

    /// Notes that a layer is in use. Blocking.
    pub(super) fn touch_commit(&self, digest: &Digest) {
        let path = self.layout.commit(digest);
        if let Err(error) = touch(&path) {
            tracing::debug!(path = %path.display(), %error, "could not note the use of a layer");
        }
    }
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
}

/// Sets the time of the last change, which the cache takes for that of the last use.
pub(super) fn touch(path: &Path) -> io::Result<()> {
    fs::File::open(path)?.set_modified(SystemTime::now())
}
