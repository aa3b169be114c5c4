//! Restacking: the upper becomes a layer, and a fresh upper takes its place, under a running device.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use aenv_block_device::BlockDevice;
use aenv_model::Bytes;

use super::{OverlayDevice, Parts};
use crate::header::Identity;
use crate::layer::Layer;
use crate::seal::SealError;
use crate::source::{LocalFile, Source};
use crate::stack::{MAX_LAYERS, StackError};
use crate::upper::files::sync_directory;
use crate::upper::{CreateUpperError, Upper, UpperFiles, UpperOptions, lock};

/// What a restack made.
#[derive(Debug, Clone)]
pub struct Restacked {
    /// The layer that was the upper.
    pub layer: Layer,
    /// Size of its file.
    pub size: Bytes,
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
    /// Sealing failed. Unless it is [`SealError::Closed`], the device must be opened again.
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
    /// No fresh upper could be made. The device must be opened again on the new layer.
    #[error("make a fresh upper")]
    Create(#[from] CreateUpperError),
    /// The new layer does not fit on the stack. The device must be opened again.
    #[error("put the sealed upper on the stack")]
    Stack(#[from] StackError),
}

impl OverlayDevice {
    /// Seals the upper at `files`, moves its data file to `layer` (in the same filesystem), makes a fresh upper of the same
    /// layout in its place and goes on with that. Requests wait meanwhile; data is flushed before they have to.
    ///
    /// A crash leaves one of: the old upper; a sealed one at `files`; none at `files` and a layer at `layer`; or the new
    /// state. [`UpperFiles::state`] tells which.
    pub fn restack(&self, files: &UpperFiles, layer: &Path) -> Result<Restacked, RestackError> {
        self.restack_with(|options| {
            let moved = |source| RestackError::Move { to: layer.to_owned(), source };
            fs::rename(&files.data, layer).map_err(moved)?;
            sync_directory(layer).map_err(moved)?;
            if layer.parent() != files.data.parent() {
                sync_directory(&files.data).map_err(moved)?;
            }
            let sealed = LocalFile::open(layer).map_err(moved)?;
            Ok((Arc::new(sealed), files.create(options)?))
        })
    }

    /// Like [`restack`](Self::restack), with `replace` to give the sealed file's bytes and the next upper, for which it is
    /// told how to make it.
    pub fn restack_with(
        &self,
        replace: impl FnOnce(&UpperOptions) -> Result<(Arc<dyn Source>, Upper), RestackError>,
    ) -> Result<Restacked, RestackError> {
        let _changing = lock(&self.changing);
        if self.parts().lowers.layers().len() == MAX_LAYERS {
            return Err(RestackError::TooDeep);
        }
        self.flush().map_err(RestackError::Flush)?; // so that little is left to do while requests wait
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        let Parts { lowers, upper } = &mut *parts;
        let sealed = upper.seal()?;
        let size = sealed.size();
        let options = UpperOptions {
            mode: upper.mode(),
            virtual_size: upper.virtual_size(),
            identity: Identity::fresh(upper.identity().uuid),
        };
        let (source, fresh) = replace(&options)?;
        let layer = sealed.into_layer(source);
        *lowers = lowers.with_top(layer.clone())?;
        *upper = Arc::new(fresh);
        Ok(Restacked { layer, size })
    }
}
