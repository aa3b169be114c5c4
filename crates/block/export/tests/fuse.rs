//! FUSE mounts, with the kernel on the other side.

#![forbid(unsafe_code)]

mod support;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread;

use aenv_block_device::BlockDevice;
use aenv_block_device::test_support::{Counting, MemoryDevice};
use aenv_block_export::test_support::{Growing, Held, Opened, conformance, within};
use aenv_block_export::{ExportKind, ExportRecord, Exporter, FuseExporter, FuseOptions, MountError};
use aenv_model::Bytes;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use support::{DIRECT, Mount, SHARED, SHARED_WRITABLE, SOON};

#[test]
fn a_fuse_exporter_passes_the_suite() {
    let Some(mount) = Mount::new() else { return };
    conformance::suite(&*mount);
    mount.close();
}

#[test]
fn one_reader_is_enough_for_the_suite() {
    let Some(mount) = Mount::with(FuseOptions { threads: 1 }) else { return };
    conformance::suite(&*mount);
    mount.close();
}

#[test]
fn a_request_is_a_mebibyte_at_most_and_no_less_where_it_can_be() {
    let Some(mount) = Mount::new() else { return };
    let device = Arc::new(Counting::new(MemoryDevice::new(Bytes::mib(16))));
    let export = mount.attach("disk", device.clone(), &DIRECT).expect("attach");
    let opened = Opened::new(export.path(), true).expect("open");
    opened.read(0, 16 << 20).expect("read");
    opened.write(0, &[1; 16 << 20]).expect("write");
    let counts = device.counts();
    assert_eq!((counts.reads, counts.writes), (16, 16));
    export.close().expect("close");
    mount.close();
}

#[test]
fn files_say_who_may_what() {
    let Some(mount) = Mount::new() else { return };
    let disk = mount.attach("disk", memory(1), &DIRECT).expect("attach");
    let image = mount.attach("image", memory(3), &SHARED).expect("attach");
    let (a, b) = (disk.path().metadata().expect("stat"), image.path().metadata().expect("stat"));
    assert!(a.is_file() && b.is_file());
    assert_eq!((a.permissions().mode() & 0o7777, b.permissions().mode() & 0o7777), (0o600, 0o400));
    assert_eq!((a.uid(), a.gid(), a.len(), b.len()), (0, 0, 1 << 20, 3 << 20));
    assert_ne!(a.ino(), b.ino());
    let names = || -> Vec<_> {
        let entries = fs::read_dir(mount.dir()).expect("list");
        entries.map(|entry| entry.expect("entry").file_name().into_string().expect("text")).collect()
    };
    assert_eq!(names(), ["disk", "image"]);
    disk.close().expect("close");
    assert_eq!(names(), ["image"]);
    image.close().expect("close");
    mount.close();
}

#[test]
fn a_directory_of_thousands_is_listed_whole() {
    let Some(mount) = Mount::new() else { return };
    let device = memory(1);
    let exports: Vec<_> = (0..3000)
        .map(|number| mount.attach(&format!("{number:0>200}"), device.clone(), &DIRECT).expect("attach"))
        .collect();
    assert_eq!(fs::read_dir(mount.dir()).expect("list").count(), 3000);
    exports.into_iter().for_each(|export| export.close().expect("close"));
    assert_eq!(fs::read_dir(mount.dir()).expect("list").count(), 0);
    mount.close();
}

#[test]
fn the_directory_and_the_files_sizes_are_the_servers_business() {
    let Some(mount) = Mount::new() else { return };
    let export = mount.attach("disk", memory(1), &DIRECT).expect("attach");
    let path = export.path();
    let refused = |what: &str, result: io::Result<()>| {
        let error = result.expect_err(what);
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{what}: {error}");
    };
    refused("create", File::create(mount.dir().join("new")).map(drop));
    refused("mkdir", fs::create_dir(mount.dir().join("new")));
    refused("unlink", fs::remove_file(path));
    refused("rename", fs::rename(path, mount.dir().join("new")));
    refused("link", fs::hard_link(path, mount.dir().join("new")));
    refused("symlink", std::os::unix::fs::symlink(path, mount.dir().join("new")));
    refused("chmod", fs::set_permissions(path, fs::Permissions::from_mode(0o666)));
    refused("truncate on open", File::create(path).map(drop));
    let file = File::options().write(true).open(path).expect("open");
    refused("truncate", file.set_len(4096));
    refused("extend", file.set_len(2 << 20));
    assert_eq!(file.metadata().expect("stat").len(), 1 << 20);
    export.close().expect("close");
    mount.close();
}

#[test]
fn what_lies_beyond_the_end_is_not_there() {
    let Some(mount) = Mount::new() else { return };
    for (name, options) in [("direct", DIRECT), ("shared", SHARED_WRITABLE)] {
        let device = memory(1);
        let export = mount.attach(name, device.clone(), &options).expect("attach");
        let file = File::options().read(true).write(true).open(export.path()).expect("open");
        let end = 1 << 20;
        assert_eq!(file.read_at(&mut [0; 64], end).expect("read at the end"), 0);
        assert_eq!(file.read_at(&mut [0; 64], end - 8).expect("read over the end"), 8);
        assert_eq!(file.write_at(&[3; 64], end - 8).expect("write over the end"), 8);
        assert_eq!(file.write_at(&[3; 64], end).expect_err("write at the end").kind(), io::ErrorKind::StorageFull);
        assert_eq!(file.metadata().expect("stat").len(), end);
        let mut last = [0; 8];
        device.read_at(end - 8, &mut last).expect("device");
        assert_eq!(last, [3; 8]);
        export.close().expect("close");
    }
    mount.close();
}

#[test]
fn fallocate_punches_and_zeroes_and_gives_no_space() {
    let Some(mount) = Mount::new() else { return };
    for (name, options) in [("direct", DIRECT), ("shared", SHARED_WRITABLE)] {
        let device = Arc::new(Counting::new(MemoryDevice::new(Bytes::mib(1))));
        let export = mount.attach(name, device.clone(), &options).expect("attach");
        let file = File::options().read(true).write(true).open(export.path()).expect("open");
        let (keep, punch, zero) = (FallocateFlags::KEEP_SIZE, FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE);
        let mut discards = 0;
        for flags in [punch | keep, zero | keep, zero] {
            file.write_all_at(&[1; 8192], 0).expect("write");
            fallocate(&file, flags, 100, 5000).unwrap_or_else(|error| panic!("{flags:?}: {error}"));
            let mut read = [9; 8192];
            file.read_exact_at(&mut read, 0).expect("read");
            assert!(read[..100] == [1; 100] && read[100..5100] == [0; 5000] && read[5100..] == [1; 3092], "{flags:?}");
            discards += 1;
            assert_eq!(device.counts().discards, discards);
        }
        fallocate(&file, punch | keep, (1 << 20) - 4096, 1 << 20).expect("over the end: up to it");
        assert_eq!(fallocate(&file, zero, (1 << 20) - 4096, 1 << 20), Err(Errno::NOSPC), "does not grow");
        assert_eq!(fallocate(&file, keep, 0, 4096), Err(Errno::OPNOTSUPP));
        assert_eq!(fallocate(&file, FallocateFlags::empty(), 0, 4096), Err(Errno::OPNOTSUPP));
        assert_eq!(fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096), Err(Errno::OPNOTSUPP));
        export.close().expect("close");
    }
    mount.close();
}

#[test]
fn what_was_looked_for_in_vain_is_found_once_it_is_there() {
    let Some(mount) = Mount::new() else { return };
    for round in 0..20 {
        let path = mount.dir().join(format!("disk-{}", round % 2));
        let missing = File::open(&path).expect_err("not yet");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound, "{missing}");
        let export = mount.attach(&format!("disk-{}", round % 2), memory(1 + round % 3), &DIRECT).expect("attach");
        assert_eq!(path.metadata().expect("stat").len(), (1 + round % 3) << 20, "not that of another round");
        File::open(&path).expect("open");
        export.close().expect("close");
    }
    mount.close();
}

#[test]
fn a_device_that_panics_is_an_io_error_and_others_go_on() {
    struct Panics;
    impl BlockDevice for Panics {
        fn size(&self) -> Bytes {
            Bytes::mib(1)
        }
        fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            panic!("on purpose")
        }
        fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
            panic!("on purpose")
        }
        fn discard(&self, _: u64, _: u64) -> io::Result<()> {
            panic!("on purpose")
        }
        fn flush(&self) -> io::Result<()> {
            panic!("on purpose")
        }
    }
    let Some(mount) = Mount::new() else { return };
    let bad = mount.attach("bad", Arc::new(Panics), &DIRECT).expect("attach");
    let good = mount.attach("good", memory(1), &DIRECT).expect("attach");
    let opened = Opened::new(bad.path(), true).expect("open");
    let is_eio = |error: io::Error| assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()), "{error}");
    for _ in 0..20 {
        is_eio(opened.read(0, 4096).expect_err("read"));
        is_eio(opened.write(0, &[0; 4096]).expect_err("write"));
        is_eio(opened.flush().expect_err("flush"));
    }
    Opened::new(good.path(), true).expect("open").read(0, 4096).expect("read");
    bad.close().expect("close");
    good.close().expect("close");
    mount.close();
}

#[test]
fn a_shared_file_that_grew_is_read_up_to_its_new_end() {
    let Some(mount) = Mount::new() else { return };
    let memory = MemoryDevice::new(Bytes::mib(1));
    memory.write_at(0, &[7; 1 << 20]).expect("write to the device");
    let device = Arc::new(Growing::new(memory, Bytes(512 * 3)));
    let export = mount.attach("image", device.clone(), &SHARED).expect("attach");
    let file = File::open(export.path()).expect("open");
    let mut all = vec![0; 8192];
    assert_eq!(file.read_at(&mut all, 0).expect("read"), 512 * 3);
    device.grow(Bytes(8192));
    export.resized().expect("resized");
    assert_eq!(file.metadata().expect("stat").len(), 8192);
    assert_eq!(file.read_at(&mut all, 0).expect("read"), 8192);
    assert!(all == [7; 8192], "no zeros where the end was");
    export.close().expect("close");
    mount.close();
}

#[test]
fn what_is_written_to_a_shared_file_is_on_the_device_at_once() {
    let Some(mount) = Mount::new() else { return };
    let device = memory(1);
    let export = mount.attach("image", device.clone(), &SHARED_WRITABLE).expect("attach");
    let file = File::options().read(true).write(true).open(export.path()).expect("open");
    file.read_exact_at(&mut [0; 8192], 0).expect("read, so that it is cached");
    file.write_all_at(b"through", 4090).expect("write");
    let mut there = [0; 7];
    device.read_at(4090, &mut there).expect("device");
    assert_eq!(&there, b"through");
    file.read_exact_at(&mut there, 4090).expect("read");
    assert_eq!(&there, b"through");
    export.close().expect("close");
    mount.close();
}

#[test]
fn a_mount_that_is_served_is_left_alone() {
    let Some(mount) = Mount::new() else { return };
    let export = mount.attach("disk", memory(1), &DIRECT).expect("attach");
    let error = FuseExporter::mount(mount.dir(), FuseOptions::default()).expect_err("served");
    assert!(matches!(error, MountError::Busy { .. }), "{error}");
    Opened::new(export.path(), true).expect("open").read(0, 4096).expect("read");
    export.close().expect("close");
    mount.close();
}

#[test]
fn several_mounts_in_one_process_are_independent() {
    let (Some(one), Some(two)) = (Mount::new(), Mount::new()) else { return };
    let (a, b) = (memory(1), memory(1));
    a.write_at(0, &[1; 4096]).expect("write to the device");
    b.write_at(0, &[2; 4096]).expect("write to the device");
    let export = one.attach("disk", a, &DIRECT).expect("attach");
    let other = two.attach("disk", b, &DIRECT).expect("attach");
    assert_eq!(Opened::new(export.path(), true).expect("open").read(0, 4096).expect("read"), [1; 4096]);
    export.close().expect("close");
    one.close();
    assert_eq!(Opened::new(other.path(), true).expect("open").read(0, 4096).expect("read"), [2; 4096]);
    other.close().expect("close");
    two.close();
}

#[test]
fn unmounting_closes_what_is_exported_whoever_has_it_open() {
    let Some(mount) = Mount::new() else { return };
    let device = memory(1);
    let export = mount.attach("disk", device.clone(), &DIRECT).expect("attach");
    let opened = Opened::new(export.path(), true).expect("open");
    let directory = File::open(mount.dir()).expect("open the directory");
    within(SOON, "unmounting a busy mount", move || mount.close());
    assert_eq!(Arc::strong_count(&device), 1, "the device is no longer used");
    within(SOON, "a request after unmounting", move || opened.read(0, 4096).expect_err("unmounted"));
    within(SOON, "a close after unmounting", move || export.close().expect("nothing left to close"));
    drop(directory);
}

#[test]
fn a_mount_that_is_dropped_is_unmounted() {
    let Some(mount) = Mount::new() else { return };
    let device = memory(1);
    let export = mount.attach("disk", device.clone(), &DIRECT).expect("attach");
    drop(export);
    assert_eq!(Arc::strong_count(&device), 1, "the device is no longer used");
    File::open(mount.dir().join("disk")).expect_err("dropped");
    let dir = mount.dir().to_owned();
    drop(mount);
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    assert!(!mounts.contains(dir.to_str().expect("a plain path")), "{mounts}");
}

#[test]
fn a_mount_that_somebody_unmounted_is_closed_all_the_same() {
    let Some(mount) = Mount::new() else { return };
    let export = mount.attach("disk", memory(1), &DIRECT).expect("attach");
    rustix::mount::unmount(mount.dir(), rustix::mount::UnmountFlags::DETACH).expect("unmount");
    within(SOON, "closing", move || {
        export.close().expect("close");
        mount.close();
    });
}

#[test]
fn a_record_of_another_place_is_not_recovered() {
    let Some(mount) = Mount::new() else { return };
    let record = ExportRecord { kind: ExportKind::Fuse, path: "/elsewhere/disk".into(), ublk_id: None };
    mount.recover("disk", &record, memory(1), &DIRECT).expect_err("elsewhere");
    mount.close();
}

#[test]
fn hundreds_of_requests_wait_for_a_device_and_all_are_answered() {
    const WAITING: usize = 200;
    let Some(mount) = Mount::new() else { return };
    let held = Arc::new(Held::new(MemoryDevice::new(Bytes::mib(1))));
    let export = mount.attach("held", held.clone(), &DIRECT).expect("attach");
    let quick = mount.attach("quick", memory(1), &DIRECT).expect("attach");
    thread::scope(|scope| {
        for number in 0..WAITING {
            let opened = Opened::new(export.path(), true).expect("open");
            scope.spawn(move || opened.write((number * 4096) as u64, &[number as u8; 4096]).expect("write"));
        }
        held.wait_for(32, SOON);
        let opened = Opened::new(quick.path(), true).expect("open");
        within(SOON, "a request beside", move || opened.read(0, 4096).expect("read"));
        held.release();
    });
    let mut byte = [0];
    for number in 0..WAITING {
        held.read_at((number * 4096) as u64, &mut byte).expect("device");
        assert_eq!(byte, [number as u8]);
    }
    export.close().expect("close");
    quick.close().expect("close");
    mount.close();
}

/// Set for the helper that is an ordinary user; it does nothing when run as a test among others.
const ORDINARY: &str = "AENV_TEST_FUSE_ORDINARY_USER";

#[test]
fn ordinary_user() {
    let Some(dir) = std::env::var_os(ORDINARY).map(PathBuf::from) else { return };
    let exporter = FuseExporter::mount(&dir.join("mnt"), FuseOptions::default()).expect("mount");
    conformance::suite(&exporter);
    let export = exporter.attach("disk", memory(1), &DIRECT).expect("attach");
    let opened = Opened::new(export.path(), true).expect("open");
    assert_eq!(export.path().metadata().expect("stat").uid(), rustix::process::geteuid().as_raw());
    within(SOON, "unmounting a busy mount", move || {
        // Without /sys/fs/fuse/connections, whoever has a file open keeps the connection.
        let aborts = fs::read_dir("/sys/fs/fuse/connections").is_ok_and(|mut entries| entries.next().is_some());
        let opened = aborts.then_some(opened);
        exporter.close().expect("unmount");
        drop(opened);
    });
    drop(export);
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    assert!(!mounts.contains(dir.to_str().expect("a plain path")), "{mounts}");
    println!("\nall of it");
}

#[test]
fn an_ordinary_user_passes_the_suite_by_fusermount3() {
    if !support::can_mount() {
        return;
    }
    let there = |program: &str| Command::new(program).arg("--version").output().is_ok_and(|said| said.status.success());
    if !there("fusermount3") || !there("setpriv") {
        return eprintln!("skipped: needs fusermount3 and setpriv");
    }
    if fs::metadata("/dev/fuse").expect("looked at before").permissions().mode() & 0o6 != 0o6 {
        return eprintln!("skipped: ordinary users may not open /dev/fuse here");
    }
    let dir = tempfile::tempdir().expect("temp dir");
    std::os::unix::fs::chown(dir.path(), Some(65534), Some(65534)).expect("chown");
    // The program itself may lie where ordinary users do not get.
    let program = dir.path().join("test");
    fs::copy(std::env::current_exe().expect("this program"), &program).expect("copy");
    let said = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&program)
        .args(["--exact", "ordinary_user", "--nocapture"])
        .env(ORDINARY, dir.path())
        .current_dir(dir.path())
        .output()
        .expect("setpriv");
    let text = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    let _ = rustix::mount::unmount(dir.path().join("mnt"), rustix::mount::UnmountFlags::DETACH); // after a failure
    assert!(said.status.success() && text.contains("all of it"), "{}: {text}", said.status);
}

fn memory(mib: u64) -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(Bytes::mib(mib)))
}
