//! The writable device: an upper on a stack of layers.
//!
//! Requests come at any byte; an upper takes whole granules. The part of a granule that a request leaves alone is read and
//! written back with it, while no other write runs.

mod compact;
mod restack;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use aenv_block_device::BlockDevice;
use aenv_model::Bytes;

pub use compact::{CompactError, CompactionPolicy};
pub use restack::{RestackError, Restacked};

use crate::commit::{CommitError, Finished, write_upper};
use crate::gather::Gather;
use crate::header::Identity;
use crate::index::{Content, Index};
use crate::mapping::{MAX_VIRTUAL_SIZE, SECTOR};
use crate::stack::{Stack, check_range};
use crate::upper::{Mode, ResizeError, Upper, lock};

/// What pieces of an upper's data file are called within a request; layers have lower numbers.
const UPPER_FILE: u16 = u16::MAX;

/// A disk. Any number of threads may use it at once.
#[derive(Debug)]
pub struct OverlayDevice {
    /// Shared by every request, exclusive for whoever changes what the device is made of.
    parts: RwLock<Parts>,
    /// Shared by writes of whole granules, exclusive for those that read before they write.
    granules: RwLock<()>,
    /// One restack, resize or exchange of layers at a time, also while it is prepared.
    changing: Mutex<()>,
    /// One compaction at a time; taken before `changing`.
    compacting: Mutex<()>,
    size: AtomicU64,
}

/// What a device is made of.
#[derive(Debug)]
struct Parts {
    lowers: Stack,
    upper: Arc<Upper>,
}

/// Why a device could not be put together.
#[derive(Debug, thiserror::Error)]
pub enum OpenDeviceError {
    /// Neither upper nor layers have a size.
    #[error("neither the upper nor a layer has a size")]
    NoSize,
    /// The size of a layer that the upper takes over is not one a writable device can have, or could not be recorded.
    #[error("give the upper the size of the layers below")]
    Size(#[from] ResizeError),
}

impl OverlayDevice {
    /// Puts `upper` on `lowers`. An upper without a size takes theirs, and records it.
    pub fn new(lowers: Stack, upper: Upper) -> Result<Self, OpenDeviceError> {
        upper.inherit_size(lowers.size())?;
        let size = upper.virtual_size();
        if size == Bytes(0) {
            return Err(OpenDeviceError::NoSize);
        }
        Ok(Self {
            parts: RwLock::new(Parts { lowers, upper: Arc::new(upper) }),
            granules: RwLock::default(),
            changing: Mutex::default(),
            compacting: Mutex::default(),
            size: AtomicU64::new(size.get()),
        })
    }

    /// The layers below, as they are now.
    #[must_use]
    pub fn lowers(&self) -> Stack {
        self.parts().lowers.clone()
    }

    /// The upper, as it is now.
    #[must_use]
    pub fn upper(&self) -> Arc<Upper> {
        Arc::clone(&self.parts().upper)
    }

    /// Changes the size. What a smaller size cuts off is gone; what a larger one adds reads as zeros, also where a layer
    /// below has data. The caller sees to the filesystem on it.
    pub fn resize(&self, size: Bytes) -> Result<(), ResizeError> {
        let _changing = lock(&self.changing);
        let parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        let old = parts.upper.virtual_size();
        if size > old && size.get() <= MAX_VIRTUAL_SIZE && size.get().is_multiple_of(SECTOR) {
            self.by_granules(
                (parts.upper.mode().granule(), size),
                (old.get(), size.get()),
                |from, to| parts.discard(from, to),
                |from, to| self.rewrite_granule(&parts, size, (from, to), |bytes| bytes.fill(0)),
            )
            .map_err(ResizeError::Clear)?;
        }
        parts.upper.resize(size)?;
        self.size.store(size.get(), Ordering::Release);
        Ok(())
    }

    /// Writes what the upper alone maps as a layer with the given identity to `out`. Writes to a log upper go on meanwhile
    /// and are not part of it; the other layouts change data in place, so their writers wait.
    pub fn export_upper(&self, out: &mut dyn io::Write, identity: &Identity) -> Result<Finished, CommitError> {
        let upper = self.upper();
        let gate = (upper.mode() != Mode::Log).then(|| upper.close_gate());
        let (entries, pinned) = upper.pin();
        let size = upper.virtual_size();
        let index = Index::from_sorted(entries).clipped(size.get() / SECTOR);
        let finished = write_upper(out, index.entries(), upper.source(), size, identity);
        drop((pinned, gate));
        finished
    }

    fn parts(&self) -> RwLockReadGuard<'_, Parts> {
        self.parts.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts `offset..end` at the granules of a device of `size`, and calls `whole` for the middle, `partial` for what does not
    /// fill its granule at either end.
    fn by_granules(
        &self,
        (granule, size): (u64, Bytes),
        (offset, end): (u64, u64),
        mut whole: impl FnMut(u64, u64) -> io::Result<()>,
        mut partial: impl FnMut(u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        // The last granule of a device may be short.
        let ends_whole = |at: u64| at.is_multiple_of(granule) || at == size.get();
        let middle = offset.next_multiple_of(granule).min(end);
        if middle > offset {
            partial(offset, middle)?;
        }
        let tail = if ends_whole(end) { end } else { (end / granule * granule).max(middle) };
        if tail > middle {
            whole(middle, tail)?;
        }
        if end > tail {
            partial(tail, end)?;
        }
        Ok(())
    }

    /// Changes bytes `from..to`, all in one granule, by `change`, and leaves the rest of the granule as it is.
    fn rewrite_granule(
        &self,
        parts: &Parts,
        size: Bytes,
        (from, to): (u64, u64),
        change: impl FnOnce(&mut [u8]),
    ) -> io::Result<()> {
        let granule = parts.upper.mode().granule();
        let start = from / granule * granule;
        let end = (start + granule).min(size.get());
        let mut bytes = vec![0; (end - start) as usize];
        let _exclusive = self.granules.write().unwrap_or_else(PoisonError::into_inner);
        parts.read(start, &mut bytes)?;
        change(&mut bytes[(from - start) as usize..(to - start) as usize]);
        parts.upper.write(start / SECTOR, &bytes)
    }
}

impl Parts {
    fn read(&self, offset: u64, mut buf: &mut [u8]) -> io::Result<()> {
        self.upper.check_failed()?;
        let end = offset + buf.len() as u64;
        let mut gather = Gather::default();
        self.upper.with_live(|live| {
            for span in live.spans(offset / SECTOR, end.div_ceil(SECTOR)) {
                let (from, to) = ((span.offset * SECTOR).max(offset), ((span.offset + span.length) * SECTOR).min(end));
                let (piece, rest) = std::mem::take(&mut buf).split_at_mut((to - from) as usize);
                buf = rest;
                match span.content {
                    Content::Zeroed => piece.fill(0),
                    Content::Hole => self.lowers.plan((from, to), piece, &mut gather),
                    Content::Data { position, .. } => {
                        let at = position * SECTOR + (from - span.offset * SECTOR);
                        gather.push(UPPER_FILE, self.upper.source(), at, piece);
                    }
                }
            }
        });
        gather.read()
    }

    /// Discards whole granules.
    fn discard(&self, from: u64, to: u64) -> io::Result<()> {
        let (from, to) = (from / SECTOR, to / SECTOR);
        if self.upper.mode() != Mode::Sparse {
            return self.upper.discard(from, to, false);
        }
        // A hole shows the layers below, so zeros must be written where they have data.
        let step = Mode::Sparse.granule() / SECTOR;
        let mut at = from;
        for span in self.lowers.index().spans(from, to) {
            if !matches!(span.content, Content::Data { .. }) {
                continue;
            }
            let start = (span.offset / step * step).max(at);
            let end = (span.offset + span.length).next_multiple_of(step).min(to);
            if at < start {
                self.upper.discard(at, start, false)?;
            }
            if start < end {
                self.upper.discard(start, end, true)?;
            }
            at = at.max(end);
        }
        if at < to { self.upper.discard(at, to, false) } else { Ok(()) }
    }
}

impl BlockDevice for OverlayDevice {
    /// Changes only by [`resize`](Self::resize).
    fn size(&self) -> Bytes {
        Bytes(self.size.load(Ordering::Acquire))
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let parts = self.parts();
        check_range(self.size(), offset, buf.len() as u64)?;
        parts.read(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let parts = self.parts();
        let end = check_range(self.size(), offset, buf.len() as u64)?;
        let bytes = |from: u64, to: u64| &buf[(from - offset) as usize..(to - offset) as usize];
        self.by_granules(
            (parts.upper.mode().granule(), self.size()),
            (offset, end),
            |from, to| {
                let _shared = self.granules.read().unwrap_or_else(PoisonError::into_inner);
                parts.upper.write(from / SECTOR, bytes(from, to))
            },
            |from, to| {
                self.rewrite_granule(&parts, self.size(), (from, to), |old| old.copy_from_slice(bytes(from, to)))
            },
        )
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let parts = self.parts();
        let end = check_range(self.size(), offset, length)?;
        self.by_granules(
            (parts.upper.mode().granule(), self.size()),
            (offset, end),
            |from, to| {
                let _shared = self.granules.read().unwrap_or_else(PoisonError::into_inner);
                parts.discard(from, to)
            },
            |from, to| self.rewrite_granule(&parts, self.size(), (from, to), |old| old.fill(0)),
        )
    }

    fn flush(&self) -> io::Result<()> {
        // Not under the lock of the parts. If a restack comes between, sealing makes everything durable as well.
        self.upper().flush()
    }
}
