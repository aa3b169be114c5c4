//! Work that nobody waits for: whole blobs into the cache, and what a recorded start will want next.

mod download;
mod pace;
mod prefetch;

use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

pub use self::download::{DownloadOptions, download};
pub use self::prefetch::prefetch;

/// What a job did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// Bytes that had to be fetched.
    pub fetched: u64,
    /// Whether a whole blob was compared with its digest.
    pub verified: bool,
    /// Reads that failed and were passed over; a download has none.
    pub failed: u64,
}

/// A job ended without having done its work.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// Told to stop.
    #[error("cancelled")]
    Cancelled,
    /// A part could not be read.
    #[error("download {blob}")]
    Read {
        /// What was being read.
        blob: String,
        /// Why not.
        source: io::Error,
    },
    /// All of it came, and it is something else. Reads of the blob are refused from then on, until a download succeeds.
    #[error("{blob} has the digest {found}")]
    WrongDigest {
        /// What was asked for.
        blob: String,
        /// What came.
        found: String,
    },
    /// It would push itself out of the cache.
    #[error("{blob} is {size} bytes long, the cache holds {capacity}")]
    TooLarge {
        /// What was asked for.
        blob: String,
        /// Its length.
        size: u64,
        /// What the cache may keep.
        capacity: u64,
    },
    /// A defect of ours.
    #[error("the job panicked")]
    Panicked,
}

/// A job on its own thread. Dropped, it is told to stop and not waited for; it ends after the read it is in.
pub struct Job {
    stop: Arc<Stop>,
    /// `None` once it was waited for.
    thread: Option<JoinHandle<Result<Done, JobError>>>,
}

impl Job {
    fn spawn(name: &str, work: impl FnOnce(&Stop) -> Result<Done, JobError> + Send + 'static) -> io::Result<Self> {
        let stop = Arc::new(Stop::default());
        let thread = thread::Builder::new().name(name.to_owned()).spawn({
            let stop = Arc::clone(&stop);
            move || work(&stop)
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Tells it to stop. It does after the read it is in, which may last as long as its source has patience.
    pub fn cancel(&self) {
        self.stop.now();
    }

    /// Whether it has ended, so that [`Job::wait`] returns at once.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for its end.
    pub fn wait(mut self) -> Result<Done, JobError> {
        let thread = self.thread.take().ok_or(JobError::Cancelled)?;
        thread.join().unwrap_or(Err(JobError::Panicked))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.stop.now();
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("finished", &self.is_finished()).finish_non_exhaustive()
    }
}

/// A wish to stop, which also ends sleeps.
#[derive(Debug, Default)]
struct Stop {
    wanted: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn now(&self) {
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Sleeps, unless told to stop.
    fn sleep(&self, time: Duration) -> Result<(), JobError> {
        let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        let (wanted, _) =
            self.changed.wait_timeout_while(wanted, time, |wanted| !*wanted).unwrap_or_else(PoisonError::into_inner);
        if *wanted { Err(JobError::Cancelled) } else { Ok(()) }
    }
}
