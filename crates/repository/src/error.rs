//! What can go wrong with the repository.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use aenv_model::TemplateId;
use aenv_objects::{ObjectError, ObjectErrorKind, ParseKeyError};

use crate::cache::CacheError;

/// What a caller can do about a [`RepositoryError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RepositoryErrorKind {
    /// There is no such thing.
    NotFound,
    /// Somebody else has the name, or was first.
    Taken,
    /// The store cannot be reached, refuses us, fails, or is busy; later it may not.
    Unavailable,
    /// What is there cannot be used.
    Unusable,
    /// This node has no room.
    NoSpace,
    /// Something on this node failed.
    Local,
}

/// Why something could not be done with the repository.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RepositoryError {
    /// The store.
    #[error("the snapshot repository")]
    Store(#[from] ObjectError),
    /// Another template or snapshot has the name.
    #[error("the name '{alias}' is taken")]
    Taken {
        /// The name.
        alias: String,
    },
    /// Nothing has this id or name.
    #[error("'{0}' is not in the snapshot repository")]
    NotFound(String),
    /// It was deleted while something was done with it.
    #[error("{0} was deleted meanwhile")]
    Deleted(TemplateId),
    /// Another node, or another request, has begun the build.
    #[error("the build was started already")]
    Started,
    /// Others change it all the time.
    #[error("{what} is being changed by others all the time")]
    Contended {
        /// What.
        what: String,
    },
    /// Garbage is being removed, for too long.
    #[error("garbage is being removed from the snapshot repository; try again")]
    Busy,
    /// It took longer than anybody waits for it.
    #[error("{doing} took too long")]
    Late {
        /// What.
        doing: &'static str,
    },
    /// It is not what it should be.
    #[error("{what} in the snapshot repository cannot be used: {problem}")]
    Corrupt {
        /// What.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// No name for anything.
    #[error("a name that the snapshot repository cannot have")]
    Name {
        /// Why.
        source: ParseKeyError,
    },
    /// What others have waited for as well.
    #[error(transparent)]
    Shared(Arc<CacheError>),
    /// A file of this host.
    #[error("{doing} {path}", path = path.display())]
    File {
        /// What was being done.
        doing: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl RepositoryError {
    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> RepositoryErrorKind {
        match self {
            Self::NotFound(_) | Self::Deleted(_) => RepositoryErrorKind::NotFound,
            Self::Taken { .. } | Self::Started => RepositoryErrorKind::Taken,
            Self::Contended { .. } | Self::Busy | Self::Late { .. } => RepositoryErrorKind::Unavailable,
            Self::Corrupt { .. } | Self::Name { .. } => RepositoryErrorKind::Unusable,
            Self::Shared(error) => match &**error {
                CacheError::Bring(error) => error.kind(),
                CacheError::Other { .. } => RepositoryErrorKind::Unusable,
                CacheError::Io { source, .. } => local(source),
            },
            Self::File { source, .. } => local(source),
            Self::Store(error) => match error.kind() {
                // What a record names is there: data first, record last, and nothing is removed that a record names.
                ObjectErrorKind::NotFound | ObjectErrorKind::Length => RepositoryErrorKind::Unusable,
                ObjectErrorKind::File => RepositoryErrorKind::Local,
                _ => RepositoryErrorKind::Unavailable,
            },
        }
    }

    /// It with its causes, in one line.
    #[must_use]
    pub fn report(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    }

    /// `source` happened to `path`.
    pub(crate) fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { doing, path, source }
    }
}

fn local(error: &io::Error) -> RepositoryErrorKind {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => RepositoryErrorKind::NoSpace,
        _ => RepositoryErrorKind::Local,
    }
}
