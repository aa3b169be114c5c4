//! Files that are not there whole yet: beside their places, under names that nobody uses.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};
use sha2::{Digest as _, Sha256};
use tempfile::{NamedTempFile, TempPath};

/// What all such names begin with.
const PREFIX: &str = ".aenv-download-";
/// What a new file's mode is before the umask.
const MODE: u32 = 0o666;

/// A file being written. Unless it is put in its place it is removed when dropped, or, if it may be continued, kept.
#[derive(Debug)]
pub(super) struct Partial {
    pub(super) file: File,
    /// `None` only while it is put in its place.
    path: Option<TempPath>,
    /// Bytes that were there before.
    pub(super) length: u64,
    continuable: bool,
}

impl Partial {
    /// An empty file in the directory of `target`.
    pub(super) fn new(target: &Path) -> io::Result<Self> {
        let permissions = fs::Permissions::from_mode(MODE);
        let file: NamedTempFile =
            tempfile::Builder::new().prefix(PREFIX).permissions(permissions).tempfile_in(dir_of(target))?;
        let (file, path) = file.into_parts();
        Ok(Self { file, path: Some(path), length: 0, continuable: false })
    }

    /// The file in the directory of `target` that holds what was there of `source` in its `version`; those of its other
    /// versions are removed. Errors: `WouldBlock`, if somebody else is at it.
    pub(super) fn of(target: &Path, source: &str, version: &str) -> io::Result<Self> {
        let hash = |text: &str| hex::encode(&Sha256::digest(text)[..8]);
        let dir = dir_of(target);
        let stem = format!("{PREFIX}{}-", hash(source));
        let name = format!("{stem}{}", hash(version));
        for entry in fs::read_dir(&dir)?.flatten() {
            let other = entry.file_name();
            if other.to_str().is_some_and(|other| other.starts_with(&stem) && other != name) {
                // Garbage that will not go harms nobody.
                let _ = fs::remove_file(entry.path());
            }
        }
        let path = dir.join(name);
        // Not through a link that somebody else has put there.
        let no_links = OFlags::NOFOLLOW.bits().cast_signed();
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(no_links)
            .open(&path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let length = file.seek(SeekFrom::End(0))?;
        let path = TempPath::try_from_path(path)?;
        Ok(Self { file, path: Some(path), length, continuable: true })
    }

    /// Forgets what is there.
    pub(super) fn restart(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.length = 0;
        Ok(())
    }

    /// Puts the file in its place: over what is there only if `force`. Errors: `AlreadyExists` without.
    pub(super) fn finish(mut self, target: &Path, force: bool) -> io::Result<()> {
        let Some(path) = self.path.take() else { return Ok(()) };
        let persisted = if force { path.persist(target) } else { path.persist_noclobber(target) };
        persisted.map_err(|failed| {
            self.path = Some(failed.path);
            failed.error
        })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let Some(path) = self.path.take() else { return };
        let is_empty = self.file.metadata().is_ok_and(|found| found.len() == 0);
        if self.continuable && !is_empty {
            // It stays in any case; only its removal is called off.
            let _ = path.keep();
        }
    }
}

fn dir_of(target: &Path) -> PathBuf {
    match target.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_takes_its_place_or_goes() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("x");
        drop(Partial::new(&target).unwrap());
        assert!(names(dir.path()).is_empty());
        fs::write(&target, "old").unwrap();
        let write = || {
            let mut partial = Partial::new(&target).unwrap();
            partial.file.write_all(b"new").unwrap();
            partial
        };
        assert_eq!(write().finish(&target, false).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!((fs::read(&target).unwrap().as_slice(), names(dir.path()).len()), (&b"old"[..], 1));
        write().finish(&target, true).unwrap();
        assert_eq!((fs::read(&target).unwrap().as_slice(), names(dir.path()).len()), (&b"new"[..], 1));
        let plain = dir.path().join("plain");
        fs::write(&plain, "").unwrap();
        assert_eq!(fs::metadata(&target).unwrap().permissions(), fs::metadata(&plain).unwrap().permissions());
    }

    #[test]
    fn what_may_be_continued_stays_for_the_same_version_only() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("x");
        let mut partial = Partial::of(&target, "source", "1").unwrap();
        partial.file.write_all(b"half").unwrap();
        assert_eq!(Partial::of(&target, "source", "1").unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(partial);
        assert_eq!(Partial::of(&target, "source", "1").unwrap().length, 4);
        assert_eq!(Partial::of(&target, "source", "2").unwrap().length, 0);
        assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
    }
}
