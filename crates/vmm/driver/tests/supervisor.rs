//! The process supervisor, tried on processes that are no VMMs.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aenv_vmm_driver::{
    AdoptError, MachineRecord, OrphanEnd, ProcessEnd, ProcessSpec, VmmError, VmmProcess, end_orphan, find_by_work_dir,
};

/// A work dir; whatever still runs in it at the end of a test, failed or not, is ended.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap().keep())
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        for record in find_by_work_dir(&self.0).unwrap_or_default() {
            let pid = rustix::process::Pid::from_raw(record.pid.cast_signed()).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn shell(work_dir: &Path, script: &str) -> ProcessSpec {
    ProcessSpec {
        name: "box".into(),
        work_dir: work_dir.to_owned(),
        binary: "/bin/sh".into(),
        args: ["-c", script].map(OsString::from).to_vec(),
        netns: None,
        inherit: Vec::new(),
    }
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future).await.expect("took longer than 20 s")
}

#[tokio::test]
async fn the_end_is_noticed_with_status_and_last_words() {
    let dir = Dir::new();
    let process = VmmProcess::spawn(shell(&dir.0, "echo out; echo err >&2; exit 7")).await.unwrap();
    let end = soon(process.ended()).await;
    assert_eq!(end.to_string(), "exit status: 7");
    assert_eq!(process.last_words(), "out\nerr");
}

#[tokio::test]
async fn a_killed_process_is_gone_when_kill_returns() {
    let dir = Dir::new();
    let process = VmmProcess::spawn(shell(&dir.0, "exec sleep 600")).await.unwrap();
    let end = soon(process.kill()).await.unwrap();
    assert!(matches!(end, ProcessEnd::Status(status) if !status.success()), "{end}");
    assert!(!Path::new(&format!("/proc/{}", process.record().pid)).exists());
    assert_eq!(soon(process.kill()).await.unwrap(), end, "killing twice tells the same end");
}

#[tokio::test]
async fn a_missing_binary_or_namespace_is_named() {
    let dir = Dir::new();
    let missing = ProcessSpec { binary: "/nowhere/vmm".into(), ..shell(&dir.0, "") };
    assert!(
        matches!(VmmProcess::spawn(missing).await, Err(VmmError::Spawn { binary, .. }) if binary == Path::new("/nowhere/vmm"))
    );
    let missing = ProcessSpec { netns: Some("/nowhere/netns".into()), ..shell(&dir.0, "") };
    assert!(
        matches!(VmmProcess::spawn(missing).await, Err(VmmError::Io { path, .. }) if path == Path::new("/nowhere/netns"))
    );
    assert_eq!(find_by_work_dir(&dir.0).unwrap(), []);
}

#[tokio::test]
async fn the_process_has_its_own_session_no_secrets_and_only_the_descriptors_it_was_given() {
    let dir = Dir::new();
    // Inheritable on purpose: the supervisor must not rely on everybody's care.
    let leaky = std::fs::File::open("/dev/zero").unwrap();
    rustix::io::fcntl_setfd(&leaky, rustix::io::FdFlags::empty()).unwrap();
    let given = std::fs::File::open("/dev/full").unwrap();
    let script = format!(
        "readlink /proc/self/fd/{} && exit 10
         [ \"$(readlink /proc/$$/fd/{})\" = /dev/full ] || exit 11
         [ \"$(cut -d' ' -f6 /proc/$$/stat)\" = $$ ] || exit 12
         [ \"$(env | grep -c -v -e ^PATH= -e ^PWD= -e ^AENV_MACHINE_ -e ^_= -e ^SHLVL= -e ^OLDPWD=)\" = 0 ] || exit 13
         [ \"$(readlink /proc/$$/cwd)\" = {} ] || exit 14
         grep -q '^NoNewPrivs:.*1' /proc/$$/status || exit 15
         grep -q -e '^CapEff:[[:space:]]*0*6$' -e '^CapEff:[[:space:]]*0*$' /proc/$$/status || exit 16
         exit 0",
        std::os::fd::AsRawFd::as_raw_fd(&leaky),
        std::os::fd::AsRawFd::as_raw_fd(&given),
        dir.0.canonicalize().unwrap().display(),
    );
    let process =
        VmmProcess::spawn(ProcessSpec { inherit: vec![given.into()], ..shell(&dir.0, &script) }).await.unwrap();
    let end = soon(process.ended()).await;
    assert!(matches!(end, ProcessEnd::Status(status) if status.success()), "{end}: {}", process.last_words());
}

#[tokio::test]
async fn an_abandoned_start_leaves_nothing_and_a_released_process_stays() {
    let dir = Dir::new();
    let process = VmmProcess::spawn(shell(&dir.0, "exec sleep 600")).await.unwrap();
    let mut end = process.end();
    drop(process);
    assert!(soon(end.wait_for(Option::is_some)).await.is_ok());

    let process = VmmProcess::spawn(shell(&dir.0, "exec sleep 600")).await.unwrap();
    process.release();
    let (record, end) = (process.record().clone(), process.end());
    drop(process);
    assert_eq!(find_by_work_dir(&dir.0).unwrap(), std::slice::from_ref(&record));
    assert!(end.borrow().is_none());
    assert_eq!(soon(end_orphan(&record)).await.unwrap(), OrphanEnd::Ended);
    assert_eq!(soon(end_orphan(&record)).await.unwrap(), OrphanEnd::AlreadyGone);
}

#[tokio::test]
async fn a_reused_pid_is_left_alone() {
    let dir = Dir::new();
    let process = VmmProcess::spawn(shell(&dir.0, "exec sleep 600")).await.unwrap();
    let ours = process.record().clone();
    for record in [
        MachineRecord { start_time: ours.start_time + 1, ..ours.clone() },
        MachineRecord { name: "other".into(), ..ours.clone() },
        MachineRecord { work_dir: "/other".into(), ..ours.clone() },
        MachineRecord { pid: std::process::id(), ..ours.clone() },
    ] {
        assert_eq!(end_orphan(&record).await.unwrap(), OrphanEnd::NotOurs, "{record:?}");
        assert!(matches!(VmmProcess::adopt(record).await, Err(AdoptError::NotOurs { .. })));
    }
    for pid in [0, u32::MAX, u32::MAX >> 1] {
        assert_eq!(end_orphan(&MachineRecord { pid, ..ours.clone() }).await.unwrap(), OrphanEnd::AlreadyGone);
    }
    soon(process.kill()).await.unwrap();
}

/// Not a test of its own: the server that dies, as a process, in the test below.
#[tokio::test]
async fn server_that_dies() {
    let Some(dir) = std::env::var_os("SERVER_THAT_DIES_IN") else { return };
    let process = VmmProcess::spawn(shell(Path::new(&dir), "while :; do echo noise || :; done")).await.unwrap();
    process.release();
    let record = process.record();
    println!("\nRECORD {} {} {}", record.pid, record.start_time, record.name);
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_process_outlives_its_server_and_is_found_adopted_and_ended_by_the_next() {
    let dir = Dir::new();
    let mut server = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "server_that_dies", "--nocapture"])
        .env("SERVER_THAT_DIES_IN", &dir.0)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The pipe of `server` itself is closed by its death: the VMM does not hold it.
    let mut said = String::new();
    server.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    server.wait().unwrap();
    let found = find_by_work_dir(&dir.0).unwrap();
    let [record] = &found[..] else { panic!("{found:?} after {said}") };
    assert!(said.contains(&format!("RECORD {} {} {}", record.pid, record.start_time, record.name)), "{said}");

    let adopted = VmmProcess::adopt(record.clone()).await.unwrap();
    // It goes on writing to nobody.
    let still = Instant::now() + Duration::from_millis(200);
    assert!(tokio::time::timeout_at(still.into(), adopted.ended()).await.is_err(), "died of a broken pipe");
    assert_eq!(soon(end_orphan(record)).await.unwrap(), OrphanEnd::Ended);
    assert_eq!(soon(adopted.ended()).await, ProcessEnd::Unknown);
}
