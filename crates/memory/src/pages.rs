//! Sets of pages.

use std::ops::Range;

use aenv_model::Bytes;
use serde::{Deserialize, Serialize};

/// Bytes of a page: the grain of memory layers. Hosts with larger pages find multiples of it.
pub const PAGE: u64 = 4096;

/// Pages of guest memory: ranges of bytes from its start (of the memory image, that is), in order and with gaps between.
///
/// Serialised as numbers of pages, alternately those that are left out and those that are meant:
/// `[0x10, 2, 1, 5]` are pages 16, 17, and 19 to 23.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<u64>", into = "Vec<u64>")]
pub struct PageRanges(Vec<Range<u64>>);

/// Ranges that are no set of pages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PageRangesError {
    /// Begins or ends within a page, or has no bytes.
    #[error("bytes {from:#x}..{to:#x} are not some whole pages")]
    NotPages {
        /// First byte.
        from: u64,
        /// The byte behind the last.
        to: u64,
    },
    /// Begins before its predecessor ends.
    #[error("the range at byte {0:#x} is not behind the one before it")]
    Unordered(u64),
    /// The serialised form breaks off, or counts beyond all memory.
    #[error("number {0} of the list of pages makes no sense")]
    Encoding(usize),
}

impl PageRanges {
    /// A set from ranges of bytes in order; neighbours become one.
    pub fn from_ranges(ranges: impl IntoIterator<Item = Range<u64>>) -> Result<Self, PageRangesError> {
        let mut pages = Self::default();
        for range in ranges {
            if range.is_empty() || !range.start.is_multiple_of(PAGE) || !range.end.is_multiple_of(PAGE) {
                return Err(PageRangesError::NotPages { from: range.start, to: range.end });
            }
            if pages.0.last().is_some_and(|last| range.start < last.end) {
                return Err(PageRangesError::Unordered(range.start));
            }
            pages.push(range);
        }
        Ok(pages)
    }

    /// Adds whole pages behind all others.
    pub(crate) fn push(&mut self, range: Range<u64>) {
        match self.0.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.0.push(range),
        }
    }

    /// The ranges, in bytes.
    #[must_use]
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }

    /// How many pages of [`PAGE`] bytes.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.bytes().get() / PAGE
    }

    /// How much memory.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.0.iter().map(|range| range.end - range.start).sum())
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<PageRanges> for Vec<u64> {
    fn from(pages: PageRanges) -> Self {
        let mut end = 0;
        let mut counts = Self::with_capacity(pages.0.len() * 2);
        for range in pages.0 {
            counts.extend([(range.start - end) / PAGE, (range.end - range.start) / PAGE]);
            end = range.end;
        }
        counts
    }
}

impl TryFrom<Vec<u64>> for PageRanges {
    type Error = PageRangesError;

    fn try_from(counts: Vec<u64>) -> Result<Self, PageRangesError> {
        let (pairs, []) = counts.as_chunks::<2>() else { return Err(PageRangesError::Encoding(counts.len())) };
        let mut at: u64 = 0;
        let mut further = |pages: u64| {
            at = pages.checked_mul(PAGE).and_then(|bytes| at.checked_add(bytes))?;
            Some(at)
        };
        let mut pages = Self::default();
        for (number, &[skip, length]) in pairs.iter().enumerate() {
            let start = further(skip).ok_or(PageRangesError::Encoding(2 * number))?;
            let end = further(length).filter(|_| length > 0).ok_or(PageRangesError::Encoding(2 * number + 1))?;
            pages.push(start..end);
        }
        Ok(pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_range_and_disorder_is_refused() {
        let pages = PageRanges::from_ranges([0..4096, 4096..8192, 16384..20480]).unwrap();
        assert_eq!(pages.ranges(), [0..8192, 16384..20480]);
        assert_eq!((pages.count(), pages.bytes()), (3, Bytes::kib(12)));
        assert_eq!(PageRanges::from_ranges([4096..8192, 0..4096]), Err(PageRangesError::Unordered(0)));
        for wrong in [0..100, 1..4096, 4096..4096] {
            let (from, to) = (wrong.start, wrong.end);
            assert_eq!(PageRanges::from_ranges([wrong]), Err(PageRangesError::NotPages { from, to }));
        }
    }

    #[test]
    fn what_is_serialised_is_short_and_comes_back() {
        let pages = PageRanges::from_ranges([0..8192, 16384..20480]).unwrap();
        let text = serde_json::to_string(&pages).unwrap();
        assert_eq!(text, "[0,2,2,1]");
        assert_eq!(serde_json::from_str::<PageRanges>(&text).unwrap(), pages);
        assert_eq!(serde_json::from_str::<PageRanges>("[]").unwrap(), PageRanges::default());
        for wrong in ["[1]", "[0,0]", "[18446744073709551615,1]", "[1,4503599627370495]"] {
            serde_json::from_str::<PageRanges>(wrong).unwrap_err();
        }
    }
}
