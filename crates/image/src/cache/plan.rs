//! What a collection is to remove: a decision on what was found, without a look at any file.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use aenv_model::Bytes;

use super::config::CacheConfig;
use crate::digest::Digest;

/// What was found in a cache.
#[derive(Debug, Clone, Default)]
pub(super) struct Survey {
    pub(super) layers: BTreeMap<Digest, LayerFacts>,
    pub(super) images: Vec<ImageFacts>,
    /// Layers that a lease keeps.
    pub(super) leased: BTreeSet<Digest>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct LayerFacts {
    pub(super) size: Bytes,
    pub(super) used: SystemTime,
}

#[derive(Debug, Clone)]
pub(super) struct ImageFacts {
    pub(super) name: String,
    /// Those of its layers that are in the cache.
    pub(super) layers: BTreeSet<Digest>,
    pub(super) used: SystemTime,
}

/// What is to be removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Names of images, the one that goes first first.
    pub(super) images: Vec<String>,
    pub(super) layers: BTreeSet<Digest>,
}

impl Survey {
    pub(super) fn total(&self) -> Bytes {
        Bytes(self.layers.values().map(|layer| layer.size.get()).sum())
    }

    /// Layers that nothing refers to and nobody used in the last `min_age`.
    pub(super) fn garbage(&self, min_age: Duration, now: SystemTime) -> BTreeSet<Digest> {
        let referred: BTreeSet<&Digest> = self.images.iter().flat_map(|image| &image.layers).collect();
        let garbage = |(digest, layer): &(&Digest, &LayerFacts)| {
            !referred.contains(*digest) && !self.leased.contains(*digest) && is_idle(layer.used, min_age, now)
        };
        self.layers.iter().filter(garbage).map(|(digest, _)| digest.clone()).collect()
    }

    /// Whether removing an image could ever free something.
    fn frees(&self, image: &ImageFacts) -> bool {
        image.layers.iter().any(|digest| !self.leased.contains(digest))
    }

    pub(super) fn plan(&self, config: &CacheConfig, now: SystemTime) -> Plan {
        let min_age = config.gc.min_age;
        let mut plan = Plan { images: Vec::new(), layers: self.garbage(min_age, now) };
        let Some(capacity) = config.capacity else { return plan };
        let part = |ratio: f64| capacity.get() as f64 * ratio; // a watermark, not an account
        let size = |digest: &Digest| self.layers.get(digest).map_or(0, |layer| layer.size.get());
        let mut left = self.total().get() - plan.layers.iter().map(size).sum::<u64>();
        if left as f64 <= part(config.gc.high_watermark) {
            return plan;
        }
        let mut users: BTreeMap<&Digest, usize> = BTreeMap::new();
        for digest in self.images.iter().flat_map(|image| &image.layers) {
            *users.entry(digest).or_default() += 1;
        }
        let mut candidates: Vec<&ImageFacts> =
            self.images.iter().filter(|image| self.frees(image) && is_idle(image.used, min_age, now)).collect();
        candidates.sort_by_key(|image| (image.used, &image.name));
        for image in candidates {
            if left as f64 <= part(config.gc.low_watermark) {
                break;
            }
            plan.images.push(image.name.clone());
            for digest in &image.layers {
                let Some(count) = users.get_mut(digest) else { continue };
                *count -= 1;
                // A layer counts only when the last of its users goes. One that is idle itself goes now.
                let idle = self.layers.get(digest).is_some_and(|layer| is_idle(layer.used, min_age, now));
                if *count == 0 && !self.leased.contains(digest) && idle {
                    left -= size(digest);
                    plan.layers.insert(digest.clone());
                }
            }
        }
        plan
    }
}

/// A clock that was set back makes things look newer than they are, never older.
fn is_idle(used: SystemTime, min_age: Duration, now: SystemTime) -> bool {
    now.duration_since(used).is_ok_and(|idle| idle >= min_age)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn digest(n: u8) -> Digest {
        Digest::of(&[n])
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// Layers of 10 bytes each; images as what they are made of and when they were used; layers that are leased.
    fn survey(layers: u8, images: &[(&[u8], u64)], leased: &[u8]) -> Survey {
        Survey {
            layers: (0..layers).map(|n| (digest(n), LayerFacts { size: Bytes(10), used: at(0) })).collect(),
            images: images
                .iter()
                .enumerate()
                .map(|(n, (layers, used))| ImageFacts {
                    name: format!("i{n}"),
                    layers: layers.iter().map(|n| digest(*n)).collect(),
                    used: at(*used),
                })
                .collect(),
            leased: leased.iter().map(|n| digest(*n)).collect(),
        }
    }

    fn config(capacity: Option<u64>) -> CacheConfig {
        let mut config = CacheConfig { capacity: capacity.map(Bytes), ..CacheConfig::default() };
        config.gc.high_watermark = 0.9;
        config.gc.low_watermark = 0.5;
        config.gc.min_age = Duration::from_secs(10);
        config
    }

    fn planned(survey: &Survey, capacity: Option<u64>, now: u64) -> (Vec<String>, Vec<Digest>) {
        let plan = survey.plan(&config(capacity), at(now));
        (plan.images, plan.layers.into_iter().collect())
    }

    fn digests(numbers: &[u8]) -> Vec<Digest> {
        numbers.iter().map(|n| digest(*n)).collect::<BTreeSet<_>>().into_iter().collect()
    }

    #[test]
    fn what_nothing_refers_to_goes_once_it_is_idle() {
        let found = survey(3, &[(&[0], 0)], &[1]);
        assert_eq!(planned(&found, None, 9), (vec![], vec![]));
        assert_eq!(planned(&found, None, 10), (vec![], digests(&[2])));
    }

    #[test]
    fn images_go_from_the_least_recently_used_on_until_it_is_down_to_the_low_watermark() {
        let found = survey(10, &[(&[0, 1, 2], 30), (&[3, 4], 10), (&[5, 6, 7], 20), (&[8, 9], 95)], &[]);
        assert_eq!(planned(&found, Some(112), 100), (vec![], vec![]), "not above the high one");
        let images = ["i1", "i2"].map(str::to_owned).to_vec();
        assert_eq!(planned(&found, Some(100), 100), (images, digests(&[3, 4, 5, 6, 7])));
        let images = ["i1", "i2", "i0"].map(str::to_owned).to_vec();
        let gone = digests(&[0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(planned(&found, Some(30), 100), (images, gone), "the one that is in use stays, whatever the need");
    }

    #[test]
    fn a_shared_layer_counts_when_its_last_user_goes() {
        let found = survey(10, &[(&[0, 1, 2, 3, 4, 5], 1), (&[0, 1, 2, 3, 4, 6], 2), (&[7, 8, 9], 3)], &[]);
        let (images, layers) = planned(&found, Some(100), 100);
        assert_eq!(images, ["i0", "i1"]);
        assert_eq!(layers, digests(&[0, 1, 2, 3, 4, 5, 6]));
    }

    #[test]
    fn an_image_whose_layers_are_all_leased_stays() {
        let found = survey(2, &[(&[0], 1), (&[0, 1], 2)], &[0]);
        assert_eq!(planned(&found, Some(10), 100), (vec!["i1".to_owned()], digests(&[1])));
    }

    #[test]
    fn garbage_goes_before_images() {
        let found = survey(10, &[(&[0, 1, 2, 3, 4, 5, 6, 7, 8], 1)], &[]);
        assert_eq!(planned(&found, Some(100), 100), (vec![], digests(&[9])));
    }

    proptest! {
        #[test]
        fn nothing_goes_that_is_needed_and_enough_goes_if_it_can(
            images in prop::collection::vec((prop::collection::btree_set(0u8..12, 0..6), 0u64..60), 0..8),
            leased in prop::collection::btree_set(0u8..12, 0..4),
            capacity in 1u64..150,
            now in 0u64..80,
        ) {
            let lists: Vec<(Vec<u8>, u64)> =
                images.into_iter().map(|(layers, used)| (layers.into_iter().collect(), used)).collect();
            let images: Vec<(&[u8], u64)> = lists.iter().map(|(layers, used)| (layers.as_slice(), *used)).collect();
            let found = survey(12, &images, &leased.iter().copied().collect::<Vec<_>>());
            let plan = found.plan(&config(Some(capacity)), at(now));
            let stays: Vec<_> = found.images.iter().filter(|image| !plan.images.contains(&image.name)).collect();
            for digest in &plan.layers {
                prop_assert!(!found.leased.contains(digest));
                prop_assert!(stays.iter().all(|image| !image.layers.contains(digest)), "a whole image loses nothing");
            }
            for image in &found.images {
                prop_assert!(image.used <= at(now.saturating_sub(10)) || !plan.images.contains(&image.name));
            }
            let left = found.total().get() - 10 * plan.layers.len() as u64;
            let could = stays.iter().any(|image| found.frees(image) && is_idle(image.used, Duration::from_secs(10), at(now)));
            prop_assert!(left as f64 <= 0.9 * capacity as f64 || !could, "{left} of {capacity} left");
        }
    }
}
