//! A device that takes its time.

use std::io;
use std::thread;
use std::time::Duration;

use aenv_model::Bytes;

use crate::device::BlockDevice;

/// Passes everything on after a pause.
#[derive(Debug)]
pub struct Slow<D> {
    inner: D,
    pause: Duration,
}

impl<D: BlockDevice> Slow<D> {
    /// Every operation blocks its thread for `pause` first.
    pub fn new(inner: D, pause: Duration) -> Self {
        Self { inner, pause }
    }
}

impl<D: BlockDevice> BlockDevice for Slow<D> {
    fn size(&self) -> Bytes {
        self.inner.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        thread::sleep(self.pause);
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        thread::sleep(self.pause);
        self.inner.write_at(offset, buf)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        thread::sleep(self.pause);
        self.inner.discard(offset, length)
    }

    fn flush(&self) -> io::Result<()> {
        thread::sleep(self.pause);
        self.inner.flush()
    }
}
