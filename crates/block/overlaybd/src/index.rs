//! The index of finished layers: a sorted array, and the walk over what a request meets in it.
//!
//! A search in the plain array would wait for memory at nearly every step. So the offset of every sixteenth entry is kept
//! apart, of those again every sixteenth, and so on up to sixteen: each step counts within two lines of cache, and all but
//! the last steps find theirs near.

use crate::mapping::Mapping;

/// What one of a level above stands for.
const FAN_OUT: usize = 16;

/// Sorted, disjoint entries. Sixteen bytes each, and half a byte to find them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    entries: Vec<Mapping>,
    /// Offsets of every sixteenth entry, then of every sixteenth of those: the last level has sixteen at most.
    levels: Vec<Vec<u64>>,
}

/// A stretch of a request, in sectors, and what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) content: Content,
}

/// What a stretch of a device holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// Nothing: the layer below shows through.
    Hole,
    /// Zeros that hide the layer below.
    Zeroed,
    /// Data of file `tag`, from sector `position`.
    Data { tag: u8, position: u64 },
}

impl Index {
    /// `entries` are sorted and disjoint.
    pub(crate) fn from_sorted(entries: Vec<Mapping>) -> Self {
        debug_assert!(entries.windows(2).all(|pair| pair[0].end() <= pair[1].offset()));
        let mut levels = Vec::new();
        if entries.len() > FAN_OUT {
            levels.push(entries.iter().step_by(FAN_OUT).map(|entry| entry.offset()).collect::<Vec<_>>());
        }
        while let Some(last) = levels.last().filter(|last| last.len() > FAN_OUT) {
            levels.push(last.iter().step_by(FAN_OUT).copied().collect());
        }
        Self { entries, levels }
    }

    /// The first entry that ends behind `sector`.
    fn first_behind(&self, sector: u64) -> usize {
        // The group of sixteen in which the last one is that begins at `sector` or before; the first, if none does.
        let mut group = 0;
        for level in self.levels.iter().rev() {
            let from = group * FAN_OUT;
            let keys = &level[from..level.len().min(from + FAN_OUT)];
            // All are looked at: no guess to be wrong about.
            let before = keys.iter().filter(|&&offset| offset <= sector).count();
            group = from + before.saturating_sub(1);
        }
        let from = group * FAN_OUT;
        let entries = &self.entries[from..self.entries.len().min(from + FAN_OUT)];
        from + entries.iter().filter(|entry| entry.end() <= sector).count()
    }

    /// All entries, by offset.
    #[must_use]
    pub fn entries(&self) -> &[Mapping] {
        &self.entries
    }

    /// What lies in sectors `from..to`, without gaps.
    pub(crate) fn spans(&self, from: u64, to: u64) -> impl Iterator<Item = Span> + '_ {
        let first = self.first_behind(from);
        spans(self.entries[first..].iter().copied(), from, to)
    }

    /// Cut at `end` sectors.
    pub(crate) fn clipped(self, end: u64) -> Self {
        let mut entries = self.entries;
        entries.truncate(entries.partition_point(|entry| entry.offset() < end));
        if let Some(last) = entries.last_mut() {
            *last = last.clip(0, end);
        }
        Self::from_sorted(entries)
    }

    /// All entries marked as those of file `tag`.
    pub(crate) fn tagged(&self, tag: u8) -> Vec<Mapping> {
        self.entries.iter().map(|entry| entry.with_tag(tag)).collect()
    }
}

/// Walks `from..to` over sorted `entries`, of which the first is the first to end behind `from`; holes are told too.
pub(crate) fn spans(entries: impl Iterator<Item = Mapping>, from: u64, to: u64) -> impl Iterator<Item = Span> {
    let mut entries = entries.take_while(move |entry| entry.offset() < to).peekable();
    let mut at = from;
    std::iter::from_fn(move || {
        if at >= to {
            return None;
        }
        let (end, content) = match entries.peek() {
            None => (to, Content::Hole),
            Some(next) if next.offset() > at => (next.offset(), Content::Hole),
            Some(next) => {
                let content = match next.is_zeroed() {
                    true => Content::Zeroed,
                    false => Content::Data { tag: next.tag(), position: next.position() + (at - next.offset()) },
                };
                let end = next.end().min(to);
                entries.next();
                (end, content)
            }
        };
        let span = Span { offset: at, length: end - at, content };
        at = end;
        Some(span)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_tells_holes_zeros_and_data_without_gaps() {
        let index =
            Index::from_sorted(vec![Mapping::data(2, 4, 100), Mapping::zeroed(6, 2, 0), Mapping::data(10, 4, 200)]);
        let walk: Vec<_> = index.spans(3, 12).map(|span| (span.offset, span.length, span.content)).collect();
        let data = |position| Content::Data { tag: 0, position };
        assert_eq!(walk, [(3, 3, data(101)), (6, 2, Content::Zeroed), (8, 2, Content::Hole), (10, 2, data(200))]);
        assert_eq!(index.spans(14, 20).count(), 1);
        assert_eq!(index.spans(5, 5).count(), 0);
    }

    #[test]
    fn every_sector_is_found_in_indexes_of_any_size() {
        for count in [0, 1, 15, 16, 17, 255, 256, 257, 4097] {
            // Entries of two sectors, with a gap of one behind every other.
            let entries: Vec<_> = (0..count).map(|n| Mapping::data(5 + 2 * n + n / 2, 2, 8 + 2 * n)).collect();
            let index = Index::from_sorted(entries.clone());
            for sector in 0..5 + 3 * count {
                let plain = entries.partition_point(|entry| entry.end() <= sector);
                assert_eq!(index.first_behind(sector), plain, "{sector} among {count}");
            }
        }
    }

    #[test]
    fn clipping_cuts_the_entry_across_the_end() {
        let index = Index::from_sorted(vec![Mapping::data(2, 4, 100), Mapping::data(10, 4, 200)]);
        assert_eq!(index.clone().clipped(5).entries(), [Mapping::data(2, 3, 100)]);
        assert_eq!(index.clone().clipped(2).entries(), []);
        assert_eq!(index.clone().clipped(99), index);
    }
}
