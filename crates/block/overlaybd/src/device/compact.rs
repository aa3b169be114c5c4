//! Keeping a running device's stack shallow: layers made at run time are merged into one.
//!
//! The new layer is complete and durable under its name before the device uses it, and the old files stay until the caller
//! has recorded the new stack. A crash leaves a file too many, never one too few.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use aenv_block_device::BlockDevice;

use super::OverlayDevice;
use crate::commit::{CommitError, write_layer};
use crate::header::Identity;
use crate::layer::{Layer, OpenLayerError};
use crate::mapping::Joined;
use crate::source::LocalFile;
use crate::stack::{Stack, StackError};
use crate::upper::files::sync_directory;
use crate::upper::lock;

/// When layers are merged, and which.
#[derive(Debug, Clone, Copy)]
pub struct CompactionPolicy {
    /// Layers below the upper, at most.
    pub max_depth: usize,
    /// Layers at the bottom that are shared with others and never merged.
    pub base: usize,
}

impl CompactionPolicy {
    /// Which of `depth` layers, counted from the bottom, to merge now; none if the stack is shallow enough or there is
    /// nothing to gain.
    #[must_use]
    pub fn plan(&self, depth: usize) -> Option<Range<usize>> {
        (depth > self.max_depth && depth.saturating_sub(self.base) > 1).then_some(self.base..depth)
    }
}

/// Why layers could not be merged. The device goes on with the old ones.
#[derive(Debug, thiserror::Error)]
pub enum CompactError {
    /// There are no such layers, or only one.
    #[error("layers {from}..{to} of {depth} cannot be merged")]
    Range {
        /// First layer.
        from: usize,
        /// The layer behind the last.
        to: usize,
        /// How many there are.
        depth: usize,
    },
    /// The merged layer could not be written.
    #[error("write the merged layer {path}")]
    Write {
        /// Where to.
        path: PathBuf,
        /// Why.
        source: CommitError,
    },
    /// The merged layer could not be put in place.
    #[error("{what} {path}")]
    File {
        /// Which step failed.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The merged layer could not be read back.
    #[error("open the merged layer")]
    Open(#[from] OpenLayerError),
    /// The layers do not make a stack.
    #[error("stack the layers")]
    Stack(#[from] StackError),
}

impl OverlayDevice {
    /// Merges layers `range`, counted from the bottom, into one at `path`, and goes on with that. Requests and restacks go
    /// on meanwhile; `proceed` is told the bytes written so far and may sleep to throttle, or say no to give up.
    ///
    /// Gives back the new layer and those it replaces, whose files are to be deleted once the new stack is recorded.
    pub fn compact(
        &self,
        range: Range<usize>,
        path: &Path,
        proceed: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(Layer, Vec<Layer>), CompactError> {
        let _compacting = lock(&self.compacting);
        let lowers = self.lowers();
        let depth = lowers.layers().len();
        if range.len() < 2 || range.end > depth {
            return Err(CompactError::Range { from: range.start, to: range.end, depth });
        }
        let old = lowers.layers()[range.clone()].to_vec();
        let parent = old[0].identity().parent;
        let merged = write_merged(&Stack::new(old.clone())?, path, &Identity::fresh(parent), proceed)?;
        // Restacks went on meanwhile: they add layers on top and leave the others alone.
        let _changing = lock(&self.changing);
        let mut layers = self.lowers().layers().to_vec();
        debug_assert!(layers[range.clone()].iter().zip(&old).all(|(now, before)| now.is_same(before)));
        layers.splice(range, [merged.clone()]);
        let stack = Stack::new(layers)?;
        self.parts.write().unwrap_or_else(PoisonError::into_inner).lowers = stack;
        Ok((merged, old))
    }
}

/// Writes `stack` as one layer, durable under its name or not there at all.
fn write_merged(
    stack: &Stack,
    path: &Path,
    identity: &Identity,
    proceed: &mut dyn FnMut(u64) -> bool,
) -> Result<Layer, CompactError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    let error = |what| {
        let path = temporary.clone();
        move |source| CompactError::File { what, path, source }
    };
    let mut write = || {
        let mut out = BufWriter::new(File::create(&temporary).map_err(error("create"))?);
        // Nothing is cut at the size: a larger layer above may reach beyond it.
        let index = Joined::with_capacity(stack.index().entries().len());
        write_layer(&mut out, stack.index().entries(), index, |tag| stack.file(tag), stack.size(), identity, proceed)
            .map_err(|source| CompactError::Write { path: path.to_owned(), source })?;
        out.flush().map_err(error("write"))?;
        out.get_ref().sync_all().map_err(error("sync"))?;
        fs::rename(&temporary, path).map_err(error("rename"))?;
        sync_directory(path).map_err(error("sync the directory of"))
    };
    if let Err(error) = write() {
        let _ = fs::remove_file(&temporary); // it may not exist; a sweep finds it otherwise
        return Err(error);
    }
    let file = LocalFile::open(path).map_err(error("open"))?;
    Ok(Layer::open(Arc::new(file))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_layers_above_the_base_of_a_deep_stack_are_merged() {
        let policy = CompactionPolicy { max_depth: 4, base: 2 };
        assert_eq!(policy.plan(4), None);
        assert_eq!(policy.plan(5), Some(2..5));
        assert_eq!(CompactionPolicy { max_depth: 4, base: 4 }.plan(5), None, "one layer stays one");
    }
}
