//! Which of the distribution's kernels guests get: asked once, then remembered.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::apt::{Package, PrivateApt, blocking};
use crate::distribution::{Candidate, Distribution};
use crate::kernel::{GuestKernel, Origin, OriginPackage};
use crate::store::TEMPORARY;
use crate::{KitError, apt_sources};

/// Where downloaded packages are kept, below the cache.
const PACKAGES: &str = "packages";

/// The packages that the guest kernel is taken from, as kept in `<cache>/kernel.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Choice {
    /// Name of the [`Candidate`] that had them.
    suite: String,
    packages: Vec<Package>,
}

impl Choice {
    /// The choice of an earlier run. A file that is absent, or not of our making, is none.
    pub(crate) fn remembered(cache: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(Self::file(cache)).ok()?).ok()
    }

    /// Keeps the choice, and of the downloaded packages only its own. The caller holds the cache's lock.
    pub(crate) fn remember(&self, cache: &Path) -> Result<(), KitError> {
        let path = Self::file(cache);
        let json = serde_json::to_vec_pretty(self).map_err(|error| KitError::io("write", &path)(error.into()))?;
        aenv_durable::atomic_write(&path, &json, 0o644).map_err(KitError::io("write", &path))?;
        for entry in fs::read_dir(cache.join(PACKAGES)).into_iter().flatten().flatten() {
            if !self.packages.iter().any(|package| entry.file_name() == package.file.as_str()) {
                let old = entry.path();
                aenv_durable::remove_file_if_present(&old).map_err(KitError::io("remove old package", &old))?;
            }
        }
        Ok(())
    }

    pub(crate) fn origin(&self) -> Origin {
        let packages = self.packages.iter().map(OriginPackage::from).collect();
        Origin::Packages { suite: self.suite.clone(), packages }
    }

    fn file(cache: &Path) -> PathBuf {
        cache.join("kernel.json")
    }
}

/// Asks the distribution's suites, best first, for their newest kernel. The caller holds the cache's lock.
///
/// Errors: `UnknownDistribution`, `NoApt`, `NoKernelPackage` with what each suite answered.
pub(crate) async fn choose(cache: &Path, say: crate::Say<'_>) -> Result<Choice, KitError> {
    let mut tried = Vec::new();
    for candidate in candidates()? {
        say(&format!("asking {} for its newest {}", candidate.name, candidate.package));
        match ask(cache, &candidate).await {
            Ok(packages) => return Ok(Choice { suite: candidate.name, packages }),
            Err(error @ KitError::NoApt { .. }) => return Err(error),
            Err(error) => tried.push((candidate.name, error.to_string())),
        }
    }
    Err(KitError::NoKernelPackage { tried })
}

async fn ask(cache: &Path, candidate: &Candidate) -> Result<Vec<Package>, KitError> {
    let apt = private_apt(cache, candidate)?;
    let updated = apt.update().await;
    match apt.kernel_packages(candidate.package).await {
        Ok(packages) => {
            if let Err(error) = updated {
                // One suite of several is missing, or we are offline: the lists we have still say enough.
                tracing::warn!(suite = %candidate.name, %error, "package lists may be old or incomplete");
            }
            Ok(packages)
        }
        Err(error) => Err(updated.err().unwrap_or(error)),
    }
}

/// Downloads and unpacks the chosen kernel. Packages stay in the cache. The caller holds the cache's lock.
pub(crate) async fn fetch(cache: &Path, choice: &Choice, say: crate::Say<'_>) -> Result<GuestKernel, KitError> {
    let candidate = candidates()?.into_iter().find(|candidate| candidate.name == choice.suite);
    let candidate = candidate.ok_or_else(|| KitError::NoKernelPackage {
        tried: vec![(choice.suite.clone(), "is no longer a suite we would ask".to_owned())],
    })?;
    let apt = private_apt(cache, &candidate)?;
    let mut files = Vec::new();
    for package in &choice.packages {
        let megabytes = package.size as f64 / 1e6;
        say(&format!("guest kernel: {} {} from {} ({megabytes:.1} MB)", package.name, package.version, choice.suite));
        files.push(apt.download(package, &cache.join(PACKAGES), cache).await?);
    }
    let scratch = tempfile::Builder::new()
        .prefix(TEMPORARY)
        .tempdir_in(cache)
        .map_err(KitError::io("create a directory in", cache))?;
    let origin = choice.origin();
    blocking(move || GuestKernel::from_packages(origin, &files, scratch.path())).await
}

fn private_apt(cache: &Path, candidate: &Candidate) -> Result<PrivateApt, KitError> {
    PrivateApt::lay_out(&cache.join("apt").join(&candidate.name), &candidate.sources)
}

fn candidates() -> Result<Vec<Candidate>, KitError> {
    let os_release = Path::new("/etc/os-release");
    let text = fs::read_to_string(os_release).map_err(KitError::io("read", os_release))?;
    Ok(Distribution::from_os_release(&text)?.candidates(&apt_sources::read(Path::new("/etc/apt"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remembered_choice_reads_back_and_older_downloads_go() {
        let cache = tempfile::tempdir().unwrap();
        let packages = cache.path().join(PACKAGES);
        fs::create_dir(&packages).unwrap();
        fs::write(packages.join("old_1.deb"), b"old").unwrap();
        fs::write(packages.join("new_2.deb"), b"new").unwrap();
        let package = Package {
            name: "new".to_owned(),
            version: "2".to_owned(),
            file: "new_2.deb".to_owned(),
            size: 3,
            sha256: "00".to_owned(),
        };
        let choice = Choice { suite: "trixie".to_owned(), packages: vec![package] };
        choice.remember(cache.path()).unwrap();
        assert_eq!(Choice::remembered(cache.path()), Some(choice));
        assert!(packages.join("new_2.deb").exists() && !packages.join("old_1.deb").exists());
        fs::write(cache.path().join("kernel.json"), b"{").unwrap();
        assert_eq!(Choice::remembered(cache.path()), None);
    }
}
