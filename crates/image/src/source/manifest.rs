//! Manifests and indexes. OCI's and Docker's (schema 2) differ in media types only.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;

use super::MAX_METADATA;
use crate::digest::Digest;
use crate::error::ImportError;

/// What registries are told we understand.
pub(super) const ACCEPTED: &[&str] = &[
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
/// Indexes may lie in indexes; nobody nests them deeper than this.
pub(super) const MAX_NESTING: usize = 4;
/// The annotation that holds a tag in a layout's index.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// A reference to a blob or manifest by content.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default)]
    pub(super) artifact_type: Option<String>,
    #[serde(default)]
    platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

impl Descriptor {
    /// The digest, checked.
    pub(super) fn digest(&self, image: &str) -> Result<Digest, ImportError> {
        self.digest.parse().map_err(|error| invalid(image, format!("its manifest: {error}")))
    }

    /// The tag that a layout's index gives it.
    pub(super) fn tag(&self) -> Option<&str> {
        self.annotation(REF_NAME)
    }

    pub(super) fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(key).map(String::as_str)
    }

    pub(super) fn annotation_keys(&self) -> impl Iterator<Item = &str> {
        self.annotations.iter().flatten().map(|(key, _)| key.as_str())
    }
}

/// What runs an image.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Platform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
}

impl Platform {
    /// This machine. Go's names for architectures, as the specification wants.
    pub(crate) fn host() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        Self { os: "linux".to_owned(), architecture: architecture.to_owned() }
    }

    /// Whether an image for `os` and `architecture` runs here. What is left out is taken to fit.
    pub(super) fn check(&self, image: &str, os: Option<&str>, architecture: Option<&str>) -> Result<(), ImportError> {
        let said = |text: Option<&str>, default: &str| match text {
            None | Some("") => default.to_owned(),
            Some(text) => text.to_owned(),
        };
        let found = Self { os: said(os, &self.os), architecture: said(architecture, &self.architecture) };
        if found == *self {
            return Ok(());
        }
        Err(ImportError::WrongArchitecture {
            image: image.to_owned(),
            wanted: self.to_string(),
            found: found.to_string(),
        })
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)
    }
}

/// What a manifest's bytes are.
#[derive(Debug)]
pub(super) enum Manifest {
    Image(ImageManifest),
    Index(Vec<Descriptor>),
}

/// One image's parts.
#[derive(Debug)]
pub(crate) struct ImageManifest {
    /// What the image is made for, if not for the usual.
    pub(super) artifact_type: Option<String>,
    pub(super) config: Descriptor,
    /// Lowest first.
    pub(super) layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    schema_version: Option<u32>,
    artifact_type: Option<String>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
}

impl Manifest {
    /// Reads a manifest or index. What the layers are is not looked at: see [`classify`](super::kind::classify).
    pub(super) fn parse(image: &str, data: &[u8]) -> Result<Self, ImportError> {
        let raw: Raw = serde_json::from_slice(data)
            .map_err(|error| invalid(image, format!("its manifest is malformed: {error}")))?;
        if raw.schema_version.is_some_and(|version| version != 2) {
            return Err(invalid(
                image,
                "its manifest has a schema older than 2; push it again with a current tool".into(),
            ));
        }
        match raw {
            Raw { manifests: Some(manifests), layers: None, .. } => Ok(Self::Index(manifests)),
            Raw { config: Some(config), layers: Some(layers), manifests: None, artifact_type, .. } => {
                for layer in &layers {
                    layer.digest(image)?;
                }
                config.digest(image)?;
                if config.size > MAX_METADATA {
                    return Err(invalid(image, format!("its configuration takes {} bytes", config.size)));
                }
                Ok(Self::Image(ImageManifest { artifact_type, config, layers }))
            }
            _ => Err(invalid(image, "its manifest is neither an image nor an index".into())),
        }
    }
}

/// The manifest of an index that this machine runs. Attestations and the like are for no platform.
pub(super) fn choose(image: &str, manifests: &[Descriptor]) -> Result<Descriptor, ImportError> {
    // Whatever an index says of its only entry, the image's configuration says it too.
    if let [only] = manifests {
        return Ok(only.clone());
    }
    let host = Platform::host();
    if let Some(found) = manifests.iter().find(|entry| entry.platform.as_ref() == Some(&host)) {
        return Ok(found.clone());
    }
    let mut found: Vec<String> =
        manifests.iter().filter_map(|entry| Some(entry.platform.as_ref()?.to_string())).collect();
    found.retain(|platform| platform != "unknown/unknown");
    found.dedup();
    let found = if found.is_empty() { "no platform".to_owned() } else { found.join(", ") };
    Err(ImportError::WrongArchitecture { image: image.to_owned(), wanted: host.to_string(), found })
}

pub(super) fn invalid(image: &str, problem: String) -> ImportError {
    ImportError::Invalid { image: image.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:0000000000000000000000000000000000000000000000000000000000000000";

    fn index(platforms: &[&str]) -> Vec<Descriptor> {
        platforms
            .iter()
            .map(|platform| {
                let (os, architecture) = platform.split_once('/').unwrap();
                serde_json::from_value(serde_json::json!({"mediaType": "m", "digest": DIGEST, "size": 1,
                    "platform": {"os": os, "architecture": architecture, "variant": "v8"}}))
                .unwrap()
            })
            .collect()
    }

    #[test]
    fn the_hosts_platform_is_chosen_whatever_the_order() {
        let host = Platform::host().to_string();
        let chosen = choose("x", &index(&["windows/amd64", "unknown/unknown", &host])).unwrap();
        assert_eq!(chosen.platform.unwrap().to_string(), host);
    }

    #[test]
    fn a_missing_platform_is_told_with_those_there_are() {
        let error = choose("x", &index(&["linux/s390x", "unknown/unknown", "linux/riscv64"])).unwrap_err();
        let host = Platform::host();
        assert_eq!(error.to_string(), format!("image x is for linux/s390x, linux/riscv64, this node runs {host}"));
    }

    #[test]
    fn the_only_entry_is_taken_as_it_is() {
        assert_eq!(choose("x", &index(&["linux/s390x"])).unwrap().digest, DIGEST);
        let bare = serde_json::from_value(serde_json::json!({"digest": DIGEST, "size": 1})).unwrap();
        assert_eq!(choose("x", &[bare]).unwrap().digest, DIGEST);
    }

    #[test]
    fn what_is_neither_image_nor_index_is_refused() {
        let descriptor = format!(r#"{{"mediaType":"c","digest":"{DIGEST}","size":2}}"#);
        let image = format!(r#"{{"schemaVersion":2,"config":{descriptor},"layers":[{descriptor}]}}"#);
        assert!(matches!(Manifest::parse("x", image.as_bytes()), Ok(Manifest::Image(_))));
        for bad in [
            r#"{"schemaVersion":1,"fsLayers":[]}"#,
            "{}",
            "[]",
            &format!(r#"{{"schemaVersion":2,"config":{descriptor}}}"#),
            &image.replace(DIGEST, "sha256:0"),
            &image.replace(r#""size":2"#, r#""size":5000000"#),
        ] {
            assert!(Manifest::parse("x", bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
