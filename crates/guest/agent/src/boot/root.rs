//! Finds the root device, mounts it, and makes it the root.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_move};

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
            Ok(()) => return Ok(()),
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
