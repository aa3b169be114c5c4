//! One index entry: which sectors of a device live where in a data file.

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes in a sector; all offsets and lengths of an index count these.
pub const SECTOR: u64 = 512;

/// Longest range one entry can describe, in sectors (8 MiB less one sector).
pub const MAX_LENGTH: u64 = (1 << LENGTH_BITS) - 1;

/// First sector of a file that can hold data; the header lies before it.
pub(crate) const FIRST_DATA_SECTOR: u64 = 8;

const OFFSET_BITS: u32 = 50;
const LENGTH_BITS: u32 = 14;
const POSITION_BITS: u32 = 55;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const POSITION_MASK: u64 = (1 << POSITION_BITS) - 1;
const ZEROED: u64 = 1 << POSITION_BITS;
const TAG_SHIFT: u32 = 56;

/// Largest device the format can address, in bytes: the last offset marks padding and is not used.
pub const MAX_VIRTUAL_SIZE: u64 = OFFSET_MASK * SECTOR;

/// A range of sectors and where its bytes are, packed as on disk.
///
/// `low` is the logical offset (50 bits) and the length (14 bits); `high` is the position in the data file (55 bits), the
/// zeroed bit and the tag (8 bits). The tag says which file of a stack holds the data, and means nothing on disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mapping {
    low: u64,
    high: u64,
}

const _: () = assert!(size_of::<Mapping>() == 16);

/// The same in a file.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawMapping {
    low: U64,
    high: U64,
}

const _: () = assert!(size_of::<RawMapping>() == RawMapping::SIZE as usize);

impl Mapping {
    /// Sectors `offset..offset + length` are at sector `position` of the data file.
    pub(crate) fn data(offset: u64, length: u64, position: u64) -> Self {
        debug_assert!(offset < OFFSET_MASK && (1..=MAX_LENGTH).contains(&length) && position <= POSITION_MASK);
        Self { low: offset | length << OFFSET_BITS, high: position & POSITION_MASK }
    }

    /// Sectors `offset..offset + length` are zeros; `position` is kept for the record only.
    pub(crate) fn zeroed(offset: u64, length: u64, position: u64) -> Self {
        let data = Self::data(offset, length, position);
        Self { high: data.high | ZEROED, ..data }
    }

    /// First sector.
    #[must_use]
    pub fn offset(self) -> u64 {
        self.low & OFFSET_MASK
    }

    /// Number of sectors.
    #[must_use]
    pub fn length(self) -> u64 {
        self.low >> OFFSET_BITS
    }

    /// The sector after the last.
    #[must_use]
    pub fn end(self) -> u64 {
        self.offset() + self.length()
    }

    /// Where the data begins, in sectors of its file. Of a zeroed range: the data end when it was made.
    #[must_use]
    pub fn position(self) -> u64 {
        self.high & POSITION_MASK
    }

    /// Whether the range reads as zeros and hides what lies below.
    #[must_use]
    pub fn is_zeroed(self) -> bool {
        self.high & ZEROED != 0
    }

    /// Which file of a stack the data is in; 0 is the topmost.
    #[must_use]
    pub fn tag(self) -> u8 {
        (self.high >> TAG_SHIFT) as u8
    }

    pub(crate) fn with_tag(self, tag: u8) -> Self {
        Self { high: self.high & !(0xFF << TAG_SHIFT) | u64::from(tag) << TAG_SHIFT, ..self }
    }

    /// The part within `from..to`, which must overlap.
    pub(crate) fn clip(self, from: u64, to: u64) -> Self {
        let (start, end) = (self.offset().max(from), self.end().min(to));
        debug_assert!(start < end);
        let skipped = if self.is_zeroed() { 0 } else { start - self.offset() };
        Self { low: start | (end - start) << OFFSET_BITS, high: self.high + skipped }
    }

    /// This and `next` as one entry, if they are neighbours on the device and in the file.
    pub(crate) fn join(self, next: Self) -> Option<Self> {
        let length = self.length() + next.length();
        (self.goes_on_in(next) && length <= MAX_LENGTH)
            .then(|| Self { low: self.offset() | length << OFFSET_BITS, ..self })
    }

    /// Whether `next` goes on where this ends, on the device and in the file.
    fn goes_on_in(self, next: Self) -> bool {
        let same_kind = (self.high ^ next.high) & !POSITION_MASK == 0;
        let expected = if self.is_zeroed() { self.position() } else { self.position() + self.length() };
        same_kind && self.end() == next.offset() && next.position() == expected
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.is_zeroed() { "zeroed" } else { "data" };
        write!(f, "{}+{} {kind} at {} of {}", self.offset(), self.length(), self.position(), self.tag())
    }
}

impl RawMapping {
    /// Bytes of one entry.
    pub(crate) const SIZE: u64 = 16;

    /// What fills an index up; readers skip it by its offset.
    pub(crate) const PADDING: Self = Self { low: U64::new(OFFSET_MASK), high: U64::new(0) };

    /// The entry, or none if it is padding. The tag is left behind: what is stored there is arbitrary.
    pub(crate) fn mapping(self) -> Option<Mapping> {
        let mapping = Mapping { low: self.low.get(), high: self.high.get() };
        (mapping.offset() != OFFSET_MASK && mapping.length() != 0).then(|| mapping.with_tag(0))
    }
}

impl From<Mapping> for RawMapping {
    /// With tag 0.
    fn from(mapping: Mapping) -> Self {
        let Mapping { low, high } = mapping.with_tag(0);
        Self { low: U64::new(low), high: U64::new(high) }
    }
}

/// Sorted entries under construction.
#[derive(Debug)]
pub(crate) struct Joined {
    entries: Vec<Mapping>,
    cut_at: Option<u64>,
}

impl Joined {
    /// Neighbours that can be one become one; otherwise entries stay as they were cut.
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self { entries: Vec::with_capacity(capacity), cut_at: None }
    }

    /// What is one range on the device and in the file is cut anew, from its beginning and every `longest` sectors: what
    /// maps the same is the same, however it came to be.
    pub(crate) fn cut_at(longest: u64) -> Self {
        Self { entries: Vec::new(), cut_at: Some(longest) }
    }

    pub(crate) fn push(&mut self, mut next: Mapping) {
        if let Some(last) = self.entries.last_mut() {
            if let Some(joined) = last.join(next).filter(|joined| self.cut_at.is_none_or(|cut| joined.length() <= cut))
            {
                *last = joined;
                return;
            }
            if let Some(longest) = self.cut_at
                && last.goes_on_in(next)
            {
                let missing = longest - last.length();
                last.low = last.offset() | longest << OFFSET_BITS;
                next = next.clip(next.offset() + missing, next.end());
            }
        }
        while let Some(longest) = self.cut_at
            && next.length() > longest
        {
            let cut = next.offset() + longest;
            self.entries.push(next.clip(next.offset(), cut));
            next = next.clip(cut, next.end());
        }
        self.entries.push(next);
    }

    pub(crate) fn into_vec(self) -> Vec<Mapping> {
        self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packed_form_holds_the_largest_values() {
        let mapping = Mapping::zeroed(OFFSET_MASK - 1, MAX_LENGTH, POSITION_MASK).with_tag(0xFF);
        assert_eq!((mapping.offset(), mapping.length()), (OFFSET_MASK - 1, MAX_LENGTH));
        assert_eq!((mapping.position(), mapping.is_zeroed(), mapping.tag()), (POSITION_MASK, true, 0xFF));
    }

    #[test]
    fn clipping_moves_the_position_of_data_but_not_of_zeros() {
        assert_eq!(Mapping::data(10, 10, 100).clip(12, 15), Mapping::data(12, 3, 102));
        assert_eq!(Mapping::zeroed(10, 10, 100).clip(12, 15), Mapping::zeroed(12, 3, 100));
    }

    #[test]
    fn neighbours_join_up_to_the_longest_entry() {
        let (a, b) = (Mapping::data(0, 8, 8), Mapping::data(8, 4, 16));
        assert_eq!(a.join(b), Some(Mapping::data(0, 12, 8)));
        assert_eq!(a.join(b.with_tag(1)), None);
        assert_eq!(a.join(Mapping::data(8, 4, 20)), None);
        assert_eq!(Mapping::zeroed(0, 8, 8).join(Mapping::zeroed(8, 4, 8)), Some(Mapping::zeroed(0, 12, 8)));
        assert_eq!(Mapping::data(0, MAX_LENGTH, 8).join(Mapping::data(MAX_LENGTH, 1, 8 + MAX_LENGTH)), None);
    }

    #[test]
    fn what_maps_the_same_is_cut_the_same() {
        let joined = |parts: &[u64]| {
            let mut index = Joined::cut_at(MAX_LENGTH);
            let mut at = 0;
            for &length in parts {
                index.push(Mapping::data(at, length, 8 + at));
                at += length;
            }
            index.into_vec()
        };
        let total = 2 * MAX_LENGTH + 100;
        let expected = [
            Mapping::data(0, MAX_LENGTH, 8),
            Mapping::data(MAX_LENGTH, MAX_LENGTH, 8 + MAX_LENGTH),
            Mapping::data(2 * MAX_LENGTH, total - 2 * MAX_LENGTH, 8 + 2 * MAX_LENGTH),
        ];
        let pages: Vec<u64> = (0..total).step_by(8).map(|at| 8.min(total - at)).collect();
        assert_eq!(joined(&pages), expected);
        assert_eq!(joined(&[MAX_LENGTH, MAX_LENGTH, 100]), expected);
        assert_eq!(joined(&[100, MAX_LENGTH, MAX_LENGTH]), expected);
    }
}
