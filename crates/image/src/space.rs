//! How much room there is.

use std::io;
use std::path::Path;

use aenv_model::Bytes;

/// What is free on the file system of `path`, for a process like this one.
pub(crate) fn free_space(path: &Path) -> io::Result<Bytes> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(Bytes(stat.f_bavail.saturating_mul(stat.f_frsize)))
}
