//! The index of a writable upper: like that of a layer, but it changes.

use std::collections::BTreeMap;

use crate::index::{Span, spans};
use crate::mapping::Mapping;

/// Disjoint entries by offset; a newer one displaces what it overlaps.
#[derive(Debug, Default)]
pub(crate) struct LiveIndex {
    entries: BTreeMap<u64, Mapping>,
}

impl LiveIndex {
    /// Adds `new` on top; `displaced` is told every part of an older entry that it hides.
    pub(crate) fn insert(&mut self, new: Mapping, mut displaced: impl FnMut(Mapping)) {
        let (from, to) = (new.offset(), new.end());
        let first = self.entries.range(..from).next_back().map(|(_, entry)| *entry).filter(|entry| entry.end() > from);
        if let Some(entry) = first {
            self.entries.insert(entry.offset(), entry.clip(0, from));
            self.displace(entry, from, to, &mut displaced);
        }
        while let Some((&offset, &entry)) = self.entries.range(from..to).next() {
            self.entries.remove(&offset);
            self.displace(entry, from, to, &mut displaced);
        }
        self.insert_joined(new);
    }

    /// Keeps what `entry` has behind `to`.
    fn displace(&mut self, entry: Mapping, from: u64, to: u64, displaced: &mut impl FnMut(Mapping)) {
        if entry.end() > to {
            self.entries.insert(to, entry.clip(to, entry.end()));
        }
        displaced(entry.clip(from, to));
    }

    /// Inserts where there is room, as one entry with its neighbours if it continues them.
    fn insert_joined(&mut self, mut new: Mapping) {
        if let Some((_, &before)) = self.entries.range(..new.offset()).next_back()
            && let Some(joined) = before.join(new)
        {
            new = joined; // takes the place of `before`
        }
        if let Some(&after) = self.entries.get(&new.end())
            && let Some(joined) = new.join(after)
        {
            self.entries.remove(&after.offset());
            new = joined;
        }
        self.entries.insert(new.offset(), new);
    }

    /// What lies in sectors `from..to`, without gaps.
    pub(crate) fn spans(&self, from: u64, to: u64) -> impl Iterator<Item = Span> + '_ {
        let first = self.entries.range(..from).next_back().filter(|(_, entry)| entry.end() > from);
        spans(first.into_iter().chain(self.entries.range(from..to.max(from))).map(|(_, entry)| *entry), from, to)
    }

    /// All entries, by offset.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Mapping> + '_ {
        self.entries.values().copied()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::index::Content;

    proptest! {
        #[test]
        fn the_newest_entry_of_a_sector_counts(
            writes in prop::collection::vec((0..200_u64, 1..60_u64, any::<bool>()), 0..60),
        ) {
            let mut live = LiveIndex::default();
            let mut model = vec![Content::Hole; 300];
            let mut end = 8;
            let mut displaced = 0;
            let mut covered = 0;
            for (offset, length, zeroed) in writes {
                let sectors = &mut model[offset as usize..(offset + length) as usize];
                covered += sectors.iter().filter(|sector| **sector != Content::Hole).count() as u64;
                if zeroed {
                    sectors.fill(Content::Zeroed);
                    live.insert(Mapping::zeroed(offset, length, end), |old| displaced += old.length());
                } else {
                    for (sector, position) in sectors.iter_mut().zip(end..) {
                        *sector = Content::Data { tag: 0, position };
                    }
                    live.insert(Mapping::data(offset, length, end), |old| displaced += old.length());
                    end += length;
                }
            }
            prop_assert_eq!(displaced, covered);
            let entries: Vec<_> = live.entries().collect();
            prop_assert!(entries.windows(2).all(|pair| pair[0].end() <= pair[1].offset()));
            for from in [0, 7, 100] {
                let mut at = from;
                for span in live.spans(from, 300) {
                    prop_assert_eq!(span.offset, at);
                    for sector in 0..span.length {
                        let content = match span.content {
                            Content::Data { tag, position } => Content::Data { tag, position: position + sector },
                            other => other,
                        };
                        prop_assert_eq!(content, model[(at + sector) as usize]);
                    }
                    at += span.length;
                }
                prop_assert_eq!(at, 300);
            }
        }
    }
}
