//! Disks of sandboxes: at the daemon, over layers that many share.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use aenv_block_device::{CreateDiskError, Disk, DiskRecord, DiskStore};
use aenv_block_overlaybd::{Mode, UpperFiles};
use aenv_model::Bytes;
use async_trait::async_trait;
use uuid::Uuid;

use crate::{BlockdClient, BlockdError, Caching, DeviceConfig, DeviceSpec, ErrorKind, NewUpper, UpperConfig, Uppers};

/// What a fresh upper takes: a block of each of its files.
const FRESH_UPPER: Bytes = Bytes::kib(8);

/// Gives each sandbox a fresh upper in a directory of its own, over the layers of an image. The base of a disk is the
/// image's configuration, an [`image.json`](DeviceConfig).
#[derive(Debug)]
pub struct LayeredDiskStore {
    client: BlockdClient,
    dir: PathBuf,
    mode: Mode,
}

impl LayeredDiskStore {
    /// Disks at the daemon that `client` reaches, with uppers of layout `mode` in directories below `dir`.
    pub fn new(client: BlockdClient, dir: impl Into<PathBuf>, mode: Mode) -> Self {
        Self { client, dir: dir.into(), mode }
    }

    /// Makes what was written to a disk a layer, in the disk's own directory; the disk goes on with a fresh upper. Gives all
    /// its layers, bottom first, without an upper. The daemon may merge those in that directory at any time later, and
    /// removes them with the disk.
    pub async fn seal(&self, record: &DiskRecord) -> io::Result<DeviceConfig> {
        let layer = self.directory(&record.name).join(format!("layer-{}.commit", Uuid::now_v7()));
        self.write_back(record).await?;
        self.client.restack(&record.name, &layer).await.map_err(told)?;
        self.layers(record).await
    }

    /// All layers of a disk, bottom first, without its upper. Merging changes which they are, and not what they hold.
    pub async fn layers(&self, record: &DiskRecord) -> io::Result<DeviceConfig> {
        let device = self.client.get(&record.name).await.map_err(told)?;
        let mut config = device.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?.config;
        config.upper = None;
        Ok(config)
    }

    /// Has the kernel hand over what it keeps of a block device that a VMM opened without O_DIRECT.
    async fn write_back(&self, record: &DiskRecord) -> io::Result<()> {
        let device = self.client.get(&record.name).await.map_err(told)?;
        let path = device.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?.path;
        let sync = move || match std::fs::metadata(&path)?.file_type().is_block_device() {
            true => std::fs::File::open(&path)?.sync_data(),
            false => Ok(()), // writes to files of the daemon's go through
        };
        tokio::task::spawn_blocking(sync).await.map_err(io::Error::other)?
    }

    /// Where the upper of a disk is, and the layers that were uppers before it.
    fn directory(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    async fn make(&self, name: &str, base: &Path, size: Option<Bytes>) -> Result<Disk, CreateDiskError> {
        let failed = |source| CreateDiskError::Io { name: name.to_owned(), source };
        let dir = self.directory(name);
        let (path, new) = (base.to_owned(), dir.clone());
        let read = move || {
            let config = DeviceConfig::load(&path).map_err(io::Error::other)?;
            std::fs::create_dir(&new)?;
            Ok(config)
        };
        let read = tokio::task::spawn_blocking(read).await.map_err(io::Error::other).and_then(|read| read);
        let mut config = read.map_err(failed)?;
        let files = UpperFiles::in_directory(&dir, self.mode);
        config.upper = Some(UpperConfig { mode: self.mode, data: files.data, index: files.index });
        let spec = DeviceSpec {
            config,
            new_upper: Some(NewUpper { mode: self.mode, size }),
            caching: Caching::Direct,
            read_only: false,
        };
        let refused = |error| self.refused(name, error);
        // Of its size from the start, as not every exporter can change it later. The guest grows its filesystem.
        let device = self.client.create(name, &spec).await.map_err(refused)?;
        if device.size < device.layers_size {
            return Err(CreateDiskError::TooSmall { asked: device.size, base: device.layers_size });
        }
        Ok(Disk { path: device.path, size: device.size, record: DiskRecord { name: name.to_owned() } })
    }

    fn refused(&self, name: &str, error: BlockdError) -> CreateDiskError {
        match error.kind() {
            ErrorKind::NoSpace => {
                CreateDiskError::NoSpace { name: name.to_owned(), needed: FRESH_UPPER, dir: self.dir.clone() }
            }
            _ => CreateDiskError::Io { name: name.to_owned(), source: io::Error::other(error) },
        }
    }
}

/// The daemon's error, with what it means to others.
fn told(error: BlockdError) -> io::Error {
    match error.kind() {
        ErrorKind::NoSpace => io::Error::new(io::ErrorKind::StorageFull, error),
        _ => io::Error::other(error),
    }
}

#[async_trait]
impl DiskStore for LayeredDiskStore {
    async fn create(&self, name: &str, base: &Path, size: Option<Bytes>) -> Result<Disk, CreateDiskError> {
        let made = self.make(name, base, size).await;
        if made.is_err()
            && let Err(error) = self.remove(&DiskRecord { name: name.to_owned() }).await
        {
            tracing::warn!(disk = name, %error, "a disk that could not be made is not gone yet");
        }
        made
    }

    async fn remove(&self, record: &DiskRecord) -> io::Result<()> {
        self.client.close(&record.name, Uppers::Remove).await.map_err(io::Error::other)?;
        match tokio::fs::remove_dir_all(self.directory(&record.name)).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
