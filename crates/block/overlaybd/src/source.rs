//! Where bytes come from and go to: files by default, anything else by implementing two small traits.

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

/// Immutable bytes that can be read at any place, by many threads at once.
///
/// A remote source blocks the caller until the bytes are there.
pub trait Source: Debug + Send + Sync {
    /// What to call it in an error: a path or a URL.
    fn name(&self) -> &str;

    /// Length in bytes.
    fn size(&self) -> u64;

    /// Fills `buf` from `offset`, or fails; `UnexpectedEof` if the source ends before.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Fills `bufs` one after the other from `offset` on, like one long read.
    fn read_vectored_at(&self, mut offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        for buf in bufs {
            self.read_at(offset, buf)?;
            offset += buf.len() as u64;
        }
        Ok(())
    }

    /// How many bytes are read as quickly as another read begins: two ranges with no more between them are read as one.
    ///
    /// The default suits a source that is far away.
    fn gap(&self) -> u64 {
        64 << 10
    }

    /// Drops what a cache keeps of the range: what it returned was damaged.
    fn forget(&self, offset: u64, length: u64) {
        let _ = (offset, length);
    }
}

/// A file of a writable upper. Reads see writes at once; `sync` makes them durable.
pub trait Storage: Source {
    /// Writes all of `buf` at `offset`, growing the file if needed.
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()>;

    /// Length now; [`Source::size`] of a file that grows says the same.
    fn length(&self) -> io::Result<u64>;

    /// Cuts the file, or extends it with a hole.
    fn set_length(&self, length: u64) -> io::Result<()>;

    /// Makes data and length durable.
    fn sync(&self) -> io::Result<()>;

    /// Makes a range read as zeros and frees its space; the length stays.
    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()>;

    /// The ranges within `range` that are not holes, in order.
    fn data_ranges(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>>;
}

/// A file of the host, read with `pread`: what the page cache has costs one system call.
#[derive(Debug)]
pub struct LocalFile {
    file: File,
    name: String,
    /// Length when it was opened; not used for files that grow.
    size: Option<u64>,
}

impl LocalFile {
    /// Opens a layer, which no longer changes.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = Self::open_to_read(path)?;
        file.size = Some(file.file.metadata()?.len());
        Ok(file)
    }

    /// Opens a file that may be written meanwhile, for reading.
    pub fn open_to_read(path: &Path) -> io::Result<Self> {
        // Nothing else is opened for long: a pipe would wait for somebody to write to it.
        let nonblock = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(nonblock).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(Self { file, name: path.display().to_string(), size: None })
    }

    /// Opens a file of an upper for reading and writing.
    pub fn open_writable(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Self { file, name: path.display().to_string(), size: None })
    }

    /// Takes a file that is open already; `name` is for errors.
    pub fn from_file(file: File, name: String) -> Self {
        Self { file, name, size: None }
    }
}

impl Source for LocalFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        self.size.unwrap_or_else(|| self.file.metadata().map_or(0, |metadata| metadata.len()))
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    /// Measured on cached files, where a page is copied in the time of a system call.
    fn gap(&self) -> u64 {
        2 << 10
    }

    fn read_vectored_at(&self, mut offset: u64, mut bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        /// `UIO_MAXIOV` of Linux.
        const MOST: usize = 1024;
        IoSliceMut::advance_slices(&mut bufs, 0); // drops empty ones at the front
        while !bufs.is_empty() {
            let now = bufs.len().min(MOST);
            match rustix::io::preadv(&self.file, &mut bufs[..now], offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    offset += read as u64;
                    IoSliceMut::advance_slices(&mut bufs, read);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

impl Storage for LocalFile {
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.file.write_all_at(buf, offset)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.file.set_len(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        Ok(fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length)?)
    }

    fn data_ranges(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let mut ranges = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let start = match seek(&self.file, SeekFrom::Data(at)) {
                Ok(start) if start < range.end => start,
                Ok(_) | Err(Errno::NXIO) => break, // only a hole is left
                Err(errno) => return Err(errno.into()),
            };
            let end = seek(&self.file, SeekFrom::Hole(start))?.min(range.end);
            ranges.push(start..end);
            at = end;
        }
        Ok(ranges)
    }
}

/// A part of another source, as if it were all there is.
#[derive(Debug)]
pub(crate) struct Window {
    inner: Arc<dyn Source>,
    start: u64,
    size: u64,
}

impl Window {
    /// `start + size` must lie within `inner`.
    pub(crate) fn new(inner: Arc<dyn Source>, start: u64, size: u64) -> Self {
        Self { inner, start, size }
    }

    fn check(&self, offset: u64, length: u64) -> io::Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl Source for Window {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check(offset, buf.len() as u64)?;
        self.inner.read_at(self.start + offset, buf)
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        self.check(offset, bufs.iter().map(|buf| buf.len() as u64).sum())?;
        self.inner.read_vectored_at(self.start + offset, bufs)
    }

    fn gap(&self) -> u64 {
        self.inner.gap()
    }

    fn forget(&self, offset: u64, length: u64) {
        self.inner.forget(self.start + offset, length);
    }
}

/// Bytes in memory as a file: for small layers, and for tests. Blocks of 4 KiB that are all zeros count as holes.
#[derive(Debug)]
pub struct MemoryFile {
    name: String,
    bytes: RwLock<Vec<u8>>,
}

impl MemoryFile {
    /// `name` is for errors.
    #[must_use]
    pub fn new(name: impl Into<String>, bytes: Vec<u8>) -> Self {
        Self { name: name.into(), bytes: RwLock::new(bytes) }
    }

    /// What it holds now.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.bytes().clone()
    }

    fn bytes(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.bytes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes_mut(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.bytes.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `offset..offset + length` as indices.
fn memory_range(offset: u64, length: u64) -> Option<Range<usize>> {
    let end = offset.checked_add(length)?;
    Some(usize::try_from(offset).ok()?..usize::try_from(end).ok()?)
}

impl Source for MemoryFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        self.bytes().len() as u64
    }

    fn gap(&self) -> u64 {
        0
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let bytes = self.bytes();
        match memory_range(offset, buf.len() as u64).and_then(|range| bytes.get(range)) {
            Some(bytes) => buf.copy_from_slice(bytes),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        Ok(())
    }
}

impl Storage for MemoryFile {
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let range = memory_range(offset, buf.len() as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        let mut bytes = self.bytes_mut();
        if bytes.len() < range.end {
            bytes.resize(range.end, 0);
        }
        bytes[range].copy_from_slice(buf);
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.size())
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::FileTooLarge)?;
        self.bytes_mut().resize(length, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut bytes = self.bytes_mut();
        let end = offset.saturating_add(length).min(bytes.len() as u64);
        if let Some(hole) = memory_range(offset, end.saturating_sub(offset)).and_then(|range| bytes.get_mut(range)) {
            hole.fill(0);
        }
        Ok(())
    }

    fn data_ranges(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        const BLOCK: usize = 4096;
        let bytes = self.bytes();
        let data = (0..).zip(bytes.chunks(BLOCK)).filter(|(_, block)| block.iter().any(|&byte| byte != 0));
        let ranges = data.map(|(at, block): (u64, _)| {
            let start = at * BLOCK as u64;
            start.max(range.start)..(start + block.len() as u64).min(range.end)
        });
        Ok(ranges.filter(|range| range.start < range.end).collect())
    }
}
