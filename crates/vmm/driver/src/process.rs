//! Supervision of VMM processes: how one is started, watched, recognised after a restart of ours, and ended.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Identity of a VMM process that outlives ours: a pid alone may have been reused, so its start time and work dir are
/// checked too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineRecord {
    /// The machine's name, as in its command line.
    pub name: String,
    /// Process id in our pid namespace.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: clock ticks after boot.
    pub start_time: u64,
    /// The machine's private directory, also in its command line.
    pub work_dir: PathBuf,
}
