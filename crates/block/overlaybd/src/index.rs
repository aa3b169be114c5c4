//! The index of finished layers: a sorted array, and the walk over what a request meets in it.

use crate::mapping::Mapping;

/// Sorted, disjoint entries. Sixteen bytes each, found by binary search.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    entries: Vec<Mapping>,
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
        Self { entries }
    }

    /// All entries, by offset.
    #[must_use]
    pub fn entries(&self) -> &[Mapping] {
        &self.entries
    }

    /// What lies in sectors `from..to`, without gaps.
    pub(crate) fn spans(&self, from: u64, to: u64) -> impl Iterator<Item = Span> + '_ {
        let first = self.entries.partition_point(|entry| entry.end() <= from);
        spans(self.entries[first..].iter().copied(), from, to)
    }

    /// Cut at `end` sectors.
    pub(crate) fn clipped(self, end: u64) -> Self {
        let mut entries = self.entries;
        entries.truncate(entries.partition_point(|entry| entry.offset() < end));
        if let Some(last) = entries.last_mut() {
            *last = last.clip(0, end);
        }
        Self { entries }
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
    fn clipping_cuts_the_entry_across_the_end() {
        let index = Index::from_sorted(vec![Mapping::data(2, 4, 100), Mapping::data(10, 4, 200)]);
        assert_eq!(index.clone().clipped(5).entries(), [Mapping::data(2, 3, 100)]);
        assert_eq!(index.clone().clipped(2).entries(), []);
        assert_eq!(index.clone().clipped(99), index);
    }
}
