//! One index out of many: the newest layer wins, sector by sector.
//!
//! Two sorted arrays become one in a single pass. A stack is merged by halves, like a merge sort, so that every entry is
//! copied once a level and not once a layer.

use crate::mapping::{Joined, Mapping};

/// The view through `layers`, topmost first. At most twice as many entries as given.
pub(crate) fn merge(mut layers: Vec<Vec<Mapping>>) -> Vec<Mapping> {
    while layers.len() > 1 {
        let mut merged = Vec::with_capacity(layers.len().div_ceil(2));
        let mut rest = layers.into_iter();
        while let Some(top) = rest.next() {
            merged.push(match rest.next() {
                Some(bottom) => overlay(&top, &bottom),
                None => top,
            });
        }
        layers = merged;
    }
    layers.pop().unwrap_or_default()
}

/// `top` over `bottom`, both sorted and disjoint.
fn overlay(top: &[Mapping], bottom: &[Mapping]) -> Vec<Mapping> {
    let mut out = Joined::with_capacity(top.len() + bottom.len());
    let mut bottom = bottom.iter().copied();
    let mut below = bottom.next();
    for &above in top {
        // What lies before `above`, in part or whole.
        while let Some(entry) = below.filter(|entry| entry.offset() < above.offset()) {
            if entry.end() <= above.offset() {
                out.push(entry);
                below = bottom.next();
            } else {
                out.push(entry.clip(0, above.offset()));
                below = Some(entry.clip(above.offset(), entry.end()));
            }
        }
        out.push(above);
        // What `above` hides, in part or whole.
        while let Some(entry) = below.filter(|entry| entry.offset() < above.end()) {
            below = if entry.end() <= above.end() { bottom.next() } else { Some(entry.clip(above.end(), entry.end())) };
        }
    }
    for entry in below.into_iter().chain(bottom) {
        out.push(entry);
    }
    out.into_vec()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Sorted, disjoint entries within 300 sectors, told apart by position.
    fn layer(tag: u8) -> impl Strategy<Value = Vec<Mapping>> {
        prop::collection::vec((0..12_u64, 1..30_u64, any::<bool>()), 0..20).prop_map(move |pieces| {
            let mut at = 0;
            let mut entries = Vec::new();
            for (gap, length, zeroed) in pieces {
                at += gap;
                let position = 1000 * u64::from(tag) + at;
                let make = if zeroed { Mapping::zeroed } else { Mapping::data };
                entries.push(make(at, length, position).with_tag(tag));
                at += length;
            }
            entries
        })
    }

    /// What each sector is, in the plainest way.
    fn paint(layers: &[Vec<Mapping>]) -> Vec<Option<(u8, Option<u64>)>> {
        let mut sectors = vec![None; 1000];
        for entry in layers.iter().rev().flatten() {
            for sector in entry.offset()..entry.end() {
                let data = (!entry.is_zeroed()).then(|| entry.position() + sector - entry.offset());
                sectors[sector as usize] = Some((entry.tag(), data));
            }
        }
        sectors
    }

    proptest! {
        #[test]
        fn every_sector_is_that_of_the_topmost_layer(layers in (layer(0), layer(1), layer(2), layer(3), layer(4))) {
            let layers = vec![layers.0, layers.1, layers.2, layers.3, layers.4];
            let merged = merge(layers.clone());
            prop_assert!(merged.windows(2).all(|pair| pair[0].end() <= pair[1].offset()), "sorted: {merged:?}");
            prop_assert_eq!(paint(&[merged]), paint(&layers));
        }
    }
}
