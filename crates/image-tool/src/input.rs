//! Opening what is read. Nothing here writes: an upper is opened for reading only, and read as a layer.

use std::path::Path;
use std::sync::Arc;

use aenv_block_overlaybd::{Layer, LocalFile, Source, Stack, Storage, Upper};
use anyhow::{Context as _, Result};

use crate::args::Layers;
use crate::config;

/// A file that is not written meanwhile.
pub(crate) fn file(path: &Path) -> Result<Arc<dyn Source>> {
    Ok(Arc::new(LocalFile::open(path).with_context(|| format!("open {}", path.display()))?))
}

/// A finished layer.
pub(crate) fn layer(path: &Path) -> Result<Layer> {
    Ok(Layer::open(file(path)?)?)
}

/// An upper, for reading.
pub(crate) fn upper(data: &Path, index: Option<&Path>) -> Result<Upper> {
    let open = |path: &Path| -> Result<Arc<dyn Storage>> {
        let file = LocalFile::open_to_read(path).with_context(|| format!("open {}", path.display()))?;
        Ok(Arc::new(file))
    };
    Ok(Upper::open(open(data)?, index.map(open).transpose()?)?)
}

/// What a device is made of, opened.
#[derive(Debug)]
pub(crate) struct Opened {
    /// The layers, the bottom one first.
    pub(crate) lowers: Vec<Layer>,
    /// What is on top of them.
    pub(crate) upper: Option<Upper>,
}

impl Opened {
    /// Opens what the command line names.
    pub(crate) fn open(layers: &Layers) -> Result<Self> {
        if let Some(path) = &layers.config {
            return config::open(path);
        }
        let lowers = layers.lower.iter().map(|path| layer(path)).collect::<Result<_>>()?;
        let upper = layers.upper().map(|(data, index)| upper(data, index)).transpose()?;
        Ok(Self { lowers, upper })
    }

    /// All of it as one stack.
    pub(crate) fn stack(&self) -> Result<Stack> {
        let upper = self.upper.as_ref().map(Upper::to_layer);
        Ok(Stack::new(self.lowers.iter().cloned().chain(upper).collect())?)
    }
}
