//! Which layer of an image became which layer of the cache.
//!
//! A layer on another chain is another layer, so an entry is found by the chain's key, and believed only if the layer below
//! is the very one it was made on.

use aenv_model::Bytes;
use serde::{Deserialize, Serialize};

use super::commits::Commit;
use super::{CacheError, ImageCache};
use crate::digest::Digest;

const SCHEMA: u32 = 1;

/// A conversion that was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Conversion {
    schema: u32,
    /// What was converted.
    pub(crate) source: Digest,
    /// What it became.
    pub(crate) commit: Digest,
    pub(crate) size: Bytes,
    /// By what, down to the version.
    pub(crate) converter: String,
    pub(crate) virtual_size: Bytes,
    /// Whether it makes the file system.
    pub(crate) mkfs: bool,
    /// What it lies on.
    pub(crate) parent: Option<Digest>,
}

impl Conversion {
    pub(crate) fn commit(&self) -> Commit {
        Commit { digest: self.commit.clone(), size: self.size }
    }
}

/// What makes a conversion unlike another of the same source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConversionKey {
    /// Stands for the whole chain up to here, and for how it is converted.
    pub(crate) chain: Digest,
    pub(crate) source: Digest,
    pub(crate) converter: String,
    pub(crate) virtual_size: Bytes,
    pub(crate) mkfs: bool,
}

impl ImageCache {
    /// What `key` became on `parent`, if it is still there. Only a lease makes that last. Blocking.
    pub(crate) fn find(&self, key: &ConversionKey, parent: Option<&Digest>) -> Option<Commit> {
        let text = std::fs::read(self.layout.index(&key.source, &key.chain)).ok()?;
        let found: Conversion = serde_json::from_slice(&text).ok()?;
        let fits = found.schema == SCHEMA
            && found.source == key.source
            && found.converter == key.converter
            && found.virtual_size == key.virtual_size
            && found.mkfs == key.mkfs
            && found.parent.as_ref() == parent;
        let commit = found.commit();
        (fits && self.has_commit(&commit.digest, commit.size)).then(|| {
            self.touch_commit(&commit.digest);
            commit
        })
    }

    /// Records a conversion whose layer is there. Durable on return. Blocking.
    pub(crate) fn record_conversion(
        &self,
        key: &ConversionKey,
        parent: Option<&Digest>,
        commit: &Commit,
    ) -> Result<(), CacheError> {
        let conversion = Conversion {
            schema: SCHEMA,
            source: key.source.clone(),
            commit: commit.digest.clone(),
            size: commit.size,
            converter: key.converter.clone(),
            virtual_size: key.virtual_size,
            mkfs: key.mkfs,
            parent: parent.cloned(),
        };
        let (dir, path) = (self.layout.index_dir(&key.source), self.layout.index(&key.source, &key.chain));
        let _shared = self.share()?;
        std::fs::create_dir_all(&dir)
            .and_then(|()| {
                let text = serde_json::to_vec_pretty(&conversion)?;
                aenv_durable::atomic_write(&path, &text, 0o644)?;
                aenv_durable::sync_dir(&self.layout.indexes())
            })
            .map_err(|source| CacheError::io("write", &path, source))
    }
}
