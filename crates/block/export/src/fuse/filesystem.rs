//! Requests of the kernel, as calls of devices.

use std::ffi::OsStr;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, SystemTime};

use aenv_block_device::BlockDevice;
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::FallocateFlags;
use tracing::{debug, error, warn};

use super::files::{File, Files, ROOT};
use crate::buffers::Buffers;
use crate::errno::errno;
use crate::exporter::Caching;
use crate::gate::Pass;
use crate::lane::become_io_flusher;

/// The largest request: what the kernel allows by default (fs.fuse.max_pages_limit).
pub(super) const MAX_REQUEST: u32 = 1 << 20;
/// Requests that nobody waits for one by one (readahead, asynchronous direct I/O, write-back), of all files together. When
/// there are more, further ones wait in the kernel, whatever their file: so one slow device must not get there alone.
const MAX_BACKGROUND: u16 = 4096;
/// A file's attributes change only with its size, and then the kernel is told.
const ATTRIBUTES_LAST: Duration = Duration::from_secs(3600);
/// Names come and go: each lookup asks.
const NAMES_LAST: Duration = Duration::ZERO;

/// One mount's side that answers.
pub(super) struct Server {
    files: Arc<Files>,
    buffers: Arc<Buffers>,
    born: SystemTime,
    owner: (u32, u32),
    /// Dropped when the last thread is gone.
    _alive: Sender<()>,
}

impl Server {
    pub(super) fn new(files: Arc<Files>, alive: Sender<()>) -> Self {
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Self { files, buffers: Arc::default(), born: SystemTime::now(), owner, _alive: alive }
    }

    fn directory(&self) -> FileAttr {
        FileAttr { kind: FileType::Directory, perm: 0o755, nlink: 2, ..self.attributes(ROOT, 0, 0o755) }
    }

    /// None if the file is closed.
    fn file(&self, file: &File) -> Option<FileAttr> {
        let size = file.gate.enter()?.device()?.size().get();
        Some(self.attributes(file.ino, size, if file.options.read_only { 0o400 } else { 0o600 }))
    }

    fn attributes(&self, ino: u64, size: u64, perm: u16) -> FileAttr {
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size.div_ceil(512),
            atime: self.born,
            mtime: self.born,
            ctime: self.born,
            crtime: self.born,
            kind: FileType::RegularFile,
            perm,
            nlink: 1,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// The file and a pass to its device. EIO for one that is closed, which may still be open in some process.
    fn enter(&self, ino: INodeNo) -> Result<(Arc<File>, Pass), Errno> {
        let file = self.files.by_ino(ino.0).ok_or(Errno::EIO)?;
        let pass = file.gate.enter().ok_or(Errno::EIO)?;
        Ok((file, pass))
    }

    /// Lets the device act, here or in its lane, and replies.
    fn act(
        &self,
        (file, pass): (Arc<File>, Pass),
        what: &'static str,
        reply: ReplyEmpty,
        act: impl FnOnce(&dyn BlockDevice) -> io::Result<()> + Send + 'static,
    ) {
        become_io_flusher();
        let lane = Arc::clone(&file.lane);
        let job = move || match call(&file, what, &pass, act) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        };
        match lane.seat() {
            Some(_seat) => job(),
            None => lane.push(Box::new(job)),
        }
    }
}

impl Filesystem for Server {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // What the kernel lacks, we do without: each of these makes things faster, and none changes what is read.
        for wanted in [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP, // Linux 6.6; before, a shared mapping of such a file is refused
        ] {
            if let Err(lacking) = config.add_capabilities(wanted) {
                debug!(?lacking, "the kernel's FUSE lacks a capability");
            }
        }
        let nearest = |what, result: Result<_, _>| {
            result.map(drop).map_err(|nearest| io::Error::other(format!("{what}: the nearest value is {nearest}")))
        };
        nearest("largest request", config.set_max_write(MAX_REQUEST))?;
        let _ = config.set_max_readahead(MAX_REQUEST).or_else(|most| config.set_max_readahead(most));
        let background = config.set_max_background(MAX_BACKGROUND);
        nearest("background requests", background.map(u32::from).map_err(u32::from))
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = (parent.0 == ROOT).then(|| self.files.by_name(name.to_str()?)).flatten();
        match found.and_then(|file| self.file(&file)) {
            Some(attributes) => {
                reply.entry_with_ttls(&ATTRIBUTES_LAST, &NAMES_LAST, &attributes, Generation(0));
            }
            None => reply.error(Errno::ENOENT), // not an entry without inode: that would be remembered
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        if ino.0 == ROOT {
            return reply.attr(&Duration::ZERO, &self.directory()); // so that who looks at the mount sees whether it lives
        }
        match self.files.by_ino(ino.0).and_then(|file| self.file(&file)) {
            Some(attributes) => reply.attr(&ATTRIBUTES_LAST, &attributes),
            None => reply.error(Errno::EIO),
        }
    }

    /// Times may be set and are not kept; everything else stays as it is.
    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if mode.is_some() || uid.is_some() || gid.is_some() || size.is_some() {
            return reply.error(Errno::EPERM);
        }
        self.getattr(request, ino, handle, reply);
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let Some(file) = self.files.by_ino(ino.0) else { return reply.error(Errno::EIO) };
        // VMMs open the file of a private mapping for writing, and never write to it. Whoever does is refused by `write`.
        let for_mapping = file.options.caching == Caching::Shared;
        if file.options.read_only && !for_mapping && flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        let flags = match file.options.caching {
            Caching::Direct => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
            Caching::Shared => FopenFlags::FOPEN_KEEP_CACHE,
        };
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        become_io_flusher();
        let (file, pass) = match self.enter(ino) {
            Ok(entered) => entered,
            Err(errno) => return reply.error(errno),
        };
        let lane = Arc::clone(&file.lane);
        match lane.seat() {
            Some(_seat) => read(&file, &pass, &self.buffers, offset, size, reply),
            None => {
                let buffers = Arc::clone(&self.buffers);
                lane.push(Box::new(move || read(&file, &pass, &buffers, offset, size, reply)));
            }
        }
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        become_io_flusher();
        let (file, pass) = match self.enter(ino) {
            Ok(entered) => entered,
            Err(errno) => return reply.error(errno),
        };
        if file.options.read_only {
            return reply.error(Errno::EROFS);
        }
        let lane = Arc::clone(&file.lane);
        match lane.seat() {
            Some(_seat) => write(&file, &pass, offset, data, reply),
            None => {
                let data = data.to_vec(); // the reader's buffer takes the next request
                lane.push(Box::new(move || write(&file, &pass, offset, &data, reply)));
            }
        }
    }

    fn fsync(&self, _request: &Request, ino: INodeNo, _handle: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        match self.enter(ino) {
            Ok((file, _)) if file.options.read_only => reply.ok(), // nothing to flush
            Ok(entered) => self.act(entered, "flush", reply, |device| device.flush()),
            Err(errno) => reply.error(errno),
        }
    }

    fn fallocate(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let mode = FallocateFlags::from_bits_retain(mode.cast_unsigned());
        if !mode.intersects(FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE) {
            return reply.error(Errno::EOPNOTSUPP); // devices have no other space than they have
        }
        let entered = match self.enter(ino) {
            Ok((file, _)) if file.options.read_only => return reply.error(Errno::EROFS),
            Ok(entered) => entered,
            Err(errno) => return reply.error(errno),
        };
        let grows = !mode.contains(FallocateFlags::KEEP_SIZE);
        self.act(entered, "discard", reply, move |device| {
            let size = device.size().get();
            let end = offset.saturating_add(length);
            if grows && end > size {
                return Err(io::ErrorKind::StorageFull.into());
            }
            device.discard(offset.min(size), end.min(size).saturating_sub(offset))
        });
    }

    fn readdir(&self, _request: &Request, ino: INodeNo, _handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        if ino.0 != ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        // An offset is the inode after which to go on; below that of the root, the two that every directory has.
        const DOT: u64 = 1;
        const DOT_DOT: u64 = 2;
        let mut full = offset < DOT && reply.add(INodeNo(ROOT), DOT, FileType::Directory, ".");
        full = full || offset < DOT_DOT && reply.add(INodeNo(ROOT), DOT_DOT, FileType::Directory, "..");
        let mut last = offset.saturating_sub(DOT_DOT);
        while !full && let Some(file) = self.files.after(last) {
            last = file.ino;
            full = reply.add(INodeNo(file.ino), file.ino + DOT_DOT, FileType::RegularFile, &file.name);
        }
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let blocks = |file: &Arc<File>| Some(file.gate.enter()?.device()?.size().get() / 4096);
        let files = self.files.all();
        reply.statfs(files.iter().filter_map(blocks).sum(), 0, 0, files.len() as u64, 0, 4096, 255, 4096);
    }

    // What these files do not have. Named here so that the library does not warn of each.

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS); // close(2) promises nothing; the kernel will not ask again
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn setxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn removexattr(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(Errno::ENOSYS); // always ready, like any file
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        reply.error(Errno::ENOSYS); // holes are not told; the kernel does the rest
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn create(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        reply.error(Errno::EPERM);
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn symlink(&self, _: &Request, _: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn link(&self, _: &Request, _: INodeNo, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rename(&self, _: &Request, _: INodeNo, _: &OsStr, _: INodeNo, _: &OsStr, _: RenameFlags, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }
}

/// Replies with what lies there; short at the device's end.
fn read(file: &File, pass: &Pass, buffers: &Arc<Buffers>, offset: u64, size: u32, reply: ReplyData) {
    let result = call(file, "read", pass, |device| {
        let there = device.size().get().saturating_sub(offset).min(u64::from(size)) as usize; // at most a request
        let mut buffer = buffers.take(there);
        if there > 0 {
            device.read_at(offset, &mut buffer)?;
        }
        Ok(buffer)
    });
    match result {
        Ok(buffer) => reply.data(&buffer),
        Err(errno) => reply.error(errno),
    }
}

/// Writes what fits before the device's end. Beyond it there is no space, as on any disk.
fn write(file: &File, pass: &Pass, offset: u64, data: &[u8], reply: ReplyWrite) {
    let result = call(file, "write", pass, |device| {
        let fits = device.size().get().saturating_sub(offset).min(data.len() as u64) as usize; // at most the data
        if fits == 0 && !data.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        device.write_at(offset, &data[..fits])?;
        Ok(fits)
    });
    match result {
        Ok(written) => reply.written(written as u32), // at most a request
        Err(errno) => reply.error(errno),
    }
}

/// Calls the device. Whatever goes wrong is logged here, as the other side gets only a number.
fn call<T>(
    file: &File,
    what: &'static str,
    pass: &Pass,
    act: impl FnOnce(&dyn BlockDevice) -> io::Result<T>,
) -> Result<T, Errno> {
    let device = pass.device().ok_or(Errno::EIO)?;
    // A device that panics has broken its own promises, not ours to all the others.
    match catch_unwind(AssertUnwindSafe(|| act(device))) {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => {
            let errno = Errno::from_i32(errno(&error).raw_os_error());
            if let Some(failures) = file.failed() {
                warn!(device = %file.name, what, %error, ?errno, failures, "request to an exported device failed");
            }
            Err(errno)
        }
        Err(_) => {
            error!(device = %file.name, what, "an exported device panicked");
            Err(Errno::EIO)
        }
    }
}
