//! Measures a running server from outside, as an SDK would use it. `cargo xtask bench` starts the server and runs this.
//!
//! Reads `E2B_API_URL`, `E2B_SANDBOX_URL`, `E2B_API_KEY` and `AENV_TEMPLATE` from the environment. Sandboxes that it
//! created are deleted also when a measurement fails.

#![forbid(unsafe_code)]

mod exec;
mod host;
mod lifecycle;
mod peers;
mod report;

use std::time::Instant;

use aenv_api::{Client, NewSandbox, Sandbox};
use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};

use exec::Guest;
use report::{Report, Row};

/// Long enough for every measurement; short enough that a killed client leaves nothing for long.
const SANDBOX_TTL_SECS: u32 = 600;
/// Calls before measuring: connections, page cache, the emulator's translated code.
const WARM_UP: usize = 30;

#[derive(Debug, Parser)]
#[command(about = "Measure a running AgentENV server")]
struct Args {
    bench: Bench,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// How many measurements.
    #[arg(long)]
    samples: Option<usize>,
    #[arg(long, env = "E2B_API_URL")]
    api_url: String,
    #[arg(long, env = "E2B_SANDBOX_URL")]
    sandbox_url: String,
    #[arg(long, env = "E2B_API_KEY", hide_env_values = true)]
    api_key: String,
    #[arg(long, env = "AENV_TEMPLATE")]
    template: String,
    /// A template with machines that stand ready.
    #[arg(long, env = "AENV_POOLED_TEMPLATE")]
    pooled_template: Option<String>,
    /// The template's image as an OCI layout folder: containers of it are the peers.
    #[arg(long, env = "AENV_BENCH_LAYOUT")]
    layout: Option<std::path::PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Bench {
    /// Create a sandbox, its guest ready to answer; and what its agent occupies.
    Boot,
    /// A warm `exec true`, there and back.
    Exec,
    /// Machines that stop and go on: creates, pauses, resumes, snapshots, forks.
    Lifecycle,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let client = Client::new(&args.api_url, &args.api_key)?;
    let report = match args.bench {
        Bench::Boot => boot(&args, &client).await?,
        Bench::Exec => exec(&args, &client).await?,
        Bench::Lifecycle => lifecycle::run(&args, &client).await?,
    };
    report.print(args.json)
}

/// Boots one sandbox after the other: two at a time would share the host's cores and measure each other.
async fn boot(args: &Args, client: &Client) -> Result<Report> {
    let mut cold_boot = Row::new("cold_boot", "ms");
    let mut agent_rss = Row::new("agent_rss", "MiB");
    for _ in 0..args.samples.unwrap_or(5) {
        let start = Instant::now();
        let sandbox = create(args, client).await?;
        cold_boot.add(start.elapsed().as_secs_f64() * 1e3);
        let measured = Guest::new(&args.sandbox_url, &sandbox)?.agent_rss_mib().await;
        delete(client, &sandbox).await?;
        agent_rss.add(measured?);
    }
    Ok(Report::new("boot", vec![cold_boot, agent_rss]))
}

/// `true` itself, and what the SDKs make of `commands.run("true")`: a login shell around it.
async fn exec(args: &Args, client: &Client) -> Result<Report> {
    let samples = args.samples.unwrap_or(200);
    let sandbox = create(args, client).await?;
    let measured = async {
        let guest = Guest::new(&args.sandbox_url, &sandbox)?;
        let exec_true = exec_row("exec_true", &guest, &["true"], samples).await?;
        let exec_shell =
            exec_row("exec_login_shell_true", &guest, &["/bin/bash", "-l", "-c", "true"], samples / 4).await?;
        Ok(Report::new("exec", vec![exec_true, exec_shell]))
    }
    .await;
    delete(client, &sandbox).await?;
    measured
}

async fn exec_row(name: &'static str, guest: &Guest, argv: &[&str], samples: usize) -> Result<Row> {
    for _ in 0..WARM_UP {
        guest.run(argv).await?;
    }
    let mut row = Row::new(name, "ms");
    for _ in 0..samples.max(1) {
        let start = Instant::now();
        guest.run(argv).await?;
        row.add(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(row)
}

async fn create(args: &Args, client: &Client) -> Result<Sandbox> {
    let wanted =
        NewSandbox { template_id: args.template.clone(), timeout: Some(SANDBOX_TTL_SECS), ..NewSandbox::default() };
    client.create_sandbox(&wanted).await.with_context(|| format!("create a sandbox from {}", args.template))
}

async fn delete(client: &Client, sandbox: &Sandbox) -> Result<()> {
    client.delete_sandbox(sandbox.sandbox_id).await.with_context(|| format!("delete sandbox {}", sandbox.sandbox_id))
}
