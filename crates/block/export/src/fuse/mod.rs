//! Devices as files on a FUSE mount.
//!
//! ```text
//!   VMM, loop device, mmap ──▶ <dir>/<name> ──▶ kernel ──/dev/fuse──▶ readers ──▶ lanes ──▶ BlockDevice
//! ```
//!
//! *Direct* files (disks of guests) have no pages on the host: each request is one call of the device, up to a mebibyte.
//! What the device itself reads from files on the host is in the host's page cache once, however many devices stand on it.
//! *Shared* files are in the page cache themselves, under their own inode, and stay there while no one has them open.
//!
//! Nothing is written back late. FUSE's write-back cache would be the whole mount's, would hold writes that a guest was
//! told are done where neither a seal of its disk nor another process could see them, and makes the kernel trust its own
//! idea of a file's size, so that devices could not grow. So writes go through, to Shared files too. Only what is written
//! through a shared mapping is written back by the kernel: at msync(2) and fsync(2), at its leisure, and before the export
//! is closed.

mod files;
mod filesystem;
mod mount;

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use aenv_block_device::BlockDevice;
use fuser::{BackgroundSession, INodeNo, Notifier};
use tracing::{debug, warn};

use self::files::{File, Files, ROOT};
use self::filesystem::Server;
use crate::exporter::{AttachError, Export, ExportKind, ExportOptions, ExportRecord, Exporter};
use crate::lane::Crew;
use crate::name::check_name;

/// How long `close` waits for the threads of a mount that is unmounted: they have nothing left to do.
const LAST_THREADS: Duration = Duration::from_secs(10);

/// How a FUSE mount is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FuseOptions {
    /// Threads that take requests from the kernel, and serve them while the devices are quick; at least one. Devices that
    /// are slow get threads of their own beside these.
    pub threads: usize,
}

impl Default for FuseOptions {
    fn default() -> Self {
        // Below four there is no seat beside a busy device; above sixteen, they only contend for /dev/fuse.
        Self { threads: thread::available_parallelism().map_or(4, |cores| cores.get() * 2).clamp(4, 16) }
    }
}

/// Why there is no mount.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// Somebody serves it.
    #[error("{dir} is a FUSE mount that is served by a living process")]
    Busy {
        /// Where.
        dir: PathBuf,
    },
    /// The directory cannot be made ready.
    #[error("{step} {dir}")]
    Directory {
        /// Where.
        dir: PathBuf,
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel or fusermount3 would not.
    #[error("mount FUSE on {dir}")]
    Mount {
        /// Where.
        dir: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

/// One mount of one flat directory, with a file for each device.
///
/// There may be several in one process. Whoever serves a mount must not touch its files from the same process while it
/// shuts down, and never needs to.
pub struct FuseExporter {
    shared: Arc<Shared>,
    /// None once closed.
    session: Option<BackgroundSession>,
    /// Disconnected when the threads are gone.
    ended: Mutex<Receiver<()>>,
    threads: usize,
}

/// What exports keep of their exporter.
struct Shared {
    dir: PathBuf,
    device: u64,
    files: Arc<Files>,
    notifier: Notifier,
}

struct FuseExport {
    shared: Arc<Shared>,
    file: Arc<File>,
    path: PathBuf,
    closed: bool,
}

impl FuseExporter {
    /// Mounts on `dir`, which is created if it is not there. A mount that a dead process left there is taken off first.
    ///
    /// As root this needs nothing else; an ordinary user needs fusermount3.
    pub fn mount(dir: &Path, options: FuseOptions) -> Result<Self, MountError> {
        let dir = mount::prepare(dir)?;
        let failed = |source| MountError::Mount { dir: dir.clone(), source };
        let threads = options.threads.max(1);
        let files = Arc::new(Files::new(Crew::new(threads)));
        let (alive, ended) = mpsc::channel();
        let server = || Server::new(Arc::clone(&files), alive);
        let session = mount::mount(server, &dir, threads).map_err(failed)?;
        let device = mount::device(&dir).map_err(failed)?;
        let session = session
            .spawn()
            .and_then(|session| answers(session, &dir))
            .inspect_err(|_| {
                if let Err(error) = mount::abort(&dir, device, false) {
                    warn!(dir = %dir.display(), %error, "a mount that failed to start stays");
                }
            })
            .map_err(failed)?;
        let notifier = session.notifier();
        mount::read_ahead(device);
        let shared = Arc::new(Shared { dir, device, files, notifier });
        Ok(Self { shared, session: Some(session), ended: Mutex::new(ended), threads })
    }

    /// Where the files are.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// Closes what is still exported, unmounts, and waits for the threads. Files that others have open answer with errors.
    pub fn close(mut self) -> io::Result<()> {
        self.end()
    }

    fn end(&mut self) -> io::Result<()> {
        let Some(session) = self.session.take() else { return Ok(()) };
        let mut first = Ok(());
        for file in self.shared.files.all() {
            first = first.and(self.shared.retire(&file));
        }
        let served = !session.guard.is_finished();
        first = first.and(mount::abort(&self.shared.dir, self.shared.device, served));
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        match ended.recv_timeout(LAST_THREADS) {
            Err(RecvTimeoutError::Timeout) => {
                // Joining would wait for whoever keeps the connection. The threads end with it.
                let late = io::Error::new(io::ErrorKind::TimedOut, "the kernel does not let go of the connection");
                std::mem::forget(session);
                first.and(Err(late))
            }
            _ => first.and(session.join()),
        }
    }
}

/// Waits until somebody answers at `dir`. The threads of a session start one by one, and the last ones may fail to.
fn answers(session: BackgroundSession, dir: &Path) -> io::Result<BackgroundSession> {
    let (say, hear) = mpsc::channel();
    let dir = dir.to_owned();
    // On its own thread: where nobody answers, it waits until the session is dropped.
    thread::Builder::new().name("aenv-fuse-start".to_owned()).spawn(move || say.send(fs::metadata(dir).map(drop)))?;
    loop {
        let answer = hear.recv_timeout(Duration::from_millis(20));
        if session.guard.is_finished() {
            session.join()?;
            return Err(io::Error::other("the mount's threads ended"));
        }
        match answer {
            Ok(answer) => return answer.map(|()| session),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("nobody looked at the mount")),
        }
    }
}

impl Exporter for FuseExporter {
    fn kind(&self) -> ExportKind {
        ExportKind::Fuse
    }

    fn attach(
        &self,
        name: &str,
        device: Arc<dyn BlockDevice>,
        options: &ExportOptions,
    ) -> Result<Box<dyn Export>, AttachError> {
        check_name(name)?;
        let taken = || AttachError::Name { name: name.to_owned(), problem: "is taken" };
        let file = self.shared.files.add(name, device, options).ok_or_else(taken)?;
        let path = self.shared.dir.join(name);
        Ok(Box::new(FuseExport { shared: Arc::clone(&self.shared), file, path, closed: false }))
    }

    fn recover(
        &self,
        name: &str,
        record: &ExportRecord,
        device: Arc<dyn BlockDevice>,
        options: &ExportOptions,
    ) -> Result<Box<dyn Export>, AttachError> {
        if record.kind != ExportKind::Fuse || record.path != self.shared.dir.join(name) {
            return Err(AttachError::Name { name: name.to_owned(), problem: "was exported elsewhere" });
        }
        self.attach(name, device, options)
    }
}

impl Export for FuseExport {
    fn path(&self) -> &Path {
        &self.path
    }

    fn record(&self) -> ExportRecord {
        ExportRecord { kind: ExportKind::Fuse, path: self.path.clone(), ublk_id: None }
    }

    fn resizable(&self) -> io::Result<()> {
        Ok(())
    }

    fn resized(&self) -> io::Result<()> {
        self.shared.notify(|notifier| notifier.inval_inode(INodeNo(self.file.ino), -1, 0))?;
        // The kernel asks for a file's size when somebody asks it, but believes its own when it maps or reads.
        fs::metadata(&self.path).map(drop)
    }

    fn disown(self: Box<Self>) -> io::Result<ExportRecord> {
        let record = self.record();
        self.close().map(|()| record)
    }

    fn close(mut self: Box<Self>) -> io::Result<()> {
        self.closed = true;
        self.shared.retire(&self.file)
    }
}

impl Shared {
    /// Takes `file` away: first its name, then its cached pages, written back where they must be, then its device.
    fn retire(&self, file: &File) -> io::Result<()> {
        let ino = INodeNo(file.ino);
        if self.files.unname(file) {
            // Nothing depends on it: the kernel asks for names each time. It lets go of the inode earlier.
            let _ = self.notify(|notifier| notifier.inval_entry(INodeNo(ROOT), file.name.as_ref()));
        }
        let written = self.notify(|notifier| notifier.inval_inode(ino, 0, 0));
        file.gate.shut();
        file.gate.wait();
        self.files.remove(file);
        file.lane.close();
        // What was read or mapped meanwhile would else be read from the cache still.
        written.and(self.notify(|notifier| notifier.inval_inode(ino, 0, 0)))
    }

    /// Tells the kernel, which need not be listening any more.
    fn notify(&self, tell: impl FnOnce(&Notifier) -> io::Result<()>) -> io::Result<()> {
        use rustix::io::Errno;
        match tell(&self.notifier) {
            Err(error)
                if [Errno::NODEV, Errno::NOTCONN, Errno::CONNABORTED]
                    .iter()
                    .any(|gone| error.raw_os_error() == Some(gone.raw_os_error())) =>
            {
                debug!(%error, "the mount is gone");
                Ok(())
            }
            result => result,
        }
    }
}

impl Drop for FuseExport {
    fn drop(&mut self) {
        if !self.closed {
            warn!(device = %self.file.name, "an export was dropped without close");
            self.shared.files.unname(&self.file);
            self.file.gate.shut();
            self.shared.files.remove(&self.file);
        }
    }
}

impl Drop for FuseExporter {
    fn drop(&mut self) {
        if self.session.is_some() {
            warn!(dir = %self.shared.dir.display(), "a FUSE mount was dropped without close");
            if let Err(error) = self.end() {
                warn!(dir = %self.shared.dir.display(), %error, "unmounting failed");
            }
        }
    }
}

impl fmt::Debug for FuseExporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shared, threads, .. } = self;
        f.debug_struct("FuseExporter").field("dir", &shared.dir).field("threads", threads).finish_non_exhaustive()
    }
}

impl fmt::Debug for FuseExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, file, .. } = self;
        f.debug_struct("FuseExport").field("path", path).field("options", &file.options).finish_non_exhaustive()
    }
}
