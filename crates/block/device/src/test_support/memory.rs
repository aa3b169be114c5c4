//! A device in memory.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aenv_model::Bytes;

use crate::device::{BlockDevice, check_range};

/// A device whose bytes are a vector; durable while the value lives.
#[derive(Debug)]
pub struct MemoryDevice {
    size: Bytes,
    bytes: Mutex<Vec<u8>>,
}

impl MemoryDevice {
    /// A device of zeros.
    ///
    /// # Panics
    /// If `size` does not fit in memory.
    #[must_use]
    pub fn new(size: Bytes) -> Self {
        let length = usize::try_from(size.get()).expect("a test device fits in memory");
        Self { size, bytes: Mutex::new(vec![0; length]) }
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockDevice for MemoryDevice {
    fn size(&self) -> Bytes {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(self.size, offset, buf.len() as u64)?;
        let at = offset as usize; // within the vector
        buf.copy_from_slice(&self.bytes()[at..at + buf.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        check_range(self.size, offset, buf.len() as u64)?;
        let at = offset as usize; // within the vector
        self.bytes()[at..at + buf.len()].copy_from_slice(buf);
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        check_range(self.size, offset, length)?;
        self.bytes()[offset as usize..(offset + length) as usize].fill(0); // within the vector
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}
