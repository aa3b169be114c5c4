//! What goes on beside a device: recording what it reads, replaying what an earlier start read, fetching whole layers.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use aenv_block_client::{DeviceConfig, DownloadConfig, DownloadSettings};
use aenv_block_source::{
    CachedBlob, DownloadOptions, Job, JobError, Trace, TraceRecorder, TraceRecording, TraceUse, download, prefetch,
};
use tracing::warn;

use crate::context::Context;
use crate::error::chain;
use crate::layers::Opened;

/// How often somebody who waits for a job looks whether it has ended.
const LOOK: Duration = Duration::from_millis(200);
/// Name of a trace in the directory of the last lower.
const TRACE: &str = "trace";

/// What all devices share of it.
#[derive(Debug)]
pub(crate) struct Background {
    downloads: DownloadSettings,
    /// Reads at a time of one replay.
    prefetch: usize,
    shared: Arc<Shared>,
}

/// Which blobs are being fetched, or have been.
#[derive(Debug, Default)]
struct Shared {
    blobs: Mutex<HashMap<String, Progress>>,
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Running,
    Done,
}

impl Background {
    pub(crate) fn new(downloads: DownloadSettings, prefetch: usize) -> Self {
        Self { downloads, prefetch, shared: Arc::default() }
    }
}

/// What goes on beside one device. Dropped, it is told to stop.
#[derive(Debug, Default)]
pub(crate) struct Attendants {
    recording: Option<TraceRecording>,
    /// Held: they end when they are dropped.
    _prefetch: Option<Job>,
    _downloads: Option<StopGuard>,
}

/// What a start does about traces.
#[derive(Debug)]
pub(crate) enum TracePlan {
    Nothing,
    /// Tell what is read.
    Record(TraceRecording),
    /// Fetch what an earlier one read.
    Replay(Trace),
}

impl TracePlan {
    /// What `config` asks for: a recording by its name, or whatever the file beside the last lower says. What cannot be done
    /// is told in the log: it costs speed alone.
    pub(crate) fn of(name: &str, config: &DeviceConfig) -> Self {
        let record = |path: &Path| match TraceRecording::start(path) {
            Ok(recording) => Self::Record(recording),
            Err(error) => {
                warn!(device = name, error = chain(&error), "its start is not recorded");
                Self::Nothing
            }
        };
        if let Some(path) = &config.record_trace_path {
            return record(path);
        }
        let Some(path) = trace_path(config) else { return Self::Nothing };
        match TraceUse::of(&path) {
            Ok(TraceUse::Off) => Self::Nothing,
            Ok(TraceUse::Record) => record(&path),
            Ok(TraceUse::Replay(trace)) => Self::Replay(trace),
            Err(error) => {
                warn!(device = name, error = chain(&error), "no trace to replay");
                Self::Nothing
            }
        }
    }

    /// Who records, if anybody.
    pub(crate) fn recorder(&self) -> Option<&TraceRecorder> {
        match self {
            Self::Record(recording) => Some(recording.recorder()),
            _ => None,
        }
    }
}

impl Attendants {
    /// Begins what is to go on beside a device of `config`, which is made of `opened`.
    pub(crate) fn start(
        context: &Context,
        name: &str,
        config: &DeviceConfig,
        opened: &Opened,
        traces: TracePlan,
    ) -> Self {
        let background = &context.background;
        let (mut recording, mut prefetch) = (None, None);
        match traces {
            TracePlan::Nothing => {}
            TracePlan::Record(started) => recording = Some(started),
            TracePlan::Replay(trace) => prefetch = background.replay(name, trace, opened),
        }
        Self { recording, _prefetch: prefetch, _downloads: background.download(name, &config.download, opened) }
    }

    /// Ends it; what was recorded is written.
    pub(crate) fn end(&mut self) {
        if let Some(recording) = self.recording.take() {
            let _ = recording.finish(); // what went wrong is in the log
        }
        *self = Self::default();
    }
}

/// Where the trace of an image lies: beside its last lower.
fn trace_path(config: &DeviceConfig) -> Option<PathBuf> {
    let last = config.lowers.last()?;
    let directory = last.dir.as_deref().or_else(|| last.file.as_deref()?.parent())?;
    Some(directory.join(TRACE))
}

impl Background {
    /// Fetches what an earlier start read, if any of it is remote.
    fn replay(&self, name: &str, trace: Trace, opened: &Opened) -> Option<Job> {
        if self.prefetch == 0 || opened.blobs.iter().all(Option::is_none) {
            return None;
        }
        let job = prefetch(trace, opened.blobs.clone(), self.prefetch);
        job.inspect_err(|error| warn!(device = name, %error, "no prefetch")).ok()
    }

    /// Fetches the blobs of a device one after the other, if that is wished for. Gives what stops it.
    fn download(&self, name: &str, config: &DownloadConfig, opened: &Opened) -> Option<StopGuard> {
        let blobs: Vec<_> = opened.blobs.iter().flatten().cloned().collect();
        if blobs.is_empty() || !config.enable.unwrap_or(self.downloads.enable) {
            return None;
        }
        let settings = &self.downloads;
        let seconds = |value: Option<u32>, default: u32| Duration::from_secs(value.unwrap_or(default).into());
        let delay = seconds(config.delay, settings.delay_secs);
        let options = DownloadOptions {
            delay: Duration::ZERO,
            delay_extra: seconds(config.delay_extra, settings.delay_extra_secs),
            rate: u64::from(config.max_mbps.unwrap_or(settings.max_mb_per_sec)) * 1_000_000,
            attempts: config.try_cnt.unwrap_or(settings.attempts).max(1),
            ..DownloadOptions::default()
        };
        let stop = Arc::new(Stop::default());
        let fetch = Fetch { shared: Arc::clone(&self.shared), limit: settings.concurrency, stop: Arc::clone(&stop) };
        let work = move || {
            if !fetch.stop.sleep(delay) {
                fetch.all(blobs, options);
            }
        };
        let started = thread::Builder::new().name("block-fetch".to_owned()).spawn(work);
        started.inspect_err(|error| warn!(device = name, %error, "no download")).ok()?;
        Some(StopGuard(stop))
    }
}

/// Fetches the blobs of one device.
struct Fetch {
    shared: Arc<Shared>,
    /// Blobs at a time, of all devices.
    limit: usize,
    stop: Arc<Stop>,
}

impl Fetch {
    fn all(&self, blobs: Vec<Arc<CachedBlob>>, mut options: DownloadOptions) {
        for blob in blobs {
            if !self.begin(blob.key()) {
                continue;
            }
            let key = blob.key().to_owned();
            let done = self.one(blob, options.clone());
            let mut running = self.shared.lock();
            if done {
                running.insert(key, Progress::Done);
            } else {
                running.remove(&key);
            }
            drop(running);
            self.shared.changed.notify_all();
            // Once per device is enough not to begin with everybody else.
            options.delay_extra = Duration::ZERO;
        }
    }

    /// Waits for its turn; says whether there is anything left to do. Another device may have the same blob.
    fn begin(&self, key: &str) -> bool {
        let mut blobs = self.shared.lock();
        loop {
            let running = blobs.values().filter(|progress| **progress == Progress::Running).count();
            match blobs.get(key) {
                _ if self.stop.is_wanted() => return false,
                Some(Progress::Done) => return false,
                None if running < self.limit => {
                    blobs.insert(key.to_owned(), Progress::Running);
                    return true;
                }
                _ => {}
            }
            blobs = self.shared.changed.wait_timeout(blobs, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether all of it came. What went wrong is in the log already.
    fn one(&self, blob: Arc<CachedBlob>, options: DownloadOptions) -> bool {
        let Ok(job) = download(blob, options) else { return false };
        while !job.is_finished() {
            if self.stop.sleep(LOOK) {
                job.cancel();
                break;
            }
        }
        match job.wait() {
            Ok(_) => true,
            // It never will.
            Err(JobError::TooLarge { .. }) => true,
            Err(_) => false,
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Progress>> {
        self.blobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A wish to stop, which also ends sleeps.
#[derive(Debug, Default)]
struct Stop {
    wanted: Mutex<bool>,
    changed: Condvar,
}

/// Tells to stop when it is dropped.
#[derive(Debug, Default)]
struct StopGuard(Arc<Stop>);

impl Drop for StopGuard {
    fn drop(&mut self) {
        self.0.now();
    }
}

impl Stop {
    fn now(&self) {
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn is_wanted(&self) -> bool {
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps; says whether it was told to stop.
    fn sleep(&self, time: Duration) -> bool {
        let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        let (wanted, _) =
            self.changed.wait_timeout_while(wanted, time, |wanted| !*wanted).unwrap_or_else(PoisonError::into_inner);
        *wanted
    }
}
