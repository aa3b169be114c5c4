//! A trace file's life: asked for by an empty file, recorded while a lock file is there, vouched for by a third.
//!
//! ```text
//!   trace missing ─────▶ off
//!   trace empty ───────▶ record: trace.lock appears … somebody removes it, or the device closes
//!                                trace is replaced whole, trace.ok appears, trace.lock is gone
//!   trace not empty ───▶ replay
//! ```
//!
//! Whoever records an image's start creates the empty file, starts it, removes the lock when it has seen enough and waits
//! for the last file. A process that is killed meanwhile leaves an empty trace, a lock that nobody heeds and no `.ok`: the
//! next one records again.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{ReadTraceError, Trace, TraceRecorder};

/// How often the lock is looked for.
const WATCH: Duration = Duration::from_millis(100);

/// What is to be done with a trace file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceUse {
    /// There is none.
    Off,
    /// It is to be recorded.
    Record,
    /// What it tells is to be read ahead.
    Replay(Trace),
}

impl TraceUse {
    /// Looks at the file `path`.
    pub fn of(path: &Path) -> Result<Self, ReadTraceError> {
        match std::fs::metadata(path) {
            Ok(metadata) if metadata.len() == 0 => Ok(Self::Record),
            Ok(_) => Trace::read(path).map(Self::Replay),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::Off),
            Err(source) => Err(ReadTraceError::Io { path: path.to_owned(), source }),
        }
    }
}

/// A trace could not be recorded.
#[derive(Debug, thiserror::Error)]
#[error("{doing} {path}", path = path.display())]
pub struct RecordTraceError {
    doing: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// A recording under way. To be ended with [`finish`](Self::finish); dropped, it is given up.
#[derive(Debug)]
pub struct TraceRecording {
    recorder: TraceRecorder,
    ending: Arc<Ending>,
    /// `None` only while it is dropped or has ended.
    watch: Option<JoinHandle<Result<Option<Trace>, RecordTraceError>>>,
}

#[derive(Debug, Default)]
struct Ending {
    asked: Mutex<Option<Ask>>,
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ask {
    Keep,
    GiveUp,
}

impl TraceRecording {
    /// Begins a recording for the file `path`: its lock is there when this returns.
    pub fn start(path: &Path) -> Result<Self, RecordTraceError> {
        let files = Files::of(path);
        remove(&files.ok)?;
        File::create(&files.lock).map_err(failed("create", &files.lock))?;
        let (recorder, ending) = (TraceRecorder::new(), Arc::new(Ending::default()));
        let (watched, asked) = (recorder.clone(), Arc::clone(&ending));
        let watch = thread::Builder::new()
            .name("trace-record".to_owned())
            .spawn(move || watch(&files, &watched, &asked))
            .map_err(failed("start a thread for", path))?;
        Ok(Self { recorder, ending, watch: Some(watch) })
    }

    /// What the sources of the layers are wrapped with.
    #[must_use]
    pub fn recorder(&self) -> &TraceRecorder {
        &self.recorder
    }

    /// Whether it has ended, by itself or because the lock was removed. What it gave, [`finish`](Self::finish) tells.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.watch.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the recording, if it has not ended, writes the file and marks it. Gives what was recorded.
    pub fn finish(mut self) -> Result<Trace, RecordTraceError> {
        self.ending.ask(Ask::Keep);
        let ended = self.watch.take().map(JoinHandle::join);
        match ended {
            Some(Ok(result)) => result.map(Option::unwrap_or_default),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(Trace::default()),
        }
    }
}

impl Drop for TraceRecording {
    fn drop(&mut self) {
        // The thread removes the lock and ends.
        self.ending.ask(Ask::GiveUp);
    }
}

impl Ending {
    fn ask(&self, ask: Ask) {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(ask);
        self.changed.notify_all();
    }

    /// Waits a while for an ask.
    fn wait(&self, time: Duration) -> Option<Ask> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(asked, time, |asked| asked.is_none());
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The files of one trace.
#[derive(Debug)]
struct Files {
    trace: PathBuf,
    lock: PathBuf,
    ok: PathBuf,
}

impl Files {
    fn of(trace: &Path) -> Self {
        let beside = |suffix: &str| {
            let mut name = OsString::from(trace);
            name.push(suffix);
            PathBuf::from(name)
        };
        Self { trace: trace.to_owned(), lock: beside(".lock"), ok: beside(".ok") }
    }
}

/// Waits for the end; gives the trace unless it is given up.
fn watch(files: &Files, recorder: &TraceRecorder, ending: &Ending) -> Result<Option<Trace>, RecordTraceError> {
    let ask = loop {
        if let Some(ask) = ending.wait(WATCH) {
            break ask;
        }
        // Anything but absence may pass, and a recording that goes on does no harm.
        if matches!(files.lock.try_exists(), Ok(false)) {
            break Ask::Keep;
        }
    };
    let trace = recorder.finish();
    if ask == Ask::GiveUp {
        remove(&files.lock)?;
        return Ok(None);
    }
    let kept = trace.write(&files.trace).map_err(failed("write", &files.trace)).and_then(|()| {
        let ok = aenv_durable::atomic_write(&files.ok, b"", 0o644);
        ok.map_err(failed("write", &files.ok))
    });
    if let Err(error) = &kept {
        let error = error as &dyn std::error::Error;
        tracing::warn!(trace = %files.trace.display(), error, "a trace was recorded and could not be kept");
    }
    remove(&files.lock)?;
    kept.map(|()| Some(trace))
}

fn remove(path: &Path) -> Result<(), RecordTraceError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RecordTraceError {
    let path = path.to_owned();
    move |source| RecordTraceError { doing, path, source }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use aenv_block_overlaybd::MemoryFile;

    use super::*;

    fn until(what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !condition() {
            assert!(Instant::now() < deadline, "{what}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Starts a recording and reads a page with it.
    fn record(trace: &Path) -> TraceRecording {
        let recording = TraceRecording::start(trace).unwrap();
        let source = recording.recorder().wrap(0, Arc::new(MemoryFile::new("layer", vec![0; 10_000])));
        source.read_at(5000, &mut [0; 10]).unwrap();
        recording
    }

    #[test]
    fn a_trace_that_is_empty_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("trace");
        assert_eq!(TraceUse::of(&trace).unwrap(), TraceUse::Off);
        File::create(&trace).unwrap();
        assert_eq!(TraceUse::of(&trace).unwrap(), TraceUse::Record);
        let recorded = record(&trace).finish().unwrap();
        assert_eq!(recorded.accesses().len(), 1);
        assert_eq!(TraceUse::of(&trace).unwrap(), TraceUse::Replay(recorded));
        std::fs::write(&trace, b"nonsense").unwrap();
        assert!(TraceUse::of(&trace).is_err());
    }

    #[test]
    fn removing_the_lock_ends_a_recording_and_ok_marks_it() {
        let dir = tempfile::tempdir().unwrap();
        let (trace, ok) = (dir.path().join("trace"), dir.path().join("trace.ok"));
        File::create(&trace).unwrap();
        std::fs::write(&ok, b"of an earlier one").unwrap();
        let recording = record(&trace);
        assert_eq!(names(dir.path()), ["trace", "trace.lock"]);
        assert!(!recording.has_ended());
        std::fs::remove_file(dir.path().join("trace.lock")).unwrap();
        until("the recording is marked", || ok.exists());
        assert_eq!(Trace::read(&trace).unwrap().accesses().len(), 1);
        until("it knows its end", || recording.has_ended());
        assert_eq!(recording.finish().unwrap().accesses().len(), 1, "the end may come twice");
        assert_eq!(names(dir.path()), ["trace", "trace.ok"]);
    }

    #[test]
    fn a_recording_that_is_dropped_leaves_what_asks_for_another() {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("trace");
        File::create(&trace).unwrap();
        drop(record(&trace));
        until("the lock goes", || names(dir.path()) == ["trace"]);
        assert_eq!(TraceUse::of(&trace).unwrap(), TraceUse::Record);
    }

    #[test]
    fn a_trace_that_can_not_be_kept_is_not_marked() {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("trace");
        let recording = record(&trace);
        std::fs::create_dir_all(trace.join("in the way")).unwrap();
        let error = recording.finish().unwrap_err();
        assert!(error.to_string().contains("trace"), "{error}");
        assert_eq!(names(dir.path()), ["trace"]);
        TraceRecording::start(&dir.path().join("no/such/folder")).unwrap_err();
    }
}
