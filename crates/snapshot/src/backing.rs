//! What captures need of the host.

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_block_client::{BlockdClient, Caching, DeviceConfig, DeviceSpec, LayeredDiskStore, Uppers};
use aenv_block_device::DiskRecord;
use aenv_memory::CaptureOptions;
use aenv_vmm_driver::Machine;
use async_trait::async_trait;
use uuid::Uuid;

/// The storage daemon and the memory of processes, as captures need them.
#[async_trait]
pub trait Backing: Debug + Send + Sync + 'static {
    /// Makes what was written to a disk a layer that no longer changes; the disk goes on with a fresh upper. Gives the
    /// layers, bottom first, without an upper. They may be merged at any time.
    async fn seal(&self, disk: &DiskRecord) -> io::Result<DeviceConfig>;

    /// The layers of a disk as they are now: those of its last [`seal`](Self::seal), or what they were merged into.
    async fn layers(&self, disk: &DiskRecord) -> io::Result<DeviceConfig>;

    /// Makes `config` visible under `name`, for anybody to read and to map. Doing so again is success.
    async fn show(&self, name: &str, config: &DeviceConfig) -> io::Result<PathBuf>;

    /// Ends what [`show`](Self::show) began. Ending what is not there is success.
    async fn hide(&self, name: &str) -> io::Result<()>;

    /// Names of all that is visible.
    async fn shown(&self) -> io::Result<Vec<String>>;

    /// Writes those pages of a machine that differ from its memory image to `layer`, one layer over that image's, whose top
    /// is `parent`; `None`: the image is empty. Gives the layer's uuid. The machine's vCPUs are paused. Nothing may be at
    /// `layer`, and nothing is after an error.
    async fn copy_memory(&self, machine: &dyn Machine, layer: &Path, parent: Option<Uuid>) -> io::Result<Uuid>;
}

/// The backing of a node.
#[derive(Debug)]
pub struct HostBacking {
    /// The storage daemon.
    pub client: BlockdClient,
    /// Disks of machines, at that daemon.
    pub disks: Arc<LayeredDiskStore>,
}

#[async_trait]
impl Backing for HostBacking {
    async fn seal(&self, disk: &DiskRecord) -> io::Result<DeviceConfig> {
        self.disks.seal(disk).await
    }

    async fn layers(&self, disk: &DiskRecord) -> io::Result<DeviceConfig> {
        self.disks.layers(disk).await
    }

    async fn show(&self, name: &str, config: &DeviceConfig) -> io::Result<PathBuf> {
        let spec = DeviceSpec { config: config.clone(), new_upper: None, caching: Caching::Shared, read_only: true };
        let view = self.client.create(name, &spec).await.map_err(io::Error::other)?;
        match view.problem {
            None => Ok(view.path),
            Some(problem) => Err(io::Error::other(problem)),
        }
    }

    async fn hide(&self, name: &str) -> io::Result<()> {
        self.client.close(name, Uppers::Keep).await.map(drop).map_err(io::Error::other)
    }

    async fn shown(&self) -> io::Result<Vec<String>> {
        let devices = self.client.list().await.map_err(io::Error::other)?;
        Ok(devices.into_iter().map(|device| device.name).collect())
    }

    async fn copy_memory(&self, machine: &dyn Machine, layer: &Path, parent: Option<Uuid>) -> io::Result<Uuid> {
        let memory = machine.guest_memory().await.map_err(io::Error::other)?;
        let layer = layer.to_owned();
        let copy = move || {
            let pages = aenv_memory::dirty_pages(&memory).map_err(io::Error::other)?;
            let options = CaptureOptions { parent, ..CaptureOptions::default() };
            match aenv_memory::capture(&memory, &pages, &layer, &options) {
                Ok(captured) => Ok(captured.layer.uuid),
                Err(error @ aenv_memory::CaptureError::NoSpace { .. }) => {
                    Err(io::Error::new(io::ErrorKind::StorageFull, error))
                }
                Err(error) => Err(io::Error::other(error)),
            }
        };
        tokio::task::spawn_blocking(copy).await.map_err(io::Error::other)?
    }
}
