//! `sdk`: the official E2B SDKs for Python and JavaScript, unmodified from their registries, against a real server.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::artifacts::{Artifacts, Profile};
use crate::node::{Home, Node};
use crate::paths;
use crate::python::Venv;
use crate::setup;
use crate::sh::{Run, say};
use crate::test::tally::{Tally, number_before};

/// The template that the suites create their sandboxes from.
pub(crate) const TEMPLATE: &str = "base";

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Language {
    Python,
    Js,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only this SDK.
    language: Option<Language>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let (artifacts, image) = setup::everything(Profile::Dev)?;
    let wanted = |language| args.language.is_none_or(|only| only == language);
    let tally = on_a_node(&artifacts, &image, wanted(Language::Python), wanted(Language::Js))?;
    println!("{tally}");
    if tally.failed > 0 {
        bail!("{} test(s) of the SDK suites failed", tally.failed);
    }
    Ok(())
}

/// Both suites, one after the other, against one fresh server.
pub(crate) fn suites(artifacts: &Artifacts, image: &Path) -> Result<Tally> {
    on_a_node(artifacts, image, true, true)
}

fn on_a_node(artifacts: &Artifacts, image: &Path, with_python: bool, with_js: bool) -> Result<Tally> {
    let node = Node::start(artifacts, &Home::named("sdk", artifacts)?)?;
    node.pull(image, TEMPLATE)?;
    let mut tally = Tally::default();
    if with_python {
        tally += python(&node, image)?;
    }
    if with_js {
        tally += js(&node, image)?;
    }
    node.stop()?;
    Ok(tally)
}

/// Folder of the suites.
pub(crate) fn folder() -> PathBuf {
    paths::root().join("e2e/sdk")
}

/// The environment with the Python SDK in it.
pub(crate) fn python_venv() -> Result<Venv> {
    Venv::ensure("e2b", &folder().join("python/requirements.txt"))
}

fn on_the_suite(run: Run, node: &Node, image: &Path) -> Run {
    let run = node.client_env().into_iter().fold(run, |run, (name, value)| run.env(name, value));
    run.env("AENV_TEMPLATE", TEMPLATE).env("AENV_IMAGE", format!("oci:{}", image.display()))
}

fn python(node: &Node, image: &Path) -> Result<Tally> {
    say("E2B Python SDK");
    let venv = python_venv()?;
    let report = report_file("python")?;
    let run = Run::new(venv.program("python"))
        .args(["-m", "aenv_suite", "--report"])
        .arg(&report)
        .dir(folder().join("python"));
    let ok = on_the_suite(run, node, image).succeeds();
    Ok(read_report(&report, ok))
}

fn js(node: &Node, image: &Path) -> Result<Tally> {
    say("E2B JavaScript SDK");
    let Some(programs) = node_programs()? else {
        eprintln!("skipped: neither a Node.js that the SDK supports nor the PyPI package that carries one");
        return Ok(Tally::of_skip());
    };
    let path =
        env::join_paths([programs].into_iter().chain(env::split_paths(&env::var_os("PATH").unwrap_or_default())))?;
    let dir = folder().join("js");
    let wanted = fs::read(dir.join("package-lock.json")).context("read package-lock.json")?;
    // Made beside the build products, so that the source tree stays clean.
    let installed = paths::kept().join("js");
    let stamp = installed.join("lock.installed");
    fs::create_dir_all(&installed)?;
    if fs::read(&stamp).ok() != Some(wanted.clone()) {
        for file in ["package.json", "package-lock.json"] {
            fs::copy(dir.join(file), installed.join(file)).with_context(|| format!("copy {file}"))?;
        }
        Run::new("npm").args(["ci", "--no-audit", "--no-fund"]).dir(&installed).env("PATH", &path).run()?;
        fs::write(&stamp, &wanted)?;
    }
    let mut tests = Vec::new();
    for entry in fs::read_dir(&dir)? {
        let file = entry?.path();
        let Some(name) = file.file_name().and_then(|name| name.to_str()).filter(|name| name.ends_with(".mjs")) else {
            continue;
        };
        fs::copy(&file, installed.join(name)).with_context(|| format!("copy {}", file.display()))?;
        if name.ends_with(".test.mjs") {
            tests.push(name.to_owned());
        }
    }
    tests.sort();
    let report = report_file("js")?;
    let run = Run::new("node")
        .args(["--test", "--test-reporter=spec", "--test-reporter-destination=stdout", "--test-reporter=tap"])
        .arg(format!("--test-reporter-destination={}", report.display()))
        .args(&tests)
        .dir(&installed)
        .env("PATH", &path);
    let ok = on_the_suite(run, node, image).succeeds();
    Ok(read_report(&report, ok))
}

/// Folder with a `node` and an `npm` that the SDK supports: the machine's, else those of the PyPI package (Debian 12's
/// and Ubuntu 24.04's are too old).
fn node_programs() -> Result<Option<PathBuf>> {
    const OLDEST: u32 = 20;
    if let (Some(node), true) = (paths::which("node"), paths::which("npm").is_some()) {
        let version = Run::new(&node).arg("--version").quiet().read().unwrap_or_default();
        let major =
            version.trim().trim_start_matches('v').split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_some_and(|major| major >= OLDEST) {
            return Ok(node.parent().map(Path::to_owned));
        }
    }
    match Venv::ensure("node", &folder().join("js/requirements.txt")) {
        Ok(venv) => Ok(Some(venv.programs())),
        Err(error) => {
            eprintln!("{error:#}");
            Ok(None)
        }
    }
}

fn report_file(name: &str) -> Result<PathBuf> {
    let dir = paths::kept().join("reports");
    fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    let file = dir.join(name);
    if file.exists() {
        fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
    }
    Ok(file)
}

/// Counts of a suite's report: the line that ours ends with, or the closing comments of node's TAP. No report, or a
/// runner that failed without a failing test, is one failure.
fn read_report(report: &Path, ok: bool) -> Tally {
    let text = fs::read_to_string(report).unwrap_or_default();
    let tap = |word: &str| -> usize {
        text.lines().rev().find_map(|line| line.strip_prefix(word)?.trim().parse().ok()).unwrap_or(0)
    };
    let mut tally = Tally {
        passed: number_before(&text, " passed") + tap("# pass "),
        // A test whose preparation failed is cancelled, in node's words.
        failed: number_before(&text, " failed") + tap("# fail ") + tap("# cancelled "),
        skipped: number_before(&text, " skipped") + tap("# skipped "),
    };
    if tally.failed == 0 && (!ok || tally == Tally::default()) {
        tally.failed = 1;
    }
    tally
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_reports_are_read() -> Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), "12 passed, 1 failed, 2 skipped\n")?;
        assert_eq!(read_report(file.path(), false), Tally { passed: 12, failed: 1, skipped: 2 });
        fs::write(file.path(), "ok 1 - x\n# tests 4\n# pass 2\n# fail 0\n# cancelled 1\n# skipped 1\n")?;
        assert_eq!(read_report(file.path(), false), Tally { passed: 2, failed: 1, skipped: 1 });
        Ok(())
    }

    #[test]
    fn a_suite_that_left_no_report_has_failed() {
        assert_eq!(read_report(Path::new("/nowhere"), true).failed, 1);
    }
}
