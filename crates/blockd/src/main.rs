//! `aenv-blockd`: the storage daemon.

#![forbid(unsafe_code)]

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use aenv_block_client::{BlockdConfig, EXIT_IN_USE};
use aenv_blockd::{Daemon, InUse, Steps};
use anyhow::{Context as _, Result};
use clap::Parser;
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{debug, info, warn};
use tracing_subscriber::EnvFilter;

/// How long work on blocking threads may go on once everything has been stopped.
const LAST_THREADS: Duration = Duration::from_secs(5);

/// Who is ended when memory runs out: any guest rather than the disks of all.
const OOM_SCORE: &str = "-900";

/// AgentENV storage daemon: serves layered images as block devices to the VMMs of this host.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Configuration file (TOML).
    #[arg(long)]
    config: PathBuf,
    /// Leave the session of whoever starts it, so that no signal meant for them ends it.
    #[arg(long)]
    own_session: bool,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Its log may be on a full disk.
            let _ = writeln!(std::io::stderr(), "aenv-blockd: {error:#}");
            match error.downcast_ref::<InUse>() {
                Some(_) => ExitCode::from(EXIT_IN_USE),
                None => ExitCode::FAILURE,
            }
        }
    }
}

fn run() -> Result<()> {
    let cli = Cli::parse();
    if cli.own_session {
        // Refused to the leader of a process group, which has its own already.
        let _ = rustix::process::setsid();
    }
    let loaded = aenv_blockd::load(&cli.config).context("read the configuration")?;
    log_to_stderr(&loaded.config.log)?;
    for key in &loaded.unknown {
        warn!(key, "configuration key is not known");
    }
    prepare_process();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
    let result = runtime.block_on(serve(loaded.config));
    // A thread that waits for a registry must not keep the daemon.
    runtime.shutdown_timeout(LAST_THREADS);
    result
}

async fn serve(config: BlockdConfig) -> Result<()> {
    // Registered before anything is started: a signal during the start must lead to an orderly stop too.
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
    let socket = config.socket.clone();
    let daemon = Daemon::start(config, Steps::default()).await?;
    // For whoever waits for a line rather than for the socket; nobody may be listening.
    let _ = writeln!(std::io::stdout(), "ready {}", socket.display());
    let asked = daemon.asked_to_stop();
    tokio::select! {
        _ = terminate.recv() => info!("SIGTERM: stopping"),
        _ = interrupt.recv() => info!("SIGINT: stopping"),
        () = asked.cancelled() => info!("asked to stop"),
    }
    daemon.stop().await
}

/// What a process in the way of everybody's disk needs. Without, it works, less well.
fn prepare_process() {
    // It must not wait for pages that only it can write out. Threads that are started later inherit it.
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        debug!(%error, "memory for I/O is not reserved");
    }
    // Guests' data is nobody else's. What others are to see is made so.
    rustix::process::umask(Mode::from_raw_mode(0o077));
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        debug!(%error, "when memory runs out, this process may be chosen");
    }
    let Rlimit { current, maximum } = rustix::process::getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        warn!(%error, ?current, "the number of open files stays limited");
    }
}

/// `RUST_LOG` goes before the configuration; `AENV_LOG_FORMAT` is `compact` (default), `pretty` or `json`.
fn log_to_stderr(filter: &str) -> Result<()> {
    let filter = match EnvFilter::try_from_default_env() {
        Ok(filter) => filter,
        Err(_) => EnvFilter::try_new(filter).with_context(|| format!("log = {filter:?}"))?,
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        // It would panic where its words about a failed write cannot be written either: on a full disk.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    match std::env::var("AENV_LOG_FORMAT").as_deref() {
        Ok("json") => builder.json().init(),
        Ok("pretty") => builder.pretty().init(),
        _ => builder.compact().init(),
    }
    Ok(())
}
