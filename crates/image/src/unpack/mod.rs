//! Applying image layers to a directory, exactly as the container world means them.
//!
//! A layer is a tar archive of changes against the layers below it. Three rules make the result independent of the
//! order of its members, which the format leaves open:
//!
//! * Whiteouts (`.wh.NAME`) and opaque marks (`.wh..wh..opq`) speak of lower layers only. They are collected in a
//!   first pass over the archive and applied before anything of this layer is unpacked.
//! * A directory that replaces something else does so in that first step too, so that no member is unpacked
//!   through a symbolic link that the same layer takes away.
//! * Directory times are set last: unpacking into a directory changes them. One that a layer does not list keeps the
//!   time that it had below.
//!
//! Nothing is ever followed out of the root: see [`tree`].

mod budget;
mod node;
mod path;
mod plan;
mod tree;

use std::io::{self, Read};
use std::path::Path;

use tokio_util::sync::CancellationToken;

pub(crate) use self::budget::Budget;
use self::path::EntryPath;
use self::plan::Plan;
use self::tree::Tree;
use crate::archive::Members;
use crate::digest::{Digest, Digesting};

/// Why a layer could not be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The bytes are no archive, or a damaged one.
    #[error("the archive is damaged")]
    Malformed {
        /// What is wrong with them.
        source: io::Error,
    },
    /// A member that no honest image holds.
    #[error("refused {path:?}: {problem}")]
    Refused {
        /// The member's path, as written in the archive.
        path: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The unpacked content is not what the image's configuration promises.
    #[error("the content's digest is {found}, the image's configuration says {expected}")]
    WrongContent {
        /// From the configuration's `rootfs.diff_ids`.
        expected: Digest,
        /// Of what was unpacked.
        found: Digest,
    },
    /// More than an import may unpack.
    #[error("it unpacks to more than {limit}")]
    TooLarge {
        /// The limit, in words.
        limit: String,
    },
    /// More than the file system has room for.
    #[error("no space: it unpacks to more than the {free} that are free on the disk")]
    NoSpace {
        /// What was free when unpacking began.
        free: aenv_model::Bytes,
    },
    /// The file system refused something.
    #[error("{doing} {path:?}")]
    Io {
        /// What was being done, as the start of a sentence.
        doing: &'static str,
        /// To which path inside the image.
        path: String,
        /// Why it failed.
        source: io::Error,
    },
    /// The import was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl UnpackError {
    fn io(doing: &'static str, path: &EntryPath, source: impl Into<io::Error>) -> Self {
        Self::Io { doing, path: path.to_string(), source: source.into() }
    }

    /// An error of the archive's reader: of the file system if the kernel spoke, else of the archive.
    fn reading(source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(_) => Self::Io { doing: "read the archive at", path: String::new(), source },
            None => Self::Malformed { source },
        }
    }
}

/// A directory that layers are applied to, lowest first.
pub(crate) struct Unpacker {
    tree: Tree,
    budget: Budget,
    cancel: CancellationToken,
    /// Whether nothing lies below the next layer.
    lowest: bool,
    buffer: Vec<u8>,
}

impl Unpacker {
    /// Begins with the directory `root`, which holds the layers below already, or nothing if `lowest`.
    ///
    /// Blocking, as all of this type is.
    pub(crate) fn new(
        root: &Path,
        lowest: bool,
        budget: Budget,
        cancel: CancellationToken,
    ) -> Result<Self, UnpackError> {
        let tree = Tree::open(root).map_err(|error| UnpackError::io("open", &EntryPath::root(), error))?;
        Ok(Self { tree, budget, cancel, lowest, buffer: vec![0; 128 << 10] })
    }

    /// Applies the next layer. `open` gives its uncompressed bytes from the start, and is called once or twice;
    /// `diff_id` is the digest that they must have.
    pub(crate) fn apply<R: Read>(
        &mut self,
        diff_id: &Digest,
        mut open: impl FnMut() -> io::Result<R>,
    ) -> Result<(), UnpackError> {
        self.tree.name_aside(format!(".removed-{}", &diff_id.hex()[..32]));
        // The lowest layer has nothing below that it could take away.
        if !self.lowest {
            let plan = Plan::read(open().map_err(UnpackError::reading)?, &self.cancel)?;
            plan.apply(&mut self.tree)?;
        }
        self.lowest = false;
        let input = open().map_err(|source| UnpackError::Malformed { source })?;
        let mut members = Members::new(Digesting::new(input, diff_id.algorithm()));
        while let Some(member) = self.check(members.next())? {
            self.budget.charge_entry()?;
            let path = EntryPath::parse(&member.path)?;
            if path.whiteout()?.is_none() {
                self.unpack(&path, &member, &mut members)?;
            }
        }
        let input = self.check(members.drain())?;
        let found = input.finish();
        if found != *diff_id {
            return Err(UnpackError::WrongContent { expected: diff_id.clone(), found });
        }
        Ok(())
    }

    /// Settles what can only be settled at the end, and gives back what may still be unpacked elsewhere.
    pub(crate) fn finish(self) -> Result<Budget, UnpackError> {
        self.tree.finish(&self.cancel)?;
        Ok(self.budget)
    }

    fn check<T>(&self, result: io::Result<T>) -> Result<T, UnpackError> {
        if self.cancel.is_cancelled() {
            return Err(UnpackError::Cancelled);
        }
        result.map_err(UnpackError::reading)
    }
}

#[cfg(test)]
#[path = "../../tests/common/layer.rs"]
pub(crate) mod layer;
#[cfg(test)]
pub(crate) mod model_tests;
#[cfg(test)]
mod tests;
