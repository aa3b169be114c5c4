//! A backing of plain files: what captures need of a host, without one.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use aenv_block_client::{DeviceConfig, Lower};
use aenv_block_device::DiskRecord;
use aenv_vmm_driver::Machine;
use async_trait::async_trait;
use uuid::Uuid;

use crate::backing::Backing;

/// Seals disks into small files, and shows files by their names.
#[derive(Debug)]
pub struct FakeBacking {
    dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    shown: BTreeMap<String, DeviceConfig>,
    sealed: BTreeMap<String, DeviceConfig>,
    fail: Option<io::ErrorKind>,
}

impl FakeBacking {
    /// Files of its own go below `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), state: Mutex::default() }
    }

    /// What is visible now.
    #[must_use]
    pub fn visible(&self) -> Vec<String> {
        self.state().shown.keys().cloned().collect()
    }

    /// From now on, copying memory fails like this; `None`: it works again.
    pub fn fail_with(&self, kind: Option<io::ErrorKind>) {
        self.state().fail = kind;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Backing for FakeBacking {
    async fn seal(&self, disk: &DiskRecord) -> io::Result<DeviceConfig> {
        let mut state = self.state();
        let config = state.sealed.entry(disk.name.clone()).or_default();
        let file = self.dir.join(format!("{}-{}.layer", disk.name, config.lowers.len()));
        std::fs::write(&file, &disk.name)?;
        config.lowers.push(Lower { file: Some(file), ..Lower::default() });
        Ok(config.clone())
    }

    async fn layers(&self, disk: &DiskRecord) -> io::Result<DeviceConfig> {
        self.state().sealed.get(&disk.name).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    async fn show(&self, name: &str, config: &DeviceConfig) -> io::Result<PathBuf> {
        for lower in &config.lowers {
            lower.file.as_ref().map(std::fs::metadata).transpose()?;
        }
        self.state().shown.insert(name.to_owned(), config.clone());
        let path = self.dir.join(name);
        std::fs::write(&path, name)?;
        Ok(path)
    }

    async fn hide(&self, name: &str) -> io::Result<()> {
        self.state().shown.remove(name);
        aenv_durable::remove_file_if_present(&self.dir.join(name))
    }

    async fn shown(&self) -> io::Result<Vec<String>> {
        Ok(self.visible())
    }

    async fn copy_memory(&self, _machine: &dyn Machine, layer: &Path, _parent: Option<Uuid>) -> io::Result<Uuid> {
        match self.state().fail {
            Some(kind) => Err(kind.into()),
            None => std::fs::write(layer, "memory").map(|()| Uuid::now_v7()),
        }
    }
}
