//! The seam that FUSE and ublk share.

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_block_device::BlockDevice;
use serde::{Deserialize, Serialize};

/// Which way a device reaches the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExportKind {
    /// A file on a FUSE mount.
    Fuse,
    /// A ublk block device.
    Ublk,
}

/// Who keeps the pages of a file on a FUSE mount. A ublk device is cached like any disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Caching {
    /// Nobody: each request reaches the device. For disks of guests, which have a page cache of their own. Such a file can
    /// be mapped privately, and shared where the kernel allows it.
    Direct,
    /// The host's kernel: one copy for all who read or map the file. For content that many share.
    Shared,
}

/// How a device is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportOptions {
    /// Writes are refused by the kernel already.
    pub read_only: bool,
    /// Who keeps its pages.
    pub caching: Caching,
}

/// What a later process needs to find an export of a former one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportRecord {
    /// Which way.
    pub kind: ExportKind,
    /// Where it was seen.
    pub path: PathBuf,
    /// Number of the ublk device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ublk_id: Option<u32>,
}

/// Makes devices visible. Everything here blocks; many threads may use it at once.
pub trait Exporter: Debug + Send + Sync {
    /// Which way.
    fn kind(&self) -> ExportKind;

    /// Makes `device` visible under `name`: unique on this exporter, and safe as a file name. On return its path can be
    /// opened. On an error nothing is left behind.
    fn attach(
        &self,
        name: &str,
        device: Arc<dyn BlockDevice>,
        options: &ExportOptions,
    ) -> Result<Box<dyn Export>, AttachError>;

    /// Makes `device` visible again where a process that died had it, under the same path. Where the kernel kept the
    /// requests meanwhile (ublk), they are served now; else whoever had it open sees errors and must open it again.
    fn recover(
        &self,
        name: &str,
        record: &ExportRecord,
        device: Arc<dyn BlockDevice>,
        options: &ExportOptions,
    ) -> Result<Box<dyn Export>, AttachError>;
}

/// A device that is visible, until closed.
pub trait Export: Debug + Send + Sync {
    /// What to open: a file, or a block device's node.
    fn path(&self) -> &Path;

    /// What a later process needs.
    fn record(&self) -> ExportRecord;

    /// Whether the kernel can be told of another size; if not, why not.
    fn resizable(&self) -> io::Result<()>;

    /// Tells the kernel that the device's size has changed.
    fn resized(&self) -> io::Result<()>;

    /// Answers what is under way and leaves the rest to a later process, which recovers the record. Where requests cannot
    /// wait for that (FUSE) it is taken away. On return the device is no longer used.
    fn disown(self: Box<Self>) -> io::Result<ExportRecord>;

    /// Takes it away. Requests under way are answered first; on return the device is no longer used.
    fn close(self: Box<Self>) -> io::Result<()>;
}

/// Why a device could not be made visible.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The name cannot be a file's, or is taken.
    #[error("export name {name:?}: {problem}")]
    Name {
        /// What was asked for.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The kernel would not.
    #[error("{step} for device {name}")]
    Kernel {
        /// Of the device.
        name: String,
        /// What was being done.
        step: &'static str,
        /// What it said.
        source: io::Error,
    },
}
