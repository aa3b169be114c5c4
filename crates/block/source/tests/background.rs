//! Downloads, traces and their replay, over a real reader of layers.

mod support;

use std::io::{self, Cursor, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use aenv_block_overlaybd::{ZFile, ZFileOptions, ZFileWriter};
use aenv_block_source::{
    BlockCache, CacheOptions, CachedBlob, DownloadOptions, JobError, Source, Trace, TraceRecorder, download, prefetch,
};
use support::{Answer, Stub, digest, pattern, read, until};

const LENGTH: usize = 5 << 20;

/// A source that notes what is read, lies, and fails.
#[derive(Debug)]
struct Origin {
    bytes: Vec<u8>,
    lies: AtomicBool,
    /// So many reads fail.
    failures: AtomicUsize,
    reads: Mutex<Vec<Range<u64>>>,
}

impl Origin {
    fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self { bytes, lies: AtomicBool::new(false), failures: AtomicUsize::new(0), reads: Mutex::default() })
    }

    fn read_bytes(&self) -> u64 {
        self.reads.lock().unwrap().iter().map(|range| range.end - range.start).sum()
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
        let failures = &self.failures;
        if failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Err(io::Error::other("down"));
        }
        self.reads.lock().unwrap().push(offset..offset + buf.len() as u64);
        buf.copy_from_slice(&self.bytes[offset as usize..][..buf.len()]);
        if self.lies.load(Ordering::SeqCst) {
            buf.iter_mut().step_by(1000).for_each(|byte| *byte ^= 1);
        }
        Ok(())
    }
}

fn cache(dir: &tempfile::TempDir, capacity: u64) -> BlockCache {
    BlockCache::open(&CacheOptions::new(dir.path().join("cache"), capacity)).unwrap()
}

fn at_once() -> DownloadOptions {
    DownloadOptions {
        delay: Duration::ZERO,
        delay_extra: Duration::ZERO,
        rate: 0,
        attempts: 1,
        pause: Duration::from_millis(1),
    }
}

struct Bench {
    dir: tempfile::TempDir,
    cache: BlockCache,
    bytes: Vec<u8>,
    origin: Arc<Origin>,
    blob: Arc<CachedBlob>,
}

fn bench() -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(&dir, 16 << 20);
    let bytes = pattern(LENGTH);
    let origin = Origin::new(bytes.clone());
    let blob = Arc::new(cache.blob(&digest(&bytes), origin.clone()));
    Bench { dir, cache, bytes, origin, blob }
}

#[test]
fn a_download_fetches_what_is_missing_and_verifies_all() {
    let bench = bench();
    read(&*bench.blob, 1 << 20, 300_000).unwrap();
    let before = bench.origin.read_bytes();
    let done = download(Arc::clone(&bench.blob), at_once()).unwrap().wait().unwrap();
    assert!(done.verified && done.failed == 0);
    assert_eq!(done.fetched, LENGTH as u64 - before);
    assert_eq!(bench.origin.read_bytes(), LENGTH as u64);
    assert_eq!(read(&*bench.blob, 0, LENGTH).unwrap(), bench.bytes);
    assert_eq!(bench.origin.read_bytes(), LENGTH as u64, "everything is local now");
    let (dir, capacity) = (bench.dir, bench.cache.capacity());
    drop((bench.blob, bench.cache));
    let reopened = cache(&dir, capacity).blob(&digest(&bench.bytes), Origin::new(vec![0; LENGTH]));
    assert_eq!(read(&reopened, 0, LENGTH).unwrap(), bench.bytes);
}

#[test]
fn a_blob_that_is_not_what_its_digest_says_is_refused_until_it_is() {
    let bench = bench();
    bench.origin.lies.store(true, Ordering::SeqCst);
    let error = download(Arc::clone(&bench.blob), at_once()).unwrap().wait().unwrap_err();
    assert!(matches!(error, JobError::WrongDigest { .. }), "{error}");
    assert_eq!(read(&*bench.blob, 0, 10).unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert_eq!(bench.cache.stats().blocks, 0);
    bench.origin.lies.store(false, Ordering::SeqCst);
    assert!(download(Arc::clone(&bench.blob), at_once()).unwrap().wait().unwrap().verified);
    assert_eq!(read(&*bench.blob, 0, LENGTH).unwrap(), bench.bytes);
}

#[test]
fn a_download_is_begun_again_after_a_failure() {
    let bench = bench();
    bench.origin.failures.store(2, Ordering::SeqCst);
    let error = download(Arc::clone(&bench.blob), at_once()).unwrap().wait().unwrap_err();
    assert!(matches!(error, JobError::Read { .. }), "{error}");
    let again = DownloadOptions { attempts: 2, ..at_once() };
    assert!(download(Arc::clone(&bench.blob), again).unwrap().wait().unwrap().verified);
    assert_eq!(bench.origin.read_bytes(), LENGTH as u64);
}

#[test]
fn a_download_keeps_its_rate_and_stops_when_told() {
    let bench = bench();
    let start = Instant::now();
    let slow = DownloadOptions { rate: 10 << 20, ..at_once() };
    download(Arc::clone(&bench.blob), slow).unwrap().wait().unwrap();
    assert!(start.elapsed() >= Duration::from_millis(350), "5 MiB at 10 MiB/s: {:?}", start.elapsed());
    for options in
        [DownloadOptions { rate: 1, ..at_once() }, DownloadOptions { delay: Duration::from_secs(3600), ..at_once() }]
    {
        let bytes = pattern(LENGTH + 1);
        let blob = Arc::new(bench.cache.blob(&digest(&bytes), Origin::new(bytes)));
        let job = download(blob, options).unwrap();
        assert!(!job.is_finished());
        job.cancel();
        assert!(matches!(job.wait().unwrap_err(), JobError::Cancelled));
    }
}

/// A source whose last megabyte comes when the test says so, and that notes when it was asked for the rest.
#[derive(Debug)]
struct Gated {
    gate: Mutex<mpsc::Receiver<()>>,
    asked: mpsc::Sender<Instant>,
}

impl Source for Gated {
    fn name(&self) -> &str {
        "gated"
    }

    fn size(&self) -> u64 {
        LENGTH as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let _ = self.asked.send(Instant::now());
        if offset >= LENGTH as u64 - (1 << 20) {
            self.gate.lock().unwrap().recv_timeout(Duration::from_secs(20)).map_err(io::Error::other)?;
        }
        buf.fill(7);
        Ok(())
    }
}

#[test]
fn a_download_waits_while_a_reader_does_but_not_forever() {
    for held in [Duration::from_millis(100), Duration::from_millis(1300)] {
        let dir = tempfile::tempdir().unwrap();
        let (open, gate) = mpsc::channel();
        let (asked, when) = mpsc::channel();
        let blob = Arc::new(cache(&dir, 16 << 20).blob("gated", Arc::new(Gated { gate: Mutex::new(gate), asked })));
        let next = || when.recv_timeout(Duration::from_secs(20)).unwrap();
        thread::scope(|scope| {
            let reader = scope.spawn(|| read(&*blob, LENGTH as u64 - 10, 10).map(|_| ()));
            next(); // the reader is waiting
            let start = Instant::now();
            let job = download(Arc::clone(&blob), at_once()).unwrap();
            thread::sleep(held);
            let opened = Instant::now();
            (0..20).for_each(|_| open.send(()).unwrap());
            let begun = next();
            assert!(begun >= opened || begun - start >= Duration::from_secs(1), "{held:?}");
            reader.join().unwrap().unwrap();
            job.wait().unwrap();
        });
    }
}

#[test]
fn a_blob_that_does_not_fit_the_cache_is_not_downloaded() {
    let dir = tempfile::tempdir().unwrap();
    let origin = Origin::new(pattern(LENGTH));
    let blob = Arc::new(cache(&dir, 1 << 20).blob("x", origin.clone()));
    let error = download(blob, at_once()).unwrap().wait().unwrap_err();
    assert!(matches!(error, JobError::TooLarge { .. }), "{error}");
    assert_eq!(origin.read_bytes(), 0);
}

#[test]
fn a_recorded_start_is_replayed_into_an_empty_cache() {
    let ranges = [(3_000_000, 200_000), (10, 5), (3_100_000, 50_000), (4_500_000, 4096)];
    let recorder = TraceRecorder::new();
    let first = bench();
    let recorded = recorder.wrap(1, first.blob.clone());
    for (offset, length) in ranges {
        assert_eq!(read(&*recorded, offset, length).unwrap(), first.bytes[offset as usize..offset as usize + length]);
    }
    read(&*recorded, LENGTH as u64, 1).unwrap_err();
    let path = first.dir.path().join("trace");
    recorder.finish().write(&path).unwrap();
    let trace = Trace::read(&path).unwrap();
    assert_eq!(trace.accesses().len(), 3, "{trace:?}");

    let second = bench();
    second.origin.failures.store(1, Ordering::SeqCst);
    let replay = |trace: &Trace| prefetch(trace.clone(), vec![None, Some(Arc::clone(&second.blob))], 4).unwrap().wait();
    assert_eq!(replay(&trace).unwrap().failed, 1);
    let done = replay(&trace).unwrap();
    assert!(done.failed == 0 && second.cache.stats().fetched_bytes < 2 << 20, "{done:?}");
    let fetched = second.origin.read_bytes();
    for (offset, length) in ranges {
        read(&*second.blob, offset, length).unwrap();
    }
    assert_eq!(second.origin.read_bytes(), fetched, "nothing was left to fetch");
}

#[test]
fn a_dropped_job_ends() {
    let bench = bench();
    let job = download(Arc::clone(&bench.blob), DownloadOptions { delay: Duration::from_secs(3600), ..at_once() });
    drop(job.unwrap());
    until("the job lets go of its blob", || Arc::strong_count(&bench.blob) == 1);
}

/// A compressed layer, as it would lie in a registry.
fn compressed(content: &[u8]) -> Vec<u8> {
    let mut writer = ZFileWriter::new(Cursor::new(Vec::new()), ZFileOptions::default()).unwrap();
    writer.write_all(content).unwrap();
    writer.finish().unwrap().0.into_inner()
}

#[test]
fn bytes_damaged_on_their_way_are_fetched_again_by_the_reader_that_notices() {
    let dir = tempfile::tempdir().unwrap();
    let content: Vec<u8> = pattern(LENGTH).into_iter().map(|byte| byte & 0x0F).collect();
    let origin = Origin::new(compressed(&content));
    let blob = cache(&dir, 16 << 20).blob("layer", origin.clone());
    let zfile = ZFile::open(Arc::new(blob)).unwrap().unwrap();
    origin.lies.store(true, Ordering::SeqCst);
    let error = read(&zfile, 1 << 20, 100_000).map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "an origin that always lies: {error}");
    origin.lies.store(false, Ordering::SeqCst);
    assert_eq!(read(&zfile, 0, LENGTH).unwrap(), content, "nothing of the lie was kept");
}

#[test]
fn a_layer_is_read_from_a_shaky_registry_through_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let content: Vec<u8> = pattern(LENGTH).into_iter().map(|byte| byte & 0x0F).collect();
    let layer = compressed(&content);
    let stub = Stub::start(layer.clone(), |ask| match ask.number % 3 {
        0 => Answer::Cut(1000),
        1 => support::say(503),
        _ => Answer::Serve,
    });
    let cache = cache(&dir, 16 << 20);
    let blob = Arc::new(cache.blob(&digest(&layer), Arc::new(stub.blob(layer.len() as u64))));
    let zfile = ZFile::open(blob.clone()).unwrap().unwrap();
    assert_eq!(read(&zfile, 2_345_678, 400_000).unwrap(), content[2_345_678..2_745_678]);
    assert!(cache.stats().fetched_bytes < layer.len() as u64 / 2, "only what is needed");
    assert!(download(blob, at_once()).unwrap().wait().unwrap().verified);
    drop(stub);
    assert_eq!(read(&zfile, 0, LENGTH).unwrap(), content);
}
