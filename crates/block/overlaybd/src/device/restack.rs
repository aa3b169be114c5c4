//! Restacking: the upper becomes a layer, and a fresh upper takes its place, under a running device.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use aenv_model::Bytes;

use super::OverlayDevice;
use crate::header::Identity;
use crate::layer::Layer;
use crate::seal::SealError;
use crate::source::{LocalFile, Source};
use crate::stack::{MAX_LAYERS, StackError};
use crate::upper::files::sync_directory;
use crate::upper::notes::Notes;
use crate::upper::{CreateUpperError, Upper, UpperFiles, UpperOptions, lock};

/// What a restack made.
#[derive(Debug, Clone)]
pub struct Restacked {
    /// The layer that was the upper.
    pub layer: Layer,
    /// Size of its file.
    pub size: Bytes,
    /// How long requests had to wait.
    pub pause: Duration,
}

/// Why a device could not be restacked.
#[derive(Debug, thiserror::Error)]
pub enum RestackError {
    /// Writes could not be made durable. The device goes on, if its upper is still sound.
    #[error("flush before sealing")]
    Flush(#[source] io::Error),
    /// The stack would be too deep; nothing was changed. Compact it first.
    #[error("there are {MAX_LAYERS} layers already")]
    TooDeep,
    /// Sealing failed. If [the upper](OverlayDevice::upper) still takes writes, the device goes on; else it must be opened
    /// again.
    #[error("seal the upper")]
    Seal(#[from] SealError),
    /// The sealed file could not be moved. The device must be opened again; its upper is sealed.
    #[error("move the sealed upper to {to}")]
    Move {
        /// Where to.
        to: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No fresh upper could be made or put in place. If [the upper](OverlayDevice::upper) still takes writes, the device
    /// goes on; else it must be opened again.
    #[error("make a fresh upper")]
    Create(#[from] CreateUpperError),
    /// No notes can be taken of what is written to the fresh upper. If [the upper](OverlayDevice::upper) still takes writes,
    /// the device goes on; else it must be opened again.
    #[error("take notes of a fresh upper")]
    Notes {
        /// Why.
        source: io::Error,
    },
    /// The new layer does not fit on the stack. The device must be opened again.
    #[error("put the sealed upper on the stack")]
    Stack(#[from] StackError),
}

impl OverlayDevice {
    /// Seals the upper at `files`, moves its data file to `layer` (in the same filesystem) and goes on with a fresh upper of
    /// the same layout in its place. Data is flushed and the fresh upper is made before requests have to wait.
    ///
    /// A crash leaves one of: the old upper; a sealed one at `files`; none at `files` and a layer at `layer`; or the new
    /// state. [`UpperFiles::state`] tells which.
    pub fn restack(&self, files: &UpperFiles, layer: &Path) -> Result<Restacked, RestackError> {
        let result = self.restack_with(
            |options| files.prepare(options),
            || {
                let moved = |source| RestackError::Move { to: layer.to_owned(), source };
                fs::rename(&files.data, layer).map_err(moved)?;
                if layer.parent() != files.data.parent() {
                    sync_directory(layer).map_err(moved)?;
                }
                files.publish()?; // in the order of the journal: never the fresh upper without the layer
                Ok(Arc::new(LocalFile::open(layer).map_err(moved)?))
            },
        );
        if result.is_err() {
            files.discard_prepared();
        }
        result
    }

    /// Like [`restack`](Self::restack) for files of any kind: `make` makes the next upper, while requests go on; `place` is
    /// called when the current one is sealed and durable, and gives its bytes.
    pub fn restack_with(
        &self,
        make: impl FnOnce(&UpperOptions) -> Result<Upper, CreateUpperError>,
        place: impl FnOnce() -> Result<Arc<dyn Source>, RestackError>,
    ) -> Result<Restacked, RestackError> {
        let _changing = lock(&self.changing);
        if self.parts().lowers.layers().len() == MAX_LAYERS {
            return Err(RestackError::TooDeep);
        }
        let upper = self.upper();
        let mut fresh = make(&UpperOptions {
            mode: upper.mode(),
            virtual_size: upper.virtual_size(),
            identity: Identity::fresh(upper.identity().uuid),
        })?;
        let noting = |source| RestackError::Notes { source };
        if let Some(notes) = upper.notes() {
            fresh.set_notes(Notes::prepare(notes.path(), fresh.identity().uuid).map_err(noting)?);
        }
        upper.flush().map_err(RestackError::Flush)?; // so that little is left to do while requests wait
        let start = Instant::now();
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        let sealed = upper.seal()?;
        let size = sealed.size();
        let layer = sealed.into_layer(place()?);
        // Not before: until then, the old notes are the current upper's.
        fresh.notes_mut().map_or(Ok(()), Notes::publish).map_err(noting)?;
        parts.lowers = parts.lowers.with_top(layer.clone())?;
        parts.upper = Arc::new(fresh);
        drop(parts);
        let pause = start.elapsed();
        drop(upper); // deletes its index file, for which the filesystem may take its time
        Ok(Restacked { layer, size, pause })
    }
}
