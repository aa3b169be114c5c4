//! The `docker-registry` that serves pulls in the end-to-end tests.
//!
//! Fetched from the distribution and unpacked beside our build products, not installed: the package would start a
//! service on port 5000 of this machine, and one static program is all we want of it.

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

pub(super) fn ensure() -> Result<()> {
    if paths::which("docker-registry").is_some() || tools().join("usr/bin/docker-registry").is_file() {
        return Ok(());
    }
    say("fetching docker-registry, which serves image pulls in the end-to-end tests (unpacked, not installed)");
    if !packages::has_candidate("docker-registry") {
        packages::update()?;
    }
    fs::create_dir_all(paths::kept()).with_context(|| format!("create {}", paths::kept().display()))?;
    let download = tempfile::tempdir_in(paths::kept()).context("make a download folder")?;
    Run::new("apt-get").args(["download", "-q", "docker-registry"]).dir(download.path()).run()?;
    let deb = fs::read_dir(download.path())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"));
    let Some(deb) = deb else { bail!("`apt-get download docker-registry` left no package file") };
    Run::new("dpkg-deb").arg("-x").arg(deb).arg(tools()).run()
}
