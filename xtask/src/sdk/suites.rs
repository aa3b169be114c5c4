//! Running the suites of one language with one set of pinned packages.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::matrix::Report;
use super::versions::Pinned;
use super::{Stage, folder};
use crate::paths;
use crate::python::Venv;
use crate::sh::Run;
use crate::test::tally::{Tally, number_before};

/// How much of a suite is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// All of it.
    Full,
    /// Create, connect, run, files and kill: that an older SDK has not been forgotten.
    Sample,
}

/// Suites that are run and told about on their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The SDK itself; in JavaScript with the command-line client.
    Sdk,
    /// The SDK's code interpreter, on the template that the stage has for it.
    Interpreter,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Sdk => "sdk",
            Self::Interpreter => "interpreter",
        }
    }

    fn python_module(self) -> &'static str {
        match self {
            Self::Sdk => "aenv_suite",
            Self::Interpreter => "interpreter_suite",
        }
    }
}

/// Names, or parts of names, of the tests that a sample takes; the same in effect in both languages.
const PYTHON_SAMPLE: &[&str] = &[
    "test_from_creation_to_kill",
    "test_connect_reaches_the_same_machine",
    "test_run_gives_stdout",
    "test_text_is_read",
];
const JS_SAMPLE: &str = "from creation to kill|found by its metadata|connect reaches the same machine|run gives stdout|\
                         text is read as it was written";

/// Needs a template of its own, and is run on its own.
const JS_INTERPRETER: &str = "interpreter.test.mjs";

/// The environment with the Python SDKs in it.
pub(crate) fn python_venv(pinned: &Pinned) -> Result<Venv> {
    Venv::ensure(&format!("e2b-{}", pinned.version), &pinned.path)
}

pub(crate) fn python(stage: &Stage<'_>, pinned: &Pinned, part: Part, depth: Depth) -> Result<Tally> {
    let venv = python_venv(pinned)?;
    let name = report_name("python", part, pinned);
    let report = fresh(&format!("{name}.txt"))?;
    let run = Run::new(venv.program("python"))
        .args(["-m", part.python_module(), "--report"])
        .arg(&report)
        .dir(folder().join("python"));
    let run = match depth {
        Depth::Full => run.arg("--calls").arg(fresh(&format!("{name}.json"))?),
        Depth::Sample => run.args(PYTHON_SAMPLE.iter().flat_map(|test| ["-k", test])),
    };
    let ok = stage.prepare(run).succeeds();
    Ok(read_report(&report, ok))
}

pub(crate) fn js(stage: &Stage<'_>, pinned: &Pinned, part: Part, depth: Depth) -> Result<Tally> {
    let Some(path) = js_path()? else {
        eprintln!("skipped: neither a Node.js that the SDK supports nor the PyPI package that carries one");
        return Ok(Tally::of_skip());
    };
    let installed = js_packages(pinned, &path)?;
    let mut tests = copy_js_files(&installed)?;
    let name = report_name("js", part, pinned);
    let report = fresh(&format!("{name}.txt"))?;
    let mut run = Run::new("node")
        .args(["--import", "./record.mjs", "--test", "--test-reporter=spec", "--test-reporter-destination=stdout"])
        .arg("--test-reporter=tap")
        .arg(format!("--test-reporter-destination={}", report.display()));
    if depth == Depth::Sample {
        tests.retain(|file| file == "smoke.test.mjs");
        let run = run.arg(format!("--test-name-pattern={JS_SAMPLE}")).args(&tests);
        let ok = stage.prepare(run.dir(&installed).env("PATH", &path)).succeeds();
        return Ok(read_report(&report, ok));
    }
    tests.retain(|file| (file == JS_INTERPRETER) == (part == Part::Interpreter));
    let (calls, notes) = (fresh(&format!("{name}.json"))?, fresh(&format!("{name}.notes"))?);
    fs::create_dir(&notes).with_context(|| format!("create {}", notes.display()))?;
    run = run.args(&tests).dir(&installed).env("PATH", &path).env("AENV_CALLS", &notes);
    let ok = stage.prepare(run).succeeds();
    let mut tally = read_report(&report, ok);
    // One more test: that every public call was made.
    let run = Run::new("node").arg("calls.mjs").arg(part.name()).arg(&notes).arg(&calls);
    tally += Tally::of_step(run.dir(&installed).env("PATH", &path).succeeds());
    Ok(tally)
}

/// What suites with this set of packages said when they last ran in full; nothing if they never did.
pub(crate) fn last_report(language: &str, pinned: &Pinned) -> Result<Option<Report>> {
    let mut found: Option<Report> = None;
    for part in [Part::Sdk, Part::Interpreter] {
        let path = reports()?.join(format!("{}.json", report_name(language, part, pinned)));
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let report: Report = serde_json::from_str(&text).with_context(|| format!("read {}", path.display()))?;
        found.get_or_insert_default().add(report);
    }
    Ok(found)
}

fn report_name(language: &str, part: Part, pinned: &Pinned) -> String {
    format!("{language}-{}-{}", part.name(), pinned.version)
}

/// The folder with the pinned packages and our files beside them, made among the build products: the source tree stays
/// clean.
fn js_packages(pinned: &Pinned, path: &OsString) -> Result<PathBuf> {
    let installed = paths::kept().join("js").join(&pinned.version);
    fs::create_dir_all(&installed).with_context(|| format!("create {}", installed.display()))?;
    let wanted = fs::read(pinned.path.join("package-lock.json")).context("read package-lock.json")?;
    let stamp = installed.join("lock.installed");
    if fs::read(&stamp).ok() != Some(wanted.clone()) {
        for file in ["package.json", "package-lock.json"] {
            fs::copy(pinned.path.join(file), installed.join(file)).with_context(|| format!("copy {file}"))?;
        }
        Run::new("npm").args(["ci", "--no-audit", "--no-fund"]).dir(&installed).env("PATH", path).run()?;
        fs::write(&stamp, &wanted)?;
    }
    Ok(installed)
}

/// Puts our files beside the packages; returns the names of those with tests.
fn copy_js_files(installed: &Path) -> Result<Vec<String>> {
    let mut tests = Vec::new();
    for entry in fs::read_dir(folder().join("js"))? {
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
    Ok(tests)
}

/// `PATH` with a `node` and an `npm` that the SDK supports.
fn js_path() -> Result<Option<OsString>> {
    let Some(programs) = node_programs() else { return Ok(None) };
    let rest = env::var_os("PATH").unwrap_or_default();
    Ok(Some(env::join_paths([programs].into_iter().chain(env::split_paths(&rest)))?))
}

/// Folder with a `node` and an `npm` that the SDK supports: the machine's, else those of the PyPI package (Debian 12's
/// and Ubuntu 24.04's are too old).
fn node_programs() -> Option<PathBuf> {
    const OLDEST: u32 = 20;
    if let (Some(node), true) = (paths::which("node"), paths::which("npm").is_some()) {
        let version = Run::new(&node).arg("--version").quiet().read().unwrap_or_default();
        let major =
            version.trim().trim_start_matches('v').split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_some_and(|major| major >= OLDEST) {
            return node.parent().map(Path::to_owned);
        }
    }
    match Venv::ensure("node", &folder().join("js/requirements.txt")) {
        Ok(venv) => Some(venv.programs()),
        Err(error) => {
            eprintln!("{error:#}");
            None
        }
    }
}

/// Where suites leave what they have to say.
fn reports() -> Result<PathBuf> {
    let dir = paths::kept().join("reports");
    fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    Ok(dir)
}

/// Path of something that a suite leaves; nothing is there yet.
fn fresh(name: &str) -> Result<PathBuf> {
    let path = reports()?.join(name);
    let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
    match removed {
        Err(error) if path.exists() => Err(error).with_context(|| format!("remove {}", path.display())),
        _ => Ok(path),
    }
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
