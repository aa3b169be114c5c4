//! A bounded disk cache of blocks, in front of any source.
//!
//! It survives restarts and `kill -9`, and gives out nothing that does not match its checksum: what is damaged is
//! fetched again. Its own troubles (no space, a broken disk) are told in the log and otherwise cost only speed, as then
//! reads pass through it.

mod blob;
mod flight;
mod layout;
mod quiet;
mod table;
#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aenv_block_overlaybd::Source;
use sha2::{Digest, Sha256};

pub use self::blob::CachedBlob;
pub(crate) use self::blob::Purpose;
use self::flight::{Flight, Loaded};
pub use self::layout::OpenCacheError;
use self::layout::{BLOCK, Files, Held, sums};
use self::quiet::Quiet;
use self::table::{BlobId, Claim, Table};

/// How long the disk is spared after it had no space, or failed.
const TROUBLE: Duration = Duration::from_secs(30);

/// Where the cache is and how much it may take.
#[derive(Debug, Clone)]
pub struct CacheOptions {
    /// Its directory; made if it isn't there. Used by one process at a time.
    pub dir: PathBuf,
    /// Bytes of blocks it may keep, rounded down to whole blocks of 64 KiB. Its index takes 0.2 % on top.
    pub capacity: u64,
    /// What is fetched for a small read: this much, aligned, in bytes. Rounded to whole blocks.
    pub refill: u64,
}

impl CacheOptions {
    /// A cache in `dir` of at most `capacity` bytes that fetches 256 KiB at least.
    pub fn new(dir: impl Into<PathBuf>, capacity: u64) -> Self {
        Self { dir: dir.into(), capacity, refill: 256 << 10 }
    }
}

/// What the cache did since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Blocks kept now.
    pub blocks: u64,
    /// Blocks found on disk when a read wanted them.
    pub hits: u64,
    /// Fetches from sources.
    pub fetches: u64,
    /// Bytes they brought.
    pub fetched_bytes: u64,
    /// Blocks that gave way to others.
    pub evicted: u64,
    /// Blocks that did not match their checksum.
    pub corrupt: u64,
    /// Blocks that were not kept, as the disk had no space or failed.
    pub bypassed: u64,
}

/// Names a blob in the cache: a hash of its digest or URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BlobKey([u8; 32]);

impl BlobKey {
    fn of(name: &str) -> Self {
        Self(Sha256::digest(name).into())
    }
}

/// The cache. Cloning shares it.
#[derive(Debug, Clone)]
pub struct BlockCache(Arc<Shared>);

#[derive(Debug)]
pub(crate) struct Shared {
    /// `None` where there is no directory to use, and so no slots.
    files: Option<Files>,
    table: Mutex<Table>,
    disk: Mutex<Disk>,
    /// Blocks of the smallest fetch.
    refill: u64,
    pub(crate) quiet: Quiet,
}

/// What is known of the disk's health.
#[derive(Debug, Default)]
struct Disk {
    /// No space was left: until then, only slots that have theirs are written.
    full_until: Option<Instant>,
    /// It failed, or had no space for those either: until then, nothing is written.
    failed_until: Option<Instant>,
}

impl BlockCache {
    /// Opens the cache with what it kept.
    pub fn open(options: &CacheOptions) -> Result<Self, OpenCacheError> {
        let capacity = Self::slots(options);
        let mut table = Table::new(capacity);
        let files = Files::open(&options.dir, capacity, |held| table.adopt(held))?;
        tracing::info!(dir = %options.dir.display(), blocks = table.stats.blocks, capacity, "block cache opened");
        Ok(Self::over(Some(files), table, options.refill))
    }

    /// Opens the cache, or does without: where its directory can't be used, reads pass through. They still share fetches.
    #[must_use]
    pub fn open_or_pass_through(options: &CacheOptions) -> Self {
        Self::open(options).unwrap_or_else(|error| {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "no block cache, everything is fetched whenever it is read");
            Self::over(None, Table::new(0), options.refill)
        })
    }

    fn slots(options: &CacheOptions) -> u32 {
        // One number is taken for "nowhere". 256 TiB are enough for a cache.
        u32::try_from(options.capacity / BLOCK).unwrap_or(u32::MAX).min(u32::MAX - 1)
    }

    fn over(files: Option<Files>, table: Table, refill: u64) -> Self {
        let refill = refill.div_ceil(BLOCK).max(1);
        let (table, disk, quiet) = (Mutex::new(table), Mutex::default(), Quiet::default());
        Self(Arc::new(Shared { files, table, disk, refill, quiet }))
    }

    /// Puts the cache before `origin`. `name` is what the bytes are known by, usually a digest: equal names mean equal
    /// bytes, whatever the origin.
    pub fn blob(&self, name: &str, origin: Arc<dyn Source>) -> CachedBlob {
        let id = self.0.table().blob(&BlobKey::of(name));
        CachedBlob::new(Arc::clone(&self.0), id, name.to_owned(), origin)
    }

    /// What it did so far.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.0.table().stats
    }

    /// Bytes of blocks kept now.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.table().bytes()
    }

    /// Bytes of blocks that may be kept.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.0.capacity()
    }
}

impl Shared {
    pub(crate) fn capacity(&self) -> u64 {
        u64::from(self.table().capacity()) * BLOCK
    }

    fn files(&self) -> io::Result<&Files> {
        self.files.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Sections under this lock do no I/O and leave no half-done state to panic in.
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what was fetched, as far as it is still wanted and the disk takes it, and ends its flight. `blocks` start where
    /// `loaded` does; nothing is kept if that failed.
    fn keep(&self, blob: BlobId, blocks: Range<u64>, flight: &Arc<Flight>, loaded: Option<&Loaded>) {
        let bytes = loaded.map(|loaded| &*loaded.bytes).unwrap_or_default();
        let mut pieces = bytes.chunks(BLOCK as usize);
        for block in blocks {
            if let Some(piece) = pieces.next() {
                self.keep_one(blob, block, flight, piece);
            }
            self.table().arrive(blob, block, flight);
        }
    }

    fn keep_one(&self, blob: BlobId, block: u64, flight: &Arc<Flight>, bytes: &[u8]) {
        let (may_write, may_grow) = self.disk_takes();
        let (claim, key) = {
            let mut table = self.table();
            if !table.expects(blob, block, flight) {
                return;
            }
            let claim = if may_write { table.claim(may_grow) } else { None };
            let Some(claim) = claim else {
                table.stats.bypassed += 1;
                return;
            };
            (claim, table.key(blob))
        };
        let held = Held { key, block, length: bytes.len() as u32, sums: sums(bytes) };
        let filled = self.files().and_then(|files| files.fill(claim.slot, claim.used, &held, bytes));
        if let Err(error) = &filled {
            self.note_trouble(error, &claim);
        }
        let mut table = self.table();
        match filled {
            Ok(()) if table.expects(blob, block, flight) => table.settle(claim, Some((blob, &held))),
            Ok(()) => {
                drop(table);
                self.erase(claim); // forgotten meanwhile: it must not come back after a restart
            }
            Err(_) => {
                table.stats.bypassed += 1;
                table.settle(claim, None);
            }
        }
    }

    /// Whether the disk may be written to, and whether it may be filled further.
    fn disk_takes(&self) -> (bool, bool) {
        let mut disk = self.disk.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let Disk { full_until, failed_until } = &mut *disk;
        for until in [&mut *full_until, &mut *failed_until] {
            if until.is_some_and(|until| until <= now) {
                *until = None;
            }
        }
        (failed_until.is_none(), full_until.is_none())
    }

    fn note_trouble(&self, error: &io::Error, claim: &Claim) {
        let mut disk = self.disk.lock().unwrap_or_else(PoisonError::into_inner);
        let until = Instant::now() + TROUBLE;
        let full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        let state = if full && !claim.used { &mut disk.full_until } else { &mut disk.failed_until };
        let known = state.replace(until);
        if known.is_none() {
            tracing::warn!(%error, full, "block cache can't write, reads pass through for a while");
        }
    }

    /// Forgets slots, as they were at their generations, on disk too.
    fn drop_slots(&self, slots: impl IntoIterator<Item = (u32, u32)>) {
        for (slot, generation) in slots {
            let claim = self.table().drop_slot(slot, generation);
            if let Some(claim) = claim {
                self.erase(claim);
            }
        }
    }

    /// Ends a claim with an empty slot, and with a record that says so.
    fn erase(&self, claim: Claim) {
        if let Err(error) = self.files().and_then(|files| files.erase(claim.slot)) {
            tracing::warn!(%error, slot = claim.slot, "block cache can't erase a record");
        }
        self.table().settle(claim, None);
    }
}
