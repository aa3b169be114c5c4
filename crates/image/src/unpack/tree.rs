//! The directory being filled, and how paths are found in it.
//!
//! Layers come from strangers, and may hold a symbolic link to `/etc` followed by a file "inside" it. Directories on
//! the way to a file are therefore resolved as a process with this tree as its root would: links count, `..` and
//! absolute targets stop at the root. The kernel does that where everything exists (`openat2` with
//! `RESOLVE_IN_ROOT`, Linux 5.6); a walk that opens one component at a time, never following, does it where
//! something has to be made. The last component of a path is never followed at all.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use tokio_util::sync::CancellationToken;

use super::path::EntryPath;
use super::{Tally, UnpackError};

/// Links followed on one path before it counts as a loop: Linux's own number.
const MAX_LINKS: usize = 40;
/// Deepest directory. No image comes near it; the walks below hold a descriptor for each level.
const MAX_DEPTH: usize = 256;
/// Links of at most this length live in their ext4 inode.
const FAST_LINK: u64 = 59;

/// A root directory and what is known of it.
pub(super) struct Tree {
    root: Arc<OwnedFd>,
    /// The last parent looked up: archives list a directory's files together. Forgotten on every removal.
    recent: Option<(Vec<Vec<u8>>, Arc<OwnedFd>)>,
    /// The times that directories, by inode, shall have in the end.
    times: HashMap<u64, (i64, u32)>,
}

impl Tree {
    pub(super) fn open(root: &Path) -> io::Result<Self> {
        let root = fs::open(root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { root: Arc::new(root), recent: None, times: HashMap::new() })
    }

    pub(super) fn root(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.root)
    }

    /// The directory that `parents` lead to, made where it is missing (mode 0755, root's).
    pub(super) fn make_parent(&mut self, parents: &[Vec<u8>]) -> io::Result<Arc<OwnedFd>> {
        if let Some(found) = self.find_parent(parents)? {
            return Ok(found);
        }
        // `find_parent` finds what is there, so the walk below makes at least one directory or fails.
        let made = Arc::new(self.walk_and_make(parents)?);
        self.recent = Some((parents.to_vec(), Arc::clone(&made)));
        Ok(made)
    }

    /// The directory that `parents` lead to, or `None` if there is none.
    pub(super) fn find_parent(&mut self, parents: &[Vec<u8>]) -> io::Result<Option<Arc<OwnedFd>>> {
        if parents.is_empty() {
            return Ok(Some(self.root()));
        }
        if let Some((path, found)) = &self.recent
            && path == parents
        {
            return Ok(Some(Arc::clone(found)));
        }
        let path = parents.join(&b'/');
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let mut attempts = 0;
        let opened = loop {
            match fs::openat2(&self.root, path.as_slice(), flags, Mode::empty(), resolve) {
                // The kernel says so of a path with `..` when anything was renamed anywhere meanwhile.
                Err(Errno::AGAIN) if attempts < 100 => attempts += 1,
                result => break result,
            }
        };
        match opened {
            Ok(found) => {
                let found = Arc::new(found);
                self.recent = Some((parents.to_vec(), Arc::clone(&found)));
                Ok(Some(found))
            }
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes `name` with all below it from `dir`. Not an error if it isn't there.
    pub(super) fn remove(&mut self, dir: impl AsFd, name: &[u8]) -> io::Result<()> {
        self.recent = None;
        remove(dir.as_fd(), name, &mut self.times)
    }

    /// Removes a path that may not exist.
    pub(super) fn remove_lower(&mut self, parents: &[Vec<u8>], name: &[u8]) -> io::Result<()> {
        match self.find_parent(parents)? {
            Some(dir) => self.remove(&*dir, name),
            None => Ok(()),
        }
    }

    /// Removes whatever stands where a directory shall be, unless it is one.
    pub(super) fn remove_unless_directory(&mut self, parents: &[Vec<u8>], name: &[u8]) -> io::Result<()> {
        let Some(dir) = self.find_parent(parents)? else { return Ok(()) };
        match kind_at(&*dir, name)? {
            None | Some(FileType::Directory) => Ok(()),
            Some(_) => self.remove(&*dir, name),
        }
    }

    /// Empties a directory that may not exist.
    pub(super) fn clear(&mut self, path: &EntryPath) -> io::Result<()> {
        let all = match path.split() {
            None => self.find_parent(&[])?,
            Some((parents, name)) => {
                let mut whole = parents.to_vec();
                whole.push(name.to_vec());
                self.find_parent(&whole)?
            }
        };
        self.recent = None;
        match all {
            Some(dir) => clear(dir.as_fd(), &mut self.times),
            None => Ok(()),
        }
    }

    /// Notes the time that the directory `stat` speaks of shall have in the end.
    pub(super) fn note_time(&mut self, stat: &Stat, mtime: (i64, u32)) {
        self.times.insert(stat.st_ino, mtime);
    }

    /// Sets the times of all directories and measures the tree. A directory that no layer lists, only implies, gets
    /// time 0, so that two imports of an image are alike.
    pub(super) fn finish(self, cancel: &CancellationToken) -> Result<Tally, UnpackError> {
        let mut survey = Survey { times: &self.times, links: HashMap::new(), tally: Tally::default(), cancel };
        let walked = survey.directory(self.root.as_fd());
        if cancel.is_cancelled() {
            return Err(UnpackError::Cancelled);
        }
        walked.map_err(|error| UnpackError::io("survey", &EntryPath::root(), error))?;
        Ok(survey.tally)
    }

    /// Goes down one component at a time, making directories. What is in the way and is neither directory nor link
    /// gives way.
    fn walk_and_make(&mut self, parents: &[Vec<u8>]) -> io::Result<OwnedFd> {
        let mut pending: VecDeque<Vec<u8>> = parents.iter().cloned().collect();
        let mut stack: Vec<OwnedFd> = Vec::new();
        let mut links = 0;
        while let Some(name) = pending.pop_front() {
            match name.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    stack.pop();
                    continue;
                }
                _ => {}
            }
            if stack.len() >= MAX_DEPTH {
                return Err(Errno::NAMETOOLONG.into());
            }
            let here = stack.last().map_or(self.root.as_fd(), AsFd::as_fd);
            match kind_at(here, &name)? {
                Some(FileType::Directory) => {}
                Some(FileType::Symlink) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(Errno::LOOP.into());
                    }
                    let target = fs::readlinkat(here, name.as_slice(), Vec::new())?.into_bytes();
                    if target.starts_with(b"/") {
                        stack.clear();
                    }
                    for part in target.split(|byte| *byte == b'/').rev() {
                        pending.push_front(part.to_vec());
                    }
                    continue;
                }
                in_the_way => {
                    if in_the_way.is_some() {
                        self.recent = None;
                        fs::unlinkat(here, name.as_slice(), AtFlags::empty())?;
                    }
                    fs::mkdirat(here, name.as_slice(), Mode::from_raw_mode(0o755))?;
                    fs::chmodat(here, name.as_slice(), Mode::from_raw_mode(0o755), AtFlags::empty())?; // whatever the umask
                }
            }
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            stack.push(fs::openat(here, name.as_slice(), flags, Mode::empty())?);
        }
        match stack.pop() {
            Some(found) => Ok(found),
            None => Ok(self.root.try_clone()?),
        }
    }
}

/// The kind of `name` in `dir`, not followed; `None` if there is no such file.
pub(super) fn kind_at(dir: impl AsFd, name: &[u8]) -> io::Result<Option<FileType>> {
    match fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The directory `name` in `dir`, not followed, open for reading.
fn open_directory(dir: impl AsFd, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(fs::openat(dir, name, flags, Mode::empty())?)
}

/// The names in a directory.
fn names(dir: impl AsFd) -> io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    Ok(names)
}

fn remove(dir: impl AsFd + Copy, name: &[u8], times: &mut HashMap<u64, (i64, u32)>) -> io::Result<()> {
    match fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR) => {}
        Err(error) => return Err(error.into()),
    }
    let inside = open_directory(dir, name)?;
    // The inode number may soon be another directory's.
    times.remove(&fs::fstat(&inside)?.st_ino);
    clear(inside.as_fd(), times)?;
    Ok(fs::unlinkat(dir, name, AtFlags::REMOVEDIR)?)
}

fn clear(dir: impl AsFd + Copy, times: &mut HashMap<u64, (i64, u32)>) -> io::Result<()> {
    let readable = open_directory(dir, b".")?;
    names(&readable)?.iter().try_for_each(|name| remove(dir, name, times))
}

/// The last walk over the tree.
struct Survey<'a> {
    times: &'a HashMap<u64, (i64, u32)>,
    /// Files with more than one name that were counted already.
    links: HashMap<u64, ()>,
    tally: Tally,
    cancel: &'a CancellationToken,
}

impl Survey<'_> {
    fn directory(&mut self, dir: impl AsFd + Copy) -> io::Result<()> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::other("cancelled"));
        }
        let readable = open_directory(dir, b".")?;
        let mut name_bytes = 0;
        for name in names(&readable)? {
            name_bytes += (8 + name.len() as u64).next_multiple_of(4);
            let stat = fs::statat(dir, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)?;
            let kind = FileType::from_raw_mode(stat.st_mode);
            if kind == FileType::Directory {
                self.directory(open_directory(dir, &name)?.as_fd())?;
                continue;
            }
            if stat.st_nlink > 1 && self.links.insert(stat.st_ino, ()).is_some() {
                continue;
            }
            self.tally.inodes += 1;
            self.tally.blocks += match kind {
                // What is allocated, in units of 512 bytes, holes left out.
                FileType::RegularFile => u64::try_from(stat.st_blocks).unwrap_or(0).div_ceil(8),
                FileType::Symlink if u64::try_from(stat.st_size).unwrap_or(0) > FAST_LINK => 1,
                _ => 0,
            };
        }
        let stat = fs::fstat(&readable)?;
        self.tally.inodes += 1;
        // Directories fill their blocks badly: a name never crosses into the next block.
        self.tally.blocks += 1 + name_bytes.div_ceil(3584);
        let (seconds, nanos) = self.times.get(&stat.st_ino).copied().unwrap_or((0, 0));
        let time = Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
        Ok(fs::futimens(&readable, &Timestamps { last_access: time, last_modification: time })?)
    }
}
