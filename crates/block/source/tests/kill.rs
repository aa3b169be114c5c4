//! A process that is killed while it fills a cache.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use aenv_block_source::{BlockCache, CacheOptions, Source};

const LENGTH: u64 = 24 << 20;
/// Less than the blob, so that slots are reused all the time.
const CAPACITY: u64 = 4 << 20;
const DIR: &str = "AENV_TEST_CACHE_DIR";

/// Bytes that depend on their place only.
#[derive(Debug)]
struct Formula;

impl Source for Formula {
    fn name(&self) -> &str {
        "formula"
    }

    fn size(&self) -> u64 {
        LENGTH
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        for (at, byte) in (offset..).zip(buf) {
            *byte = (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8;
        }
        Ok(())
    }
}

fn open(dir: &Path, capacity: u64) -> BlockCache {
    BlockCache::open(&CacheOptions::new(dir, capacity)).unwrap()
}

#[test]
fn what_a_killed_process_leaves_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..6u64 {
        let cache_dir = dir.path().join(round.to_string());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "fill_until_killed", "--ignored"])
            .env(DIR, &cache_dir)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // Some rounds end while the cache grows, others when it has long been full.
        let enough = (round + 1).min(4) << 20;
        let deadline = Instant::now() + Duration::from_secs(30);
        while std::fs::metadata(cache_dir.join("data")).map_or(0, |data| data.len()) < enough {
            assert!(Instant::now() < deadline, "the child fills the cache");
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(7 * round));
        child.kill().unwrap();
        child.wait().unwrap();

        // With room for all, so that nothing is evicted before it is looked at.
        let cache = open(&cache_dir, LENGTH);
        let kept = cache.stats().blocks;
        assert!(kept > 0);
        let blob = cache.blob("formula", Arc::new(Formula));
        let (mut found, mut expected) = (vec![0; 65_536], vec![0; 65_536]);
        for offset in (0..LENGTH).step_by(found.len()) {
            blob.read_at(offset, &mut found).unwrap();
            Formula.read_at(offset, &mut expected).unwrap();
            assert!(found == expected, "round {round}, block at {offset}");
        }
        let stats = cache.stats();
        assert_eq!(
            (stats.corrupt, stats.hits >= kept),
            (0, true),
            "no record tells of what was not written: {stats:?}"
        );
    }
}

#[test]
#[ignore = "run by what_a_killed_process_leaves_is_whole"]
fn fill_until_killed() {
    let Some(dir) = std::env::var_os(DIR) else {
        eprintln!("skipped: only of use to the test that runs it");
        return;
    };
    let cache = open(Path::new(&dir), CAPACITY);
    let blob = cache.blob("formula", Arc::new(Formula));
    thread::scope(|scope| {
        for seed in 0..4u64 {
            let blob = &blob;
            scope.spawn(move || {
                let mut state = seed + 1;
                let mut buf = vec![0; 100_000];
                let end = Instant::now() + Duration::from_secs(60); // should nobody kill us
                while Instant::now() < end {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    blob.read_at((state >> 20) % (LENGTH - buf.len() as u64), &mut buf).unwrap();
                }
            });
        }
    });
}
