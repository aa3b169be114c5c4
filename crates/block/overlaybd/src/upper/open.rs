//! Opening an upper that was left behind, by a close or by a crash.

use std::io;
use std::sync::Arc;

use tracing::warn;
use zerocopy::{FromZeros, IntoBytes};

use super::create::is_valid_size;
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
    #[error("it was sealed: a trailer with its UUID is at byte {at}")]
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
    #[error("its UUID is {index}, that of the data file is {data}")]
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
        let require = |holds, what| header.require(0, holds, what).map_err(|problem| format(problem.into()));
        require(header.flags.has(Flags::DATA), "the data bit (1) is clear: this is an index file")?;
        require(!header.flags.has(Flags::SPARSE.with(Flags::HYBRID)), "sparse (4) and hybrid (5) are both set")?;
        let mode = Mode::of(header.flags);
        let size = header.virtual_size.get();
        if !is_valid_size(size) {
            return Err(format(UpperProblem::Size(size)));
        }
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
    let count = (length - BLOCK) / RawMapping::SIZE;
    if !(length - BLOCK).is_multiple_of(RawMapping::SIZE) {
        warn!(index = log.name(), length, "the index log ends within an entry; ignoring it");
    }
    let mut table = Table::default();
    let mut raw = vec![RawMapping::PADDING; count.min(READ_AT_ONCE) as usize];
    let (mut number, mut ignored) = (0, 0_u64);
    while number < count {
        let part = &mut raw[..(count - number).min(READ_AT_ONCE) as usize];
        part.zero();
        let at = BLOCK + number * RawMapping::SIZE;
        log.read_at(at, part.as_mut_bytes()).map_err(io_error(log, "read"))?;
        for raw in part.iter() {
            if let Some(mapping) = raw.mapping() {
                let in_header = !mapping.is_zeroed() && mapping.position() < FIRST_DATA_SECTOR;
                if in_header || mapping.end() > MAX_VIRTUAL_SIZE / SECTOR {
                    let at = BLOCK + number * RawMapping::SIZE;
                    let (from, to, position) = (mapping.offset(), mapping.end(), mapping.position());
                    return Err(format(UpperProblem::Entry { number, at, from, to, position }));
                }
                if mapping.is_zeroed() || mapping.position() + mapping.length() <= data_length / SECTOR {
                    table.live.insert(mapping, |_| {});
                } else {
                    ignored += 1;
                }
            }
            number += 1;
        }
    }
    if ignored > 0 {
        warn!(index = log.name(), ignored, "index entries point past the data; ignoring them");
    }
    Ok((table, BLOCK + count * RawMapping::SIZE))
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
