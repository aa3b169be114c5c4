//! `PAGEMAP_SCAN`: the kernel walks the page tables and tells ranges of pages of a kind (`linux/fs.h`, Linux 6.7).

#![allow(unsafe_code, reason = "PAGEMAP_SCAN has no safe wrapper")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use super::Wanted;

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;

/// Ranges told by one call, at most.
const REGIONS: usize = 4096;

/// `struct pm_scan_arg`.
#[derive(Debug, Default)]
#[repr(C)]
struct ScanArguments {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    /// Out: where the walk ended.
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const _: () = assert!(size_of::<ScanArguments>() == 96);

/// `struct page_region`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = assert!(size_of::<Region>() == 24);

nix::ioctl_readwrite!(pagemap_scan, b'f', 16, ScanArguments);

/// Tells `found` the ranges within `addresses` that are wanted, in order.
///
/// Errors: `ENOTTY` if the kernel does not know it.
pub(super) fn scan(
    pagemap: &File,
    addresses: Range<u64>,
    wanted: Wanted,
    found: &mut dyn FnMut(Range<u64>),
) -> io::Result<()> {
    let mut regions = vec![Region::default(); REGIONS];
    let not_of_file = if wanted == Wanted::Written { PAGE_IS_FILE } else { 0 };
    let mut at = addresses.start;
    while at < addresses.end {
        let mut arguments = ScanArguments {
            size: size_of::<ScanArguments>() as u64,
            start: at,
            end: addresses.end,
            vec: regions.as_mut_ptr().expose_provenance() as u64,
            vec_len: regions.len() as u64,
            category_inverted: not_of_file,
            category_mask: not_of_file,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT,
            ..ScanArguments::default()
        };
        // SAFETY: the descriptor is open. The kernel reads and writes `arguments`, whose layout and size it is told, and
        // writes at most `vec_len` plain regions at `vec`; both outlive the call and nobody else uses them.
        let told = unsafe { pagemap_scan(pagemap.as_raw_fd(), &raw mut arguments) }?;
        let told = usize::try_from(told).unwrap_or(0).min(regions.len());
        for region in &regions[..told] {
            found(region.start..region.end);
        }
        // The walk ends early for one reason only, a full list. Where it then ended is right; where it ended otherwise may be
        // too early (seen with Linux 6.18), and pages would be told again.
        let Some(last) = regions[..told].last().filter(|_| told == regions.len()) else { break };
        at = last.end.max(arguments.walk_end);
    }
    Ok(())
}
