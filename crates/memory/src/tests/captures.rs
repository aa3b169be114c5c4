//! What is captured is what the process would read.

use std::path::Path;

use proptest::prelude::*;

use super::support::*;
use crate::image::MemoryImage;
use crate::pages::PAGE;
use crate::{CaptureOptions, Captured, ChainPolicy, capture, compact, dirty_pages};

/// Captures what `guest`, a mapping of `image`, has written, and gives the image that makes.
fn snapshot(guest: &Guest, image: &MemoryImage, out: &Path, threads: usize) -> (MemoryImage, Captured) {
    let memory = guest.memory();
    let dirty = dirty_pages(&memory).unwrap();
    let options = CaptureOptions { threads, parent: image.top(), sync: false };
    let captured = capture(&memory, &dirty, out, &options).unwrap();
    assert_eq!((captured.memory, captured.pages), (image.size, dirty.count()));
    assert_eq!(captured.layer.size.get(), out.metadata().unwrap().len());
    captured.sync().unwrap();
    (image.with_top(captured.layer.clone()), captured)
}

/// A file that a restored guest would map.
fn exported(image: &MemoryImage, path: &Path) {
    std::fs::write(path, stacked(image)).unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What a guest writes between two snapshots: page, number of pages, byte (0 for a page of zeros), whether the whole page.
fn writes() -> impl Strategy<Value = Vec<(u64, u64, u8, bool)>> {
    prop::collection::vec((0..PAGES, 1..20_u64, prop_oneof![Just(0), any::<u8>()], any::<bool>()), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Generations of one guest, each restored from the snapshot before, and merged into fewer layers now and then.
    #[test]
    fn snapshots_on_top_of_each_other_are_the_memory_of_their_moments(
        generations in prop::collection::vec((writes(), 1..4_usize, any::<bool>()), 1..7)
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mapped = image_file(dir.path(), PAGES, false);
        let mut image = MemoryImage::empty(aenv_model::Bytes(PAGES * PAGE));
        let mut model = vec![0; (PAGES * PAGE) as usize];
        let policy = ChainPolicy { max_depth: 3, shared: 0 };
        let mut moments = Vec::new();
        let mut guest = Guest::map(&mapped);
        for (number, (writes, threads, restored)) in generations.into_iter().enumerate() {
            for (page, count, byte, whole) in writes {
                for page in page..PAGES.min(page + count) {
                    let (from, length) = if whole { (page * PAGE, PAGE) } else { (page * PAGE + 100, 1) };
                    let bytes = vec![byte; length as usize];
                    guest.write(from, &bytes);
                    model[from as usize..(from + length) as usize].copy_from_slice(&bytes);
                }
            }
            let below = image.clone();
            let (with_top, captured) = snapshot(&guest, &below, &dir.path().join(format!("layer-{number}")), threads);
            prop_assert!(content(&guest.memory()) == model, "the guest is not disturbed");
            prop_assert!(stacked(&with_top) == model, "generation {}", number);
            prop_assert!(captured.zero_pages <= captured.pages);
            moments.push((with_top.clone(), model.clone()));
            if restored {
                image = with_top;
                let lengths: Vec<_> = image.layers.iter().map(|layer| layer.size).collect();
                if let Some(range) = policy.plan(&lengths) {
                    let sources = image.layers[range].to_vec();
                    let merged = compact(&sources, &dir.path().join(format!("merged-{number}"))).unwrap();
                    image.replace(&sources, merged).unwrap();
                    prop_assert!(stacked(&image) == model, "merging changes nothing");
                }
                prop_assert!(image.depth() <= 3);
                drop(guest);
                exported(&image, &mapped);
                guest = Guest::map(&mapped);
            } // else it goes on, and its next snapshot again holds all since it was restored
        }
        for (image, model) in moments {
            prop_assert!(stacked(&image) == model, "older ones are what they were");
        }
    }
}

#[test]
fn zeros_hide_what_lies_below_and_cost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mapped = image_file(dir.path(), PAGES, false);
    let empty = MemoryImage::empty(aenv_model::Bytes(PAGES * PAGE));
    let mut guest = Guest::map(&mapped);
    (0..32).for_each(|page| guest.fill(page, 5));
    (32..48).for_each(|page| guest.fill(page, 0));
    let (first, captured) = snapshot(&guest, &empty, &dir.path().join("first"), 2);
    assert_eq!((captured.pages, captured.zero_pages), (48, 16));
    let stack = stack(&first);
    assert!(stack.index().entries().iter().all(|entry| !entry.is_zeroed()), "nothing below to be hidden");
    drop(guest);

    exported(&first, &mapped);
    let mut guest = Guest::map(&mapped);
    (8..16).for_each(|page| guest.fill(page, 0));
    let (second, captured) = snapshot(&guest, &first, &dir.path().join("second"), 2);
    assert_eq!((captured.pages, captured.zero_pages), (8, 8));
    assert_eq!(captured.layer.size.get(), 3 * 4096, "header, index, trailer");
    assert!(stacked(&second) == content(&guest.memory()));
    assert_eq!(guest.read(10 * PAGE), 0);
}

#[test]
fn nothing_written_is_an_empty_layer() {
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::map(&image_file(dir.path(), PAGES, false));
    let empty = MemoryImage::empty(aenv_model::Bytes(PAGES * PAGE));
    let (image, captured) = snapshot(&guest, &empty, &dir.path().join("layer"), 2);
    assert_eq!((captured.pages, captured.layer.size.get()), (0, 2 * 4096));
    assert!(stacked(&image).iter().all(|byte| *byte == 0));
}

#[test]
fn a_large_layer_is_packed_in_the_order_of_memory_however_many_threads_copy() {
    let dir = tempfile::tempdir().unwrap();
    let pages = 12_000;
    let mut guest = Guest::map(&image_file(dir.path(), pages, false));
    // Long runs, scattered pages, and zeros among both.
    for page in (0..4000).chain((4000..pages).step_by(3)) {
        let byte = if page % 7 == 0 { 0 } else { page as u8 | 1 };
        guest.write(page * PAGE + 9, &[byte]);
    }
    let below = MemoryImage::empty(aenv_model::Bytes(pages * PAGE));
    let expected = content(&guest.memory());
    for threads in [0, 1, 2, 5] {
        let (image, captured) = snapshot(&guest, &below, &dir.path().join("layer"), threads);
        assert_eq!(captured.pages, 4000 + 2667);
        assert!(stacked(&image) == expected, "{threads} threads");
        let stack = stack(&image);
        let mut end = 8;
        for entry in stack.index().entries().iter().filter(|entry| !entry.is_zeroed()) {
            assert_eq!((entry.position(), entry.offset() % 8, entry.length() % 8), (end, 0, 0));
            end += entry.length();
        }
        assert_eq!(end - 8, (captured.pages - captured.zero_pages) * 8);
        let mut packed = Vec::new();
        stack.layers()[0].repack(&mut packed, stack.layers()[0].identity()).unwrap();
        let written = std::fs::read(&captured.layer.path).unwrap();
        assert!(packed.len() == written.len(), "nothing is left between the data");
        assert_eq!(names(dir.path()), ["image", "layer"]);
    }
}

#[test]
fn a_layer_that_is_to_be_durable_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = Guest::map(&image_file(dir.path(), PAGES, false));
    guest.fill(3, 3);
    let memory = guest.memory();
    let options = CaptureOptions { sync: true, ..CaptureOptions::default() };
    let captured = capture(&memory, &dirty_pages(&memory).unwrap(), &dir.path().join("layer"), &options).unwrap();
    let image = MemoryImage::empty(captured.memory).with_top(captured.layer);
    assert!(stacked(&image) == content(&memory));
}
