//! Starting the daemon: whoever needs it first does, and it stays when they go.

use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::{BlockdClient, BlockdConfig, BlockdError, ErrorKind, PROTOCOL};

/// Longest wait for a daemon that comes up. It answers before it has brought its devices back.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest wait for a daemon that ends: it has no devices to flush.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at its socket.
const PAUSE: Duration = Duration::from_millis(10);
/// Between two attempts to start one while another is in the way.
const RETRY: Duration = Duration::from_millis(100);
/// The status with which `aenv-blockd` ends at its start when another has its directory or its socket.
pub const EXIT_IN_USE: u8 = 75; // EX_TEMPFAIL of sysexits.h
/// How much of a log is worth reading in an error, in bytes.
const TAIL: u64 = 2 << 10;
/// The configuration's file in the daemon's state directory.
const CONFIG_FILE: &str = "blockd.toml";

/// A daemon to start.
#[derive(Debug, Clone, PartialEq)]
pub struct DaemonConfig {
    /// The program, `aenv-blockd`.
    pub binary: PathBuf,
    /// What it is told.
    pub config: BlockdConfig,
    /// Where its log goes; appended to.
    pub log: PathBuf,
}

/// A daemon that is started when it is needed. It belongs to nobody: it stays when this process ends.
#[derive(Debug, Clone)]
pub struct Daemon {
    config: Arc<DaemonConfig>,
    client: BlockdClient,
}

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
pub enum StartDaemonError {
    /// There is one of another version.
    #[error("the aenv-blockd at {socket} speaks protocol {found}, this program {PROTOCOL}, and it has devices: close them, then restart it", socket = socket.display())]
    Protocol {
        /// Where it is.
        socket: PathBuf,
        /// What it speaks.
        found: u32,
    },
    /// Something else than a daemon answers.
    #[error("ask who is at the socket")]
    Ask(#[source] BlockdError),
    /// The host failed.
    #[error("{doing} {path}", path = path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// It ended instead of serving.
    #[error("aenv-blockd ended at its start with {status}; its log {log} ends with: {tail}", log = log.display())]
    Ended {
        /// How.
        status: ExitStatus,
        /// Its log.
        log: PathBuf,
        /// The end of that.
        tail: String,
    },
    /// It does not answer.
    #[error("aenv-blockd does not answer {} s after its start; its log {log} ends with: {tail}", PATIENCE.as_secs(), log = log.display())]
    Silent {
        /// Its log.
        log: PathBuf,
        /// The end of that.
        tail: String,
    },
}

impl Daemon {
    /// A daemon of this configuration. Starts nothing yet.
    #[must_use]
    pub fn new(config: DaemonConfig) -> Self {
        Self { client: BlockdClient::new(&config.config.socket), config: Arc::new(config) }
    }

    /// A client of the daemon at the configured socket, which is started if nobody answers there. Of several processes that
    /// start it at once, one succeeds and all are served. One that is just ending is waited for; one of another protocol
    /// that has no devices is replaced.
    ///
    /// Cancel safety: if dropped, the daemon may or may not have been started.
    pub async fn ensure(&self) -> Result<BlockdClient, StartDaemonError> {
        if self.answers().await? {
            return Ok(self.client.clone());
        }
        let config = Arc::clone(&self.config);
        let prepared = tokio::task::spawn_blocking(move || prepare(&config)).await;
        let log = prepared.map_err(|error| self.io("prepare", &self.config.log)(io::Error::other(error)))??;
        let deadline = Instant::now() + PATIENCE;
        let mut child = self.spawn(&log)?;
        loop {
            let ended = child.try_wait().map_err(self.io("wait for", &self.config.binary))?;
            // Looked at in this order: one that lost the race against another ends, and the other answers.
            if self.answers().await? {
                return Ok(self.client.clone());
            }
            match ended {
                Some(status) if status.code() != Some(EXIT_IN_USE.into()) => {
                    let (log, tail) = (self.config.log.clone(), self.tail().await);
                    return Err(StartDaemonError::Ended { status, log, tail });
                }
                _ if Instant::now() >= deadline => {
                    _ = child.start_kill(); // nobody else knows of it; the next attempt starts afresh
                    return Err(StartDaemonError::Silent { log: self.config.log.clone(), tail: self.tail().await });
                }
                // Another is starting, or ending: it answers soon, or lets go of its directory.
                Some(_) => {
                    tokio::time::sleep(RETRY).await;
                    child = self.spawn(&log)?;
                }
                None => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Ends the daemon and waits until it is gone. A [conflict](ErrorKind::Conflict) while it has devices; one that is not
    /// there is success.
    ///
    /// Cancel safety: if dropped, it may or may not end.
    pub async fn end(&self) -> Result<(), BlockdError> {
        let info = match self.client.info().await {
            Err(error) if error.kind() == ErrorKind::Unreachable => return Ok(()),
            info => info?,
        };
        let process = i32::try_from(info.pid).ok().and_then(Pid::from_raw);
        // Held from before it is asked: its number may be another's afterwards.
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        self.client.shutdown().await?;
        let deadline = Instant::now() + END_PATIENCE;
        while process.as_ref().is_some_and(lives) && Instant::now() < deadline {
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    fn spawn(&self, log: &File) -> Result<Child, StartDaemonError> {
        let log = log.try_clone().map_err(self.io("open", &self.config.log))?;
        Command::new(&self.config.binary)
            .arg("--own-session")
            .arg("--config")
            .arg(self.config_file())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(self.io("run", &self.config.binary))
    }

    async fn answers(&self) -> Result<bool, StartDaemonError> {
        match self.client.info().await {
            Ok(info) if info.protocol == PROTOCOL => Ok(true),
            Ok(_) if self.client.shutdown().await.is_ok() => Ok(false),
            Ok(info) => {
                Err(StartDaemonError::Protocol { socket: self.client.socket().to_owned(), found: info.protocol })
            }
            Err(error) if error.kind() == ErrorKind::Unreachable => Ok(false),
            Err(error) => Err(StartDaemonError::Ask(error)),
        }
    }

    fn config_file(&self) -> PathBuf {
        self.config.config.state_dir.join(CONFIG_FILE)
    }

    async fn tail(&self) -> String {
        let log = self.config.log.clone();
        tokio::task::spawn_blocking(move || tail(&log)).await.unwrap_or_default()
    }

    fn io(&self, doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StartDaemonError + use<> {
        let path = path.to_owned();
        move |source| StartDaemonError::Io { doing, path, source }
    }
}

/// Whether a process has not ended yet.
fn lives(process: &OwnedFd) -> bool {
    let mut ended = [PollFd::new(process, PollFlags::IN)];
    poll(&mut ended, Some(&Timespec::default())) == Ok(0)
}

/// Writes the configuration and opens the log.
fn prepare(config: &DaemonConfig) -> Result<File, StartDaemonError> {
    let error = |doing, path: &Path| {
        let path = path.to_owned();
        move |source| StartDaemonError::Io { doing, path, source }
    };
    let make = |dir: &Path| DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(error("make", dir));
    make(&config.config.state_dir)?;
    let file = config.config.state_dir.join(CONFIG_FILE);
    let text = toml::to_string(&config.config).map_err(io::Error::other).map_err(error("write", &file))?;
    aenv_durable::atomic_write(&file, text.as_bytes(), 0o600).map_err(error("write", &file))?;
    if let Some(dir) = config.log.parent() {
        make(dir)?;
    }
    File::options().create(true).append(true).open(&config.log).map_err(error("open", &config.log))
}

/// The last lines of a log, without line breaks.
fn tail(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|mut file| {
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
        file.take(TAIL).read_to_end(&mut bytes)
    });
    match read {
        Ok(_) => {
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<_> = text.lines().collect();
            lines[lines.len().saturating_sub(5)..].join(" | ")
        }
        Err(error) => error.to_string(),
    }
}
