//! The image cache: converted layers by their content, which images they belong to, and who needs them.
//!
//! ```text
//!   commits/ALGORITHM-HEX/overlaybd.commit   layers, by their content
//!   indexes/SOURCE/KEY.json                  which layer of an image, on which chain, became which of those
//!   configs/…-image.json, ….metadata.json    resolved images: what their devices are made of
//!   leases/KIND/OWNER.json                   who needs which layers
//!   locks/KEY                                conversions under way
//!   staging/…                                work under way
//!   gc.lock                                  shared by whoever writes, exclusive for whoever removes
//! ```
//!
//! Any number of processes may use a cache at once, and each may be killed at any moment. Everything is written whole,
//! data before what refers to it: a crash leaves garbage, never a record of something that is not there. Work is locked by
//! `flock`, which ends with its process, so that garbage can be told from work.
//!
//! What keeps a layer: an image that has it, a [lease], or its use a short while ago.

mod collect;
mod commits;
mod config;
mod images;
mod index;
mod layout;
mod lease;
mod lock;
mod plan;
mod staging;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use aenv_block_client::DeviceConfig;

pub use self::collect::{Collected, Usage};
pub(crate) use self::commits::Commit;
pub use self::config::{CacheConfig, GcConfig, WatermarkError};
pub(crate) use self::images::{CachedImage, ImageKey};
pub(crate) use self::index::ConversionKey;
use self::layout::Layout;
pub use self::lease::LeaseKind;
pub(crate) use self::lease::Operation;
use self::lock::Held;
pub(crate) use self::lock::WorkLock;
pub(crate) use self::staging::{Abandoned, Staging};
use crate::digest::Digest;

/// What names of files begin with that are still being written. As `aenv_durable` has it.
const TEMPORARY: &str = ".new-";

/// Why the cache could not do something.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The host failed.
    #[error("{doing} {path} of the image cache", path = path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// Layers were asked for that are not there: import the image again.
    #[error("the image cache no longer has {}", digests.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Gone {
        /// Which.
        digests: Vec<Digest>,
    },
    /// A name that could be another file's.
    #[error("{owner:?} cannot name the owner of a lease")]
    Owner {
        /// The name.
        owner: String,
    },
    /// The settings make no sense.
    #[error(transparent)]
    Watermarks(#[from] WatermarkError),
    /// The runtime is going down.
    #[error("the program is ending")]
    Closed,
}

impl CacheError {
    fn io(doing: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { doing, path: path.to_owned(), source }
    }
}

/// A cache. Cloning shares it.
#[derive(Debug, Clone)]
pub struct ImageCache {
    layout: Arc<Layout>,
    config: Arc<CacheConfig>,
    node: Arc<str>,
}

impl ImageCache {
    /// Opens the cache at `root`, and makes it if need be. `node` is written into leases, so that this node's are told from
    /// those of others that use the same cache. Blocking.
    pub fn open(root: &Path, node: impl Into<String>, config: CacheConfig) -> Result<Self, CacheError> {
        config.gc.check()?;
        let create = |dir: &Path| std::fs::create_dir_all(dir).map_err(|error| CacheError::io("create", dir, error));
        create(root)?;
        // Paths in configurations are absolute, and compared with these.
        let root = root.canonicalize().map_err(|source| CacheError::io("look at", root, source))?;
        let layout = Layout::new(root);
        layout.directories().iter().try_for_each(|dir| create(dir))?;
        Ok(Self { layout: layout.into(), config: config.into(), node: node.into().into() })
    }

    /// Where it is.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.layout.root()
    }

    /// Keeps layers for `owner`, in place of those it had under this kind. Durable on return.
    ///
    /// Errors: [`CacheError::Gone`] if one of them is not there; then nothing has changed.
    /// Cancel safety: if dropped, the lease may or may not be there.
    pub async fn lease(&self, kind: LeaseKind, owner: &str, digests: Vec<Digest>) -> Result<(), CacheError> {
        let owner = owner.to_owned();
        self.blocking(move |cache| cache.lease_blocking(kind, &owner, digests)).await
    }

    /// Keeps what a device needs of this cache for `owner`; see [`Self::lease_device_blocking`].
    ///
    /// Cancel safety: if dropped, the lease may or may not be there.
    pub async fn lease_device(&self, kind: LeaseKind, owner: &str, config: &DeviceConfig) -> Result<(), CacheError> {
        let (owner, config) = (owner.to_owned(), config.clone());
        self.blocking(move |cache| cache.lease_device_blocking(kind, &owner, &config)).await
    }

    /// Ends a lease. One that is not there is success.
    ///
    /// Cancel safety: if dropped, the lease may or may not be there.
    pub async fn release(&self, kind: LeaseKind, owner: &str) -> Result<(), CacheError> {
        let owner = owner.to_owned();
        self.blocking(move |cache| cache.release_blocking(kind, &owner)).await
    }

    /// Ends this node's leases of a kind but for those of `owners`; see [`Self::reconcile_blocking`].
    ///
    /// Cancel safety: if dropped, some may have ended.
    pub async fn reconcile(&self, kind: LeaseKind, owners: BTreeSet<String>) -> Result<Vec<String>, CacheError> {
        self.blocking(move |cache| cache.reconcile_blocking(kind, &owners)).await
    }

    /// Runs one pass of collection; see [`Self::collect_blocking`].
    ///
    /// Cancel safety: if dropped, the pass goes on.
    pub async fn collect(&self, now: SystemTime) -> Result<Collected, CacheError> {
        self.blocking(move |cache| cache.collect_blocking(now)).await
    }

    /// What is in the cache.
    pub async fn usage(&self) -> Result<Usage, CacheError> {
        self.blocking(|cache| cache.usage_blocking()).await
    }

    /// The lock of the conversion `key`, unless somebody has it. Blocking, for a moment.
    pub(crate) fn try_lock(&self, key: &Digest) -> Result<Option<WorkLock>, CacheError> {
        let path = self.layout.locks().join(key.dashed());
        WorkLock::try_acquire(&path).map_err(|source| CacheError::io("lock", &path, source))
    }

    /// A share of the lock that a collection takes whole. Blocking.
    fn share(&self) -> Result<Held, CacheError> {
        let path = self.layout.gc_lock();
        Held::shared(&path).map_err(|source| CacheError::io("lock", &path, source))
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, CacheError> + Send + 'static,
    ) -> Result<T, CacheError> {
        let cache = self.clone();
        match tokio::task::spawn_blocking(move || work(&cache)).await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(CacheError::Closed),
        }
    }
}

/// Everything in `dir`; nothing if it is gone.
fn files(dir: &Path) -> Result<Vec<PathBuf>, CacheError> {
    let read = || -> io::Result<Vec<PathBuf>> {
        let entries = match std::fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        entries.map(|entry| Ok(entry?.path())).collect()
    };
    read().map_err(|source| CacheError::io("list", dir, source))
}

/// Everything in all of `dirs`.
fn files_of(dirs: &[PathBuf]) -> Result<Vec<PathBuf>, CacheError> {
    let lists: Vec<_> = dirs.iter().map(|dir| files(dir)).collect::<Result<_, _>>()?;
    Ok(lists.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests;
