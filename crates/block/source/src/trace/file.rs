//! The trace file of overlaybd's prefetch layers.
//!
//! ```text
//!  u32 magic │ u32 0 │ u64 bytes of records │ u32 checksum │ u32 0        all little-endian
//!  u8 'R' or 'W' │ 3 × 0 │ u32 layer │ u64 length │ i64 offset            … for each record
//! ```
//!
//! Two checksums are in use: plain CRC-32C, and one that leaves out its complements at both ends. Both are read; the
//! plain one is written.

use std::io;
use std::path::{Path, PathBuf};

use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Access, MAX_ACCESSES, Trace};

const MAGIC: u32 = 3_270_449_184;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: U32,
    reserved: [u8; 4],
    length: U64,
    checksum: U32,
    reserved_too: [u8; 4],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Record {
    operation: u8,
    reserved: [u8; 3],
    layer: U32,
    length: U64,
    offset: I64,
}

const _: () = assert!(size_of::<Header>() == 24 && size_of::<Record>() == 24);

/// A trace can't be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadTraceError {
    /// The file can't.
    #[error("read trace {path}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It is no trace.
    #[error("{path} is not a trace", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: TraceProblem,
    },
}

/// What is wrong with a trace file.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TraceProblem {
    /// Shorter or longer than its header says, or not of whole records.
    #[error("its length does not fit its header")]
    Length,
    /// Too long to be one.
    #[error("it has more than {MAX_ACCESSES} records")]
    TooLong,
    /// Begins with something else.
    #[error("it does not begin with a trace's magic number")]
    Magic,
    /// Damaged.
    #[error("its checksum is wrong")]
    Checksum,
    /// A record that makes no sense.
    #[error("record {0} makes no sense")]
    Record(usize),
}

impl Trace {
    /// Reads a trace file. Writes that it tells of are left out.
    pub fn read(path: &Path) -> Result<Self, ReadTraceError> {
        let read = || {
            let length = std::fs::metadata(path)?.len();
            let longest = (size_of::<Header>() + MAX_ACCESSES * size_of::<Record>()) as u64;
            if length > longest { Ok(None) } else { std::fs::read(path).map(Some) }
        };
        let format = |source| ReadTraceError::Format { path: path.to_owned(), source };
        match read() {
            Ok(Some(bytes)) => Self::parse(&bytes).map_err(format),
            Ok(None) => Err(format(TraceProblem::TooLong)),
            Err(source) => Err(ReadTraceError::Io { path: path.to_owned(), source }),
        }
    }

    /// Replaces the file at `path` by this trace. It is there whole or not at all.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        aenv_durable::atomic_write(path, &self.to_bytes(), 0o644)
    }

    fn parse(bytes: &[u8]) -> Result<Self, TraceProblem> {
        let (header, records) = Header::ref_from_prefix(bytes).map_err(|_| TraceProblem::Length)?;
        if header.magic.get() != MAGIC {
            return Err(TraceProblem::Magic);
        }
        if header.length.get() != records.len() as u64 || !records.len().is_multiple_of(size_of::<Record>()) {
            return Err(TraceProblem::Length);
        }
        let checksum = header.checksum.get();
        if checksum != crc32c::crc32c(records) && checksum != raw_crc(records) {
            return Err(TraceProblem::Checksum);
        }
        let mut accesses = Vec::new();
        for (number, bytes) in records.chunks_exact(size_of::<Record>()).enumerate() {
            let problem = TraceProblem::Record(number);
            let Ok(record) = Record::ref_from_bytes(bytes) else { return Err(problem) };
            match (record.operation, u64::try_from(record.offset.get())) {
                (b'R', Ok(offset)) => {
                    accesses.push(Access { layer: record.layer.get(), offset, length: record.length.get() });
                }
                (b'W', Ok(_)) => {}
                _ => return Err(problem),
            }
        }
        Ok(Self { accesses })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut records = Vec::with_capacity(self.accesses.len() * size_of::<Record>());
        for access in &self.accesses {
            let record = Record {
                operation: b'R',
                reserved: [0; 3],
                layer: access.layer.into(),
                length: access.length.into(),
                offset: I64::new(access.offset as i64), // no layer is that long
            };
            records.extend_from_slice(record.as_bytes());
        }
        let header = Header {
            magic: MAGIC.into(),
            reserved: [0; 4],
            length: U64::new(records.len() as u64),
            checksum: crc32c::crc32c(&records).into(),
            reserved_too: [0; 4],
        };
        [header.as_bytes(), &records].concat()
    }
}

/// CRC-32C that starts from 0 and is not complemented at the end.
fn raw_crc(bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!0, bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn trace() -> Trace {
        Trace {
            accesses: vec![
                Access { layer: 3, offset: 1 << 40, length: 4096 },
                Access { layer: 0, offset: 0, length: 1 },
            ],
        }
    }

    #[test]
    fn a_trace_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace");
        for trace in [trace(), Trace::default()] {
            trace.write(&path).unwrap();
            assert_eq!(Trace::read(&path).unwrap(), trace);
        }
        std::fs::write(&path, b"").unwrap();
        assert!(matches!(Trace::read(&path).unwrap_err(), ReadTraceError::Format { source: TraceProblem::Length, .. }));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Trace::read(&path).unwrap_err(), ReadTraceError::Io { .. }));
    }

    #[test]
    fn both_checksums_are_read_and_no_third() {
        let mut bytes = trace().to_bytes();
        assert_eq!(bytes[..4], [0x20, 0x18, 0xEF, 0xC2]);
        // The reflected polynomial, bit by bit, without complements.
        let raw = bytes[24..].iter().fold(0u32, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg()))
        });
        bytes[16..20].copy_from_slice(&raw.to_le_bytes());
        assert_eq!(Trace::parse(&bytes).unwrap(), trace());
        bytes[16] ^= 1;
        assert_eq!(Trace::parse(&bytes).unwrap_err(), TraceProblem::Checksum);
    }

    #[test]
    fn what_is_no_trace_is_refused_with_the_reason() {
        let good = trace().to_bytes();
        let changed = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            let sum = crc32c::crc32c(&bytes[24..]).to_le_bytes();
            bytes[16..20].copy_from_slice(&sum);
            Trace::parse(&bytes)
        };
        assert_eq!(changed(0, 1).unwrap_err(), TraceProblem::Magic);
        assert_eq!(changed(8, 47).unwrap_err(), TraceProblem::Length);
        assert_eq!(changed(24, b'X').unwrap_err(), TraceProblem::Record(0));
        assert_eq!(changed(71, 0xFF).unwrap_err(), TraceProblem::Record(1));
        assert_eq!(changed(24, b'W').unwrap().accesses(), &trace().accesses[1..]);
        for length in [0, 23, 24, good.len() - 1] {
            assert_eq!(Trace::parse(&good[..length]).unwrap_err(), TraceProblem::Length);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200), honest in any::<bool>()) {
            if honest && bytes.len() >= 24 {
                let length = (bytes.len() - 24) as u64;
                let sum = crc32c::crc32c(&bytes[24..]);
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
                bytes[8..16].copy_from_slice(&length.to_le_bytes());
                bytes[16..20].copy_from_slice(&sum.to_le_bytes());
            }
            if let Ok(trace) = Trace::parse(&bytes) {
                prop_assert_eq!(Trace::parse(&trace.to_bytes()).unwrap(), trace);
            }
        }
    }
}
