//! Pages that are asked for come into the cache.

use std::fs::File;
use std::io::IoSliceMut;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::support::pages;
use crate::pages::{PAGE, PageRanges};
use crate::prefetch;

/// Whether the host's cache has the page; none if its file system does not say.
fn cached(file: &File, page: u64) -> Option<bool> {
    let mut byte = [0];
    match preadv2(file, &mut [IoSliceMut::new(&mut byte)], page * PAGE, ReadWriteFlags::NOWAIT) {
        Ok(1) => Some(true),
        Err(Errno::AGAIN) => Some(false),
        Err(Errno::OPNOTSUPP) => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn prefetched_pages_are_in_the_cache_when_they_are_needed() {
    const COUNT: u64 = 1024;
    let image = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(image.path(), vec![1; (COUNT * PAGE) as usize]).unwrap();
    let file = File::open(image.path()).unwrap();
    file.sync_all().unwrap();
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    if (0..COUNT).all(|page| cached(&file, page) != Some(false)) {
        eprintln!("skipped: this file system keeps its files in memory, or does not say");
        return;
    }
    let wanted = PageRanges::from_ranges([0..100 * PAGE, 400 * PAGE..401 * PAGE, 600 * PAGE..COUNT * PAGE]).unwrap();
    let text = serde_json::to_string(&wanted).unwrap();
    let wanted: PageRanges = serde_json::from_str(&text).unwrap();
    prefetch(file.try_clone().unwrap(), wanted.clone()).unwrap().wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    for page in wanted.ranges().iter().flat_map(|range| range.start / PAGE..range.end / PAGE) {
        while cached(&file, page) != Some(true) {
            assert!(Instant::now() < deadline, "page {page} comes");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn pages_that_are_not_there_do_not_fail_the_others() {
    let image = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(image.path(), vec![1; PAGE as usize]).unwrap();
    prefetch(File::open(image.path()).unwrap(), pages([0, 7])).unwrap().wait().unwrap();
    drop(prefetch(File::open(image.path()).unwrap(), pages([0])).unwrap());
}
