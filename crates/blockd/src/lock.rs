//! Locks that die with their process: on a directory of the daemon's, and on an upper.
//!
//! An upper is locked by a file beside its data file: restacks rename and replace the data file itself.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Longest text about a holder that is worth reading.
const MAX_HOLDER: u64 = 1024;

/// A lock file, locked. Dropping it removes the file and lets go.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    _file: File,
}

/// A lock could not be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LockError {
    /// Another has it.
    #[error("{what} is in use by {holder}", what = what.display())]
    Held {
        /// What is locked.
        what: PathBuf,
        /// By whom.
        holder: String,
    },
    /// It cannot be locked.
    #[error("lock {what}", what = what.display())]
    Io {
        /// What should be.
        what: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl Lock {
    /// Locks the upper with the data file `data`, for `holder`. The data file need not be there, its directory must.
    pub(crate) fn upper(data: &Path, holder: &str) -> Result<Self, LockError> {
        let error = |source| LockError::Io { what: data.to_owned(), source };
        let name = data.file_name().ok_or_else(|| error(io::ErrorKind::InvalidInput.into()))?;
        // Whichever way it is spelt, it is one lock.
        let directory = fs::canonicalize(data.parent().unwrap_or(Path::new("/"))).map_err(error)?;
        let mut lock = name.to_owned();
        lock.push(".lock");
        Self::acquire(directory.join(lock), data, holder)
    }

    /// Locks a directory, which must be there.
    pub(crate) fn directory(directory: &Path, holder: &str) -> Result<Self, LockError> {
        Self::acquire(directory.join("lock"), directory, holder)
    }

    fn acquire(path: PathBuf, what: &Path, holder: &str) -> Result<Self, LockError> {
        let attempt = || -> io::Result<Option<File>> {
            loop {
                let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
                match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                    Err(Errno::WOULDBLOCK) => return Ok(None),
                    result => result?,
                }
                // Its former holder may have removed it between our open and our lock.
                let ours = file.metadata()?;
                match fs::metadata(&path) {
                    Ok(named) if (named.dev(), named.ino()) == (ours.dev(), ours.ino()) => {
                        // A full disk must not keep anybody from an upper: the words are for people.
                        let _ = file
                            .set_len(0)
                            .and_then(|()| file.rewind())
                            .and_then(|()| file.write_all(holder.as_bytes()));
                        return Ok(Some(file));
                    }
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
        };
        match attempt() {
            Ok(Some(file)) => Ok(Self { path, _file: file }),
            Ok(None) => Err(LockError::Held { what: what.to_owned(), holder: holder_of(&path) }),
            Err(source) => Err(LockError::Io { what: what.to_owned(), source }),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path); // left behind, it is locked again as it is
    }
}

fn holder_of(path: &Path) -> String {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MAX_HOLDER).read_to_string(&mut text));
    match read {
        Ok(_) if !text.trim().is_empty() => text.trim().to_owned(),
        _ => "another process".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holder_is_refused_and_told_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let first = Lock::upper(&data, "device a").unwrap();
        fs::create_dir(dir.path().join("x")).unwrap();
        let error = Lock::upper(&dir.path().join("x/../data"), "device b").unwrap_err();
        assert!(error.to_string().ends_with("/x/../data is in use by device a"), "{error}");
        drop(first);
        let again = Lock::upper(&data, "device b").unwrap();
        drop(again);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "only x is left");
    }

    #[test]
    fn a_lock_file_that_a_crash_left_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("lock"), "somebody who died and had a long name").unwrap();
        let _lock = Lock::directory(dir.path(), "me").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("lock")).unwrap(), "me");
    }

    #[test]
    fn of_many_who_want_a_lock_one_has_it_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let inside = std::sync::atomic::AtomicUsize::new(0);
        let entered = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let Ok(_lock) = Lock::directory(dir.path(), "x") else { continue };
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        entered.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(entered.into_inner() > 0);
    }
}
