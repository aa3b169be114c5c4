//! Captures and merges that fail leave nothing, and say why.

use std::path::Path;

use aenv_model::Bytes;
use aenv_vmm_driver::{GuestMemory, MemoryRange};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::support::*;
use crate::image::MemoryImage;
use crate::layout::LayoutError;
use crate::pages::PAGE;
use crate::{CaptureError, CaptureOptions, CompactError, capture, compact, dirty_pages};

/// A small file system of its own, unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// None where that needs rights this test does not have.
    fn mount(size: Bytes) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(format!("size={}", size.get())).unwrap();
        match mount("none", dir.path(), "tmpfs", MountFlags::empty(), options.as_c_str()) {
            Ok(()) => Some(Self(dir)),
            Err(rustix::io::Errno::PERM) => {
                eprintln!("skipped: mounting a small file system needs root");
                None
            }
            Err(error) => panic!("mount: {error}"),
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).unwrap().count() == 0
}

#[test]
fn a_full_disk_is_told_as_such_and_the_guest_can_be_captured_elsewhere() {
    let Some(disk) = SmallDisk::mount(Bytes::mib(3)) else { return };
    let dir = tempfile::tempdir().unwrap();
    let pages = 1024; // 4 MiB
    let mut guest = Guest::map(&image_file(dir.path(), pages, false));
    (0..pages).for_each(|page| guest.fill(page, page as u8 | 1));
    let memory = guest.memory();
    let dirty = dirty_pages(&memory).unwrap();
    for threads in [1, 2, 4] {
        let options = CaptureOptions { threads, ..CaptureOptions::default() };
        let error = capture(&memory, &dirty, &disk.path().join("layer"), &options).unwrap_err();
        assert!(matches!(error, CaptureError::NoSpace { .. }), "{error:?}");
        assert!(is_empty(disk.path()));
    }
    let captured = capture(&memory, &dirty, &dir.path().join("layer"), &CaptureOptions::default()).unwrap();
    assert!(stacked(&MemoryImage::empty(captured.memory).with_top(captured.layer)) == content(&memory));
}

#[test]
fn layers_that_do_not_fit_merged_stay_as_they_are() {
    let Some(disk) = SmallDisk::mount(Bytes::mib(1)) else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut image = MemoryImage::empty(Bytes(512 * PAGE));
    for (number, byte) in [1, 2].into_iter().enumerate() {
        let mut guest = Guest::map(&image_file(dir.path(), 512, false));
        (0..300).for_each(|page| guest.fill(page + 200 * number as u64, byte));
        let memory = guest.memory();
        let options = CaptureOptions { parent: image.top(), ..CaptureOptions::default() };
        let out = dir.path().join(number.to_string());
        image = image.with_top(capture(&memory, &dirty_pages(&memory).unwrap(), &out, &options).unwrap().layer);
    }
    let before = stacked(&image);
    let error = compact(&image.layers, &disk.path().join("merged")).unwrap_err();
    assert!(matches!(error, CompactError::NoSpace { .. }), "{error:?}");
    assert!(is_empty(disk.path()));
    assert!(stacked(&image) == before);
    let merged = compact(&image.layers, &dir.path().join("merged")).unwrap();
    assert!(merged.size < image.layers.iter().fold(Bytes(0), |sum, layer| Bytes(sum.get() + layer.size.get())));
    let sources = image.layers.clone();
    image.replace(&sources, merged).unwrap();
    assert!(stacked(&image) == before);
    assert!(matches!(compact(&image.layers, &dir.path().join("one")), Err(CompactError::TooFew(1))));
}

#[test]
fn memory_that_cannot_be_read_fails_the_capture_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = Guest::map(&image_file(dir.path(), PAGES, false));
    (0..PAGES).for_each(|page| guest.fill(page, 1));
    let mapping = guest.memory().ranges[0];
    // The last page of this address space is never mapped.
    let hole = MemoryRange { host_address: (1 << 47) - PAGE, image_offset: mapping.length, length: PAGE };
    let memory = GuestMemory { pid: std::process::id(), ranges: vec![mapping, hole] };
    let out = dir.path().join("layer");
    for threads in [1, 2] {
        let options = CaptureOptions { threads, ..CaptureOptions::default() };
        match capture(&memory, &pages(0..=PAGES), &out, &options).unwrap_err() {
            CaptureError::Read { address, .. } => assert_eq!(address, hole.host_address),
            other => panic!("{other:?}"),
        }
        assert!(!out.exists() && !out.with_extension("new").exists());
    }
}

#[test]
fn pages_beyond_memory_are_refused_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::map(&image_file(dir.path(), PAGES, false));
    let out = dir.path().join("layer");
    let error = capture(&guest.memory(), &pages([PAGES]), &out, &CaptureOptions::default()).unwrap_err();
    assert!(matches!(error, CaptureError::Layout(LayoutError::Unmapped { .. })), "{error:?}");
    assert!(!out.exists());
}

#[test]
fn a_directory_that_is_not_there_is_a_failed_write() {
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::map(&image_file(dir.path(), PAGES, false));
    let out = dir.path().join("nowhere/layer");
    let error = capture(&guest.memory(), &pages([0]), &out, &CaptureOptions::default()).unwrap_err();
    assert!(matches!(error, CaptureError::Write { .. }), "{error:?}");
}
