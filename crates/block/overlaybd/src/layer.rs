//! A finished layer: opened, unwrapped, checked.
//!
//! From the outside in, a layer file is an optional tar member, an optional ZFile and an LSMT file. Which of them are
//! there is seen from the bytes alone.

use std::fmt;
use std::io;
use std::sync::Arc;

use aenv_model::Bytes;
use zerocopy::{FromZeros, IntoBytes};

use crate::header::{self, Header, HeaderProblem, Identity};
use crate::index::Index;
use crate::mapping::{FIRST_DATA_SECTOR, MAX_VIRTUAL_SIZE, Mapping, RawMapping, SECTOR};
use crate::source::{Source, Window};
use crate::tarwrap::{self, Member, TarProblem};
use crate::zfile::{OpenZFileError, ZFile, ZFileInfo, ZFileProblem};

/// Entries in one index, merged or not: 2 GiB of memory.
pub const MAX_ENTRIES: u64 = 128_000_000;

/// Entries read at once, so that memory grows with what is really there.
const READ_AT_ONCE: u64 = 1 << 16;

/// What is read at the end of a layer: a disk or a registry takes hardly longer for it than for the trailer alone.
const TAIL: u64 = 64 << 10;

/// A finished, immutable layer.
#[derive(Debug, Clone)]
pub struct Layer {
    payload: Arc<dyn Source>,
    packaging: Packaging,
    trailer: Header,
    index: Arc<Index>,
}

/// What a layer was wrapped in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Packaging {
    /// The tar member that holds it.
    pub tar: Option<Member>,
    /// The ZFile within.
    pub zfile: Option<ZFileInfo>,
}

/// Why a layer could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenLayerError {
    /// Its bytes could not be had.
    #[error("read {what} of {file} at byte {offset}")]
    Read {
        /// Which file.
        file: String,
        /// Which part.
        what: &'static str,
        /// Where, within the payload.
        offset: u64,
        /// Why.
        source: io::Error,
    },
    /// Its bytes are not a layer.
    #[error("{file} is not a usable overlaybd layer{origin}")]
    Format {
        /// Which file.
        file: String,
        /// From where its positions count.
        origin: Origin,
        /// What is wrong, and where.
        source: LayerProblem,
    },
}

/// From where the positions in a problem count; said in parentheses unless it is plain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The start of the file.
    File,
    /// Byte `offset` of the file, where its tar member begins.
    Member {
        /// Which byte.
        offset: u64,
    },
    /// The start of what a ZFile holds, once it is decompressed.
    Decompressed,
}

impl From<Packaging> for Origin {
    fn from(packaging: Packaging) -> Self {
        match packaging {
            Packaging { zfile: Some(_), .. } => Self::Decompressed,
            Packaging { tar: Some(member), .. } => Self::Member { offset: member.offset },
            Packaging { tar: None, zfile: None } => Self::File,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => Ok(()),
            Self::Member { offset } => {
                write!(f, " (bytes are counted from byte {offset}, where the tar member begins)")
            }
            Self::Decompressed => write!(f, " (bytes are counted in the decompressed content)"),
        }
    }
}

/// What is wrong with the bytes of a layer. Positions count from the start of the payload: the LSMT file itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayerProblem {
    /// The tar around it.
    #[error(transparent)]
    Tar(#[from] TarProblem),
    /// The ZFile around it.
    #[error(transparent)]
    ZFile(#[from] ZFileProblem),
    /// Header or trailer.
    #[error(transparent)]
    Header(#[from] HeaderProblem),
    /// Neither compressed nor plain.
    #[error("neither LSMT nor ZFile magic at byte {at}")]
    Unknown {
        /// Where either should be.
        at: u64,
    },
    /// No room for header and trailer.
    #[error("{size} bytes are too few for a header and a trailer ({} bytes)", 2 * header::BLOCK)]
    TooShort {
        /// Length of the payload.
        size: u64,
    },
    /// The index does not lie between header and trailer.
    #[error("{count} index entries at byte {offset} do not fit before the trailer at byte {trailer}")]
    IndexOutside {
        /// Claimed position.
        offset: u64,
        /// Claimed number.
        count: u64,
        /// Where the trailer is.
        trailer: u64,
    },
    /// More entries than are supported.
    #[error("byte {at}: {count} index entries, more than {MAX_ENTRIES}")]
    TooManyEntries {
        /// Where the number is stored.
        at: u64,
        /// Claimed number.
        count: u64,
    },
    /// Entries overlap or are not in order.
    #[error(
        "index entry {number} (byte {at}) begins at sector {offset}, before sector {previous_end} where its predecessor ends"
    )]
    Unsorted {
        /// Which entry.
        number: u64,
        /// Where it is stored.
        at: u64,
        /// Where its range begins.
        offset: u64,
        /// Where the range before it ends.
        previous_end: u64,
    },
    /// An entry reaches beyond what an index can address.
    #[error("index entry {number} (byte {at}) ends at sector {end}, beyond the largest device")]
    Unaddressable {
        /// Which entry.
        number: u64,
        /// Where it is stored.
        at: u64,
        /// Where its range ends.
        end: u64,
    },
    /// An entry points at something that is not data.
    #[error("index entry {number} (byte {at}) maps sectors {from}..{to}; data lies in {FIRST_DATA_SECTOR}..{data_end}")]
    MappedOutside {
        /// Which entry.
        number: u64,
        /// Where it is stored.
        at: u64,
        /// First sector of the file it points at.
        from: u64,
        /// The sector behind the last.
        to: u64,
        /// Where data ends.
        data_end: u64,
    },
}

impl Layer {
    /// Opens `source` after looking for a tar and a ZFile around it, and checks its whole index.
    pub fn open(source: Arc<dyn Source>) -> Result<Self, OpenLayerError> {
        let (payload, packaging) = unwrap(source)?;
        let name = payload.name().to_owned();
        let read_error = |what, offset| {
            let file = name.clone();
            move |source| OpenLayerError::Read { file, what, offset, source }
        };
        let origin = packaging.into();
        let format_error = |source: LayerProblem| OpenLayerError::Format { file: name.clone(), origin, source };

        let size = payload.size();
        let mut block = [0; header::BLOCK as usize];
        if size < header::BLOCK {
            return Err(format_error(LayerProblem::TooShort { size }));
        }
        payload.read_at(0, &mut block).map_err(read_error("the header", 0))?;
        let first = Header::parse(&block, 0).map_err(|_| {
            // The magic is looked for behind all wrappings, so this is the one place to say that nothing was found.
            format_error(LayerProblem::Unknown { at: 0 })
        })?;
        first.require_header(0).map_err(|problem| format_error(problem.into()))?;
        if size < 2 * header::BLOCK {
            return Err(format_error(LayerProblem::TooShort { size }));
        }
        let at = size - header::BLOCK;
        let tail = Tail::read(&*payload, size).map_err(read_error("the trailer", at))?;
        let trailer = Header::parse(tail.trailer(), at)
            .and_then(|trailer| trailer.require_trailer(at).map(|()| trailer))
            .map_err(|problem| format_error(problem.into()))?;

        let (offset, count) = (trailer.index_offset, trailer.index_count);
        if count > MAX_ENTRIES {
            return Err(format_error(LayerProblem::TooManyEntries { at: at + 40, count }));
        }
        // Cannot overflow: the count is small.
        let fits = offset >= header::BLOCK && offset.checked_add(count * RawMapping::SIZE).is_some_and(|end| end <= at);
        if !fits {
            return Err(format_error(LayerProblem::IndexOutside { offset, count, trailer: at }));
        }
        let mut check = IndexCheck { index_offset: offset, number: 0, entries: Vec::new() };
        let mut raw = vec![RawMapping::PADDING; count.min(READ_AT_ONCE) as usize];
        while check.number < count {
            let now = (count - check.number).min(READ_AT_ONCE);
            let part = &mut raw[..now as usize];
            part.zero();
            let from = offset + check.number * RawMapping::SIZE;
            if !tail.copy(from, part.as_mut_bytes()) {
                payload.read_at(from, part.as_mut_bytes()).map_err(read_error("the index", from))?;
            }
            check.take(part).map_err(format_error)?;
        }
        check.entries.shrink_to_fit();
        Ok(Self { payload, packaging, trailer, index: Arc::new(Index::from_sorted(check.entries)) })
    }

    /// A layer that was sealed a moment ago.
    pub(crate) fn from_sealed(payload: Arc<dyn Source>, trailer: Header, index: Index) -> Self {
        Self { payload, packaging: Packaging::default(), trailer, index: Arc::new(index) }
    }

    /// The LSMT file, unwrapped.
    #[must_use]
    pub fn payload(&self) -> &Arc<dyn Source> {
        &self.payload
    }

    /// What it was wrapped in.
    #[must_use]
    pub fn packaging(&self) -> Packaging {
        self.packaging
    }

    /// The block that says what this layer is.
    #[must_use]
    pub fn trailer(&self) -> &Header {
        &self.trailer
    }

    /// Who it is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.trailer.identity
    }

    /// Size of the device; 0 to inherit that of the layer below.
    #[must_use]
    pub fn virtual_size(&self) -> Bytes {
        self.trailer.virtual_size
    }

    /// Whether two values are the same open layer.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.index, &other.index)
    }

    pub(crate) fn shared_index(&self) -> Arc<Index> {
        Arc::clone(&self.index)
    }

    /// What it maps.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }
}

/// The end of a layer: the trailer and what was read with it, which is all of the index if that is not large.
struct Tail {
    at: u64,
    bytes: Vec<u8>,
}

impl Tail {
    /// `size` is that of the payload, which has a header and a trailer.
    fn read(payload: &dyn Source, size: u64) -> io::Result<Self> {
        let at = header::BLOCK.max(size.saturating_sub(TAIL));
        let mut tail = Self { at, bytes: vec![0; (size - at) as usize] };
        if payload.read_at(at, &mut tail.bytes).is_err() {
            // Damaged data before the index is for those to find who read it.
            tail.at = size - header::BLOCK;
            tail.bytes.truncate(header::BLOCK as usize);
            payload.read_at(tail.at, &mut tail.bytes)?;
        }
        Ok(tail)
    }

    fn trailer(&self) -> &[u8] {
        &self.bytes[self.bytes.len() - header::BLOCK as usize..]
    }

    /// Fills `out` from byte `from` of the payload, which is before the trailer, if all of that is here.
    fn copy(&self, from: u64, out: &mut [u8]) -> bool {
        let Some(bytes) = from.checked_sub(self.at).and_then(|skip| self.bytes.get(skip as usize..)) else {
            return false;
        };
        bytes.get(..out.len()).map(|bytes| out.copy_from_slice(bytes)).is_some()
    }
}

/// Takes the wrappings off, if there are any: gives the payload, whatever it is, and what it was wrapped in.
pub fn unwrap(source: Arc<dyn Source>) -> Result<(Arc<dyn Source>, Packaging), OpenLayerError> {
    let name = source.name().to_owned();
    let mut packaging = Packaging::default();
    let tar = tarwrap::detect(&*source)
        .map_err(|error| OpenLayerError::Read { file: name.clone(), what: "a tar header", offset: 0, source: error })?
        .map_err(|problem| OpenLayerError::Format {
            file: name.clone(),
            origin: Origin::File,
            source: problem.into(),
        })?;
    let source = match tar {
        Some(member) => Arc::new(Window::new(source, member.offset, member.size)),
        None => source,
    };
    packaging.tar = tar;
    let origin = packaging.into();
    let zfile = ZFile::open(Arc::clone(&source)).map_err(|error| match error {
        OpenZFileError::Read { file, what, offset, source } => OpenLayerError::Read { file, what, offset, source },
        OpenZFileError::Format { file, source } => OpenLayerError::Format { file, origin, source: source.into() },
    })?;
    packaging.zfile = zfile.as_ref().map(ZFile::info);
    Ok((zfile.map_or(source, |zfile| Arc::new(zfile) as Arc<dyn Source>), packaging))
}

/// Collects entries while checking that they are sorted, disjoint and point at data.
struct IndexCheck {
    index_offset: u64,
    /// Entries seen, padding included.
    number: u64,
    entries: Vec<Mapping>,
}

impl IndexCheck {
    fn take(&mut self, part: &[RawMapping]) -> Result<(), LayerProblem> {
        self.entries.reserve(part.len());
        let data_end = self.index_offset / SECTOR;
        let mut previous_end = self.entries.last().map_or(0, |last| last.end());
        for raw in part {
            let (number, at) = (self.number, self.index_offset + self.number * RawMapping::SIZE);
            self.number += 1;
            let Some(mapping) = raw.mapping() else { continue };
            if mapping.offset() < previous_end {
                return Err(LayerProblem::Unsorted { number, at, offset: mapping.offset(), previous_end });
            }
            if mapping.end() > MAX_VIRTUAL_SIZE / SECTOR {
                return Err(LayerProblem::Unaddressable { number, at, end: mapping.end() });
            }
            let (from, to) = (mapping.position(), mapping.position() + mapping.length());
            if !mapping.is_zeroed() && (from < FIRST_DATA_SECTOR || to > data_end) {
                return Err(LayerProblem::MappedOutside { number, at, from, to, data_end });
            }
            previous_end = mapping.end();
            self.entries.push(mapping);
        }
        Ok(())
    }
}
