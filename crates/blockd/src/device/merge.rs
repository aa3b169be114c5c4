//! Keeping the stack of a device shallow, while it runs.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use aenv_block_client::Lower;
use aenv_block_overlaybd::{CompactError, CompactionPolicy, Layer, OverlayDevice};
use aenv_durable::{StoreError, remove_file_if_present};
use tracing::{info, warn};
use uuid::Uuid;

use super::Device;
use crate::context::Context;
use crate::error::chain;
use crate::served::Body;

/// How long a throttled merge sleeps at a time: as long as a close may wait for it.
const NAP: Duration = Duration::from_millis(50);

/// What a device and its merge have in common.
#[derive(Debug, Default)]
pub(super) struct Merging {
    /// It is to give up.
    stop: AtomicBool,
    /// Held while it writes.
    writing: Mutex<()>,
}

/// A merge that is to be done.
#[derive(Debug)]
pub(crate) struct Merge {
    device: Arc<OverlayDevice>,
    /// From the bottom.
    range: Range<usize>,
    path: PathBuf,
    merging: Arc<Merging>,
    rate: u64,
}

impl Merge {
    /// Writes the merged layer and lets the device use it. `None` if it was told to give up. Takes its time; the device may
    /// be used, and restacked, meanwhile.
    pub(crate) fn run(&self) -> Option<Result<Layer, CompactError>> {
        let _writing = self.merging.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let stopped = || self.merging.stop.load(Ordering::Acquire);
        if stopped() {
            return None;
        }
        let start = Instant::now();
        let mut proceed = |written: u64| {
            // 0 is no bound.
            let due = written
                .checked_div(self.rate << 20)
                .map_or(Duration::ZERO, |_| Duration::from_secs_f64(written as f64 / (self.rate << 20) as f64));
            while !stopped() && start.elapsed() < due {
                thread::sleep(NAP.min(due.saturating_sub(start.elapsed())));
            }
            !stopped()
        };
        let result = self.device.compact(self.range.clone(), &self.path, &mut proceed);
        match result {
            Err(_) if stopped() => None,
            result => Some(result.map(|(layer, _)| layer)),
        }
    }
}

impl Device {
    /// A merge, if the stack is too deep. At most one at a time.
    pub(crate) fn plan_merge(&mut self, context: &Context) -> Result<Option<Merge>, StoreError> {
        let Body::Writable { device, .. } = self.served.body() else { return Ok(None) };
        let Some(directory) = self.row.config.upper.as_ref().and_then(|upper| upper.data.parent()) else {
            return Ok(None);
        };
        let policy = CompactionPolicy { max_depth: context.config.compaction.max_depth, base: self.row.base() };
        let Some(range) = policy.plan(self.row.config.layers().len()) else { return Ok(None) };
        if self.row.merging.is_some() || self.problem.is_some() {
            return Ok(None);
        }
        let path = directory.join(format!("merged-{}.commit", Uuid::new_v4().simple()));
        self.row.merging = Some(path.clone());
        if let Err(error) = context.rows.put(&self.name, &self.row) {
            self.row.merging = None;
            return Err(error);
        }
        context.steps.at("merge: intent written");
        let rate = context.config.compaction.max_mib_per_sec;
        Ok(Some(Merge { device, range, path, merging: Arc::clone(&self.merging), rate }))
    }

    /// Writes down what `merge` did, then deletes what it replaced: files of this device. Those elsewhere are the caller's.
    pub(crate) fn end_merge(&mut self, context: &Context, merge: &Merge, result: Result<Layer, CompactError>) {
        // Another device of that name by now, or this one opened again from the files.
        let same = matches!(self.served.body(), Body::Writable { device, .. } if Arc::ptr_eq(&device, &merge.device));
        if !same || self.row.merging.as_ref() != Some(&merge.path) {
            return;
        }
        context.steps.at("merge: done");
        let layer = match result {
            Ok(layer) => layer,
            Err(failed) => {
                warn!(device = self.name, error = chain(&failed), "merging layers failed, the stack stays as it is");
                self.row.merging = None;
                self.record(context);
                return;
            }
        };
        let lower = Lower {
            file: Some(merge.path.clone()),
            size: std::fs::metadata(&merge.path).ok().map(|metadata| metadata.len()),
            uuid: Some(layer.identity().uuid),
            ..Lower::default()
        };
        let replaced: Vec<Lower> = self.row.config.lowers.splice(merge.range.clone(), [lower]).collect();
        let replaced: Vec<PathBuf> = replaced.into_iter().filter_map(|lower| lower.file).collect();
        self.row.garbage.extend(replaced.iter().filter(|path| self.row.owns(path)).cloned().collect::<Vec<_>>());
        self.row.made.retain(|made| !replaced.contains(made));
        self.row.made.push(merge.path.clone());
        self.row.merging = None;
        if !self.record(context) {
            return; // the files stay: the old row names them
        }
        context.steps.at("merge: recorded");
        self.row.garbage.retain(|path| match remove_file_if_present(path) {
            Ok(()) => false,
            Err(error) => {
                warn!(device = self.name, path = %path.display(), %error, "a merged layer cannot be removed");
                true
            }
        });
        context.steps.at("merge: files removed");
        self.record(context);
        info!(device = self.name, layers = replaced.len(), "layers merged");
    }

    fn record(&self, context: &Context) -> bool {
        let result = context.rows.put(&self.name, &self.row);
        if let Err(error) = &result {
            warn!(device = self.name, error = chain(error), "a change of its layers is not recorded");
        }
        result.is_ok()
    }

    /// Makes a merge give up, and waits until it has.
    pub(super) fn stop_merging(&self) {
        self.merging.stop.store(true, Ordering::Release);
        drop(self.merging.writing.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
