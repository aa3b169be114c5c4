//! Packages of the image's distribution, for guests that reach no mirror: fetched and verified by `apt-get` with folders of
//! its own, so that the host's release does not matter and nothing of the host's is changed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::image::{SUITE, mirrors};
use crate::paths;
use crate::sh::{Run, say};

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The folder `name` with the newest of `packages`, without what they depend on; fetched once.
pub(crate) fn fetch(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let folder = paths::kept().join("debs").join(name);
    // Written last: a folder without it was not finished.
    let stamp = folder.join("packages");
    let wanted = format!("{SUITE}\n{}\n", packages.join("\n"));
    if fs::read_to_string(&stamp).is_ok_and(|fetched| fetched == wanted) {
        return Ok(folder);
    }
    say(format_args!("fetching {} of Debian {SUITE}", packages.join(", ")));
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let root = tempfile::tempdir_in(paths::kept()).context("make a folder for apt")?;
    let apt = || apt(root.path());
    prepare(root.path())?;
    apt().arg("update").run_hushed()?;
    apt().arg("download").args(packages).dir(&folder).run_hushed()?;
    fs::write(&stamp, wanted).context("mark the packages fetched")?;
    Ok(folder)
}

fn prepare(root: &Path) -> Result<()> {
    for dir in ["lists/partial", "cache/archives/partial", "empty"] {
        fs::create_dir_all(root.join(dir)).context("make apt's folders")?;
    }
    fs::write(root.join("status"), "").context("write apt's status")?;
    let (mirror, security) = mirrors();
    let sources = format!(
        "deb [signed-by={KEYRING}] {mirror} {SUITE} main\ndeb [signed-by={KEYRING}] {mirror} {SUITE}-updates main\n\
         deb [signed-by={KEYRING}] {security} {SUITE}-security main\n"
    );
    fs::write(root.join("sources.list"), sources).context("write apt's sources")
}

fn apt(root: &Path) -> Run {
    let at = |key: &str, file: &str| format!("{key}={}", root.join(file).display());
    let options = [
        at("Dir::State::lists", "lists"),
        at("Dir::State::status", "status"),
        at("Dir::Cache", "cache"),
        at("Dir::Etc::sourcelist", "sources.list"),
        at("Dir::Etc::sourceparts", "empty"),
        at("Dir::Etc::preferencesparts", "empty"),
        "APT::Architecture=amd64".to_owned(),
        "APT::Sandbox::User=root".to_owned(),
        "Acquire::Languages=none".to_owned(),
        "Acquire::Retries=3".to_owned(),
    ];
    options.iter().fold(Run::new("apt-get").arg("--quiet").quiet(), |run, option| run.arg("--option").arg(option))
}
