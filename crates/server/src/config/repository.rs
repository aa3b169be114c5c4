//! `[snapshot]` and `[backend]`: templates and snapshots that nodes share.

use std::path::PathBuf;
use std::time::Duration;

use aenv_block_overlaybd::Algorithm;
use aenv_objects::{Addressing, S3Config, S3Credentials};
use aenv_repository::Packing;
use serde::Deserialize;

/// `[snapshot]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct SnapshotConfig {
    /// Where templates and snapshots are kept for all nodes; absent: they are this node's alone.
    pub repository_backend: Option<BackendKind>,
    /// Files of the repository on this node. Not shared with other nodes.
    pub local_cache_path: PathBuf,
    /// Pause between two looks for garbage in the repository; 0: this node does not look.
    #[serde(rename = "sweep_interval_secs", deserialize_with = "seconds")]
    pub sweep_interval: Duration,
    /// Layers on their way to an S3-compatible store.
    pub publish_compression: PublishCompressionConfig,
}

impl Default for SnapshotConfig {
    fn default() -> Self {
        Self {
            repository_backend: None,
            local_cache_path: "$AENV_HOME/snapshot-local-cache".into(),
            sweep_interval: Duration::from_secs(3600),
            publish_compression: PublishCompressionConfig::default(),
        }
    }
}

/// `[snapshot.publish_compression]`. Layers on this node stay as they are.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct PublishCompressionConfig {
    /// Whether layers are compressed when they are published to `oss`.
    pub enabled: bool,
    /// With what.
    pub algorithm: CompressionAlgorithm,
    /// Threads for each layer; the result is the same.
    pub workers: usize,
}

impl Default for PublishCompressionConfig {
    fn default() -> Self {
        Self { enabled: true, algorithm: CompressionAlgorithm::Lz4, workers: 1 }
    }
}

/// With what layers are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CompressionAlgorithm {
    /// Quick.
    Lz4,
    /// Small.
    Zstd,
}

impl PublishCompressionConfig {
    /// What the repository is told; compressed layers are in `dir` on their way.
    #[must_use]
    pub fn packing(&self, dir: PathBuf) -> Option<Packing> {
        let algorithm = match self.algorithm {
            CompressionAlgorithm::Lz4 => Algorithm::Lz4,
            CompressionAlgorithm::Zstd => Algorithm::Zstd,
        };
        self.enabled.then_some(Packing { algorithm, workers: self.workers, dir })
    }
}

/// What keeps the repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackendKind {
    /// A folder, on a file system that all nodes have.
    PosixFs,
    /// An S3-compatible store.
    Oss,
}

/// `[backend]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct BackendConfig {
    /// For `posix_fs`.
    pub posix_fs: PosixConfig,
    /// For `oss`.
    pub oss: OssConfig,
}

/// `[backend.posix_fs]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct PosixConfig {
    /// The repository is in the folder `repository` of this.
    pub snapshot_store: PathBuf,
}

impl Default for PosixConfig {
    fn default() -> Self {
        Self { snapshot_store: "$AENV_HOME/snapshot-store".into() }
    }
}

/// `[backend.oss]`.
#[derive(Clone, Deserialize)]
#[serde(default)]
pub struct OssConfig {
    /// `https://HOST[:PORT]`, or `http` for one nearby.
    pub endpoint: String,
    /// The bucket.
    pub bucket: String,
    /// Its region; services that have none take any.
    pub region: String,
    /// The folder of the bucket that the repository is in.
    pub prefix: String,
    /// A command that prints credentials, run without a shell. Takes the place of the keys below.
    #[serde(alias = "credentialProcess", alias = "credential-process")]
    pub credential_process: Option<String>,
    /// Name of a key. Without, requests are not signed.
    pub access_key_id: Option<String>,
    /// The key.
    pub access_key_secret: Option<String>,
    /// For keys that were given for a while.
    pub security_token: Option<String>,
    /// Where in a URL the bucket is; absent: as the host suggests.
    pub addressing_style: Option<AddressingStyle>,
    /// GiB of files of the repository that are kept on this node, whatever keeps the repository.
    pub cache_max_size_gb: u64,
}

impl std::fmt::Debug for OssConfig {
    /// Without secrets, which people write into commands too.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { endpoint, bucket, region, prefix, .. } = self;
        f.debug_struct("OssConfig")
            .field("endpoint", endpoint)
            .field("bucket", bucket)
            .field("region", region)
            .field("prefix", prefix)
            .finish_non_exhaustive()
    }
}

impl Default for OssConfig {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            bucket: String::new(),
            region: String::new(),
            prefix: String::new(),
            credential_process: None,
            access_key_id: None,
            access_key_secret: None,
            security_token: None,
            addressing_style: None,
            cache_max_size_gb: 10,
        }
    }
}

/// Where in a URL the bucket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressingStyle {
    /// Before the host.
    Virtual,
    /// In the path.
    Path,
}

impl OssConfig {
    /// What the store itself is told.
    #[must_use]
    pub fn store(&self) -> S3Config {
        let given = |text: &Option<String>| text.clone().filter(|text| !text.trim().is_empty());
        let credentials = match (given(&self.credential_process), given(&self.access_key_id)) {
            (Some(command), _) => S3Credentials::Process(command),
            (None, Some(access_key_id)) => S3Credentials::Static {
                access_key_id,
                secret_access_key: self.access_key_secret.clone().unwrap_or_default(),
                security_token: given(&self.security_token),
            },
            (None, None) => S3Credentials::Anonymous,
        };
        S3Config {
            prefix: self.prefix.clone(),
            credentials,
            addressing: match self.addressing_style {
                None => Addressing::Auto,
                Some(AddressingStyle::Virtual) => Addressing::Virtual,
                Some(AddressingStyle::Path) => Addressing::Path,
            },
            ..S3Config::new(&self.endpoint, &self.region, &self.bucket)
        }
    }

    /// The first key that must be set and is not.
    pub(super) fn missing(&self) -> Option<&'static str> {
        let required = [
            ("backend.oss.endpoint", &self.endpoint),
            ("backend.oss.bucket", &self.bucket),
            ("backend.oss.region", &self.region),
        ];
        required.into_iter().find(|(_, value)| value.trim().is_empty()).map(|(key, _)| key)
    }
}

fn seconds<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    u64::deserialize(deserializer).map(Duration::from_secs)
}
