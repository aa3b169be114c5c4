//! What running guests use of their machines, sampled now and then.
//!
//! One task goes round all sandboxes whose traffic flows, and asks their agents. To be asked is no use of a sandbox: it
//! holds off no idle timeout and resumes nobody. A sandbox that is paused costs nothing, and keeps its samples.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use jiff::Timestamp;
use serde::Deserialize;
use tokio::time::Instant;
use tracing::debug;

use crate::guest;
use crate::orchestrator::{Entry, Orchestrator};

/// Samples of a sandbox that are kept: an hour of running, in 50 KiB.
const KEPT: usize = 720;
/// Guests that are asked at the same time.
const AT_ONCE: usize = 32;

/// What a guest used at one instant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// When it was asked, by the node's clock.
    pub at: Timestamp,
    /// What it said.
    pub usage: Usage,
}

/// What a guest's agent says of its machine, in bytes unless said otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub struct Usage {
    /// Processors.
    pub cpu_count: u32,
    /// Percent of all of them, since it was asked before.
    pub cpu_used_pct: f64,
    /// Memory in use, caches not counted.
    pub mem_used: u64,
    /// Memory there is.
    pub mem_total: u64,
    /// Page cache.
    pub mem_cache: u64,
    /// Root file system in use.
    pub disk_used: u64,
    /// Root file system there is.
    pub disk_total: u64,
}

/// The newest samples of a sandbox.
#[derive(Debug, Default)]
pub(crate) struct Vitals(Mutex<VecDeque<Sample>>);

impl Vitals {
    /// All that are kept, oldest first.
    pub(crate) fn samples(&self) -> Vec<Sample> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    /// The newest.
    pub(crate) fn newest(&self) -> Option<Sample> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).back().copied()
    }

    fn add(&self, sample: Sample) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back(sample);
        if kept.len() > KEPT {
            kept.pop_front();
        }
    }
}

/// When a running guest was last heard of.
#[derive(Debug, Clone)]
pub(crate) struct Pulse(Arc<Mutex<Instant>>);

impl Pulse {
    /// It has just been heard of.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    pub(crate) fn beat(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Whether it was heard of within `span`.
    pub(crate) fn within(&self, span: Duration) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).elapsed() < span
    }
}

impl Orchestrator {
    /// Goes round until the node stops.
    pub(crate) async fn keep_watch(self) {
        let (stop, every) = (self.inner.scope.token(), self.inner.parts.config.sample_interval);
        while !every.is_zero() && !stop.is_cancelled() {
            let next = Instant::now() + every;
            let round = stream::iter(self.entries()).for_each_concurrent(AT_ONCE, |entry| async move {
                look_at(&entry).await;
            });
            let round = async {
                round.await;
                tokio::time::sleep_until(next).await;
            };
            stop.run_until_cancelled(round).await;
        }
    }
}

async fn look_at(entry: &Entry) {
    let Some(live) = entry.live() else { return };
    let journal = Arc::clone(&entry.journal);
    // Of a sandbox that starts or ends, whoever asks looks.
    _ = tokio::task::spawn_blocking(move || journal.look_at_console()).await;
    let asked = guest::usage(live.dialer.as_ref(), entry.access_token.as_deref());
    match live.ended.run_until_cancelled(asked).await {
        Some(Ok(usage)) => {
            live.pulse.beat();
            entry.vitals.add(Sample { at: Timestamp::now(), usage });
        }
        Some(Err(error)) => debug!(sandbox_id = %entry.id, %error, "a guest does not say what it uses"),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_kept() {
        let vitals = Vitals::default();
        assert_eq!(vitals.newest(), None);
        for n in 0..KEPT as u32 + 5 {
            let usage = Usage { cpu_count: n, ..Usage::default() };
            vitals.add(Sample { at: Timestamp::UNIX_EPOCH, usage });
        }
        let kept = vitals.samples();
        assert_eq!((kept.len(), kept[0].usage.cpu_count), (KEPT, 5));
        assert_eq!(vitals.newest(), kept.last().copied());
    }
}
