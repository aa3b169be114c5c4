//! What a build needs from below.

use std::collections::BTreeSet;
use std::path::Path;

use aenv_image::{Credentials, ImageConfig, ImageReference, ImportError, Importer, LeaseKind, Progress};
use aenv_model::Bytes;
use aenv_snapshot::Capture;
use async_trait::async_trait;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::templates::ReadyTemplate;

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

/// Boots what sandboxes of a build go on from.
#[async_trait]
pub trait Warm: Send + Sync + std::fmt::Debug + 'static {
    /// A machine on `template`'s root file system, ready for a sandbox, and captured. On an error, told for the user, nothing
    /// is left; so it is if dropped.
    async fn warm(&self, template: &ReadyTemplate) -> Result<Capture, String>;
}

/// Turns images into root file systems.
#[async_trait]
pub trait ImportImage: Send + Sync + std::fmt::Debug + 'static {
    /// Makes `target`, the configuration of a device with the image's content, and keeps the layers that it names for
    /// `owner`. On an error, or when cancelled, nothing is left.
    async fn import(
        &self,
        reference: &ImageReference,
        credentials: Option<Credentials>,
        target: &Path,
        owner: &str,
        progress: &(dyn Fn(Progress) + Send + Sync),
        cancel: CancellationToken,
    ) -> Result<ImportedImage, ImportError>;

    /// Keeps no more layers for `owner`. Blocks for no longer than it takes to remove a file; what fails is logged, and
    /// costs space only.
    fn release(&self, owner: &str);

    /// Keeps no more layers for owners other than these; see [`Self::release`].
    fn release_all_but(&self, owners: BTreeSet<String>);
}

#[async_trait]
impl ImportImage for Importer {
    async fn import(
        &self,
        reference: &ImageReference,
        credentials: Option<Credentials>,
        target: &Path,
        owner: &str,
        progress: &(dyn Fn(Progress) + Send + Sync),
        cancel: CancellationToken,
    ) -> Result<ImportedImage, ImportError> {
        let imported = Importer::import(self, reference, credentials, target, owner, progress, cancel).await?;
        Ok(ImportedImage { digest: imported.digest, config: imported.config, size: imported.size })
    }

    fn release(&self, owner: &str) {
        if let Err(error) = self.cache().release_blocking(LeaseKind::Template, owner) {
            warn!(owner, %error, "layers of an image are kept although nobody needs them");
        }
    }

    fn release_all_but(&self, owners: BTreeSet<String>) {
        match self.cache().reconcile_blocking(LeaseKind::Template, &owners) {
            Ok(released) if released.is_empty() => {}
            Ok(released) => info!(images = released.len(), "released layers of images that are gone"),
            Err(error) => warn!(%error, "layers of images that are gone may still be kept"),
        }
    }
}
