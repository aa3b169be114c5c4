//! Links, or copies where there can be none.

use std::fs;
use std::io;
use std::path::Path;

/// Makes `to` the same content as `from`, which never changes: a hard link, or a copy on another file system. Replaces what
/// is there.
pub(crate) fn share(from: &Path, to: &Path) -> io::Result<()> {
    let linked = match fs::hard_link(from, to) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(to)?;
            fs::hard_link(from, to)
        }
        linked => linked,
    };
    match linked {
        // On another file system, or one that has no links, or too many links to one file.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::CrossesDevices | io::ErrorKind::Unsupported | io::ErrorKind::TooManyLinks
            ) =>
        {
            fs::copy(from, to).map(drop)
        }
        linked => linked,
    }
}
