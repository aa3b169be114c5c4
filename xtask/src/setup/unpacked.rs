//! Programs of the distribution's packages, unpacked beside our build products and not installed: some packages would start a
//! service on this machine, and one program is all we want of them.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::packages;
use crate::paths;
use crate::sh::{Run, say};

fn tools() -> PathBuf {
    paths::kept().join("tools")
}

/// `PATH` with the programs that setup fetched added at its end.
pub(crate) fn tool_path() -> Result<OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs = env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .chain([tools().join("usr/bin")]);
    env::join_paths(dirs).context("join PATH")
}

/// The `docker-registry` that serves pulls in the end-to-end tests.
pub(super) fn registry() -> Result<()> {
    program("docker-registry", "usr/bin/docker-registry").map(drop)
}

/// The program at `path` (without the first slash) in `package`: this machine's own, or the package's, unpacked.
pub(crate) fn program(package: &str, path: &str) -> Result<PathBuf> {
    let unpacked = tools().join(path);
    if let Some(installed) = path.rsplit('/').next().and_then(paths::which) {
        return Ok(installed);
    }
    if unpacked.is_file() {
        return Ok(unpacked);
    }
    say(format_args!("fetching {package} (unpacked, not installed)"));
    if !packages::has_candidate(package) {
        packages::update()?;
    }
    fs::create_dir_all(paths::kept()).with_context(|| format!("create {}", paths::kept().display()))?;
    let download = tempfile::tempdir_in(paths::kept()).context("make a download folder")?;
    Run::new("apt-get").args(["download", "-q", package]).dir(download.path()).run()?;
    let deb = fs::read_dir(download.path())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"));
    let Some(deb) = deb else { bail!("`apt-get download {package}` left no package file") };
    Run::new("dpkg-deb").arg("-x").arg(deb).arg(tools()).run()?;
    Ok(unpacked)
}
