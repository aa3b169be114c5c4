//! `capture.json`.

use std::path::PathBuf;

use aenv_model::{Bytes, CaptureId, MachineShape};
use aenv_vmm_driver::VmmIdentity;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Version of the format. Counted up when an older program could misread a newer file.
pub(crate) const VERSION: u32 = 1;

/// What a capture is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Of the format.
    pub version: u32,
    /// Which capture.
    pub id: CaptureId,
    /// The instant of it.
    pub captured_at: Timestamp,
    /// Size of the machine.
    pub shape: MachineShape,
    /// Virtual size of its disk.
    pub disk_size: Bytes,
    /// Layers at the bottom of its disk that were there before the first capture: an image's.
    pub image_layers: usize,
    /// Its devices and memory. Without, only the disk was kept.
    pub machine: Option<MachineManifest>,
}

/// How a machine goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineManifest {
    /// What it ran on; it goes on only there.
    pub vmm: VmmIdentity,
    /// Kernel command line of its boot, as the VMM was given it.
    pub cmdline: String,
    /// Layers of its memory, bottom first.
    pub memory_layers: Vec<MemoryFile>,
}

/// A layer of memory in the capture's directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFile {
    /// Its file name.
    pub file: String,
    /// Who it is.
    pub uuid: Uuid,
}

/// What a machine was booted with. A VMM wants the same again to go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootFiles {
    /// Kernel image.
    pub kernel: PathBuf,
    /// Initial file system.
    pub initramfs: PathBuf,
    /// Kernel command line.
    pub cmdline: String,
}
