//! Changing the size of a device that has an upper.

use std::io;
use std::sync::atomic::Ordering;

use aenv_model::Bytes;

use super::create::is_valid_size;
use super::{Gate, Mode, Upper, lock};
use crate::header::{BLOCK, Flags, Header};
use crate::mapping::{MAX_VIRTUAL_SIZE, SECTOR};
use crate::source::Storage;

/// Why a size could not be changed. After an I/O error the files may have either size.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The size is not one that a device can have.
    #[error("a device cannot have {0} bytes: zero, not a multiple of 512, or more than {MAX_VIRTUAL_SIZE}")]
    Size(u64),
    /// The upper no longer takes writes.
    #[error("the upper cannot be written")]
    Closed(#[source] io::Error),
    /// What the device is to grow by could not be made zeros.
    #[error("clear what the device grows by")]
    Clear(#[source] io::Error),
    /// A file could not be changed.
    #[error("{what} {file}")]
    Io {
        /// Which step failed.
        what: &'static str,
        /// On which file.
        file: String,
        /// Why.
        source: io::Error,
    },
}

impl Upper {
    /// Changes the size to `size`, and gives back what a smaller size cuts off. What a larger size adds is as the caller left
    /// it.
    pub(crate) fn resize(&self, size: Bytes) -> Result<(), ResizeError> {
        if size.get() == 0 || !is_valid_size(size.get()) {
            return Err(ResizeError::Size(size.get()));
        }
        let flushing = lock(&self.flushing);
        let gate = self.close_gate();
        self.check_writable(*gate).map_err(ResizeError::Closed)?;
        debug_assert!(*gate == Gate::Open);
        let old = self.virtual_size();
        let error = |what, file: &dyn Storage| {
            let file = file.name().to_owned();
            move |source| ResizeError::Io { what, file, source }
        };
        if size < old {
            let (from, to) = (size.get() / SECTOR, old.get() / SECTOR);
            match self.mode {
                Mode::Sparse => {
                    self.discard_sparse(from, to, false).map_err(error("discard the end of", &*self.data))?
                }
                Mode::Log | Mode::Hybrid => {
                    self.append_zeroed(from, to).map_err(error("note the end of", &*self.data))?
                }
            }
        }
        self.flush_locked(&flushing).map_err(error("flush", &*self.data))?;
        if self.mode == Mode::Sparse {
            self.data.set_length(BLOCK + size.get()).map_err(error("resize", &*self.data))?;
        }
        let mut header = lock(&self.header);
        header.virtual_size = size;
        self.write_headers(&header).map_err(|(what, file, source)| ResizeError::Io { what, file, source })?;
        self.virtual_size.store(size.get(), Ordering::Release);
        Ok(())
    }

    /// Takes `size` for an upper that was made without one.
    pub(crate) fn inherit_size(&self, size: Bytes) -> Result<(), ResizeError> {
        if self.virtual_size() != Bytes(0) || size == Bytes(0) { Ok(()) } else { self.resize(size) }
    }

    /// Rewrites the header of every file, the index first: when they differ after a crash, the data file's counts.
    fn write_headers(&self, header: &Header) -> Result<(), (&'static str, String, io::Error)> {
        let write = |file: &dyn Storage, header: &Header| {
            let error = |what| move |error| (what, file.name().to_owned(), error);
            file.write_at(0, &header.to_block()).map_err(error("write the header of"))?;
            file.sync().map_err(|sync_error| error("sync")(self.fail(sync_error)))
        };
        if let Some(log) = &self.index_log {
            let flags = header.flags.without(Flags::DATA);
            write(&*log.file, &Header { flags, index_offset: BLOCK, ..header.clone() })?;
        }
        write(&*self.data, header)
    }
}
