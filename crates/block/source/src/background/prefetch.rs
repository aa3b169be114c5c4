//! What a start like this one wanted before, fetched in that order.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use aenv_block_overlaybd::Source;

use super::{Done, Job, JobError, Stop};
use crate::cache::{CachedBlob, Purpose};
use crate::trace::Trace;

/// Bytes of one read.
const PIECE: u64 = 1 << 20;

/// Replays `trace` into the cache with `workers` reads at a time (1 at least). `layers` are in the order of the recording;
/// `None` for those that are local. It doesn't yield to readers, as it fetches what they want next.
///
/// What fails is counted and passed over: a reader will meet it, or not. Accesses beyond a layer's end are left out.
/// Errors: no thread could be started.
pub fn prefetch(trace: Trace, layers: Vec<Option<Arc<CachedBlob>>>, workers: usize) -> io::Result<Job> {
    Job::spawn("block-prefetch", move |stop| {
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Done::default());
        thread::scope(|scope| {
            let work = || work(&trace, &layers, &next, &done, stop);
            for _ in 1..workers {
                // With fewer threads than wished for, it takes longer.
                let _ = thread::Builder::new().name("block-prefetch".to_owned()).spawn_scoped(scope, work);
            }
            work();
        });
        stop.sleep(Duration::ZERO)?;
        let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        tracing::info!(
            accesses = trace.accesses().len(),
            fetched = done.fetched,
            failed = done.failed,
            "trace replayed"
        );
        Ok(done)
    })
}

/// Takes one access after the other until there are no more.
fn work(trace: &Trace, layers: &[Option<Arc<CachedBlob>>], next: &AtomicUsize, done: &Mutex<Done>, stop: &Stop) {
    let mut buf = vec![0; PIECE as usize];
    while let Some(access) = trace.accesses().get(next.fetch_add(1, Ordering::Relaxed)) {
        let Some(Some(blob)) = layers.get(access.layer as usize) else { continue };
        let end = access.offset.saturating_add(access.length).min(blob.size());
        let mut at = access.offset;
        while at < end {
            if let Err(JobError::Cancelled) = stop.sleep(Duration::ZERO) {
                return;
            }
            let piece = &mut buf[..(end - at).min(PIECE) as usize];
            let result = blob.read_for(Purpose::Background, at, piece);
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            match result {
                Ok(fetched) => done.fetched += fetched,
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::debug!(blob = blob.key(), offset = at, error, "prefetch failed");
                    done.failed += 1;
                }
            }
            at += piece.len() as u64;
        }
    }
}
