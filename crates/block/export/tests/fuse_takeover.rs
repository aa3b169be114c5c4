//! A process that serves a FUSE mount is killed, and its successor takes over.

#![forbid(unsafe_code)]

mod support;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;

use aenv_block_device::{BlockDevice, FileDevice};
use aenv_block_export::test_support::{Held, Opened, conformance, within};
use aenv_block_export::{ExportRecord, Exporter, FuseExporter, FuseOptions};
use aenv_model::Bytes;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Resource, Rlimit, setrlimit};
use support::{DIRECT, SOON, can_mount};

/// Where the helper serves; it does nothing when run as a test among others.
const SERVES_IN: &str = "AENV_TEST_FUSE_SERVES_IN";

#[test]
fn server_that_is_killed() {
    let Some(dir) = std::env::var_os(SERVES_IN).map(PathBuf::from) else { return };
    let exporter = FuseExporter::mount(&dir.join("mnt"), FuseOptions::default()).expect("mount");
    let disk = Arc::new(FileDevice::open(&dir.join("disk")).expect("open"));
    let held = Arc::new(Held::new(FileDevice::open(&dir.join("disk")).expect("open")));
    let disk = exporter.attach("disk", disk, &DIRECT).expect("attach");
    let _held = exporter.attach("held", held, &DIRECT).expect("attach");
    println!("\nrecord {}", serde_json::to_string(&disk.record()).expect("json"));
    loop {
        thread::park();
    }
}

#[test]
fn after_sigkill_readers_get_errors_and_a_successor_serves_the_same_paths() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new();
    for round in 0..3_u8 {
        let (mut server, record) = rig.serve();
        assert_eq!(record.path, rig.mnt().join("disk"));
        let opened = Opened::new(&record.path, true).expect("open");
        opened.write(0, &[round; 4096]).expect("write");
        opened.flush().expect("flush");
        let waiting: Vec<_> = (0..40)
            .map(|number| {
                let held = Opened::new(&rig.mnt().join("held"), true).expect("open");
                thread::spawn(move || match number % 2 {
                    0 => held.read(0, 4096).map(drop),
                    _ => held.flush(),
                })
            })
            .collect();

        server.kill().expect("kill"); // SIGKILL
        server.wait().expect("wait");
        within(SOON, "requests of a server that was killed", move || {
            for reader in waiting {
                reader.join().expect("join").expect_err("nobody answers");
            }
        });
        let error = opened.read(0, 4096).expect_err("nobody serves");
        assert_eq!(error.raw_os_error(), Some(Errno::NOTCONN.raw_os_error()), "{error}");
        let error = fs::metadata(rig.mnt()).expect_err("nobody serves");
        assert_eq!(error.raw_os_error(), Some(Errno::NOTCONN.raw_os_error()), "{error}");

        if round == 1 {
            continue; // the next server is a helper again: what is there must not stop it
        }
        let exporter = FuseExporter::mount(&rig.mnt(), FuseOptions::default()).expect("take over");
        let device = Arc::new(FileDevice::open(&rig.dir().join("disk")).expect("open"));
        let export = conformance::serves_again(&exporter, "disk", &record, device, &[round; 4096]);
        opened.read(0, 4096).expect_err("a descriptor from before stays dead");
        export.close().expect("close");
        exporter.close().expect("unmount");
        assert_eq!(fs::read_dir(rig.mnt()).expect("the plain directory").count(), 0);
    }
}

#[test]
fn a_reader_that_opened_the_file_before_the_kill_does_not_hang() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new();
    let (mut server, record) = rig.serve();
    let file = File::open(&record.path).expect("open");
    file.read_exact_at(&mut [0; 4096], 0).expect("read");
    server.kill().expect("kill");
    server.wait().expect("wait");
    let error = within(SOON, "a read", move || file.read_exact_at(&mut [0; 4096], 0).expect_err("nobody serves"));
    assert_eq!(error.raw_os_error(), Some(Errno::NOTCONN.raw_os_error()), "{error}");
    let missing = within(SOON, "an open", move || File::open(&record.path).expect_err("nobody serves"));
    assert_eq!(missing.raw_os_error(), Some(Errno::NOTCONN.raw_os_error()), "{missing}");
}

/// Where the helper has too few descriptors; it does nothing when run as a test among others.
const FAILS_IN: &str = "AENV_TEST_FUSE_FAILS_IN";

#[test]
fn server_without_descriptors() {
    let Some(dir) = std::env::var_os(FAILS_IN).map(PathBuf::from) else { return };
    let used = fs::read_dir("/proc/self/fd").expect("list").count() as u64;
    let few = Rlimit { current: Some(used + 3), maximum: Some(used + 3) };
    setrlimit(Resource::Nofile, few).expect("setrlimit");
    let error = FuseExporter::mount(&dir.join("mnt"), FuseOptions { threads: 16 }).expect_err("too few descriptors");
    println!("\nfailed {error}");
}

#[test]
fn a_mount_that_fails_to_start_leaves_nothing() {
    if !can_mount() {
        return;
    }
    let rig = Rig::new();
    let said = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "server_without_descriptors", "--nocapture"])
        .env(FAILS_IN, rig.dir())
        .output()
        .expect("run");
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.status.success() && text.contains("failed mount FUSE on"), "{text}");
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    assert!(!mounts.contains(rig.mnt().to_str().expect("plain")), "{mounts}");
}

/// A directory with a disk and a mount point; helpers serve there.
struct Rig {
    dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("temp dir");
        let disk = FileDevice::create(&dir.path().join("disk"), Bytes::mib(4)).expect("create");
        disk.flush().expect("flush");
        Self { dir }
    }

    fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn mnt(&self) -> PathBuf {
        self.dir().join("mnt")
    }

    fn serve(&self) -> (Server, ExportRecord) {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "server_that_is_killed", "--nocapture"])
            .env(SERVES_IN, self.dir())
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawn");
        let stdout = child.stdout.take().expect("piped");
        let server = Server(child);
        let mut lines = BufReader::new(stdout).lines().map(|line| line.expect("a line"));
        let record =
            lines.find_map(|line| line.strip_prefix("record ").map(str::to_owned)).expect("the server's record");
        (server, serde_json::from_str(&record).expect("json"))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        while unmount(self.mnt(), UnmountFlags::DETACH).is_ok() {}
    }
}

/// A helper, which does not outlive its test.
struct Server(Child);

impl Server {
    fn kill(&mut self) -> std::io::Result<()> {
        self.0.kill()
    }

    fn wait(&mut self) -> std::io::Result<()> {
        self.0.wait().map(drop)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
