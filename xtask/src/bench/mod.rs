//! `bench`: measurements that mean something next month, for they are taken against a peer in the same run or say what
//! machine they were taken on.

mod envd;
mod judge;
mod network;
mod storage;

use anyhow::{Result, bail};

use crate::artifacts::Profile;
use crate::node::{Home, Node};
use crate::sdk::TEMPLATE;
use crate::sh::Run;
use crate::{paths, setup};

/// The template with machines that stand ready.
const POOLED: &str = "pooled";

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Bench {
    /// From the request for a sandbox to a guest that answers; and what its agent occupies.
    Boot,
    /// A warm `exec true`: there and back.
    Exec,
    /// Machines that stop and go on: creates, pauses, resumes, snapshots, forks.
    Lifecycle,
    /// The guest agent on this host, without a machine, against what the host can do.
    Envd,
    /// Network slots, and policies that are replaced.
    Network,
    /// Layered storage against what the host can do: every row has a peer in the same run, and a bound.
    Storage,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    bench: Bench,
    /// Only these rows of the envd, network or storage bench.
    rows: Vec<String>,
    /// One JSON object on standard output instead of a table.
    #[arg(long)]
    json: bool,
    /// How many measurements; each bench has its own idea otherwise.
    #[arg(long)]
    samples: Option<usize>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match args.bench {
        Bench::Boot => against_a_node("boot", args),
        Bench::Exec => against_a_node("exec", args),
        Bench::Lifecycle => against_a_node("lifecycle", args),
        Bench::Envd | Bench::Network | Bench::Storage if args.samples.is_some() => {
            bail!("this bench has rounds of its own, no --samples")
        }
        Bench::Envd => envd::run(&args.rows, args.json),
        Bench::Network => network::run(&args.rows, args.json),
        Bench::Storage => storage::run(&args.rows, args.json),
    }
}

/// Starts a node with the first image and lets the measuring client of the end-to-end crate loose on it.
fn against_a_node(name: &str, args: &Args) -> Result<()> {
    if !args.rows.is_empty() {
        bail!("only the envd, network and storage benches have rows to choose from");
    }
    let (artifacts, image) = setup::everything(Profile::Release)?;
    Run::cargo().args(["build", "--quiet", "--release", "-p", "aenv-e2e", "--bin", "aenv-bench"]).run()?;
    let standing = toml::toml! { sandbox = { size = 1, templates = ["pooled"] } };
    let node = Node::start(&artifacts, &Home::named("bench", &artifacts)?.with("pool", standing)?)?;
    for template in [TEMPLATE, POOLED] {
        node.pull(&image, template)?;
    }

    let client = node
        .client_env()
        .into_iter()
        .fold(Run::new(paths::release_binary("aenv-bench")), |run, (key, value)| run.env(key, value));
    client
        .env("AENV_TEMPLATE", TEMPLATE)
        .env("AENV_POOLED_TEMPLATE", POOLED)
        .env("AENV_BENCH_LAYOUT", &image)
        .arg(name)
        .args(args.json.then_some("--json"))
        .args(args.samples.map(|samples| format!("--samples={samples}")))
        .run()?;
    node.stop()
}
