//! `bench`: starts a node with the first image and lets the measuring client of the end-to-end crate loose on it.

use anyhow::Result;

use crate::artifacts::Profile;
use crate::node::{Home, Node};
use crate::sdk::TEMPLATE;
use crate::sh::Run;
use crate::{paths, setup};

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Bench {
    /// From the request for a sandbox to a guest that answers; and what its agent occupies.
    Boot,
    /// A warm `exec true`: there and back.
    Exec,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    bench: Bench,
    /// One JSON object on standard output instead of a table.
    #[arg(long)]
    json: bool,
    /// How many measurements; each bench has its own idea otherwise.
    #[arg(long)]
    samples: Option<usize>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let (artifacts, image) = setup::everything(Profile::Release)?;
    Run::cargo().args(["build", "--quiet", "--release", "-p", "aenv-e2e", "--bin", "aenv-bench"]).run()?;
    let node = Node::start(&artifacts, &Home::named("bench", &artifacts)?)?;
    node.pull(&image, TEMPLATE)?;

    let name = match args.bench {
        Bench::Boot => "boot",
        Bench::Exec => "exec",
    };
    let client = node
        .client_env()
        .into_iter()
        .fold(Run::new(paths::release_binary("aenv-bench")), |run, (key, value)| run.env(key, value));
    client
        .env("AENV_TEMPLATE", TEMPLATE)
        .arg(name)
        .args(args.json.then_some("--json"))
        .args(args.samples.map(|samples| format!("--samples={samples}")))
        .run()?;
    node.stop()
}
