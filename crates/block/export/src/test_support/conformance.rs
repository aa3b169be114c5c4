//! What every [`Exporter`] must do. Each function panics with what it saw; [`suite`] runs them all.
//!
//! The files are opened as VMMs open them, for direct I/O, so that each request reaches the exporter.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use aenv_block_device::BlockDevice;
use aenv_block_device::test_support::{Failing, MemoryDevice, Operation};
use aenv_model::Bytes;

use super::{Growing, Held, Opened, Recording, Step, within};
use crate::{AttachError, Caching, Export, ExportOptions, Exporter};

/// Longer than any machine needs for what should take no time.
const SOON: Duration = Duration::from_secs(30);
/// A disk of a guest.
const DISK: ExportOptions = ExportOptions { read_only: false, caching: Caching::Direct };
const PAGE: usize = 4096;

/// Runs every check.
pub fn suite(exporter: &dyn Exporter) {
    reads_and_writes_reach_the_device(exporter);
    large_requests_arrive_whole(exporter);
    a_flush_comes_after_the_writes_before_it(exporter);
    discarded_ranges_read_as_zeros(exporter);
    a_failing_device_fails_its_reader_and_the_export_goes_on(exporter);
    a_held_device_delays_no_other(exporter);
    eight_threads_agree_with_a_model(exporter);
    a_grown_device_is_seen_at_once(exporter);
    a_read_only_export_is_not_written(exporter);
    names_are_file_names_and_unique(exporter);
    a_closed_name_is_free(exporter);
    what_the_host_keeps_is_written_back(exporter);
    open_descriptors_do_not_outlive_a_close(exporter);
    a_close_waits_for_its_own_requests_only(exporter);
    many_exports_do_not_mix(exporter);
    a_record_says_where_it_is(exporter);
}

/// What is written through the export is on the device, and what is on the device is read.
pub fn reads_and_writes_reach_the_device(exporter: &dyn Exporter) {
    let device = memory(4);
    let export = attach(exporter, "suite-reads", &device);
    let opened = open(&*export);
    assert_eq!(opened.size().expect("size"), 4 << 20);
    for (offset, length) in [(0, PAGE), (PAGE, 3 * PAGE), (1 << 20, 1 << 20), ((4 << 20) - PAGE, PAGE)] {
        let bytes = pattern(offset as u64, length);
        opened.write(offset as u64, &bytes).expect("write");
        assert!(on(&*device, offset as u64, length) == bytes, "{length} bytes at {offset} on the device");
        let bytes = pattern(!offset as u64, length);
        device.write_at(offset as u64, &bytes).expect("write to the device");
        assert!(opened.read(offset as u64, length).expect("read") == bytes, "{length} bytes at {offset}");
    }
    close(export);
}

/// Requests as large as callers like.
pub fn large_requests_arrive_whole(exporter: &dyn Exporter) {
    let device = memory(16);
    let export = attach(exporter, "suite-large", &device);
    let opened = open(&*export);
    let bytes = pattern(7, 16 << 20);
    opened.write(0, &bytes).expect("write");
    assert!(on(&*device, 0, 16 << 20) == bytes, "on the device");
    assert!(opened.read(0, 16 << 20).expect("read") == bytes, "read back");
    close(export);
}

/// Data first, then the flush, then what came after it.
pub fn a_flush_comes_after_the_writes_before_it(exporter: &dyn Exporter) {
    let device = Arc::new(Recording::new(MemoryDevice::new(Bytes::mib(4))));
    let export = exporter.attach("suite-flush", device.clone(), &DISK).expect("attach");
    let opened = open(&*export);
    device.take();
    for round in 0..4 {
        let offset = round * PAGE as u64;
        opened.write(offset, &[1; PAGE]).expect("write");
        opened.flush().expect("flush");
        assert_eq!(device.take(), [Step::Write(offset, PAGE as u64), Step::Flush]);
    }
    drop(opened);
    close(export);
}

/// A hole is punched, exactly where it was asked for.
pub fn discarded_ranges_read_as_zeros(exporter: &dyn Exporter) {
    let device = Arc::new(Recording::new(MemoryDevice::new(Bytes::mib(4))));
    let export = exporter.attach("suite-discard", device.clone(), &DISK).expect("attach");
    let opened = open(&*export);
    opened.write(0, &[0xFF; 64 * PAGE]).expect("write");
    device.take();
    opened.punch(8 * PAGE as u64, 16 * PAGE as u64).expect("discard");
    let steps = device.take();
    assert_eq!(steps, [Step::Discard(8 * PAGE as u64, 16 * PAGE as u64)], "a discard, not zeros written");
    let mut expected = vec![0xFF; 64 * PAGE];
    expected[8 * PAGE..24 * PAGE].fill(0);
    assert!(opened.read(0, 64 * PAGE).expect("read") == expected);
    close(export);
}

/// The reader learns of an error, and only of its own.
pub fn a_failing_device_fails_its_reader_and_the_export_goes_on(exporter: &dyn Exporter) {
    let device = Arc::new(Failing::new(MemoryDevice::new(Bytes::mib(4))));
    let export = exporter.attach("suite-fails", device.clone(), &DISK).expect("attach");
    let opened = open(&*export);
    for _ in 0..2 {
        for operation in [Operation::Read, Operation::Write, Operation::Discard, Operation::Flush] {
            device.fail(operation, 0, io::ErrorKind::Other);
        }
        is_io_error("read", opened.read(0, PAGE).map(drop));
        is_io_error("write", opened.write(0, &[1; PAGE]));
        is_io_error("discard", opened.punch(0, PAGE as u64));
        is_io_error("flush", opened.flush());
        device.heal();
        opened.write(0, &[2; PAGE]).expect("write when healed");
        opened.flush().expect("flush when healed");
        assert_eq!(opened.read(0, PAGE).expect("read when healed"), [2; PAGE]);
    }
    device.fail(Operation::Write, 0, io::ErrorKind::StorageFull);
    let full = opened.write(0, &[3; PAGE]).expect_err("no space");
    assert_eq!(full.kind(), io::ErrorKind::StorageFull, "{full}");
    device.heal();
    close(export);
}

/// A device that does not answer has many requests waiting; another one answers as ever.
pub fn a_held_device_delays_no_other(exporter: &dyn Exporter) {
    const WAITING: usize = 24; // more than an exporter has threads to listen
    let held = Arc::new(Held::new(MemoryDevice::new(Bytes::mib(4))));
    let slow = exporter.attach("suite-held", held.clone(), &DISK).expect("attach");
    let device = memory(4);
    let fast = attach(exporter, "suite-quick", &device);
    let readers: Vec<_> = (0..WAITING)
        .map(|number| {
            let opened = open(&*slow);
            thread::spawn(move || match number % 3 {
                0 => opened.write((number * PAGE) as u64, &[number as u8; PAGE]).map(|()| vec![0; PAGE]),
                _ => opened.read((number * PAGE) as u64, PAGE),
            })
        })
        .collect();
    held.wait_for(8, SOON); // as many at least are with the device at once
    let opened = open(&*fast);
    within(SOON, "requests beside a held device", move || {
        for round in 0..50 {
            opened.write(0, &[round; PAGE]).expect("write");
            assert_eq!(opened.read(0, PAGE).expect("read"), [round; PAGE]);
            opened.flush().expect("flush");
        }
    });
    close(fast);
    held.release();
    for reader in readers {
        assert_eq!(reader.join().expect("join").expect("held request"), [0; PAGE]);
    }
    for number in (0..WAITING).step_by(3) {
        assert_eq!(on(&*held, (number * PAGE) as u64, PAGE), [number as u8; PAGE], "write {number}");
    }
    close(slow);
}

/// Eight threads at once, each with its own part of the disk, which it knows.
pub fn eight_threads_agree_with_a_model(exporter: &dyn Exporter) {
    const PART: usize = 2 << 20;
    let device = memory(16);
    let export = attach(exporter, "suite-parallel", &device);
    let opened = open(&*export);
    thread::scope(|scope| {
        for part in 0..8 {
            let opened = &opened;
            scope.spawn(move || {
                let base = (part * PART) as u64;
                let mut model = vec![0; PART];
                let mut random = Xorshift(0x9E37_79B9 + part as u64);
                for step in 0..150 {
                    let pages = PART / PAGE;
                    let page = random.below(pages);
                    let length = (1 + random.below(64)).min(pages - page) * PAGE;
                    let (offset, range) = (base + (page * PAGE) as u64, page * PAGE..page * PAGE + length);
                    match random.below(8) {
                        0..4 => {
                            let bytes = pattern(random.next(), length);
                            opened.write(offset, &bytes).expect("write");
                            model[range].copy_from_slice(&bytes);
                        }
                        4 => {
                            opened.punch(offset, length as u64).expect("discard");
                            model[range].fill(0);
                        }
                        5 if step % 8 == 0 => opened.flush().expect("flush"),
                        _ => {
                            let bytes = opened.read(offset, length).expect("read");
                            assert!(bytes == model[range], "part {part}, step {step}: {length} at {offset}");
                        }
                    }
                }
                assert!(opened.read(base, PART).expect("read") == model, "part {part} at the end");
            });
        }
    });
    close(export);
}

/// After `resized`, who has it open sees the new size, and reads and writes up to there.
pub fn a_grown_device_is_seen_at_once(exporter: &dyn Exporter) {
    let device = Arc::new(Growing::new(MemoryDevice::new(Bytes::mib(8)), Bytes::mib(4)));
    let export = exporter.attach("suite-grows", device.clone(), &DISK).expect("attach");
    let opened = open(&*export);
    opened.write((4 << 20) - PAGE as u64, &[4; PAGE]).expect("write at the end");
    opened.write(4 << 20, &[4; PAGE]).expect_err("nothing beyond the end");
    device.grow(Bytes::mib(8));
    if let Err(why) = export.resizable() {
        eprintln!("skipped: growing a device that is open: {why}");
        assert_eq!(why.kind(), io::ErrorKind::Unsupported);
        assert_eq!(export.resized().expect_err("it cannot be told").kind(), io::ErrorKind::Unsupported);
        assert_eq!(opened.size().expect("size"), 4 << 20, "it is as it was");
        return close(export);
    }
    export.resized().expect("resized");
    assert_eq!(opened.size().expect("size"), 8 << 20, "on an open descriptor");
    assert_eq!(open(&*export).size().expect("size"), 8 << 20, "on a new one");
    opened.write((8 << 20) - PAGE as u64, &[8; PAGE]).expect("write at the new end");
    assert_eq!(opened.read((8 << 20) - PAGE as u64, PAGE).expect("read"), [8; PAGE]);
    assert_eq!(opened.read((4 << 20) - PAGE as u64, PAGE).expect("read"), [4; PAGE], "the old end");
    close(export);
}

/// Nobody writes what is read-only, root included; the device is not even asked.
pub fn a_read_only_export_is_not_written(exporter: &dyn Exporter) {
    for caching in [Caching::Direct, Caching::Shared] {
        let device = Arc::new(Recording::new(MemoryDevice::new(Bytes::mib(1))));
        device.write_at(0, &[5; PAGE]).expect("write to the device");
        device.take();
        let options = ExportOptions { read_only: true, caching };
        let export = exporter.attach("suite-read-only", device.clone(), &options).expect("attach");
        match Opened::new(export.path(), true) {
            Err(error) => assert!(
                matches!(error.kind(), io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied),
                "{error}"
            ),
            Ok(opened) => drop(opened.write(0, &[6; PAGE]).expect_err("read-only")),
        }
        let opened = Opened::new(export.path(), false).expect("open to read");
        opened.punch(0, PAGE as u64).expect_err("a discard is a write");
        assert_eq!(opened.read(0, PAGE).expect("read"), [5; PAGE]);
        drop(opened);
        close(export);
        let steps = device.take();
        assert!(steps.iter().all(|step| *step == Step::Flush), "{steps:?}");
    }
}

/// A name is one file's name, at one time.
pub fn names_are_file_names_and_unique(exporter: &dyn Exporter) {
    let refused = |name: &str| {
        let error = exporter.attach(name, memory(1), &DISK).expect_err(name);
        assert!(matches!(error, AttachError::Name { .. }), "{name:?}: {error}");
    };
    for name in ["", ".", "..", "a/b", "/a", "a/", "nul\0", &"x".repeat(256)] {
        refused(name);
    }
    let export = attach(exporter, "suite-taken", &memory(1));
    refused("suite-taken");
    open(&*export).read(0, PAGE).expect("the first one is as it was");
    close(export);
}

/// A name can be used again after a close, for another device; and one that was looked for in vain can come to be.
pub fn a_closed_name_is_free(exporter: &dyn Exporter) {
    for round in 1..=3 {
        let device = memory(round);
        device.write_at(0, &[round as u8; PAGE]).expect("write to the device");
        let export = attach(exporter, "suite-again", &device);
        let opened = open(&*export);
        assert_eq!(opened.size().expect("size"), round << 20);
        assert_eq!(opened.read(0, PAGE).expect("read"), [round as u8; PAGE]);
        drop(opened);
        let path = export.path().to_owned();
        close(export);
        Opened::new(&path, false).expect_err("closed");
    }
}

/// Whoever opens it as an ordinary file writes into the host's memory, perhaps. What is there is with the device after a
/// flush, and when nobody has it open any more.
pub fn what_the_host_keeps_is_written_back(exporter: &dyn Exporter) {
    let device = memory(4);
    let export = attach(exporter, "suite-buffered", &device);
    let file = File::options().read(true).write(true).open(export.path()).expect("open");
    for round in 0..3_u8 {
        file.write_all_at(&[round + 1; 3 * PAGE], 700 * u64::from(round)).expect("write");
        file.sync_data().expect("sync");
        assert_eq!(on(&*device, 700 * u64::from(round), 3 * PAGE), [round + 1; 3 * PAGE], "after a flush");
    }
    file.write_all_at(&[9; PAGE], 1 << 20).expect("write");
    drop(file);
    assert_eq!(on(&*device, 1 << 20, PAGE), [9; PAGE], "after the last close");
    close(export);
}

/// Who still has it open gets errors, and the device is let go.
pub fn open_descriptors_do_not_outlive_a_close(exporter: &dyn Exporter) {
    let device = memory(1);
    let export = attach(exporter, "suite-open", &device);
    let opened = open(&*export);
    opened.write(0, &[1; PAGE]).expect("write");
    within(SOON, "a close with an open descriptor", move || close(export));
    assert_eq!(Arc::strong_count(&device), 1, "the device is no longer used");
    within(SOON, "requests after a close", move || {
        opened.read(0, PAGE).expect_err("read");
        opened.write(0, &[2; PAGE]).expect_err("write");
        opened.punch(0, PAGE as u64).expect_err("discard");
    });
    assert_eq!(on(&*device, 0, PAGE), [1; PAGE]);
}

/// A close waits until its own device has answered, and for nothing else.
pub fn a_close_waits_for_its_own_requests_only(exporter: &dyn Exporter) {
    let held = Arc::new(Held::new(MemoryDevice::new(Bytes::mib(1))));
    held.inner().write_at(0, &[9; PAGE]).expect("write to the device");
    let slow = exporter.attach("suite-waits", held.clone(), &DISK).expect("attach");
    let device = memory(1);
    let other = attach(exporter, "suite-does-not", &device);
    let opened = open(&*slow);
    let reader = thread::spawn(move || opened.read(0, PAGE));
    held.wait_for(1, SOON);

    within(SOON, "a close beside a held device", move || close(other));
    assert_eq!(Arc::strong_count(&device), 1, "the device is no longer used");

    let order = Arc::new(Mutex::new(Vec::new()));
    let say = |order: &Mutex<Vec<_>>, what| order.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    let closer = {
        let order = Arc::clone(&order);
        thread::spawn(move || {
            close(slow);
            say(&order, "closed");
        })
    };
    say(&order, "released");
    held.release();
    assert_eq!(reader.join().expect("join").expect("the request under way is answered"), [9; PAGE]);
    closer.join().expect("join");
    assert_eq!(*order.lock().unwrap_or_else(PoisonError::into_inner), ["released", "closed"]);
    assert_eq!(Arc::strong_count(&held), 1, "the device is no longer used");
}

/// Each file is its own device.
pub fn many_exports_do_not_mix(exporter: &dyn Exporter) {
    let exports: Vec<_> = (0..12_u8)
        .map(|number| {
            let device = memory(1);
            device.write_at(0, &[number; PAGE]).expect("write to the device");
            (attach(exporter, &format!("suite-many-{number}"), &device), device)
        })
        .collect();
    for (number, (export, device)) in (0..).zip(&exports) {
        let opened = open(&**export);
        assert_eq!(opened.read(0, PAGE).expect("read"), [number; PAGE]);
        opened.write(PAGE as u64, &[number; PAGE]).expect("write");
        assert_eq!(on(&**device, PAGE as u64, PAGE), [number; PAGE]);
    }
    exports.into_iter().for_each(|(export, _)| close(export));
}

/// The record can be kept, and names the path and the way.
pub fn a_record_says_where_it_is(exporter: &dyn Exporter) {
    let export = attach(exporter, "suite-record", &memory(1));
    let record = export.record();
    assert_eq!((record.kind, record.path.as_path()), (exporter.kind(), export.path()));
    assert_eq!(record.ublk_id.is_some(), record.kind == crate::ExportKind::Ublk);
    close(export);
}

/// What the successor of a process that died does with the record of an export: the same path serves `device` again, which
/// holds `bytes` at its start. For exporter's own tests, which know how to die.
pub fn serves_again(
    exporter: &dyn Exporter,
    name: &str,
    record: &crate::ExportRecord,
    device: Arc<dyn BlockDevice>,
    bytes: &[u8],
) -> Box<dyn Export> {
    let export = exporter.recover(name, record, device, &DISK).expect("recover");
    assert_eq!(export.path(), record.path);
    let opened = open(&*export);
    assert!(opened.read(0, bytes.len()).expect("read") == bytes, "the device as it was left");
    let bytes = pattern(3, PAGE);
    opened.write(0, &bytes).expect("write");
    opened.flush().expect("flush");
    assert!(opened.read(0, PAGE).expect("read") == bytes, "and it can be written");
    export
}

fn memory(mib: u64) -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(Bytes::mib(mib)))
}

fn attach(exporter: &dyn Exporter, name: &str, device: &Arc<MemoryDevice>) -> Box<dyn Export> {
    exporter.attach(name, device.clone(), &DISK).unwrap_or_else(|error| panic!("attach {name}: {error}"))
}

fn open(export: &dyn Export) -> Opened {
    Opened::new(export.path(), true).unwrap_or_else(|error| panic!("open {}: {error}", export.path().display()))
}

fn close(export: Box<dyn Export>) {
    let path = export.path().to_owned();
    export.close().unwrap_or_else(|error| panic!("close {}: {error}", path.display()));
}

fn is_io_error(what: &str, result: io::Result<()>) {
    let error = result.expect_err(what);
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{what}: {error}");
}

fn on(device: &dyn BlockDevice, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    device.read_at(offset, &mut bytes).expect("read the device");
    bytes
}

/// Bytes that differ with the seed and along the way.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Xorshift(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    (0..length.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(length).collect()
}

/// Marsaglia's xorshift64: repeatable, and no dependency.
struct Xorshift(u64);

impl Xorshift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
