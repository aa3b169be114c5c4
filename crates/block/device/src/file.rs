//! A device in a plain, sparse file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use aenv_model::Bytes;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use tracing::error;

use crate::device::{BlockDevice, check_range};

/// A sparse file as a device. Its length is the device's size, read once.
///
/// After a failed flush the kernel has forgotten which pages did not reach the disk, and a second flush would report
/// success for lost writes; so the device refuses everything from then on, until it is opened again.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    size: Bytes,
    poisoned: AtomicBool,
}

impl FileDevice {
    /// Makes a new file of `size` bytes, all zeros and taking no space. Errors with `AlreadyExists` if `path` exists.
    pub fn create(path: &Path, size: Bytes) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.set_len(size.get())?;
        Ok(Self { file, size, poisoned: AtomicBool::new(false) })
    }

    /// Opens an existing regular file for reading and writing.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(Self { file, size: Bytes(metadata.len()), poisoned: AtomicBool::new(false) })
    }

    fn check(&self, offset: u64, length: u64) -> io::Result<()> {
        if self.poisoned.load(Ordering::Acquire) {
            return Err(io::Error::other("an earlier flush failed; the device must be opened again"));
        }
        check_range(self.size, offset, length)
    }

    /// For filesystems that cannot punch holes.
    fn write_zeros(&self, mut offset: u64, mut length: u64) -> io::Result<()> {
        const ZEROS: &[u8] = &[0; 64 << 10];
        while length > 0 {
            let step = length.min(ZEROS.len() as u64);
            self.file.write_all_at(&ZEROS[..step as usize], offset)?;
            offset += step;
            length -= step;
        }
        Ok(())
    }
}

impl BlockDevice for FileDevice {
    fn size(&self) -> Bytes {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check(offset, buf.len() as u64)?;
        self.file.read_exact_at(buf, offset)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.check(offset, buf.len() as u64)?;
        self.file.write_all_at(buf, offset)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length)?;
        if length == 0 {
            return Ok(()); // fallocate(2) refuses it
        }
        match fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length) {
            Err(Errno::OPNOTSUPP) => self.write_zeros(offset, length),
            result => Ok(result?),
        }
    }

    fn flush(&self) -> io::Result<()> {
        self.check(0, 0)?;
        self.file.sync_data().inspect_err(|error| {
            self.poisoned.store(true, Ordering::Release);
            error!(%error, "flush of a device file failed; the device is refused from now on");
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::test_support::conformance;

    #[test]
    fn a_file_device_passes_the_suite() {
        let dir = tempfile::tempdir().expect("temp dir");
        let device = FileDevice::create(&dir.path().join("disk"), Bytes::mib(4)).expect("create");
        conformance::suite(&device);
    }

    #[test]
    fn a_fresh_device_takes_no_space_and_discard_gives_it_back() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("disk");
        let device = FileDevice::create(&path, Bytes::gib(64)).expect("create");
        let allocated = || path.metadata().expect("stat").blocks() * 512;
        assert_eq!(allocated(), 0);
        device.write_at(Bytes::gib(32).get(), &[1; 1 << 20]).expect("write");
        device.flush().expect("flush");
        assert!(allocated() >= 1 << 20);
        device.discard(Bytes::gib(32).get(), 1 << 20).expect("discard");
        assert!(allocated() < 1 << 20);
    }

    #[test]
    fn what_was_flushed_is_there_when_opened_again() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("disk");
        let device = FileDevice::create(&path, Bytes::mib(1)).expect("create");
        device.write_at(4096, b"kept").expect("write");
        device.flush().expect("flush");
        drop(device);
        let again = FileDevice::open(&path).expect("open");
        let mut read = [0; 4];
        again.read_at(4096, &mut read).expect("read");
        assert_eq!((&read, again.size()), (b"kept", Bytes::mib(1)));
        assert_eq!(FileDevice::create(&path, Bytes::mib(1)).expect_err("exists").kind(), io::ErrorKind::AlreadyExists);
    }
}
