//! Sealing an upper in place: its data file becomes a layer, in time that does not depend on how much was written.
//!
//! The index goes behind the data, the trailer behind the index. Each is durable before the next is written: a file with a
//! trailer has all that the trailer promises, and a file without one is still the upper it was. Hashing is left to whoever
//! needs a digest.

use std::io;
use std::sync::Arc;

use aenv_model::Bytes;
use zerocopy::IntoBytes;

use crate::header::{BLOCK, Header, sealed_copy};
use crate::index::Index;
use crate::layer::Layer;
use crate::mapping::{RawMapping, SECTOR};
use crate::source::{Source, Storage};
use crate::upper::{Gate, Mode, Upper};

/// What fills the sector behind the index.
const INDEX_PADDING: u8 = 0xFF;

/// Why an upper could not be sealed.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// It no longer took writes before; nothing was changed.
    #[error("the upper cannot be written")]
    Closed(#[source] io::Error),
    /// A file could not be written. Where there was no room, the upper is as it was, if [it takes writes](Upper::takes_writes);
    /// else it is refused from now on: open it again to see whether it is sealed.
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
    /// Turns the data file into a layer and makes it durable. Waits for writes that are under way; later ones are refused,
    /// reads go on. The index file is no longer needed.
    pub fn seal(&self) -> Result<SealedUpper, SealError> {
        let _flushing = self.keep_flushes_out();
        let mut gate = self.close_gate();
        self.check_writable(*gate).map_err(SealError::Closed)?;
        *gate = Gate::HalfSealed;
        let file = &**self.data();
        let before = file.length().map_err(self.sealing("measure"))?;
        let sealed = self.write_seal(file);
        // What was written of the seal is cut off again. After a failed sync nobody knows what is there.
        *gate = match &sealed {
            Ok(_) => Gate::Sealed,
            Err(_) if self.check_failed().is_ok() && file.set_length(before).is_ok() => Gate::Open,
            Err(_) => Gate::HalfSealed,
        };
        sealed
    }

    /// Writes index and trailer.
    fn write_seal(&self, file: &dyn Storage) -> Result<SealedUpper, SealError> {
        let error = |what| self.sealing(what);
        let mut at = self.end_of_data().map_err(error("measure"))?;
        if self.mode() == Mode::Sparse {
            file.set_length(at).map_err(error("cut"))?; // the beginnings of an earlier seal
        }
        at = at.next_multiple_of(SECTOR);
        let mut entries = Vec::with_capacity(self.entries());
        let mut index = Vec::with_capacity(self.entries() * RawMapping::SIZE as usize + 2 * BLOCK as usize);
        self.with_live(|live| {
            for entry in live.entries() {
                entries.push(entry);
                index.extend_from_slice(RawMapping::from(entry).as_bytes());
            }
        });
        index.resize(index.len().next_multiple_of(SECTOR as usize), INDEX_PADDING);
        let end = (at + index.len() as u64).next_multiple_of(BLOCK);
        index.resize((end - at) as usize, 0);
        file.write_at(at, &index).map_err(error("write the index of"))?;
        file.sync().map_err(|sync_error| error("sync")(self.fail(sync_error)))?;

        let mut header = [0; BLOCK as usize];
        file.read_at(0, &mut header).map_err(error("read the header of"))?;
        let trailer = sealed_copy(&header, at, entries.len() as u64);
        file.write_at(end, &trailer).map_err(error("write the trailer of"))?;
        file.sync().map_err(|sync_error| error("sync")(self.fail(sync_error)))?;

        let trailer = Header::parse(&trailer, end).map_err(|problem| error("seal")(io::Error::other(problem)))?;
        Ok(SealedUpper { trailer, index: Index::from_sorted(entries), size: Bytes(end + BLOCK) })
    }

    fn sealing(&self, what: &'static str) -> impl FnOnce(io::Error) -> SealError + use<> {
        let file = self.data().name().to_owned();
        move |source| SealError::Io { what, file, source }
    }

    /// Where the index may begin, in bytes.
    fn end_of_data(&self) -> io::Result<u64> {
        match self.mode() {
            Mode::Sparse => Ok(BLOCK + self.virtual_size().get()),
            Mode::Log | Mode::Hybrid => {
                let reserved = self.append_position() * SECTOR;
                Ok(reserved.max(self.data().length()?))
            }
        }
    }
}

/// An upper that has become a layer, and where it is known what is in it.
#[derive(Debug)]
pub struct SealedUpper {
    trailer: Header,
    index: Index,
    size: Bytes,
}

impl SealedUpper {
    /// Size of the layer file.
    #[must_use]
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// The trailer it got.
    #[must_use]
    pub fn trailer(&self) -> &Header {
        &self.trailer
    }

    /// The layer, read from `source`, which has the data file's bytes. Saves reading the index back.
    #[must_use]
    pub fn into_layer(self, source: Arc<dyn Source>) -> Layer {
        Layer::from_sealed(source, self.trailer, self.index)
    }
}
