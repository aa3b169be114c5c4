//! `sdk`: the official E2B SDKs for Python and JavaScript, unmodified from their registries, against a real server.

mod matrix;
mod suites;
mod versions;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::artifacts::{Artifacts, Profile};
use crate::debs;
use crate::node::{Home, Node};
use crate::paths;
use crate::python::Venv;
use crate::setup;
use crate::sh::Run;
use crate::test::tally::Tally;
use matrix::Matrix;
use suites::{Depth, Ran};
use versions::Pinned;

/// The template that the suites create their sandboxes from.
pub(crate) const TEMPLATE: &str = "base";

/// What the guest lacks for the SDK's git module: what else git depends on is in the image, or is for scripts of its own.
const GIT: &[&str] = &["git", "libcurl3-gnutls"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Language {
    Python,
    Js,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only this SDK.
    language: Option<Language>,
    /// Older versions in full, too, and not only the newest.
    #[arg(long)]
    all: bool,
    /// Put the tables of calls into docs/compatibility.md.
    #[arg(long, requires = "all", conflicts_with = "language")]
    write: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let (artifacts, image) = setup::everything(Profile::Dev)?;
    let older = if args.all { Some(Depth::Full) } else { None };
    let (tally, matrices) = on_a_node(&artifacts, &image, args.language, older)?;
    let tables = matrix::write(&matrices)?;
    if args.write {
        matrix::put_into(&paths::root().join("docs/compatibility.md"), &tables)?;
    }
    println!("{}: {}", "calls by version", paths::kept().join("sdk-matrix.md").display());
    println!("{tally}");
    if tally.failed > 0 {
        bail!("{} test(s) of the SDK suites failed", tally.failed);
    }
    Ok(())
}

/// The newest SDKs in full and a sample with older ones, one after the other, against one fresh server.
pub(crate) fn suites(artifacts: &Artifacts, image: &Path) -> Result<Tally> {
    Ok(on_a_node(artifacts, image, None, Some(Depth::Sample))?.0)
}

/// Where suites run: a node that has the template, and what clients need to find both.
pub(crate) struct Stage<'a> {
    node: &'a Node,
    image: &'a Path,
    git: Option<PathBuf>,
}

impl Stage<'_> {
    fn prepare(&self, run: Run) -> Run {
        let run = self.node.client_env().into_iter().fold(run, |run, (name, value)| run.env(name, value));
        let run = run.env("AENV_TEMPLATE", TEMPLATE).env("AENV_IMAGE", format!("oci:{}", self.image.display()));
        match &self.git {
            Some(packages) => run.env("AENV_GIT_PACKAGES", packages),
            None => run,
        }
    }
}

fn on_a_node(
    artifacts: &Artifacts,
    image: &Path,
    only: Option<Language>,
    older: Option<Depth>,
) -> Result<(Tally, Vec<Matrix>)> {
    // Without it the tests that want it are skipped, and say so.
    let git = debs::fetch("git", GIT).inspect_err(|error| eprintln!("{error:#}")).ok();
    let node = Node::start(artifacts, &Home::named("sdk", artifacts)?)?;
    node.pull(image, TEMPLATE)?;
    let stage = Stage { node: &node, image, git };
    let mut tally = Tally::default();
    let mut matrices = Vec::new();
    for language in [Language::Python, Language::Js] {
        if only.is_some_and(|only| only != language) {
            continue;
        }
        let mut reports = Vec::new();
        for (age, pinned) in language.pinned()?.iter().enumerate() {
            let depth = match (age, older) {
                (0, _) => Depth::Full,
                (_, Some(depth)) => depth,
                (_, None) => break,
            };
            let ran = language.suite(&stage, pinned, depth)?;
            tally += ran.tally;
            reports.extend(ran.report.filter(|_| depth == Depth::Full));
        }
        matrices.push(Matrix { language: language.name(), reports });
    }
    node.stop()?;
    Ok((tally, matrices))
}

impl Language {
    fn name(self) -> &'static str {
        match self {
            Self::Python => "Python",
            Self::Js => "JavaScript",
        }
    }

    fn pinned(self) -> Result<Vec<Pinned>> {
        let dir = match self {
            Self::Python => "python/versions",
            Self::Js => "js/versions",
        };
        versions::pinned(&folder().join(dir))
    }

    fn suite(self, stage: &Stage<'_>, pinned: &Pinned, depth: Depth) -> Result<Ran> {
        match self {
            Self::Python => suites::python(stage, pinned, depth),
            Self::Js => suites::js(stage, pinned, depth),
        }
    }
}

/// Folder of the suites.
pub(crate) fn folder() -> PathBuf {
    paths::root().join("e2e/sdk")
}

/// The environment with the newest Python SDK in it.
pub(crate) fn python_venv() -> Result<Venv> {
    let pinned = Language::Python.pinned()?;
    // There is one at least.
    suites::python_venv(&pinned[0])
}
