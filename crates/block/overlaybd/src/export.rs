//! A whole virtual device as a sparse file.

use std::io;
use std::ops::Range;

use aenv_block_device::BlockDevice;

use crate::device::OverlayDevice;
use crate::index::{Content, Index};
use crate::mapping::SECTOR;
use crate::source::Storage;
use crate::stack::Stack;

/// Bytes read and written at once.
const STEP: u64 = 1 << 20;

/// What is left out if it is all zeros: a block of the filesystem.
const PAGE: usize = 4096;

static ZEROS: [u8; PAGE] = [0; PAGE];

/// A device that knows where it holds data.
pub trait Mapped: BlockDevice {
    /// The ranges that some layer has data for, in bytes and in order. Everything else reads as zeros.
    fn data_ranges(&self) -> Vec<Range<u64>>;
}

impl Mapped for Stack {
    fn data_ranges(&self) -> Vec<Range<u64>> {
        let mut ranges = Ranges { end: self.size().get(), ranges: Vec::new() };
        ranges.add(self.index(), 0, self.size().get().div_ceil(SECTOR));
        ranges.ranges
    }
}

impl Mapped for OverlayDevice {
    fn data_ranges(&self) -> Vec<Range<u64>> {
        let lowers = self.lowers();
        let sectors = self.size().get() / SECTOR;
        let mut ranges = Ranges { end: self.size().get(), ranges: Vec::new() };
        self.upper().with_live(|live| {
            for span in live.spans(0, sectors) {
                match span.content {
                    Content::Data { .. } => ranges.push(span.offset, span.offset + span.length),
                    Content::Hole => ranges.add(lowers.index(), span.offset, span.offset + span.length),
                    Content::Zeroed => {}
                }
            }
        });
        ranges.ranges
    }
}

impl OverlayDevice {
    /// The ranges that the upper has data for, in bytes and in order; what lies below is left out.
    #[must_use]
    pub fn upper_ranges(&self) -> Vec<Range<u64>> {
        let mut ranges = Ranges { end: self.size().get(), ranges: Vec::new() };
        self.upper().with_live(|live| {
            let end = ranges.end;
            for entry in live.entries().filter(|entry| !entry.is_zeroed() && entry.offset() * SECTOR < end) {
                ranges.push(entry.offset(), entry.end());
            }
        });
        ranges.ranges
    }
}

/// Ranges in order, joined where they touch.
struct Ranges {
    /// Size of the device.
    end: u64,
    ranges: Vec<Range<u64>>,
}

impl Ranges {
    fn add(&mut self, index: &Index, from: u64, to: u64) {
        for span in index.spans(from, to) {
            if matches!(span.content, Content::Data { .. }) {
                self.push(span.offset, span.offset + span.length);
            }
        }
    }

    fn push(&mut self, from: u64, to: u64) {
        let (from, to) = (from * SECTOR, (to * SECTOR).min(self.end));
        match self.ranges.last_mut() {
            Some(last) if last.end == from => last.end = to,
            _ => self.ranges.push(from..to),
        }
    }
}

/// Why a device could not be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The device could not be read.
    #[error("read {length} bytes at byte {offset} of the device")]
    Read {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
        /// Why.
        source: io::Error,
    },
    /// The file could not be written.
    #[error("write {file}")]
    Write {
        /// Which file.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// The caller did not want to go on.
    #[error("given up after {0} bytes")]
    GivenUp(u64),
}

/// Makes `out` a copy of `device`, with holes where it holds no data, or a page of zeros. Not synced. `proceed` is told the
/// bytes read so far; if it says no, the rest is not written.
pub fn export(device: &dyn Mapped, out: &dyn Storage, proceed: &mut dyn FnMut(u64) -> bool) -> Result<(), ExportError> {
    let write_error = |source| ExportError::Write { file: out.name().to_owned(), source };
    out.set_length(0).map_err(write_error)?;
    out.set_length(device.size().get()).map_err(write_error)?;
    let mut buf = vec![0; STEP as usize];
    let mut written = 0;
    for range in device.data_ranges() {
        let mut offset = range.start;
        while offset < range.end {
            let length = STEP.min(range.end - offset);
            let part = &mut buf[..length as usize];
            device.read_at(offset, part).map_err(|source| ExportError::Read { offset, length, source })?;
            for (at, length) in runs(part) {
                out.write_at(offset + at as u64, &part[at..at + length]).map_err(write_error)?;
            }
            offset += length;
            written += length;
            if !proceed(written) {
                return Err(ExportError::GivenUp(written));
            }
        }
    }
    Ok(())
}

/// Where in `bytes` there are pages that are not all zeros: begin and length of each run of them.
fn runs(bytes: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    let mut pages = bytes.chunks(PAGE).enumerate().filter(|(_, page)| **page != ZEROS[..page.len()]).peekable();
    std::iter::from_fn(move || {
        let (first, page) = pages.next()?;
        let (at, mut length) = (first * PAGE, page.len());
        while let Some((_, page)) = pages.next_if(|(number, _)| number * PAGE == at + length) {
            length += page.len();
        }
        Some((at, length))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_leave_out_pages_of_zeros() {
        let mut bytes = vec![0; 5 * PAGE + 512];
        assert_eq!(runs(&bytes).count(), 0);
        bytes[PAGE] = 1;
        bytes[3 * PAGE - 1] = 1;
        bytes[5 * PAGE] = 1;
        assert_eq!(runs(&bytes).collect::<Vec<_>>(), [(PAGE, 2 * PAGE), (5 * PAGE, 512)]);
    }
}
