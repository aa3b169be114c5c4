//! Readers first: work in the background waits until no reader waits for the network.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Counts readers that wait for bytes from far away.
#[derive(Debug, Default)]
pub(crate) struct Quiet {
    waiting: Mutex<usize>,
    changed: Condvar,
}

impl Quiet {
    /// Counts a reader until the guard is dropped.
    pub(super) fn reader(&self) -> Waiting<'_> {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Waiting(self)
    }

    /// Waits until no reader waits, but no longer than `longest`: under readers without end, the background still moves.
    pub(crate) fn wait(&self, longest: Duration) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // Both outcomes mean "go".
        drop(self.changed.wait_timeout_while(waiting, longest, |waiting| *waiting > 0));
    }
}

pub(super) struct Waiting<'a>(&'a Quiet);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        *waiting -= 1;
        if *waiting == 0 {
            self.0.changed.notify_all();
        }
    }
}
