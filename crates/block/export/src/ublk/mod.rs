//! Devices as ublk block devices.
//!
//! ```text
//!   VMM, mount, mmap ──▶ /dev/ublkbN ──▶ kernel ──/dev/ublkcN──▶ queue ──▶ lane ──▶ BlockDevice
//!                                                 /dev/ublk-control: add, start, take over, stop
//! ```
//!
//! A device outlives its server. When the process ends, however, the kernel keeps what is asked of the device, what was
//! being done included, and gives it to the server that takes the device over (`recover`). Whoever has it open only waits.
//! So everything is asked at least once: a successor's device must hold all writes that its predecessor answered.
//!
//! Each device carries the tag of its exporter in the driver's memory. Nothing else is ever taken over or deleted.
//!
//! A ublk device has pages on the host like any disk, unless it is opened for direct I/O. What was written there is with its
//! server after fsync(2), or when the last who had it open closes it. Nothing here does that for them: a process that waits
//! for a disk which it serves itself could not be killed, and would keep its successor from the disk.

mod backend;
mod control;
mod queue;
mod wire;

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use aenv_block_device::BlockDevice;
use rustix::io::Errno;
use tracing::{debug, info, warn};

use self::backend::Backend;
use self::control::Control;
use self::queue::Queue;
use self::wire::{BasicParameters, DeviceInfo, DiscardParameters, Parameters, SECTOR};
use crate::buffers::Buffers;
use crate::exporter::{AttachError, Export, ExportKind, ExportOptions, ExportRecord, Exporter};
use crate::gate::Gate;
use crate::lane::{Crew, Lane};
use crate::name::check_name;

/// What a driver must be able to do: Linux 6.5.
const NEEDED: u64 = wire::USER_RECOVERY | wire::USER_RECOVERY_REISSUE | wire::CMD_IOCTL_ENCODE | wire::USER_COPY;
/// Requests of one device under way at a time: several times the threads of its lane.
const DEPTH: u16 = 128;
/// Numbers that devices may have: the driver's UBLK_MINORS.
const NUMBERS: u32 = 1 << 20;
/// The largest request, as with FUSE.
const MAX_REQUEST: u32 = 1 << 20;
/// The largest discard. More at once would be one thread's for long.
const MAX_DISCARD: u64 = 1 << 30;
/// Longest wait for a node below /dev: the kernel's devtmpfs makes it at once, udev in a while.
const NODE_PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait until the kernel has done with a server that died: not before the last of its threads has ended, which may
/// be waiting for a disk. And see `tune`: without it, half a minute passes.
const RECOVERY_PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at either.
const PAUSE: Duration = Duration::from_millis(5);

/// Why devices cannot be exported by ublk.
#[derive(Debug, thiserror::Error)]
pub enum OpenUblkError {
    /// The driver is not there, or not for us.
    #[error("open {}", control::PATH)]
    Control(#[source] io::Error),
    /// The driver does not tell what it can do.
    #[error("the ublk driver is older than Linux 6.5")]
    Silent(#[source] io::Error),
    /// The driver is too old.
    #[error("the ublk driver has the features {found:#x}, and needs {NEEDED:#x}: Linux 6.5")]
    Features {
        /// What it has.
        found: u64,
    },
}

/// The ublk driver, and the devices on it with one tag.
pub struct UblkExporter {
    shared: Arc<Shared>,
}

struct Shared {
    control: Control,
    features: u64,
    tag: NonZeroU64,
    crew: Arc<Crew>,
    buffers: Arc<Buffers>,
    names: Mutex<BTreeSet<String>>,
    /// The number to try next. The driver would give the lowest free one, and so the path of a device that was just closed
    /// to another: whoever still has that path would find somebody else's disk there.
    next: AtomicU32,
}

/// A name that nobody else can have meanwhile.
struct Name {
    shared: Arc<Shared>,
    name: String,
}

/// A device of the driver's that nobody serves yet. Deleted when dropped.
struct Added {
    shared: Arc<Shared>,
    id: u32,
    kept: bool,
}

struct UblkExport {
    shared: Arc<Shared>,
    name: Name,
    id: u32,
    path: PathBuf,
    backend: Arc<Backend>,
    /// None once it is over.
    queue: Option<Queue>,
}

impl UblkExporter {
    /// Whether this host has the driver, whatever it can do.
    #[must_use]
    pub fn is_there() -> bool {
        Path::new(control::PATH).exists()
    }

    /// Connects to the driver. Devices of this `tag` are ours, also those that another process made; at most one process
    /// may use a tag at a time.
    pub fn open(tag: NonZeroU64) -> Result<Self, OpenUblkError> {
        let control = Control::open().map_err(OpenUblkError::Control)?;
        let features = control.features().map_err(OpenUblkError::Silent)?;
        if features & NEEDED != NEEDED {
            return Err(OpenUblkError::Features { found: features });
        }
        // No reader serves requests itself here: there are only lanes.
        let (crew, buffers, names) = (Crew::new(1), Arc::default(), Mutex::default());
        let next = AtomicU32::new(RandomState::new().hash_one(tag) as u32); // not where the process before began
        Ok(Self { shared: Arc::new(Shared { control, features, tag, crew, buffers, names, next }) })
    }

    /// Ends all devices of our tag but those in `keep`, which a process that died had: whoever has one open sees errors
    /// from now on. To be called before there are any of this process. Gives how many there were.
    pub fn sweep(&self, keep: &[u32]) -> io::Result<usize> {
        let control = &self.shared.control;
        let mut swept = 0;
        for id in Control::list()? {
            let ours = control.info(id)?.is_some_and(|info| info.ublksrv_flags == self.shared.tag.get());
            if !ours || keep.contains(&id) {
                continue;
            }
            control.stop(id)?;
            control.delete(id)?;
            swept += 1;
            info!(id, "deleted a ublk device that nobody wants");
        }
        Ok(swept)
    }
}

impl Exporter for UblkExporter {
    fn kind(&self) -> ExportKind {
        ExportKind::Ublk
    }

    fn attach(
        &self,
        name: &str,
        device: Arc<dyn BlockDevice>,
        options: &ExportOptions,
    ) -> Result<Box<dyn Export>, AttachError> {
        self.shared.attach(self.shared.reserve(name)?, device, options)
    }

    fn recover(
        &self,
        name: &str,
        record: &ExportRecord,
        device: Arc<dyn BlockDevice>,
        options: &ExportOptions,
    ) -> Result<Box<dyn Export>, AttachError> {
        let reserved = self.shared.reserve(name)?;
        let Some(id) = record.ublk_id.filter(|_| record.kind == ExportKind::Ublk) else {
            return Err(AttachError::Name { name: name.to_owned(), problem: "was exported elsewhere" });
        };
        match self.shared.control.info(id).map_err(kernel(name, "look for the ublk device"))? {
            Some(info) if info.ublksrv_flags == self.shared.tag.get() && info.state != wire::STATE_DEAD => {
                self.shared.take_over(reserved, info, device)
            }
            // The host was started anew since, and nobody has it open.
            found => {
                if found.is_some_and(|info| info.ublksrv_flags == self.shared.tag.get()) {
                    self.shared.delete(id);
                }
                debug!(device = name, id, "its ublk device is no more, making another");
                self.shared.attach(reserved, device, options)
            }
        }
    }
}

impl Shared {
    fn reserve(self: &Arc<Self>, name: &str) -> Result<Name, AttachError> {
        check_name(name)?;
        if !self.names().insert(name.to_owned()) {
            return Err(AttachError::Name { name: name.to_owned(), problem: "is taken" });
        }
        Ok(Name { shared: Arc::clone(self), name: name.to_owned() })
    }

    fn attach(
        self: &Arc<Self>,
        name: Name,
        device: Arc<dyn BlockDevice>,
        options: &ExportOptions,
    ) -> Result<Box<dyn Export>, AttachError> {
        let failed = |step| kernel(&name.name, step);
        let parameters = parameters(device.size().get(), options).map_err(failed("give a size to the ublk device"))?;
        let info = self.add().map_err(failed("add a ublk device"))?;
        let id = info.dev_id;
        let mut added = Added { shared: Arc::clone(self), id, kept: false };
        self.control.set_parameters(id, parameters).map_err(failed("set the parameters of the ublk device"))?;
        let (backend, queue) = self.serve(&name, &info, device)?;
        let started = self.control.start(id).map_err(failed("start the ublk device"));
        let started = started.and_then(|()| wait_for(&node(id)).map_err(failed("find the node of the ublk device")));
        if let Err(error) = started {
            drop(added); // stops it, and so ends the queue
            queue.join();
            return Err(error);
        }
        if let Err(error) = tune(id) {
            warn!(id, %error, "a ublk device is not tuned");
        }
        added.kept = true;
        Ok(self.export(name, id, backend, queue))
    }

    /// Adds a device of the next free number.
    fn add(&self) -> io::Result<DeviceInfo> {
        let wanted = DeviceInfo {
            nr_hw_queues: 1,
            queue_depth: DEPTH,
            max_io_buf_bytes: MAX_REQUEST,
            flags: NEEDED,
            ublksrv_flags: self.tag.get(),
            ..DeviceInfo::default()
        };
        loop {
            let dev_id = self.next.fetch_add(1, Ordering::Relaxed) % NUMBERS;
            match self.control.add(DeviceInfo { dev_id, ..wanted }) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {} // there are fewer devices than numbers
                added => return added,
            }
        }
    }

    fn take_over(
        self: &Arc<Self>,
        name: Name,
        info: DeviceInfo,
        device: Arc<dyn BlockDevice>,
    ) -> Result<Box<dyn Export>, AttachError> {
        let failed = |step| kernel(&name.name, step);
        let id = info.dev_id;
        let unlike = || io::Error::new(io::ErrorKind::Unsupported, "it was made by another version of this program");
        if info.flags & NEEDED != NEEDED || info.nr_hw_queues != 1 {
            return Err(failed("take over the ublk device")(unlike()));
        }
        let deadline = Instant::now() + RECOVERY_PATIENCE;
        loop {
            match self.control.start_recovery(id) {
                Err(error) if Errno::from_io_error(&error) == Some(Errno::BUSY) && Instant::now() < deadline => {
                    thread::sleep(PAUSE);
                }
                result => break result.map_err(failed("take over the ublk device"))?,
            }
        }
        let size = device.size().get();
        // If this fails, it waits for yet another server.
        let (backend, queue) = self.serve(&name, &info, device)?;
        if let Err(error) = self.control.end_recovery(id) {
            queue.leave();
            return Err(failed("go on with the ublk device")(error));
        }
        let export = self.export(name, id, backend, queue);
        match export.size() {
            // The end came between a change of its size and telling it.
            Ok(seen) if seen != size => {
                if let Err(error) = export.resized() {
                    warn!(id, seen, size, %error, "a ublk device has another size than the kernel knows");
                }
            }
            Ok(_) => {}
            Err(error) => warn!(id, %error, "the size of a ublk device is not known"),
        }
        Ok(export)
    }

    /// Begins to serve a device that was added or is being taken over.
    fn serve(&self, name: &Name, info: &DeviceInfo, device: Arc<dyn BlockDevice>) -> Result<Served, AttachError> {
        let failed = |step| kernel(&name.name, step);
        let path = PathBuf::from(format!("/dev/ublkc{}", info.dev_id));
        let channel = wait_for(&path).and_then(|()| File::options().read(true).write(true).open(&path));
        let backend = Arc::new(Backend {
            name: name.name.clone(),
            gate: Gate::new(device),
            lane: Lane::new(Arc::clone(&self.crew)),
            buffers: Arc::clone(&self.buffers),
            channel: channel.map_err(failed("open the server's side of the ublk device"))?,
            largest: info.max_io_buf_bytes as usize,
            failures: Default::default(),
        });
        let queue = Queue::start(Arc::clone(&backend), info.queue_depth);
        Ok((backend, queue.map_err(failed("serve the ublk device"))?))
    }

    fn export(self: &Arc<Self>, name: Name, id: u32, backend: Arc<Backend>, queue: Queue) -> Box<UblkExport> {
        let (shared, path) = (Arc::clone(self), node(id));
        Box::new(UblkExport { shared, name, id, path, backend, queue: Some(queue) })
    }

    /// Ends a device that nobody serves.
    fn delete(&self, id: u32) {
        if let Err(error) = self.control.stop(id).and(self.control.delete(id)) {
            warn!(id, %error, "a ublk device cannot be deleted");
        }
    }

    fn names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Served = (Arc<Backend>, Queue);

impl UblkExport {
    /// What the kernel takes the device's size for.
    fn size(&self) -> io::Result<u64> {
        let sectors = fs::read_to_string(format!("/sys/class/block/ublkb{}/size", self.id))?;
        let sectors: u64 = sectors.trim().parse().map_err(io::Error::other)?;
        Ok(sectors * SECTOR)
    }
}

impl Export for UblkExport {
    fn path(&self) -> &Path {
        &self.path
    }

    fn record(&self) -> ExportRecord {
        ExportRecord { kind: ExportKind::Ublk, path: self.path.clone(), ublk_id: Some(self.id) }
    }

    fn resizable(&self) -> io::Result<()> {
        if self.shared.features & wire::UPDATE_SIZE == 0 {
            let why = "a ublk device keeps its size before Linux 6.16 (UBLK_F_UPDATE_SIZE)";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        Ok(())
    }

    fn resized(&self) -> io::Result<()> {
        self.resizable()?;
        let Some(pass) = self.backend.gate.enter() else { return Ok(()) };
        let size = pass.device().map_or(0, |device| device.size().get());
        self.shared.control.update_size(self.id, whole_sectors(size)?)
    }

    fn disown(mut self: Box<Self>) -> io::Result<ExportRecord> {
        if let Some(queue) = self.queue.take() {
            queue.leave();
        }
        Ok(self.record())
    }

    fn close(mut self: Box<Self>) -> io::Result<()> {
        let Some(queue) = self.queue.take() else { return Ok(()) };
        if let Err(error) = self.shared.control.stop(self.id) {
            self.queue = Some(queue); // it is still there, and so are its requests
            return Err(error);
        }
        queue.join();
        self.backend.lane.close();
        self.backend.gate.shut();
        self.backend.gate.wait();
        self.shared.control.delete(self.id)
    }
}

impl Drop for UblkExport {
    fn drop(&mut self) {
        let Some(queue) = self.queue.take() else { return };
        warn!(device = %self.name.name, "an export was dropped without close");
        self.backend.gate.shut(); // requests fail from now on
        let (shared, id) = (Arc::clone(&self.shared), self.id);
        let end = move || {
            shared.delete(id);
            queue.join();
        };
        if let Err(error) = thread::Builder::new().name("aenv-ublk-end".to_owned()).spawn(end) {
            warn!(%error, "a ublk device stays, and answers with errors");
        }
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        self.shared.names().remove(&self.name);
    }
}

impl Drop for Added {
    fn drop(&mut self) {
        if !self.kept {
            self.shared.delete(self.id);
        }
    }
}

impl fmt::Debug for UblkExporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { features, tag, .. } = &*self.shared;
        f.debug_struct("UblkExporter").field("features", features).field("tag", tag).finish_non_exhaustive()
    }
}

impl fmt::Debug for UblkExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UblkExport").field("path", &self.path).finish_non_exhaustive()
    }
}

fn node(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

/// Sets what the driver has no parameters for.
///
/// No scheduler: the guest has one. And one request less than there are tags, so that the driver always holds a command to
/// fetch one. Before Linux 6.16 it learns from the end of such a command that its server is dead; without any, from the
/// block layer's timeout, which is 30 s later.
fn tune(id: u32) -> io::Result<()> {
    let set = |what: &str, value: &str| fs::write(format!("/sys/class/block/ublkb{id}/queue/{what}"), value);
    set("scheduler", "none")?; // first: a scheduler has a number of requests of its own
    set("nr_requests", &(DEPTH - 1).to_string())
}

/// Waits until there is something at `path`.
fn wait_for(path: &Path) -> io::Result<()> {
    let deadline = Instant::now() + NODE_PATIENCE;
    while !path.exists() {
        if Instant::now() >= deadline {
            let message = format!("{} does not appear: is /dev a devtmpfs, or filled by udev?", path.display());
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

fn whole_sectors(size: u64) -> io::Result<u64> {
    if size == 0 || !size.is_multiple_of(SECTOR) {
        let message = format!("{size} bytes are no size of a disk: they are not whole sectors, or none");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    Ok(size)
}

/// What the kernel is to know of a device.
fn parameters(size: u64, options: &ExportOptions) -> io::Result<Parameters> {
    let dev_sectors = whole_sectors(size)? / SECTOR;
    let discard = (MAX_DISCARD / SECTOR) as u32;
    Ok(Parameters {
        types: wire::BASIC_AND_DISCARD,
        basic: BasicParameters {
            // A write that must be durable at once comes as a write and a flush.
            attrs: wire::VOLATILE_CACHE | if options.read_only { wire::READ_ONLY } else { 0 },
            logical_bs_shift: 9, // guests may know no other
            physical_bs_shift: 12,
            io_opt_shift: 12,
            io_min_shift: 12,
            max_sectors: MAX_REQUEST / SECTOR as u32,
            dev_sectors,
            ..BasicParameters::default()
        },
        discard: DiscardParameters {
            discard_granularity: 4096,
            max_discard_sectors: discard,
            max_write_zeroes_sectors: discard,
            max_discard_segments: 1,
            ..DiscardParameters::default()
        },
        ..Parameters::default()
    })
}

/// An error of the kernel's at one step for one device.
fn kernel(name: &str, step: &'static str) -> impl FnOnce(io::Error) -> AttachError + use<> {
    let name = name.to_owned();
    move |source| AttachError::Kernel { name, step, source }
}
