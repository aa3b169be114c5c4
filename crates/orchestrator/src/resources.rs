//! What one sandbox holds, and the one way to give it all back.

use std::path::PathBuf;
use std::time::Duration;

use aenv_block_device::{DiskRecord, DiskStore};
use aenv_vmm_driver::{Machine, MachineRecord};
use serde::{Deserialize, Serialize};

use crate::seams::SlotLease;

/// Longest wait for the kernel to let go of a killed VMM.
const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// The intent row of a sandbox: written before anything of it is made, removed after everything of it is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SandboxRow {
    /// Private directory; a VMM that runs in it is ours even if `machine` was never recorded.
    pub(crate) work_dir: PathBuf,
    /// Its disk, by name.
    pub(crate) disk: DiskRecord,
    /// Its VMM process, once started.
    pub(crate) machine: Option<MachineRecord>,
}

/// Everything a sandbox owns outside our memory. Filled stage by stage, released as a whole.
#[derive(Default)]
pub(crate) struct Resources {
    pub(crate) machine: Option<Box<dyn Machine>>,
    pub(crate) slot: Option<Box<dyn SlotLease>>,
    pub(crate) disk: Option<DiskRecord>,
    pub(crate) work_dir: Option<PathBuf>,
}

impl Resources {
    /// Gives everything back in the order in which things depend on each other: the machine uses slot, disk and
    /// directory, so it goes first, and while it lives nothing under it is touched. Goes on past other failures and
    /// reports them all; what failed stays held and is tried again by the next call.
    pub(crate) async fn release(&mut self, disks: &dyn DiskStore) -> Result<(), String> {
        if let Some(machine) = &self.machine {
            match tokio::time::timeout(KILL_DEADLINE, machine.kill()).await {
                Ok(Ok(_)) => self.machine = None,
                Ok(Err(error)) => return Err(format!("stop machine: {}", chain(&error))),
                Err(_) => return Err(format!("stop machine: not gone after {KILL_DEADLINE:?}")),
            }
        }
        let mut failures = Vec::new();
        if let Some(slot) = &mut self.slot {
            match slot.release().await {
                Ok(()) => self.slot = None,
                Err(error) => failures.push(format!("release network slot: {}", chain(&error))),
            }
        }
        if let Some(disk) = &self.disk {
            match disks.remove(disk).await {
                Ok(()) => self.disk = None,
                Err(error) => failures.push(format!("remove disk: {error}")),
            }
        }
        if let Some(dir) = self.work_dir.clone() {
            match tokio::task::spawn_blocking(move || aenv_durable::remove_dir_if_present(&dir)).await {
                Ok(Ok(())) => self.work_dir = None,
                Ok(Err(error)) => failures.push(format!("remove work dir: {error}")),
                Err(error) => failures.push(format!("remove work dir: {error}")),
            }
        }
        if failures.is_empty() { Ok(()) } else { Err(failures.join("; ")) }
    }
}

/// An error with all its sources in one line.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
