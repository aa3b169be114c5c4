//! Keeping images shallow.
//!
//! Each pause of a guest adds a layer, and each layer is a file to open and an index to merge at the next resume. So layers
//! are merged now and then, in the background. A merge writes its layers again, so it should be worth it: best is one of many
//! layers of about the same length, worst one of a large layer with a small one. What is merged is therefore that which is the
//! largest multiple of its largest layer. So what is written moves into ever larger layers, a few times in all, and an old and
//! large one is written again only when those above it have together grown as large.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_block_overlaybd::{CommitError, Identity, LocalFile, Source, Stack, StackError};
use aenv_model::Bytes;

use crate::capture::{Unnamed, directory};
use crate::image::MemoryLayer;

/// When layers of an image are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainPolicy {
    /// Layers of an image, at most.
    pub max_depth: usize,
    /// Layers at the bottom that others share, and that are never merged.
    pub shared: usize,
}

impl Default for ChainPolicy {
    fn default() -> Self {
        Self { max_depth: 8, shared: 0 }
    }
}

impl ChainPolicy {
    /// Which layers of an image to merge now, given the length of each, bottom first; none if it is shallow enough or nothing
    /// can be done. To be asked again after a merge.
    #[must_use]
    pub fn plan(&self, lengths: &[Bytes]) -> Option<Range<usize>> {
        if lengths.len() <= self.max_depth {
            return None;
        }
        let mut best: Option<(Range<usize>, u128, u128)> = None;
        for from in self.shared..lengths.len() {
            let (mut all, mut largest) = (0, 1);
            for (to, length) in (1..).zip(lengths).skip(from) {
                let length = u128::from(length.get());
                (all, largest) = (all + length, largest.max(length));
                let better = |&(_, others, other): &(_, u128, u128)| {
                    let (this, that) = (all * other, others * largest);
                    this > that || this == that && all < others
                };
                if to - from >= 2 && best.as_ref().is_none_or(better) {
                    best = Some((from..to, all, largest));
                }
            }
        }
        best.map(|(range, ..)| range)
    }
}

/// Why layers could not be merged. They are as they were, and nothing else is left.
#[derive(Debug, thiserror::Error)]
pub enum CompactError {
    /// One layer, or none.
    #[error("{0} layers cannot be merged")]
    TooFew(usize),
    /// A layer could not be opened.
    #[error("open memory layer {path}", path = path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// They do not make a stack.
    #[error("stack memory layers")]
    Stack(#[from] StackError),
    /// The disk is full, or a quota is used up.
    #[error("no space for the merged memory layer {path}", path = path.display())]
    NoSpace {
        /// Where it was to be.
        path: PathBuf,
        /// Which of the two.
        source: io::Error,
    },
    /// The file could not be put in place.
    #[error("write the merged memory layer {path}", path = path.display())]
    Write {
        /// Where it was to be.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The layers could not be copied.
    #[error("merge memory layers into {path}", path = path.display())]
    Merge {
        /// Where to.
        path: PathBuf,
        /// Why.
        source: CommitError,
    },
}

/// Merges `layers`, which follow each other in an image, bottom first, into one at `out`; durable on return. They stay as they
/// are. Blocking.
pub fn compact(layers: &[MemoryLayer], out: &Path) -> Result<MemoryLayer, CompactError> {
    if layers.len() < 2 {
        return Err(CompactError::TooFew(layers.len()));
    }
    let open = |layer: &MemoryLayer| match LocalFile::open(&layer.path) {
        Ok(file) => Ok(Arc::new(file) as Arc<dyn Source>),
        Err(source) => Err(CompactError::Open { path: layer.path.clone(), source }),
    };
    let sources = layers.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let stack = Stack::open(sources)?;
    let identity = Identity::fresh(stack.layers()[0].identity().parent);

    let write_error = |source: io::Error| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            CompactError::NoSpace { path: out.to_owned(), source }
        }
        _ => CompactError::Write { path: out.to_owned(), source },
    };
    let mut unnamed = Unnamed::beside(out).map_err(write_error)?;
    let finished = stack.flatten(&mut unnamed.file, &identity, &mut |_| true).map_err(|error| match error {
        CommitError::Write(source) => write_error(source),
        source => CompactError::Merge { path: out.to_owned(), source },
    })?;
    unnamed.file.sync_all().map_err(write_error)?;
    unnamed.name(out).map_err(write_error)?;
    aenv_durable::sync_dir(directory(out)).map_err(write_error)?;
    Ok(MemoryLayer { path: out.to_owned(), uuid: identity.uuid, size: finished.size })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lengths(mib: &[u64]) -> Vec<Bytes> {
        mib.iter().copied().map(Bytes::mib).collect()
    }

    #[test]
    fn shallow_chains_and_shared_layers_are_left_alone() {
        let policy = ChainPolicy { max_depth: 4, shared: 0 };
        assert_eq!(policy.plan(&lengths(&[1, 1, 1, 1])), None);
        assert_eq!(policy.plan(&lengths(&[500, 1, 1, 1, 1])), Some(1..5), "not the large base");
        assert_eq!(ChainPolicy { max_depth: 4, shared: 3 }.plan(&lengths(&[1, 1, 1, 9, 9])), Some(3..5));
        assert_eq!(ChainPolicy { max_depth: 4, shared: 4 }.plan(&lengths(&[1, 1, 1, 1, 9])), None);
        assert_eq!(ChainPolicy { max_depth: 2, shared: 0 }.plan(&lengths(&[300, 5, 5, 200])), Some(1..3));
        assert_eq!(ChainPolicy { max_depth: 0, shared: 0 }.plan(&lengths(&[7])), None);
    }

    /// Adds layers, and merges whenever the policy says so: gives the lengths at the end, the bytes added, and written again.
    fn live(policy: ChainPolicy, base: u64, added: impl IntoIterator<Item = u64>) -> (Vec<Bytes>, u64, u64) {
        let mut lengths = vec![Bytes(base)];
        let (mut new, mut again) = (0, 0);
        for length in added {
            lengths.push(Bytes(length));
            new += length;
            if let Some(range) = policy.plan(&lengths) {
                let merged = lengths[range.clone()].iter().map(|length| length.get()).sum();
                again += merged;
                lengths.splice(range, [Bytes(merged)]);
            }
        }
        (lengths, new, again)
    }

    #[test]
    fn two_hundred_pauses_rewrite_each_page_a_few_times_and_a_large_base_never() {
        let (lengths, new, again) = live(ChainPolicy::default(), 4096, [16; 200]);
        assert!(lengths.len() <= 8);
        assert_eq!(lengths[0], Bytes(4096), "never merged");
        assert!(again <= 3 * new, "{new} added, {again} written again");
        let (_, new, again) = live(ChainPolicy::default(), 4096, [16; 5000]);
        assert!(again <= 8 * new, "{new} added, {again} written again");
        let (_, new, again) = live(ChainPolicy::default(), 512, (0..5000_u64).map(|n| 1 << (n * 7 % 11)));
        assert!(again <= 10 * new, "{new} added, {again} written again");
    }

    proptest! {
        #[test]
        fn one_merge_a_layer_keeps_any_chain_short(added in prop::collection::vec(1..1000_u64, 0..120), shared in 0..4_usize) {
            let policy = ChainPolicy { max_depth: 8, shared };
            let mut lengths = vec![Bytes(500); shared];
            for length in added {
                lengths.push(Bytes(length));
                if let Some(range) = policy.plan(&lengths) {
                    prop_assert!(range.len() >= 2 && range.start >= shared && range.end <= lengths.len());
                    lengths.splice(range, [Bytes(length)]);
                }
                prop_assert!(lengths.len() <= 8);
                prop_assert!(lengths[..shared].iter().all(|length| *length == Bytes(500)));
            }
        }
    }
}
