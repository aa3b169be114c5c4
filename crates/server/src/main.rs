//! `aenv-server`: one node.

#![forbid(unsafe_code)]

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Duration;

use aenv_server::{Node, config, provision_guest};
use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;
use tracing_subscriber::EnvFilter;

/// Longest orderly stop: every sandbox is ended, running builds are cancelled.
const STOP_PATIENCE: Duration = Duration::from_secs(60);

/// AgentENV node server: runs AI-agent sandboxes as microVMs behind an E2B-compatible HTTP API.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Configuration file (TOML). Default: $AENV_CONFIG_PATH, else config/default.toml if it exists.
    #[arg(long, global = true)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fetch the guest kernel and build the initramfs now, print their id, and exit.
    Provision,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    log_to_stderr();
    let loaded = config::load(cli.config.as_deref()).context("read the configuration")?;
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(async {
        match cli.command {
            Some(Command::Provision) => {
                println!("{}", provision_guest(&loaded.config).await?.id);
                Ok(())
            }
            None => serve(loaded.config).await,
        }
    })
}

async fn serve(config: config::Config) -> Result<()> {
    // Registered before anything is started: a signal during the start must lead to an orderly stop too.
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
    let node = Node::start(config).await?;
    tokio::select! {
        _ = terminate.recv() => info!("SIGTERM: stopping"),
        _ = interrupt.recv() => info!("SIGINT: stopping"),
    }
    node.stop(STOP_PATIENCE).await
}

/// `RUST_LOG` filters; `AENV_LOG_FORMAT` is `compact` (default), `pretty` or `json`.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
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
}
