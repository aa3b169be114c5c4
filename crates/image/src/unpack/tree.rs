//! The directory being filled, and how paths are found in it.
//!
//! Layers come from strangers, and may hold a symbolic link to `/etc` followed by a file "inside" it. Directories on
//! the way to a file are therefore resolved as a process with this tree as its root would: links count, `..` and
//! absolute targets stop at the root. The kernel does that where everything exists (`openat2` with
//! `RESOLVE_IN_ROOT`, Linux 5.6); a walk that opens one component at a time, never following, does it where
//! something has to be made. The last component of a path is never followed at all.
//!
//! What is removed is moved aside first, and deleted when everything else is done. ext4 gives the inode of a file that was
//! deleted to the next one or does not, depending on how many seconds ago that was; so nothing may be made after something
//! was deleted, if the same layers are to be the same bytes.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use tokio_util::sync::CancellationToken;

use super::UnpackError;
use super::path::EntryPath;

/// Links followed on one path before it counts as a loop: Linux's own number.
const MAX_LINKS: usize = 40;
/// Deepest directory. No image comes near it; the walks below hold a descriptor for each level.
const MAX_DEPTH: usize = 256;

/// A root directory and what is known of it.
pub(super) struct Tree {
    root: Arc<OwnedFd>,
    /// The last parent looked up: archives list a directory's files together. Forgotten on every removal.
    recent: Option<Recent>,
    /// The directories that were made, listed or changed, by inode.
    touched: HashMap<u64, Touched>,
    aside: Option<Aside>,
}

/// A directory in the root for what is removed, made when something is.
struct Aside {
    name: Vec<u8>,
    dir: Option<OwnedFd>,
    count: u64,
}

struct Recent {
    path: Vec<Vec<u8>>,
    dir: Arc<OwnedFd>,
    touched: bool,
}

/// A directory whose time is to be set in the end.
struct Touched {
    /// A way to it, when it was touched.
    path: Vec<Vec<u8>>,
    /// The time that it shall have: the one it is listed with, else the one it had before; 0 if it is only implied.
    time: (i64, u32),
}

impl Touched {
    fn timestamps(&self) -> Timestamps {
        let time = Timespec { tv_sec: self.time.0, tv_nsec: self.time.1.into() };
        Timestamps { last_access: time, last_modification: time }
    }
}

impl Tree {
    pub(super) fn open(root: &Path) -> io::Result<Self> {
        let root = fs::open(root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { root: Arc::new(root), recent: None, touched: HashMap::new(), aside: None })
    }

    pub(super) fn root(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.root)
    }

    /// The directory that `parents` lead to, made where it is missing (mode 0755, root's), about to be changed.
    pub(super) fn make_parent(&mut self, parents: &[Vec<u8>]) -> io::Result<Arc<OwnedFd>> {
        if let Some(found) = self.find_parent(parents)? {
            self.touch(&found, parents)?;
            return Ok(found);
        }
        // `find_parent` finds what is there, so the walk below makes at least one directory or fails.
        let dir = Arc::new(self.walk_and_make(parents)?);
        self.recent = Some(Recent { path: parents.to_vec(), dir: Arc::clone(&dir), touched: true });
        Ok(dir)
    }

    /// The directory that `parents` lead to, or `None` if there is none.
    pub(super) fn find_parent(&mut self, parents: &[Vec<u8>]) -> io::Result<Option<Arc<OwnedFd>>> {
        if let Some(recent) = self.recent.as_ref().filter(|recent| recent.path == parents) {
            return Ok(Some(Arc::clone(&recent.dir)));
        }
        let found = match parents {
            [] => Some(self.root()),
            _ => self.open_inside(parents, OFlags::PATH)?.map(Arc::new),
        };
        self.recent = found.as_ref().map(|dir| Recent { path: parents.to_vec(), dir: Arc::clone(dir), touched: false });
        Ok(found)
    }

    /// Opens the directory at `path`, resolved in the root; `None` if there is none.
    fn open_inside(&self, path: &[Vec<u8>], flags: OFlags) -> io::Result<Option<OwnedFd>> {
        let path = if path.is_empty() { b".".to_vec() } else { path.join(&b'/') };
        let flags = flags | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let mut attempts = 0;
        loop {
            match fs::openat2(&self.root, path.as_slice(), flags, Mode::empty(), resolve) {
                // The kernel says so of a path with `..` when anything was renamed anywhere meanwhile.
                Err(Errno::AGAIN) if attempts < 100 => attempts += 1,
                Ok(found) => return Ok(Some(found)),
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Notes the time of a directory before it is changed for the first time.
    fn touch(&mut self, dir: impl AsFd, path: &[Vec<u8>]) -> io::Result<()> {
        if self.recent.as_ref().is_some_and(|recent| recent.touched && recent.path == path) {
            return Ok(());
        }
        let stat = fs::fstat(dir)?;
        let time = (stat.st_mtime, u32::try_from(stat.st_mtime_nsec).unwrap_or(0));
        self.touched.entry(stat.st_ino).or_insert_with(|| Touched { path: path.to_vec(), time });
        if let Some(recent) = self.recent.as_mut().filter(|recent| recent.path == path) {
            recent.touched = true;
        }
        Ok(())
    }

    /// Removes `name` with all below it from `dir`. Not an error if it isn't there.
    pub(super) fn remove(&mut self, dir: impl AsFd, name: &[u8]) -> io::Result<()> {
        self.recent = None;
        self.put_aside(dir.as_fd(), name)
    }

    /// Names the directory for what is removed. Nobody who made the layers can have foreseen it.
    pub(super) fn name_aside(&mut self, name: String) {
        self.aside.get_or_insert(Aside { name: name.into_bytes(), dir: None, count: 0 });
    }

    fn put_aside(&mut self, dir: impl AsFd, name: &[u8]) -> io::Result<()> {
        let root = self.root();
        if self.aside.as_ref().is_some_and(|aside| aside.dir.is_none()) {
            self.touch(&root, &[])?;
        }
        let aside = self.aside.as_mut().ok_or(Errno::NOENT)?;
        let to = match &mut aside.dir {
            Some(dir) => dir,
            none => {
                fs::mkdirat(&root, aside.name.as_slice(), Mode::from_raw_mode(0o700))?;
                none.insert(open_directory(&root, &aside.name)?)
            }
        };
        if name == aside.name && fs::fstat(&dir)?.st_ino == fs::fstat(&root)?.st_ino {
            return Ok(());
        }
        aside.count += 1;
        match fs::renameat(dir, name, to, aside.count.to_string().as_str()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes what was put aside.
    fn delete_aside(&mut self) -> io::Result<()> {
        match self.aside.take() {
            Some(Aside { name, dir: Some(_), .. }) => remove(self.root.as_fd(), &name),
            _ => Ok(()),
        }
    }

    /// Removes a path that may not exist.
    pub(super) fn remove_lower(&mut self, parents: &[Vec<u8>], name: &[u8]) -> io::Result<()> {
        let Some(dir) = self.find_parent(parents)? else { return Ok(()) };
        if kind_at(&*dir, name)?.is_none() {
            return Ok(());
        }
        self.touch(&dir, parents)?;
        self.remove(&*dir, name)
    }

    /// Removes whatever stands where a directory shall be, unless it is one.
    pub(super) fn remove_unless_directory(&mut self, parents: &[Vec<u8>], name: &[u8]) -> io::Result<()> {
        let Some(dir) = self.find_parent(parents)? else { return Ok(()) };
        match kind_at(&*dir, name)? {
            None | Some(FileType::Directory) => Ok(()),
            Some(_) => {
                self.touch(&dir, parents)?;
                self.remove(&*dir, name)
            }
        }
    }

    /// Empties a directory that may not exist.
    pub(super) fn clear(&mut self, path: &EntryPath) -> io::Result<()> {
        let path = path.parts();
        let Some(dir) = self.find_parent(path)? else { return Ok(()) };
        self.touch(&dir, path)?;
        self.recent = None;
        names(&open_directory(&dir, b".")?)?.iter().try_for_each(|name| self.put_aside(&dir, name))
    }

    /// Notes the time that the directory `stat` speaks of shall have in the end.
    pub(super) fn note_time(&mut self, stat: &Stat, path: &EntryPath, time: (i64, u32)) {
        self.touched.insert(stat.st_ino, Touched { path: path.parts().to_vec(), time });
    }

    /// Deletes what was removed, and sets the times of the directories that were touched: unpacking into one changes them.
    pub(super) fn finish(mut self, cancel: &CancellationToken) -> Result<(), UnpackError> {
        let root = EntryPath::root();
        self.delete_aside().map_err(|error| UnpackError::io("delete what was removed below", &root, error))?;
        let set = |tree: &mut Self| -> io::Result<()> {
            let mut lost = HashMap::new();
            for (inode, touched) in std::mem::take(&mut tree.touched) {
                if cancel.is_cancelled() {
                    return Ok(());
                }
                let found = tree.open_inside(&touched.path, OFlags::RDONLY)?;
                match found {
                    Some(dir) if fs::fstat(&dir)?.st_ino == inode => fs::futimens(&dir, &touched.timestamps())?,
                    // It was removed, or the way to it led through a link that leads elsewhere by now.
                    _ => drop(lost.insert(inode, touched)),
                }
            }
            if lost.is_empty() { Ok(()) } else { set_times_below(tree.root.as_fd(), &lost, cancel) }
        };
        let result = set(&mut self);
        if cancel.is_cancelled() {
            return Err(UnpackError::Cancelled);
        }
        result.map_err(|error| UnpackError::io("set the times of directories below", &root, error))
    }

    /// Goes down one component at a time, making directories. What is in the way and is neither directory nor link
    /// gives way.
    fn walk_and_make(&mut self, parents: &[Vec<u8>]) -> io::Result<OwnedFd> {
        let mut pending: VecDeque<Vec<u8>> = parents.iter().cloned().collect();
        // Directories by their names, from the root down.
        let mut stack: Vec<(Vec<u8>, OwnedFd)> = Vec::new();
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
            let root = self.root();
            let here = stack.last().map_or(root.as_fd(), |(_, dir)| dir.as_fd());
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
                    let mut path: Vec<Vec<u8>> = stack.iter().map(|(name, _)| name.clone()).collect();
                    self.touch(here, &path)?;
                    if in_the_way.is_some() {
                        self.recent = None;
                        self.put_aside(here, &name)?;
                    }
                    fs::mkdirat(here, name.as_slice(), Mode::from_raw_mode(0o755))?;
                    fs::chmodat(here, name.as_slice(), Mode::from_raw_mode(0o755), AtFlags::empty())?; // whatever the umask
                    // Only implied: it has no time of its own, so that two imports of an image are alike.
                    let made = fs::statat(here, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)?;
                    path.push(name.clone());
                    self.touched.insert(made.st_ino, Touched { path, time: (0, 0) });
                }
            }
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let dir = fs::openat(here, name.as_slice(), flags, Mode::empty())?;
            stack.push((name, dir));
        }
        // What it leads to is about to be changed.
        let path: Vec<Vec<u8>> = stack.iter().map(|(name, _)| name.clone()).collect();
        let found = match stack.pop() {
            Some((_, found)) => found,
            None => self.root.try_clone()?,
        };
        self.touch(&found, &path)?;
        Ok(found)
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

/// Deletes `name` in `dir` with all below it.
fn remove(dir: impl AsFd + Copy, name: &[u8]) -> io::Result<()> {
    match fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR) => {}
        Err(error) => return Err(error.into()),
    }
    let inside = open_directory(dir, name)?;
    names(&inside)?.iter().try_for_each(|name| remove(inside.as_fd(), name))?;
    Ok(fs::unlinkat(dir, name, AtFlags::REMOVEDIR)?)
}

/// Looks for directories by their inodes, and sets their times.
fn set_times_below(
    dir: impl AsFd + Copy,
    wanted: &HashMap<u64, Touched>,
    cancel: &CancellationToken,
) -> io::Result<()> {
    if cancel.is_cancelled() {
        return Ok(());
    }
    let readable = open_directory(dir, b".")?;
    for name in names(&readable)? {
        if kind_at(dir, &name)? == Some(FileType::Directory) {
            set_times_below(open_directory(dir, &name)?.as_fd(), wanted, cancel)?;
        }
    }
    match wanted.get(&fs::fstat(&readable)?.st_ino) {
        Some(touched) => Ok(fs::futimens(&readable, &touched.timestamps())?),
        None => Ok(()),
    }
}
