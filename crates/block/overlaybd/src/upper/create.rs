//! Making a fresh upper.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, RwLock};

use aenv_model::Bytes;
use uuid::Uuid;

use super::log::IndexLog;
use super::{Gate, Mode, Table, Upper};
use crate::header::{BLOCK, Flags, Header, Identity};
use crate::mapping::{FIRST_DATA_SECTOR, MAX_VIRTUAL_SIZE, SECTOR};
use crate::source::Storage;

/// What a fresh upper is to be.
#[derive(Debug, Clone)]
pub struct UpperOptions {
    /// Its layout.
    pub mode: Mode,
    /// Size of the device, a multiple of 512; 0 to take that of the layers below when it is opened on them.
    pub virtual_size: Bytes,
    /// Who it is.
    pub identity: Identity,
}

impl UpperOptions {
    /// A hybrid upper with a fresh UUID on a layer with UUID `parent`.
    #[must_use]
    pub fn new(virtual_size: Bytes, parent: Uuid) -> Self {
        Self { mode: Mode::Hybrid, virtual_size, identity: Identity::fresh(parent) }
    }
}

/// Why an upper could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateUpperError {
    /// The size is not one that a device can have.
    #[error("an upper cannot have {0} bytes: not a multiple of 512, or more than {MAX_VIRTUAL_SIZE}")]
    Size(u64),
    /// Log and hybrid have an index file, sparse has none.
    #[error("a {mode:?} upper cannot be made {} an index file", if *.has_index { "with" } else { "without" })]
    Files {
        /// The layout.
        mode: Mode,
        /// Whether there is an index file.
        has_index: bool,
    },
    /// A file could not be written.
    #[error("{what} {file}")]
    Write {
        /// Which step failed.
        what: &'static str,
        /// On which file.
        file: String,
        /// Why.
        source: io::Error,
    },
}

impl Upper {
    /// Makes a fresh upper in the given files, which lose what they had, and syncs them.
    pub fn create(
        data: Arc<dyn Storage>,
        index: Option<Arc<dyn Storage>>,
        options: &UpperOptions,
    ) -> Result<Self, CreateUpperError> {
        let size = options.virtual_size.get();
        if !is_valid_size(size) {
            return Err(CreateUpperError::Size(size));
        }
        if index.is_some() == (options.mode == Mode::Sparse) {
            return Err(CreateUpperError::Files { mode: options.mode, has_index: index.is_some() });
        }
        let header = Header {
            flags: Flags::HEADER.with(Flags::DATA).with(options.mode.flags()),
            index_offset: 0,
            index_count: 0,
            virtual_size: options.virtual_size,
            identity: options.identity.clone(),
            version: (1, 1),
        };
        if let Some(index) = &index {
            let header = Header { flags: header.flags.without(Flags::DATA), index_offset: BLOCK, ..header.clone() };
            write_fresh(&**index, &header, BLOCK)?;
        }
        let length = if options.mode == Mode::Sparse { BLOCK + size } else { BLOCK };
        write_fresh(&*data, &header, length)?;
        Ok(Self::assemble(options.mode, data, index, header, Table::default(), BLOCK, FIRST_DATA_SECTOR))
    }

    pub(super) fn assemble(
        mode: Mode,
        data: Arc<dyn Storage>,
        index: Option<Arc<dyn Storage>>,
        header: Header,
        table: Table,
        log_end: u64,
        data_end: u64,
    ) -> Self {
        Self {
            mode,
            data,
            index_log: index.map(|file| IndexLog { file, end: AtomicU64::new(log_end) }),
            virtual_size: AtomicU64::new(header.virtual_size.get()),
            header: Mutex::new(header),
            table: RwLock::new(table),
            end: AtomicU64::new(data_end),
            gate: RwLock::new(Gate::Open),
            flushing: Mutex::default(),
            pinned: RwLock::default(),
            notes: None,
            failed: AtomicBool::new(false),
        }
    }
}

pub(super) fn is_valid_size(size: u64) -> bool {
    size.is_multiple_of(SECTOR) && size <= MAX_VIRTUAL_SIZE
}

/// Empties `file`, gives it `header` and `length`, and syncs it.
fn write_fresh(file: &dyn Storage, header: &Header, length: u64) -> Result<(), CreateUpperError> {
    let step = |what, result: io::Result<()>| {
        result.map_err(|source| CreateUpperError::Write { what, file: file.name().to_owned(), source })
    };
    step("empty", file.set_length(0))?;
    step("write the header of", file.write_at(0, &header.to_block()))?;
    step("extend", file.set_length(length))?;
    step("sync", file.sync())
}
