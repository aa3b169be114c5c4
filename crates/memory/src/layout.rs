//! Where pages of guest memory are in the address space of the VMM.

use std::ops::Range;

use aenv_model::Bytes;
use aenv_vmm_driver::{GuestMemory, MemoryRange};

use crate::pages::{PAGE, PageRanges};

/// Guest memory is not mapped in a way that its pages can be told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A mapping that does not consist of pages.
    #[error("the mapping of {length:#x} bytes at byte {image_offset:#x} of guest memory is not some whole pages")]
    NotPages {
        /// Where it begins in the image.
        image_offset: u64,
        /// How long it is.
        length: u64,
    },
    /// The same memory is mapped twice: either copy may be the guest's.
    #[error("byte {0:#x} of guest memory is mapped more than once")]
    Overlap(u64),
    /// Pages that no mapping has.
    #[error("bytes {from:#x}..{to:#x} are not all mapped as guest memory")]
    Unmapped {
        /// First byte.
        from: u64,
        /// The byte behind the last.
        to: u64,
    },
}

/// Guest memory whose mappings are in order, and do not overlap.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout<'m> {
    memory: &'m GuestMemory,
}

/// A stretch of guest memory that is in one piece in the VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Where it is for the guest: its offset in the image.
    pub(crate) guest: u64,
    /// Where it is for the VMM.
    pub(crate) host: u64,
    pub(crate) length: u64,
}

impl<'m> Layout<'m> {
    pub(crate) fn new(memory: &'m GuestMemory) -> Result<Self, LayoutError> {
        let mut end = 0;
        for &MemoryRange { host_address, image_offset, length } in &memory.ranges {
            let whole = [host_address, image_offset, length].iter().all(|number| number.is_multiple_of(PAGE));
            if !whole || length == 0 || host_address.checked_add(length).is_none() {
                return Err(LayoutError::NotPages { image_offset, length });
            }
            if image_offset < end {
                return Err(LayoutError::Overlap(image_offset));
            }
            end = image_offset.checked_add(length).ok_or(LayoutError::NotPages { image_offset, length })?;
        }
        Ok(Self { memory })
    }

    pub(crate) fn ranges(&self) -> &'m [MemoryRange] {
        &self.memory.ranges
    }

    /// Size of the guest's memory: where the last mapping ends.
    pub(crate) fn size(&self) -> Bytes {
        Bytes(self.memory.ranges.last().map_or(0, |last| last.image_offset + last.length))
    }

    /// Where `pages` are, in order.
    pub(crate) fn pieces(&self, pages: &PageRanges) -> Result<Vec<Piece>, LayoutError> {
        let mut pieces = Vec::with_capacity(pages.ranges().len());
        let mut mappings = self.memory.ranges.iter().peekable();
        for &Range { start, end } in pages.ranges() {
            let mut at = start;
            while at < end {
                while mappings.next_if(|mapping| mapping.image_offset + mapping.length <= at).is_some() {}
                let mapping = mappings.peek().filter(|mapping| mapping.image_offset <= at);
                let mapping = mapping.ok_or(LayoutError::Unmapped { from: start, to: end })?;
                let length = end.min(mapping.image_offset + mapping.length) - at;
                pieces.push(Piece { guest: at, host: mapping.host_address + (at - mapping.image_offset), length });
                at += length;
            }
        }
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(ranges: &[(u64, u64, u64)]) -> GuestMemory {
        let range = |&(host_address, image_offset, length)| MemoryRange { host_address, image_offset, length };
        GuestMemory { pid: 1, ranges: ranges.iter().map(range).collect() }
    }

    #[test]
    fn pages_across_mappings_are_found_in_each() {
        let memory = memory(&[(0x90000, 0, 0x4000), (0x10000, 0x4000, 0x4000), (0x50000, 0xA000, 0x1000)]);
        let layout = Layout::new(&memory).unwrap();
        assert_eq!(layout.size(), Bytes(0xB000));
        let pages = PageRanges::from_ranges([0x1000..0x2000, 0x3000..0x6000, 0xA000..0xB000]).unwrap();
        let pieces = layout.pieces(&pages).unwrap();
        let piece = |guest, host, length| Piece { guest, host, length };
        assert_eq!(
            pieces,
            [
                piece(0x1000, 0x91000, 0x1000),
                piece(0x3000, 0x93000, 0x1000),
                piece(0x4000, 0x10000, 0x2000),
                piece(0xA000, 0x50000, 0x1000)
            ]
        );
        for range in [0x7000..0x9000, 0x9000..0xB000, 0xA000..0xC000] {
            let unmapped = LayoutError::Unmapped { from: range.start, to: range.end };
            assert_eq!(layout.pieces(&PageRanges::from_ranges([range]).unwrap()), Err(unmapped));
        }
    }

    #[test]
    fn memory_that_is_mapped_twice_or_in_parts_of_pages_is_refused() {
        let twice = memory(&[(0x10000, 0, 0x4000), (0x90000, 0x2000, 0x4000)]);
        assert_eq!(Layout::new(&twice).unwrap_err(), LayoutError::Overlap(0x2000));
        for parts in [(0x10010, 0, 0x1000), (0x10000, 0x10, 0x1000), (0x10000, 0, 0x10), (0x10000, 0, 0)] {
            assert!(matches!(Layout::new(&memory(&[parts])), Err(LayoutError::NotPages { .. })));
        }
    }
}
