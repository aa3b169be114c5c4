//! A device on which a crash can be rehearsed: what was not flushed may be lost, in any combination of sectors.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aenv_model::Bytes;

use crate::device::{BlockDevice, check_range};

/// The unit that a crash keeps or loses whole.
pub const SECTOR: u64 = 512;

/// Keeps unflushed changes aside and hands them to the inner device at `flush`.
#[derive(Debug)]
pub struct Lossy<D> {
    inner: D,
    pending: Mutex<Vec<Change>>,
}

/// New bytes for a range within one sector.
#[derive(Debug)]
struct Change {
    offset: u64,
    bytes: Vec<u8>,
}

impl<D: BlockDevice> Lossy<D> {
    /// Nothing is pending yet.
    pub fn new(inner: D) -> Self {
        Self { inner, pending: Mutex::default() }
    }

    /// Loses power: of the pending changes, in order, one per touched sector and call, those survive for which `survives`
    /// says so. Gives back the device as it is found after the crash.
    pub fn crash(self, mut survives: impl FnMut(usize) -> bool) -> io::Result<D> {
        let pending = self.pending.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (number, change) in pending.into_iter().enumerate() {
            if survives(number) {
                self.inner.write_at(change.offset, &change.bytes)?;
            }
        }
        Ok(self.inner)
    }

    /// How many changes a crash could lose.
    pub fn pending(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Change>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: BlockDevice> BlockDevice for Lossy<D> {
    fn size(&self) -> Bytes {
        self.inner.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let pending = self.lock();
        self.inner.read_at(offset, buf)?;
        let end = offset + buf.len() as u64;
        for change in pending.iter() {
            let (from, to) = (change.offset.max(offset), (change.offset + change.bytes.len() as u64).min(end));
            if from < to {
                let new = &change.bytes[(from - change.offset) as usize..(to - change.offset) as usize];
                buf[(from - offset) as usize..(to - offset) as usize].copy_from_slice(new);
            }
        }
        Ok(())
    }

    fn write_at(&self, mut offset: u64, mut buf: &[u8]) -> io::Result<()> {
        check_range(self.size(), offset, buf.len() as u64)?;
        let mut pending = self.lock();
        while !buf.is_empty() {
            let (now, later) = buf.split_at(buf.len().min((SECTOR - offset % SECTOR) as usize));
            pending.push(Change { offset, bytes: now.to_vec() });
            offset += now.len() as u64;
            buf = later;
        }
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        check_range(self.size(), offset, length)?;
        self.write_at(offset, &vec![0; length as usize])
    }

    fn flush(&self) -> io::Result<()> {
        let mut pending = self.lock();
        for change in pending.iter() {
            self.inner.write_at(change.offset, &change.bytes)?;
        }
        self.inner.flush()?;
        pending.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::MemoryDevice;

    #[test]
    fn a_crash_keeps_what_was_flushed_and_loses_what_it_is_told() {
        let device = Lossy::new(MemoryDevice::new(Bytes::kib(4)));
        device.write_at(0, &[1; 512]).expect("write");
        device.flush().expect("flush");
        device.write_at(500, &[2; 24]).expect("write"); // touches two sectors
        assert_eq!(device.pending(), 2);
        let mut seen = [0; 24];
        device.read_at(500, &mut seen).expect("read");
        assert_eq!(seen, [2; 24], "visible at once");

        let after = device.crash(|number| number == 1).expect("crash");
        after.read_at(500, &mut seen).expect("read");
        assert_eq!((&seen[..12], &seen[12..]), (&[1; 12][..], &[2; 12][..]));
    }
}
