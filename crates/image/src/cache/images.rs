//! Images that were resolved: what devices of theirs are made of, and what their authors say about running them.

use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use aenv_block_client::DeviceConfig;
use aenv_model::Bytes;
use serde::{Deserialize, Serialize};

use super::layout::{IMAGE, Layout};
use super::{CacheError, ImageCache, TEMPORARY};
use crate::digest::Digest;
use crate::image_config::ImageConfig;

const SCHEMA: u32 = 1;

/// What tells images apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImageKey {
    /// Of the manifest.
    pub(crate) digest: Digest,
    /// Where its layers stay, if they stay in a registry.
    pub(crate) repository: Option<String>,
    /// How it was made: an image that was made another way is not the one.
    pub(crate) converter: String,
}

/// A resolved image.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CachedImage {
    pub(crate) device: DeviceConfig,
    pub(crate) config: ImageConfig,
    /// Of the device.
    pub(crate) size: Bytes,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    schema: u32,
    key: ImageKey,
    size: Bytes,
    config: ImageConfig,
}

/// What collecting needs to know of an image.
#[derive(Debug, Clone)]
pub(super) struct ImageFile {
    /// What its files' names begin with.
    pub(super) name: String,
    pub(super) device: DeviceConfig,
    pub(super) used: SystemTime,
}

impl ImageCache {
    /// A resolved image, if it was resolved before. Its layers may be gone; a lease tells. Blocking.
    pub(crate) fn image(&self, key: &ImageKey) -> Option<CachedImage> {
        let name = Layout::image_name(&key.digest, key.repository.as_deref());
        let path = self.layout.image(&name);
        let metadata: Metadata = serde_json::from_slice(&std::fs::read(self.layout.metadata(&name)).ok()?).ok()?;
        if metadata.schema != SCHEMA || metadata.key != *key {
            return None;
        }
        let device = DeviceConfig::load(&path).ok()?;
        // From now on it is the last to be evicted.
        if let Err(error) = super::commits::touch(&path) {
            tracing::debug!(path = %path.display(), %error, "could not note the use of an image");
        }
        Some(CachedImage { device, config: metadata.config, size: metadata.size })
    }

    /// Remembers a resolved image. Durable on return. Blocking.
    pub(crate) fn record_image(&self, key: &ImageKey, image: &CachedImage) -> Result<(), CacheError> {
        let name = Layout::image_name(&key.digest, key.repository.as_deref());
        let metadata = Metadata { schema: SCHEMA, key: key.clone(), size: image.size, config: image.config.clone() };
        let write = |path: PathBuf, text: &[u8]| {
            aenv_durable::atomic_write(&path, text, 0o644).map_err(|source| CacheError::io("write", &path, source))
        };
        let text = serde_json::to_vec_pretty(&metadata)
            .map_err(|error| CacheError::io("write", &self.layout.metadata(&name), error.into()))?;
        let _shared = self.share()?;
        write(self.layout.metadata(&name), &text)?;
        write(self.layout.image(&name), image.device.to_json().as_bytes())
    }

    /// All resolved images. One that can't be read is added to `doubts`. To be called by whoever has the whole lock.
    pub(super) fn image_files(&self, doubts: &mut Vec<PathBuf>) -> Result<Vec<ImageFile>, CacheError> {
        let mut found = Vec::new();
        for path in super::files(&self.layout.configs())? {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let Some(name) = file.strip_suffix(IMAGE) else { continue };
            if name.starts_with(TEMPORARY) {
                continue;
            }
            let read =
                DeviceConfig::load(&path).ok().zip(std::fs::metadata(&path).and_then(|meta| meta.modified()).ok());
            match read {
                Some((device, used)) => found.push(ImageFile { name: name.to_owned(), device, used }),
                None => doubts.push(path),
            }
        }
        Ok(found)
    }

    /// Forgets an image. To be called by whoever has the whole lock.
    pub(super) fn remove_image(&self, name: &str) -> io::Result<()> {
        aenv_durable::remove_file_if_present(&self.layout.image(name))?;
        aenv_durable::remove_file_if_present(&self.layout.metadata(name))
    }
}
