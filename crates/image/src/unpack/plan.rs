//! What a layer takes away from those below it: the first of the two passes.

use std::io::Read;

use tokio_util::sync::CancellationToken;

use super::UnpackError;
use super::path::{EntryPath, Whiteout};
use super::tree::Tree;
use crate::archive::{Kind, Members};

/// The removals of one layer.
#[derive(Debug, Default)]
pub(super) struct Plan {
    whiteouts: Vec<Whiteout>,
    directories: Vec<EntryPath>,
}

impl Plan {
    /// Collects the removals from an uncompressed layer.
    pub(super) fn read(input: impl Read, cancel: &CancellationToken) -> Result<Self, UnpackError> {
        let mut plan = Self::default();
        let mut members = Members::new(input);
        while let Some(member) = members.next().map_err(|error| match cancel.is_cancelled() {
            true => UnpackError::Cancelled,
            false => UnpackError::reading(error),
        })? {
            let path = EntryPath::parse(&member.path)?;
            match path.whiteout()? {
                Some(whiteout) => plan.whiteouts.push(whiteout),
                None if member.kind == Kind::Directory => plan.directories.push(path),
                None => {}
            }
        }
        // Shallow ones first: a link replaced by a directory must be gone before something below it is looked up.
        plan.directories.sort_by_key(EntryPath::depth);
        Ok(plan)
    }

    /// Removes from `tree`, which holds the lower layers only.
    pub(super) fn apply(self, tree: &mut Tree) -> Result<(), UnpackError> {
        for path in &self.directories {
            let Some((parents, name)) = path.split() else { continue };
            tree.remove_unless_directory(parents, name)
                .map_err(|error| UnpackError::io("make room for the directory", path, error))?;
        }
        for whiteout in &self.whiteouts {
            match whiteout {
                Whiteout::Nothing => {}
                Whiteout::Inside(path) => {
                    tree.clear(path).map_err(|error| UnpackError::io("empty the directory", path, error))?;
                }
                Whiteout::Path(path) => {
                    let Some((parents, name)) = path.split() else { continue };
                    tree.remove_lower(parents, name)
                        .map_err(|error| UnpackError::io("remove what a whiteout hides,", path, error))?;
                }
            }
        }
        Ok(())
    }
}
