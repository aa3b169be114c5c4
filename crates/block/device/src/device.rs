//! The narrow trait that everything with sectors implements.

use std::io;

use aenv_model::Bytes;

/// A device of `size()` bytes. All offsets and lengths are in bytes; an access beyond the end is `InvalidInput` and
/// changes nothing.
///
/// Writes are visible to later reads at once and durable after `flush`. Discarded ranges read as zeros.
pub trait BlockDevice: Send + Sync {
    /// The device's length; constant while it is open.
    fn size(&self) -> Bytes;

    /// Fills `buf` from `offset`, or fails: never short, never stale.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Writes all of `buf` at `offset`. After an error the range holds old or new bytes, sector by sector.
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()>;

    /// Makes `length` bytes from `offset` read as zeros, freeing their space where the device can.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes every completed write durable.
    fn flush(&self) -> io::Result<()>;
}

impl<D: BlockDevice + ?Sized> BlockDevice for &D {
    fn size(&self) -> Bytes {
        (**self).size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (**self).read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        (**self).write_at(offset, buf)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        (**self).discard(offset, length)
    }

    fn flush(&self) -> io::Result<()> {
        (**self).flush()
    }
}

/// Refuses an access that does not lie within `size`.
pub(crate) fn check_range(size: Bytes, offset: u64, length: u64) -> io::Result<()> {
    match offset.checked_add(length) {
        Some(end) if end <= size.get() => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{length} bytes at {offset} are beyond the end of a device of {} bytes", size.get()),
        )),
    }
}
