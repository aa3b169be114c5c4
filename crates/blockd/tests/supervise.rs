//! Starting daemons for those who need one.

mod support;

use std::path::PathBuf;
use std::process::{Command, Stdio};

use aenv_block_client::{BlockdClient, Daemon, DaemonConfig, ErrorKind, StartDaemonError};
use aenv_model::Bytes;
use rustix::process::{Pid, Signal};
use support::{Host, block_on, pattern, read, until, write};

const DIR: &str = "AENV_TEST_SUPERVISE_DIR";

/// A daemon to start in a directory, and its end.
struct Started {
    host: Host,
}

impl Started {
    fn prepare() -> Self {
        Self { host: Host::prepare() }
    }

    fn daemon(&self) -> Daemon {
        daemon(&self.host)
    }

    fn signal(&self, signal: Signal) {
        let pid = block_on(self.host.client().info()).unwrap().pid;
        rustix::process::kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Ok(info) = block_on(self.host.client().info()) {
            let _ = rustix::process::kill_process(Pid::from_raw(info.pid as i32).unwrap(), Signal::TERM);
            until("the daemon ends", || (!self.host.config.state_dir.join("lock").exists()).then_some(()));
        }
    }
}

fn daemon(host: &Host) -> Daemon {
    Daemon::new(DaemonConfig {
        binary: PathBuf::from(env!("CARGO_BIN_EXE_aenv-blockd")),
        config: host.config.clone(),
        log: host.dir.join("log"),
    })
}

fn a_daemon_is_started_once_and_again_when_it_is_gone() {
    let started = Started::prepare();
    let ensure = || -> BlockdClient { block_on(started.daemon().ensure()).unwrap() };
    let client = ensure();
    let first = block_on(client.info()).unwrap().pid;
    assert_eq!(block_on(ensure().info()).unwrap().pid, first);
    let session = rustix::process::getsid(Pid::from_raw(first as i32)).unwrap();
    assert_eq!(session.as_raw_nonzero().get(), first as i32, "a session of its own");

    let spec = started.host.spec("a", &[], Some(Bytes::mib(8)));
    let view = started.host.create("a", &spec);
    write(&view.path, 0, &pattern(1, 4096));
    started.signal(Signal::KILL);
    until("it is gone", || block_on(client.info()).is_err().then_some(()));
    assert_eq!(block_on(client.list()).unwrap_err().kind(), ErrorKind::Unreachable);
    let second = block_on(ensure().info()).unwrap().pid;
    assert_ne!(second, first);
    assert_eq!(started.host.get("a").problem, None);
    assert_eq!(read(&view.path, 0, 4096), pattern(1, 4096));
    // One that is ending lets go of its directory first.
    started.signal(Signal::TERM);
    until("another serves", || block_on(ensure().info()).ok().filter(|info| info.pid != second));
    assert_eq!(read(&started.host.get("a").path, 0, 4096), pattern(1, 4096));
}

fn many_who_start_a_daemon_at_once_have_one() {
    let started = Started::prepare();
    let pids: Vec<u32> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6)
            .map(|_| {
                scope.spawn(|| block_on(async { started.daemon().ensure().await.unwrap().info().await.unwrap().pid }))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(pids.iter().all(|pid| *pid == pids[0]), "{pids:?}");
}

#[test]
fn a_daemon_that_cannot_start_says_why() {
    let started = Started::prepare();
    std::fs::write(&started.host.config.run_dir, "a file").unwrap();
    let error = block_on(started.daemon().ensure()).unwrap_err();
    let words = error.to_string();
    assert!(matches!(error, StartDaemonError::Ended { .. }) && words.contains("make directory"), "{words}");
    let mut config = DaemonConfig {
        binary: "/no/such/program".into(),
        config: started.host.config.clone(),
        log: started.host.dir.join("log"),
    };
    let error = block_on(Daemon::new(config.clone()).ensure()).unwrap_err();
    assert!(matches!(error, StartDaemonError::Io { .. }), "{error}");
    config.binary = "/bin/false".into();
    let error = block_on(Daemon::new(config).ensure()).unwrap_err();
    assert!(matches!(error, StartDaemonError::Ended { .. }), "{error}");
}

fn a_daemon_outlives_whoever_started_it() {
    let started = Started::prepare();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_starter_that_goes_away", "--ignored"])
        .env(DIR, &started.host.dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "{}", started.host.log());
    block_on(started.host.client().info()).unwrap();
}

#[test]
#[ignore = "run by a_daemon_outlives_whoever_started_it"]
fn a_starter_that_goes_away() {
    let Some(dir) = std::env::var_os(DIR) else {
        eprintln!("skipped: only of use to the test that runs it");
        return;
    };
    let host = Host::at(std::path::Path::new(&dir));
    block_on(daemon(&host).ensure()).unwrap();
    std::mem::forget(host); // it would unmount
}

on_each_exporter! {
    a_daemon_is_started_once_and_again_when_it_is_gone,
    many_who_start_a_daemon_at_once_have_one,
    a_daemon_outlives_whoever_started_it,
}
