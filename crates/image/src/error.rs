//! What can go wrong with an import.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use aenv_block_client::{BlockdError, DeviceConfigError};
use aenv_model::Bytes;
use oci_client::errors::OciDistributionError;

use crate::cache::CacheError;
use crate::convert::ConvertError;
use crate::digest::Digest;
use crate::source::LayerError;
use crate::unpack::UnpackError;

/// What a caller can do about an [`ImportError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ImportErrorKind {
    /// There is no such image, tag or file.
    NotFound,
    /// The registry wants other credentials.
    Unauthorized,
    /// The node's configuration forbids this registry, or images of this kind.
    NotAllowed,
    /// The image is for another architecture or operating system.
    WrongArchitecture,
    /// The image is of a kind that can't be used here.
    Unsupported,
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

impl ImportErrorKind {
    /// Whether the request asked for what it can't have: another image, other credentials or another configuration of the
    /// node would help, and the same request again would not.
    #[must_use]
    pub fn is_refusal(self) -> bool {
        match self {
            Self::NotFound
            | Self::Unauthorized
            | Self::NotAllowed
            | Self::WrongArchitecture
            | Self::Unsupported
            | Self::Invalid => true,
            Self::NoSpace | Self::Registry | Self::NotPermitted | Self::Cancelled | Self::Io => false,
        }
    }
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
    /// Found, and would have to be converted.
    #[error(
        "image {image} is not made of overlaybd blobs, and this node converts no others (convert_standard_oci is false)"
    )]
    NoConversion {
        /// What was asked for.
        image: String,
    },
    /// A layer of overlaybd's can't be opened where it is.
    #[error("open layer {number} ({digest}) of image {image}")]
    NativeLayer {
        /// What was asked for.
        image: String,
        /// Counted from 1, the lowest.
        number: usize,
        /// Its blob.
        digest: Digest,
        /// What is wrong with it.
        source: LayerError,
    },
    /// Of a kind that can't be used here.
    #[error("image {image} is not supported: {problem}")]
    Unsupported {
        /// What was asked for.
        image: String,
        /// Which layer it is, and why.
        problem: String,
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
    /// The empty file system that all images lie on could not be made.
    #[error("make the base file system for image {image}")]
    Base {
        /// What was asked for.
        image: String,
        /// What happened.
        source: ConvertError,
    },
    /// What was unpacked of a layer could not be made a layer of the cache.
    #[error("convert layer {number} of image {image}")]
    Convert {
        /// What was asked for.
        image: String,
        /// Counted from 1, the lowest.
        number: usize,
        /// What happened.
        source: ConvertError,
    },
    /// The image cache does not do what was asked of it.
    #[error("use the image cache")]
    Cache {
        /// Why.
        source: CacheError,
    },
    /// The storage daemon does not do what was asked of it.
    #[error("ask the storage daemon")]
    Daemon {
        /// Why.
        source: BlockdError,
    },
    /// What a device is made of could not be written down.
    #[error("write what the image's devices are made of")]
    Target {
        /// Why.
        source: DeviceConfigError,
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

impl ImportError {
    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ImportErrorKind {
        match self {
            Self::NotFound { .. } => ImportErrorKind::NotFound,
            Self::Unauthorized { .. } => ImportErrorKind::Unauthorized,
            Self::NotAllowed { .. } | Self::NoConversion { .. } => ImportErrorKind::NotAllowed,
            Self::Unsupported { .. } => ImportErrorKind::Unsupported,
            Self::WrongArchitecture { .. } => ImportErrorKind::WrongArchitecture,
            Self::Invalid { .. } => ImportErrorKind::Invalid,
            Self::NoSpace { .. } => ImportErrorKind::NoSpace,
            Self::Unreachable { .. } | Self::Registry { .. } => ImportErrorKind::Registry,
            Self::NativeLayer { source, .. } => source.kind(),
            Self::NotRoot => ImportErrorKind::NotPermitted,
            Self::Cancelled => ImportErrorKind::Cancelled,
            Self::Base { .. }
            | Self::Convert { .. }
            | Self::Cache { .. }
            | Self::Daemon { .. }
            | Self::Target { .. }
            | Self::Io { .. } => ImportErrorKind::Io,
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
            let free = crate::space::free_space(path.parent().unwrap_or(path)).ok();
            return Self::NoSpace { doing: format!("{doing} {}", path.display()), free };
        }
        Self::Io { doing, path: path.to_owned(), source }
    }

    /// What devices are made of could not be written down. A full disk is its own case.
    pub(crate) fn target(source: DeviceConfigError) -> Self {
        match source {
            DeviceConfigError::Write { path, source } => Self::io("write", &path, source),
            source => Self::Target { source },
        }
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
