//! What devices' errors are to the kernel.

use std::io;

use rustix::io::Errno;

/// What a disk could say; anything else is an I/O error, whatever it was inside.
pub(crate) fn errno(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Errno::NOSPC,
        io::ErrorKind::ReadOnlyFilesystem => Errno::ROFS,
        io::ErrorKind::InvalidInput => Errno::INVAL,
        _ => Errno::IO,
    }
}
