//! What a machine is made of.

use std::path::PathBuf;

use aenv_model::{Bytes, MachineShape};

/// Everything a VMM needs to start a machine. Paths are absolute; the files exist.
#[derive(Debug, Clone)]
pub struct MachineSpec {
    /// Unique among live machines; appears in the VMM's command line and environment so that a sweep can recognise it.
    pub name: String,
    /// vCPUs and memory.
    pub shape: MachineShape,
    /// Guest kernel (a bzImage or an ELF `vmlinux`, as the driver prefers).
    pub kernel: PathBuf,
    /// Initial file system: modules and guest agent.
    pub initramfs: PathBuf,
    /// Kernel command line from the layers above (boot parameters for the agent); the driver adds its own console
    /// and clock arguments.
    pub cmdline: String,
    /// Block devices in order: `vda`, `vdb`, …
    pub disks: Vec<DiskSpec>,
    /// Network devices in order: `eth0`, …
    pub nics: Vec<NicSpec>,
    /// The network namespace the VMM process runs in, as a path that `setns` opens (`/run/…`).
    pub netns: Option<PathBuf>,
    /// Private directory of this machine: sockets, memory file, serial log. Exists and is empty; its owner removes it
    /// after the machine ended.
    pub work_dir: PathBuf,
    /// The serial console's log (oldest output is dropped beyond `serial_log_limit`). An existing one is continued.
    /// What the guest says while no server is connected to its machine may be lost.
    pub serial_log: PathBuf,
    /// Most bytes the serial log may occupy.
    pub serial_log_limit: Bytes,
    /// The image guest memory is a private mapping of, exactly as large as the shape's memory. `None`: an empty sparse
    /// image, made by the driver in `work_dir`. A VMM may open it for writing, but never writes to it.
    pub memory_image: Option<PathBuf>,
}

/// What a VMM has to know of a machine before the rest of it: a machine that is restored has a disk and a network device for
/// each told here, and as many vCPUs and as much memory.
#[derive(Debug, Clone)]
pub struct BlankSpec {
    /// As [`MachineSpec::name`].
    pub name: String,
    /// vCPUs and memory.
    pub shape: MachineShape,
    /// How many disks.
    pub disks: usize,
    /// Network devices.
    pub nics: Vec<NicSpec>,
    /// As [`MachineSpec::netns`].
    pub netns: Option<PathBuf>,
    /// As [`MachineSpec::work_dir`].
    pub work_dir: PathBuf,
}

/// One virtio block device.
#[derive(Debug, Clone)]
pub struct DiskSpec {
    /// A raw image file or a block device node.
    pub path: PathBuf,
    /// The guest cannot write.
    pub read_only: bool,
    /// How far a flush of the guest goes.
    pub flush: Flush,
    /// How fast it may be used.
    pub limit: DiskLimit,
}

/// How fast a disk may be used, reads and writes together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskLimit {
    /// Bytes.
    pub bandwidth: RateLimit,
    /// Requests.
    pub operations: RateLimit,
}

/// A token bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimit {
    /// Sustained rate; 0: no limit.
    pub per_second: u64,
    /// What may be had at once beyond one second's worth, after a pause.
    pub burst: u64,
}

/// How far a guest's flush goes before it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flush {
    /// To the host's storage: what the guest synced survives a crash of the host.
    Storage,
    /// To the host's page cache: for a disk that is worth nothing once the host has crashed. Survives a crash of the VMM.
    PageCache,
}

/// One virtio network device on an existing tap of the machine's network namespace.
#[derive(Debug, Clone)]
pub struct NicSpec {
    /// The tap's name inside the namespace.
    pub tap: String,
    /// The guest side's hardware address.
    pub mac: [u8; 6],
}
