//! Keeping chains of layers short.
//!
//! Every capture adds a layer of memory and one of the disk to what its machine went on from. Behind everybody's back,
//! layers of a deep capture are merged into a file beside them, which the next capture takes in their place: the capture
//! itself never changes. Where that does not keep up, a capture that would be too deep merges before it is made.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use aenv_memory::{ChainPolicy, MemoryLayer};
use aenv_model::Bytes;
use uuid::Uuid;

/// Layers beyond which they are merged in the background.
pub(crate) const DEPTH: usize = 8;

/// Layers beyond which a capture is not made before some are merged.
pub(crate) const MOST: usize = 32;

/// Layers of a capture that were merged into one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Merged {
    /// Which.
    pub(crate) range: Range<usize>,
    /// What they became.
    pub(crate) layer: Layer,
}

/// A layer, wherever it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layer {
    pub(crate) path: PathBuf,
    pub(crate) uuid: Uuid,
}

impl Merged {
    /// The same in a chain with so many layers more at its bottom.
    pub(crate) fn above(self, layers: usize) -> Self {
        Self { range: self.range.start + layers..self.range.end + layers, layer: self.layer }
    }
}

/// Merges once what is worth it, into a file in `dir`. None if there are at most `max_depth` layers. Blocking.
pub(crate) fn merge(layers: &[Layer], max_depth: usize, dir: &Path, kind: &str) -> io::Result<Option<Merged>> {
    let lengths = layers.iter().map(|layer| fs::metadata(&layer.path).map(|file| Bytes(file.len())));
    let lengths = lengths.collect::<io::Result<Vec<_>>>()?;
    let Some(range) = (ChainPolicy { max_depth, shared: 0 }).plan(&lengths) else { return Ok(None) };
    let sources: Vec<_> = (range.clone())
        .map(|n| MemoryLayer { path: layers[n].path.clone(), uuid: layers[n].uuid, size: lengths[n] })
        .collect();
    let path = dir.join(format!("{kind}-merged-{}.commit", Uuid::now_v7()));
    match aenv_memory::compact(&sources, &path) {
        Ok(merged) => Ok(Some(Merged { range, layer: Layer { path, uuid: merged.uuid } })),
        Err(error @ aenv_memory::CompactError::NoSpace { .. }) => {
            Err(io::Error::new(io::ErrorKind::StorageFull, error))
        }
        Err(error) => Err(io::Error::other(error)),
    }
}
