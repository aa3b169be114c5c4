//! Mounting, taking over what a dead process left, and unmounting.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use fuser::{Config, MountOption, Session, SessionACL};
use rustix::fs::{AtFlags, CWD, StatxFlags, major, makedev, minor, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, unmount};
use tracing::{debug, info, warn};

use super::MountError;
use super::filesystem::{MAX_REQUEST, Server};

/// What /proc/mounts says it is.
const NAME: &str = "aenv-block";
const SUBTYPE: &str = "aenv";
/// More mounts than this on top of each other are nobody's accident.
const STACKED: usize = 16;

/// Mounts on `dir`, which is [prepared](prepare), and has the kernel's first request answered.
///
/// Root mounts by itself: the library would unmount by path what is no longer mounted, which may be a successor's.
pub(super) fn mount(server: impl FnOnce() -> Server, dir: &Path, threads: usize) -> io::Result<Session<Server>> {
    let mut config = Config::default();
    config.n_threads = Some(threads);
    config.clone_fd = true;
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // Others may look; the files' modes say who may read.
    let options = format!(
        "fd={},rootmode=40000,user_id={user},group_id={group},default_permissions,allow_other,max_read={MAX_REQUEST}",
        device.as_raw_fd()
    );
    match rustix::mount::mount(NAME, dir, format!("fuse.{SUBTYPE}"), flags, Some(CString::new(options)?.as_c_str())) {
        Ok(()) => {
            config.acl = SessionACL::All;
            Session::from_fd(server(), device.into(), config.acl, config).inspect_err(|_| {
                if let Err(error) = detach(dir) {
                    warn!(dir = %dir.display(), %error, "a mount that failed to start stays");
                }
            })
        }
        Err(Errno::PERM) => {
            // An ordinary user, by fusermount3. Others may look only by the administrator's leave.
            config.mount_options = vec![
                MountOption::FSName(NAME.to_owned()),
                MountOption::Subtype(SUBTYPE.to_owned()),
                MountOption::DefaultPermissions,
                MountOption::NoSuid,
                MountOption::NoDev,
                MountOption::NoExec,
                MountOption::NoAtime,
                MountOption::CUSTOM(format!("max_read={MAX_REQUEST}")),
            ];
            Session::new(server(), dir, &config)
        }
        Err(error) => Err(error.into()),
    }
}

/// Makes `dir` an empty place to mount on, and says its path without links.
pub(super) fn prepare(dir: &Path) -> Result<PathBuf, MountError> {
    let failed = |step, source| MountError::Directory { dir: dir.to_owned(), step, source };
    for _ in 0..STACKED {
        match is_fuse(dir) {
            // What a mount says whose server is gone.
            Err(error) if error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()) => {
                detach(dir).map_err(|source| failed("detach what a dead process left on", source))?;
                info!(dir = %dir.display(), "took over a mount point from a process that is gone");
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(dir).map_err(|source| failed("create", source))?;
            }
            Err(source) => return Err(failed("look at", source)),
            Ok(true) => return Err(MountError::Busy { dir: dir.to_owned() }),
            Ok(false) => return fs::canonicalize(dir).map_err(|source| failed("resolve", source)),
        }
    }
    Err(failed("clear", io::Error::other("too many mounts on top of each other")))
}

/// Ends the connection of the mount `mounted` on `dir`, whoever has files open there, and takes it off the tree.
pub(super) fn abort(dir: &Path, mounted: u64, served: bool) -> io::Result<()> {
    if !device(dir).is_ok_and(|device| device == mounted) {
        // Somebody else took it off the tree already. It may live on in an open file or another mount namespace.
        if served {
            abort_connection(mounted);
        }
        return Ok(());
    }
    match unmount(dir, UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => {
            abort_connection(mounted); // an ordinary user's way to force
            fusermount_unmount(dir)
        }
        result => Ok(result?),
    }
}

/// The device number of the file system on `dir`. Asks no server, so it is told even where none answers.
pub(super) fn device(dir: &Path) -> io::Result<u64> {
    let found = statx(CWD, dir, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(makedev(found.stx_dev_major, found.stx_dev_minor))
}

/// Lets the kernel read ahead in full requests. Its 128 KiB would do too, slower; so a failure is no matter.
pub(super) fn read_ahead(device: u64) {
    let path = format!("/sys/class/bdi/{}:{}/read_ahead_kb", major(device), minor(device));
    if let Err(error) = fs::write(&path, (MAX_REQUEST >> 10).to_string()) {
        debug!(path, %error, "readahead stays as it is");
    }
}

/// Whether `dir` is the root of a FUSE mount whose server answers. This asks it: attributes alone may be remembered.
fn is_fuse(dir: &Path) -> io::Result<bool> {
    const FUSE_SUPER_MAGIC: i64 = 0x6573_5546;
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::metadata(dir)?;
    let mounted = device(dir)? != device(parent)?;
    Ok(mounted && rustix::fs::statfs(dir)?.f_type == FUSE_SUPER_MAGIC)
}

fn detach(dir: &Path) -> io::Result<()> {
    match unmount(dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => fusermount_unmount(dir),
        result => Ok(result?),
    }
}

fn abort_connection(device: u64) {
    let path = format!("/sys/fs/fuse/connections/{}/abort", minor(device));
    if let Err(error) = fs::write(&path, "1") {
        debug!(path, %error, "the connection ends when its last open file is closed");
    }
}

fn fusermount_unmount(dir: &Path) -> io::Result<()> {
    let output = std::process::Command::new("fusermount3").args(["-u", "-q", "-z", "--"]).arg(dir).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "fusermount3: {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}
