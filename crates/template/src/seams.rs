//! What a build needs from below.

use std::path::Path;

use aenv_image::{Credentials, ImageConfig, ImageReference, ImportError, Importer, Progress};
use aenv_model::Bytes;
use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

/// An image that has become a root file system.
#[derive(Debug, Clone)]
pub struct ImportedImage {
    /// Manifest digest.
    pub digest: String,
    /// The image's own settings.
    pub config: ImageConfig,
    /// Virtual size of the file system.
    pub size: Bytes,
}

/// Turns images into root file systems.
#[async_trait]
pub trait ImportImage: Send + Sync + std::fmt::Debug + 'static {
    /// Makes `target` from the image. On an error, or when cancelled, nothing is left.
    async fn import(
        &self,
        reference: &ImageReference,
        credentials: Option<Credentials>,
        target: &Path,
        progress: &(dyn Fn(Progress) + Send + Sync),
        cancel: CancellationToken,
    ) -> Result<ImportedImage, ImportError>;
}

#[async_trait]
impl ImportImage for Importer {
    async fn import(
        &self,
        reference: &ImageReference,
        credentials: Option<Credentials>,
        target: &Path,
        progress: &(dyn Fn(Progress) + Send + Sync),
        cancel: CancellationToken,
    ) -> Result<ImportedImage, ImportError> {
        let imported = Importer::import(self, reference, credentials, target, progress, cancel).await?;
        Ok(ImportedImage { digest: imported.digest, config: imported.config, size: imported.size })
    }
}
