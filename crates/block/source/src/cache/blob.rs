//! Reads through the cache.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use aenv_block_overlaybd::Source;

use super::Shared;
use super::flight::{Flight, Loaded, Pilot};
use super::layout::{BLOCK, PAGE};
use super::table::{BlobId, Hit};

/// The longest single fetch, in blocks: 4 MiB, which is held in memory while it lasts.
const MAX_RUN: u64 = 64;

/// Who reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Somebody waits for it.
    Reader,
    /// We think it may be wanted. Does not count as use, and reads what is condemned, to find out if it still should be.
    Background,
}

/// A source with the cache before it.
pub struct CachedBlob {
    pub(crate) cache: Arc<Shared>,
    id: BlobId,
    name: String,
    origin: Arc<dyn Source>,
    size: u64,
}

/// Where a block is.
enum Place {
    Slot(Hit),
    /// Somebody fetches it.
    Coming(Arc<Flight>),
    /// Nobody did, so we have to.
    Ours(Arc<Flight>, Range<u64>),
}

impl CachedBlob {
    pub(super) fn new(cache: Arc<Shared>, id: BlobId, name: String, origin: Arc<dyn Source>) -> Self {
        let size = origin.size();
        Self { cache, id, name, origin, size }
    }

    /// What the bytes are known by, as given to [`super::BlockCache::blob`].
    #[must_use]
    pub fn key(&self) -> &str {
        &self.name
    }

    #[cfg(test)]
    pub(super) fn id(&self) -> BlobId {
        self.id
    }

    /// Reads like [`Source::read_at`]; tells how many bytes were fetched for it.
    pub(crate) fn read_for(&self, purpose: Purpose, offset: u64, buf: &mut [u8]) -> io::Result<u64> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.size);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let (mut at, mut rest, mut fetched) = (offset, buf, 0);
        while at < end {
            let done = match self.find(purpose, at / BLOCK, end.div_ceil(BLOCK))? {
                Place::Slot(hit) => {
                    let within = (at % BLOCK) as usize;
                    let length = rest.len().min(hit.length as usize - within);
                    if self.read_slot(&hit, within, &mut rest[..length]) { length } else { continue }
                }
                Place::Coming(flight) => {
                    let _waiting = (purpose == Purpose::Reader).then(|| self.cache.quiet.reader());
                    copy(flight.wait()?, at, rest)
                }
                Place::Ours(flight, blocks) => {
                    let _waiting = (purpose == Purpose::Reader).then(|| self.cache.quiet.reader());
                    self.fetch(&flight, blocks);
                    let loaded = flight.wait()?;
                    fetched += loaded.bytes.len() as u64;
                    copy(loaded, at, rest)
                }
            };
            if done == 0 {
                // Fetched by one who takes the blob for shorter.
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            at += done as u64;
            rest = &mut rest[done..];
        }
        Ok(fetched)
    }

    /// Finds a block, or makes us the one who fetches it, together with those that are missing up to block `end`.
    fn find(&self, purpose: Purpose, block: u64, end: u64) -> io::Result<Place> {
        let mut table = self.cache.table();
        if purpose == Purpose::Reader && table.is_condemned(self.id) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, Condemned(self.name.clone())));
        }
        if let Some(flight) = table.flight(self.id, block) {
            return Ok(Place::Coming(flight));
        }
        if let Some(hit) = table.find(self.id, block, purpose == Purpose::Reader) {
            if u64::from(hit.length) == self.block_range(block..block + 1).end - block * BLOCK {
                if purpose == Purpose::Reader {
                    table.stats.hits += 1;
                }
                return Ok(Place::Slot(hit));
            }
            drop(table);
            self.cache.drop_slots([(hit.slot, hit.generation)]); // another's idea of the blob's end
            return self.find(purpose, block, end);
        }
        let refill = self.cache.refill;
        let group = block / refill * refill;
        let bounds = group..end.max(group + refill).min(self.size.div_ceil(BLOCK)).min(block + MAX_RUN);
        let run = table.missing_run(self.id, block, bounds);
        let flight = Flight::new();
        table.depart(self.id, run.clone(), &flight);
        table.stats.fetches += 1;
        Ok(Place::Ours(flight, run))
    }

    /// Fetches blocks, hands them to all who wait, and then keeps them.
    fn fetch(&self, flight: &Arc<Flight>, blocks: Range<u64>) {
        // Dropped in reverse order, also if the origin panics: the pilot lands, then what landed is kept.
        let _landing = Landing { blob: self, flight, blocks: blocks.clone() };
        let pilot = Pilot::new(flight);
        let range = self.block_range(blocks);
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let result = self.origin.read_at(range.start, &mut bytes);
        pilot.land(result.map(|()| Loaded { offset: range.start, bytes }));
    }

    /// The bytes of blocks; the last may be short.
    fn block_range(&self, blocks: Range<u64>) -> Range<u64> {
        blocks.start * BLOCK..(blocks.end * BLOCK).min(self.size)
    }

    /// Reads a part of a slot and verifies it. `false` if it is no longer there, or was not what it should be, which is
    /// gone then: look again.
    fn read_slot(&self, hit: &Hit, within: usize, out: &mut [u8]) -> bool {
        let end = within + out.len();
        let first = within / PAGE;
        let (from, to) = (first * PAGE, end.next_multiple_of(PAGE).min(hit.length as usize));
        let read = |pages: &mut [u8]| {
            self.cache.files()?.read(hit.slot, from as u64, pages)?;
            let fine = pages.chunks(PAGE).zip(&hit.sums[first..]).all(|(page, sum)| crc32c::crc32c(page) == *sum);
            if fine { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidData, "checksum mismatch")) }
        };
        let result = if (from, to) == (within, end) {
            read(out)
        } else {
            let mut pages = vec![0; to - from];
            read(&mut pages).map(|()| out.copy_from_slice(&pages[within - from..end - from]))
        };
        let current = self.cache.table().is_current(hit.slot, hit.generation);
        match result {
            Ok(()) => current,
            // Filled with another block while it was read.
            Err(_) if !current => false,
            Err(error) => {
                tracing::warn!(blob = self.name, slot = hit.slot, %error, "cached block is damaged, fetching it again");
                self.cache.table().stats.corrupt += 1;
                self.cache.drop_slots([(hit.slot, hit.generation)]);
                false
            }
        }
    }

    /// Drops the blob's blocks and refuses to read it, until [`CachedBlob::absolve`]: what was fetched is not it.
    pub(crate) fn condemn(&self) {
        let slots = {
            let mut table = self.cache.table();
            table.condemn(self.id, true);
            table.divert(self.id, &(0..u64::MAX));
            table.slots_of(self.id, 0..u64::MAX)
        };
        self.cache.drop_slots(slots);
    }

    /// All of it was seen to be what its digest says.
    pub(crate) fn absolve(&self) {
        self.cache.table().condemn(self.id, false);
    }
}

/// Ends a flight in the table, however it went: keeps what landed.
struct Landing<'a> {
    blob: &'a CachedBlob,
    flight: &'a Arc<Flight>,
    blocks: Range<u64>,
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        let Self { blob, flight, blocks } = self;
        // The pilot is gone, so this waits for nothing.
        let loaded = flight.wait().ok();
        if let Some(loaded) = loaded {
            blob.cache.table().stats.fetched_bytes += loaded.bytes.len() as u64;
        }
        blob.cache.keep(blob.id, blocks.clone(), flight, loaded);
    }
}

fn copy(loaded: &Loaded, at: u64, out: &mut [u8]) -> usize {
    let from = loaded.from(at);
    let length = from.len().min(out.len());
    out[..length].copy_from_slice(&from[..length]);
    length
}

/// The blob's bytes were found not to be those of its digest.
#[derive(Debug, thiserror::Error)]
#[error("what the origin sent as {0} is something else")]
struct Condemned(String);

impl Source for CachedBlob {
    fn name(&self) -> &str {
        self.origin.name()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_for(Purpose::Reader, offset, buf).map(|_| ())
    }

    fn forget(&self, offset: u64, length: u64) {
        let blocks = offset / BLOCK..offset.saturating_add(length).div_ceil(BLOCK);
        let slots = {
            let mut table = self.cache.table();
            table.divert(self.id, &blocks);
            table.slots_of(self.id, blocks)
        };
        self.cache.drop_slots(slots);
        self.origin.forget(offset, length);
    }
}

impl fmt::Debug for CachedBlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedBlob").field("name", &self.name).field("origin", &self.origin).finish_non_exhaustive()
    }
}
