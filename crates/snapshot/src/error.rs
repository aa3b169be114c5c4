//! What can go wrong with a capture.

use std::io;
use std::path::{Path, PathBuf};

use aenv_model::CaptureId;
use aenv_vmm_driver::VmmError;

/// Why a capture could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The host's disk is full.
    #[error("not enough disk space on the node to {doing}")]
    NoSpace {
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Something on the host failed.
    #[error("{doing} {path}", path = path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The machine would not.
    #[error(transparent)]
    Machine(#[from] VmmError),
    /// The storage daemon, or the memory of the machine, would not.
    #[error("{doing}")]
    Backing {
        /// What was being done.
        doing: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// There is no such capture.
    #[error("capture {id} is not on this node")]
    Gone {
        /// Which.
        id: CaptureId,
    },
    /// It cannot be understood.
    #[error("capture {id} cannot be used: {problem}")]
    Unusable {
        /// Which.
        id: CaptureId,
        /// What is wrong.
        problem: String,
    },
}

impl CaptureError {
    /// `source` happened to `path`.
    pub(crate) fn io(doing: &'static str, path: &Path, source: io::Error) -> Self {
        match is_full(&source) {
            true => Self::NoSpace { doing, source },
            false => Self::Io { doing, path: path.to_owned(), source },
        }
    }

    /// `source` happened below.
    pub(crate) fn backing(doing: &'static str, source: io::Error) -> Self {
        if is_full(&source) { Self::NoSpace { doing, source } } else { Self::Backing { doing, source } }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
