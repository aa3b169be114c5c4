//! A storage daemon of our own: this program once more, as a child that ends with us.
//!
//! Who unpacks into a file system must not be who serves it: a process that waits for itself cannot be killed.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use aenv_block_client::{BlockdClient, BlockdConfig, ExportChoice};
use aenv_blockd::{Daemon, Steps};
use anyhow::{Context as _, Result, bail};
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, Command};

/// How long it may take to come up.
const START: Duration = Duration::from_secs(30);
/// How long it may take to end: it has no devices left, or those of a conversion that was given up.
const STOP: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(10);

/// The hidden verb behind which the daemon is.
const VERB: &str = "serve-conversion";

/// Where the daemon keeps its things.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    state: PathBuf,
    run: PathBuf,
}

/// The child.
#[derive(Debug)]
pub(super) struct OwnDaemon {
    child: Child,
    client: BlockdClient,
    /// Short: a path of a socket has room for 107 bytes.
    _run: tempfile::TempDir,
    log: PathBuf,
}

impl OwnDaemon {
    /// Starts it, with its state in the directory `state`, which is made.
    pub(super) async fn start(state: &Path) -> Result<Self> {
        std::fs::create_dir_all(state).with_context(|| format!("create {}", state.display()))?;
        let run = tempfile::Builder::new().prefix("aenv-image-").tempdir().context("make a directory for sockets")?;
        let log = state.join("log");
        let file = std::fs::File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let child = Command::new("/proc/self/exe")
            .arg(VERB)
            .args([state, run.path()])
            // What a terminal sends is for us: we end it when nobody needs it any more.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .context("start the storage daemon of the conversion")?;
        let client = BlockdClient::new(socket(run.path()));
        let mut daemon = Self { child, client, _run: run, log };
        let deadline = Instant::now() + START;
        while daemon.client.info().await.is_err() {
            let ended = daemon.child.try_wait().context("look after the storage daemon")?;
            if ended.is_some() || Instant::now() > deadline {
                bail!("the storage daemon of the conversion does not start: {}", daemon.last_words());
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(daemon)
    }

    pub(super) fn client(&self) -> &BlockdClient {
        &self.client
    }

    /// Ends it and waits.
    pub(super) async fn stop(&mut self) -> Result<()> {
        drop(self.child.stdin.take()); // which is what it waits for
        match tokio::time::timeout(STOP, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => bail!("the storage daemon ended with {status}: {}", self.last_words()),
            Ok(Err(error)) => Err(error).context("wait for the storage daemon"),
            Err(_) => {
                self.child.kill().await.context("kill the storage daemon")?;
                bail!("the storage daemon did not end within {} s: {}", STOP.as_secs(), self.last_words())
            }
        }
    }

    /// The last line of its log.
    fn last_words(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().next_back().unwrap_or("it said nothing").to_owned()
    }
}

/// The child's side. It ends when its standard input does: also when its parent was killed.
pub(crate) fn be_the_daemon(args: &Args) -> Result<ExitCode> {
    let mut config = BlockdConfig::new(socket(&args.run), &args.state, args.run.join("run"));
    config.export = ExportChoice::Fuse; // of the host, the least is asked for
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(async {
        let daemon = Daemon::start(config, Steps::default()).await?;
        let _ = tokio::io::stdin().read(&mut [0]).await; // the end, however it comes
        daemon.stop().await
    })?;
    // A thread may still read from standard input.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

fn socket(run: &Path) -> PathBuf {
    run.join("socket")
}
