//! What is special about devices of the ublk driver, and the suite that all exporters pass.

#![forbid(unsafe_code)]

mod support;

use std::fs;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::thread;

use aenv_block_device::BlockDevice;
use aenv_block_device::test_support::MemoryDevice;
use aenv_block_export::test_support::{Held, Opened, Recording, Step, conformance, within};
use aenv_block_export::{AttachError, Export, ExportKind, ExportRecord, Exporter, UblkExporter};
use aenv_model::Bytes;
use support::{DIRECT, SHARED, SOON, Ublk};

fn memory() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(Bytes::mib(4)))
}

fn says(export: &dyn Export, what: &str) -> String {
    let name = export.path().file_name().expect("a node").to_str().expect("plain");
    fs::read_to_string(format!("/sys/class/block/{name}/{what}")).expect("sysfs").trim().to_owned()
}

#[test]
fn ublk_passes_the_conformance_suite() {
    let Some(ublk) = Ublk::new() else { return };
    conformance::suite(&*ublk);
}

#[test]
fn the_kernel_knows_what_the_device_can_do() {
    let Some(ublk) = Ublk::new() else { return };
    let export = ublk.attach("disk", memory(), &DIRECT).expect("attach");
    let found = fs::metadata(export.path()).expect("the node");
    assert!(found.file_type().is_block_device());
    assert_eq!((found.uid(), found.mode() & 0o777), (0, 0o600), "root's alone");
    for (what, value) in [
        ("queue/logical_block_size", "512"),
        ("queue/physical_block_size", "4096"),
        ("queue/max_hw_sectors_kb", "1024"),
        ("queue/discard_granularity", "4096"),
        ("queue/write_cache", "write back"),
        ("queue/rotational", "0"),
        ("queue/scheduler", "[none]"),
        ("queue/nr_requests", "127"),
        ("ro", "0"),
        ("size", "8192"),
    ] {
        let said = says(&*export, what);
        assert!(said.split(' ').any(|word| word == value) || said == value, "{what}: {said}");
    }
    export.close().expect("close");
    let export = ublk.attach("image", memory(), &SHARED).expect("attach");
    assert_eq!(says(&*export, "ro"), "1");
    export.close().expect("close");
}

#[test]
fn what_a_guest_writes_as_a_partition_table_is_no_table_of_the_host() {
    let Some(ublk) = Ublk::new() else { return };
    let device = memory();
    let mut table = [0; 512];
    table[446..462].copy_from_slice(&[0, 0, 2, 0, 0x83, 0, 8, 0, 8, 0, 0, 0, 0, 8, 0, 0]); // sectors 8 to 2055, Linux
    table[510..].copy_from_slice(&[0x55, 0xAA]);
    device.write_at(0, &table).expect("write");
    let export = ublk.attach("disk", device, &DIRECT).expect("attach");
    let name = export.path().file_name().expect("a node").to_str().expect("plain").to_owned();
    let partition = |entry: fs::DirEntry| entry.file_name().to_string_lossy().starts_with(&format!("{name}p"));
    let found = || fs::read_dir("/sys/class/block").expect("sysfs").map(|entry| entry.expect("entry")).any(partition);
    assert!(!found(), "when it appears");
    drop(Opened::new(export.path(), true).expect("open"));
    assert!(!found(), "when it was opened");
    export.close().expect("close");
}

#[test]
fn a_device_that_waits_for_its_network_appears_at_once() {
    let Some(ublk) = Ublk::new() else { return };
    let held = Arc::new(Held::new(MemoryDevice::new(Bytes::mib(4))));
    let (ublk, export) = {
        let held = held.clone();
        within(SOON, "the appearance of a held device", move || {
            let export = ublk.attach("held", held, &DIRECT).expect("attach");
            (ublk, export)
        })
    };
    held.release();
    export.close().expect("close");
    drop(ublk);
}

#[test]
fn sectors_of_512_bytes_are_read_and_written() {
    let Some(ublk) = Ublk::new() else { return };
    let device = Arc::new(Recording::new(MemoryDevice::new(Bytes(3 * 512))));
    let export = ublk.attach("small", device.clone(), &DIRECT).expect("attach");
    let opened = Opened::new(export.path(), true).expect("open");
    assert_eq!(opened.size().expect("size"), 1536);
    opened.write(512, &[7; 512]).expect("write");
    assert_eq!(device.take(), [Step::Write(512, 512)]);
    assert_eq!(opened.read(0, 1536).expect("read"), [vec![0; 512], vec![7; 512], vec![0; 512]].concat());
    drop(opened);
    export.close().expect("close");
    let error = ublk.attach("odd", Arc::new(MemoryDevice::new(Bytes(1000))), &DIRECT).expect_err("no whole sectors");
    assert!(matches!(error, AttachError::Kernel { .. }), "{error}");
}

#[test]
fn an_export_that_is_dropped_fails_its_readers_and_is_deleted() {
    let Some(ublk) = Ublk::new() else { return };
    let export = ublk.attach("dropped", memory(), &DIRECT).expect("attach");
    let path = export.path().to_owned();
    let opened = Opened::new(&path, true).expect("open");
    drop(export);
    within(SOON, "a request after the drop", move || opened.read(0, 4096).expect_err("nobody serves"));
    within(SOON, "the end of the device", move || {
        while path.exists() {
            thread::yield_now();
        }
    });
    ublk.attach("dropped", memory(), &DIRECT).expect("the name is free").close().expect("close");
}

#[test]
fn only_devices_of_our_tag_are_swept_or_taken_over() {
    let (Some(ours), Some(theirs)) = (Ublk::new(), Ublk::new()) else { return };
    let foreign = theirs.attach("disk", memory(), &DIRECT).expect("attach");
    let record = foreign.record();
    assert_eq!(ours.sweep(&[]).expect("sweep"), 0);
    let export = ours.recover("disk", &record, memory(), &DIRECT).expect("a device of our own");
    assert_ne!(export.path(), record.path);
    Opened::new(&record.path, true).expect("open").read(0, 4096).expect("theirs is served");

    // Left, as by a process that ended.
    let kept = ours.attach("kept", memory(), &DIRECT).expect("attach");
    let left = export.disown().expect("disown");
    let kept = kept.disown().expect("disown");
    assert_eq!(ours.sweep(&[kept.ublk_id.expect("a number")]).expect("sweep"), 1);
    assert!(!left.path.exists() && kept.path.exists());
    assert_eq!(ours.sweep(&[]).expect("sweep"), 1);
    foreign.close().expect("close");
}

#[test]
fn a_record_of_a_device_that_is_no_more_leads_to_another() {
    let Some(ublk) = Ublk::new() else { return };
    let record = ExportRecord { kind: ExportKind::Ublk, path: "/dev/ublkb1000000".into(), ublk_id: Some(1_000_000) };
    let export = ublk.recover("disk", &record, memory(), &DIRECT).expect("recover");
    assert_eq!(Opened::new(export.path(), true).expect("open").read(0, 4096).expect("read"), [0; 4096]);
    export.close().expect("close");
    let record = ExportRecord { kind: ExportKind::Fuse, ublk_id: None, ..record };
    let error = ublk.recover("disk", &record, memory(), &DIRECT).expect_err("a file of FUSE");
    assert!(matches!(error, AttachError::Name { .. }), "{error}");
}

#[test]
fn many_devices_come_and_go_at_once() {
    let Some(ublk) = Ublk::new() else { return };
    thread::scope(|scope| {
        for number in 0..8_u8 {
            let ublk: &UblkExporter = &ublk;
            scope.spawn(move || {
                for round in 0..4 {
                    let export = ublk.attach(&format!("disk-{number}"), memory(), &DIRECT).expect("attach");
                    let opened = Opened::new(export.path(), true).expect("open");
                    opened.write(0, &[number + round; 4096]).expect("write");
                    assert_eq!(opened.read(0, 4096).expect("read"), [number + round; 4096]);
                    drop(opened);
                    export.close().expect("close");
                }
            });
        }
    });
}

#[test]
fn a_driver_that_is_not_there_is_told() {
    if UblkExporter::is_there() {
        return eprintln!("skipped: there is a ublk driver here");
    }
    let error = UblkExporter::open(NonZeroU64::MIN).expect_err("no driver");
    assert_eq!(error.to_string(), "open /dev/ublk-control");
}
