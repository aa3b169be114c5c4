//! What an image's layers are: tars of files, which are converted, or overlaybd blobs, which are opened where they are.
//!
//! Layer by layer, the first row that fits decides:
//!
//! | a layer with | is |
//! | --- | --- |
//! | marks of turbo (once fastoci): an annotation's key or the version | unsupported: it points into another blob |
//! | `overlaybd` or `zfile` as a word of its media type | native |
//! | a media type other than those of plain, gzip or zstd tars | unsupported |
//! | a `blob-digest` that is its own digest | native |
//! | a `blob-digest` that is another | unsupported: the blob is inside a tar of files |
//! | anything else | standard |
//!
//! An image is what all of its layers are. The order matters: a turbo layer looks native by its digest, and an ordinary
//! reader would take its pointers for data and serve wrong bytes, so it has to be refused here.

use super::manifest::{Descriptor, ImageManifest};

/// What all annotations of overlaybd begin with.
const OVERLAYBD: &str = "containerd.io/snapshot/overlaybd/";
/// What the rest of a key begins with, and what a version contains, if a layer only points into another blob.
const TURBO: [(&str, &str); 2] = [("turbo-oci/", "turbo"), ("fastoci/", "fastoci")];
/// The artifact type of an image of such layers.
const TURBO_ARTIFACT: &str = "application/vnd.containerd.overlaybd.turbo.v1+json";
/// What a media type contains if its blobs are overlaybd's.
const NATIVE: [&str; 6] = [".overlaybd", "/overlaybd", "+overlaybd", ".zfile", "/zfile", "+zfile"];
/// Tars of files, as the specifications of OCI and Docker call them. Foreign layers, encrypted ones and the parts of
/// things that are no container images are not among them.
const TARS: [&str; 5] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
];

/// What an image is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ImageKind {
    /// Tars of files.
    Standard,
    /// overlaybd blobs.
    Native,
    /// Something we can't use, in words that say which layer and why.
    Unsupported(String),
    /// Nothing at all.
    Empty,
}

/// Tells what an image is made of.
pub(crate) fn classify(image: &ImageManifest) -> ImageKind {
    if image.artifact_type.as_deref() == Some(TURBO_ARTIFACT) {
        return ImageKind::Unsupported("it is a turbo image, whose layers only point into another image's".to_owned());
    }
    let total = image.layers.len();
    let mut of_image = None;
    for (index, layer) in image.layers.iter().enumerate() {
        let number = index + 1;
        let kind = match of_layer(layer) {
            Ok(kind) => kind,
            Err(problem) => {
                let problem = format!("layer {number} of {total} ({}) {problem}", layer.digest);
                return ImageKind::Unsupported(problem);
            }
        };
        match of_image {
            None => of_image = Some(kind),
            Some(before) if before == kind => {}
            Some(before) => {
                let problem = format!(
                    "layer {number} of {total} ({}) is {}, those below are {}: an image has to be of one kind",
                    layer.digest,
                    kind.one(),
                    before.many()
                );
                return ImageKind::Unsupported(problem);
            }
        }
    }
    match of_image {
        None => ImageKind::Empty,
        Some(LayerKind::Standard) => ImageKind::Standard,
        Some(LayerKind::Native) => ImageKind::Native,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LayerKind {
    Standard,
    Native,
}

impl LayerKind {
    fn one(self) -> &'static str {
        match self {
            Self::Standard => "a tar of files",
            Self::Native => "an overlaybd blob",
        }
    }

    fn many(self) -> &'static str {
        match self {
            Self::Standard => "tars of files",
            Self::Native => "overlaybd blobs",
        }
    }
}

/// What one layer is, or in words why we can't use it.
fn of_layer(layer: &Descriptor) -> Result<LayerKind, String> {
    let annotation = |name: &str| layer.annotation(&format!("{OVERLAYBD}{name}"));
    let version = annotation("version").unwrap_or_default();
    let marked = |name: &str| {
        layer.annotation_keys().any(|key| key.strip_prefix(OVERLAYBD).is_some_and(|key| key.starts_with(name)))
    };
    if TURBO.iter().any(|(key, word)| marked(key) || version.contains(word)) {
        return Err("is a turbo layer, which only points into another blob".to_owned());
    }
    let media_type = &layer.media_type;
    if NATIVE.iter().any(|word| media_type.contains(word)) {
        return Ok(LayerKind::Native);
    }
    if !TARS.contains(&media_type.as_str()) {
        return Err(format!("is of media type {media_type:?}, which holds no files to unpack"));
    }
    match annotation("blob-digest") {
        None => Ok(LayerKind::Standard),
        Some(blob) if blob == layer.digest => Ok(LayerKind::Native),
        Some(blob) => Err(format!("has the overlaybd blob {blob} inside a tar, which can't be read in place")),
    }
}

/// Whether a layer of a native image holds no disk but what helps to read the others: a trace of accesses.
pub(super) fn is_acceleration(layer: &Descriptor) -> bool {
    layer.annotation(&format!("{OVERLAYBD}acceleration-layer")) == Some("yes")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::manifest::Manifest;
    use super::*;

    fn digest(character: char) -> String {
        format!("sha256:{}", character.to_string().repeat(64))
    }

    fn classified(manifest: &Value) -> ImageKind {
        match Manifest::parse("x", &serde_json::to_vec(manifest).unwrap()).unwrap() {
            Manifest::Image(image) => classify(&image),
            Manifest::Index(_) => panic!("an index"),
        }
    }

    fn manifest(layers: &[(&str, Value)]) -> Value {
        let layers: Vec<Value> = layers
            .iter()
            .zip('a'..)
            .map(|((media_type, annotations), name)| {
                json!({"mediaType": media_type, "digest": digest(name), "size": 4096, "annotations": annotations})
            })
            .collect();
        json!({"schemaVersion": 2, "config": {"mediaType": "c", "digest": digest('0'), "size": 2}, "layers": layers})
    }

    #[test]
    fn images_are_told_apart_as_others_do() {
        let cases: Value = serde_json::from_str(include_str!("../../tests/fixtures/oci/classify.json")).unwrap();
        let cases = cases["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 14);
        for case in cases {
            let found = match classified(&case["manifest"]) {
                ImageKind::Standard => "standard",
                ImageKind::Native => "native",
                ImageKind::Unsupported(_) => "unsupported",
                ImageKind::Empty => "error",
            };
            assert_eq!(found, case["expect"], "{}", case["id"]);
        }
    }

    #[test]
    fn a_refusal_names_the_layer_and_the_reason() {
        const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
        let own = json!({"containerd.io/snapshot/overlaybd/blob-digest": digest('a')});
        let cases = [
            (manifest(&[(TAR, json!(null)), ("text/plain", json!(null))]), "layer 2 of 2", "text/plain"),
            (manifest(&[(TAR, own), (TAR, json!({}))]), "layer 2 of 2", "is a tar of files, those below are overlaybd"),
            (
                manifest(&[(TAR, json!({"containerd.io/snapshot/overlaybd/version": "0.1.0-turbo.oci.v1"}))]),
                "layer 1 of 1",
                "turbo",
            ),
            (manifest(&[("application/vnd.oci.image.layer.v1.tar+encrypted", json!({}))]), "layer 1 of 1", "encrypted"),
            (manifest(&[("", json!({}))]), "layer 1 of 1", "\"\""),
        ];
        for (manifest, layer, why) in cases {
            let ImageKind::Unsupported(problem) = classified(&manifest) else { panic!("{manifest}") };
            assert!(problem.contains(layer) && problem.contains(why), "{problem}");
        }
    }

    #[test]
    fn every_ordinary_compression_is_standard() {
        for media_type in TARS {
            assert_eq!(classified(&manifest(&[(media_type, json!({"a": "b"}))])), ImageKind::Standard, "{media_type}");
        }
    }
}
