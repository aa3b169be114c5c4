//! Looking at an image without importing it.

use std::io;
use std::sync::Arc;

use aenv_block_source::Credentials as BlobCredentials;
use aenv_model::Bytes;
use tokio_util::sync::CancellationToken;

use crate::credentials::Credentials;
use crate::error::ImportError;
use crate::image_config::ImageConfig;
use crate::importer::Importer;
use crate::reference::ImageReference;
use crate::source::{Blob, Content, Folder, resolve_archive, resolve_layout, validate_native};

/// What an import of an image would find.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageInfo {
    /// As [`Imported::digest`](crate::Imported::digest).
    pub digest: String,
    /// What it says about running it.
    pub config: ImageConfig,
    /// What it is made of, lowest first.
    pub layers: Vec<LayerInfo>,
    /// How a native image is read; `None` for an image of files.
    pub native: Option<NativeInfo>,
}

/// One layer of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerInfo {
    /// Of the blob. Layers of archives that were made by old tools have none.
    pub digest: Option<String>,
    /// Of the blob.
    pub size: Bytes,
}

/// How a native image is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NativeInfo {
    /// `https://HOST/v2/REPOSITORY/blobs`, or with `http`; `None` if the blobs are local.
    pub repo_blob_url: Option<String>,
    /// Size of the disk.
    pub virtual_size: Bytes,
}

impl Importer {
    /// Finds an image as an import would, and looks whether it is usable: layers of files are left where they are, those of
    /// a native image are opened.
    ///
    /// Errors: see [`ImportError::kind`].
    /// Cancel safety: nothing is left but work that ends by itself.
    pub async fn inspect(
        &self,
        reference: &ImageReference,
        credentials: Option<Credentials>,
    ) -> Result<ImageInfo, ImportError> {
        let image = reference.to_string();
        let cancel = CancellationToken::new();
        let _guard = cancel.clone().drop_guard();
        let mut keys = BlobCredentials::Anonymous;
        // What a compressed archive holds, for as long as it is looked at.
        let mut scratch = None;
        let resolved = match reference {
            ImageReference::Registry(name) => {
                let (resolved, registry) = self.resolver().find(name, credentials).await?;
                keys = registry.credentials();
                resolved
            }
            ImageReference::OciLayout { path, tag } => {
                let (folder, tag, image) = (Folder(path.clone()), tag.clone(), image.clone());
                blocking(move || resolve_layout(&folder, &image, tag.as_deref())).await?
            }
            ImageReference::DockerArchive { path, tag } => {
                let (path, tag, image, cancel) = (path.clone(), tag.clone(), image.clone(), cancel.clone());
                let dir = tempfile::tempdir()
                    .map_err(|source| ImportError::io("create a directory in", &std::env::temp_dir(), source))?;
                let to = scratch.insert(dir).path().join("archive.tar");
                let pass = move || if cancel.is_cancelled() { Err(io::Error::other("cancelled")) } else { Ok(()) };
                blocking(move || resolve_archive(&path, &to, &image, tag.as_deref(), &mut { pass })).await?
            }
        };
        self.resolver().admit(&image, &resolved)?;
        let (layers, native) = match &resolved.content {
            Content::Standard(layers) => (layers.iter().map(|layer| info(&layer.blob)).collect(), None),
            Content::Native(native) => {
                let layers = native.layers.iter().map(|layer| info(&layer.blob)).collect();
                let repo_blob_url = native.repository.as_ref().map(|repository| repository.blob_url.clone());
                let (native, patience) = (native.clone(), self.resolver().config.patience);
                let validate = move || validate_native(&image, &native, Arc::new(keys), patience, &cancel);
                let size = blocking(validate).await?;
                (layers, Some(NativeInfo { repo_blob_url, virtual_size: size }))
            }
        };
        Ok(ImageInfo { digest: resolved.digest.to_string(), config: resolved.file.into_config(), layers, native })
    }
}

fn info(blob: &Blob) -> LayerInfo {
    let digest = match blob {
        Blob::Remote(descriptor) => Some(descriptor.digest.clone()),
        Blob::Local { digest, .. } => digest.as_ref().map(ToString::to_string),
    };
    LayerInfo { digest, size: Bytes(blob.size()) }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ImportError> + Send + 'static,
) -> Result<T, ImportError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(ImportError::Cancelled), // the runtime is going down
    }
}
