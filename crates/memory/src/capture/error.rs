//! What can go wrong while a layer is captured.

use std::io;
use std::path::{Path, PathBuf};

use aenv_block_overlaybd::AssembleError;
use nix::errno::Errno;

use crate::layout::LayoutError;

/// Why no layer was captured. Nothing of it is left; the VMM and its memory are as they were.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// There is no such process, or it is ending: its memory is lost.
    #[error("process {pid} is gone")]
    Gone {
        /// The VMM.
        pid: u32,
    },
    /// The disk is full, or a quota is used up.
    #[error("no space for the memory layer {path}", path = path.display())]
    NoSpace {
        /// Where it was to be.
        path: PathBuf,
        /// Which of the two.
        source: io::Error,
    },
    /// The file could not be written.
    #[error("write the memory layer {path}", path = path.display())]
    Write {
        /// Where it was to be.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Memory could not be read.
    #[error("read memory of process {pid} at {address:#x}")]
    Read {
        /// The VMM.
        pid: u32,
        /// Where, in its address space.
        address: u64,
        /// Why; `UnexpectedEof` if the kernel gave less than there should be.
        source: io::Error,
    },
    /// The pages are not where guest memory is.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The pages do not make a layer.
    #[error("index the memory layer")]
    Index(#[from] AssembleError),
    /// Another thread met an error; that one is told.
    #[error("given up")]
    GivenUp,
}

impl CaptureError {
    pub(super) fn write(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace { path, source },
            _ => Self::Write { path, source },
        }
    }

    pub(super) fn read(pid: u32, address: u64, errno: Errno) -> Self {
        match errno {
            Errno::ESRCH => Self::Gone { pid },
            errno => Self::Read { pid, address, source: errno.into() },
        }
    }
}
