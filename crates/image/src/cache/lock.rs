//! Locks between threads and processes: `flock`, which the kernel drops with its holder.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A lock, held until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    _file: File,
}

impl Held {
    /// Waits for a share of the lock at `path`, together with others. Blocking.
    pub(super) fn shared(path: &Path) -> io::Result<Self> {
        let file = open(path)?;
        retrying(|| file.lock_shared())?;
        Ok(Self { _file: file })
    }

    /// Waits until nobody else has any of it. Blocking.
    pub(super) fn exclusive(path: &Path) -> io::Result<Self> {
        let file = open(path)?;
        retrying(|| file.lock())?;
        Ok(Self { _file: file })
    }

    /// Locks a file that is open already, and that nobody else knows of yet.
    pub(super) fn of_own(file: File) -> io::Result<Self> {
        file.try_lock()?;
        Ok(Self { _file: file })
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

fn retrying(lock: impl Fn() -> io::Result<()>) -> io::Result<()> {
    loop {
        match lock() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// The lock at `path` if nobody has it. `None` also if there is no such file.
pub(super) fn abandoned(path: &Path) -> io::Result<Option<Held>> {
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match file.try_lock() {
        Ok(()) => Ok(Some(Held { _file: file })),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// A lock whose file goes with it: one of many, each for one piece of work.
#[derive(Debug)]
pub(crate) struct WorkLock {
    path: PathBuf,
    _file: File,
}

impl WorkLock {
    /// The lock, unless somebody has it.
    pub(super) fn try_acquire(path: &Path) -> io::Result<Option<Self>> {
        loop {
            let file = open(path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
            }
            // The holder before may have removed the file between our opening and locking it. Then the lock is of no
            // file that others will find.
            if names(path, &file)? {
                return Ok(Some(Self { path: path.to_owned(), _file: file }));
            }
        }
    }
}

impl Drop for WorkLock {
    fn drop(&mut self) {
        // While it is locked, so that no one else's file is removed.
        let _ = std::fs::remove_file(&self.path); // an empty file more; the next collection removes it
    }
}

/// Whether `path` names this very file.
fn names(path: &Path, file: &File) -> io::Result<bool> {
    let ours = file.metadata()?;
    match std::fs::metadata(path) {
        Ok(meta) => Ok((meta.dev(), meta.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_many_gets_a_work_lock_and_its_file_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let inside = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    use std::sync::atomic::Ordering::SeqCst;
                    let mut done = 0;
                    while done < 200 {
                        let Some(_lock) = WorkLock::try_acquire(&path).unwrap() else {
                            std::thread::yield_now();
                            continue;
                        };
                        assert_eq!(inside.fetch_add(1, SeqCst), 0);
                        inside.fetch_sub(1, SeqCst);
                        done += 1;
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_lock_is_abandoned_when_its_holder_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        assert!(abandoned(&path).unwrap().is_none(), "no such file");
        let held = Held::shared(&path).unwrap();
        assert!(abandoned(&path).unwrap().is_none());
        drop(held);
        assert!(abandoned(&path).unwrap().is_some());
    }
}
