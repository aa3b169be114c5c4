//! What an image leaves on this host: a directory with its device's configuration, and layers that are kept for it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::warn;

use crate::seams::ImportImage;

/// Keeps an image's files and layers in place. Those of a build that was replaced or deleted, or of an image that has no
/// template, go with the last lease.
#[derive(Debug, Clone)]
pub struct RootfsLease(Arc<ImageFiles>);

#[derive(Debug)]
struct ImageFiles {
    dir: PathBuf,
    owner: String,
    importer: Arc<dyn ImportImage>,
    doomed: AtomicBool,
}

impl RootfsLease {
    /// Files in `dir`, and the layers that `importer` keeps for `owner`.
    pub(crate) fn new(dir: PathBuf, owner: impl ToString, importer: &Arc<dyn ImportImage>) -> Self {
        let importer = Arc::clone(importer);
        Self(Arc::new(ImageFiles { dir, owner: owner.to_string(), importer, doomed: AtomicBool::new(false) }))
    }

    /// The device's configuration.
    pub(crate) fn rootfs(&self) -> PathBuf {
        rootfs(&self.0.dir)
    }

    /// For whom the layers are kept.
    pub(crate) fn owner(&self) -> &str {
        &self.0.owner
    }

    /// The last lease takes everything with it.
    pub(crate) fn doom(&self) {
        self.0.doomed.store(true, Ordering::Release);
    }
}

impl Drop for ImageFiles {
    fn drop(&mut self) {
        if self.doomed.load(Ordering::Acquire) {
            remove_dir(&self.dir);
            self.importer.release(&self.owner);
        }
    }
}

/// The device's configuration in an image's directory.
pub(crate) fn rootfs(dir: &Path) -> PathBuf {
    dir.join("image.json")
}

/// A directory that will not go is garbage for the next sweep, not a failure of the caller.
pub(crate) fn remove_dir(path: &Path) {
    if let Err(error) = aenv_durable::remove_dir_if_present(path) {
        warn!(path = %path.display(), %error, "could not remove an image's directory");
    }
}
