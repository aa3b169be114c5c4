//! The exporter that the configuration asks for.

use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;

use aenv_block_client::ExportChoice;
use aenv_block_device::BlockDevice;
use aenv_block_export::{
    AttachError, Export, ExportKind, ExportOptions, ExportRecord, Exporter, FuseExporter, FuseOptions, UblkExporter,
};
use aenv_durable::atomic_write;
use anyhow::{Context as _, Result};
use tracing::{info, warn};
use uuid::Uuid;

/// In the state directory: what our ublk devices are known by. Without it, none is ours.
const TAG_FILE: &str = "ublk-tag";

/// One of the exporters there are.
#[derive(Debug)]
pub(crate) enum AnyExporter {
    Fuse(FuseExporter),
    Ublk(UblkExporter),
}

impl AnyExporter {
    /// Starts one. ublk devices of an earlier process are kept for recovery if `recorded` names them; others of ours are
    /// deleted, and all of them where devices are files now. None are if it is not known which are recorded.
    pub(crate) fn start(
        choice: ExportChoice,
        mount_point: &Path,
        state_dir: &Path,
        recorded: Option<&[u32]>,
    ) -> Result<Self> {
        let ublk = match choice {
            ExportChoice::Ublk => Some(ublk(state_dir)?),
            ExportChoice::Auto | ExportChoice::Fuse if !UblkExporter::is_there() => None,
            ExportChoice::Auto => match ublk(state_dir) {
                Ok(ublk) => Some(ublk),
                Err(error) => {
                    warn!(error = format!("{error:#}"), "there is ublk, and it is of no use; devices are files");
                    None
                }
            },
            ExportChoice::Fuse => {
                // Whoever has one of them open should see errors rather than wait for ever.
                if state_dir.join(TAG_FILE).exists() {
                    sweep(&ublk(state_dir)?, recorded.map(|_| &[][..]));
                }
                None
            }
        };
        if let Some(ublk) = ublk {
            sweep(&ublk, recorded);
            return Ok(Self::Ublk(ublk));
        }
        let fuse = FuseExporter::mount(mount_point, FuseOptions::default());
        Ok(Self::Fuse(fuse.context("export devices by FUSE")?))
    }

    /// Ends it; every device has been taken away, or left to the next process.
    pub(crate) fn close(self) -> io::Result<()> {
        match self {
            Self::Fuse(fuse) => fuse.close(),
            Self::Ublk(_) => Ok(()),
        }
    }

    fn inner(&self) -> &dyn Exporter {
        match self {
            Self::Fuse(fuse) => fuse,
            Self::Ublk(ublk) => ublk,
        }
    }
}

impl Exporter for AnyExporter {
    fn kind(&self) -> ExportKind {
        self.inner().kind()
    }

    fn attach(
        &self,
        name: &str,
        device: Arc<dyn BlockDevice>,
        options: &ExportOptions,
    ) -> Result<Box<dyn Export>, AttachError> {
        self.inner().attach(name, device, options)
    }

    fn recover(
        &self,
        name: &str,
        record: &ExportRecord,
        device: Arc<dyn BlockDevice>,
        options: &ExportOptions,
    ) -> Result<Box<dyn Export>, AttachError> {
        self.inner().recover(name, record, device, options)
    }
}

fn ublk(state_dir: &Path) -> Result<UblkExporter> {
    let tag = tag(&state_dir.join(TAG_FILE))?;
    UblkExporter::open(tag).context("export devices by ublk")
}

/// What our devices are known by: made once, and kept.
fn tag(path: &Path) -> Result<NonZeroU64> {
    match fs::read_to_string(path) {
        Ok(text) => {
            text.trim().parse().with_context(|| format!("read the tag of ublk devices from {}", path.display()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let (high, low) = Uuid::new_v4().as_u64_pair();
            let tag = NonZeroU64::new(high ^ low).unwrap_or(NonZeroU64::MIN);
            // Durable before there is a device that only it can find.
            atomic_write(path, tag.to_string().as_bytes(), 0o600)
                .with_context(|| format!("write {}", path.display()))?;
            Ok(tag)
        }
        Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
    }
}

fn sweep(ublk: &UblkExporter, keep: Option<&[u32]>) {
    let Some(keep) = keep else { return };
    match ublk.sweep(keep) {
        Ok(0) => {}
        Ok(swept) => info!(swept, "ublk devices of an earlier process are gone"),
        Err(error) => warn!(%error, "ublk devices of an earlier process may be left"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(TAG_FILE);
        let made = tag(&path).unwrap();
        assert_eq!(tag(&path).unwrap(), made);
        fs::write(&path, "x").unwrap();
        assert!(format!("{:#}", tag(&path).unwrap_err()).contains("read the tag"));
    }
}
