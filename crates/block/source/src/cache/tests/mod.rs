//! The cache as its readers see it.

mod disk;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use aenv_block_overlaybd::{LocalFile, Storage};
use proptest::prelude::*;

use super::layout::PAGE;
use super::*;

const TIMEOUT: Duration = Duration::from_secs(20);

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u8).collect()
}

/// A source that counts its reads, and fails or panics on demand.
#[derive(Debug)]
struct Origin {
    bytes: Vec<u8>,
    reads: AtomicUsize,
    fails: AtomicBool,
    panics: AtomicBool,
    /// Each read waits for a word.
    gate: Option<Mutex<mpsc::Receiver<()>>>,
}

impl Origin {
    fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self::gated(bytes, None))
    }

    fn gated(bytes: Vec<u8>, gate: Option<Mutex<mpsc::Receiver<()>>>) -> Self {
        Self { bytes, reads: AtomicUsize::new(0), fails: AtomicBool::new(false), panics: AtomicBool::new(false), gate }
    }

    fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }
}

impl Source for Origin {
    fn name(&self) -> &str {
        "origin"
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        if let Some(gate) = &self.gate {
            gate.lock().unwrap().recv_timeout(TIMEOUT).unwrap();
        }
        assert!(!self.panics.load(Ordering::SeqCst), "told to");
        if self.fails.load(Ordering::SeqCst) {
            return Err(io::Error::other("registry is down"));
        }
        buf.copy_from_slice(&self.bytes[offset as usize..][..buf.len()]);
        Ok(())
    }
}

fn options(dir: &tempfile::TempDir, blocks: u64) -> CacheOptions {
    CacheOptions { refill: BLOCK, ..CacheOptions::new(dir.path().join("cache"), blocks * BLOCK) }
}

fn read(source: &dyn Source, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut buf = vec![0xEE; length];
    source.read_at(offset, &mut buf).map(|()| buf)
}

#[test]
fn a_block_is_fetched_once_and_then_read_from_disk() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(3 * BLOCK as usize + 100);
    let origin = Origin::new(bytes.clone());
    let cache = BlockCache::open(&options(&dir, 8)).unwrap();
    let blob = cache.blob("sha256:a", origin.clone());
    for _ in 0..2 {
        assert_eq!(read(&blob, 0, bytes.len()).unwrap(), bytes);
    }
    assert_eq!(read(&blob, 5000, 10).unwrap(), bytes[5000..5010]);
    assert_eq!(read(&blob, 3 * BLOCK + 90, 10).unwrap(), bytes[bytes.len() - 10..]);
    assert_eq!(origin.reads(), 1, "missing neighbours are fetched together");
    assert_eq!(read(&blob, 3 * BLOCK + 95, 10).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(read(&blob, u64::MAX, 10).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert!(read(&blob, 0, 0).unwrap().is_empty());
}

#[test]
fn a_small_read_fetches_its_aligned_surroundings() {
    let dir = tempfile::tempdir().unwrap();
    let origin = Origin::new(pattern(16 * BLOCK as usize));
    let cache = BlockCache::open(&CacheOptions { refill: 4 * BLOCK, ..options(&dir, 16) }).unwrap();
    let blob = cache.blob("a", origin);
    read(&blob, 6 * BLOCK + 7, 1).unwrap();
    assert_eq!((cache.stats().fetched_bytes, cache.stats().blocks), (4 * BLOCK, 4));
    read(&blob, 4 * BLOCK, 4 * BLOCK as usize).unwrap();
    assert_eq!(cache.stats().fetches, 1);
}

#[test]
fn what_was_kept_is_there_after_a_restart_without_goodbye() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(4 * BLOCK as usize);
    {
        let cache = BlockCache::open(&options(&dir, 8)).unwrap();
        read(&cache.blob("a", Origin::new(bytes.clone())), 0, bytes.len()).unwrap();
        // As after a kill: what the files hold at this moment is all there is.
        std::fs::create_dir(dir.path().join("copy")).unwrap();
        for name in ["data", "index"] {
            std::fs::copy(dir.path().join("cache").join(name), dir.path().join("copy").join(name)).unwrap();
        }
    }
    let copy = CacheOptions { dir: dir.path().join("copy"), ..options(&dir, 8) };
    for options in [options(&dir, 8), copy] {
        let origin = Origin::new(bytes.clone());
        let cache = BlockCache::open(&options).unwrap();
        assert_eq!(read(&cache.blob("a", origin.clone()), 0, bytes.len()).unwrap(), bytes);
        assert_eq!(origin.reads(), 0);
        let other = Origin::new(vec![7; BLOCK as usize]);
        assert_eq!(read(&cache.blob("b", other), 0, 10).unwrap(), [7; 10], "another blob is another blob");
    }
}

#[test]
fn a_damaged_block_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(2 * BLOCK as usize);
    let origin = Origin::new(bytes.clone());
    let cache = BlockCache::open(&options(&dir, 8)).unwrap();
    let blob = cache.blob("a", origin.clone());
    read(&blob, 0, bytes.len()).unwrap();
    let file = LocalFile::open_writable(&dir.path().join("cache/data")).unwrap();
    file.write_at(3 * PAGE as u64 + 17, &[!bytes[3 * PAGE + 17]]).unwrap();
    assert_eq!(read(&blob, 0, 100).unwrap(), bytes[..100], "another page of the block");
    assert_eq!((cache.stats().corrupt, origin.reads()), (0, 1));
    assert_eq!(read(&blob, 3 * PAGE as u64, 100).unwrap(), bytes[3 * PAGE..3 * PAGE + 100]);
    assert_eq!((cache.stats().corrupt, origin.reads()), (1, 2));
    assert_eq!(read(&blob, 0, bytes.len()).unwrap(), bytes);
    assert_eq!(origin.reads(), 2, "the fresh copy was kept");
    file.set_length(10).unwrap();
    assert_eq!(read(&blob, 0, bytes.len()).unwrap(), bytes, "a file cut by somebody else");
}

#[test]
fn a_damaged_index_costs_its_blocks_only() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(4 * BLOCK as usize);
    let fill = |expected_reads: usize| {
        let origin = Origin::new(bytes.clone());
        let cache = BlockCache::open(&options(&dir, 8)).unwrap();
        assert_eq!(read(&cache.blob("a", origin.clone()), 0, bytes.len()).unwrap(), bytes);
        assert_eq!(origin.reads(), expected_reads);
    };
    fill(1);
    let index = LocalFile::open_writable(&dir.path().join("cache/index")).unwrap();
    index.write_at(128 * 2 + 40, &[1]).unwrap();
    fill(1);
    fill(0);
    index.write_at(8, &[99]).unwrap();
    fill(1);
    index.set_length(57).unwrap();
    fill(1);
    fill(0);
}

#[test]
fn eviction_keeps_the_bound_also_a_smaller_one() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(40 * BLOCK as usize);
    let origin = Origin::new(bytes.clone());
    let data = dir.path().join("cache/data");
    for blocks in [16, 5, 9] {
        let cache = BlockCache::open(&options(&dir, blocks)).unwrap();
        let blob = cache.blob("a", origin.clone());
        for round in 0..3 {
            for block in 0..40 {
                let at = (block * 7 + round) % 40 * BLOCK as usize;
                assert_eq!(read(&blob, at as u64, 100).unwrap(), bytes[at..at + 100]);
                assert!(cache.bytes() <= blocks * BLOCK);
                assert!(std::fs::metadata(&data).unwrap().len() <= blocks * BLOCK);
            }
        }
        assert_eq!(cache.stats().blocks, blocks);
    }
}

#[test]
fn sixty_four_readers_fetch_a_block_once() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(BLOCK as usize);
    let (open, gate) = mpsc::channel();
    let origin = Arc::new(Origin::gated(bytes.clone(), Some(Mutex::new(gate))));
    let cache = BlockCache::open(&options(&dir, 4)).unwrap();
    let blob = Arc::new(cache.blob("a", origin.clone()));
    thread::scope(|scope| {
        let readers: Vec<_> = (0..64u64)
            .map(|number| {
                (
                    number,
                    scope.spawn({
                        let blob = Arc::clone(&blob);
                        move || read(&*blob, number, 1000)
                    }),
                )
            })
            .collect();
        open.send(()).unwrap();
        for (number, reader) in readers {
            assert_eq!(reader.join().unwrap().unwrap(), bytes[number as usize..number as usize + 1000]);
        }
    });
    assert_eq!(origin.reads(), 1);
}

#[test]
fn an_origin_that_fails_or_panics_leaves_nobody_waiting_and_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(2 * BLOCK as usize);
    let origin = Origin::new(bytes.clone());
    let cache = BlockCache::open(&options(&dir, 4)).unwrap();
    let blob = cache.blob("a", origin.clone());
    origin.fails.store(true, Ordering::SeqCst);
    assert_eq!(read(&blob, 0, 10).unwrap_err().to_string(), "registry is down");
    origin.fails.store(false, Ordering::SeqCst);
    origin.panics.store(true, Ordering::SeqCst);
    thread::scope(|scope| scope.spawn(|| read(&blob, 0, 10)).join().unwrap_err());
    origin.panics.store(false, Ordering::SeqCst);
    assert_eq!(read(&blob, 0, bytes.len()).unwrap(), bytes);
}

#[test]
fn what_is_forgotten_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let origin = Origin::new(pattern(4 * BLOCK as usize));
    let cache = BlockCache::open(&options(&dir, 8)).unwrap();
    let blob = cache.blob("a", origin.clone());
    read(&blob, 0, 4 * BLOCK as usize).unwrap();
    blob.forget(BLOCK - 1, 2);
    blob.forget(100 * BLOCK, u64::MAX);
    assert_eq!(cache.stats().blocks, 2);
    read(&blob, 0, 4 * BLOCK as usize).unwrap();
    assert_eq!((origin.reads(), cache.stats().blocks), (2, 4));
}

#[test]
fn a_cache_has_one_owner() {
    let dir = tempfile::tempdir().unwrap();
    let first = BlockCache::open(&options(&dir, 4)).unwrap();
    let error = BlockCache::open(&options(&dir, 4)).unwrap_err();
    assert!(matches!(error, OpenCacheError::InUse { .. }), "{error}");
    drop(first);
    BlockCache::open(&options(&dir, 4)).unwrap();
    std::fs::write(dir.path().join("file"), b"").unwrap();
    let error = BlockCache::open(&CacheOptions::new(dir.path().join("file"), BLOCK)).unwrap_err();
    assert!(matches!(error, OpenCacheError::Io { .. }), "{error}");
}

/// A source of which each read gives other bytes, when the test says so.
#[derive(Debug)]
struct Fickle {
    reads: AtomicUsize,
    gates: Vec<Mutex<mpsc::Receiver<()>>>,
}

impl Source for Fickle {
    fn name(&self) -> &str {
        "fickle"
    }

    fn size(&self) -> u64 {
        BLOCK
    }

    fn read_at(&self, _: u64, buf: &mut [u8]) -> io::Result<()> {
        let number = self.reads.fetch_add(1, Ordering::SeqCst);
        self.gates[number].lock().unwrap().recv_timeout(TIMEOUT).map_err(io::Error::other)?;
        buf.fill(number as u8);
        Ok(())
    }
}

#[test]
fn what_is_forgotten_on_its_way_is_not_kept() {
    for late_one in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let cache = BlockCache::open(&options(&dir, 4)).unwrap();
        let (gates, receivers): (Vec<_>, Vec<_>) = (0..2).map(|_| mpsc::channel()).unzip();
        let gated = receivers.into_iter().map(Mutex::new).collect();
        let origin = Arc::new(Fickle { reads: AtomicUsize::new(0), gates: gated });
        let blob = cache.blob("a", origin.clone());
        let asked = |count: usize| {
            let deadline = Instant::now() + TIMEOUT;
            while origin.reads.load(Ordering::SeqCst) < count {
                assert!(Instant::now() < deadline);
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            let mut readers = vec![scope.spawn(|| read(&blob, 0, 1))];
            asked(1);
            blob.forget(0, 1);
            readers.push(scope.spawn(|| read(&blob, 0, 1)));
            asked(2);
            let late = readers.remove(late_one);
            gates[1 - late_one].send(()).unwrap();
            assert_eq!(readers.remove(0).join().unwrap().unwrap(), [1 - late_one as u8]);
            gates[late_one].send(()).unwrap();
            assert_eq!(late.join().unwrap().unwrap(), [late_one as u8]);
        });
        assert_eq!(read(&blob, 0, 1).unwrap(), [1], "the second was asked for when the first was forgotten");
        assert_eq!(cache.stats().blocks, 1);
    }
}

#[test]
fn a_cache_without_room_passes_through() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(2 * BLOCK as usize);
    std::fs::write(dir.path().join("file"), b"").unwrap();
    let nowhere = BlockCache::open_or_pass_through(&CacheOptions::new(dir.path().join("file"), 1 << 20));
    for cache in [BlockCache::open(&options(&dir, 0)).unwrap(), nowhere] {
        let blob = cache.blob("a", Origin::new(bytes.clone()));
        assert_eq!(read(&blob, 100, 70_000).unwrap(), bytes[100..70_100]);
        assert_eq!((cache.bytes(), cache.capacity()), (0, 0));
    }
}

#[test]
fn readers_and_evictions_at_once_see_only_true_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let cache = BlockCache::open(&options(&dir, 6)).unwrap();
    let blobs: HashMap<u8, (Vec<u8>, CachedBlob)> = (0..3u8)
        .map(|number| {
            let bytes: Vec<u8> = pattern(8 * BLOCK as usize).iter().map(|byte| byte ^ number).collect();
            (number, (bytes.clone(), cache.blob(&format!("blob {number}"), Origin::new(bytes))))
        })
        .collect();
    thread::scope(|scope| {
        for seed in 0..4u64 {
            let blobs = &blobs;
            scope.spawn(move || {
                let mut state = seed + 1;
                for _ in 0..400 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let (bytes, blob) = &blobs[&((state >> 60) as u8 % 3)];
                    let offset = (state >> 20) as usize % (bytes.len() - 9000);
                    assert_eq!(read(blob, offset as u64, 9000).unwrap(), bytes[offset..offset + 9000]);
                }
            });
        }
    });
    assert_eq!(cache.stats().corrupt, 0, "a slot that was reused in between is no damage");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn reads_through_the_cache_equal_the_source(
        length in 1..12 * BLOCK as usize,
        capacity in 0..8u64,
        refill in 1..5u64,
        reads in prop::collection::vec((any::<prop::sample::Index>(), 1..3 * BLOCK as usize, 0..20u8), 1..30),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let bytes = pattern(length);
        let origin = Origin::new(bytes.clone());
        let options = CacheOptions { refill: refill * BLOCK, ..options(&dir, capacity) };
        let mut cache = BlockCache::open(&options).unwrap();
        for (at, wanted, chance) in reads {
            if chance == 0 {
                drop(cache);
                cache = BlockCache::open(&options).unwrap();
            }
            let blob = cache.blob("a", origin.clone());
            let offset = at.index(length);
            if chance == 1 {
                blob.forget(offset as u64, wanted as u64);
            }
            let wanted = wanted.min(length - offset);
            prop_assert_eq!(read(&blob, offset as u64, wanted).unwrap(), &bytes[offset..offset + wanted]);
            prop_assert!(cache.bytes() <= capacity * BLOCK);
        }
        prop_assert_eq!(cache.stats().corrupt, 0);
    }
}
