//! What can go wrong with a conversion, besides the layer itself.

use std::error::Error;
use std::io;
use std::path::Path;

use aenv_block_client::{BlockdError, ErrorKind};
use aenv_block_overlaybd::{
    CommitError, CreateUpperError, OpenDeviceError, OpenLayerError, OpenUpperError, StackError,
};

use super::mounted::MountError;
use crate::ext4::{CanonicalError, MkfsError};
use crate::space::free_space;

/// Why a layer could not be made of what was unpacked.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The storage daemon does not do it.
    #[error("use a device of the storage daemon")]
    Daemon(#[from] BlockdError),
    /// A step on this host failed.
    #[error(transparent)]
    Step(Box<dyn Error + Send + Sync>),
}

macro_rules! steps {
    ($($error:ty),*) => {
        $(impl From<$error> for ConvertError {
            fn from(error: $error) -> Self {
                Self::Step(Box::new(error))
            }
        })*
    };
}

steps!(
    MountError,
    MkfsError,
    CanonicalError,
    CommitError,
    CreateUpperError,
    OpenDeviceError,
    OpenLayerError,
    OpenUpperError,
    StackError
);

/// Free space below which a write that failed for no told reason failed for lack of it: a loop device and a daemon are
/// between the writer and the disk, and pass on that it failed at most.
const SCARCE: u64 = 8 << 20;

impl ConvertError {
    /// Whether the disk of `dir` was full.
    pub(crate) fn disk_was_full(&self, dir: &Path) -> bool {
        match self {
            Self::Daemon(error) if error.kind() == ErrorKind::NoSpace => true,
            Self::Daemon(error) if error.kind() == ErrorKind::Unreachable => false,
            Self::Daemon(_) => is_scarce(dir),
            Self::Step(error) => {
                let mkfs = error.downcast_ref::<MkfsError>().is_some_and(MkfsError::disk_was_full);
                mkfs || errno_says_full(&**error) || is_scarce(dir)
            }
        }
    }
}

/// Whether the error, or one of its causes, is that of a full disk.
fn errno_says_full(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        if matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Whether next to nothing is free where `dir` is.
pub(crate) fn is_scarce(dir: &Path) -> bool {
    free_space(dir).is_ok_and(|free| free.get() < SCARCE)
}
