//! Directories for work that is under way. Each is locked by whoever works in it; without a lock, it is garbage.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::lock::{self, Held};
use super::{CacheError, ImageCache};

/// The file that is locked.
const LOCK: &str = ".lock";
/// How long a lock may outlive its holder: one that was killed while it started another program leaves its locks to the
/// process that was to become that program, until it has.
const INHERITED: Duration = Duration::from_millis(500);
/// Between two looks at such a lock.
const PAUSE: Duration = Duration::from_millis(10);

/// A directory that goes when its last holder does: a cancelled import's blocking work may outlive its future.
#[derive(Debug, Clone)]
pub(crate) struct Staging(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    // In this order: the lock goes last.
    dir: TempDir,
    _lock: Held,
}

impl Staging {
    /// A fresh one, whose name begins with `prefix`. Blocking.
    pub(super) fn create(cache: &ImageCache, prefix: &str) -> Result<Self, CacheError> {
        let parent = cache.layout.staging();
        // Nobody sweeps before it is locked.
        let _shared = cache.share()?;
        let dir = tempfile::Builder::new().prefix(prefix).tempdir_in(&parent);
        let dir = dir.map_err(|source| CacheError::io("create a directory in", &parent, source))?;
        let path = dir.path().join(LOCK);
        let lock = std::fs::File::create_new(&path).and_then(Held::of_own);
        let lock = lock.map_err(|source| CacheError::io("lock", &path, source))?;
        Ok(Self(Arc::new(Inner { dir, _lock: lock })))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.dir.path()
    }

    /// The path of `name` in it.
    pub(crate) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path().join(name)
    }

    /// Its own name, which no other has at the same time.
    pub(crate) fn name(&self) -> String {
        self.path().file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

impl ImageCache {
    /// A directory for work that is under way. Blocking.
    pub(crate) fn staging(&self, prefix: &str) -> Result<Staging, CacheError> {
        Staging::create(self, prefix)
    }

    /// The directory for work that `path` is in, if it is in one.
    pub(crate) fn staging_of(&self, path: &Path) -> Option<PathBuf> {
        let staging = self.layout.staging();
        let name = path.strip_prefix(&staging).ok()?.components().next()?;
        Some(staging.join(name))
    }

    /// Directories whose holder is gone. Blocking: waits a moment for those that seem to be in use.
    pub(crate) fn abandoned(&self) -> Result<Vec<Abandoned>, CacheError> {
        let path = self.layout.gc_lock();
        let mut found: Vec<Abandoned> = Vec::new();
        let deadline = Instant::now() + INHERITED;
        loop {
            let now = {
                let _alone = Held::exclusive(&path).map_err(|source| CacheError::io("lock", &path, source))?;
                self.abandoned_staging()?
            };
            // Those without a lock are found again each time.
            let new: Vec<_> = now.into_iter().filter(|dir| found.iter().all(|known| known.path != dir.path)).collect();
            found.extend(new);
            let in_use = super::files(&self.layout.staging())?.len() > found.len();
            if !in_use || Instant::now() >= deadline {
                return Ok(found);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Directories whose holder is gone. To be called by whoever has the whole lock.
    pub(super) fn abandoned_staging(&self) -> Result<Vec<Abandoned>, CacheError> {
        let mut found = Vec::new();
        for path in super::files(&self.layout.staging())? {
            let lock = path.join(LOCK);
            let looked = lock.try_exists().and_then(|there| Ok((there, lock::abandoned(&lock)?)));
            match looked.map_err(|source| CacheError::io("look at", &lock, source))? {
                (true, None) => {} // somebody works there
                // Without a lock: one whose removal was interrupted.
                (_, held) => found.push(Abandoned { path, _held: held }),
            }
        }
        Ok(found)
    }
}

/// A directory whose holder is gone. It stays as it is, and nobody else finds it, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Abandoned {
    path: PathBuf,
    _held: Option<Held>,
}

impl Abandoned {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it; whether it was there. Blocking.
    pub(crate) fn remove(self) -> bool {
        match std::fs::remove_dir_all(&self.path) {
            Ok(()) => true,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(path = %self.path.display(), %error, "could not remove what a process left");
                }
                false
            }
        }
    }
}
