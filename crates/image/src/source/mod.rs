//! Where images come from. Each source resolves a reference to a manifest's worth of blobs; bytes follow on demand.

mod docker_archive;
mod kind;
mod layout;
mod manifest;
mod native;
mod referrers;
pub(crate) mod registry;
mod resolver;
mod slice;

use std::path::Path;

use aenv_block_overlaybd as overlaybd;

pub(crate) use self::docker_archive::resolve as resolve_archive;
use self::kind::{ImageKind, classify, is_acceleration};
pub(crate) use self::layout::{Folder, resolve as resolve_layout};
pub(crate) use self::manifest::{Descriptor, Platform};
use self::manifest::{ImageManifest, invalid};
pub use self::native::LayerError;
pub(crate) use self::native::validate as validate_native;
pub(crate) use self::resolver::Resolver;
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
    /// The digest of the manifest that names the content; that of the configuration where there is no manifest.
    pub(crate) digest: Digest,
    /// How the image is run. An image that was found as a referrer has the configuration of the one it refers to.
    pub(crate) file: ImageFile,
    pub(crate) content: Content,
}

/// What a root file system is made from.
#[derive(Debug, Clone)]
pub(crate) enum Content {
    /// Tars of files, lowest first, to be unpacked.
    Standard(Vec<Layer>),
    /// overlaybd blobs, to be opened where they are.
    Native(Native),
}

/// One layer of files: its blob, and what it must be once uncompressed.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) blob: Blob,
    pub(crate) diff_id: Digest,
}

/// The layers of a native image.
#[derive(Debug, Clone)]
pub(crate) struct Native {
    /// Which repository the blobs are in; `None` if they are local.
    pub(crate) repository: Option<Repository>,
    /// Lowest first. What only helps to read them, an acceleration layer, is left out.
    pub(crate) layers: Vec<NativeLayer>,
}

/// One overlaybd blob.
#[derive(Debug, Clone)]
pub(crate) struct NativeLayer {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    pub(crate) blob: Blob,
}

/// Where blobs are read from by ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Repository {
    /// As images are named, with the host: part of a native image's identity, since its blobs stay there.
    pub(crate) name: String,
    /// `https://HOST/v2/NAME/blobs`; `http` where the host speaks no TLS.
    pub(crate) blob_url: String,
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

impl Content {
    /// What `manifest` names. `blob` tells where each of its blobs is.
    fn of(
        image: &str,
        manifest: &ImageManifest,
        file: &ImageFile,
        blob: &dyn Fn(&Descriptor) -> Result<Blob, ImportError>,
        repository: Option<Repository>,
    ) -> Result<Self, ImportError> {
        match classify(manifest) {
            ImageKind::Standard => {
                let blobs = manifest.layers.iter().map(blob).collect::<Result<_, _>>()?;
                Self::standard(image, file, blobs)
            }
            ImageKind::Native => Self::native(image, manifest, blob, repository),
            ImageKind::Unsupported(problem) => Err(ImportError::Unsupported { image: image.to_owned(), problem }),
            ImageKind::Empty => Err(invalid(image, "it has no layers".to_owned())),
        }
    }

    /// Layers of files, of which the configuration tells what they must be.
    fn standard(image: &str, file: &ImageFile, blobs: Vec<Blob>) -> Result<Self, ImportError> {
        let diff_ids = file.diff_ids().map_err(|problem| invalid(image, problem))?;
        if blobs.is_empty() {
            return Err(invalid(image, "it has no layers".to_owned()));
        }
        if blobs.len() > MAX_LAYERS {
            return Err(invalid(image, format!("it has {} layers, more than {MAX_LAYERS}", blobs.len())));
        }
        if diff_ids.len() != blobs.len() {
            let problem = format!("it has {} layers, its configuration lists {}", blobs.len(), diff_ids.len());
            return Err(invalid(image, problem));
        }
        let layers = blobs.into_iter().zip(diff_ids).map(|(blob, diff_id)| Layer { blob, diff_id });
        Ok(Self::Standard(layers.collect()))
    }

    /// Blobs that vouch for themselves: what converters write as their diff ids is no digest of theirs.
    fn native(
        image: &str,
        manifest: &ImageManifest,
        blob: &dyn Fn(&Descriptor) -> Result<Blob, ImportError>,
        repository: Option<Repository>,
    ) -> Result<Self, ImportError> {
        let layers = manifest.layers.iter().filter(|layer| !is_acceleration(layer));
        let layer = |layer: &Descriptor| {
            let (digest, blob) = (layer.digest(image)?, blob(layer)?);
            Ok(NativeLayer { digest, size: layer.size, blob })
        };
        let layers: Vec<_> = layers.map(layer).collect::<Result<_, ImportError>>()?;
        match layers.len() {
            0 => Err(invalid(image, "it has no layers that hold a disk".to_owned())),
            count if count > overlaybd::MAX_LAYERS => {
                let problem = format!("it has {count} layers, more than the {} of one disk", overlaybd::MAX_LAYERS);
                Err(ImportError::Unsupported { image: image.to_owned(), problem })
            }
            _ => Ok(Self::Native(Native { repository, layers })),
        }
    }
}

/// Reads an image's configuration, which must be for this machine.
fn read_config(image: &str, bytes: &[u8]) -> Result<ImageFile, ImportError> {
    let file: ImageFile = serde_json::from_slice(bytes)
        .map_err(|error| invalid(image, format!("its configuration is malformed: {error}")))?;
    Platform::host().check(image, file.os.as_deref(), file.architecture.as_deref())?;
    Ok(file)
}

/// A file that an image's metadata names, in a folder or an archive.
trait Files {
    /// The bytes of `name`; `None` if there is no such file.
    fn slice(&self, name: &str) -> Result<Option<Slice>, ImportError>;

    /// What `name` is in, for messages.
    fn path(&self) -> &Path;
}
