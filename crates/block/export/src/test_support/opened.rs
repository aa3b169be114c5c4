//! An export, opened as a VMM opens it.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::fs::{FallocateFlags, OFlags, fallocate};

/// What direct I/O must be aligned to, everywhere.
const ALIGNMENT: usize = 4096;

/// A file or block device opened for direct I/O. All offsets and lengths must be multiples of 4096.
#[derive(Debug)]
pub struct Opened(File);

impl Opened {
    /// Opens for reading, and for writing if `write`.
    pub fn new(path: &Path, write: bool) -> io::Result<Self> {
        let direct = OFlags::DIRECT.bits().cast_signed();
        File::options().read(true).write(write).custom_flags(direct).open(path).map(Self)
    }

    /// The file itself.
    pub fn file(&self) -> &File {
        &self.0
    }

    /// What the kernel says the size is, now.
    pub fn size(&self) -> io::Result<u64> {
        (&self.0).seek(SeekFrom::End(0))
    }

    /// `length` bytes from `offset`.
    pub fn read(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let (mut buffer, at) = aligned(length);
        self.0.read_exact_at(&mut buffer[at..at + length], offset)?;
        Ok(buffer[at..at + length].to_vec())
    }

    /// Writes `bytes` at `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (mut buffer, at) = aligned(bytes.len());
        buffer[at..at + bytes.len()].copy_from_slice(bytes);
        self.0.write_all_at(&buffer[at..at + bytes.len()], offset)
    }

    /// Makes a range read as zeros, as VMMs do for a guest's discard.
    pub fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        Ok(fallocate(&self.0, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length)?)
    }

    /// Makes what was written durable.
    pub fn flush(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}

/// A buffer with `length` aligned bytes, and where they begin.
fn aligned(length: usize) -> (Vec<u8>, usize) {
    let buffer = vec![0; length + ALIGNMENT];
    let at = buffer.as_ptr().align_offset(ALIGNMENT);
    (buffer, at)
}

/// Runs `work` on a thread of its own.
///
/// # Panics
/// If it panics, or has not ended after `deadline`; the thread is left behind then.
pub fn within<T: Send + 'static>(deadline: Duration, what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (say, hear) = mpsc::channel();
    let worker = thread::spawn(move || drop(say.send(work())));
    match hear.recv_timeout(deadline) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what} took longer than {deadline:?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match worker.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => panic!("{what} ended without a result"),
        },
    }
}
