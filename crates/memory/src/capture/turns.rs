//! Places in a file, given out in order to threads that come in any.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Whose turn it is to be told where the data of its chunk goes.
#[derive(Debug)]
pub(super) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The chunk whose size is to be known next.
    chunk: usize,
    /// Where its data goes.
    position: u64,
    stopped: bool,
}

impl Turns {
    pub(super) fn new(position: u64) -> Self {
        Self { state: Mutex::new(State { chunk: 0, position, stopped: false }), changed: Condvar::new() }
    }

    /// Waits until the size of all chunks before `chunk` is known, and gives the place of its `length` bytes; none if
    /// somebody has stopped. Chunks are taken up in order, so that the one waited for is always being worked on.
    pub(super) fn place(&self, chunk: usize, length: u64) -> Option<u64> {
        let state = self.changed.wait_while(self.lock(), |state| state.chunk != chunk && !state.stopped);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.stopped {
            return None;
        }
        let position = state.position;
        state.position += length;
        state.chunk += 1;
        self.changed.notify_all();
        Some(position)
    }

    /// Nobody gets a place any more.
    pub(super) fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
