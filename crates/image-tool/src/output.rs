//! A file that is written whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, linkat, open, renameat_with};
use rustix::io::Errno;

/// The file under construction. It has no name where the filesystem allows that, so that nothing is left of it however this
/// process ends; elsewhere it has a temporary one.
#[derive(Debug)]
pub(crate) struct Output {
    file: File,
    path: PathBuf,
    force: bool,
    temporary: Option<PathBuf>,
}

impl Output {
    /// Begins the file at `path`; one that is there already is replaced only by `force`.
    pub(crate) fn create(path: &Path, force: bool) -> Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(there) if !there.is_file() => bail!("{} exists and is not a regular file", path.display()),
            Ok(_) if !force => bail!("{} exists; --force replaces it", path.display()),
            _ => {}
        }
        if path.file_name().is_none() {
            bail!("{} is not the name of a file", path.display());
        }
        let (file, temporary) = match open(directory(path), OFlags::TMPFILE | OFlags::RDWR, Mode::from(0o666)) {
            Ok(file) => (File::from(file), None),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let name = temporary_name(path);
                let file = OpenOptions::new().read(true).write(true).create_new(true).open(&name);
                (file.with_context(|| format!("create {}", name.display()))?, Some(name))
            }
            Err(errno) => return Err(errno).with_context(|| format!("create a file in {}", directory(path).display())),
        };
        Ok(Self { file, path: path.to_owned(), force, temporary })
    }

    /// To be written from the start.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// What it will be called.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it durable and gives it its name.
    pub(crate) fn publish(mut self) -> Result<()> {
        self.file.sync_all().with_context(|| format!("write {}", self.path.display()))?;
        self.name().with_context(|| format!("give {} its name", self.path.display()))?;
        File::open(directory(&self.path))
            .and_then(|directory| directory.sync_all())
            .with_context(|| format!("sync the directory of {}", self.path.display()))
    }

    fn name(&mut self) -> io::Result<()> {
        let link = |file: &File, to: &Path| {
            linkat(CWD, format!("/proc/self/fd/{}", file.as_raw_fd()), CWD, to, AtFlags::SYMLINK_FOLLOW)
        };
        let temporary = match &self.temporary {
            Some(temporary) => temporary.clone(),
            None if !self.force => return Ok(link(&self.file, &self.path)?),
            None => {
                let temporary = temporary_name(&self.path);
                link(&self.file, &temporary)?;
                self.temporary.insert(temporary).clone()
            }
        };
        if self.force {
            fs::rename(&temporary, &self.path)?;
        } else {
            match renameat_with(CWD, &temporary, CWD, &self.path, RenameFlags::NOREPLACE) {
                Err(Errno::INVAL) => fs::rename(&temporary, &self.path)?, // this filesystem has no such thing
                result => result?,
            }
        }
        self.temporary = None;
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = fs::remove_file(temporary); // the failure that led here is what is told
        }
    }
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn temporary_name(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_file_appears_whole_and_replaces_another_only_by_force() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("out");
        let names = || fs::read_dir(dir.path()).expect("list").count();

        let output = Output::create(&path, false).expect("create");
        output.file().write_all(b"one").expect("write");
        assert_eq!(names(), 0, "nothing before it is complete");
        output.publish().expect("publish");
        assert_eq!(fs::read(&path).expect("read"), b"one");

        assert!(Output::create(&path, false).is_err());
        let output = Output::create(&path, true).expect("create");
        output.file().write_all(b"two").expect("write");
        drop(output);
        assert_eq!(fs::read(&path).expect("read"), b"one", "given up");
        let output = Output::create(&path, true).expect("create");
        output.file().write_all(b"two").expect("write");
        output.publish().expect("publish");
        assert_eq!((fs::read(&path).expect("read"), names()), (b"two".to_vec(), 1));
    }

    #[test]
    fn a_file_that_appeared_meanwhile_is_not_replaced() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("out");
        let output = Output::create(&path, false).expect("create");
        fs::write(&path, "theirs").expect("write");
        output.publish().expect_err("it exists");
        assert_eq!(fs::read(&path).expect("read"), b"theirs");
    }

    #[test]
    fn what_is_no_file_is_not_replaced() {
        let dir = tempfile::tempdir().expect("temp dir");
        for path in [dir.path(), Path::new("/dev/null"), Path::new("/"), &dir.path().join("no/such/out")] {
            Output::create(path, true).expect_err("not a place for a file");
        }
    }
}
