//! What can go wrong with an object.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

use crate::key::Key;

/// What a caller can do about an [`ObjectError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectErrorKind {
    /// There is no such object.
    NotFound,
    /// The write's condition does not hold: somebody else was first. Read again, and decide again.
    Condition,
    /// The object is not as long as was expected.
    Length,
    /// The store refuses us.
    Denied,
    /// There is no room.
    NoSpace,
    /// The caller's file can't be read.
    File,
    /// The store failed or can't be reached; later it may not. A write may have been done all the same.
    Failed,
}

/// Why something could not be done with an object.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// There is none.
    #[error("there is no object {key} in {store}")]
    NotFound {
        /// Which store.
        store: String,
        /// Which object.
        key: Key,
    },
    /// It was to be written only if it is not there.
    #[error("object {key} is in {store} already")]
    Exists {
        /// Which store.
        store: String,
        /// Which object.
        key: Key,
    },
    /// It was to be written only if nobody else has since.
    #[error("object {key} in {store} has changed meanwhile")]
    Changed {
        /// Which store.
        store: String,
        /// Which object.
        key: Key,
    },
    /// More than was to be read at once.
    #[error("object {key} in {store} is {size} bytes long, more than {limit}")]
    TooLong {
        /// Which store.
        store: String,
        /// Which object.
        key: Key,
        /// How long it is.
        size: u64,
        /// How long it may be.
        limit: u64,
    },
    /// It ends before.
    #[error("object {key} in {store} does not hold bytes {}..{}", range.start, range.end)]
    OutOfRange {
        /// Which store.
        store: String,
        /// Which object.
        key: Key,
        /// What was asked for.
        range: Range<u64>,
    },
    /// We may not.
    #[error("{doing} object {key} in {store}: not permitted")]
    Denied {
        /// What was being done.
        doing: &'static str,
        /// Which store.
        store: String,
        /// Which object.
        key: Key,
        /// The store's words.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The store failed.
    #[error("{doing} object {key} in {store}")]
    Failed {
        /// What was being done.
        doing: &'static str,
        /// Which store.
        store: String,
        /// Which object; the folder, if it was a folder's.
        key: String,
        /// What happened.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The caller's file.
    #[error("read {path}, to be put into {store}", path = path.display())]
    File {
        /// Which store.
        store: String,
        /// Which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl ObjectError {
    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ObjectErrorKind {
        match self {
            Self::NotFound { .. } => ObjectErrorKind::NotFound,
            Self::Exists { .. } | Self::Changed { .. } => ObjectErrorKind::Condition,
            Self::TooLong { .. } | Self::OutOfRange { .. } => ObjectErrorKind::Length,
            Self::Denied { .. } => ObjectErrorKind::Denied,
            Self::File { .. } => ObjectErrorKind::File,
            Self::Failed { source, .. } => match source.downcast_ref::<io::Error>().map(io::Error::kind) {
                Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => ObjectErrorKind::NoSpace,
                _ => ObjectErrorKind::Failed,
            },
        }
    }
}
