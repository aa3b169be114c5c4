//! Reading pages of a memory image before a guest asks for them.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::fs::{Advice, fadvise};

use crate::pages::PageRanges;

/// Bytes of one request. The kernel cuts a larger one at what the device's read-ahead is, and drops the rest; this is the
/// least that is common.
const STEP: u64 = 128 << 10;

/// Pages on their way into the host's cache. Dropping it gives up, without waiting.
#[derive(Debug)]
pub struct Prefetch {
    given_up: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

/// Has the kernel read `pages` of `file`, a memory image, into its cache, in a thread of its own. Reading may well go on
/// after that thread has asked for all of them.
pub fn prefetch(file: File, pages: PageRanges) -> io::Result<Prefetch> {
    let given_up = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&given_up);
    let thread = thread::Builder::new().name("prefetch".into()).spawn(move || {
        for range in pages.ranges() {
            for at in range.clone().step_by(STEP as usize) {
                if seen.load(Ordering::Relaxed) {
                    return Ok(());
                }
                fadvise(&file, at, NonZeroU64::new(STEP.min(range.end - at)), Advice::WillNeed)?;
            }
        }
        Ok(())
    })?;
    Ok(Prefetch { given_up, thread: Some(thread) })
}

impl Prefetch {
    /// Waits until all pages are asked for. Blocking.
    pub fn wait(mut self) -> io::Result<()> {
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.given_up.store(true, Ordering::Relaxed);
    }
}
