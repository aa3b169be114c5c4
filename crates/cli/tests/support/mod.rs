//! A node server's stand-in, a real guest agent behind it, and `aenv` as a user runs it.

#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod agent;
pub(crate) mod pty;
pub(crate) mod server;

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use tokio::process::Command;

/// Longest wait for anything that happens by itself.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The sandbox that the stand-in knows.
pub(crate) const SANDBOX: &str = "0190b3a0-0000-7000-8000-000000000001";
/// The template that it knows.
pub(crate) const TEMPLATE: &str = "0190b3a0-0000-7000-8000-0000000000aa";
/// The key that it accepts.
pub(crate) const KEY: &str = "e2b_test";

/// A user with a home of their own and nothing else in the environment.
pub(crate) struct User {
    home: tempfile::TempDir,
    server: Option<String>,
}

impl User {
    /// Somebody who has never used `aenv`.
    pub(crate) fn fresh() -> Self {
        Self { home: tempfile::tempdir().unwrap(), server: None }
    }

    /// Somebody whose variables name a server and its key.
    pub(crate) fn of(server: &str) -> Self {
        Self { server: Some(server.to_owned()), ..Self::fresh() }
    }

    pub(crate) fn home(&self) -> &Path {
        self.home.path()
    }

    pub(crate) fn credentials_path(&self) -> PathBuf {
        self.home().join(".config/aenv/credentials")
    }

    /// `aenv` with these words; ended if dropped while it runs.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aenv"));
        command.args(words).env_clear().env("HOME", self.home()).env("TERM", "xterm").stdin(Stdio::null());
        if let Some(server) = &self.server {
            command.env("AENV_SERVER", server).env("AENV_API_KEY", KEY);
        }
        command.kill_on_drop(true);
        command
    }

    /// Runs `aenv` to its end.
    pub(crate) async fn run(&self, words: &[&str]) -> Ran {
        Ran::of(self.command(words).output()).await
    }

    /// Runs `aenv` to its end with `input` on its standard input.
    pub(crate) async fn run_with_input(&self, words: &[&str], input: &str) -> Ran {
        use tokio::io::AsyncWriteExt as _;
        let mut command = self.command(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).await.unwrap();
        Ran::of(child.wait_with_output()).await
    }
}

/// What a run of `aenv` left.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    async fn of(run: impl Future<Output = std::io::Result<Output>>) -> Self {
        let output = tokio::time::timeout(PATIENCE, run).await.expect("aenv ends in time").unwrap();
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Waits until `condition` holds.
pub(crate) async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
