//! The messages.
//!
//! ```text
//!  GET    /v1/info                            Info
//!  GET    /v1/devices                         [DeviceView]
//!  PUT    /v1/devices/{name}                  DeviceSpec → DeviceView
//!  GET    /v1/devices/{name}                  DeviceView
//!  DELETE /v1/devices/{name}?uppers=keep      (or remove) → DeviceConfig, as it was at the end
//!  POST   /v1/devices/{name}/restack          RestackRequest → RestackedView (1)
//!  POST   /v1/devices/{name}/resize           ResizeRequest → DeviceView
//!  POST   /v1/devices/{name}/flush
//!  POST   /v1/shutdown?force=false
//!  GET    /metrics                            Prometheus text
//! ```
//!
//! (1) Of what was written to a block device without O_DIRECT, that is in the layer which is no longer in the host's memory
//! alone: call fsync(2) before. The daemon cannot: a process that waits for a disk which it serves itself could not be killed.
//!
//! A refusal has a status and an [`ErrorBody`].

use std::path::PathBuf;

use aenv_block_overlaybd::Mode;
use aenv_model::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{DeviceConfig, ErrorKind};

/// Version of this protocol. Unknown fields are ignored on both sides; whatever else changes counts it up.
pub const PROTOCOL: u32 = 1;

/// Who answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// Version of the program.
    pub version: String,
    /// Its [`PROTOCOL`].
    pub protocol: u32,
    /// Its process.
    pub pid: u32,
    /// Which way devices reach the kernel: `fuse` or `ublk`.
    pub export: String,
    /// Devices it has.
    pub devices: u64,
}

/// Who keeps the pages of a device that is a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Caching {
    /// Nobody: each request reaches the daemon. For disks of guests, which have a page cache of their own.
    #[default]
    Direct,
    /// The host's kernel: one copy for all who read it. For content that many share.
    Shared,
}

/// A device to make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSpec {
    /// Its layers, and where its upper is. Without an upper, the device is read-only. Paths are absolute.
    pub config: DeviceConfig,
    /// Make the upper; nothing may be there yet. Else it is opened as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_upper: Option<NewUpper>,
    /// Who keeps its pages.
    #[serde(default)]
    pub caching: Caching,
    /// Let nobody write, although there is an upper.
    #[serde(default)]
    pub read_only: bool,
}

/// An upper to make. Its files are those of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewUpper {
    /// Its layout; that of the configuration must be the same.
    pub mode: Mode,
    /// Size of the device, a multiple of 512. That of the layers, if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
}

/// A device, as it is now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceView {
    /// Its name.
    pub name: String,
    /// What to open: a file, or a block device's node.
    pub path: PathBuf,
    /// Its length.
    pub size: Bytes,
    /// Length of its layers alone, without the upper; 0 if there are none, or it is not known.
    #[serde(default)]
    pub layers_size: Bytes,
    /// What it is made of now, restacked layers and all.
    pub config: DeviceConfig,
    /// Let nobody write.
    pub read_only: bool,
    /// Why it cannot be used: the daemon was restarted and could not bring it back. It is kept until it is closed, and tried
    /// again at the next start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The daemon was restarted and is bringing it back. Operations on it wait.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recovering: bool,
    /// What it did since the daemon has had it.
    pub stats: DeviceStats,
}

/// What a device did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceStats {
    /// Reads.
    pub read: OperationStats,
    /// Writes.
    pub write: OperationStats,
    /// Discards.
    pub discard: OperationStats,
    /// Flushes.
    pub flush: OperationStats,
    /// The last request that failed, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// Requests of one kind.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OperationStats {
    /// How many were answered, failed ones included.
    pub operations: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// How many failed.
    pub errors: u64,
    /// How long they took.
    pub latency: LatencyStats,
}

/// How long requests took.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyStats {
    /// All together, in microseconds.
    pub total_micros: u64,
    /// Upper bounds in microseconds, and how many requests took no longer than that and longer than the bound before. The
    /// last has no bound.
    pub buckets: Vec<(Option<u64>, u64)>,
}

/// Seal the upper, move it to `layer`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestackRequest {
    /// Where to, in the filesystem of the upper. Nothing may be there.
    pub layer: PathBuf,
}

/// A new layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestackedView {
    /// Its file.
    pub file: PathBuf,
    /// Length of the file.
    pub size: Bytes,
    /// Who it is.
    pub uuid: Uuid,
    /// How long requests had to wait.
    pub pause_micros: u64,
}

/// Change the size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizeRequest {
    /// A multiple of 512.
    pub size: Bytes,
}

/// What becomes of the upper of a device that is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Uppers {
    /// It stays, and so do layers made of earlier ones.
    Keep,
    /// It is deleted, and so are layers that restacks made of earlier ones in its own directory. Layers elsewhere stay.
    Remove,
}

/// How to close.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloseQuery {
    /// What becomes of the upper.
    pub uppers: Uppers,
}

/// How to shut down.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShutdownQuery {
    /// Also when there are devices; the next start brings them back.
    #[serde(default)]
    pub force: bool,
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What to do about it.
    pub kind: ErrorKind,
    /// For people, with causes.
    pub message: String,
}
