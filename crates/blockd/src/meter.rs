//! Counting what a device does.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use aenv_block_client::{DeviceStats, LatencyStats, OperationStats};
use tracing::warn;

/// Upper bounds of the latency histogram, in microseconds: from a page that is in memory to a registry that does not answer.
pub(crate) const BOUNDS: [u64; 14] =
    [20, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 100_000, 500_000, 2_500_000, 10_000_000];

/// Errors that follow one another faster than this are one burst, and logged once.
const BURST: Duration = Duration::from_secs(10);

/// What requests ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
    Discard,
    Flush,
}

impl Operation {
    pub(crate) const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Discard, Self::Flush];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Discard => "discard",
            Self::Flush => "flush",
        }
    }
}

/// Counts of one device.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    operations: [Counts; 4],
    trouble: Mutex<Trouble>,
}

#[derive(Debug, Default)]
struct Counts {
    bytes: AtomicU64,
    errors: AtomicU64,
    nanos: AtomicU64,
    /// One more than bounds: those that took longer.
    buckets: [AtomicU64; BOUNDS.len() + 1],
}

#[derive(Debug, Default)]
struct Trouble {
    last: Option<(Instant, String)>,
    /// Errors of this burst that were not logged.
    quiet: u64,
}

impl Meter {
    /// Does `work` for `bytes` bytes of the device `name`, and counts it.
    pub(crate) fn count<T>(
        &self,
        name: &str,
        operation: Operation,
        (offset, bytes): (u64, u64),
        work: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let start = Instant::now();
        let result = work();
        let took = start.elapsed();
        let counts = &self.operations[operation as usize];
        counts.nanos.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
        let micros = took.as_micros() as u64;
        let bucket = BOUNDS.partition_point(|bound| *bound < micros);
        counts.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        match &result {
            Ok(_) => {
                counts.bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            Err(error) => {
                counts.errors.fetch_add(1, Ordering::Relaxed);
                self.note(name, operation, offset, bytes, error);
            }
        }
        result
    }

    fn note(&self, name: &str, operation: Operation, offset: u64, bytes: u64, error: &io::Error) {
        let now = Instant::now();
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let words = format!("{} of {bytes} bytes at {offset}: {}", operation.name(), wrapped(error));
        let calm = trouble.last.as_ref().is_none_or(|(last, _)| now.duration_since(*last) > BURST);
        trouble.last = Some((now, words));
        if !calm {
            trouble.quiet += 1;
            return;
        }
        let quiet = std::mem::take(&mut trouble.quiet);
        drop(trouble);
        let (operation, error) = (operation.name(), wrapped(error));
        warn!(device = name, operation, offset, bytes, error, not_logged_before = quiet, "request failed");
    }

    /// What was counted so far.
    pub(crate) fn stats(&self) -> DeviceStats {
        let of = |operation: Operation| self.operations[operation as usize].stats();
        let trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        DeviceStats {
            read: of(Operation::Read),
            write: of(Operation::Write),
            discard: of(Operation::Discard),
            flush: of(Operation::Flush),
            last_error: trouble.last.as_ref().map(|(_, words)| words.clone()),
        }
    }
}

/// An I/O error with all that it wraps.
fn wrapped(error: &io::Error) -> String {
    match error.get_ref() {
        Some(inner) => crate::error::chain(inner),
        None => error.to_string(),
    }
}

impl Counts {
    fn stats(&self) -> OperationStats {
        let counts: Vec<u64> = self.buckets.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let bounds = BOUNDS.iter().copied().map(Some).chain([None]);
        OperationStats {
            operations: counts.iter().sum(),
            bytes: self.bytes.load(Ordering::Relaxed),
            errors: self.errors.load(Ordering::Relaxed),
            latency: LatencyStats {
                total_micros: self.nanos.load(Ordering::Relaxed) / 1000,
                buckets: bounds.zip(counts).collect(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_kind_and_time() {
        let meter = Meter::default();
        meter.count("d", Operation::Read, (0, 512), || Ok(())).unwrap();
        meter
            .count("d", Operation::Read, (0, 512), || {
                std::thread::sleep(Duration::from_millis(11));
                Ok(())
            })
            .unwrap();
        meter.count("d", Operation::Write, (512, 7), || Err::<(), _>(io::ErrorKind::StorageFull.into())).unwrap_err();
        let stats = meter.stats();
        assert_eq!((stats.read.operations, stats.read.bytes, stats.read.errors), (2, 1024, 0));
        assert_eq!((stats.write.operations, stats.write.bytes, stats.write.errors), (1, 0, 1));
        assert!(stats.read.latency.total_micros >= 11_000);
        let slow: u64 = stats.read.latency.buckets[9..].iter().map(|(_, count)| count).sum();
        assert_eq!((stats.read.latency.buckets[9].0, slow), (Some(25_000), 1));
        assert_eq!(stats.last_error.unwrap(), "write of 7 bytes at 512: no storage space");
    }
}
