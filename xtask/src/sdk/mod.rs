//! `sdk`: the official E2B SDKs for Python and JavaScript, unmodified from their registries, against a real server.

mod fuzz;
mod interpreter;
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
use crate::sh::{Run, say};
use crate::test::tally::Tally;
use matrix::Matrix;
use suites::{Depth, Part};
use versions::Pinned;

/// The template that the suites create their sandboxes from.
pub(crate) const TEMPLATE: &str = "base";

/// What the guest lacks for the SDK's git module: what else git depends on is in the image, or is for scripts of its own.
const GIT: &[&str] = &["git", "libcurl3-gnutls"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum What {
    /// The Python SDK.
    Python,
    /// The JavaScript SDK and the command-line client.
    Js,
    /// The code interpreter: its server here, its template, and its SDKs on that.
    Interpreter,
    /// Requests made up from the node's own document.
    Fuzz,
    /// Nothing: make the tables of what suites last said.
    Tables,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only this; without it, both SDKs.
    what: Option<What>,
    /// Older versions in full, too, and the code interpreter.
    #[arg(long)]
    all: bool,
    /// Put the tables of calls, each as it last went, into docs/compatibility.md.
    #[arg(long)]
    write: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let tally = match args.what {
        Some(What::Tables) => Tally::default(),
        Some(What::Fuzz) => {
            let (artifacts, image) = setup::everything(Profile::Dev)?;
            fuzz::run(&artifacts, &image)?
        }
        _ => planned(args)?,
    };
    let tables = matrix::write(&Language::ALL.into_iter().map(Language::matrix).collect::<Result<Vec<_>>>()?)?;
    if args.write {
        matrix::put_into(&paths::root().join("docs/compatibility.md"), &tables)?;
    }
    println!("calls by version: {}", paths::kept().join("sdk-matrix.md").display());
    println!("{tally}");
    if tally.failed > 0 {
        bail!("{} test(s) of the SDK suites failed", tally.failed);
    }
    Ok(())
}

fn planned(args: &Args) -> Result<Tally> {
    let (artifacts, image) = setup::everything(Profile::Dev)?;
    let plan = Plan {
        languages: Language::ALL.into_iter().filter(|language| args.wants(*language)).collect(),
        sdk: args.what != Some(What::Interpreter),
        older: args.all.then_some(Depth::Full),
        interpreter: args.what == Some(What::Interpreter) || (args.all && args.what.is_none()),
    };
    let mut tally = if plan.interpreter { interpreter::unit()? } else { Tally::default() };
    tally += on_a_node(&artifacts, &image, &plan)?;
    Ok(tally)
}

impl Args {
    fn wants(&self, language: Language) -> bool {
        match self.what {
            Some(What::Python) => language == Language::Python,
            Some(What::Js) => language == Language::Js,
            Some(What::Interpreter | What::Fuzz | What::Tables) | None => true,
        }
    }
}

/// The newest SDKs in full and a sample with older ones, one after the other, against one fresh server; and the code
/// interpreter's server without a guest, because building its template takes minutes where guests are emulated.
pub(crate) fn suites(artifacts: &Artifacts, image: &Path) -> Result<Tally> {
    let plan = Plan { languages: Language::ALL.to_vec(), sdk: true, older: Some(Depth::Sample), interpreter: false };
    let mut tally = on_a_node(artifacts, image, &plan)?;
    tally += interpreter::unit()?;
    Ok(tally)
}

/// What is run on a node.
struct Plan {
    languages: Vec<Language>,
    /// The suites of the SDKs themselves.
    sdk: bool,
    /// With versions that are not the newest, how much.
    older: Option<Depth>,
    interpreter: bool,
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
        let run = run.env("AENV_TEMPLATE", TEMPLATE).env("AENV_INTERPRETER_TEMPLATE", interpreter::TEMPLATE);
        let run = run.env("AENV_IMAGE", format!("oci:{}", self.image.display()));
        match &self.git {
            Some(packages) => run.env("AENV_GIT_PACKAGES", packages),
            None => run,
        }
    }
}

fn on_a_node(artifacts: &Artifacts, image: &Path, plan: &Plan) -> Result<Tally> {
    // Without it the tests that want it are skipped, and say so.
    let git = debs::fetch("git", GIT).inspect_err(|error| eprintln!("{error:#}")).ok();
    let node = Node::start(artifacts, &Home::named("sdk", artifacts)?)?;
    node.pull(image, TEMPLATE)?;
    let stage = Stage { node: &node, image, git };
    if plan.interpreter {
        interpreter::build(&stage, &python_venv()?)?;
    }
    let mut tally = Tally::default();
    for language in plan.languages.iter().copied() {
        for (age, pinned) in language.pinned()?.iter().enumerate() {
            let depth = match (age, plan.older) {
                (0, _) => Depth::Full,
                (_, Some(depth)) => depth,
                (_, None) => break,
            };
            if plan.sdk {
                tally += language.suite(&stage, pinned, Part::Sdk, depth)?;
            }
            if plan.interpreter {
                tally += language.suite(&stage, pinned, Part::Interpreter, depth)?;
            }
        }
    }
    node.stop()?;
    Ok(tally)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Language {
    Python,
    Js,
}

impl Language {
    const ALL: [Self; 2] = [Self::Python, Self::Js];

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

    fn suite(self, stage: &Stage<'_>, pinned: &Pinned, part: Part, depth: Depth) -> Result<Tally> {
        say(format_args!("{part:?} in {}, pinned with E2B {}", self.name(), pinned.version));
        match self {
            Self::Python => suites::python(stage, pinned, part, depth),
            Self::Js => suites::js(stage, pinned, part, depth),
        }
    }

    /// What became of each call, as the suites last said.
    fn matrix(self) -> Result<Matrix> {
        let key = match self {
            Self::Python => "python",
            Self::Js => "js",
        };
        let mut reports = Vec::new();
        for pinned in self.pinned()? {
            reports.extend(suites::last_report(key, &pinned)?);
        }
        Ok(Matrix { language: self.name(), reports })
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
