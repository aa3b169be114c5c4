//! What can go wrong with an import.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use aenv_model::Bytes;
use oci_client::errors::OciDistributionError;

use crate::unpack::UnpackError;

/// What a caller can do about an [`ImportError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ImportErrorKind {
    /// There is no such image, tag or file.
    NotFound,
    /// The registry wants other credentials.
    Unauthorized,
    /// The node's configuration forbids this registry.
    NotAllowed,
    /// The image is for another architecture or operating system.
    WrongArchitecture,
    /// The image is damaged, malicious or no container image.
    Invalid,
    /// The disk is full, or would be.
    NoSpace,
    /// The registry can't be reached or failed; later it may not.
    Registry,
    /// The importing process lacks the rights.
    NotPermitted,
    /// The caller cancelled.
    Cancelled,
    /// The host failed.
    Io,
}

/// Why an image could not be imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// There is no such image.
    #[error("image {image} was not found: {words}")]
    NotFound {
        /// What was asked for.
        image: String,
        /// The registry's words, or ours about a local file.
        words: String,
    },
    /// The registry wants other credentials. Many say so of a repository that does not exist.
    #[error("not authorized for image {image}: {words}")]
    Unauthorized {
        /// What was asked for.
        image: String,
        /// The registry's words.
        words: String,
    },
    /// Not on the node's list.
    #[error("registry {registry} is not allowed here (allowed: {allowed})")]
    NotAllowed {
        /// The host, with its port.
        registry: String,
        /// The list, in words.
        allowed: String,
    },
    /// For another machine.
    #[error("image {image} is for {found}, this node runs {wanted}")]
    WrongArchitecture {
        /// What was asked for.
        image: String,
        /// As `os/architecture`.
        wanted: String,
        /// All that the image is for.
        found: String,
    },
    /// Something about the image as a whole is not as it must be.
    #[error("image {image} is not usable: {problem}")]
    Invalid {
        /// What was asked for.
        image: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A layer could not be unpacked.
    #[error("unpack layer {number} of image {image}")]
    Layer {
        /// What was asked for.
        image: String,
        /// Counted from 1, the lowest.
        number: usize,
        /// What is wrong with it.
        source: UnpackError,
    },
    /// The disk is full, or would be.
    #[error("no space left on the disk to {doing}{}", free.map(|free| format!(" ({free} free)")).unwrap_or_default())]
    NoSpace {
        /// What needed the space.
        doing: String,
        /// What was free then, if known.
        free: Option<Bytes>,
    },
    /// The registry can't be reached, or what it said makes no sense.
    #[error("talk to registry {registry}")]
    Unreachable {
        /// The host, with its port.
        registry: String,
        /// What happened.
        source: Box<OciDistributionError>,
    },
    /// The registry answered with a failure of its own.
    #[error("registry {registry} failed: {words}")]
    Registry {
        /// The host, with its port.
        registry: String,
        /// Its words.
        words: String,
        /// Whether it may succeed when asked again.
        transient: bool,
    },
    /// Only root can give files to their owners.
    #[error("importing an image needs root: its files belong to many users, and some are devices")]
    NotRoot,
    /// The caller cancelled.
    #[error("the import was cancelled")]
    Cancelled,
    /// A tool that makes the file system failed.
    #[error("make the root file system")]
    Tool {
        /// What happened.
        source: ToolError,
    },
    /// The host failed.
    #[error("{doing} {path}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// Why an external program failed.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// It could not be started.
    #[error("start {tool} (package e2fsprogs)")]
    Start {
        /// The program.
        tool: String,
        /// Why.
        source: io::Error,
    },
    /// It failed.
    #[error("{tool}: {status}: {words}")]
    Failed {
        /// The program.
        tool: String,
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        words: String,
    },
}

impl ToolError {
    fn words(&self) -> &str {
        match self {
            Self::Start { .. } => "",
            Self::Failed { words, .. } => words,
        }
    }

    /// Whether the file system inside the image had no room for the files.
    pub(crate) fn image_was_full(&self) -> bool {
        self.words().contains("Could not allocate")
    }

    /// Whether the host's file system had no room for the image. Tools tell it by their words only.
    pub(crate) fn disk_was_full(&self) -> bool {
        self.words().contains("No space left on device") || self.words().contains("Disk quota exceeded")
    }
}

impl ImportError {
    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ImportErrorKind {
        match self {
            Self::NotFound { .. } => ImportErrorKind::NotFound,
            Self::Unauthorized { .. } => ImportErrorKind::Unauthorized,
            Self::NotAllowed { .. } => ImportErrorKind::NotAllowed,
            Self::WrongArchitecture { .. } => ImportErrorKind::WrongArchitecture,
            Self::Invalid { .. } => ImportErrorKind::Invalid,
            Self::NoSpace { .. } => ImportErrorKind::NoSpace,
            Self::Unreachable { .. } | Self::Registry { .. } => ImportErrorKind::Registry,
            Self::NotRoot => ImportErrorKind::NotPermitted,
            Self::Cancelled => ImportErrorKind::Cancelled,
            Self::Tool { .. } | Self::Io { .. } => ImportErrorKind::Io,
            Self::Layer { source, .. } => match source {
                UnpackError::Malformed { .. }
                | UnpackError::Refused { .. }
                | UnpackError::WrongContent { .. }
                | UnpackError::TooLarge { .. } => ImportErrorKind::Invalid,
                UnpackError::NoSpace { .. } => ImportErrorKind::NoSpace,
                UnpackError::Cancelled => ImportErrorKind::Cancelled,
                UnpackError::Io { source, .. } => match source.raw_os_error().map(rustix::io::Errno::from_raw_os_error)
                {
                    Some(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) => ImportErrorKind::NoSpace,
                    Some(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS) => ImportErrorKind::NotPermitted,
                    _ => ImportErrorKind::Io,
                },
            },
        }
    }

    /// The error with all its causes, in one line.
    #[must_use]
    pub fn report(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let _ = write!(text, ": {error}"); // writing to a String can't fail
            cause = error.source();
        }
        text
    }

    /// An error of the host about a file. A full disk is its own case.
    pub(crate) fn io(doing: &'static str, path: &Path, source: io::Error) -> Self {
        if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            let free = crate::workspace::free_space(path.parent().unwrap_or(path)).ok();
            return Self::NoSpace { doing: format!("{doing} {}", path.display()), free };
        }
        Self::Io { doing, path: path.to_owned(), source }
    }

    /// Whether the same may succeed when it is tried again at once.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Registry { transient, .. } => *transient,
            _ => false,
        }
    }
}
