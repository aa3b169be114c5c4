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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn the_background_waits_for_the_last_reader_or_its_own_patience() {
        let quiet = Quiet::default();
        quiet.wait(Duration::from_secs(60));
        let (first, second) = (quiet.reader(), quiet.reader());
        quiet.wait(Duration::from_millis(1));
        let gone = AtomicBool::new(false);
        thread::scope(|scope| {
            let background = scope.spawn(|| {
                quiet.wait(Duration::from_secs(60));
                assert!(gone.load(Ordering::SeqCst));
            });
            drop(first);
            gone.store(true, Ordering::SeqCst);
            drop(second);
            background.join().unwrap();
        });
    }
}
