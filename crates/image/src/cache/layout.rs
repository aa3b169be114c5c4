//! Where what is in the cache.

use std::path::{Path, PathBuf};

use super::lease::LeaseKind;
use crate::digest::Digest;

/// The file of a layer in its directory: what overlaybd looks for there.
pub(super) const COMMIT: &str = "overlaybd.commit";
/// Ends of the two files of a resolved image. The first is there when all is.
pub(super) const IMAGE: &str = "-image.json";
pub(super) const METADATA: &str = ".metadata.json";
/// Longest part of a repository's name that goes into a file's.
const MAX_REPOSITORY: usize = 96;

/// Paths below the root.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    root: PathBuf,
}

impl Layout {
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Directories that must be there.
    pub(super) fn directories(&self) -> Vec<PathBuf> {
        let leases = LeaseKind::ALL.map(|kind| self.leases(kind));
        [self.commits(), self.indexes(), self.configs(), self.locks(), self.staging()]
            .into_iter()
            .chain(leases)
            .collect()
    }

    pub(super) fn gc_lock(&self) -> PathBuf {
        self.root.join("gc.lock")
    }

    pub(super) fn commits(&self) -> PathBuf {
        self.root.join("commits")
    }

    pub(super) fn commit_dir(&self, digest: &Digest) -> PathBuf {
        self.commits().join(digest.dashed())
    }

    pub(super) fn commit(&self, digest: &Digest) -> PathBuf {
        self.commit_dir(digest).join(COMMIT)
    }

    /// The layer that `path` is the file, or the directory, of.
    pub(super) fn digest_of(&self, path: &Path) -> Option<Digest> {
        let inside = path.strip_prefix(self.commits()).ok()?;
        let mut parts = inside.components();
        let digest = Digest::from_dashed(parts.next()?.as_os_str().to_str()?)?;
        match parts.next() {
            None => Some(digest),
            Some(name) if name.as_os_str() == COMMIT && parts.next().is_none() => Some(digest),
            Some(_) => None,
        }
    }

    pub(super) fn indexes(&self) -> PathBuf {
        self.root.join("indexes")
    }

    pub(super) fn index_dir(&self, source: &Digest) -> PathBuf {
        self.indexes().join(source.dashed())
    }

    pub(super) fn index(&self, source: &Digest, key: &Digest) -> PathBuf {
        self.index_dir(source).join(format!("{}.json", key.dashed()))
    }

    pub(super) fn configs(&self) -> PathBuf {
        self.root.join("configs")
    }

    /// What the names of a resolved image's files begin with. An image that stays in its registry is another one in each
    /// repository.
    pub(super) fn image_name(digest: &Digest, repository: Option<&str>) -> String {
        let Some(repository) = repository else { return digest.dashed() };
        let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_') { c } else { '_' };
        let repository: String = repository.chars().map(plain).take(MAX_REPOSITORY).collect();
        format!("{}-{repository}", digest.dashed())
    }

    pub(super) fn image(&self, name: &str) -> PathBuf {
        self.configs().join(format!("{name}{IMAGE}"))
    }

    pub(super) fn metadata(&self, name: &str) -> PathBuf {
        self.configs().join(format!("{name}{METADATA}"))
    }

    pub(super) fn leases(&self, kind: LeaseKind) -> PathBuf {
        self.root.join("leases").join(kind.name())
    }

    pub(super) fn lease(&self, kind: LeaseKind, owner: &str) -> PathBuf {
        self.leases(kind).join(format!("{owner}.json"))
    }

    pub(super) fn locks(&self) -> PathBuf {
        self.root.join("locks")
    }

    pub(super) fn staging(&self) -> PathBuf {
        self.root.join("staging")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_layers_own_file_and_directory_name_it() {
        let layout = Layout::new("/c".into());
        let digest = Digest::of(b"x");
        assert_eq!(layout.digest_of(&layout.commit(&digest)), Some(digest.clone()));
        assert_eq!(layout.digest_of(&layout.commit_dir(&digest)), Some(digest.clone()));
        for path in ["/c/commits", "/c/commits/x/overlaybd.commit", "/elsewhere/overlaybd.commit"] {
            assert_eq!(layout.digest_of(Path::new(path)), None, "{path}");
        }
        assert_eq!(layout.digest_of(&layout.commit_dir(&digest).join("other")), None);
    }

    #[test]
    fn names_of_images_stay_within_what_a_file_can_be_called() {
        let digest = Digest::of(b"x");
        let name = Layout::image_name(&digest, Some(&format!("a.b:5/../{}", "x".repeat(500))));
        assert!(name.starts_with(&format!("{}-a.b_5_.._xxx", digest.dashed())), "{name}");
        assert!(name.len() + METADATA.len() < 255);
    }
}
