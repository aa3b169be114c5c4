//! Files of a FUSE mount as disks: under loop devices with file systems, and under QEMU's block layer.

#![forbid(unsafe_code)]

mod support;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_block_device::test_support::{Counting, MemoryDevice};
use aenv_block_device::{BlockDevice, FileDevice};
use aenv_block_export::Exporter;
use aenv_block_export::test_support::{Growing, Opened, Recording, Step};
use aenv_model::Bytes;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use support::{DIRECT, Mount, SHARED_WRITABLE, SOON};

const SIZE: Bytes = Bytes::mib(64);

#[test]
fn a_file_system_on_a_loop_device_on_a_file_keeps_its_files() {
    let Some(mount) = Mount::new() else { return };
    for (name, options, how) in [
        ("buffered", DIRECT, &["--direct-io=off"][..]),
        ("direct", DIRECT, &["--direct-io=on"]),
        ("direct-4k", DIRECT, &["--direct-io=on", "--sector-size=4096"]),
        ("shared", SHARED_WRITABLE, &["--direct-io=off"]),
    ] {
        let device = Arc::new(Counting::new(MemoryDevice::new(SIZE)));
        let export = mount.attach(name, device.clone(), &options).expect("attach");
        let Some(disk) = Loop::new(export.path(), how) else { return };
        assert_eq!(disk.says("loop/dio"), if how[0].ends_with("on") { "1" } else { "0" }, "{name}");
        assert_eq!(disk.says("queue/logical_block_size"), if how.len() > 1 { "4096" } else { "512" }, "{name}");
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&disk.0));
        assert!(device.counts().discards > 0, "{name}: mkfs discards");
        let files = tree();
        let dir = mount.scratch().join(name);
        fs::create_dir(&dir).expect("mkdir");

        let mounted = Mounted::new(&disk.0, &dir);
        for (path, bytes) in &files {
            let path = dir.join(path);
            fs::create_dir_all(path.parent().expect("in a directory")).expect("mkdir");
            fs::write(path, bytes).expect("write");
        }
        File::open(dir.join(&files[0].0)).expect("open").sync_all().expect("fsync");
        assert!(device.counts().flushes > 0, "{name}: fsync reaches the device");
        drop(mounted);
        drop(disk);

        // What the device holds is the file system: seen through another loop device, and by fsck.
        let Some(disk) = Loop::new(export.path(), &["--read-only"]) else { return };
        run(Command::new("e2fsck").args(["-f", "-n"]).arg(&disk.0));
        drop(disk);
        let Some(disk) = Loop::new(export.path(), how) else { return };
        let mounted = Mounted::new(&disk.0, &dir);
        for (path, bytes) in &files {
            assert!(fs::read(dir.join(path)).expect("read") == *bytes, "{name}: {}", path.display());
        }
        // Freed space is discarded down to the device.
        let discards = device.counts().discards;
        for (path, _) in &files {
            fs::remove_file(dir.join(path)).expect("remove");
        }
        run(Command::new("fstrim").arg(&dir));
        assert!(device.counts().discards > discards, "{name}: fstrim reaches the device");
        drop(mounted);
        drop(disk);
        export.close().expect("close");
    }
    mount.close();
}

#[test]
fn a_loop_device_grows_with_its_file() {
    let Some(mount) = Mount::new() else { return };
    let device = Arc::new(Growing::new(MemoryDevice::new(SIZE), Bytes::mib(32)));
    let export = mount.attach("disk", device.clone(), &DIRECT).expect("attach");
    let Some(disk) = Loop::new(export.path(), &["--direct-io=on"]) else { return };
    run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&disk.0));
    device.grow(SIZE);
    export.resized().expect("resized");
    run(Command::new("losetup").arg("--set-capacity").arg(&disk.0));
    assert_eq!(Opened::new(&disk.0, false).expect("open").size().expect("size"), SIZE.get());
    run(Command::new("e2fsck").args(["-f", "-y"]).arg(&disk.0));
    run(Command::new("resize2fs").arg(&disk.0));
    let dir = mount.scratch().join("mounted");
    fs::create_dir(&dir).expect("mkdir");
    let mounted = Mounted::new(&disk.0, &dir);
    fs::write(dir.join("large"), vec![7; 40 << 20]).expect("more than there was room for");
    drop(mounted);
    run(Command::new("e2fsck").args(["-f", "-n"]).arg(&disk.0));
    drop(disk);
    export.close().expect("close");
    mount.close();
}

#[test]
fn qemus_file_driver_reads_writes_flushes_and_discards() {
    let Some(mount) = Mount::new() else { return };
    for aio in ["threads", "io_uring"] {
        for direct in ["on", "off"] {
            let name = format!("{aio}-{direct}");
            let device = Arc::new(Recording::new(MemoryDevice::new(SIZE)));
            let export = mount.attach(&name, device.clone(), &DIRECT).expect("attach");
            let options = format!(
                "driver=raw,discard=unmap,file.driver=file,file.filename={},file.aio={aio},file.discard=unmap,file.cache.direct={direct}",
                export.path().display()
            );
            let commands = [
                "write -P 0x11 0 4M",
                "write -P 0x22 5M 64k",
                "flush",
                "discard 1M 512k",
                "read -P 0x11 0 1M",
                "read -P 0 1M 512k",
                "read -P 0x11 1536k 2560k",
                "read -P 0x22 5M 64k",
                "write -z 5M 32k",
                "read -P 0 5M 32k",
                "read -P 0x22 5152k 32k",
                "aio_write -P 0x33 8M 1M",
                "aio_write -P 0x44 9M 1M",
                "aio_flush",
                "read -P 0x33 8M 1M",
                "read -P 0x44 9M 1M",
                "length",
            ];
            let mut qemu = Command::new("qemu-io");
            qemu.args(["--image-opts", &options]);
            for command in commands {
                qemu.args(["-c", command]);
            }
            let Some(said) = try_run(&mut qemu) else { return };
            let said = String::from_utf8_lossy(&said.stdout).into_owned();
            assert!(!said.contains("verification failed") && !said.contains("failed:"), "{name}: {said}");
            assert!(said.contains("64 MiB"), "{name}: {said}");
            let steps = device.take();
            let flush = steps.iter().position(|step| *step == Step::Flush).expect("a flush");
            assert!(steps[..flush].iter().all(|step| matches!(step, Step::Write(..))), "{name}: {steps:?}");
            assert!(steps.contains(&Step::Discard(1 << 20, 512 << 10)), "{name}: {steps:?}");
            let mut bytes = [0; 4];
            device.read_at(9 << 20, &mut bytes).expect("device");
            assert_eq!(bytes, [0x44; 4], "{name}");
            export.close().expect("close");
        }
    }
    mount.close();
}

#[test]
fn qemu_copies_images_in_and_out() {
    let Some(mount) = Mount::new() else { return };
    let source = mount.scratch().join("source");
    let plain = FileDevice::create(&source, SIZE).expect("create");
    for part in 0..16_u8 {
        plain.write_at(u64::from(part) * (4 << 20) + 12345, &vec![part + 1; 1 << 20]).expect("write");
    }
    plain.flush().expect("flush");
    let device = Arc::new(Counting::new(MemoryDevice::new(SIZE)));
    let export = mount.attach("disk", device.clone(), &DIRECT).expect("attach");
    let mut copy = Command::new("qemu-img");
    copy.args(["convert", "-n", "-t", "none", "-O", "raw", "-f", "raw"]).arg(&source).arg(export.path());
    if try_run(&mut copy).is_none() {
        return;
    }
    assert!(device.counts().flushes > 0);
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(&source).arg(export.path()));
    export.close().expect("close");
    mount.close();
}

/// Some files, small and large.
fn tree() -> Vec<(PathBuf, Vec<u8>)> {
    (0..60_usize)
        .map(|number| {
            let length = number * number * number * 8;
            (PathBuf::from(format!("{}/{number}", number % 7)), vec![number as u8; length])
        })
        .collect()
}

/// A loop device, detached when dropped.
struct Loop(PathBuf);

impl Loop {
    /// None, said on stderr, where there are no loop devices.
    fn new(file: &Path, options: &[&str]) -> Option<Self> {
        if !Path::new("/dev/loop-control").exists() {
            eprintln!("skipped: needs /dev/loop-control");
            return None;
        }
        let output =
            try_run(Command::new("losetup").args(["--find", "--show", "--nooverlap"]).args(options).arg(file))?;
        Some(Self(String::from_utf8(output.stdout).expect("a path").trim().into()))
    }

    /// What the kernel says of it.
    fn says(&self, what: &str) -> String {
        let name = self.0.file_name().expect("a device");
        fs::read_to_string(Path::new("/sys/block").join(name).join(what)).expect("read").trim().to_owned()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.0).status();
        if !std::thread::panicking() {
            assert!(detached.expect("losetup").success());
        }
    }
}

/// A mounted file system, unmounted when dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn new(device: &Path, dir: &Path) -> Self {
        run(Command::new("mount").arg(device).arg(dir));
        Self(dir.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let deadline = Instant::now() + SOON;
        let unmounted = loop {
            match unmount(&self.0, UnmountFlags::empty()) {
                // A child that another test starts has a copy of every open file until it becomes its program.
                Err(Errno::BUSY) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                unmounted => break unmounted,
            }
        };
        if std::thread::panicking() {
            let _ = unmounted.or_else(|_| unmount(&self.0, UnmountFlags::DETACH));
        } else {
            unmounted.expect("unmount");
        }
    }
}

/// # Panics
/// If it fails.
fn run(command: &mut Command) -> Output {
    try_run(command).unwrap_or_else(|| panic!("{command:?} is not there"))
}

/// None, said on stderr, if there is no such program.
///
/// # Panics
/// If it fails.
fn try_run(command: &mut Command) -> Option<Output> {
    let output = match command.output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            eprintln!("skipped: {} is not there", command.get_program().display());
            return None;
        }
        output => output.expect("run"),
    };
    if !output.status.success() {
        let _ = io::stderr().write_all(&output.stdout);
        panic!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Some(output)
}
