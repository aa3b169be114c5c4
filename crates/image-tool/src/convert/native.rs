//! A converted image as a native one: each layer is a blob that can be read where it lies.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use aenv_block_overlaybd::{LocalFile, Source, TarWriter, ZFileOptions, ZFileWriter};
use aenv_model::Bytes;
use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Image, oci};
use crate::input;
use crate::packing::sha256;
use crate::progress::Progress;

/// What keys about a layer begin with.
const ANNOTATION: &str = "containerd.io/snapshot/overlaybd";

/// The image that was written.
#[derive(Debug, Serialize)]
pub(super) struct Made {
    /// Of its manifest.
    pub(super) digest: String,
    pub(super) layers: Vec<MadeLayer>,
}

#[derive(Debug, Serialize)]
pub(super) struct MadeLayer {
    pub(super) digest: String,
    pub(super) size: Bytes,
}

/// Writes `image` as an OCI layout into `folder`, its layers compressed by `options`.
pub(super) fn write(image: &Image, options: ZFileOptions, folder: &Path) -> Result<Made> {
    let blobs = Blobs::new(folder)?;
    let mut layers = Vec::new();
    for (number, (path, _)) in image.layers()?.into_iter().enumerate() {
        let mut layer = blobs.layer(path, options).with_context(|| format!("compress layer {}", number + 1))?;
        layer.annotations = Some(json!({
            format!("{ANNOTATION}/blob-digest"): layer.digest,
            format!("{ANNOTATION}/blob-size"): layer.size.to_string(),
            format!("{ANNOTATION}/blob-fs-type"): "ext4",
            format!("{ANNOTATION}/version"): "0.1.0",
        }));
        layers.push(layer);
    }
    let diff_ids = layers.iter().map(|layer| layer.digest.clone()).collect();
    let config = blobs.json(oci::CONFIG, &oci::configuration(&image.imported.config, diff_ids))?;
    let manifest = json!({ "schemaVersion": 2, "mediaType": oci::MANIFEST, "config": config, "layers": layers });
    let mut manifest = blobs.json(oci::MANIFEST, &manifest)?;
    let digest = manifest.digest.clone();
    manifest.platform = Some(json!({ "architecture": oci::architecture(), "os": "linux" }));
    manifest.annotations = Some(json!({ "org.opencontainers.image.ref.name": "latest" }));
    let index = json!({ "schemaVersion": 2, "mediaType": oci::INDEX, "manifests": [manifest] });
    for (name, value) in [("oci-layout", json!({ "imageLayoutVersion": "1.0.0" })), ("index.json", index)] {
        let path = folder.join(name);
        fs::write(&path, value.to_string()).with_context(|| format!("write {}", path.display()))?;
    }
    let layers = layers.into_iter().map(|layer| MadeLayer { digest: layer.digest, size: Bytes(layer.size) });
    Ok(Made { digest, layers: layers.collect() })
}

/// The blobs of a layout.
struct Blobs<'a> {
    folder: &'a Path,
}

impl<'a> Blobs<'a> {
    fn new(folder: &'a Path) -> Result<Self> {
        let dir = folder.join("blobs/sha256");
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        Ok(Self { folder })
    }

    /// The layer at `path`, compressed and in a tar, whatever it was in before.
    fn layer(&self, path: &Path, options: ZFileOptions) -> Result<oci::Descriptor> {
        let scratch = self.folder.join("blobs/layer");
        let file = File::create(&scratch).with_context(|| format!("create {}", scratch.display()))?;
        let source = Arc::clone(input::layer(path)?.payload());
        let progress = Progress::new("compressing", source.size());
        let mut zfile = ZFileWriter::new(TarWriter::new(&file)?, options)?;
        zfile.write_source(&source, &mut progress.follow())?;
        zfile.finish()?.0.finish()?;
        drop(progress);
        file.sync_all().with_context(|| format!("write {}", scratch.display()))?;
        self.name(&scratch, oci::LAYER)
    }

    fn json(&self, media_type: &'static str, value: &Value) -> Result<oci::Descriptor> {
        let scratch = self.folder.join("blobs/json");
        fs::write(&scratch, value.to_string()).with_context(|| format!("write {}", scratch.display()))?;
        self.name(&scratch, media_type)
    }

    /// Gives a finished blob the name that follows from its content.
    fn name(&self, scratch: &Path, media_type: &'static str) -> Result<oci::Descriptor> {
        let file = LocalFile::open(scratch).with_context(|| format!("open {}", scratch.display()))?;
        let (digest, size) = (sha256(&file)?, file.size());
        let name = self.folder.join("blobs").join(digest.replace(':', "/"));
        fs::rename(scratch, &name).with_context(|| format!("rename {} to {}", scratch.display(), name.display()))?;
        Ok(oci::Descriptor { media_type, digest, size, annotations: None, platform: None })
    }
}
