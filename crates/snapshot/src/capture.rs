//! A capture in use.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use aenv_block_client::{DeviceConfig, Lower};
use aenv_model::CaptureId;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use crate::chain::{DEPTH, Layer, Merged, merge};
use crate::error::CaptureError;
use crate::manifest::{BootFiles, Manifest, MemoryFile};
use crate::store::Shared;

pub(crate) const MANIFEST: &str = "capture.json";
pub(crate) const DISK: &str = "disk.json";
/// The file with a machine's device state. A capture without has no memory.
pub const STATE_FILE: &str = "state";
pub(crate) use self::STATE_FILE as STATE;
pub(crate) const KERNEL: &str = "kernel";
pub(crate) const INITRAMFS: &str = "initramfs";

/// A handle: keeps a capture's files in place. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Capture(pub(crate) Arc<Held>);

#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) store: Arc<Shared>,
    pub(crate) manifest: Manifest,
    pub(crate) doomed: CancellationToken,
    /// A machine that nobody drives uses it.
    pub(crate) left: AtomicBool,
    /// Layers of its memory, and of its disk, that the next capture takes merged.
    pub(crate) merged_memory: OnceLock<Merged>,
    pub(crate) merged_disk: OnceLock<Merged>,
    /// The device of its memory, once somebody has asked.
    pub(crate) memory: Mutex<Option<PathBuf>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if *self.left.get_mut() {
            return;
        }
        let shown = self.memory.get_mut().take().is_some();
        self.store.let_go(self.manifest.id, shown, self.doomed.is_cancelled());
    }
}

impl Capture {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> CaptureId {
        self.0.manifest.id
    }

    /// What it is.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.0.manifest
    }

    /// What a new disk is put over.
    #[must_use]
    pub fn disk(&self) -> PathBuf {
        self.file(DISK)
    }

    /// Device state. `None`: only the disk was kept.
    #[must_use]
    pub fn state(&self) -> Option<PathBuf> {
        self.0.manifest.machine.as_ref().map(|_| self.file(STATE))
    }

    /// What the machine was booted with. `None`: only the disk was kept.
    #[must_use]
    pub fn boot(&self) -> Option<BootFiles> {
        let machine = self.0.manifest.machine.as_ref()?;
        Some(BootFiles { kernel: self.file(KERNEL), initramfs: self.file(INITRAMFS), cmdline: machine.cmdline.clone() })
    }

    /// The file that guest memory is a private mapping of, one for all who go on from here. It stays as long as a handle.
    pub async fn memory(&self) -> Result<PathBuf, CaptureError> {
        let held = &*self.0;
        if held.manifest.machine.is_none() {
            return Err(CaptureError::Unusable { id: self.id(), problem: "it has no memory".to_owned() });
        }
        let mut shown = held.memory.lock().await;
        if let Some(path) = &*shown {
            return Ok(path.clone());
        }
        let lower = |layer: Layer| Lower { file: Some(layer.path), uuid: Some(layer.uuid), ..Lower::default() };
        let config =
            DeviceConfig { lowers: self.memory_layers().into_iter().map(lower).collect(), ..DeviceConfig::default() };
        let path = held.store.backing.show(&device_name(self.id()), &config).await;
        let path = path.map_err(|error| CaptureError::backing("show the memory of a capture", error))?;
        *shown = Some(path.clone());
        Ok(path)
    }

    /// It goes with its last handle.
    pub fn doom(&self) {
        self.0.doomed.cancel();
    }

    /// Whether it goes with its last handle.
    #[must_use]
    pub fn is_doomed(&self) -> bool {
        self.0.doomed.is_cancelled()
    }

    /// Waits until it is doomed.
    ///
    /// Cancel safety: drop it at any time.
    pub async fn doomed(&self) {
        self.0.doomed.cancelled().await;
    }

    /// It stays, memory and all, when its last handle goes: a machine that is left for a later server runs on it.
    pub fn leave(&self) {
        self.0.left.store(true, Ordering::Release);
    }

    /// Layers of its memory, bottom first.
    pub(crate) fn memory_layers(&self) -> Vec<Layer> {
        let machine = self.0.manifest.machine.as_ref();
        let layer = |layer: &MemoryFile| Layer { path: self.file(&layer.file), uuid: layer.uuid };
        machine.map(|machine| machine.memory_layers.iter().map(layer).collect()).unwrap_or_default()
    }

    /// Merges layers for the next capture. Blocking.
    pub(crate) fn shorten(&self) -> io::Result<()> {
        let dir = self.dir();
        let held = &*self.0;
        if let Some(merged) = merge(&self.memory_layers(), DEPTH, &dir, "memory")? {
            _ = held.merged_memory.set(merged);
        }
        let disk = DeviceConfig::load(&self.disk()).map_err(io::Error::other)?;
        let image = held.manifest.image_layers;
        if let Some(layers) = own_layers(&disk, image)
            && let Some(merged) = merge(&layers, DEPTH, &dir, "disk")?
        {
            _ = held.merged_disk.set(merged.above(image));
        }
        Ok(())
    }

    /// A file of it.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// Where it is.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        self.0.store.dir_of(self.id())
    }
}

/// The layers of a disk above those of its image, if all lie on this host, as they should.
pub(crate) fn own_layers(disk: &DeviceConfig, image: usize) -> Option<Vec<Layer>> {
    let layer = |lower: &Lower| Some(Layer { path: lower.file.clone()?, uuid: lower.uuid.unwrap_or_default() });
    disk.lowers.get(image..)?.iter().map(layer).collect()
}

/// The device of a capture's memory.
pub(crate) fn device_name(id: CaptureId) -> String {
    format!("{DEVICE_PREFIX}{id}")
}

/// The capture whose memory a device of the storage daemon has, by the device's name.
#[must_use]
pub fn device_owner(name: &str) -> Option<CaptureId> {
    name.strip_prefix(DEVICE_PREFIX)?.parse().ok()
}

const DEVICE_PREFIX: &str = "memory-";

/// Reads what the capture in `dir` is.
pub(crate) fn read(dir: &Path, id: CaptureId) -> Result<Manifest, CaptureError> {
    let path = dir.join(MANIFEST);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(CaptureError::Gone { id }),
        Err(error) => return Err(CaptureError::io("read", &path, error)),
    };
    let unusable = |problem: String| CaptureError::Unusable { id, problem };
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| unusable(error.to_string()))?;
    match manifest.version {
        crate::manifest::VERSION => Ok(manifest),
        other => Err(unusable(format!("it has format {other}, this program knows {}", crate::manifest::VERSION))),
    }
}
