//! Making a capture of a machine that stands still.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_block_client::{DeviceConfig, Lower};
use aenv_block_device::DiskRecord;
use aenv_model::{Bytes, CaptureId, MachineShape};
use aenv_vmm_driver::Machine;
use jiff::Timestamp;

use crate::capture::{Capture, DISK, INITRAMFS, KERNEL, MANIFEST, STATE, own_layers};
use crate::chain::{Layer, MOST, merge};
use crate::error::CaptureError;
use crate::files::share;
use crate::manifest::{BootFiles, MachineManifest, Manifest, MemoryFile, VERSION};
use crate::store::Shared;

/// A machine whose vCPUs are paused and whose block I/O is drained.
#[derive(Clone, Copy)]
pub struct Stopped<'a> {
    /// It.
    pub machine: &'a dyn Machine,
    /// Its size.
    pub shape: MachineShape,
    /// What it was booted with.
    pub boot: &'a BootFiles,
    /// What it went on from, if it did: its disk is over that one's, and its memory too, if that one has any.
    pub base: Option<&'a Capture>,
    /// Its disk.
    pub disk: &'a DiskRecord,
    /// Virtual size of the disk.
    pub disk_size: Bytes,
    /// Keep its devices and memory, not only its disk.
    pub memory: bool,
}

impl std::fmt::Debug for Stopped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stopped").field("machine", &self.machine.record().name).finish_non_exhaustive()
    }
}

/// All of a machine that changes, copied: it may go on. Not a capture before [`finish`](Self::finish); if dropped, nothing
/// is left.
#[derive(Debug)]
pub struct Copied {
    staging: Staging,
    manifest: Manifest,
    /// Layers of memory under the new one.
    memory_below: Vec<Layer>,
    disk: DeviceConfig,
    disk_record: DiskRecord,
    boot: BootFiles,
    base: Option<Capture>,
}

/// How often the layers of a disk may be merged away while they are being linked.
const TRIES: usize = 5;

/// A directory that goes with this unless it has become a capture's.
#[derive(Debug)]
struct Staging {
    store: Arc<Shared>,
    id: CaptureId,
    dir: Option<PathBuf>,
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some(dir) = self.dir.take() {
            self.store.discard(dir);
        }
    }
}

/// File name of the `number`th layer of memory.
fn memory_layer(number: usize) -> String {
    format!("memory-{number:03}.commit")
}

/// Copies what the machine would change if it went on: devices, memory, disk.
pub(crate) async fn copy(store: &Arc<Shared>, stopped: Stopped<'_>) -> Result<Copied, CaptureError> {
    let id = CaptureId::new();
    let dir = store.staging_dir(id);
    tokio::fs::create_dir(&dir).await.map_err(|error| CaptureError::io("make", &dir, error))?;
    let staging = Staging { store: Arc::clone(store), id, dir: Some(dir.clone()) };
    let captured_at = Timestamp::now();
    let mut memory_below = stopped.base.map(Capture::memory_layers).unwrap_or_default();
    if let Some(merged) = stopped.base.and_then(|base| base.0.merged_memory.get()) {
        memory_below.splice(merged.range.clone(), [merged.layer.clone()]);
    }
    let machine = async {
        if !stopped.memory {
            return Ok(None);
        }
        stopped.machine.save_device_state(&dir.join(STATE)).await?;
        let (file, parent) = (memory_layer(memory_below.len()), memory_below.last().map(|layer| layer.uuid));
        let copied = store.backing.copy_memory(stopped.machine, &dir.join(&file), parent).await;
        let uuid = copied.map_err(|error| CaptureError::backing("copy the machine's memory", error))?;
        let below = memory_below.iter().enumerate();
        let below = below.map(|(number, layer)| MemoryFile { file: memory_layer(number), uuid: layer.uuid });
        Ok::<_, CaptureError>(Some(MachineManifest {
            vmm: stopped.machine.identity().clone(),
            cmdline: stopped.boot.cmdline.clone(),
            memory_layers: below.chain([MemoryFile { file, uuid }]).collect(),
        }))
    };
    let disk = async {
        let sealed = store.backing.seal(stopped.disk).await;
        sealed.map_err(|error| CaptureError::backing("seal the machine's disk", error))
    };
    let (machine, disk) = tokio::join!(machine, disk);
    let disk = disk?;
    let manifest = Manifest {
        version: VERSION,
        id,
        captured_at,
        shape: stopped.shape,
        disk_size: stopped.disk_size,
        image_layers: match stopped.base {
            Some(base) => base.manifest().image_layers,
            None => disk.layers().len().saturating_sub(1),
        },
        machine: machine?,
    };
    let (boot, base) = (stopped.boot.clone(), stopped.base.cloned());
    Ok(Copied { staging, manifest, memory_below, disk, disk_record: stopped.disk.clone(), boot, base })
}

impl Copied {
    /// The instant that was copied.
    #[must_use]
    pub fn captured_at(&self) -> Timestamp {
        self.manifest.captured_at
    }

    /// Makes it a capture. What it shares with others is linked, so this takes milliseconds; the machine's disk is still
    /// there.
    ///
    /// Durability: survives the end of this process on return, and a crash of the host a moment later.
    pub async fn finish(mut self) -> Result<Capture, CaptureError> {
        let store = Arc::clone(&self.staging.store);
        for tries_left in (0..TRIES).rev() {
            let work = move || {
                let finished = self.finish_blocking();
                (self, finished)
            };
            let (this, finished) = tokio::task::spawn_blocking(work)
                .await
                .map_err(|error| CaptureError::backing("make a capture", io::Error::other(error)))?;
            self = this;
            match finished {
                Ok(capture) => {
                    store.settle_later(capture.clone());
                    return Ok(capture);
                }
                // Layers of the disk were merged meanwhile: they are others now, with the same content.
                Err(CaptureError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound && tries_left > 0 => {
                    let layers = store.backing.layers(&self.disk_record).await;
                    self.disk = layers.map_err(|error| CaptureError::backing("look at the machine's disk", error))?;
                }
                Err(error) => return Err(error),
            }
        }
        Err(CaptureError::Gone { id: self.staging.id })
    }

    fn finish_blocking(&mut self) -> Result<Capture, CaptureError> {
        let Some(dir) = self.staging.dir.clone() else {
            return Err(CaptureError::Gone { id: self.staging.id });
        };
        if self.manifest.machine.is_some() {
            self.link_memory(&dir)?;
            link(&self.boot.kernel, &dir.join(KERNEL))?;
            link(&self.boot.initramfs, &dir.join(INITRAMFS))?;
        }
        let disk = self.link_disk(&dir)?;
        let saved = disk.save(&dir.join(DISK), 0o600).map_err(io::Error::other);
        saved.map_err(|error| CaptureError::io("write", &dir.join(DISK), error))?;
        let text = serde_json::to_vec_pretty(&self.manifest).map_err(io::Error::other);
        let written = text.and_then(|text| aenv_durable::atomic_write(&dir.join(MANIFEST), &text, 0o600));
        written.map_err(|error| CaptureError::io("write", &dir.join(MANIFEST), error))?;
        let place = self.staging.store.dir_of(self.staging.id);
        std::fs::rename(&dir, &place).map_err(|error| CaptureError::io("name", &place, error))?;
        self.staging.dir = None;
        Ok(self.staging.store.register(self.manifest.clone()))
    }
}

impl Copied {
    /// Puts the layers under the new one beside it.
    fn link_memory(&mut self, dir: &Path) -> Result<(), CaptureError> {
        let Some(machine) = &mut self.manifest.machine else { return Ok(()) };
        let Some((top, _)) = machine.memory_layers.split_last() else { return Ok(()) };
        let mut layers = self.memory_below.clone();
        layers.push(Layer { path: dir.join(&top.file), uuid: top.uuid });
        bound(&mut layers, dir, "memory")?;
        let mut files = Vec::with_capacity(layers.len());
        for (number, layer) in layers.iter().enumerate() {
            let file = match layer.path.strip_prefix(dir) {
                Ok(own) => own.to_string_lossy().into_owned(),
                Err(_) => {
                    let file = memory_layer(number);
                    link(&layer.path, &dir.join(&file))?;
                    file
                }
            };
            files.push(MemoryFile { file, uuid: layer.uuid });
        }
        machine.memory_layers = files;
        Ok(())
    }

    /// Puts the layers of the disk that lie on this host beside the rest; the disk over them.
    fn link_disk(&mut self, dir: &Path) -> Result<DeviceConfig, CaptureError> {
        let mut disk = self.disk.clone();
        disk.lowers = disk.layers().to_vec();
        disk.acceleration_layer = false;
        disk.record_trace_path = None;
        disk.result_file = None;
        for lower in &mut disk.lowers {
            lower.file = local_file(lower);
            if lower.file.is_some() {
                lower.dir = None;
            }
        }
        if let Some(merged) = self.base.as_ref().and_then(|base| base.0.merged_disk.get()) {
            disk.lowers.splice(merged.range.clone(), [lower_of(&merged.layer)]);
        }
        let image = self.manifest.image_layers;
        if let Some(mut layers) = own_layers(&disk, image) {
            let before = layers.len();
            bound(&mut layers, dir, "disk")?;
            if layers.len() < before {
                disk.lowers.splice(image.., layers.iter().map(lower_of));
            }
        }
        for (number, lower) in disk.lowers.iter_mut().enumerate() {
            let Some(path) = lower.file.clone() else { continue };
            let name = match path.strip_prefix(dir) {
                Ok(own) => own.to_owned(),
                Err(_) => {
                    let name = PathBuf::from(format!("disk-{number:03}.commit"));
                    link(&path, &dir.join(&name))?;
                    name
                }
            };
            lower.file = Some(name);
        }
        Ok(disk)
    }
}

/// Merges layers into files of `dir` until the chain is not too deep.
fn bound(layers: &mut Vec<Layer>, dir: &Path, kind: &str) -> Result<(), CaptureError> {
    while layers.len() > MOST {
        let merged = merge(layers, MOST, dir, kind);
        match merged.map_err(|error| CaptureError::backing("merge layers of a capture", error))? {
            Some(merged) => drop(layers.splice(merged.range, [merged.layer])),
            None => break,
        }
    }
    Ok(())
}

fn lower_of(layer: &Layer) -> Lower {
    Lower { file: Some(layer.path.clone()), uuid: Some(layer.uuid), ..Lower::default() }
}

fn link(from: &Path, to: &Path) -> Result<(), CaptureError> {
    share(from, to).map_err(|error| CaptureError::io("share", from, error))
}

/// The file of a layer that lies on this host.
fn local_file(lower: &Lower) -> Option<PathBuf> {
    if let Some(file) = &lower.file {
        return Some(file.clone());
    }
    let dir = lower.dir.as_ref()?;
    ["overlaybd.commit", "overlaybd.sealed"].map(|name| dir.join(name)).into_iter().find(|path| path.exists())
}
