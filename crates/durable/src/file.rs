//! Files that are there whole or not at all.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Replaces `path` by a file holding `content` with permission bits `mode`. Durable on return.
///
/// The file appears under its name only when it is complete: written beside it, synced, renamed, directory synced.
pub fn atomic_write(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file =
        tempfile::Builder::new().prefix(".new-").permissions(Permissions::from_mode(mode)).tempfile_in(dir)?;
    file.write_all(content)?;
    file.as_file().set_permissions(Permissions::from_mode(mode))?; // the umask may have taken bits away
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    sync_dir(dir)
}

/// Makes creations, renames and removals in `dir` durable.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Removes a file; one that is not there is success.
pub fn remove_file_if_present(path: &Path) -> io::Result<()> {
    absent_is_fine(std::fs::remove_file(path))
}

/// Removes a directory and all below it; one that is not there is success.
pub fn remove_dir_if_present(path: &Path) -> io::Result<()> {
    absent_is_fine(std::fs::remove_dir_all(path))
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_file_has_the_new_content_and_mode_and_no_remains() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        atomic_write(&path, b"old", 0o644).unwrap();
        atomic_write(&path, b"new", 0o600).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn removing_what_is_not_there_is_success() {
        let dir = tempfile::tempdir().unwrap();
        remove_file_if_present(&dir.path().join("x")).unwrap();
        remove_dir_if_present(&dir.path().join("y")).unwrap();
    }
}
