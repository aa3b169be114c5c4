//! Writable disks of sandboxes: what a VMM opens.

use std::path::{Path, PathBuf};

use aenv_model::Bytes;
use async_trait::async_trait;
use serde::{Deserialize, Serialize};

/// Gives sandboxes writable disks over read-only images. Dyn, so that the orchestrator knows nothing of layers.
#[async_trait]
pub trait DiskStore: Send + Sync + 'static {
    /// A fresh writable disk named `name` (unique; a file-name-safe text) with the content of `base`, at least `size`
    /// long if given. On an error nothing is left behind.
    async fn create(&self, name: &str, base: &Path, size: Option<Bytes>) -> Result<Disk, CreateDiskError>;

    /// Gives back everything behind `record`. Removing what is already gone is success.
    async fn remove(&self, record: &DiskRecord) -> std::io::Result<()>;
}

/// A writable disk a VMM can open.
#[derive(Debug, Clone)]
pub struct Disk {
    /// Raw image file or block device node.
    pub path: PathBuf,
    /// Virtual size.
    pub size: Bytes,
    /// How a later process of ours finds it again.
    pub record: DiskRecord,
}

/// What the node store keeps of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRecord {
    /// The disk's name.
    pub name: String,
}

/// Why a disk could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateDiskError {
    /// No room on the host.
    #[error("not enough disk space for {name}: {needed} needed in {dir}")]
    NoSpace {
        /// The disk's name.
        name: String,
        /// What its content takes.
        needed: Bytes,
        /// The directory without the room.
        dir: PathBuf,
    },
    /// The asked size is smaller than the image.
    #[error("disk size {asked} is smaller than the image's {base}")]
    TooSmall {
        /// What was asked for.
        asked: Bytes,
        /// What the image has.
        base: Bytes,
    },
    /// Anything else.
    #[error("create disk {name}")]
    Io {
        /// The disk's name.
        name: String,
        /// What the system said.
        source: std::io::Error,
    },
}
