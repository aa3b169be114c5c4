//! Images that sandboxes start from without a template.

use std::io;
use std::path::PathBuf;

use aenv_image::{ImageConfig, ImportError};
use aenv_model::Bytes;
use tokio_util::sync::CancellationToken;

use crate::build::ImageRequest;
use crate::files::RootfsLease;
use crate::seams::ImportImage;

/// An image that a sandbox can start from.
#[derive(Debug)]
pub struct ReadyImage {
    /// Its root file system.
    pub rootfs: PathBuf,
    /// Keeps `rootfs` in place.
    pub lease: RootfsLease,
    /// Virtual size of the root file system.
    pub disk_size: Bytes,
    /// The image's own settings.
    pub config: ImageConfig,
}

/// Why there is no such image here.
#[derive(Debug, thiserror::Error)]
pub enum ImageProblem {
    /// The node has no place for it.
    #[error("make a directory for the image")]
    Directory(#[source] io::Error),
    /// It could not be had.
    #[error(transparent)]
    Import(#[from] ImportError),
}

pub(crate) async fn import(
    importer: &dyn ImportImage,
    request: &ImageRequest,
    lease: RootfsLease,
    cancel: CancellationToken,
) -> Result<ReadyImage, ImageProblem> {
    let rootfs = lease.rootfs();
    if let Some(dir) = rootfs.parent() {
        std::fs::create_dir_all(dir).map_err(ImageProblem::Directory)?;
    }
    let credentials = request.credentials.clone();
    let nobody = |_| {};
    let imported = importer.import(&request.reference, credentials, &rootfs, lease.owner(), &nobody, cancel).await?;
    Ok(ReadyImage { rootfs, lease, disk_size: imported.size, config: imported.config })
}
