//! Devices in use: the suite that every block device passes, restacking, compaction, resizing, trimming.

mod support;

use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aenv_block_device::BlockDevice;
use aenv_block_device::test_support::conformance;
use aenv_block_overlaybd::{
    CompactionPolicy, Layer, LocalFile, MemoryFile, Mode, OverlayDevice, Source, Stack, Upper, UpperFiles, UpperOptions,
};
use aenv_model::Bytes;
use support::*;
use tempfile::TempDir;
use uuid::Uuid;

const MODES: [Mode; 3] = [Mode::Log, Mode::Hybrid, Mode::Sparse];

struct Disk {
    dir: TempDir,
    files: UpperFiles,
    device: OverlayDevice,
}

impl Disk {
    fn new(mode: Mode, size: Bytes, lowers: Stack) -> Self {
        let dir = TempDir::new().expect("temp dir");
        let files = UpperFiles::in_directory(dir.path(), mode);
        let upper = files.create(&UpperOptions { mode, ..UpperOptions::new(size, Uuid::nil()) }).expect("create");
        let device = OverlayDevice::new(lowers, upper).expect("device");
        Self { dir, files, device }
    }

    fn restack(&self, number: usize) {
        self.device.restack(&self.files, &self.dir.path().join(format!("layer-{number}"))).expect("restack");
    }

    fn all(&self) -> Vec<u8> {
        read(&self.device, 0, self.device.size().get())
    }
}

fn empty() -> Stack {
    Stack::new(Vec::new()).expect("empty stack")
}

fn golden() -> Stack {
    Stack::open([open(vector("lsmt-basic"))]).expect("stack")
}

#[test]
fn every_mode_passes_the_suite_alone_and_over_layers() {
    for mode in MODES {
        conformance::suite(&Disk::new(mode, Bytes::mib(2), empty()).device);
        conformance::suite(&Disk::new(mode, Bytes::mib(1), golden()).device);
        // A size that is no multiple of a filesystem block.
        conformance::suite(&Disk::new(mode, Bytes((1 << 20) + 512), golden()).device);
    }
}

#[test]
fn the_suite_passes_while_the_device_is_restacked_and_compacted() {
    for mode in MODES {
        let disk = Disk::new(mode, Bytes::mib(1), golden());
        let done = AtomicBool::new(false);
        let policy = CompactionPolicy { max_depth: 3, base: 1 };
        thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let mut round = 0;
                while !done.load(Ordering::SeqCst) || round == 0 {
                    disk.restack(round);
                    if let Some(range) = policy.plan(disk.device.lowers().layers().len()) {
                        let path = disk.dir.path().join(format!("merged-{round}"));
                        let (_, old) = disk.device.compact(range, &path, &mut |_| true).expect("compact");
                        for layer in old {
                            std::fs::remove_file(layer.payload().name()).expect("delete");
                        }
                    }
                    round += 1;
                }
                round
            });
            let suite = thread::Builder::new().spawn_scoped(scope, || conformance::suite(&disk.device)).expect("spawn");
            let outcome = suite.join();
            done.store(true, Ordering::SeqCst);
            assert!(worker.join().expect("worker") > 0);
            outcome.expect("suite");
        });
        assert!(disk.device.lowers().layers().len() <= policy.max_depth);
    }
}

#[test]
fn content_survives_restacks_compaction_and_reopening() {
    for mode in MODES {
        let disk = Disk::new(mode, Bytes::mib(1), golden());
        for round in 0..6_u64 {
            disk.device.write_at(round * 100_000 + 17, &vec![round as u8 + 1; 150_001]).expect("write");
            disk.device.discard(round * 90_000, 30_000).expect("discard");
            disk.restack(round as usize);
        }
        let expected = disk.all();
        let merged = disk.dir.path().join("merged");
        let mut told = 0;
        let (_, old) = disk
            .device
            .compact(1..7, &merged, &mut |bytes| {
                told = bytes;
                true
            })
            .expect("compact");
        assert_eq!(old.len(), 6);
        assert_eq!(disk.device.lowers().layers().len(), 2);
        assert!(disk.all() == expected, "{mode:?}: compacted");
        disk.device.compact(0..1, &merged, &mut |_| true).expect_err("one layer is merged already");
        disk.device.compact(0..3, &merged, &mut |_| true).expect_err("there are two");

        disk.device.write_at(5, b"last words").expect("write");
        let expected = disk.all();
        disk.device.flush().expect("flush");
        let Disk { dir, files, device } = disk;
        drop(device);
        let mut layers = golden().layers().to_vec();
        layers.push(Layer::open(Arc::new(LocalFile::open(&merged).expect("open"))).expect("layer"));
        let lowers = Stack::new(layers).expect("stack");
        let device = OverlayDevice::new(lowers, files.open().expect("open")).expect("device");
        assert!(read(&device, 0, 1 << 20) == expected, "{mode:?}: reopened");
        drop(dir);
    }
}

#[test]
fn a_compaction_that_is_given_up_leaves_the_device_and_no_file() {
    let disk = Disk::new(Mode::Log, Bytes::mib(8), empty());
    for round in 0..2 {
        disk.device.write_at(0, &vec![round; 4 << 20]).expect("write");
        disk.restack(usize::from(round));
    }
    let path = disk.dir.path().join("merged");
    disk.device.compact(0..2, &path, &mut |_| false).expect_err("given up");
    assert_eq!(disk.device.lowers().layers().len(), 2);
    let names: Vec<_> =
        std::fs::read_dir(disk.dir.path()).expect("list").map(|entry| entry.expect("entry").file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().contains("merged")), "{names:?}");
}

#[test]
fn a_device_grows_and_shrinks_and_what_was_cut_off_is_gone() {
    for mode in MODES {
        let disk = Disk::new(mode, Bytes::mib(1), empty());
        disk.device.write_at((1 << 20) - 4096, &[7; 4096]).expect("write");
        disk.device.resize(Bytes::kib(512)).expect("shrink");
        assert_eq!(disk.device.size(), Bytes::kib(512));
        disk.device.write_at(512 << 10, &[1]).expect_err("beyond the end");
        disk.device.resize(Bytes::mib(2)).expect("grow");
        assert!(disk.all() == vec![0; 2 << 20], "{mode:?}");
        disk.device.write_at((2 << 20) - 512, &[8; 512]).expect("write");
        disk.device.flush().expect("flush");
        disk.device.resize(Bytes(1000)).expect_err("not a multiple of 512");
        let Disk { dir, files, device } = disk;
        drop(device);
        let device = OverlayDevice::new(empty(), files.open().expect("open")).expect("device");
        assert_eq!(device.size(), Bytes::mib(2));
        assert_eq!(read(&device, (2 << 20) - 512, 512), [8; 512]);
        drop(dir);
    }
}

#[test]
fn trimmed_space_goes_back_to_the_filesystem() {
    for mode in MODES {
        let disk = Disk::new(mode, Bytes::mib(8), empty());
        let allocated = || disk.files.data.metadata().expect("stat").blocks() * 512;
        disk.device.write_at(0, &vec![1; 4 << 20]).expect("write");
        disk.device.flush().expect("flush");
        assert!(allocated() >= 4 << 20);
        disk.device.discard(0, 4 << 20).expect("discard");
        disk.device.flush().expect("flush");
        assert!(allocated() < 1 << 20, "{mode:?}: {} bytes are still allocated", allocated());
        assert!(read(&disk.device, 0, 4 << 20) == vec![0; 4 << 20]);
    }
}

type TroubledMemory = Troubled<MemoryFile>;

fn troubled_memory() -> Arc<TroubledMemory> {
    Arc::new(Troubled::new(MemoryFile::new("troubled", Vec::new())))
}

fn troubled_device(mode: Mode) -> (OverlayDevice, Arc<TroubledMemory>, Arc<TroubledMemory>) {
    let (data, index) = (troubled_memory(), troubled_memory());
    let options = UpperOptions { mode, ..UpperOptions::new(Bytes::mib(1), Uuid::nil()) };
    let upper = Upper::create(Arc::clone(&data) as _, Some(Arc::clone(&index) as _), &options).expect("create");
    (OverlayDevice::new(empty(), upper).expect("device"), data, index)
}

#[test]
fn a_full_disk_is_an_error_and_what_was_there_stays() {
    for mode in [Mode::Log, Mode::Hybrid] {
        let (device, data, index) = troubled_device(mode);
        device.write_at(0, &[1; 8192]).expect("write");
        device.flush().expect("flush");
        data.room.store(data.size(), Ordering::SeqCst);
        let error = device.write_at(4096, &[2; 65_536]).expect_err("full");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(read(&device, 0, 4096), [1; 4096]);
        assert_eq!(read(&device, 65_536, 4096), [0; 4096]);
        data.room.store(u64::MAX, Ordering::SeqCst);
        device.write_at(4096, &[3; 4096]).expect("there is room again");

        // The entries of what was written do not fit; they are kept for later.
        device.discard(0, 512).expect("discard");
        index.room.store(index.size(), Ordering::SeqCst);
        assert_eq!(device.flush().expect_err("full").kind(), io::ErrorKind::StorageFull);
        index.room.store(u64::MAX, Ordering::SeqCst);
        device.flush().expect("flush");
        drop(device);
        let upper = Upper::open(data, Some(index)).expect("open");
        let device = OverlayDevice::new(empty(), upper).expect("device");
        assert_eq!(read(&device, 0, 513)[511..], [0, 1]);
        assert_eq!(read(&device, 4096, 4096), [3; 4096]);
    }
}

#[test]
fn a_seal_that_has_no_room_leaves_the_upper_as_it_was() {
    let beyond_trailer = 2 * 4096;
    for mode in [Mode::Log, Mode::Hybrid, Mode::Sparse] {
        let data = troubled_memory();
        let index = (mode != Mode::Sparse).then(troubled_memory);
        let options = UpperOptions { mode, ..UpperOptions::new(Bytes::mib(1), Uuid::nil()) };
        let files = (Arc::clone(&data) as _, index.clone().map(|index| index as _));
        let upper = Upper::create(files.0, files.1, &options).expect("create");
        let device = OverlayDevice::new(empty(), upper).expect("device");
        device.write_at(0, &[1; 8192]).expect("write");
        device.flush().expect("flush");
        let full = data.size();
        for more in [0, 4096, beyond_trailer - 1] {
            data.room.store(full + more, Ordering::SeqCst);
            let error = device.upper().seal().expect_err("no room");
            assert!(matches!(error, aenv_block_overlaybd::SealError::Io { .. }), "{error:?}");
            assert!(device.upper().takes_writes());
            assert_eq!(data.size(), full, "{mode:?}: nothing of the seal is left");
        }
        data.room.store(u64::MAX, Ordering::SeqCst);
        device.write_at(4096, &[2; 4096]).expect("write");
        device.flush().expect("flush");
        device.upper().seal().expect("seal");
        assert!(!device.upper().takes_writes());
        let layer = Layer::open(data).expect("open");
        let stack = Stack::new(vec![layer]).expect("stack");
        let mut bytes = [0; 8192];
        stack.read_at(0, &mut bytes).expect("read");
        assert_eq!((bytes[4095], bytes[4096]), (1, 2));
    }
}

#[test]
fn after_a_failed_sync_a_device_is_refused_until_it_is_opened_again() {
    let (device, data, index) = troubled_device(Mode::Hybrid);
    device.write_at(0, &[1; 4096]).expect("write");
    device.flush().expect("flush");
    data.broken.store(true, Ordering::SeqCst);
    device.write_at(4096, &[2; 4096]).expect("write");
    device.flush().expect_err("broken");
    data.broken.store(false, Ordering::SeqCst);
    device.flush().expect_err("a second flush must not claim what the first lost");
    device.write_at(0, &[3; 512]).expect_err("refused");
    device.read_at(0, &mut [0; 512]).expect_err("refused");
    drop(device);
    let upper = Upper::open(data, Some(index)).expect("open");
    let device = OverlayDevice::new(empty(), upper).expect("device");
    assert_eq!(read(&device, 0, 4096), [1; 4096]);
}

#[test]
fn a_restack_does_not_wait_for_a_compaction() {
    let disk = Disk::new(Mode::Hybrid, Bytes::mib(8), empty());
    for round in 0..2 {
        disk.device.write_at(0, &vec![round + 1; 4 << 20]).expect("write");
        disk.restack(usize::from(round));
    }
    let merged = disk.dir.path().join("merged");
    let mut restacked = false;
    let proceed = &mut |_| {
        if !restacked {
            disk.device.write_at(0, &[9; 512]).expect("write");
            disk.restack(2); // in the middle of it
            restacked = true;
        }
        true
    };
    disk.device.compact(0..2, &merged, proceed).expect("compact");
    assert_eq!(disk.device.lowers().layers().len(), 2);
    assert_eq!(read(&disk.device, 0, 1024), [[9; 512], [2; 512]].concat());
}
