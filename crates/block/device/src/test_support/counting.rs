//! A device that counts.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use aenv_model::Bytes;

use crate::device::BlockDevice;

/// Passes everything on and counts it.
#[derive(Debug)]
pub struct Counting<D> {
    inner: D,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    discards: AtomicU64,
    flushes: AtomicU64,
}

/// Calls, whether or not they succeeded, and the bytes they asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls of `read_at`.
    pub reads: u64,
    /// Bytes asked of `read_at`.
    pub read_bytes: u64,
    /// Calls of `write_at`.
    pub writes: u64,
    /// Bytes given to `write_at`.
    pub written_bytes: u64,
    /// Calls of `discard`.
    pub discards: u64,
    /// Calls of `flush`.
    pub flushes: u64,
}

impl<D: BlockDevice> Counting<D> {
    /// Begins at zero.
    pub fn new(inner: D) -> Self {
        Self {
            inner,
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            discards: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
        }
    }

    /// What was counted so far.
    pub fn counts(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            reads: get(&self.reads),
            read_bytes: get(&self.read_bytes),
            writes: get(&self.writes),
            written_bytes: get(&self.written_bytes),
            discards: get(&self.discards),
            flushes: get(&self.flushes),
        }
    }
}

impl<D: BlockDevice> BlockDevice for Counting<D> {
    fn size(&self) -> Bytes {
        self.inner.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
        self.inner.write_at(offset, buf)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.discards.fetch_add(1, Ordering::Relaxed);
        self.inner.discard(offset, length)
    }

    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.inner.flush()
    }
}
