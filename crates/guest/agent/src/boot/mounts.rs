//! The pseudo file systems.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::mount::{MountFlags, mount, mount_move};

use super::root::NEW_ROOT;
use crate::console::say;

/// A mount without which the machine is none.
#[derive(Debug, thiserror::Error)]
pub(super) enum MountError {
    #[error("mount {kind} on {target}")]
    Mount { kind: &'static str, target: &'static str, source: io::Error },
    #[error("move {from} into the new root")]
    Move { from: &'static str, source: io::Error },
    #[error("open the console")]
    Console(#[source] io::Error),
}

/// What is needed to find the root, and moved into it afterwards.
const EARLY: [(&str, &str); 3] = [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")];

/// Mounts proc, sys and dev in the initramfs.
pub(super) fn early() -> Result<(), MountError> {
    for (kind, target) in EARLY {
        let flags = if kind == "devtmpfs" {
            MountFlags::NOSUID
        } else {
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC
        };
        let _ = std::fs::create_dir(target);
        match mount(kind, target, kind, flags, None) {
            // The kernel may have mounted devtmpfs itself.
            Ok(()) | Err(rustix::io::Errno::BUSY) => {}
            Err(error) => return Err(MountError::Mount { kind, target, source: error.into() }),
        }
    }
    use_console().map_err(MountError::Console)
}

/// The kernel opens `/dev/console` for us only if the initramfs has that node. Without it our first files would become
/// the standard streams.
fn use_console() -> io::Result<()> {
    let console = std::fs::File::options().read(true).write(true).open("/dev/console")?;
    rustix::stdio::dup2_stdin(&console)?;
    rustix::stdio::dup2_stdout(&console)?;
    rustix::stdio::dup2_stderr(&console)?;
    Ok(())
}

/// Moves the early mounts into the new root.
pub(super) fn move_into_root() -> Result<(), MountError> {
    for (_, from) in EARLY {
        let target = format!("{NEW_ROOT}{from}");
        // An image may come without the directories; a read-only one then fails below.
        let _ = std::fs::create_dir(&target);
        mount_move(from, &target).map_err(|source| MountError::Move { from, source: source.into() })?;
    }
    Ok(())
}

/// The rest, in the new root. The machine works without any of them, so a failure is only said.
pub(super) fn late() {
    const NO_EXEC: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
    const DATA: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);
    let mounts = [
        ("devpts", "/dev/pts", MountFlags::NOSUID.union(MountFlags::NOEXEC), Some(c"gid=5,mode=620,ptmxmode=666")),
        ("tmpfs", "/dev/shm", DATA, Some(c"mode=1777")),
        ("mqueue", "/dev/mqueue", NO_EXEC, None),
        ("tmpfs", "/run", DATA, Some(c"mode=755")),
        ("cgroup2", "/sys/fs/cgroup", NO_EXEC, Some(c"nsdelegate")),
    ];
    for (kind, target, flags, options) in mounts {
        let _ = std::fs::DirBuilder::new().mode(0o755).create(target);
        if let Err(error) = mount(kind, target, kind, flags, options) {
            say!("mount {kind} on {target}: {error}");
        }
    }
    let links =
        [("/proc/self/fd", "/dev/fd"), ("fd/0", "/dev/stdin"), ("fd/1", "/dev/stdout"), ("fd/2", "/dev/stderr")];
    for (target, link) in links {
        let _ = std::os::unix::fs::symlink(target, link);
    }
    // Temporary files stay on the disk: they may be larger than memory. Programs expect them to have a place.
    if !Path::new("/tmp").exists() && std::fs::create_dir("/tmp").is_ok() {
        let _ = std::fs::set_permissions("/tmp", std::fs::Permissions::from_mode(0o1777));
    }
    let _ = std::fs::create_dir("/run/lock");
}
