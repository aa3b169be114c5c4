//! Memory snapshots of virtual machines, taken from outside of a VMM whose vCPUs are stopped.
//!
//! ```text
//!  VMM process      ┌──────────────── guest memory: a private mapping ────────────────┐
//!                   │ · · W · · · · W W · · · z · │   W: written   z: written, zeros   ·: as in the image
//!                   └──────┬────────┬─┬─────┬─────┘
//!   dirty_pages: which     │        │ │     │        PAGEMAP_SCAN, else /proc/PID/pagemap
//!   capture: what          ▼        ▼ ▼     ▼        process_vm_readv
//!                        ┌────────────────────┐
//!        new layer       │     W      W W   0 │      one file; zeros are an entry of its index
//!                        ├────────────────────┤
//!        image           │ layers of the past │      MemoryImage: bottom first
//!                        └────────────────────┘
//! ```
//!
//! * Guest memory is a private mapping of a memory image: an empty sparse file on a cold boot, later a file that the storage
//!   daemon makes of a [`MemoryImage`]'s layers. What the guest wrote, the kernel had to copy: [`dirty_pages`] finds these
//!   copies, and nothing has to be logged while the guest runs.
//! * [`capture()`] makes one layer of them. With the layers below, it is the memory of that moment: nothing is copied twice,
//!   and a chain of snapshots costs what was written between them.
//! * [`ChainPolicy::plan`] says which layers of a long chain to merge, [`compact()`] merges them.
//! * [`touched_pages`] are those a guest has used since it was restored; [`prefetch()`] reads them ahead of the next restore.
//!
//! The definition of what memory is throughout: what the VMM process itself would read there.
//!
//! Everything blocks, and uses threads of its own where that is quicker. There is no async runtime here.

#![deny(unsafe_code)]

mod capture;
mod compact;
mod image;
mod layout;
mod pages;
mod prefetch;
mod scan;
#[cfg(test)]
mod tests;

pub use capture::{CaptureError, CaptureOptions, Captured, capture};
pub use compact::{ChainPolicy, CompactError, compact};
pub use image::{MemoryImage, MemoryLayer, ReplaceError};
pub use layout::LayoutError;
pub use pages::{PAGE, PageRanges, PageRangesError};
pub use prefetch::{Prefetch, prefetch};
pub use scan::{ScanError, dirty_pages, touched_pages};
