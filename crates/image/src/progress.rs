//! What an import tells while it works.

use aenv_model::Bytes;

/// A step of an import. Layers are counted from 0, the lowest; several may be fetched at once.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Looking the image up.
    Resolving,
    /// Fetching a layer. Goes back to 0 when a fetch is tried again.
    Layer {
        /// Which.
        index: usize,
        /// How many the image has.
        total: usize,
        /// Compressed bytes that are here.
        done_bytes: Bytes,
        /// Compressed bytes of the layer.
        total_bytes: Bytes,
    },
    /// Unpacking a layer.
    Unpacking {
        /// Which.
        index: usize,
        /// How many the image has.
        total: usize,
        /// Compressed bytes that are unpacked.
        done_bytes: Bytes,
        /// Compressed bytes of the layer.
        total_bytes: Bytes,
    },
    /// A layer was converted before, on the same layers below.
    Cached {
        /// Which.
        index: usize,
        /// How many the image has.
        total: usize,
    },
    /// Somebody else is converting a layer that this image has too; waiting for the result.
    Waiting {
        /// Which.
        index: usize,
        /// How many the image has.
        total: usize,
    },
    /// Writing a layer into the cache. The next one is unpacked meanwhile.
    Committing {
        /// Which.
        index: usize,
        /// How many the image has.
        total: usize,
    },
    /// Making the empty file system that all images lie on: once for all of them.
    Building,
}
