//! A device that fails when told.

use std::io;
use std::sync::{Mutex, PoisonError};

use aenv_model::Bytes;

use crate::device::BlockDevice;

/// What a device can be asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// `read_at`
    Read,
    /// `write_at`
    Write,
    /// `discard`
    Discard,
    /// `flush`
    Flush,
}

/// Passes everything on, except the operations it was told to fail; those do not reach the inner device.
#[derive(Debug)]
pub struct Failing<D> {
    inner: D,
    plans: Mutex<Vec<Plan>>,
}

#[derive(Debug)]
struct Plan {
    operation: Operation,
    /// Successes still granted.
    after: u64,
    kind: io::ErrorKind,
}

impl<D: BlockDevice> Failing<D> {
    /// A device that does not fail yet.
    pub fn new(inner: D) -> Self {
        Self { inner, plans: Mutex::default() }
    }

    /// Lets `after` more calls of `operation` through and fails every later one with `kind`.
    pub fn fail(&self, operation: Operation, after: u64, kind: io::ErrorKind) {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).push(Plan { operation, after, kind });
    }

    /// Stops failing.
    pub fn heal(&self) {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The device inside.
    pub fn into_inner(self) -> D {
        self.inner
    }

    fn ask(&self, operation: Operation) -> io::Result<()> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        for plan in plans.iter_mut().filter(|plan| plan.operation == operation) {
            match plan.after.checked_sub(1) {
                Some(left) => plan.after = left,
                None => return Err(io::Error::new(plan.kind, "told to fail")),
            }
        }
        Ok(())
    }
}

impl<D: BlockDevice> BlockDevice for Failing<D> {
    fn size(&self) -> Bytes {
        self.inner.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.ask(Operation::Read)?;
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.ask(Operation::Write)?;
        self.inner.write_at(offset, buf)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.ask(Operation::Discard)?;
        self.inner.discard(offset, length)
    }

    fn flush(&self) -> io::Result<()> {
        self.ask(Operation::Flush)?;
        self.inner.flush()
    }
}
