//! Which pages are found.

use std::collections::BTreeSet;

use aenv_vmm_driver::{GuestMemory, MemoryRange};
use proptest::prelude::*;

use super::support::*;
use crate::layout::LayoutError;
use crate::pages::{PAGE, PageRanges};
use crate::scan::{Method, ScanError, Wanted, scan_by};
use crate::{dirty_pages, touched_pages};

/// What a guest does to one page.
#[derive(Debug, Clone, Copy)]
enum Deed {
    Read,
    Write(u8),
    /// The balloon takes it: it reads as the image again.
    GiveBack,
}

fn deeds() -> impl Strategy<Value = Vec<(u64, Deed)>> {
    let deed = prop_oneof![
        2 => Just(Deed::Read),
        3 => prop_oneof![Just(0), any::<u8>()].prop_map(Deed::Write),
        1 => Just(Deed::GiveBack),
    ];
    prop::collection::vec((0..PAGES, deed), 0..80)
}

/// Both ways, which must agree; the ioctl only where the kernel has it.
fn both(memory: &GuestMemory, wanted: Wanted) -> PageRanges {
    let plain = scan_by(Method::Pagemap, memory, wanted).unwrap();
    match scan_by(Method::Ioctl, memory, wanted) {
        Ok(ranges) => assert_eq!(ranges, plain),
        Err(ScanError::Read { source, .. }) if source.raw_os_error() == Some(nix::libc::ENOTTY) => {}
        Err(error) => panic!("{error}"),
    }
    plain
}

proptest! {
    #[test]
    fn exactly_the_written_pages_are_dirty_both_ways(filled in any::<bool>(), deeds in deeds()) {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = Guest::map(&image_file(dir.path(), PAGES, filled));
        let (mut written, mut used) = (BTreeSet::new(), BTreeSet::new());
        for (page, deed) in deeds {
            match deed {
                Deed::Read => {
                    guest.read(page * PAGE);
                    used.insert(page);
                }
                Deed::Write(byte) => {
                    guest.write(page * PAGE + 77, &[byte]);
                    used.insert(page);
                    written.insert(page);
                }
                Deed::GiveBack => {
                    guest.give_back(page);
                    used.remove(&page);
                    written.remove(&page);
                }
            }
        }
        let memory = guest.memory();
        let dirty = both(&memory, Wanted::Written);
        prop_assert_eq!(&dirty, &pages(written));
        prop_assert_eq!(&dirty_pages(&memory).unwrap(), &dirty);
        let touched = both(&memory, Wanted::Touched);
        prop_assert_eq!(&touched_pages(&memory).unwrap(), &touched);
        let touched = numbers(&touched);
        prop_assert!(used.iter().all(|page| touched.contains(page)), "{:?} used, {:?} found", used, touched);
    }
}

#[test]
fn more_ranges_than_one_call_tells_are_all_found() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = Guest::map(&image_file(dir.path(), 20_000, false));
    let every_other = || (0..10_000).map(|n| 2 * n);
    every_other().for_each(|page| guest.write(page * PAGE, &[1]));
    assert_eq!(both(&guest.memory(), Wanted::Written), pages(every_other()));
}

#[test]
fn pages_are_told_by_their_place_in_the_image_not_in_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let image = image_file(dir.path(), PAGES, true);
    let (mut low, mut high) = (Guest::map(&image), Guest::map(&image));
    let place = |guest: &Guest, first, pages| MemoryRange {
        host_address: guest.memory().ranges[0].host_address + first * PAGE,
        image_offset: first * PAGE,
        length: pages * PAGE,
    };
    let memory = GuestMemory {
        pid: std::process::id(),
        ranges: vec![place(&high, 0, 10), place(&low, 10, 10), place(&high, 30, 10)],
    };
    high.fill(9, 1);
    low.fill(10, 1);
    low.fill(25, 1); // of no range
    high.fill(33, 1);
    high.fill(50, 1); // of no range
    assert_eq!(both(&memory, Wanted::Written), pages([9, 10, 33]));
}

#[test]
fn swapped_out_pages_are_dirty_still() {
    if std::fs::read_to_string("/proc/swaps").unwrap().lines().count() < 2 {
        eprintln!("skipped: this host has no swap");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut guest = Guest::map(&image_file(dir.path(), PAGES, true));
    [3, 4, 40].into_iter().for_each(|page| guest.fill(page, 7));
    guest.swap_out();
    assert_eq!(both(&guest.memory(), Wanted::Written), pages([3, 4, 40]));
}

#[test]
fn memory_of_nobody_is_gone() {
    let range = MemoryRange { host_address: 0x10000, image_offset: 0, length: PAGE };
    let memory = GuestMemory { pid: i32::MAX.cast_unsigned(), ranges: vec![range] };
    for method in [Method::Ioctl, Method::Pagemap] {
        let error = scan_by(method, &memory, Wanted::Written).unwrap_err();
        assert!(matches!(error, ScanError::Gone { .. }), "{error}");
    }
}

#[test]
fn memory_that_is_mapped_twice_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let image = image_file(dir.path(), PAGES, true);
    let guests = [Guest::map(&image), Guest::map(&image)];
    let memory = GuestMemory::of_image(std::process::id(), &image).unwrap();
    // The kernel may have put the two next to each other, but not in the order of the image.
    assert_eq!(memory.ranges.len(), guests.len());
    let error = dirty_pages(&memory).unwrap_err();
    assert!(matches!(error, ScanError::Layout(LayoutError::Overlap(0))), "{error}");
}
