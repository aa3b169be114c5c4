//! Collecting what nobody needs: by reachability, and images by their last use when it gets too much.
//!
//! A pass looks at everything once and decides; whatever it then removes, it looks at again right before, having the whole
//! lock, so that no lease is being taken meanwhile. The lock is had for moments only: a layer is renamed under it, and
//! deleted after. Where something can't be read, what it refers to is not known, so no layer is removed at all.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use aenv_model::Bytes;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::index::Conversion;
use super::layout::{IMAGE, METADATA};
use super::lock::{self, Held};
use super::plan::{ImageFacts, LayerFacts, Survey};
use super::{CacheError, ImageCache, TEMPORARY};
use crate::digest::Digest;

/// Layers that are removed while the lock is had once.
const BATCH: usize = 16;

/// What a pass did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Images that are no longer known. They can be imported again.
    pub images: usize,
    /// Layers that are gone.
    pub layers: usize,
    /// What those took.
    pub freed: Bytes,
    /// What the layers take that are left.
    pub left: Bytes,
    /// Records of conversions whose layer is gone, files and directories of processes that are gone.
    pub remains: usize,
    /// Files that can't be read, or are not as they should be. They were left alone, and as long as an image or a lease is
    /// among them, no layer is removed.
    pub doubts: Vec<PathBuf>,
}

/// What is in a cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Converted layers.
    pub layers: usize,
    /// What they take.
    pub bytes: Bytes,
    /// Resolved images.
    pub images: usize,
}

impl ImageCache {
    /// Runs one pass. `now` decides what is idle. Blocking.
    ///
    /// Safe at any time, beside imports and passes of other processes. What fails is told, and the pass goes on where it
    /// can.
    pub fn collect_blocking(&self, now: SystemTime) -> Result<Collected, CacheError> {
        let mut pass = Pass { cache: self, now, collected: Collected::default() };
        let found = pass.survey()?;
        let plan = found.plan(&self.config, now);
        pass.evict(&plan.images)?;
        pass.remove_layers(&plan.layers)?;
        pass.remove_remains()?;
        let mut collected = pass.collected;
        collected.left = self.usage_blocking()?.bytes;
        collected.doubts.sort();
        collected.doubts.dedup();
        Ok(collected)
    }

    /// What is in the cache. Blocking.
    pub fn usage_blocking(&self) -> Result<Usage, CacheError> {
        let layers = self.layers(&mut Vec::new())?;
        let images = super::files(&self.layout.configs())?;
        let is_image = |path: &&PathBuf| path.to_string_lossy().ends_with(IMAGE);
        Ok(Usage {
            layers: layers.len(),
            bytes: Bytes(layers.values().map(|facts| facts.size.get()).sum()),
            images: images.iter().filter(is_image).count(),
        })
    }

    /// Collects again and again until `stop`, if the configuration wants it.
    pub async fn run(self, stop: CancellationToken) {
        if !self.config.gc.enabled {
            return;
        }
        while stop.run_until_cancelled(tokio::time::sleep(self.config.gc.interval)).await.is_some() {
            match self.collect(SystemTime::now()).await {
                Ok(collected) => collected.log(),
                Err(error) => warn!(error = chain(&error), "collecting in the image cache failed"),
            }
        }
    }

    /// The layers that are there. One that is not what it should be is added to `doubts`.
    fn layers(&self, doubts: &mut Vec<PathBuf>) -> Result<BTreeMap<Digest, LayerFacts>, CacheError> {
        let mut found = BTreeMap::new();
        for path in super::files(&self.layout.commits())? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let facts = match Digest::from_dashed(&name) {
                Some(digest) => match self.commit_meta(&digest) {
                    Ok(Some((size, used))) => Some((digest, LayerFacts { size, used })),
                    Ok(None) | Err(_) => None,
                },
                None => None,
            };
            match facts {
                Some((digest, facts)) => drop(found.insert(digest, facts)),
                None if path.exists() => doubts.push(path),
                None => {} // gone meanwhile
            }
        }
        Ok(found)
    }
}

impl Collected {
    fn log(&self) {
        let Self { images, layers, freed, left, remains, doubts } = self;
        if (*images, *layers, *remains) != (0, 0, 0) {
            info!(images, layers, %freed, %left, remains, "collected in the image cache");
        }
        if let Some(first) = doubts.first() {
            warn!(files = doubts.len(), first = %first.display(), "the image cache holds files that were left alone");
        }
    }
}

/// One pass.
struct Pass<'a> {
    cache: &'a ImageCache,
    now: SystemTime,
    collected: Collected,
}

impl Pass<'_> {
    fn alone(&self) -> Result<Held, CacheError> {
        let path = self.cache.layout.gc_lock();
        Held::exclusive(&path).map_err(|source| CacheError::io("lock", &path, source))
    }

    fn survey(&mut self) -> Result<Survey, CacheError> {
        let _alone = self.alone()?;
        self.look()
    }

    /// Everything there is. Where something can't be read, nothing counts as garbage: all layers seem leased.
    fn look(&mut self) -> Result<Survey, CacheError> {
        let (mut unknown, mut odd, mut void) = (Vec::new(), Vec::new(), Vec::new());
        let images = self.cache.image_files(&mut unknown)?;
        let mut leased = self.cache.leased(&mut unknown, &mut void)?;
        for path in void {
            self.remove_file(&path);
        }
        let mut layers = self.cache.layers(&mut odd)?;
        let mut facts = Vec::new();
        for image in images {
            let mut of_image = BTreeSet::new();
            for lower in &image.device.lowers {
                let path = lower.file.as_deref().or(lower.dir.as_deref());
                let Some(digest) = path.and_then(|path| self.cache.layout.digest_of(path)) else { continue };
                // Of another length than this image knows: whatever it is, it is not ours to judge.
                if let (Some(layer), Some(size)) = (layers.get(&digest), lower.size)
                    && layer.size.get() != size
                {
                    odd.push(self.cache.layout.commit(&digest));
                    layers.remove(&digest);
                }
                of_image.insert(digest);
            }
            facts.push(ImageFacts { name: image.name, layers: of_image, used: image.used });
        }
        if !unknown.is_empty() {
            leased.extend(layers.keys().cloned());
        }
        self.collected.doubts.extend(unknown.into_iter().chain(odd));
        Ok(Survey { layers, images: facts, leased })
    }

    fn evict(&mut self, names: &[String]) -> Result<(), CacheError> {
        if names.is_empty() {
            return Ok(());
        }
        let _alone = self.alone()?;
        let idle = |path: &Path| {
            let used = fs::metadata(path).and_then(|meta| meta.modified()).ok()?;
            let idle = self.now.duration_since(used).ok()?;
            (idle >= self.cache.config.gc.min_age).then_some(())
        };
        for name in names {
            // It may have been used since it was looked at.
            let path = self.cache.layout.image(name);
            if idle(&path).is_none() {
                continue;
            }
            match self.cache.remove_image(name) {
                Ok(()) => {
                    info!(image = name, "evicted an image that nobody used lately");
                    self.collected.images += 1;
                }
                Err(error) => warn!(path = %path.display(), %error, "could not evict an image"),
            }
        }
        Ok(())
    }

    fn remove_layers(&mut self, planned: &BTreeSet<Digest>) -> Result<(), CacheError> {
        if planned.is_empty() {
            return Ok(());
        }
        let trash = self.cache.staging("trash-")?;
        let planned: Vec<&Digest> = planned.iter().collect();
        for batch in planned.chunks(BATCH) {
            let alone = self.alone()?;
            let found = self.look()?;
            let garbage = found.garbage(self.cache.config.gc.min_age, self.now);
            for digest in batch.iter().filter(|digest| garbage.contains(*digest)) {
                let (from, to) = (self.cache.layout.commit_dir(digest), trash.join(digest.dashed()));
                match fs::rename(&from, &to) {
                    Ok(()) => {
                        self.collected.layers += 1;
                        self.collected.freed.0 += found.layers.get(*digest).map_or(0, |layer| layer.size.get());
                    }
                    Err(error) => warn!(path = %from.display(), %error, "could not remove a layer"),
                }
            }
            drop(alone);
        }
        Ok(()) // the trash goes with its directory
    }

    /// Removes records of conversions whose layer is gone, and what processes left that are gone.
    fn remove_remains(&mut self) -> Result<(), CacheError> {
        let layout = &self.cache.layout;
        for batch in super::files(&layout.indexes())?.chunks(256) {
            let _alone = self.alone()?;
            for path in super::files_of(batch)? {
                // One that can't be read is of no use to anybody, and refers to nothing that would be lost with it.
                let lost = match fs::read(&path).map(|text| serde_json::from_slice::<Conversion>(&text)) {
                    Ok(Ok(conversion)) => !self.cache.is_there(&conversion.commit),
                    Ok(Err(_)) => true,
                    Err(_) => false,
                };
                if lost {
                    self.remove_file(&path);
                }
            }
            // The system refuses to remove those that are not empty, which is what is wanted.
            batch.iter().for_each(|dir| drop(fs::remove_dir(dir)));
        }
        let abandoned = {
            let _alone = self.alone()?;
            // Whoever writes a file has a share of the lock: none of these is being written.
            let configs = super::files(&layout.configs())?;
            let leases = super::files_of(&super::LeaseKind::ALL.map(|kind| layout.leases(kind)))?;
            for path in configs.iter().chain(&leases) {
                if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TEMPORARY)) {
                    self.remove_file(path);
                }
            }
            for path in configs {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if let Some(name) = name.strip_suffix(METADATA)
                    && !layout.image(name).exists()
                {
                    self.remove_file(&path);
                }
            }
            for path in super::files(&layout.locks())? {
                if let Ok(Some(_held)) = lock::abandoned(&path) {
                    self.remove_file(&path);
                }
            }
            self.cache.abandoned_staging()?
        };
        self.collected.remains += abandoned.into_iter().map(|dir| usize::from(dir.remove())).sum::<usize>();
        Ok(())
    }

    fn remove_file(&mut self, path: &Path) {
        match aenv_durable::remove_file_if_present(path) {
            Ok(()) => self.collected.remains += 1,
            Err(error) => warn!(path = %path.display(), %error, "could not remove a file of the image cache"),
        }
    }
}

/// An error with all its causes, in one line.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
