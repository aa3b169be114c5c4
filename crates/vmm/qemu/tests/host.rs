//! What a QEMU machine shares with its host: the network namespace, and a life longer than its server's.

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aenv_model::Bytes;
use aenv_vmm_driver::test_support::{Rig, TestGuest};
use aenv_vmm_driver::{MachineExit, MachineRecord, MachineSpec, NicSpec, RunState, Vmm, find_by_work_dir};
use aenv_vmm_qemu::{AccelChoice, Qemu, QemuConfig};

async fn qemu(guest: &TestGuest) -> Result<Qemu, String> {
    let config = QemuConfig { accel: AccelChoice::Tcg, ..QemuConfig::new("/nonexistent".into()) };
    Qemu::probe(config, guest.kernel(), guest.initramfs()).await.map_err(|e| e.to_string())
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "not within a minute: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A network namespace with a tap in it.
struct Netns(String);

impl Netns {
    fn create() -> Result<Self, String> {
        let netns = Self(format!("aenvtest{}", std::process::id()));
        ip(&["netns", "add", &netns.0])?;
        ip(&["-n", &netns.0, "tuntap", "add", "tap0", "mode", "tap", "vnet_hdr"])?;
        Ok(netns)
    }

    fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.0)
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = ip(&["netns", "delete", &self.0]);
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|e| format!("no `ip`: {e}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[tokio::test]
async fn a_machine_takes_its_tap_from_the_namespace_it_runs_in() {
    let guest = match TestGuest::from_environment() {
        Ok(guest) => guest,
        Err(why) => return println!("skipped: {why}"),
    };
    let (qemu, netns) = match (qemu(&guest).await, Netns::create()) {
        (Ok(qemu), Ok(netns)) => (qemu, netns),
        (Err(why), _) | (_, Err(why)) => return println!("skipped: {why}"),
    };
    let rig = Rig::new();
    let nic = |tap: &str| NicSpec { tap: tap.into(), mac: [6, 0, 0xa9, 0xfe, 0, 0x15] };
    let spec = |tap| MachineSpec { nics: vec![nic(tap)], netns: Some(netns.path()), ..rig.spec(&guest, "count") };

    let with_tap = spec("tap0");
    let machine = qemu.boot(with_tap.clone()).await.unwrap();
    let inside = std::fs::metadata(format!("/proc/{}/ns/net", machine.record().pid)).unwrap();
    assert_eq!(inside.ino(), std::fs::metadata(netns.path()).unwrap().ino());
    until("ready", || std::fs::read_to_string(&with_tap.serial_log).unwrap_or_default().contains("ready")).await;
    machine.kill().await.unwrap();

    // QEMU has no right to make one, so a tap that is missing is an error and not a stray device.
    let error = qemu.boot(spec("tap9")).await.err().expect("a tap out of nowhere").to_string();
    assert!(error.contains("tap9"), "{error}");
    rig.assert_empty();
}

const DIES_IN: &str = "AENV_TEST_SERVER_DIES_IN";

/// Not a test of its own: the server that dies, as a process, in the test below.
#[tokio::test]
async fn server_that_dies() {
    let Some(dir) = std::env::var_os(DIES_IN).map(PathBuf::from) else { return };
    let guest = TestGuest::from_environment().unwrap();
    let spec = MachineSpec {
        work_dir: dir.clone(),
        serial_log: dir.join("serial.log"),
        serial_log_limit: Bytes::kib(64),
        ..Rig::new().spec(&guest, "flood")
    };
    let qemu = qemu(&guest).await.unwrap();
    let machine = qemu.boot(spec.clone()).await.unwrap();
    std::fs::write(dir.join("record.json"), serde_json::to_vec(&machine.record()).unwrap()).unwrap();
    until("flood", || std::fs::read_to_string(&spec.serial_log).unwrap_or_default().contains("flood")).await;
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn without_its_server_a_guest_goes_on_its_log_does_not_grow_and_the_next_server_continues_it() {
    let guest = match TestGuest::from_environment() {
        Ok(guest) => guest,
        Err(why) => return println!("skipped: {why}"),
    };
    let qemu = match qemu(&guest).await {
        Ok(qemu) => qemu,
        Err(why) => return println!("skipped: {why}"),
    };
    let rig = Rig::new();
    let work_dir = rig.path().join("orphan");
    std::fs::create_dir(&work_dir).unwrap();
    let mut server = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "server_that_dies"])
        .env(DIES_IN, &work_dir)
        .env("TMPDIR", rig.path()) // what it leaves goes with the rig
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    server.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    server.wait().unwrap();

    let found = find_by_work_dir(rig.path()).unwrap();
    let [record] = &found[..] else { panic!("{found:?}; {said}") };
    let log = || std::fs::read(work_dir.join("serial.log")).unwrap();
    let (before_adoption, size) = (log(), log().len());
    assert!(size <= 64 << 10, "{size}");
    let before = cpu_ticks(record.pid);
    until("the guest goes on", || cpu_ticks(record.pid) > before + 50).await;
    assert_eq!(log(), before_adoption);

    let written: MachineRecord = serde_json::from_slice(&std::fs::read(work_dir.join("record.json")).unwrap()).unwrap();
    assert!(written.is_same_process(record));
    let machine = qemu.adopt(&written).await.unwrap();
    until("the log goes on", || log() != before_adoption).await;
    assert!(log().len() <= 64 << 10);
    assert_eq!(machine.kill().await.unwrap(), MachineExit::Killed);
    rig.assert_empty();
}

#[tokio::test]
async fn commands_that_a_former_server_left_half_done_do_not_confuse_the_next_one() {
    const LAST_WORDS: [&str; 6] = [
        "",
        r#"{"execute": "qmp_capa"#,
        "{\"execute\": \"qmp_capabilities\", \"id\": 1}\n{\"execute\": \"sto",
        "{\"execute\": \"qmp_capabilities\", \"id\": 1}\n{\"execute\": \"stop\", \"id\": 2}\n",
        "{\"execute\": \"qmp_capabilities\"}\n{\"execute\": \"stop\"}\n{\"execute\": \"cont\"}\n{\"execute\": \"query-status\"}\n{\"exec",
        "not even\0JSON }}}}] \u{7f}",
    ];
    let guest = match TestGuest::from_environment() {
        Ok(guest) => guest,
        Err(why) => return println!("skipped: {why}"),
    };
    let qemu = match qemu(&guest).await {
        Ok(qemu) => qemu,
        Err(why) => return println!("skipped: {why}"),
    };
    let rig = Rig::new();
    let spec = rig.spec(&guest, "count");
    let mut machine = qemu.boot(spec.clone()).await.unwrap();
    until("ready", || std::fs::read_to_string(&spec.serial_log).unwrap_or_default().contains("ready")).await;
    for round in 0..5 {
        for words in LAST_WORDS {
            let record = machine.disown().await;
            let mut former = UnixStream::connect(spec.work_dir.join("qmp.sock")).unwrap();
            if round > 0 {
                // Otherwise it dies before QEMU has taken its connection, or anything it said.
                let mut greeting = [0; 32];
                former.read_exact(&mut greeting).unwrap();
            }
            former.write_all(words.as_bytes()).unwrap();
            drop(former);

            machine = qemu.adopt(&record).await.unwrap();
            let found = machine.run_state().await.unwrap();
            assert!(matches!(found, RunState::Running | RunState::Paused), "{found:?} after {words:?}");
            machine.pause_vcpus().await.unwrap();
            assert_eq!(machine.run_state().await.unwrap(), RunState::Paused, "after {words:?}");
            machine.resume_vcpus().await.unwrap();
            assert_eq!(machine.run_state().await.unwrap(), RunState::Running, "after {words:?}");
        }
    }
    machine.kill().await.unwrap();
    rig.assert_empty();
}

/// User time of a process, in ticks of 10 ms.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().split_ascii_whitespace().nth(11).unwrap().parse().unwrap()
}
