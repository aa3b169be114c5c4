//! Which pages of guest memory the kernel has copied for the VMM, or mapped at all.
//!
//! A private mapping of a file shows the file's own pages until they are written; then the process gets a copy, an
//! anonymous page. So a page was written if it is there (present, or swapped out) and not the file's. What else could
//! make memory differ from its image, and why nothing of it is missed:
//!
//! * Written and swapped out: no longer present, but the kernel still knows that it is not the file's.
//! * Merged by KSM, or moving to another place while we look: remains anonymous.
//! * The zero page, which stands for a page that was only read: filesystems on persistent memory (DAX) map it for holes of a
//!   file. It counts as written, which costs an entry and loses nothing.
//! * Given back by `MADV_DONTNEED` (a balloon of the VMM): reads as the image again, and is not found. Both for the guest and
//!   for us it is what the image says; the driver never told the guest that it would be zeros.
//! * Written by the host's kernel for the VMM (vhost, io_uring, pinned pages): copied at the first write as well.
//! * Huge pages: told as ranges of small ones.
//!
//! A *shared* mapping would hide every write. [`GuestMemory::of_image`] does not find such ones.

mod ioctl;
mod pagemap;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use aenv_vmm_driver::GuestMemory;
use rustix::io::Errno;

use crate::layout::{Layout, LayoutError};
use crate::pages::PageRanges;

/// Why pages could not be found.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// There is no such process, or it is ending: its memory is lost.
    #[error("process {pid} is gone")]
    Gone {
        /// The VMM.
        pid: u32,
    },
    /// The kernel did not tell.
    #[error("read which pages of process {pid} are there")]
    Read {
        /// The VMM.
        pid: u32,
        /// Why.
        source: io::Error,
    },
    /// Guest memory is mapped in a way that does not suit.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Which pages to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Not those of the file.
    Written,
    /// Any.
    Touched,
}

/// How to find them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// The ioctl, from Linux 6.7 on: the kernel looks, and tells ranges.
    Ioctl,
    /// A word a page, on any kernel.
    Pagemap,
}

/// The pages that were written since `memory` was mapped. The vCPUs must be stopped, else it is a guess. Blocking; a
/// fraction of a millisecond for what a guest writes in seconds.
///
/// Needs the right to trace the VMM.
pub fn dirty_pages(memory: &GuestMemory) -> Result<PageRanges, ScanError> {
    scan(memory, Wanted::Written)
}

/// The pages that were used since `memory` was mapped: read or written, by the guest or for it. Never too few, unless the
/// host was short of memory and took some back; maybe a few more: around a page that is read, the kernel maps what its cache
/// already has.
pub fn touched_pages(memory: &GuestMemory) -> Result<PageRanges, ScanError> {
    scan(memory, Wanted::Touched)
}

fn scan(memory: &GuestMemory, wanted: Wanted) -> Result<PageRanges, ScanError> {
    match scan_by(Method::Ioctl, memory, wanted) {
        Err(ScanError::Read { source, .. }) if Errno::from_io_error(&source) == Some(Errno::NOTTY) => {
            scan_by(Method::Pagemap, memory, wanted)
        }
        other => other,
    }
}

pub(crate) fn scan_by(method: Method, memory: &GuestMemory, wanted: Wanted) -> Result<PageRanges, ScanError> {
    let layout = Layout::new(memory)?;
    let pid = memory.pid;
    let error = |source: io::Error| match Errno::from_io_error(&source) {
        Some(Errno::NOENT | Errno::SRCH) => ScanError::Gone { pid },
        _ => ScanError::Read { pid, source },
    };
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(error)?;
    let mut pages = PageRanges::default();
    for mapping in layout.ranges() {
        let addresses = mapping.host_address..mapping.host_address + mapping.length;
        let mut found = |Range { start, end }| {
            let offset = |address| mapping.image_offset + (address - mapping.host_address);
            pages.push(offset(start)..offset(end));
        };
        match method {
            Method::Ioctl => ioctl::scan(&pagemap, addresses, wanted, &mut found),
            Method::Pagemap => pagemap::scan(&pagemap, addresses, wanted, &mut found),
        }
        .map_err(error)?;
    }
    // A process that ends has no pages any more, which would look like one that wrote none.
    if let Some(first) = layout.ranges().first() {
        let mut word = [0; 8];
        let read = pagemap.read_at(&mut word, pagemap::position(first.host_address)).map_err(error)?;
        if read == 0 {
            return Err(ScanError::Gone { pid });
        }
    }
    Ok(pages)
}
