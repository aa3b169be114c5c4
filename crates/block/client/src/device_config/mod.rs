//! overlaybd's image config: what a device is made of, one JSON file a device.
//!
//! ```json
//! {
//!   "repoBlobUrl": "https://HOST/v2/REPOSITORY/blobs",
//!   "lowers": [{ "digest": "sha256:…", "size": 4096, "dir": "layers/0" }, { "file": "base.commit" }],
//!   "upper": { "mode": "hybridLogStructured", "data": "upper.data", "index": "upper.index" },
//!   "resultFile": "result", "download": { "enable": true }, "recordTracePath": "trace"
//! }
//! ```
//!
//! Unknown keys are ignored; an absent key, `null` and an empty string mean the same.

mod raw;

use std::io;
use std::path::{Component, Path, PathBuf};

use aenv_block_overlaybd::{LocalFile, Mode, Source as _};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use self::raw::Raw;

/// Lowers of one device, at most.
const MAX_LOWERS: usize = 256;

/// What a device is made of. One that was parsed keeps the format's rules; [`check`](Self::check) tells of one that was put
/// together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Raw", into = "Raw")]
pub struct DeviceConfig {
    /// Layers, bottom first.
    pub lowers: Vec<Lower>,
    /// The writable upper. Without one, the device is read-only.
    pub upper: Option<UpperConfig>,
    /// Where blobs are, unless a lower says otherwise: `https://HOST/v2/REPOSITORY/blobs`.
    pub repo_blob_url: Option<String>,
    /// Where to write `success` or `failed:…` once the device was opened.
    pub result_file: Option<PathBuf>,
    /// Changes to how blobs are downloaded in the background.
    pub download: DownloadConfig,
    /// The last lower is no layer: its directory holds the trace of a start.
    pub acceleration_layer: bool,
    /// Where to write the trace of this start.
    pub record_trace_path: Option<PathBuf>,
}

/// A layer. The first of these that is there counts: `file`; `overlaybd.commit`, then `overlaybd.sealed` in `dir`; the blob
/// `digest`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lower {
    /// A file of this host.
    pub file: Option<PathBuf>,
    /// A directory in which a file may be.
    pub dir: Option<PathBuf>,
    /// Digest of the blob.
    pub digest: Option<String>,
    /// Length of the blob; saves asking for it.
    pub size: Option<u64>,
    /// Where this blob is, if not where the others are.
    pub repo_blob_url: Option<String>,
    /// UUID of the layer.
    pub uuid: Option<Uuid>,
}

/// Files of a writable upper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpperConfig {
    /// Its layout.
    pub mode: Mode,
    /// The data file.
    pub data: PathBuf,
    /// The index file; none for sparse.
    pub index: Option<PathBuf>,
}

/// How whole blobs come into the cache in the background. What is not said here is up to the daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DownloadConfig {
    /// Whether they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enable: Option<bool>,
    /// Seconds to wait before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay: Option<u32>,
    /// Up to this many seconds more, at random.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay_extra: Option<u32>,
    /// MB a second; 0 for no bound.
    #[serde(rename = "maxMBps", skip_serializing_if = "Option::is_none")]
    pub max_mbps: Option<u32>,
    /// How often a download is begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub try_cnt: Option<u32>,
    /// Bytes of one request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u64>,
    /// Requests at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u32>,
    /// Blocks on their way at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_inflight_blocks: Option<u32>,
    /// Blobs at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_concurrent_files: Option<u32>,
}

/// A configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceConfigError {
    /// The file cannot be read.
    #[error("read device config {path}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("write device config {path}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no JSON, or a value is of the wrong type.
    #[error("device config: {field}: {problem}")]
    Json {
        /// Where in the JSON; `.` for all of it.
        field: String,
        /// What is wrong.
        problem: String,
    },
    /// A value, or the lack of one, makes no sense.
    #[error("device config: {field}: {problem}")]
    Field {
        /// Which key, as in the JSON: `lowers[3].digest`.
        field: String,
        /// What is wrong.
        problem: String,
    },
}

/// Longest file that is read as one: thousands of layers have room in it.
const LONGEST: u64 = 16 << 20;

fn read(path: &Path) -> io::Result<String> {
    let file = LocalFile::open(path)?;
    if file.size() > LONGEST {
        let problem = format!("{} bytes are more than a device's configuration has", file.size());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    let mut text = vec![0; file.size() as usize];
    file.read_at(0, &mut text)?;
    String::from_utf8(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

impl DeviceConfig {
    /// Reads `path`, a regular file; relative paths in it are those from its directory.
    pub fn load(path: &Path) -> Result<Self, DeviceConfigError> {
        let text = read(path).map_err(|source| DeviceConfigError::Read { path: path.to_owned(), source })?;
        let mut config = Self::parse(&text)?;
        config.resolve(path.parent().unwrap_or(Path::new("")));
        Ok(config)
    }

    /// Reads JSON. Paths stay as they are.
    pub fn parse(text: &str) -> Result<Self, DeviceConfigError> {
        let mut json = serde_json::Deserializer::from_str(text);
        let raw: Raw = serde_path_to_error::deserialize(&mut json).map_err(|error| DeviceConfigError::Json {
            field: error.path().to_string(),
            problem: error.inner().to_string(),
        })?;
        json.end().map_err(|error| DeviceConfigError::Json { field: ".".to_owned(), problem: error.to_string() })?;
        raw.try_into()
    }

    /// Replaces the file at `path`, whole or not at all, with permission bits `mode`.
    pub fn save(&self, path: &Path, mode: u32) -> Result<(), DeviceConfigError> {
        aenv_durable::atomic_write(path, self.to_json().as_bytes(), mode)
            .map_err(|source| DeviceConfigError::Write { path: path.to_owned(), source })
    }

    /// As JSON for people and files.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Maps with text for keys and plain values always become JSON.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Makes relative paths those from `base`, and takes `.` and `..` out of them without looking at the filesystem. What
    /// holds `://` stays.
    pub fn resolve(&mut self, base: &Path) {
        let resolve = |path: &mut PathBuf| {
            if !path.to_string_lossy().contains("://") {
                *path = clean(&base.join(&*path));
            }
        };
        for lower in &mut self.lowers {
            lower.file.iter_mut().chain(&mut lower.dir).for_each(resolve);
        }
        if let Some(upper) = &mut self.upper {
            resolve(&mut upper.data);
            upper.index.iter_mut().for_each(resolve);
        }
        self.result_file.iter_mut().chain(&mut self.record_trace_path).for_each(resolve);
    }

    /// Where the blob of a lower is, if anywhere.
    #[must_use]
    pub fn blob_url<'a>(&'a self, lower: &'a Lower) -> Option<&'a str> {
        lower.repo_blob_url.as_deref().or(self.repo_blob_url.as_deref())
    }

    /// The lowers that are layers: all, but for an acceleration layer.
    #[must_use]
    pub fn layers(&self) -> &[Lower] {
        match self.lowers.split_last() {
            Some((_, layers)) if self.acceleration_layer => layers,
            _ => &self.lowers,
        }
    }

    /// Whether it keeps the format's rules. No file is looked at.
    pub fn check(&self) -> Result<(), DeviceConfigError> {
        if self.lowers.is_empty() && self.upper.is_none() {
            return Err(field("lowers", "neither lowers nor an upper"));
        }
        if self.lowers.len() > MAX_LOWERS {
            return Err(field("lowers", format!("{} of them, more than {MAX_LOWERS}", self.lowers.len())));
        }
        for (number, lower) in self.lowers.iter().enumerate() {
            let own = |key: &str| format!("lowers[{number}]{key}");
            if lower.file.is_none() && lower.dir.is_none() && lower.digest.is_none() {
                return Err(field(own(""), "needs a file, a dir or a digest"));
            }
            if lower.file.is_none() && lower.digest.is_some() && self.blob_url(lower).is_none() {
                return Err(field(own(".repoBlobUrl"), "a layer with a digest and no file needs it, here or for all"));
            }
        }
        if let Some(upper) = &self.upper {
            match (upper.mode, &upper.index) {
                (Mode::Log | Mode::Hybrid, None) => return Err(field("upper.index", "needed unless mode is sparse")),
                (Mode::Sparse, Some(_)) => return Err(field("upper.index", "a sparse upper has none")),
                _ => {}
            }
        }
        if self.acceleration_layer && self.record_trace_path.is_some() {
            return Err(field("recordTracePath", "excluded by accelerationLayer"));
        }
        self.download.check()
    }
}

impl DownloadConfig {
    /// Bytes of one request, where nothing else is said.
    const BLOCK_SIZE: u64 = 16 << 20;
    const MAX_BLOCK_SIZE: u64 = 64 << 20;
    const MAX_CONCURRENCY: u32 = 16;
    /// Bytes that requests of one download may hold in memory.
    const MAX_SCRATCH: u64 = 256 << 20;

    fn check(&self) -> Result<(), DeviceConfigError> {
        let (block_size, concurrency) = (self.block_size.unwrap_or(Self::BLOCK_SIZE), self.concurrency.unwrap_or(1));
        if !(1..=Self::MAX_CONCURRENCY).contains(&concurrency) {
            return Err(field(
                "download.concurrency",
                format!("{concurrency} is not within 1 to {}", Self::MAX_CONCURRENCY),
            ));
        }
        if !(1..=Self::MAX_BLOCK_SIZE).contains(&block_size) {
            return Err(field(
                "download.blockSize",
                format!("{block_size} is not within 1 to {}", Self::MAX_BLOCK_SIZE),
            ));
        }
        if block_size * u64::from(concurrency) > Self::MAX_SCRATCH {
            let problem = format!("{block_size} bytes {concurrency} times are more than {}", Self::MAX_SCRATCH);
            return Err(field("download.blockSize", problem));
        }
        Ok(())
    }
}

fn field(field: impl Into<String>, problem: impl Into<String>) -> DeviceConfigError {
    DeviceConfigError::Field { field: field.into(), problem: problem.into() }
}

/// Takes `.` and `..` out of a path by its text alone.
fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => match cleaned.components().next_back() {
                Some(Component::Normal(_)) => drop(cleaned.pop()),
                Some(Component::RootDir) => {}
                _ => cleaned.push(".."),
            },
            other => cleaned.push(other),
        }
    }
    cleaned
}
