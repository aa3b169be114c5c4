//! What a build needs from below.

use std::collections::BTreeSet;
use std::path::Path;

use aenv_image::{Credentials, ImageConfig, ImageReference, ImportError, Importer, LeaseKind, Progress};
use aenv_model::{Bytes, Command, CommandExit, Output};
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

/// Machines that builds work in, and that sandboxes go on from.
#[async_trait]
pub trait Workshop: Send + Sync + std::fmt::Debug + 'static {
    /// A running machine that begins as sandboxes of `template` do. On an error, told for the user, nothing is left.
    ///
    /// Cancel safety: wait for it, and close what it gives. If dropped, the machine ends by itself, some time later.
    async fn open(&self, template: &ReadyTemplate) -> Result<Box<dyn Bench>, String>;
}

/// A machine at work for a build.
#[async_trait]
pub trait Bench: Send + Sync + std::fmt::Debug {
    /// Runs a command and waits for its end. On an error, told for the user, it has not run, or is lost.
    ///
    /// Cancel safety: if dropped, the command goes on.
    async fn run(&self, command: &Command, output: &(dyn Fn(Output) + Send + Sync)) -> Result<CommandExit, String>;

    /// Writes a file of this host to `path`, as root.
    async fn put(&self, path: &str, file: &Path) -> Result<(), String>;

    /// Copies the machine, with its memory or its disk alone, and lets it go on.
    ///
    /// Cancel safety: if dropped, nothing is left.
    async fn capture(&self, memory: bool) -> Result<Capture, String>;

    /// Ends it, and waits until nothing of it is left.
    async fn close(self: Box<Self>);
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
