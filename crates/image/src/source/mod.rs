//! Where images come from. Each source resolves a reference to a manifest's worth of blobs; bytes follow on demand.

mod docker_archive;
mod layout;
mod manifest;
pub(crate) mod registry;
mod slice;
mod token;

use std::path::Path;

pub(crate) use self::docker_archive::resolve as resolve_archive;
pub(crate) use self::layout::{Folder, resolve as resolve_layout};
pub(crate) use self::manifest::{Descriptor, Platform};
pub(crate) use self::slice::Slice;
use crate::digest::Digest;
use crate::error::ImportError;
use crate::image_config::ImageFile;

/// Bounds on what an image may be made of. A registry is a stranger.
const MAX_METADATA: u64 = 4 << 20;
const MAX_LAYERS: usize = 1024;

/// An image that was found, and is for this machine.
#[derive(Debug)]
pub(crate) struct Resolved {
    /// The manifest's digest; that of the configuration where there is no manifest.
    pub(crate) digest: Digest,
    pub(crate) file: ImageFile,
    /// Lowest first.
    pub(crate) layers: Vec<Layer>,
}

/// One layer: its blob, and what it must be once uncompressed.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) blob: Blob,
    pub(crate) diff_id: Digest,
}

/// Where a blob is.
#[derive(Debug, Clone)]
pub(crate) enum Blob {
    /// Still in the registry.
    Remote(Descriptor),
    /// In a local file. Its digest, where it has one, is to be verified before use.
    Local { slice: Slice, digest: Option<Digest> },
}

impl Blob {
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Remote(descriptor) => descriptor.size,
            Self::Local { slice, .. } => slice.length(),
        }
    }
}

/// Puts the parts together, once they are there.
fn assemble(image: &str, digest: Digest, file: &[u8], blobs: Vec<Blob>) -> Result<Resolved, ImportError> {
    let invalid = |problem: String| ImportError::Invalid { image: image.to_owned(), problem };
    let file: ImageFile =
        serde_json::from_slice(file).map_err(|error| invalid(format!("its configuration is malformed: {error}")))?;
    Platform::host().check(image, file.os.as_deref(), file.architecture.as_deref())?;
    let diff_ids = file.diff_ids().map_err(invalid)?;
    if blobs.len() > MAX_LAYERS {
        return Err(invalid(format!("it has {} layers, more than {MAX_LAYERS}", blobs.len())));
    }
    if diff_ids.len() != blobs.len() {
        return Err(invalid(format!("it has {} layers, its configuration lists {}", blobs.len(), diff_ids.len())));
    }
    let layers = blobs.into_iter().zip(diff_ids).map(|(blob, diff_id)| Layer { blob, diff_id }).collect();
    Ok(Resolved { digest, file, layers })
}

/// A file that an image's metadata names, in a folder or an archive.
trait Files {
    /// The bytes of `name`; `None` if there is no such file.
    fn slice(&self, name: &str) -> Result<Option<Slice>, ImportError>;

    /// What `name` is in, for messages.
    fn path(&self) -> &Path;
}
