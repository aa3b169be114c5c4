//! Appending: data at the end of the data file, entries at the end of the index file.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};

use tracing::debug;
use zerocopy::IntoBytes;

use super::{Table, Upper};
use crate::mapping::{MAX_LENGTH, Mapping, RawMapping, SECTOR};
use crate::source::Storage;

/// Entries that wait in memory, at most: 1 MiB of them. Whoever adds one more flushes.
const MAX_PENDING: usize = 1 << 16;

/// Smallest piece of discarded data that is given back: a block of the filesystem.
const HOLE: u64 = 4096;

/// The index file of a log or hybrid upper.
#[derive(Debug)]
pub(super) struct IndexLog {
    pub(super) file: Arc<dyn Storage>,
    /// Where the next entry goes, in bytes.
    pub(super) end: AtomicU64,
}

impl Upper {
    /// Writes `buf` behind all data and maps it.
    pub(super) fn append(&self, sector: u64, buf: &[u8]) -> io::Result<()> {
        let length = buf.len() as u64 / SECTOR;
        let position = self.end.fetch_add(length, Ordering::AcqRel);
        // If this fails, the place stays unused.
        self.data.write_at(position * SECTOR, buf)?;
        let entry = |(skipped, part)| Mapping::data(sector + skipped, part, position + skipped);
        self.add(parts(length).map(entry).collect())
    }

    /// Maps sectors `from..to` as zeros.
    pub(super) fn append_zeroed(&self, from: u64, to: u64) -> io::Result<()> {
        let position = self.end.load(Ordering::Acquire);
        let entry = |(skipped, part)| Mapping::zeroed(from + skipped, part, position);
        self.add(parts(to - from).map(entry).collect())
    }

    /// Adds entries on top, to be flushed, and notes them if notes are taken.
    fn add(&self, entries: Vec<Mapping>) -> io::Result<()> {
        let _noted = self.notes.as_ref().map(|notes| notes.add(&entries)).transpose()?;
        self.table_mut().add(entries);
        Ok(())
    }

    pub(super) fn flush_if_much_is_pending(&self) -> io::Result<()> {
        if self.table().pending.len() < MAX_PENDING { Ok(()) } else { self.flush() }
    }

    /// Syncs data, then writes and syncs the entries that were pending when it began.
    pub(super) fn flush_locked(&self, _flushing: &MutexGuard<'_, ()>) -> io::Result<()> {
        let (pending, freed) = {
            let mut table = self.table_mut();
            (std::mem::take(&mut table.pending), std::mem::take(&mut table.freed))
        };
        self.data.sync().map_err(|error| self.fail(error))?;
        let Some(log) = self.index_log.as_ref().filter(|_| !pending.is_empty()) else { return Ok(()) };
        let raw: Vec<_> = pending.iter().copied().map(RawMapping::from).collect();
        let end = log.end.load(Ordering::Acquire);
        if let Err(error) = log.file.write_at(end, raw.as_bytes()) {
            // The disk is full, say. Nothing is lost: they are written at the same place next time.
            let mut table = self.table_mut();
            table.pending.splice(..0, pending);
            table.freed.extend(freed);
            return Err(error);
        }
        log.file.sync().map_err(|error| self.fail(error))?;
        log.end.store(end + raw.as_bytes().len() as u64, Ordering::Release);
        if let Some(notes) = &self.notes {
            notes.settle(|| self.table().pending.clone());
        }
        self.give_back(freed);
        Ok(())
    }

    /// Punches holes where discarded data was; the entries that say so are durable. If somebody still reads such data,
    /// it is tried again after the next flush.
    fn give_back(&self, mut freed: Vec<Mapping>) {
        if freed.is_empty() {
            return;
        }
        let Ok(_pinned) = self.pinned.try_write() else {
            self.table_mut().freed.extend(freed);
            return;
        };
        freed.sort_unstable_by_key(|old| old.position());
        let mut rest = freed.into_iter().peekable();
        while let Some(first) = rest.next() {
            let mut end = first.position() + first.length();
            while let Some(next) = rest.next_if(|next| next.position() == end) {
                end = next.position() + next.length();
            }
            let from = (first.position() * SECTOR).next_multiple_of(HOLE);
            let to = end * SECTOR / HOLE * HOLE;
            if from < to
                && let Err(error) = self.data.punch_hole(from, to - from)
            {
                debug!(%error, upper = self.data.name(), "cannot give discarded space back");
                return;
            }
        }
    }
}

impl Table {
    /// Adds entries on top that are not in the index file.
    pub(super) fn add(&mut self, entries: Vec<Mapping>) {
        let Self { live, pending, freed } = self;
        for entry in &entries {
            live.insert(*entry, |old| {
                if entry.is_zeroed() && !old.is_zeroed() {
                    freed.push(old);
                }
            });
        }
        pending.extend(entries);
    }

    /// Adds entries that may be there already, in part. What they hide is not given back: one of them may have discarded what
    /// a later one wrote, and hide here what is to show again with the next.
    pub(super) fn add_again(&mut self, entries: Vec<Mapping>) {
        entries.iter().for_each(|entry| self.live.insert(*entry, |_| {}));
        self.pending.extend(entries);
    }
}

/// Cuts `length` into what single entries can describe: how much comes before, and how long each is.
pub(super) fn parts(length: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..length).step_by(MAX_LENGTH as usize).map(move |at| (at, MAX_LENGTH.min(length - at)))
}
