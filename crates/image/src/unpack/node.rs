//! Making one file of the tree from one member of a layer.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{self, AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use super::path::EntryPath;
use super::tree::kind_at;
use super::{UnpackError, Unpacker};
use crate::archive::{Extent, Kind, Member, Members};

impl Unpacker {
    /// Makes what `member` describes at `path`. What was there gives way, except that a directory keeps its content
    /// under a directory.
    pub(super) fn unpack<R: io::Read>(
        &mut self,
        path: &EntryPath,
        member: &Member,
        members: &mut Members<R>,
    ) -> Result<(), UnpackError> {
        let Some((parents, name)) = path.split() else {
            if member.kind != Kind::Directory {
                return Err(refused(path, "the root must be a directory"));
            }
            let root = self.tree.root();
            return self.dress_directory(path, member, &root);
        };
        let parent =
            self.tree.make_parent(parents).map_err(|e| UnpackError::io("make the directories above", path, e))?;
        match &member.kind {
            Kind::File => self.file(path, member, members, &parent, name),
            Kind::Directory => self.directory(path, member, &parent, name),
            Kind::HardLink { target } => self.hard_link(path, target, &parent, name),
            Kind::Symlink { target } => {
                if target.is_empty() || target.contains(&0) {
                    return Err(refused(path, "the symbolic link has no target"));
                }
                self.replacing(path, &parent, name, |dir| fs::symlinkat(target.as_slice(), dir, name))?;
                self.dress(path, member, &parent, name)
            }
            Kind::Fifo => self.special(path, member, &parent, name, FileType::Fifo, 0),
            Kind::CharDevice { major, minor } => {
                self.special(path, member, &parent, name, FileType::CharacterDevice, fs::makedev(*major, *minor))
            }
            Kind::BlockDevice { major, minor } => {
                self.special(path, member, &parent, name, FileType::BlockDevice, fs::makedev(*major, *minor))
            }
        }
    }

    fn file<R: io::Read>(
        &mut self,
        path: &EntryPath,
        member: &Member,
        members: &mut Members<R>,
        parent: &OwnedFd,
        name: &[u8],
    ) -> Result<(), UnpackError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file =
            self.replacing(path, parent, name, |dir| fs::openat(dir, name, flags, Mode::from_raw_mode(0o600)))?;
        let whole = [Extent { offset: 0, length: member.size }];
        for extent in member.extents.as_deref().unwrap_or(&whole) {
            self.copy(path, members, &file, *extent)?;
        }
        if member.extents.is_some() {
            fs::ftruncate(&file, member.size).map_err(|e| UnpackError::io("set the length of", path, e))?;
        }
        dress_open(&file, member).map_err(|problem| undressed(path, problem))?;
        let time = timestamps(member);
        fs::futimens(&file, &time).map_err(|e| UnpackError::io("set the time of", path, e))
    }

    fn copy<R: io::Read>(
        &mut self,
        path: &EntryPath,
        members: &mut Members<R>,
        file: &OwnedFd,
        extent: Extent,
    ) -> Result<(), UnpackError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut done = 0;
        let result = loop {
            let want = usize::try_from(extent.length - done).unwrap_or(usize::MAX).min(buffer.len());
            if want == 0 {
                break Ok(());
            }
            let step = self.check(members.read_data(&mut buffer[..want])).and_then(|n| {
                self.budget.charge(n as u64)?;
                write_at(file, &buffer[..n], extent.offset + done).map_err(|e| UnpackError::io("write", path, e))?;
                Ok(n)
            });
            match step {
                Ok(n) => done += n as u64,
                Err(error) => break Err(error),
            }
        };
        self.buffer = buffer;
        result
    }

    fn directory(
        &mut self,
        path: &EntryPath,
        member: &Member,
        parent: &OwnedFd,
        name: &[u8],
    ) -> Result<(), UnpackError> {
        self.budget.charge(4096)?;
        let make = |dir: &OwnedFd| fs::mkdirat(dir, name, Mode::from_raw_mode(0o700));
        match make(parent) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let there = kind_at(parent, name).map_err(|e| UnpackError::io("look at", path, e))?;
                if there != Some(FileType::Directory) {
                    self.replacing(path, parent, name, make)?;
                }
            }
            Err(error) => return Err(UnpackError::io("make the directory", path, error)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = fs::openat(parent, name, flags, Mode::empty())
            .map_err(|e| UnpackError::io("open the directory", path, e))?;
        self.dress_directory(path, member, &dir)
    }

    fn dress_directory(&mut self, path: &EntryPath, member: &Member, dir: &OwnedFd) -> Result<(), UnpackError> {
        dress_open(dir, member).map_err(|problem| undressed(path, problem))?;
        let stat = fs::fstat(dir).map_err(|e| UnpackError::io("look at", path, e))?;
        self.tree.note_time(&stat, path, member.mtime);
        Ok(())
    }

    /// Gives a file one more name. Owner, mode and time are those of the file, set where it was unpacked.
    fn hard_link(&mut self, path: &EntryPath, target: &[u8], parent: &OwnedFd, name: &[u8]) -> Result<(), UnpackError> {
        let target = EntryPath::parse(target)?;
        let missing = || refused(path, "it is a hard link to a file that the image does not have");
        let (target_parents, target_name) = target.split().ok_or_else(missing)?;
        let from = self.tree.find_parent(target_parents).map_err(|e| UnpackError::io("look for", &target, e))?;
        let from = from.ok_or_else(missing)?;
        let stat = match fs::statat(&*from, target_name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Err(missing()),
            Err(error) => return Err(UnpackError::io("look at", &target, error)),
        };
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            return Err(refused(path, "it is a hard link to a directory"));
        }
        if let Ok(there) = fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
            && there.st_ino == stat.st_ino
        {
            return Ok(()); // a link to itself, or made before
        }
        // Should the target lie in the very directory that gives way to the link, it is still there, aside.
        let link = |dir: &OwnedFd| fs::linkat(&*from, target_name, dir, name, AtFlags::empty());
        self.replacing(path, parent, name, link)
    }

    fn special(
        &mut self,
        path: &EntryPath,
        member: &Member,
        parent: &OwnedFd,
        name: &[u8],
        kind: FileType,
        device: fs::Dev,
    ) -> Result<(), UnpackError> {
        let mode = Mode::from_raw_mode(0o600);
        self.replacing(path, parent, name, |dir| fs::mknodat(dir, name, kind, mode, device))?;
        self.dress(path, member, parent, name)
    }

    /// Makes something at `name`, removing what is there if need be.
    fn replacing<T>(
        &mut self,
        path: &EntryPath,
        parent: &OwnedFd,
        name: &[u8],
        make: impl Fn(&OwnedFd) -> rustix::io::Result<T>,
    ) -> Result<T, UnpackError> {
        match make(parent) {
            Err(Errno::EXIST) => {
                self.tree.remove(parent, name).map_err(|e| UnpackError::io("replace", path, e))?;
                make(parent).map_err(|e| UnpackError::io("make", path, e))
            }
            Err(error) => Err(UnpackError::io("make", path, error)),
            Ok(made) => Ok(made),
        }
    }

    /// Owner, mode, attributes and time of something that can't be opened.
    fn dress(&self, path: &EntryPath, member: &Member, parent: &OwnedFd, name: &[u8]) -> Result<(), UnpackError> {
        let (uid, gid) = (Uid::from_raw(member.uid), Gid::from_raw(member.gid));
        fs::chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| UnpackError::io("set the owner of", path, e))?;
        // A symbolic link has no mode. Anything else here was just made by us, so following is harmless.
        if !matches!(member.kind, Kind::Symlink { .. }) {
            fs::chmodat(parent, name, Mode::from_raw_mode(member.mode), AtFlags::empty())
                .map_err(|e| UnpackError::io("set the mode of", path, e))?;
        }
        if !member.xattrs.is_empty() {
            // No call takes a directory and a name here; the descriptor's own path does, and only `name` can be a link.
            let mut at = format!("/proc/self/fd/{}/", parent.as_raw_fd()).into_bytes();
            at.extend_from_slice(name);
            for (key, value) in &member.xattrs {
                fs::lsetxattr(at.as_slice(), key.as_slice(), value, XattrFlags::empty())
                    .map_err(|error| undressed(path, (SET_XATTRS, error)))?;
            }
        }
        fs::utimensat(parent, name, &timestamps(member), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| UnpackError::io("set the time of", path, e))
    }
}

fn refused(path: &EntryPath, problem: &'static str) -> UnpackError {
    UnpackError::Refused { path: path.to_string(), problem }
}

fn timestamps(member: &Member) -> Timestamps {
    let (seconds, nanos) = member.mtime;
    let time = Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
    Timestamps { last_access: time, last_modification: time }
}

fn write_at(file: &OwnedFd, mut data: &[u8], mut offset: u64) -> io::Result<()> {
    while !data.is_empty() {
        let n = rustix::io::pwrite(file, data, offset)?;
        data = &data[n..];
        offset += n as u64;
    }
    Ok(())
}

/// Owner, mode and attributes, in this order: a change of owner takes setuid and capabilities away.
fn dress_open(file: &OwnedFd, member: &Member) -> Result<(), (&'static str, Errno)> {
    fs::fchown(file, Some(Uid::from_raw(member.uid)), Some(Gid::from_raw(member.gid)))
        .map_err(|e| ("set the owner of", e))?;
    fs::fchmod(file, Mode::from_raw_mode(member.mode)).map_err(|e| ("set the mode of", e))?;
    set_xattrs(file, member).map_err(|e| (SET_XATTRS, e))
}

const SET_XATTRS: &str = "set the extended attributes of";

/// Why a file could not be given what belongs to it. An inode and a block hold all attributes of one file, or they don't.
fn undressed(path: &EntryPath, (doing, error): (&'static str, Errno)) -> UnpackError {
    match error {
        Errno::NOSPC | Errno::TOOBIG | Errno::RANGE if doing == SET_XATTRS => {
            refused(path, "its extended attributes are more than the file system holds for one file")
        }
        error => UnpackError::io(doing, path, error),
    }
}

/// Makes the attributes exactly those of the member: a directory of a lower layer has its own, and an access control
/// list is inherited from the parent's default.
fn set_xattrs(file: impl AsFd, member: &Member) -> Result<(), Errno> {
    let mut list = Vec::new();
    match fs::flistxattr_query(&file) {
        Ok(length) if length > 0 => {
            list.resize(length, 0);
            let length = fs::flistxattr(&file, list.as_mut_slice())?;
            list.truncate(length);
        }
        Ok(_) | Err(Errno::NOTSUP) => {}
        Err(error) => return Err(error),
    }
    for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let wanted = member.xattrs.iter().any(|(key, _)| key == name);
        // Labels of the host's security module come by themselves and can't be taken away.
        let hosts = name.starts_with(b"security.") && name != b"security.capability";
        if !wanted && !hosts {
            fs::fremovexattr(&file, name)?;
        }
    }
    member.xattrs.iter().try_for_each(|(key, value)| fs::fsetxattr(&file, key.as_slice(), value, XattrFlags::empty()))
}
