//! `/proc/PID/pagemap`: a word for each page of an address space (`admin-guide/mm/pagemap.rst`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use nix::unistd::{SysconfVar, sysconf};

use super::Wanted;
use crate::pages::PAGE;

const WORD: u64 = 8;

/// Words read at once.
const WORDS: usize = 64 << 10;

/// "Page is file-page or shared-anon".
const FILE: u64 = 1 << 61;
const SWAPPED: u64 = 1 << 62;
const PRESENT: u64 = 1 << 63;

/// Where the word of the page at `address` is.
pub(super) fn position(address: u64) -> u64 {
    address / host_page() * WORD
}

fn host_page() -> u64 {
    // Linux always knows it.
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    page.and_then(|page| page.try_into().ok()).unwrap_or(PAGE)
}

/// Tells `found` the ranges within `addresses` that are wanted, in order; neighbours may come apart.
pub(super) fn scan(
    pagemap: &File,
    addresses: Range<u64>,
    wanted: Wanted,
    found: &mut dyn FnMut(Range<u64>),
) -> io::Result<()> {
    let page = host_page();
    let mut buf = vec![0; WORDS * WORD as usize];
    let mut at = addresses.start;
    while at < addresses.end {
        let words = ((addresses.end - at) / page).min(WORDS as u64);
        let read = match pagemap.read_at(&mut buf[..(words * WORD) as usize], position(at)) {
            Ok(0) => return Err(rustix::io::Errno::SRCH.into()), // what the kernel says once the memory is gone
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let (words, _) = buf[..read].as_chunks::<{ WORD as usize }>();
        for word in words {
            let word = u64::from_ne_bytes(*word);
            let written = wanted == Wanted::Touched || word & FILE == 0;
            if word & (PRESENT | SWAPPED) != 0 && written {
                found(at..at + page);
            }
            at += page;
        }
    }
    Ok(())
}
