//! Opening an upper that was left behind, by a close or by a crash.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tracing::{info, warn};
use zerocopy::{FromZeros, IntoBytes};

use super::create::is_valid_size;
use super::live::LiveIndex;
use super::notes::Notes;
use super::{Mode, Table, Upper};
use crate::header::{BLOCK, Flags, Header, HeaderProblem};
use crate::mapping::{FIRST_DATA_SECTOR, MAX_LENGTH, MAX_VIRTUAL_SIZE, Mapping, RawMapping, SECTOR};
use crate::source::{Source, Storage};

/// Entries of the index log read at once.
const READ_AT_ONCE: u64 = 1 << 16;

/// Why an upper could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenUpperError {
    /// A file could not be read or prepared.
    #[error("{what} {file}")]
    Io {
        /// Which step failed.
        what: &'static str,
        /// On which file.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// A file is not part of an upper.
    #[error("{file} is not a usable upper")]
    Format {
        /// Which file.
        file: String,
        /// What is wrong, and where.
        source: UpperProblem,
    },
}

/// What is wrong with a file of an upper.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UpperProblem {
    /// No room for a header.
    #[error("{0} bytes are too few for a header")]
    TooShort(u64),
    /// The header is none, or that of something else.
    #[error(transparent)]
    Header(#[from] HeaderProblem),
    /// It has become a layer.
    #[error("it was sealed and is a layer now: its trailer is at byte {at}")]
    Sealed {
        /// Where the trailer is.
        at: u64,
    },
    /// A device cannot have this size.
    #[error("byte 48: {0} is not a valid size of a device")]
    Size(u64),
    /// Log and hybrid need an index file, sparse has none.
    #[error("it is {mode:?} and comes {} an index file", if *.has_index { "with" } else { "without" })]
    Files {
        /// The layout its header tells.
        mode: Mode,
        /// Whether there is an index file.
        has_index: bool,
    },
    /// Data and index are of different uppers.
    #[error("its UUID at byte 56 is {index}, that of the data file is {data}")]
    OtherUpper {
        /// UUID in the index file.
        index: uuid::Uuid,
        /// UUID in the data file.
        data: uuid::Uuid,
    },
    /// An entry points at the header, or beyond what can be addressed.
    #[error("entry {number} (byte {at}) maps sectors {from}..{to} of the device to sector {position}")]
    Entry {
        /// Which entry.
        number: u64,
        /// Where it is stored.
        at: u64,
        /// First sector it maps.
        from: u64,
        /// The sector behind the last.
        to: u64,
        /// Where it says they are.
        position: u64,
    },
}

impl Upper {
    /// Opens the files of an upper. Takes whatever a crash can leave: a torn index entry, entries whose data is missing and
    /// the beginnings of a seal are ignored.
    ///
    /// The caller sees to it that nobody else has them open.
    pub fn open(data: Arc<dyn Storage>, index: Option<Arc<dyn Storage>>) -> Result<Self, OpenUpperError> {
        let length = data.length().map_err(io_error(&*data, "measure"))?;
        let header = read_header(&*data, length)?;
        let format = |source: UpperProblem| OpenUpperError::Format { file: data.name().to_owned(), source };
        let mode = Mode::of_upper(&header).map_err(format)?;
        let size = header.virtual_size.get();
        if index.is_some() == (mode == Mode::Sparse) {
            return Err(format(UpperProblem::Files { mode, has_index: index.is_some() }));
        }
        if let Some(at) = trailer_position(&*data, length, &header).map_err(io_error(&*data, "read the end of"))? {
            return Err(format(UpperProblem::Sealed { at }));
        }
        match &index {
            None => {
                let table = rebuild_sparse(&*data, size).map_err(io_error(&*data, "find the data in"))?;
                Ok(Self::assemble(mode, data, None, header, table, 0, 0))
            }
            Some(log) => {
                let (table, log_end) = replay(&**log, &header, length)?;
                let data_end = length.div_ceil(SECTOR);
                Ok(Self::assemble(mode, data, index, header, table, log_end, data_end))
            }
        }
    }
}

impl Upper {
    /// Takes notes at `path` from now on, so that nothing that was written is lost when this process ends but the host does
    /// not. What an earlier process noted there is what was written last. Before it is written to. A sparse upper needs none.
    pub fn take_notes(&mut self, path: &Path) -> Result<(), OpenUpperError> {
        if self.index_log.is_none() {
            return Ok(());
        }
        let failed = |source| OpenUpperError::Io { what: "take notes at", file: path.display().to_string(), source };
        let (notes, entries) = Notes::resume(path, self.identity().uuid).map_err(failed)?;
        let length = self.data.length().map_err(io_error(&*self.data, "measure"))?;
        for (number, entry) in (0..).zip(&entries) {
            check_entry(*entry, number)
                .map_err(|source| OpenUpperError::Format { file: path.display().to_string(), source })?;
            if !entry.is_zeroed() && (entry.position() + entry.length()) > length / SECTOR {
                return Err(failed(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{entry:?} is beyond the data"),
                )));
            }
        }
        if !entries.is_empty() {
            info!(upper = self.data.name(), entries = entries.len(), "an earlier process wrote, and did not flush");
        }
        self.table_mut().add_again(entries);
        self.notes = Some(notes);
        Ok(())
    }

    /// Where notes are taken.
    pub(crate) fn notes(&self) -> Option<&Notes> {
        self.notes.as_ref()
    }

    /// Gives a fresh upper notes that have nothing to tell.
    pub(crate) fn set_notes(&mut self, notes: Notes) {
        self.notes = Some(notes);
    }

    pub(crate) fn notes_mut(&mut self) -> Option<&mut Notes> {
        self.notes.as_mut()
    }
}

/// Whether an entry can be one of an upper's.
fn check_entry(mapping: Mapping, number: u64) -> Result<(), UpperProblem> {
    let in_header = !mapping.is_zeroed() && mapping.position() < FIRST_DATA_SECTOR;
    if in_header || mapping.end() > MAX_VIRTUAL_SIZE / SECTOR {
        let at = BLOCK + number * RawMapping::SIZE;
        let (from, to, position) = (mapping.offset(), mapping.end(), mapping.position());
        return Err(UpperProblem::Entry { number, at, from, to, position });
    }
    Ok(())
}

impl Mode {
    /// The layout of the upper whose data file has this `header`.
    pub(crate) fn of_upper(header: &Header) -> Result<Self, UpperProblem> {
        header.require(0, header.flags.has(Flags::DATA), "the data bit (1) is clear: this is an index file")?;
        let both = header.flags.has(Flags::SPARSE.with(Flags::HYBRID));
        header.require(0, !both, "sparse (4) and hybrid (5) are both set")?;
        let size = header.virtual_size.get();
        if is_valid_size(size) { Ok(Self::of(header.flags)) } else { Err(UpperProblem::Size(size)) }
    }
}

/// Reads the first block; it must be an unsealed header.
fn read_header(file: &dyn Storage, length: u64) -> Result<Header, OpenUpperError> {
    let format = |source: UpperProblem| OpenUpperError::Format { file: file.name().to_owned(), source };
    if length < BLOCK {
        return Err(format(UpperProblem::TooShort(length)));
    }
    let mut block = [0; BLOCK as usize];
    file.read_at(0, &mut block).map_err(io_error(file, "read the header of"))?;
    let check = |header: Header| {
        header.require_header(0)?;
        header.require(0, !header.flags.has(Flags::SEALED), "the sealed bit (2) is set")?;
        Ok(header)
    };
    Header::parse(&block, 0).and_then(check).map_err(|problem: HeaderProblem| format(problem.into()))
}

/// Where the trailer of this very file is, if it was sealed. A guest may well have written somebody else's trailer last;
/// that one has another UUID.
pub(super) fn trailer_position(file: &dyn Storage, length: u64, header: &Header) -> io::Result<Option<u64>> {
    if length < 2 * BLOCK {
        return Ok(None);
    }
    let at = length - BLOCK;
    let mut block = [0; BLOCK as usize];
    file.read_at(at, &mut block)?;
    let is_ours = |trailer: &Header| {
        trailer.require_trailer(at).is_ok() && trailer.identity == header.identity && trailer.index_offset >= BLOCK
    };
    Ok(Header::parse(&block, at).ok().filter(is_ours).map(|_| at))
}

/// Replays the index log into a live index; also gives the place of the next entry.
fn replay(log: &dyn Storage, data: &Header, data_length: u64) -> Result<(Table, u64), OpenUpperError> {
    let format = |source: UpperProblem| OpenUpperError::Format { file: log.name().to_owned(), source };
    let length = log.length().map_err(io_error(log, "measure"))?;
    let header = read_header(log, length)?;
    let is_index = !header.flags.has(Flags::DATA);
    header
        .require(0, is_index, "the data bit (1) is set: this is a data file")
        .map_err(|problem| format(problem.into()))?;
    if header.identity.uuid != data.identity.uuid {
        let (index, data) = (header.identity.uuid, data.identity.uuid);
        return Err(format(UpperProblem::OtherUpper { index, data }));
    }
    let Log { live, torn, ignored, end, .. } = Log::read(log, length, data_length)?;
    if torn > 0 {
        warn!(index = log.name(), length, "the index log ends within an entry; ignoring it");
    }
    if ignored > 0 {
        warn!(index = log.name(), ignored, "index entries point past the data; ignoring them");
    }
    Ok((Table { live, ..Table::default() }, end))
}

/// What an index log says.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// The newest entry of each sector.
    pub(crate) live: LiveIndex,
    /// Entries that are no padding.
    pub(crate) entries: u64,
    /// Those that point past the data, which do not count.
    ignored: u64,
    /// Bytes behind the last whole entry.
    pub(crate) torn: u64,
    /// Where the next entry goes.
    end: u64,
    /// Where the last data is that an entry points at, in bytes.
    pub(crate) data_end: u64,
}

impl Log {
    /// Reads the entries of a file of `length` bytes, which has a header. Those whose data is not within a data file of
    /// `data_length` bytes are left out.
    pub(crate) fn read(file: &dyn Source, length: u64, data_length: u64) -> Result<Self, OpenUpperError> {
        let count = (length - BLOCK) / RawMapping::SIZE;
        let end = BLOCK + count * RawMapping::SIZE;
        let mut log = Self { torn: length - end, end, ..Self::default() };
        let mut raw = vec![RawMapping::PADDING; count.min(READ_AT_ONCE) as usize];
        let mut number = 0;
        while number < count {
            let part = &mut raw[..(count - number).min(READ_AT_ONCE) as usize];
            part.zero();
            let at = BLOCK + number * RawMapping::SIZE;
            file.read_at(at, part.as_mut_bytes()).map_err(io_error(file, "read"))?;
            for raw in part.iter() {
                if let Some(mapping) = raw.mapping() {
                    log.take(mapping, number, data_length)
                        .map_err(|source| OpenUpperError::Format { file: file.name().to_owned(), source })?;
                }
                number += 1;
            }
        }
        Ok(log)
    }

    fn take(&mut self, mapping: Mapping, number: u64, data_length: u64) -> Result<(), UpperProblem> {
        check_entry(mapping, number)?;
        self.entries += 1;
        let data_end = if mapping.is_zeroed() { 0 } else { (mapping.position() + mapping.length()) * SECTOR };
        if data_end / SECTOR <= data_length / SECTOR {
            self.data_end = self.data_end.max(data_end);
            self.live.insert(mapping, |_| {});
        } else {
            self.ignored += 1;
        }
        Ok(())
    }
}

/// What is not a hole, within the device.
fn rebuild_sparse(data: &dyn Storage, size: u64) -> io::Result<Table> {
    let mut table = Table::default();
    for range in data.data_ranges(BLOCK..BLOCK + size)? {
        let (mut from, to) = (range.start / SECTOR, range.end.div_ceil(SECTOR));
        while from < to {
            let length = MAX_LENGTH.min(to - from);
            table.live.insert(Mapping::data(from - FIRST_DATA_SECTOR, length, from), |_| {});
            from += length;
        }
    }
    Ok(table)
}

fn io_error(file: &dyn Source, what: &'static str) -> impl FnOnce(io::Error) -> OpenUpperError + use<> {
    let file = file.name().to_owned();
    move |source| OpenUpperError::Io { what, file, source }
}
