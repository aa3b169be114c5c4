//! Header and trailer of an LSMT file: 4096 bytes each, 390 of them used.
//!
//! The same structure opens a file and, once it is sealed, closes it; bit 0 of the flags tells which of the two it is. What
//! a finished layer is, its trailer says; its header may still be that of the upper it once was.

use aenv_model::Bytes;
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a header or trailer block.
pub(crate) const BLOCK: u64 = 4096;

/// First bytes of an LSMT file.
pub(crate) const MAGIC: [u8; 24] = [
    b'L', b'S', b'M', b'T', 0, 1, 2, 0, // and a fixed UUID
    0x65, 0x7E, 0x63, 0xD2, 0x94, 0x44, 0x08, 0x4C, 0xA2, 0xD2, 0xC8, 0xEC, 0x4F, 0xCF, 0xAE, 0x8A,
];

/// Longest user tag.
pub const USER_TAG_LENGTH: usize = 256;

const UUID_TEXT: usize = 37;

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 24],
    size: U32,
    flags: U32,
    index_offset: U64,
    index_count: U64,
    virtual_size: U64,
    uuid: [u8; UUID_TEXT],
    parent_uuid: [u8; UUID_TEXT],
    reserved: [u8; 2],
    version: u8,
    sub_version: u8,
    user_tag: [u8; USER_TAG_LENGTH],
}

const _: () = assert!(size_of::<RawHeader>() == 390);

/// The flag word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flags(pub u32);

impl Flags {
    /// A header; clear in a trailer.
    pub const HEADER: Self = Self(1 << 0);
    /// A data file; clear in the index file of an upper.
    pub const DATA: Self = Self(1 << 1);
    /// Finished; clear while open for writing.
    pub const SEALED: Self = Self(1 << 2);
    /// Data lies at its logical offset, holes are unmapped.
    pub const SPARSE: Self = Self(1 << 4);
    /// Rewrites of mapped sectors go in place.
    pub const HYBRID: Self = Self(1 << 5);

    /// Whether all bits of `other` are set.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both sets of bits.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Without the bits of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// Free bytes that travel with a layer: up to 256, without trailing NULs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserTag(Vec<u8>);

impl UserTag {
    /// Takes `bytes`, or gives back none if they are more than [`USER_TAG_LENGTH`].
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (bytes.len() <= USER_TAG_LENGTH).then(|| Self(trim_nul(bytes).to_vec()))
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Who a layer is. A nil UUID stands for none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// This layer.
    pub uuid: Uuid,
    /// The layer it was made on.
    pub parent: Uuid,
    /// What its maker wanted to say.
    pub user_tag: UserTag,
}

impl Identity {
    /// A fresh UUID on `parent`, no tag.
    #[must_use]
    pub fn fresh(parent: Uuid) -> Self {
        Self { uuid: Uuid::new_v4(), parent, user_tag: UserTag::default() }
    }
}

/// A header or trailer, parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// What kind of block of what kind of file this is.
    pub flags: Flags,
    /// Where the index begins, in bytes. 0 in the header of a data file.
    pub index_offset: u64,
    /// Number of index entries, padding included.
    pub index_count: u64,
    /// Size of the device; 0 to inherit that of the layer below.
    pub virtual_size: Bytes,
    /// Who this is.
    pub identity: Identity,
    /// Version and sub-version, as stored.
    pub version: (u8, u8),
}

/// What is wrong with a block that should be a header or trailer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderProblem {
    /// Not LSMT at all.
    #[error("the LSMT magic is missing at byte {at}")]
    Magic {
        /// Where the block begins.
        at: u64,
    },
    /// A flag has the wrong value.
    #[error("flags {flags:#x} at byte {at}: {what}")]
    Flags {
        /// Where the flags are.
        at: u64,
        /// What they are.
        flags: u32,
        /// Which bit is wrong, and how.
        what: &'static str,
    },
}

impl Header {
    /// Parses the block of 4096 bytes that was read at `at`; checks the magic only.
    pub fn parse(block: &[u8], at: u64) -> Result<Self, HeaderProblem> {
        let Ok((raw, _)) = RawHeader::ref_from_prefix(block) else { return Err(HeaderProblem::Magic { at }) };
        if raw.magic != MAGIC {
            return Err(HeaderProblem::Magic { at });
        }
        Ok(Self {
            flags: Flags(raw.flags.get()),
            index_offset: raw.index_offset.get(),
            index_count: raw.index_count.get(),
            virtual_size: Bytes(raw.virtual_size.get()),
            identity: Identity {
                uuid: parse_uuid(&raw.uuid),
                parent: parse_uuid(&raw.parent_uuid),
                user_tag: UserTag(trim_nul(&raw.user_tag).to_vec()),
            },
            version: (raw.version, raw.sub_version),
        })
    }

    /// Checks what a header must have.
    pub fn require_header(&self, at: u64) -> Result<(), HeaderProblem> {
        self.require(at, self.flags.has(Flags::HEADER), "the header bit (0) is clear")
    }

    /// Checks what the trailer of a finished layer must have.
    pub fn require_trailer(&self, at: u64) -> Result<(), HeaderProblem> {
        self.require(at, !self.flags.has(Flags::HEADER), "a trailer has the header bit (0) set")?;
        self.require(at, self.flags.has(Flags::DATA), "the data bit (1) is clear: this is an index file")?;
        self.require(at, self.flags.has(Flags::SEALED), "the sealed bit (2) is clear")
    }

    pub(crate) fn require(&self, at: u64, holds: bool, what: &'static str) -> Result<(), HeaderProblem> {
        if holds { Ok(()) } else { Err(HeaderProblem::Flags { at: at + 28, flags: self.flags.0, what }) }
    }

    /// The block to be written.
    #[must_use]
    pub fn to_block(&self) -> [u8; BLOCK as usize] {
        let mut raw = RawHeader::new_zeroed();
        raw.magic = MAGIC;
        raw.size = U32::new(size_of::<RawHeader>() as u32);
        raw.flags = U32::new(self.flags.0);
        raw.index_offset = U64::new(self.index_offset);
        raw.index_count = U64::new(self.index_count);
        raw.virtual_size = U64::new(self.virtual_size.get());
        write_uuid(&mut raw.uuid, self.identity.uuid);
        write_uuid(&mut raw.parent_uuid, self.identity.parent);
        (raw.version, raw.sub_version) = self.version;
        raw.user_tag[..self.identity.user_tag.0.len()].copy_from_slice(&self.identity.user_tag.0);
        let mut block = [0; BLOCK as usize];
        block[..size_of::<RawHeader>()].copy_from_slice(raw.as_bytes());
        block
    }
}

/// The trailer that seals a file in place: the `header` block as it is, with other flags and the index filled in.
pub(crate) fn sealed_copy(header: &[u8; BLOCK as usize], index_offset: u64, index_count: u64) -> [u8; BLOCK as usize] {
    let mut block = *header;
    // The block is longer than the structure, and the structure has no alignment.
    if let Ok((raw, _)) = RawHeader::mut_from_prefix(&mut block) {
        let flags = Flags(raw.flags.get()).without(Flags::HEADER).with(Flags::DATA).with(Flags::SEALED);
        raw.flags = U32::new(flags.0);
        raw.index_offset = U64::new(index_offset);
        raw.index_count = U64::new(index_count);
    }
    block
}

/// Nil for everything that is not a UUID in text form.
fn parse_uuid(text: &[u8; UUID_TEXT]) -> Uuid {
    Uuid::try_parse_ascii(trim_nul(text)).unwrap_or(Uuid::nil())
}

/// Lower case and a NUL; nothing but NULs for nil.
fn write_uuid(text: &mut [u8; UUID_TEXT], uuid: Uuid) {
    if !uuid.is_nil() {
        uuid.hyphenated().encode_lower(text);
    }
}

fn trim_nul(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    &bytes[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            flags: Flags::HEADER.with(Flags::DATA),
            index_offset: 0,
            index_count: 0,
            virtual_size: Bytes::mib(1),
            identity: Identity { uuid: Uuid::from_u128(7), parent: Uuid::nil(), user_tag: UserTag(b"tag".to_vec()) },
            version: (1, 1),
        }
    }

    #[test]
    fn a_block_parses_to_what_made_it() {
        let block = header().to_block();
        assert_eq!(Header::parse(&block, 0), Ok(header()));
        assert_eq!(block[93..130], [0; 37], "no parent");
        assert_eq!(block[24..28], 390_u32.to_le_bytes());
    }

    #[test]
    fn upper_case_and_unparsable_uuids_are_read() {
        let mut block = header().to_block();
        block[56..92].make_ascii_uppercase();
        assert_eq!(Header::parse(&block, 0), Ok(header()));
        block[56] = b'x';
        assert!(Header::parse(&block, 0).expect("header").identity.uuid.is_nil());
    }

    #[test]
    fn sealing_keeps_the_layout_bits() {
        let mut header = header();
        header.flags = header.flags.with(Flags::SPARSE);
        let trailer = Header::parse(&sealed_copy(&header.to_block(), 8192, 3), 0).expect("trailer");
        assert_eq!((trailer.flags, trailer.index_offset, trailer.index_count), (Flags(0x16), 8192, 3));
        trailer.require_trailer(0).expect("a trailer");
    }
}
