//! What `aenv-blockd --config FILE` reads. Here, because whoever starts a daemon writes it.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The daemon's configuration, a TOML file. Unknown keys are warned of. Paths should be absolute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlockdConfig {
    /// Unix socket to listen on.
    pub socket: PathBuf,
    /// What must survive a restart of the host: which devices there are. One daemon per directory.
    pub state_dir: PathBuf,
    /// What need not: without ublk, devices are files below `devices` in it. One daemon per directory.
    pub run_dir: PathBuf,
    /// Which way devices reach the kernel.
    #[serde(default)]
    pub export: ExportChoice,
    /// What is logged: a level (`error`, `warn`, `info`, `debug`, `trace`, `off`), or a filter as in `RUST_LOG`.
    #[serde(default = "defaults::log")]
    pub log: String,
    /// TCP address for metrics, besides `/metrics` on the socket. Off if empty.
    #[serde(default, with = "address", skip_serializing_if = "Option::is_none")]
    pub metrics_addr: Option<SocketAddr>,
    /// Layers of one device that are opened at a time.
    #[serde(default = "defaults::open_threads")]
    pub open_threads: usize,
    /// Keeping stacks of layers shallow.
    #[serde(default)]
    pub compaction: CompactionSettings,
    /// Blocks of remote layers on the host's disk.
    #[serde(default)]
    pub cache: CacheSettings,
    /// Where remote layers come from.
    #[serde(default)]
    pub registry: RegistrySettings,
    /// Where layers of `s3://BUCKET/FOLDER` come from.
    #[serde(default)]
    pub objects: ObjectStoreSettings,
    /// Whole remote layers into the cache, in the background. A device's config may say otherwise.
    #[serde(default)]
    pub download: DownloadSettings,
    /// Replaying the traces of earlier starts.
    #[serde(default)]
    pub prefetch: PrefetchSettings,
}

/// Which way devices reach the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExportChoice {
    /// ublk where the kernel has what it takes, else FUSE.
    #[default]
    Auto,
    /// Files on a FUSE mount.
    Fuse,
    /// ublk block devices.
    Ublk,
}

/// `[compaction]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CompactionSettings {
    /// Layers below an upper, at most: beyond, those that restacks made are merged into one.
    pub max_depth: usize,
    /// MiB a second that a merge writes, at most; 0 for no bound.
    pub max_mib_per_sec: u64,
}

impl Default for CompactionSettings {
    fn default() -> Self {
        Self { max_depth: 32, max_mib_per_sec: 64 }
    }
}

/// `[cache]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheSettings {
    /// Its directory; `cache` in `state_dir` if not given. One daemon per directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
    /// MiB of blocks it may keep.
    pub size_mib: u64,
}

impl Default for CacheSettings {
    fn default() -> Self {
        Self { dir: None, size_mib: 10 << 10 }
    }
}

/// `[registry]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegistrySettings {
    /// Docker's `config.json` with credentials, or its directory. `$DOCKER_CONFIG`, else `~/.docker`, if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub docker_config: Option<PathBuf>,
    /// Hosts (`HOST` or `HOST:PORT`) that are spoken to without TLS, whatever a URL says.
    pub plain_http: Vec<String>,
    /// Seconds for which a failing read is repeated before a guest sees an I/O error.
    pub patience_secs: u64,
}

impl Default for RegistrySettings {
    fn default() -> Self {
        Self { docker_config: None, plain_http: Vec::new(), patience_secs: 30 }
    }
}

/// `[objects]`
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ObjectStoreSettings {
    /// `https://HOST[:PORT]` of an S3-compatible service. None if empty.
    pub endpoint: String,
    /// Its region.
    pub region: String,
    /// Where in a URL the bucket is.
    pub addressing_style: ObjectAddressing,
    /// A command that prints credentials as JSON; goes before the keys below. Without either, requests are not signed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credential_process: Option<Secret>,
    /// The name of a key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_key_id: Option<String>,
    /// The key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_key_secret: Option<Secret>,
    /// What comes with a key that was given for a while.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_token: Option<Secret>,
}

/// Where in a URL the bucket is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectAddressing {
    /// As the service wants it.
    #[default]
    Auto,
    /// Before the host.
    Virtual,
    /// In the path.
    Path,
}

/// A text that is not shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// `[download]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DownloadSettings {
    /// Whether whole layers are fetched.
    pub enable: bool,
    /// Seconds after the device was opened.
    pub delay_secs: u32,
    /// Up to this many seconds more, at random.
    pub delay_extra_secs: u32,
    /// MB a second; 0 for no bound.
    pub max_mb_per_sec: u32,
    /// How often a download is begun.
    pub attempts: u32,
    /// Layers at a time, for all devices.
    pub concurrency: usize,
}

impl Default for DownloadSettings {
    fn default() -> Self {
        Self { enable: false, delay_secs: 300, delay_extra_secs: 30, max_mb_per_sec: 100, attempts: 5, concurrency: 8 }
    }
}

/// `[prefetch]`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PrefetchSettings {
    /// Reads at a time; 0 to replay no traces.
    pub concurrency: usize,
}

impl Default for PrefetchSettings {
    fn default() -> Self {
        Self { concurrency: 16 }
    }
}

impl BlockdConfig {
    /// A configuration with defaults for everything that has one.
    pub fn new(socket: impl Into<PathBuf>, state_dir: impl Into<PathBuf>, run_dir: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            state_dir: state_dir.into(),
            run_dir: run_dir.into(),
            export: ExportChoice::default(),
            log: defaults::log(),
            metrics_addr: None,
            open_threads: defaults::open_threads(),
            compaction: CompactionSettings::default(),
            cache: CacheSettings::default(),
            registry: RegistrySettings::default(),
            objects: ObjectStoreSettings::default(),
            download: DownloadSettings::default(),
            prefetch: PrefetchSettings::default(),
        }
    }

    /// As the text of a file.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }

    /// Where the block cache is.
    #[must_use]
    pub fn cache_dir(&self) -> PathBuf {
        self.cache.dir.clone().unwrap_or_else(|| self.state_dir.join("cache"))
    }

    /// Where devices are files.
    #[must_use]
    pub fn mount_point(&self) -> PathBuf {
        self.run_dir.join("devices")
    }

    /// How long a failing read is repeated.
    #[must_use]
    pub fn patience(&self) -> Duration {
        Duration::from_secs(self.registry.patience_secs)
    }

    /// The first key with a value that cannot be, and what is wrong with it.
    #[must_use]
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        let relative = |path: &Path| path.is_relative();
        let checks = [
            (relative(&self.socket), "socket", "must be an absolute path"),
            (relative(&self.state_dir), "state_dir", "must be an absolute path"),
            (relative(&self.run_dir), "run_dir", "must be an absolute path"),
            (self.open_threads == 0, "open_threads", "must be at least 1"),
            (self.compaction.max_depth == 0, "compaction.max_depth", "must be at least 1"),
            (self.compaction.max_depth > 254, "compaction.max_depth", "must be at most 254, the format's limit"),
            (self.download.concurrency == 0, "download.concurrency", "must be at least 1"),
        ];
        checks.into_iter().find(|(bad, _, _)| *bad).map(|(_, key, problem)| (key, problem))
    }
}

mod defaults {
    pub(super) fn log() -> String {
        "info".to_owned()
    }

    /// Most of the time, a thread waits for a registry.
    pub(super) fn open_threads() -> usize {
        16
    }
}

/// An address, or an empty text for none.
mod address {
    use std::net::SocketAddr;

    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(address: &Option<SocketAddr>, to: S) -> Result<S::Ok, S::Error> {
        match address {
            Some(address) => to.collect_str(address),
            None => to.serialize_str(""),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
        let text = String::deserialize(from)?;
        if text.trim().is_empty() { Ok(None) } else { text.trim().parse().map(Some).map_err(D::Error::custom) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_as_the_same() {
        let mut config = BlockdConfig::new("/run/s", "/var/s", "/run/d");
        assert_eq!(toml::from_str::<BlockdConfig>(&config.to_toml().unwrap()).unwrap(), config);
        config.metrics_addr = Some("127.0.0.1:9103".parse().unwrap());
        config.cache.dir = Some("/cache".into());
        config.registry.plain_http = vec!["localhost:5000".to_owned()];
        assert_eq!(toml::from_str::<BlockdConfig>(&config.to_toml().unwrap()).unwrap(), config);
        assert_eq!(config.problem(), None);
    }

    #[test]
    fn three_paths_are_enough_and_an_empty_address_is_none() {
        let text = "socket = '/s'\nstate_dir = '/t'\nrun_dir = 'r'\nmetrics_addr = ' '\n";
        let config: BlockdConfig = toml::from_str(text).unwrap();
        assert_eq!(config, BlockdConfig::new("/s", "/t", "r"));
        assert_eq!(config.problem(), Some(("run_dir", "must be an absolute path")));
    }
}
