//! Files and what is in them: repeatable, and neither all noise nor all zeros.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use aenv_block_device::BlockDevice as _;
use aenv_block_overlaybd::{Identity, LocalFile, Mode, OverlayDevice, Source, Stack, UpperFiles, UpperOptions};
use aenv_model::Bytes;
use anyhow::{Context as _, Result};
use rustix::fs::{Advice, fadvise};
use uuid::Uuid;

pub(crate) const MIB: usize = 1 << 20;
pub(crate) const PAGE: usize = 4096;

/// Marsaglia's xorshift64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(2).wrapping_add(1))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// The byte offset of some page of a device of `size`.
    pub(crate) fn page_of(&mut self, size: u64) -> u64 {
        self.next() % (size / PAGE as u64) * PAGE as u64
    }
}

pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// A mebibyte that compresses about two to one.
pub(crate) fn block(seed: u64) -> Vec<u8> {
    let mut bytes = noise(seed, MIB);
    for page in bytes.chunks_mut(512) {
        page[..256].iter_mut().zip(b"the quick brown fox ".iter().cycle()).for_each(|(to, from)| *to = *from);
    }
    bytes
}

/// A device that is nothing but a fresh upper at `name`.
pub(crate) fn fresh(dir: &Path, mode: Mode, name: &str, size: u64) -> Result<OverlayDevice> {
    let upper = files(dir, name).create(&UpperOptions { mode, ..UpperOptions::new(Bytes(size), Uuid::nil()) })?;
    Ok(OverlayDevice::new(Stack::new(Vec::new())?, upper)?)
}

pub(crate) fn files(dir: &Path, name: &str) -> UpperFiles {
    UpperFiles { data: dir.join(format!("{name}.data")), index: Some(dir.join(format!("{name}.index"))) }
}

/// Makes a layer at `name` of what `write` writes, and leaves nothing else.
pub(crate) fn layer(
    dir: &Path,
    name: &str,
    size: u64,
    write: impl FnOnce(&OverlayDevice) -> Result<()>,
) -> Result<Arc<dyn Source>> {
    let scratch = format!("{name}.upper");
    let device = fresh(dir, Mode::Log, &scratch, size)?;
    write(&device)?;
    let path = dir.join(name);
    let mut out = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    device.export_upper(&mut out, &Identity::fresh(Uuid::nil()))?;
    drop(device);
    remove(&files(dir, &scratch))?;
    Ok(Arc::new(LocalFile::open(&path)?))
}

/// A layer with data everywhere.
pub(crate) fn full_layer(dir: &Path, name: &str, size: u64) -> Result<Arc<dyn Source>> {
    layer(dir, name, size, |device| (0..size).step_by(MIB).try_for_each(|at| Ok(device.write_at(at, &block(at))?)))
}

/// Removes the files of an upper.
pub(crate) fn remove(files: &UpperFiles) -> Result<()> {
    for path in files.index.iter().chain([&files.data]) {
        std::fs::remove_file(path).with_context(|| format!("remove {}", path.display()))?;
    }
    Ok(())
}

/// Makes the host's page cache forget a file, which is clean from then on.
pub(crate) fn forget(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    file.sync_all()?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}
