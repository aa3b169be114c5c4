//! Finds the root device, mounts it, makes its file system fill it, and makes it the root.

use std::fs::{self, File};
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_move};

use crate::console::say;
use crate::sys::resize_ext4;

/// Where the root is mounted until it is the root.
pub(super) const NEW_ROOT: &str = "/newroot";
/// How long the device may take to appear once the drivers are loaded; virtio answers within milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between looks. The device usually is there at the first.
const PAUSE: Duration = Duration::from_millis(1);

/// The root could not be entered.
#[derive(Debug, thiserror::Error)]
pub(super) enum RootError {
    #[error("root device {device} did not appear within {} s; block devices here: {found}", PATIENCE.as_secs())]
    NoDevice { device: String, found: String },
    #[error("mount {device} as {kind}")]
    Mount { device: String, kind: String, source: io::Error },
    #[error("root device {device} has no file system that this kernel knows ({known})")]
    UnknownFileSystem { device: String, known: String },
    #[error("switch to the new root")]
    Switch(#[source] io::Error),
}

/// Waits for `device` and mounts it on [`NEW_ROOT`].
pub(super) fn mount(device: &str) -> Result<(), RootError> {
    let deadline = Instant::now() + PATIENCE;
    while !Path::new(device).exists() {
        if Instant::now() > deadline {
            return Err(RootError::NoDevice { device: device.to_owned(), found: block_devices() });
        }
        thread::sleep(PAUSE);
    }
    let _ = fs::create_dir(NEW_ROOT);
    let kinds = file_systems();
    for kind in &kinds {
        match try_mount(device, kind) {
            Ok(()) => {
                // A disk of the image's own size is the usual case, and a smaller file system than asked for is a better
                // place to say so than a machine that does not come up.
                if let Err(error) = fill(device, kind) {
                    say!("make the root file system fill {device}: {error}");
                }
                return Ok(());
            }
            // Not this kind.
            Err(Errno::INVAL) => {}
            Err(source) => {
                return Err(RootError::Mount { device: device.to_owned(), kind: kind.clone(), source: source.into() });
            }
        }
    }
    Err(RootError::UnknownFileSystem { device: device.to_owned(), known: kinds.join(", ") })
}

fn try_mount(device: &str, kind: &str) -> Result<(), Errno> {
    match mount_with(device, kind, MountFlags::empty()) {
        // A disk that the node attached read-only.
        Err(Errno::ACCESS | Errno::ROFS) => mount_with(device, kind, MountFlags::RDONLY),
        result => result,
    }
}

fn mount_with(device: &str, kind: &str, flags: MountFlags) -> Result<(), Errno> {
    rustix::mount::mount(device, NEW_ROOT, kind, flags, None)
}

/// Makes the file system on [`NEW_ROOT`] as large as its device.
fn fill(device: &str, kind: &str) -> io::Result<()> {
    if kind != "ext4" {
        return Ok(());
    }
    let mut disk = File::open(device)?;
    let mut superblock = [0; SUPERBLOCK_SIZE];
    disk.read_exact_at(&mut superblock, SUPERBLOCK_AT)?;
    let size = disk.seek(SeekFrom::End(0))?;
    match blocks_to_fill(&superblock, size) {
        Some(blocks) => resize_ext4(File::open(NEW_ROOT)?, blocks),
        None => Ok(()),
    }
}

/// Where an ext4 superblock is, and how much of it is read (linux: `Documentation/filesystems/ext4/super.rst`).
const SUPERBLOCK_AT: u64 = 1024;
const SUPERBLOCK_SIZE: usize = 1024;

/// How many blocks a file system with this superblock has on a device of `size` bytes, if that is more than it has now.
fn blocks_to_fill(superblock: &[u8; SUPERBLOCK_SIZE], size: u64) -> Option<u64> {
    /// `s_feature_incompat`: block counts have 64 bits.
    const INCOMPAT_64BIT: u32 = 0x80;
    let word =
        |at: usize| u32::from_le_bytes([superblock[at], superblock[at + 1], superblock[at + 2], superblock[at + 3]]);
    let (blocks_lo, log_block_size, blocks_per_group) = (word(0x4), word(0x18), word(0x20));
    let blocks_hi = if word(0x60) & INCOMPAT_64BIT == 0 { 0 } else { word(0x150) };
    let now = u64::from(blocks_hi) << 32 | u64::from(blocks_lo);
    let could = size >> (10 + log_block_size.min(6));
    // Less than a block group may have no room for its own tables.
    (could >= now.saturating_add(u64::from(blocks_per_group))).then_some(could)
}

/// File systems that live on devices, as the kernel lists them; ours first.
fn file_systems() -> Vec<String> {
    let text = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let mut kinds = vec!["ext4".to_owned()];
    for line in text.lines().filter(|line| !line.starts_with("nodev")) {
        let kind = line.trim();
        if !kind.is_empty() && kind != "ext4" {
            kinds.push(kind.to_owned());
        }
    }
    kinds
}

fn block_devices() -> String {
    let names = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let names: Vec<String> = names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Makes [`NEW_ROOT`] the root and frees the initramfs.
pub(super) fn switch() -> Result<(), RootError> {
    let failed = |error: Errno| RootError::Switch(error.into());
    // Before the way back is closed: the memory of the modules is worth having.
    free_initramfs();
    rustix::process::chdir(NEW_ROOT).map_err(failed)?;
    mount_move(".", "/").map_err(failed)?;
    rustix::process::chroot(".").map_err(failed)?;
    rustix::process::chdir("/").map_err(failed)
}

/// Removes what the initramfs holds, staying on its file system. This program's own pages stay while it runs.
fn free_initramfs() {
    let Ok(device) = fs::symlink_metadata("/").map(|found| found.dev()) else { return };
    let mut pending = vec![PathBuf::from("/")];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            match fs::symlink_metadata(&path) {
                Ok(found) if found.dev() != device => {}
                Ok(found) if found.is_dir() => pending.push(path),
                // What cannot be removed only costs its memory.
                Ok(_) => drop(fs::remove_file(&path)),
                Err(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(blocks: u64, incompat: u32) -> [u8; SUPERBLOCK_SIZE] {
        let mut superblock = [0; SUPERBLOCK_SIZE];
        let mut put = |at: usize, value: u32| superblock[at..at + 4].copy_from_slice(&value.to_le_bytes());
        put(0x4, blocks as u32);
        put(0x150, (blocks >> 32) as u32);
        put(0x18, 2);
        put(0x20, 32_768);
        put(0x60, incompat);
        superblock
    }

    #[test]
    fn a_file_system_grows_to_its_device_when_a_block_group_fits() {
        let (gib, blocks) = (1 << 30, 1 << 18);
        assert_eq!(blocks_to_fill(&superblock(blocks, 0x80), gib), None);
        assert_eq!(blocks_to_fill(&superblock(blocks, 0x80), gib + (1 << 20)), None);
        assert_eq!(blocks_to_fill(&superblock(blocks, 0x80), 2 * gib), Some(2 * blocks));
    }

    #[test]
    fn high_words_count_only_with_64_bit_numbers() {
        let blocks = (5 << 32) + 7;
        assert_eq!(blocks_to_fill(&superblock(blocks, 0x80), 1 << 40), None);
        assert_eq!(blocks_to_fill(&superblock(blocks, 0), 1 << 40), Some(1 << 28));
    }
}
