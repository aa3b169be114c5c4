//! A process that serves ublk devices is killed, or leaves, and its successor takes over. Whoever has a device open waits.

#![forbid(unsafe_code)]

mod support;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use aenv_block_device::{BlockDevice, FileDevice};
use aenv_block_export::test_support::{Held, Opened, conformance, within};
use aenv_block_export::{ExportRecord, Exporter, UblkExporter};
use aenv_model::Bytes;
use support::{DIRECT, SOON, Ublk};

/// Where the helper finds its disk, and its tag; it does nothing when run as a test among others.
const SERVES_IN: &str = "AENV_TEST_UBLK_SERVES_IN";
const TAG: &str = "AENV_TEST_UBLK_TAG";
/// Records of a server that was killed: it takes over instead of attaching.
const TAKES_OVER: &str = "AENV_TEST_UBLK_TAKES_OVER";

#[test]
fn server_that_is_killed() {
    let Some(dir) = std::env::var_os(SERVES_IN).map(PathBuf::from) else { return };
    let tag: NonZeroU64 = std::env::var(TAG).expect("a tag").parse().expect("a number");
    let exporter = UblkExporter::open(tag).expect("open the ublk driver");
    let disk = Arc::new(FileDevice::open(&dir.join("disk")).expect("open"));
    let held = Arc::new(Held::new(FileDevice::open(&dir.join("disk")).expect("open")));
    let (disk, held) = match std::env::var(TAKES_OVER) {
        Err(_) => (
            exporter.attach("disk", disk, &DIRECT).expect("attach"),
            exporter.attach("held", held, &DIRECT).expect("attach"),
        ),
        Ok(records) => {
            let records: [ExportRecord; 2] = serde_json::from_str(&records).expect("json");
            (
                exporter.recover("disk", &records[0], disk, &DIRECT).expect("recover"),
                exporter.recover("held", &records[1], held, &DIRECT).expect("recover"),
            )
        }
    };
    println!("\nrecords {}", serde_json::to_string(&[disk.record(), held.record()]).expect("json"));
    loop {
        thread::park();
    }
}

#[test]
fn after_sigkill_requests_wait_and_a_successor_answers_them() {
    let Some(rig) = Rig::new() else { return };
    let (mut server, records) = rig.serve(None);
    let [disk, held] = &records;
    let opened = Opened::new(&disk.path, true).expect("open");
    for round in 0..2_u8 {
        opened.write(0, &[round; 4096]).expect("write");
        opened.flush().expect("flush");
        // Under way with the dead one, and more than it could have under way.
        let waiting: Vec<_> = (0..200_u64)
            .map(|number| {
                let held = Opened::new(&held.path, true).expect("open");
                thread::spawn(move || match number % 2 {
                    0 => held.read(0, 4096).map(drop),
                    _ => held.write((1 + number) * 4096, &[number as u8; 4096]),
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(200)); // most are with the server by then
        server.kill();
        let path = disk.path.clone();
        let late = thread::spawn(move || Opened::new(&path, true).expect("open").read(0, 4096));

        if round == 0 {
            // The next one dies as well, with the same requests.
            let (next, again) = rig.serve(Some(&records));
            assert_eq!(again, records);
            thread::sleep(Duration::from_millis(200));
            server = next;
            server.kill();
        }
        let successor = rig.ublk.another();
        let device = Arc::new(FileDevice::open(&rig.dir().join("disk")).expect("open"));
        let export = conformance::serves_again(&successor, "disk", disk, device.clone(), &[round; 4096]);
        let slow = successor.recover("held", held, device.clone(), &DIRECT).expect("recover");
        assert_eq!(late.join().expect("join").expect("read").len(), 4096);
        within(SOON, "requests of a server that was killed", move || {
            for reader in waiting {
                reader.join().expect("join").expect("answered by the successor");
            }
        });
        for number in (1..200_u64).step_by(2) {
            let mut bytes = [0; 4096];
            device.read_at((1 + number) * 4096, &mut bytes).expect("read the device");
            assert_eq!(bytes, [number as u8; 4096], "write {number}");
        }
        opened.read(0, 4096).expect("a descriptor from before goes on");
        if round == 0 {
            // A server that leaves is no different from one that dies, but for the time it takes.
            assert_eq!(export.disown().expect("disown"), *disk);
            assert_eq!(slow.disown().expect("disown"), *held);
            drop(successor);
            let (next, again) = rig.serve(Some(&records));
            assert_eq!(again, records);
            server = next;
        } else {
            export.close().expect("close");
            slow.close().expect("close");
        }
    }
}

#[test]
fn whoever_writes_through_ten_deaths_finds_what_it_wrote() {
    const PAGES: u64 = 64;
    let Some(rig) = Rig::new() else { return };
    let (mut server, records) = rig.serve(None);
    let over = AtomicBool::new(false);
    let opened = Opened::new(&records[0].path, true).expect("open");
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut rounds = 0_u64;
            while !over.load(Ordering::SeqCst) {
                rounds += 1;
                let page = rounds * 7 % PAGES;
                opened.write(page * 4096, &rounds.to_le_bytes().repeat(512)).expect("write");
                let seen = opened.read(page * 4096, 4096).expect("read");
                assert_eq!(seen, rounds.to_le_bytes().repeat(512), "round {rounds}");
            }
            rounds
        });
        for _ in 0..10 {
            thread::sleep(Duration::from_millis(50));
            server.kill();
            server = rig.serve(Some(&records)).0;
        }
        over.store(true, Ordering::SeqCst);
        let rounds = writer.join().expect("join");
        assert!(rounds > 20, "{rounds} rounds");
    });
    // What a file has open without O_DIRECT goes on, too.
    let file = File::options().read(true).write(true).open(&records[0].path).expect("open");
    file.write_all_at(&[3; 10_000], 100).expect("write");
    server.kill();
    let device = Arc::new(FileDevice::open(&rig.dir().join("disk")).expect("open"));
    let export = rig.ublk.recover("disk", &records[0], device.clone(), &DIRECT).expect("recover");
    let sync = within(SOON, "a flush", move || file.sync_data());
    sync.expect("sync");
    let mut bytes = [0; 10_000];
    device.read_at(0, &mut [0; 512]).expect("read");
    device.read_at(100, &mut bytes).expect("read");
    assert_eq!(bytes, [3; 10_000]);
    export.close().expect("close");
    assert_eq!(rig.ublk.sweep(&[]).expect("sweep"), 1, "the other one");
}

#[test]
fn a_device_of_a_dead_server_that_nobody_wants_is_deleted() {
    let Some(rig) = Rig::new() else { return };
    let (mut server, [disk, held]) = rig.serve(None);
    let opened = Opened::new(&held.path, true).expect("open");
    let waiting = thread::spawn(move || (opened.read(0, 4096).map(drop), opened.read(0, 4096).map(drop)));
    thread::sleep(Duration::from_millis(100));
    server.kill();
    let successor = rig.ublk.another();
    let swept = within(SOON, "the end of a dead server's devices", move || successor.sweep(&[]).expect("sweep"));
    assert_eq!(swept, 2);
    assert!(!disk.path.exists() && !held.path.exists());
    let (first, second) = within(SOON, "its readers", move || waiting.join().expect("join"));
    first.expect_err("nobody serves");
    second.expect_err("nobody serves");
}

/// A directory with a disk; helpers serve it.
struct Rig {
    ublk: Ublk,
    dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Option<Self> {
        let ublk = Ublk::new()?;
        let dir = tempfile::tempdir().expect("temp dir");
        let disk = FileDevice::create(&dir.path().join("disk"), Bytes::mib(4)).expect("create");
        disk.flush().expect("flush");
        Some(Self { ublk, dir })
    }

    fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A server of its own, or the successor of another.
    fn serve(&self, after: Option<&[ExportRecord; 2]>) -> (Server, [ExportRecord; 2]) {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "server_that_is_killed", "--nocapture"]);
        command.env(SERVES_IN, self.dir()).env(TAG, self.ublk.tag.to_string());
        if let Some(records) = after {
            command.env(TAKES_OVER, serde_json::to_string(records).expect("json"));
        }
        let mut child = command.stdout(Stdio::piped()).spawn().expect("spawn");
        let stdout = child.stdout.take().expect("piped");
        let server = Server(child);
        let mut lines = BufReader::new(stdout).lines().map(|line| line.expect("a line"));
        let records =
            lines.find_map(|line| line.strip_prefix("records ").map(str::to_owned)).expect("the server's records");
        (server, serde_json::from_str(&records).expect("json"))
    }
}

/// A helper, which does not outlive its test.
struct Server(Child);

impl Server {
    /// `kill -9`
    fn kill(&mut self) {
        self.0.kill().expect("kill");
        self.0.wait().expect("wait");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
