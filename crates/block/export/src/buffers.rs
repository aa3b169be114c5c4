//! What devices read into on the way to the kernel.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Buffers that were used and wait for the next read, the hottest on top: with one reader at a time it is always the same
/// one, and stays in a core's cache though different threads use it.
#[derive(Default)]
pub(crate) struct Buffers(Mutex<Vec<Vec<u8>>>);

/// As many as readers may have under way for a while; more are freed after use.
const KEPT: usize = 16;

/// A buffer in use. What is in it is left from other reads.
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    length: usize,
    home: Arc<Buffers>,
}

impl Buffers {
    pub(crate) fn take(self: &Arc<Self>, length: usize) -> Buffer {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        if bytes.len() < length {
            bytes.resize(length, 0);
        }
        Buffer { bytes, length, home: Arc::clone(self) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut kept = self.home.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT {
            kept.push(std::mem::take(&mut self.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_used_last_is_used_next_and_few_are_kept() {
        let buffers = Arc::new(Buffers::default());
        let used = buffers.take(8192).as_ptr();
        assert_eq!((buffers.take(4096).as_ptr(), buffers.take(4096).len()), (used, 4096));
        drop((0..2 * KEPT).map(|_| buffers.take(10)).collect::<Vec<_>>());
        assert_eq!(buffers.0.lock().expect("lock").len(), KEPT);
    }
}
