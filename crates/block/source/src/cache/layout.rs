//! The cache on disk: two files and a lock.
//!
//! ```text
//!  data    slot 0: 64 KiB │ slot 1: 64 KiB │ …           grows as slots are first used, never beyond the capacity
//!  index   header: 128 B  │ record 0: 128 B │ record 1 …  what each slot holds, and a checksum for each of its pages
//! ```
//!
//! Nothing is ever synced. A slot's record is erased, then its data written, then its record: after a `kill -9` a record
//! tells the truth or is not there. After a power failure the three may have reached the disk in any mixture, which the
//! checksums tell apart when the slot is read.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

use aenv_block_overlaybd::{LocalFile, Storage};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::BlobKey;

/// Bytes of a slot.
pub(super) const BLOCK: u64 = 64 << 10;
/// Bytes under one checksum: what a small read costs at least.
pub(super) const PAGE: usize = 4 << 10;
/// Checksums of a slot.
pub(super) const PAGES: usize = BLOCK as usize / PAGE;

const RECORD: u64 = size_of::<Record>() as u64;
const _: () = assert!(RECORD == 128 && size_of::<Header>() == 128);

const MAGIC: [u8; 8] = *b"AENVBLKC";
const VERSION: u32 = 1;

/// CRC-32C of each page of a block; zero beyond its end.
pub(super) type Sums = [u32; PAGES];

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    block: U32,
    page: U32,
    reserved: [u8; 108],
}

impl Header {
    fn ours() -> Self {
        let (block, page) = (BLOCK as u32, PAGE as u32);
        Self { magic: MAGIC, version: VERSION.into(), block: block.into(), page: page.into(), reserved: [0; 108] }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Record {
    key: [u8; 32],
    block: U64,
    length: U32,
    sums: [U32; PAGES],
    reserved: [u8; 16],
    /// CRC-32C of all before. An erased record's never fits.
    check: U32,
}

/// What a slot holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) key: BlobKey,
    /// Number of the block in its blob.
    pub(super) block: u64,
    /// Bytes; less than a whole block only at the blob's end.
    pub(super) length: u32,
    pub(super) sums: Sums,
}

impl Held {
    fn to_record(&self) -> Record {
        let mut record = Record {
            key: self.key.0,
            block: self.block.into(),
            length: self.length.into(),
            sums: self.sums.map(U32::from),
            reserved: [0; 16],
            check: 0.into(),
        };
        record.check = record.expected().into();
        record
    }

    fn from_record(record: &Record) -> Option<Self> {
        let length = record.length.get();
        let fine = record.check.get() == record.expected() && (1..=BLOCK).contains(&length.into());
        fine.then(|| Self {
            key: BlobKey(record.key),
            block: record.block.get(),
            length,
            sums: record.sums.map(U32::get),
        })
    }
}

impl Record {
    fn expected(&self) -> u32 {
        crc32c::crc32c(&self.as_bytes()[..RECORD as usize - 4])
    }
}

/// Checksums of a block's pages.
pub(super) fn sums(block: &[u8]) -> Sums {
    let mut sums = [0; PAGES];
    for (sum, page) in sums.iter_mut().zip(block.chunks(PAGE)) {
        *sum = crc32c::crc32c(page);
    }
    sums
}

/// A cache directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenCacheError {
    /// Another process has it.
    #[error("cache {dir} is in use by another process")]
    InUse {
        /// The directory.
        dir: String,
    },
    /// A file in it can't be made, read or written.
    #[error("open cache {dir}")]
    Io {
        /// The directory.
        dir: String,
        /// Why.
        source: io::Error,
    },
}

/// The cache's files. Slots are named by their number.
#[derive(Debug)]
pub(super) struct Files {
    data: Box<dyn Storage>,
    index: Box<dyn Storage>,
    /// Held while the cache is open.
    _lock: Option<File>,
}

impl Files {
    /// Opens or makes them, with at most `capacity` slots; tells what each slot holds, in order.
    pub(super) fn open(dir: &Path, capacity: u32, each: impl FnMut(Option<Held>)) -> Result<Self, OpenCacheError> {
        let failed = |source| OpenCacheError::Io { dir: dir.display().to_string(), source };
        std::fs::create_dir_all(dir).map_err(failed)?;
        let file = |name: &str| {
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(dir.join(name)).map_err(failed)
        };
        let lock = file("lock")?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(OpenCacheError::InUse { dir: dir.display().to_string() }),
            Err(errno) => return Err(failed(errno.into())),
        }
        let storage = |name: &str| -> Result<Box<dyn Storage>, OpenCacheError> {
            Ok(Box::new(LocalFile::from_file(file(name)?, dir.join(name).display().to_string())))
        };
        let files = Self { data: storage("data")?, index: storage("index")?, _lock: Some(lock) };
        files.load(capacity, each).map_err(failed)?;
        Ok(files)
    }

    /// Files of a test's making.
    #[cfg(test)]
    pub(super) fn from_storage(
        data: Box<dyn Storage>,
        index: Box<dyn Storage>,
        capacity: u32,
        each: impl FnMut(Option<Held>),
    ) -> io::Result<Self> {
        let files = Self { data, index, _lock: None };
        files.load(capacity, each)?;
        Ok(files)
    }

    /// Cuts both files to the capacity and reads the index. One of another version or layout is started afresh.
    fn load(&self, capacity: u32, mut each: impl FnMut(Option<Held>)) -> io::Result<()> {
        /// Records read at a time.
        const AT_ONCE: u64 = 8192;
        let header = Header::ours();
        let mut found = [0; RECORD as usize];
        let readable = self.index.length()? >= RECORD;
        if readable {
            self.index.read_at(0, &mut found)?;
        }
        if !readable || found != header.as_bytes() {
            self.index.set_length(0)?;
            self.data.set_length(0)?;
            self.index.write_at(0, header.as_bytes())?;
        }
        let capacity = u64::from(capacity);
        if self.data.length()? > capacity * BLOCK {
            self.data.set_length(capacity * BLOCK)?;
        }
        if self.index.length()? > (1 + capacity) * RECORD {
            self.index.set_length((1 + capacity) * RECORD)?;
        }
        let slots = (self.index.length()? / RECORD).saturating_sub(1).min(self.data.length()?.div_ceil(BLOCK));
        let mut buf = vec![0; (AT_ONCE * RECORD) as usize];
        for first in (0..slots).step_by(AT_ONCE as usize) {
            let buf = &mut buf[..((slots - first).min(AT_ONCE) * RECORD) as usize];
            self.index.read_at((1 + first) * RECORD, buf)?;
            for bytes in buf.chunks_exact(RECORD as usize) {
                each(Record::ref_from_bytes(bytes).ok().and_then(Held::from_record));
            }
        }
        Ok(())
    }

    /// Reads of a slot from `offset` on; unverified.
    pub(super) fn read(&self, slot: u32, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.data.read_at(u64::from(slot) * BLOCK + offset, buf)
    }

    /// Fills a slot with a block; `used` if it held another before.
    pub(super) fn fill(&self, slot: u32, used: bool, held: &Held, block: &[u8]) -> io::Result<()> {
        if used {
            self.erase(slot)?;
        }
        self.data.write_at(u64::from(slot) * BLOCK, block)?;
        self.index.write_at((1 + u64::from(slot)) * RECORD, held.to_record().as_bytes())
    }

    /// Makes a slot's record tell nothing.
    pub(super) fn erase(&self, slot: u32) -> io::Result<()> {
        self.index.write_at((1 + u64::from(slot)) * RECORD, &[0; RECORD as usize])
    }
}
