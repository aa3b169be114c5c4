//! Disks of sandboxes, with the layers under them kept in the image cache for as long.

use std::io;
use std::path::Path;
use std::sync::Arc;

use aenv_block_client::{DeviceConfig, LayeredDiskStore};
use aenv_block_device::{CreateDiskError, Disk, DiskRecord, DiskStore};
use aenv_image::{CacheError, ImageCache, LeaseKind};
use aenv_model::Bytes;
use async_trait::async_trait;
use tracing::warn;

use crate::metrics::Metrics;

/// Takes a lease on the layers before a disk is made, and gives it back when the disk is gone.
#[derive(Debug)]
pub(crate) struct LeasedDisks {
    pub(crate) disks: Arc<LayeredDiskStore>,
    pub(crate) cache: ImageCache,
    pub(crate) metrics: Metrics,
}

/// What a lease takes: a block of its file.
const LEASE: Bytes = Bytes::kib(4);

impl LeasedDisks {
    async fn keep_layers(&self, name: &str, base: &Path) -> Result<(), CreateDiskError> {
        let failed = |source| CreateDiskError::Io { name: name.to_owned(), source };
        let base = base.to_owned();
        let read = tokio::task::spawn_blocking(move || DeviceConfig::load(&base)).await;
        let config = read.map_err(io::Error::other).map_err(failed)?.map_err(io::Error::other).map_err(failed)?;
        self.cache.lease_device(LeaseKind::Runtime, name, &config).await.map_err(|error| match error {
            CacheError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                CreateDiskError::NoSpace { name: name.to_owned(), needed: LEASE, dir: self.cache.root().to_owned() }
            }
            error => failed(io::Error::other(error)),
        })
    }
}

#[async_trait]
impl DiskStore for LeasedDisks {
    async fn create(&self, name: &str, base: &Path, size: Option<Bytes>) -> Result<Disk, CreateDiskError> {
        self.keep_layers(name, base).await?;
        let made = self.metrics.device("create_runtime_overlaybd", self.disks.create(name, base, size)).await;
        // While the disk may still be there, so is the lease: whoever removes the disk removes both.
        if made.is_err()
            && let Err(error) = self.remove(&DiskRecord { name: name.to_owned() }).await
        {
            warn!(disk = name, %error, "a disk that could not be made is not gone yet");
        }
        made
    }

    async fn remove(&self, record: &DiskRecord) -> io::Result<()> {
        self.metrics.device("delete", self.disks.remove(record)).await?;
        self.cache.release(LeaseKind::Runtime, &record.name).await.map_err(io::Error::other)
    }
}
