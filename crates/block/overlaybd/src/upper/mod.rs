//! Writable uppers, in three layouts.
//!
//! | | log | hybrid | sparse |
//! |---|---|---|---|
//! | files | data, index | data, index | data |
//! | a write goes | to the end | in place if the sector has a place, else to the end | to its own offset |
//! | the index on disk | a log of entries | a log of new entries | the file's holes |
//! | a torn rewrite | leaves the old data | may mix old and new | may mix old and new |
//!
//! What a crash leaves: everything up to the last flush, and of later writes any part, each sector old or new. The rule
//! that makes it so: *no entry reaches the index file before its data is durable*. Entries wait in memory until a flush,
//! which syncs the data, then writes the entries, then syncs those.
//!
//! That is a crash of the host. An upper that takes notes loses nothing at all when only its process ends: `notes.rs`.

mod create;
pub(crate) mod files;
mod hybrid;
pub(crate) mod live;
mod log;
pub(crate) mod notes;
mod open;
mod resize;
mod sparse;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use aenv_model::Bytes;
use serde::{Deserialize, Serialize};
use tracing::error;

pub use create::{CreateUpperError, UpperOptions};
pub use files::{UpperFiles, UpperState};
pub(crate) use open::Log;
pub use open::{OpenUpperError, UpperProblem};
pub use resize::ResizeError;

use crate::header::{Flags, Header, Identity};
use crate::index::Index;
use crate::layer::Layer;
use crate::mapping::{Mapping, SECTOR};
use crate::source::{Source, Storage};
use live::LiveIndex;
use log::IndexLog;
use notes::Notes;

/// Largest write that is one request to the data file.
const MAX_WRITE: usize = 4 << 20;

/// Layout of a writable upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Every write is appended.
    #[serde(rename = "logStructured")]
    Log,
    /// First writes are appended, rewrites go in place.
    #[serde(rename = "hybridLogStructured")]
    Hybrid,
    /// Every sector has its place; needs a filesystem with holes of 4 KiB.
    #[serde(rename = "sparse")]
    Sparse,
}

impl Mode {
    /// The layout that `flags` tell, of which at most one is set.
    pub(crate) fn of(flags: Flags) -> Self {
        if flags.has(Flags::SPARSE) {
            Self::Sparse
        } else if flags.has(Flags::HYBRID) {
            Self::Hybrid
        } else {
            Self::Log
        }
    }

    pub(crate) fn flags(self) -> Flags {
        match self {
            Self::Log => Flags(0),
            Self::Hybrid => Flags::HYBRID,
            Self::Sparse => Flags::SPARSE,
        }
    }

    /// What a write must be a multiple of, in bytes, to stay apart from its neighbours. In a sparse file that is a block
    /// of the filesystem: writing part of one makes all of it data once the file is opened again.
    #[must_use]
    pub fn granule(self) -> u64 {
        match self {
            Self::Log | Self::Hybrid => SECTOR,
            Self::Sparse => 4096,
        }
    }
}

/// An open upper. Sectors in, sectors out; what it does not map, a layer below has.
#[derive(Debug)]
pub struct Upper {
    mode: Mode,
    data: Arc<dyn Storage>,
    /// None for sparse.
    index_log: Option<IndexLog>,
    header: Mutex<Header>,
    virtual_size: AtomicU64,
    table: RwLock<Table>,
    /// Where the next append goes, in sectors.
    end: AtomicU64,
    /// Shared by whoever writes, exclusive for whoever needs them to be done.
    gate: RwLock<Gate>,
    /// One flush at a time.
    flushing: Mutex<()>,
    /// Held shared by whoever reads data that the index no longer has; space is given back only when nobody does.
    pinned: RwLock<()>,
    /// None unless they are asked for.
    notes: Option<Notes>,
    /// A sync failed: what memory says and what the disk has may differ, until the files are opened again.
    failed: AtomicBool,
}

/// What changes with every write.
#[derive(Debug, Default)]
struct Table {
    live: LiveIndex,
    /// Entries that are not in the index file yet, oldest first.
    pending: Vec<Mapping>,
    /// Discarded data, to be given back to the filesystem once the entries above are durable.
    freed: Vec<Mapping>,
}

/// Whether the upper takes writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    Open,
    /// It is a layer now, and durable.
    Sealed,
    /// Sealing began and failed.
    HalfSealed,
}

impl Upper {
    /// The layout.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Who this is.
    #[must_use]
    pub fn identity(&self) -> Identity {
        lock(&self.header).identity.clone()
    }

    /// Size of the device; 0 while it has none of its own.
    #[must_use]
    pub fn virtual_size(&self) -> Bytes {
        Bytes(self.virtual_size.load(Ordering::Acquire))
    }

    /// Number of entries in the index.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.table().live.len()
    }

    /// Whether it is neither sealed nor refused because of an error.
    #[must_use]
    pub fn takes_writes(&self) -> bool {
        self.open_gate().is_ok()
    }

    /// Writes whole sectors from `sector` on. The caller keeps within the size.
    pub(crate) fn write(&self, mut sector: u64, buf: &[u8]) -> io::Result<()> {
        debug_assert!((buf.len() as u64).is_multiple_of(SECTOR));
        let gate = self.open_gate()?;
        for part in buf.chunks(MAX_WRITE) {
            match self.mode {
                Mode::Log => self.append(sector, part)?,
                Mode::Hybrid => self.write_hybrid(sector, part)?,
                Mode::Sparse => self.write_sparse(sector, part)?,
            }
            sector += part.len() as u64 / SECTOR;
        }
        drop(gate);
        self.flush_if_much_is_pending()
    }

    /// Makes sectors `from..to` read as zeros. `hide` tells whether a layer below has data there.
    pub(crate) fn discard(&self, from: u64, to: u64, hide: bool) -> io::Result<()> {
        if self.mode == Mode::Sparse {
            let gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
            self.check_writable(*gate)?;
            return self.discard_sparse(from, to, hide);
        }
        let gate = self.open_gate()?;
        self.append_zeroed(from, to)?;
        drop(gate);
        self.flush_if_much_is_pending()
    }

    /// Makes everything durable that was written before. A failure to sync is final: the upper refuses everything until
    /// it is opened again.
    pub fn flush(&self) -> io::Result<()> {
        let flushing = lock(&self.flushing);
        self.check_failed()?;
        let gate = *self.gate.read().unwrap_or_else(PoisonError::into_inner); // not held: a sync takes its time
        match gate {
            Gate::Open => self.flush_locked(&flushing),
            Gate::Sealed => Ok(()),
            Gate::HalfSealed => Err(half_sealed()),
        }
    }

    /// The files' content is no longer known; says so from now on.
    pub(crate) fn fail(&self, error: io::Error) -> io::Error {
        self.failed.store(true, Ordering::Release);
        if let Some(notes) = &self.notes {
            notes.forget();
        }
        error!(%error, upper = self.data.name(), "sync of an upper failed; it is refused from now on");
        error
    }

    pub(crate) fn check_failed(&self) -> io::Result<()> {
        if self.failed.load(Ordering::Acquire) {
            return Err(io::Error::other("an earlier sync of the upper failed; it must be opened again"));
        }
        Ok(())
    }

    /// Waits until no flush is under way and keeps new ones out.
    pub(crate) fn keep_flushes_out(&self) -> MutexGuard<'_, ()> {
        lock(&self.flushing)
    }

    fn open_gate(&self) -> io::Result<RwLockReadGuard<'_, Gate>> {
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        self.check_writable(*gate)?;
        Ok(gate)
    }

    /// Waits until no write is under way and keeps new ones out.
    pub(crate) fn close_gate(&self) -> RwLockWriteGuard<'_, Gate> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn check_writable(&self, gate: Gate) -> io::Result<()> {
        self.check_failed()?;
        match gate {
            Gate::Open => Ok(()),
            Gate::Sealed => Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the upper has been sealed")),
            Gate::HalfSealed => Err(half_sealed()),
        }
    }

    fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn table_mut(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sector behind all appended data.
    pub(crate) fn append_position(&self) -> u64 {
        self.end.load(Ordering::Acquire)
    }

    /// The data file.
    pub(crate) fn data(&self) -> &Arc<dyn Storage> {
        &self.data
    }

    /// The data file, for reading.
    pub(crate) fn source(&self) -> &dyn Source {
        &*self.data
    }

    /// Calls `f` with the live index; keep it short, writers wait.
    pub(crate) fn with_live<T>(&self, f: impl FnOnce(&LiveIndex) -> T) -> T {
        f(&self.table().live)
    }

    /// What it is now, as a layer on the same data file: for whoever reads an upper that nobody writes meanwhile.
    #[must_use]
    pub fn to_layer(&self) -> Layer {
        let mut trailer = lock(&self.header).clone();
        let entries: Vec<Mapping> = self.with_live(|live| live.entries().collect());
        trailer.flags = trailer.flags.without(Flags::HEADER).with(Flags::SEALED);
        trailer.index_count = entries.len() as u64;
        trailer.index_offset = self.append_position() * SECTOR;
        Layer::from_sealed(Arc::clone(&self.data) as Arc<dyn Source>, trailer, Index::from_sorted(entries))
    }

    /// What the upper maps, cut at its size, and a guard that keeps the data of those entries on disk.
    pub(crate) fn pin(&self) -> (Vec<Mapping>, RwLockReadGuard<'_, ()>) {
        let pinned = self.pinned.read().unwrap_or_else(PoisonError::into_inner);
        (self.with_live(|live| live.entries().collect()), pinned)
    }
}

fn half_sealed() -> io::Error {
    io::Error::other("sealing the upper failed half-way; it must be opened again")
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
