//! Private mappings to write to, and what memory is compared with.

#![allow(unsafe_code, reason = "tests map files, and write to the mappings")]

use std::ffi::c_void;
use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::ptr;

use aenv_block_device::BlockDevice;
use aenv_block_overlaybd::{LocalFile, Source, Stack};
use aenv_vmm_driver::{GuestMemory, MemoryRange};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::image::MemoryImage;
use crate::pages::{PAGE, PageRanges};

pub(super) const PAGES: u64 = 64;

/// A file mapped privately by this process: a guest's memory.
pub(super) struct Guest {
    address: *mut u8,
    length: usize,
}

impl Guest {
    /// Maps all of `image`.
    pub(super) fn map(image: &Path) -> Self {
        let file = std::fs::File::open(image).unwrap();
        let length = file.metadata().unwrap().len() as usize;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else refers to it.
        let address = unsafe { mmap(ptr::null_mut(), length, protection, flags, &file, 0) }.unwrap();
        Self { address: address.cast(), length }
    }

    /// Where the memory is.
    pub(super) fn memory(&self) -> GuestMemory {
        let range = MemoryRange {
            host_address: self.address.expose_provenance() as u64,
            image_offset: 0,
            length: self.length as u64,
        };
        GuestMemory { pid: std::process::id(), ranges: vec![range] }
    }

    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        assert!(offset as usize + bytes.len() <= self.length);
        // SAFETY: within the mapping, which is writable, and which nobody holds a reference into.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.address.add(offset as usize), bytes.len()) };
    }

    /// Fills a page.
    pub(super) fn fill(&mut self, page: u64, byte: u8) {
        self.write(page * PAGE, &[byte; PAGE as usize]);
    }

    pub(super) fn read(&self, offset: u64) -> u8 {
        assert!((offset as usize) < self.length);
        // SAFETY: within the mapping.
        unsafe { self.address.add(offset as usize).read_volatile() }
    }

    /// What a balloon does.
    pub(super) fn give_back(&mut self, page: u64) {
        // SAFETY: a page within the mapping, which nobody holds a reference into.
        unsafe {
            madvise(self.address.add((page * PAGE) as usize).cast::<c_void>(), PAGE as usize, Advice::LinuxDontNeed)
        }
        .unwrap();
    }

    /// Asks the kernel to swap all of it out.
    pub(super) fn swap_out(&self) {
        // SAFETY: the mapping, whose content stays.
        unsafe { madvise(self.address.cast::<c_void>(), self.length, Advice::LinuxPageOut) }.unwrap();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing refers to it any more.
        let _ = unsafe { munmap(self.address.cast(), self.length) };
    }
}

/// An image file of `pages`, of which page n begins with the byte n + 1; of a cold boot (all holes) if not `filled`.
pub(super) fn image_file(dir: &Path, pages: u64, filled: bool) -> PathBuf {
    let path = dir.join("image");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(pages * PAGE).unwrap();
    for page in (0..pages).filter(|_| filled) {
        file.write_all_at(&[page as u8 + 1], page * PAGE).unwrap();
    }
    path
}

/// All memory of a process, as it would read it.
pub(super) fn content(memory: &GuestMemory) -> Vec<u8> {
    let mut bytes = vec![0xEE; memory.ranges.iter().map(|range| range.length as usize).sum()];
    let remote: Vec<_> = memory
        .ranges
        .iter()
        .map(|range| RemoteIoVec { base: range.host_address as usize, len: range.length as usize })
        .collect();
    let pid = Pid::from_raw(memory.pid.cast_signed());
    let read = process_vm_readv(pid, &mut [IoSliceMut::new(&mut bytes)], &remote).unwrap();
    assert_eq!(read, bytes.len());
    bytes
}

/// All memory of an image, read through its layers.
pub(super) fn stacked(image: &MemoryImage) -> Vec<u8> {
    let mut bytes = vec![0xEE; image.size.get() as usize];
    stack(image).read_at(0, &mut bytes).unwrap();
    bytes
}

pub(super) fn stack(image: &MemoryImage) -> Stack {
    let open = |path: &PathBuf| std::sync::Arc::new(LocalFile::open(path).unwrap()) as std::sync::Arc<dyn Source>;
    let stack = Stack::open(image.layers.iter().map(|layer| open(&layer.path))).unwrap();
    assert_eq!(stack.size(), image.size);
    assert_eq!(image.layers.len(), stack.layers().len());
    for (layer, told) in stack.layers().iter().zip(&image.layers) {
        assert_eq!((layer.identity().uuid, layer.payload().size()), (told.uuid, told.size.get()));
    }
    stack
}

/// A set of single pages.
pub(super) fn pages(numbers: impl IntoIterator<Item = u64>) -> PageRanges {
    let mut numbers: Vec<_> = numbers.into_iter().collect();
    numbers.sort_unstable();
    numbers.dedup();
    PageRanges::from_ranges(numbers.into_iter().map(|page| page * PAGE..(page + 1) * PAGE)).unwrap()
}

/// The page numbers of a set.
pub(super) fn numbers(pages: &PageRanges) -> Vec<u64> {
    pages.ranges().iter().flat_map(|range| range.start / PAGE..range.end / PAGE).collect()
}
