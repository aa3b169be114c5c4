//! Header and trailer of a ZFile: 512 bytes each, 96 of them used.

use aenv_model::Bytes;
use serde::Serialize;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::codec::{Algorithm, BlockSize, raw_crc};

/// Bytes of a header or trailer block.
pub(super) const BLOCK: u64 = 512;

/// First bytes of a ZFile.
pub(crate) const MAGIC: [u8; 24] = *b"ZFile\x00\x01\x00tuji.yyf@Alibaba";

const HEADER: u64 = 1 << 0;
const DATA: u64 = 1 << 1;
const SEALED: u64 = 1 << 2;
const OVERWRITTEN: u64 = 1 << 3;
const DIGEST: u64 = 1 << 4;

const DIGEST_FIELD: std::ops::Range<usize> = 28..32;

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 24],
    size: U32,
    digest: U32,
    flags: U64,
    index_offset: U64,
    block_count: U64,
    original_size: U64,
    index_crc: U32,
    reserved_1: [u8; 4],
    block_size: U32,
    algorithm: u8,
    level: u8,
    use_dictionary: u8,
    reserved_2: [u8; 5],
    dictionary_size: U32,
    verify: u8,
    reserved_3: [u8; 7],
}

const _: () = assert!(size_of::<RawHeader>() == 96);

/// How a ZFile is made, from the block that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ZFileInfo {
    /// The compressor.
    pub algorithm: Algorithm,
    /// Uncompressed bytes of a block.
    pub block_size: BlockSize,
    /// Whether every block has a check sum.
    pub verify: bool,
    /// Whether the file's own structure has check sums.
    pub digest: bool,
    /// Whether the header has the final values, so that the trailer was not needed.
    pub header_overwritten: bool,
    /// Size before compression.
    pub original_size: Bytes,
    /// Number of blocks.
    pub block_count: u64,
    /// Where the jump table begins, in bytes.
    pub index_offset: u64,
}

/// What is wrong with a ZFile. Positions count from its start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ZFileProblem {
    /// No room for header and trailer.
    #[error("a ZFile of {size} bytes is too short for a header and a trailer")]
    TooShort {
        /// Its length.
        size: u64,
    },
    /// Where the trailer should be is something else.
    #[error("the ZFile magic is missing in the trailer at byte {at}")]
    TrailerMagic {
        /// Where it should be.
        at: u64,
    },
    /// The check sum of a header or trailer does not match.
    #[error("the digest of the ZFile {what} at byte {at} does not match")]
    Digest {
        /// Header or trailer.
        what: &'static str,
        /// Where it is.
        at: u64,
    },
    /// A flag has the wrong value.
    #[error("ZFile flags {flags:#x} at byte {at}: {what}")]
    Flags {
        /// Where the flags are.
        at: u64,
        /// What they are.
        flags: u64,
        /// Which bit is wrong, and how.
        what: &'static str,
    },
    /// A field has a value that is not supported.
    #[error("ZFile {field} {value} at byte {at} is not supported")]
    Unsupported {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Where it is.
        at: u64,
    },
    /// The number of blocks does not match the size.
    #[error("the ZFile of {original_size} bytes claims {count} blocks at byte {at}, not {expected}")]
    BlockCount {
        /// Where the number is stored.
        at: u64,
        /// Size before compression.
        original_size: u64,
        /// Claimed number.
        count: u64,
        /// Number that follows from the size.
        expected: u64,
    },
    /// The jump table does not lie where it should.
    #[error("the jump table of {count} blocks at byte {offset} does not fit before byte {limit}")]
    IndexOutside {
        /// Claimed position.
        offset: u64,
        /// Claimed number of blocks.
        count: u64,
        /// Where it must end.
        limit: u64,
    },
    /// The check sum of the jump table does not match.
    #[error("the check sum of the jump table at byte {at} does not match")]
    IndexCrc {
        /// Where it is.
        at: u64,
    },
    /// The length of a block is impossible.
    #[error("the jump table gives block {block} (byte {at}) a length of {length} bytes")]
    BlockLength {
        /// Which block.
        block: u64,
        /// Where its length is stored.
        at: u64,
        /// What it says.
        length: u32,
    },
    /// Blocks do not end where the jump table begins.
    #[error("the blocks end at byte {end}, not at byte {index_offset} where the jump table begins")]
    Sum {
        /// Where they end.
        end: u64,
        /// Where they should.
        index_offset: u64,
    },
}

/// A block that has the ZFile magic.
pub(super) struct ZHeader {
    raw: RawHeader,
    at: u64,
}

impl ZHeader {
    /// Parses a block of [`BLOCK`] bytes; `None` without the magic. A wrong digest is an error.
    pub(super) fn parse(
        block: &[u8; BLOCK as usize],
        at: u64,
        what: &'static str,
    ) -> Result<Option<Self>, ZFileProblem> {
        let Ok((raw, _)) = RawHeader::read_from_prefix(block) else { return Ok(None) };
        if raw.magic != MAGIC {
            return Ok(None);
        }
        if raw.flags.get() & DIGEST != 0 && raw.digest.get() != digest(block) {
            return Err(ZFileProblem::Digest { what, at });
        }
        Ok(Some(Self { raw, at }))
    }

    /// Whether this header says all, so that the trailer need not be read.
    pub(super) fn is_overwritten(&self) -> bool {
        self.raw.flags.get() & OVERWRITTEN != 0
    }

    pub(super) fn require_trailer(&self) -> Result<(), ZFileProblem> {
        let flags = self.raw.flags.get();
        let wrong = if flags & HEADER != 0 {
            "a trailer has the header bit (0) set"
        } else if flags & DATA == 0 {
            "the data bit (1) is clear"
        } else if flags & SEALED == 0 {
            "the sealed bit (2) is clear"
        } else {
            return Ok(());
        };
        Err(ZFileProblem::Flags { at: self.at + 32, flags, what: wrong })
    }

    /// The check sum the jump table must have, if it has one.
    pub(super) fn index_crc(&self) -> Option<u32> {
        (self.raw.flags.get() & DIGEST != 0).then(|| self.raw.index_crc.get())
    }

    /// Everything else, checked against a file in which the jump table must end at `limit`.
    pub(super) fn info(&self, limit: u64) -> Result<ZFileInfo, ZFileProblem> {
        let raw = &self.raw;
        let unsupported = |field, value, offset| ZFileProblem::Unsupported { field, value, at: self.at + offset };
        let block_size = BlockSize::new(raw.block_size.get())
            .ok_or_else(|| unsupported("block size", raw.block_size.get().into(), 72))?;
        let algorithm =
            Algorithm::from_code(raw.algorithm).ok_or_else(|| unsupported("algorithm", raw.algorithm.into(), 76))?;
        let dictionary = raw.dictionary_size.get();
        if dictionary != 0 {
            return Err(unsupported("dictionary size", dictionary.into(), 84));
        }
        let (original_size, count) = (raw.original_size.get(), raw.block_count.get());
        let expected = original_size.div_ceil(block_size.get() as u64);
        if count != expected {
            return Err(ZFileProblem::BlockCount { at: self.at + 48, original_size, count, expected });
        }
        let offset = raw.index_offset.get();
        let end = count.checked_mul(4).and_then(|length| offset.checked_add(length));
        if offset < BLOCK || end.is_none_or(|end| end > limit) {
            return Err(ZFileProblem::IndexOutside { offset, count, limit });
        }
        Ok(ZFileInfo {
            algorithm,
            block_size,
            verify: raw.verify != 0,
            digest: raw.flags.get() & DIGEST != 0,
            header_overwritten: self.is_overwritten(),
            original_size: Bytes(original_size),
            block_count: count,
            index_offset: offset,
        })
    }
}

/// Which of a ZFile's blocks to make.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Before anything is known.
    ProvisionalHeader,
    /// In place of the provisional one.
    FinalHeader,
    /// At the end.
    Trailer,
}

/// The block to be written; of a provisional header, sizes and positions in `info` are left out.
pub(super) fn to_block(kind: Kind, info: &ZFileInfo, index_crc: u32) -> [u8; BLOCK as usize] {
    let mut raw = RawHeader::new_zeroed();
    raw.magic = MAGIC;
    raw.size = U32::new(size_of::<RawHeader>() as u32);
    raw.flags = U64::new(match kind {
        Kind::ProvisionalHeader => HEADER | DATA | DIGEST,
        Kind::FinalHeader => HEADER | DATA | OVERWRITTEN | DIGEST,
        Kind::Trailer => DATA | SEALED | DIGEST,
    });
    if kind != Kind::ProvisionalHeader {
        raw.index_offset = U64::new(info.index_offset);
        raw.block_count = U64::new(info.block_count);
        raw.original_size = U64::new(info.original_size.get());
        raw.index_crc = U32::new(index_crc);
    }
    raw.block_size = U32::new(info.block_size.get() as u32);
    raw.algorithm = info.algorithm.code();
    raw.level = 0; // informational: the default
    raw.verify = u8::from(info.verify);
    let mut block = [0; BLOCK as usize];
    block[..size_of::<RawHeader>()].copy_from_slice(raw.as_bytes());
    let digest = digest(&block);
    block[DIGEST_FIELD].copy_from_slice(&digest.to_le_bytes());
    block
}

/// Check sum of a block, with its own field taken as zero.
fn digest(block: &[u8; BLOCK as usize]) -> u32 {
    let before = raw_crc(0, &block[..DIGEST_FIELD.start]);
    raw_crc(raw_crc(before, &[0; 4]), &block[DIGEST_FIELD.end..])
}
