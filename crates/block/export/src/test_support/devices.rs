//! Devices that can be held, that remember, and that grow.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aenv_block_device::BlockDevice;
use aenv_model::Bytes;

/// Passes everything on, but each request waits while the device is held, as one would for a network that is gone.
#[derive(Debug)]
pub struct Held<D> {
    inner: D,
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl<D: BlockDevice> Held<D> {
    /// Held from the start.
    pub fn new(inner: D) -> Self {
        Self { inner, state: Mutex::new((true, 0)), changed: Condvar::new() }
    }

    /// The device inside, which nobody holds.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Lets all requests go on, and holds no further ones.
    pub fn release(&self) {
        self.lock().0 = false;
        self.changed.notify_all();
    }

    /// Waits until `count` requests are being held.
    ///
    /// # Panics
    /// If they do not come within `deadline`.
    pub fn wait_for(&self, count: usize, deadline: Duration) {
        let (state, waited) = self
            .changed
            .wait_timeout_while(self.lock(), deadline, |(_, waiting)| *waiting < count)
            .unwrap_or_else(PoisonError::into_inner);
        assert!(!waited.timed_out(), "{} requests came, not {count}", state.1);
    }

    fn pass(&self) {
        let mut state = self.lock();
        state.1 += 1;
        self.changed.notify_all();
        while state.0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.1 -= 1;
    }

    fn lock(&self) -> MutexGuard<'_, (bool, usize)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: BlockDevice> BlockDevice for Held<D> {
    fn size(&self) -> Bytes {
        self.inner.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.pass();
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.pass();
        self.inner.write_at(offset, buf)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.pass();
        self.inner.discard(offset, length)
    }

    fn flush(&self) -> io::Result<()> {
        self.pass();
        self.inner.flush()
    }
}

/// One call of a device that changes something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// `write_at`: offset and length.
    Write(u64, u64),
    /// `discard`: offset and length.
    Discard(u64, u64),
    /// `flush`
    Flush,
}

/// Passes everything on and remembers changes in the order in which they were asked for.
#[derive(Debug)]
pub struct Recording<D> {
    inner: D,
    steps: Mutex<Vec<Step>>,
}

impl<D: BlockDevice> Recording<D> {
    /// Nothing is remembered yet.
    pub fn new(inner: D) -> Self {
        Self { inner, steps: Mutex::default() }
    }

    /// What came since the last time.
    pub fn take(&self) -> Vec<Step> {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Step>> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: BlockDevice> BlockDevice for Recording<D> {
    fn size(&self) -> Bytes {
        self.inner.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.lock().push(Step::Write(offset, buf.len() as u64));
        self.inner.write_at(offset, buf)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.lock().push(Step::Discard(offset, length));
        self.inner.discard(offset, length)
    }

    fn flush(&self) -> io::Result<()> {
        self.lock().push(Step::Flush);
        self.inner.flush()
    }
}

/// The first part of another device, which can become larger.
#[derive(Debug)]
pub struct Growing<D> {
    inner: D,
    size: AtomicU64,
}

impl<D: BlockDevice> Growing<D> {
    /// The first `size` bytes of `inner`.
    pub fn new(inner: D, size: Bytes) -> Self {
        Self { inner, size: AtomicU64::new(size.get()) }
    }

    /// From now on, the first `size` bytes.
    pub fn grow(&self, size: Bytes) {
        self.size.store(size.get(), Ordering::Release);
    }

    fn check(&self, offset: u64, length: u64) -> io::Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.size().get() => Ok(()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

impl<D: BlockDevice> BlockDevice for Growing<D> {
    fn size(&self) -> Bytes {
        Bytes(self.size.load(Ordering::Acquire))
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check(offset, buf.len() as u64)?;
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.check(offset, buf.len() as u64)?;
        self.inner.write_at(offset, buf)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length)?;
        self.inner.discard(offset, length)
    }

    fn flush(&self) -> io::Result<()> {
        self.inner.flush()
    }
}
