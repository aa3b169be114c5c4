//! A storage daemon for one test, in a process of its own: who unpacks must not be who serves. Also part of the crate's own
//! tests.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use aenv_block_client::{BlockdClient, BlockdConfig, ExportChoice};
use aenv_blockd::{Daemon, Steps};
use rustix::process::{Pid, Signal, kill_process};

/// Where the daemon that a test runs finds its directory.
const DIRECTORY: &str = "AENV_TEST_IMAGE_DAEMON";
const PATIENCE: Duration = Duration::from_secs(30);

/// Whether imports can run here; says why if not.
pub fn able() -> bool {
    let why = match (rustix::process::geteuid().is_root(), Path::new("/dev/fuse"), Path::new("/dev/loop-control")) {
        (false, ..) => "needs root, as importing does",
        (_, fuse, _) if !fuse.exists() => "needs /dev/fuse",
        (.., control) if !control.exists() => "needs loop devices",
        _ => return true,
    };
    eprintln!("skipped: {why}");
    false
}

/// A daemon, stopped when dropped.
pub struct Blockd {
    child: Child,
    pub client: BlockdClient,
    dir: PathBuf,
}

impl Blockd {
    /// Starts one that keeps its things in `dir`, by running the ignored test `test`, which calls [`be_a_daemon`].
    pub async fn start(dir: &Path, test: &str) -> Self {
        std::fs::create_dir_all(dir).unwrap();
        let log = std::fs::File::create(dir.join("log")).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env(DIRECTORY, dir)
            .stdin(Stdio::piped())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let client = BlockdClient::new(dir.join("socket"));
        let mut daemon = Self { child, client, dir: dir.to_owned() };
        let deadline = Instant::now() + PATIENCE;
        while daemon.client.info().await.is_err() {
            let ended = daemon.child.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < deadline, "no daemon: {ended:?}\n{}", daemon.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        daemon
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }
}

impl Drop for Blockd {
    fn drop(&mut self) {
        let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) else { return };
        let _ = kill_process(pid, Signal::TERM);
        let deadline = Instant::now() + PATIENCE;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                let mount = self.dir.join("run/devices");
                let _ = rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH);
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What `the_daemon_of_a_test` of each test program does: be a daemon, if a test asks for it.
pub fn be_a_daemon() {
    let Some(dir) = std::env::var_os(DIRECTORY).map(PathBuf::from) else {
        eprintln!("skipped: only of use to the tests that run it");
        return;
    };
    let mut config = BlockdConfig::new(dir.join("socket"), dir.join("state"), dir.join("run"));
    config.export = ExportChoice::Fuse;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
        let daemon = Daemon::start(config, Steps::default()).await.unwrap();
        // Should the test be killed, its end of the pipe is closed.
        let mut parent = tokio::io::stdin();
        let mut nothing = [0];
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::io::AsyncReadExt::read(&mut parent, &mut nothing) => {}
        }
        daemon.stop().await.unwrap();
    });
    std::process::exit(0); // a thread reads from the pipe
}
