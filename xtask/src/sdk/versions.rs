//! Which SDKs the suites run with: what is pinned under `e2e/sdk/*/versions`, every package that comes along included.
//!
//! A file or folder there is named after the version of `e2b` in it; beside that, it has code interpreter and command-line
//! client of about the same time.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// One set of pinned packages.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pinned {
    /// In numbers, so that they can be ordered.
    order: Vec<u32>,
    /// Version of `e2b`.
    pub(crate) version: String,
    pub(crate) path: PathBuf,
}

/// The pinned sets in `dir`, the newest first; at least one.
pub(crate) fn pinned(dir: &Path) -> Result<Vec<Pinned>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let version = name.trim_end_matches(".txt").to_owned();
        let order = version.split('.').map(str::parse).collect::<Result<_, _>>();
        let order = order.with_context(|| format!("{} is not named after a version", path.display()))?;
        found.push(Pinned { order, version, path });
    }
    found.sort();
    found.reverse();
    if found.is_empty() {
        bail!("{} pins no version", dir.display());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_comes_first_by_number() -> Result<()> {
        let dir = tempfile::tempdir()?;
        for name in ["2.9.1.txt", "2.10.0.txt", "2.9.12.txt"] {
            fs::write(dir.path().join(name), "")?;
        }
        let versions: Vec<String> = pinned(dir.path())?.into_iter().map(|pinned| pinned.version).collect();
        assert_eq!(versions, ["2.10.0", "2.9.12", "2.9.1"]);
        fs::write(dir.path().join("latest"), "")?;
        assert!(pinned(dir.path()).is_err());
        Ok(())
    }
}
