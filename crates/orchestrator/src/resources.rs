//! What one sandbox holds, and the one way to give it all back.

use std::path::PathBuf;
use std::time::Duration;

use aenv_block_device::{DiskRecord, DiskStore};
use aenv_model::{Bytes, CaptureId};
use aenv_network::SlotRecord;
use aenv_snapshot::{BootFiles, Capture, CaptureError, Stopped};
use aenv_vmm_driver::{Blank, Machine, MachineRecord, VmmError};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::sandbox::SandboxSpec;
use crate::seams::SlotLease;

/// Longest wait for the kernel to let go of a killed VMM.
const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// The row of a sandbox: written before anything of it is made, removed after everything of it is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SandboxRow {
    /// Where it stands; counts for the next start.
    pub(crate) stage: Stage,
    /// What it is.
    pub(crate) spec: SandboxSpec,
    /// When it was asked for.
    pub(crate) started_at: Timestamp,
    /// When it will expire.
    pub(crate) end_at: Timestamp,
    /// Private directory; a VMM that runs in it is ours even if `machine` was never recorded.
    pub(crate) work_dir: PathBuf,
    /// Its disk, by name.
    pub(crate) disk: DiskRecord,
    /// Virtual size of the disk.
    pub(crate) disk_size: Bytes,
    /// It is paused, and its guest did not answer then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) unresponsive: bool,
    /// Its VMM process, once started.
    pub(crate) machine: Option<MachineRecord>,
    /// Its network slot, once it has one.
    pub(crate) slot: Option<SlotRecord>,
    /// What its machine was booted with.
    pub(crate) boot: Option<BootFiles>,
    /// The capture that its machine went on from, or was booted on if that has no memory.
    pub(crate) base: Option<CaptureId>,
    /// Another machine of it, on its way in or out: the next start ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) beside: Option<Beside>,
}

impl SandboxRow {
    /// The same, and the machine of `other` beside its own.
    pub(crate) fn beside(&self, other: &Self) -> Self {
        let SandboxRow { work_dir, disk, machine, .. } = other.clone();
        Self { beside: Some(Beside { work_dir, disk, machine }), ..self.clone() }
    }
}

/// What a machine holds that has another row's place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Beside {
    pub(crate) work_dir: PathBuf,
    pub(crate) disk: DiskRecord,
    pub(crate) machine: Option<MachineRecord>,
}

/// Where a sandbox stands, as far as the next start cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Stage {
    /// It was never ready: it is ended.
    Starting,
    /// It is taken over with all that it has.
    Running,
    /// It goes on from this capture. Whatever else the row names is ended: a pause or a resume was cut short.
    Paused(CaptureId),
}

/// Everything a sandbox owns outside our memory. Filled stage by stage, released as a whole.
#[derive(Default)]
pub(crate) struct Resources {
    pub(crate) machine: Option<Box<dyn Machine>>,
    /// A VMM that is not a machine yet.
    pub(crate) blank: Option<Box<dyn Blank>>,
    pub(crate) slot: Option<Box<dyn SlotLease>>,
    pub(crate) disk: Option<DiskRecord>,
    pub(crate) work_dir: Option<PathBuf>,
    /// What another machine of the sandbox held that has been replaced, and could not be given back yet.
    pub(crate) beside: Option<Box<Resources>>,
}

impl Resources {
    /// The machine as a capture wants it. Its vCPUs are for the caller to pause.
    pub(crate) fn stopped<'a>(
        &'a self,
        row: &'a SandboxRow,
        base: Option<&'a Capture>,
        memory: bool,
    ) -> Result<Stopped<'a>, CaptureError> {
        let gone = || VmmError::Ended { operation: "capture", detail: "there is no machine".to_owned() };
        let machine = self.machine.as_deref().ok_or_else(gone)?;
        let boot = row.boot.as_ref().ok_or_else(gone)?;
        Ok(Stopped { machine, shape: row.spec.shape, boot, base, disk: &row.disk, disk_size: row.disk_size, memory })
    }

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
        if let Some(blank) = self.blank.take() {
            // One that does not end in time is killed all the same; its directory and slot tell if it stays.
            if let Err(error) = blank.end().await {
                return Err(format!("stop VMM: {}", chain(&error)));
            }
        }
        let mut failures = Vec::new();
        if let Some(beside) = &mut self.beside {
            match Box::pin(beside.release(disks)).await {
                Ok(()) => self.beside = None,
                Err(failure) => failures.push(failure),
            }
        }
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
