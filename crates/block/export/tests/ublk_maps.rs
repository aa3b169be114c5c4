//! A ublk device, mapped privately: as a VMM has the memory of a guest that goes on from a snapshot.

mod support;

use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;
use std::{ptr, slice, thread};

use aenv_block_device::BlockDevice;
use aenv_block_device::test_support::{Counting, MemoryDevice};
use aenv_block_export::Exporter;
use aenv_block_export::test_support::within;
use aenv_model::Bytes;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use support::{SHARED, SOON, Ublk};

const PAGE: usize = 4096;
const LENGTH: usize = 8 << 20;

#[test]
fn a_private_map_keeps_what_it_writes_and_waits_for_the_next_server() {
    let Some(ublk) = Ublk::new() else { return };
    let device = Arc::new(Counting::new(MemoryDevice::new(Bytes(LENGTH as u64))));
    for page in 0..LENGTH / PAGE {
        device.write_at((page * PAGE) as u64, &[page as u8; PAGE]).expect("write");
    }
    let export = ublk.attach("image", device.clone(), &SHARED).expect("attach");
    let mut map = Map::new(&File::open(export.path()).expect("open"));
    let other = Map::new(&File::open(export.path()).expect("open"));
    assert_eq!((map[PAGE], map[3 * PAGE]), (1, 3));
    map[PAGE] = 99;
    assert_eq!((map[PAGE], map[PAGE + 1], other[PAGE]), (99, 1, 1), "nobody else's");
    let read = device.counts().read_bytes;
    assert!(other[..16 * PAGE].chunks(PAGE).enumerate().all(|(page, bytes)| bytes == [page as u8; PAGE]));
    assert!(device.counts().read_bytes - read <= 256 << 10, "pages are the host's, one copy for all");

    // A page that nobody has touched, while nobody serves.
    let record = export.disown().expect("disown");
    let far = LENGTH - PAGE;
    let touched = thread::spawn(move || (map[far], map[PAGE], map));
    thread::sleep(Duration::from_millis(100));
    assert!(!touched.is_finished(), "it waits");
    let export = ublk.another().recover("image", &record, device, &SHARED).expect("recover");
    let (last, own, map) = within(SOON, "a page of a server that had left", move || touched.join().expect("join"));
    assert_eq!((last, own), ((far / PAGE) as u8, 99));
    drop((map, other));
    export.close().expect("close");
}

/// A private, writable map of a file that nobody changes.
struct Map(*mut std::ffi::c_void);

// SAFETY: a mapping belongs to the process, not to a thread, and the type has no other state.
unsafe impl Send for Map {}

impl Map {
    fn new(file: &File) -> Self {
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let at = unsafe {
            mmap(ptr::null_mut(), LENGTH, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE, file, 0).expect("map")
        };
        // SAFETY: our mapping, whole; no advice of this kind changes what is in it.
        unsafe { madvise(at, LENGTH, Advice::Random).expect("madvise") };
        Self(at)
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: our mapping, whole, of bytes.
        unsafe { slice::from_raw_parts(self.0.cast(), LENGTH) }
    }
}

impl DerefMut for Map {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and it is writable.
        unsafe { slice::from_raw_parts_mut(self.0.cast(), LENGTH) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: our mapping, whole, and nobody has a slice of it any more.
        unsafe { munmap(self.0, LENGTH).expect("munmap") }
    }
}
