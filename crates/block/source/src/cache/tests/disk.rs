//! The cache on disks that are full, broken, or lose what a killed process did not write.

use std::fs::OpenOptions;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use aenv_block_overlaybd::{LocalFile, Storage};

use super::super::layout::{BLOCK, Files};
use super::super::table::Table;
use super::super::*;
use super::{Origin, pattern, read};

/// A file on a disk that may be full or broken.
#[derive(Debug)]
struct Sick {
    inner: LocalFile,
    /// Bytes that fit.
    room: u64,
    /// Whether nothing may be written at all.
    broken: Arc<AtomicBool>,
    /// Writes until the process is killed; what it thinks to write then is never written.
    until_kill: Arc<AtomicUsize>,
}

impl Source for Sick {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(offset, buf)
    }
}

impl Storage for Sick {
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        if self.broken.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(5));
        }
        if self.until_kill.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_err() {
            return Ok(());
        }
        let fits = self.room.saturating_sub(offset).min(buf.len() as u64) as usize;
        self.inner.write_at(offset, &buf[..fits])?;
        if fits < buf.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn length(&self) -> io::Result<u64> {
        self.inner.length()
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.inner.set_length(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn punch_hole(&self, offset: u64, length: u64) -> io::Result<()> {
        self.inner.punch_hole(offset, length)
    }

    fn data_ranges(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        self.inner.data_ranges(range)
    }
}

fn sick_cache(dir: &tempfile::TempDir, room: u64, broken: &Arc<AtomicBool>) -> BlockCache {
    over_sick_files(dir, 100, room, broken, usize::MAX)
}

fn over_sick_files(
    dir: &tempfile::TempDir,
    slots: u32,
    room: u64,
    broken: &Arc<AtomicBool>,
    until_kill: usize,
) -> BlockCache {
    let until_kill = Arc::new(AtomicUsize::new(until_kill));
    let file = |name: &str, room: u64| -> Box<dyn Storage> {
        let path = dir.path().join(name);
        OpenOptions::new().create(true).append(true).open(&path).unwrap();
        let inner = LocalFile::open_writable(&path).unwrap();
        Box::new(Sick { inner, room, broken: Arc::clone(broken), until_kill: Arc::clone(&until_kill) })
    };
    let (data, index, mut table) = (file("data", room), file("index", u64::MAX), Table::new(slots));
    let files = Files::from_storage(data, index, slots, |held| table.adopt(held)).unwrap();
    BlockCache::over(Some(files), table, BLOCK)
}

#[test]
fn after_a_kill_between_any_two_writes_every_record_is_true() {
    let bytes = pattern(9 * BLOCK as usize);
    let check = |blob: &CachedBlob| {
        for block in [0, 5, 1, 7, 2, 8, 3, 6, 4, 0, 5] {
            let at = block * BLOCK as usize;
            assert!(read(blob, at as u64, BLOCK as usize).unwrap() == bytes[at..at + BLOCK as usize]);
        }
    };
    for until_kill in 0..40 {
        let dir = tempfile::tempdir().unwrap();
        let killed = over_sick_files(&dir, 4, u64::MAX, &Arc::default(), until_kill);
        check(&killed.blob("a", Origin::new(bytes.clone())));
        drop(killed);
        let after = over_sick_files(&dir, 4, u64::MAX, &Arc::default(), usize::MAX);
        let (blob, kept) = (after.blob("a", Origin::new(bytes.clone())), after.stats().blocks);
        let all: Vec<u64> = (0..9).filter(|block| after.0.table().find(blob.id(), *block, false).is_some()).collect();
        assert_eq!(all.len() as u64, kept);
        for block in all {
            read(&blob, block * BLOCK, BLOCK as usize).unwrap();
        }
        assert_eq!((after.stats().corrupt, after.stats().fetches), (0, 0), "killed after {until_kill} writes");
        check(&blob);
    }
}

#[test]
fn on_a_full_disk_reads_go_on_with_the_space_there_is() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(20 * BLOCK as usize);
    let cache = sick_cache(&dir, 3 * BLOCK + 1000, &Arc::default());
    let blob = cache.blob("a", Origin::new(bytes.clone()));
    for _ in 0..2 {
        for block in 0..20 {
            let at = block * BLOCK as usize;
            assert_eq!(read(&blob, at as u64, BLOCK as usize).unwrap(), bytes[at..at + BLOCK as usize]);
        }
    }
    let stats = cache.stats();
    assert_eq!((stats.blocks, stats.bypassed), (3, 1), "one block met the end, the others took turns: {stats:?}");
}

#[test]
fn on_a_broken_disk_reads_pass_through() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(8 * BLOCK as usize);
    let broken = Arc::new(AtomicBool::new(false));
    let cache = sick_cache(&dir, u64::MAX, &broken);
    let origin = Origin::new(bytes.clone());
    let blob = cache.blob("a", origin.clone());
    read(&blob, 0, 2 * BLOCK as usize).unwrap();
    broken.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        assert_eq!(read(&blob, 0, bytes.len()).unwrap(), bytes);
    }
    assert_eq!((cache.stats().blocks, cache.stats().bypassed, origin.reads()), (2, 12, 3));
}
