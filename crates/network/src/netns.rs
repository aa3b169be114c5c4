//! Network namespaces, held by a bind mount.
//!
//! The kernel ties a namespace to a *thread*, so everything that must happen inside one happens on a thread made for it
//! that ends right after: no thread that serves others ever changes its netns.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{FsType, statfs};
use tokio::sync::oneshot;

use crate::egress::slot_tables;
use crate::error::{CreateSlotError, SlotProblem};
use crate::netlink::Netlink;
use crate::nft::{Batch, Netfilter};
use crate::slot::TAP_NAME;
use crate::tap;

/// The calling thread's namespace. `thread-self`, since `self` is the process's first thread.
const OWN_NETNS: &str = "/proc/thread-self/ns/net";

/// Magic of the filesystem namespaces live in (`linux/magic.h`).
const NSFS_MAGIC: FsType = FsType(0x6e73_6673);

/// Whether the calling thread's namespace forwards.
pub(crate) const IP_FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";

/// Settings of a slot's own namespace; `/proc/sys/net` shows the one of the thread that opens it.
const SYSCTLS: [(&str, &str); 6] = [
    // A new namespace inherits IPv4 settings from the host's, which forwards if it runs containers. With its policy comes a 1.
    ("ipv4/ip_forward", "0"),
    // A connection to a guest whose VMM is not there fails at once instead of after a minute of retries.
    ("ipv4/conf/default/ignore_routes_with_linkdown", "1"),
    // Every packet that is refused is answered; the only one to be answered is the guest, which pays for it.
    ("ipv4/icmp_ratemask", "0"),
    // No IPv6 addresses or routes on this side. The guest may do with IPv6 what it likes; nobody answers.
    ("ipv6/conf/default/disable_ipv6", "1"),
    ("ipv6/conf/all/disable_ipv6", "1"),
    ("ipv6/conf/lo/disable_ipv6", "1"),
];

/// An open namespace and a netlink socket that speaks for it.
pub(crate) struct Inside {
    pub(crate) netns: Arc<OwnedFd>,
    pub(crate) netlink: Netlink,
}

/// Makes a namespace with a tap in it, bind-mounted at `path`; `filtered`: with the rules of a slot without a policy. On an error parts may be left: `remove` takes them.
pub(crate) async fn create(path: PathBuf, filtered: bool) -> Result<Inside, CreateSlotError> {
    let runtime = tokio::runtime::Handle::current();
    on_thread(move || {
        let at_path = |doing, source| kernel(doing, path.display(), source);
        OpenOptions::new().write(true).create_new(true).open(&path).map_err(|source| at_path("create", source))?;
        unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| at_path("make a network namespace for", errno.into()))?;
        mount(Some(OWN_NETNS), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(|errno| at_path("mount the network namespace at", errno.into()))?;
        for (key, value) in SYSCTLS {
            let file = Path::new("/proc/sys/net").join(key);
            match fs::write(&file, value) {
                // A kernel without IPv6 has none of its settings, and a kernel before 4.1 not the second.
                Err(error) if error.kind() == io::ErrorKind::NotFound && key != "ipv4/ip_forward" => {}
                result => result.map_err(|source| kernel("write", file.display(), source))?,
            }
        }
        tap::create_persistent(TAP_NAME).map_err(|source| kernel("create tap", TAP_NAME, source))?;
        if filtered {
            let rules = Batch::new().replace_tables(slot_tables(Vec::new()));
            let done = Netfilter::open().and_then(|netfilter| netfilter.commit(rules));
            done.map_err(|source| kernel("make rules in", path.display(), source))?;
        }
        inside(&runtime)
    })
    .await
}

/// Changes the rules of a namespace, which forwards from then on.
///
/// Cancel safety: if dropped, it is done all the same.
pub(crate) async fn change_rules(netns: Arc<OwnedFd>, rules: Batch) -> io::Result<()> {
    enter(netns, || {
        Netfilter::open()?.commit(rules)?;
        fs::write(IP_FORWARD, "1")
    })
    .await
}

/// Has a namespace forward nothing.
pub(crate) async fn stop_forwarding(netns: Arc<OwnedFd>) -> io::Result<()> {
    enter(netns, || fs::write(IP_FORWARD, "0")).await
}

async fn enter(netns: Arc<OwnedFd>, work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    let inside = move || {
        let entered = setns(&netns, CloneFlags::CLONE_NEWNET).map_err(io::Error::from);
        Ok(entered.and_then(|()| work()))
    };
    on_thread(inside).await.map_err(io::Error::other)?
}

/// Opens the namespace bind-mounted at `path`; `None` if there is none.
pub(crate) async fn open(path: PathBuf) -> Result<Option<Inside>, CreateSlotError> {
    let runtime = tokio::runtime::Handle::current();
    on_thread(move || {
        let at_path = |doing, source| kernel(doing, path.display(), source);
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            result => result.map_err(|source| at_path("open", source))?,
        };
        let filesystem = statfs(&path).map_err(|errno| at_path("inspect", errno.into()))?;
        if filesystem.filesystem_type() != NSFS_MAGIC {
            return Ok(None); // the bare file of a creation that was cut short
        }
        setns(&file, CloneFlags::CLONE_NEWNET).map_err(|errno| at_path("enter", errno.into()))?;
        inside(&runtime).map(Some)
    })
    .await
}

/// Handles on the calling thread's namespace.
fn inside(runtime: &tokio::runtime::Handle) -> Result<Inside, CreateSlotError> {
    let netns = own().map_err(|source| kernel("open", OWN_NETNS, source))?;
    let netlink = Netlink::open(runtime).map_err(|source| kernel("open", "netlink socket in namespace", source))?;
    Ok(Inside { netns: Arc::new(netns), netlink })
}

/// The calling thread's namespace, opened.
pub(crate) fn own() -> io::Result<OwnedFd> {
    Ok(File::open(OWN_NETNS)?.into())
}

/// Unmounts and unlinks `path`. `Ok(false)` if it did not exist.
///
/// The namespace itself goes when the last socket and process in it have. Copies of the mount in other mount namespaces
/// do not hold it: unlinking a file detaches what is mounted on it everywhere.
pub(crate) fn remove(path: &Path) -> Result<bool, SlotProblem> {
    let problem = |doing, source| SlotProblem::Netns { doing, path: path.to_owned(), source };
    match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        // EINVAL: exists, but is not a mount point.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(errno) => return Err(problem("unmount", errno.into())),
    }
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(problem("remove", error)),
    }
}

/// Runs `work` on a thread of its own, which may leave its netns: it ends with the work.
///
/// Cancel safety: the work goes on to its end; its result is dropped.
async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CreateSlotError> + Send + 'static,
) -> Result<T, CreateSlotError> {
    let (done, result) = oneshot::channel();
    std::thread::Builder::new()
        .name("netns".into())
        .spawn(move || drop(done.send(work())))
        .map_err(|source| kernel("start a thread for", "a network namespace", source))?;
    // The sender is dropped unused only if `work` panicked.
    result
        .await
        .unwrap_or_else(|_| Err(kernel("work in", "a network namespace", io::Error::other("the thread panicked"))))
}

fn kernel(doing: &'static str, object: impl ToString, source: io::Error) -> CreateSlotError {
    CreateSlotError::Kernel { doing, object: object.to_string(), source }
}
