//! What a former server left: its rows say what runs, what is paused, and what was half made.

use std::collections::BTreeSet;

use aenv_block_device::DiskStore;
use aenv_durable::{Row, Store, StoreError, Table};
use aenv_model::{CaptureId, SandboxId};
use aenv_vmm_driver::{OrphanEnd, end_orphan, find_by_work_dir};
use tracing::{error, info, warn};

use crate::driver::Begin;
use crate::orchestrator::{Parts, ToDrive};
use crate::resources::{Beside, Resources, SandboxRow, Stage, chain};
use crate::sandbox::Ended;

/// Version of the rows.
const ROW_VERSION: u32 = 2;

/// The rows of sandboxes.
pub(crate) fn sandbox_rows(store: &Store) -> Table<SandboxRow> {
    store.table("sandboxes", ROW_VERSION)
}

/// The sandboxes of a former server, before anything was done about them.
#[derive(Debug)]
pub struct Former {
    rows: Vec<(SandboxId, SandboxRow)>,
    unknown: usize,
}

/// What became of a former server's sandboxes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TakenOver {
    /// They run on.
    pub running: usize,
    /// They are paused.
    pub paused: usize,
    /// They were half made, or their machine had ended: nothing of them is left.
    pub ended: usize,
    /// Something would not go, or cannot be found now; their rows are kept for the next start.
    pub kept: usize,
    /// Written by another version of the program; not touched.
    pub unknown: usize,
}

impl Former {
    /// Reads the rows. Blocking, for a moment.
    pub fn read(store: &Store) -> Result<Self, StoreError> {
        let mut former = Self { rows: Vec::new(), unknown: 0 };
        for (key, row) in sandbox_rows(store).list_blocking()? {
            match (key.parse(), row) {
                (Ok(id), Row::Known(row)) => former.rows.push((id, row)),
                (Err(problem), Row::Known(_)) => {
                    warn!(key, %problem, "kept a sandbox record whose name makes no sense");
                    former.unknown += 1;
                }
                (_, Row::Unknown(why)) => {
                    warn!(sandbox_id = key, why, "kept a sandbox record that this version does not understand");
                    former.unknown += 1;
                }
            }
        }
        Ok(former)
    }

    /// True if there are sandboxes that this version knows nothing about: what they hold may be anything.
    #[must_use]
    pub fn has_unknown(&self) -> bool {
        self.unknown > 0
    }

    /// Captures that they go on from, or run on.
    #[must_use]
    pub fn captures(&self) -> BTreeSet<CaptureId> {
        let paused = |row: &SandboxRow| match row.stage {
            Stage::Paused(capture) => Some(capture),
            Stage::Starting | Stage::Running => None,
        };
        self.rows.iter().flat_map(|(_, row)| [row.base, paused(row)]).flatten().collect()
    }

    /// Captures that running machines went on from, whose memory they map.
    #[must_use]
    pub fn mapped(&self) -> BTreeSet<CaptureId> {
        let running = |row: &&SandboxRow| row.stage == Stage::Running;
        self.rows.iter().map(|(_, row)| row).filter(running).filter_map(|row| row.base).collect()
    }

    /// Names of disks that they may have.
    #[must_use]
    pub fn disks(&self) -> BTreeSet<String> {
        let beside = self.rows.iter().filter_map(|(_, row)| row.beside.as_ref()).map(|beside| &beside.disk);
        self.rows.iter().map(|(_, row)| &row.disk).chain(beside).map(|disk| disk.name.clone()).collect()
    }

    /// Takes each over, or ends it.
    pub(crate) async fn take_over(
        self,
        parts: &Parts,
        rows: &Table<SandboxRow>,
        kept: &BTreeSet<CaptureId>,
    ) -> Result<(Vec<ToDrive>, Vec<(SandboxId, Ended)>, TakenOver), StoreError> {
        let mut told = TakenOver { unknown: self.unknown, ..TakenOver::default() };
        let (mut found, mut ended) = (Vec::new(), Vec::new());
        for (id, row) in self.rows {
            let why = match row.stage {
                Stage::Starting => Ended::StartFailed,
                Stage::Running if row.spec.internal => Ended::NodeShutdown, // whoever it was for has gone
                Stage::Running => match running(parts, id, &row, kept).await {
                    Ok(sandbox) => {
                        found.push(sandbox);
                        continue;
                    }
                    Err(why) => {
                        warn!(sandbox_id = %id, why, "a sandbox of a former server does not run any more");
                        Ended::MachineEnded(why)
                    }
                },
                Stage::Paused(capture) => {
                    match paused(parts, rows, id, &row, capture).await {
                        Ok(sandbox) => found.push(sandbox),
                        Err(why) => {
                            error!(sandbox_id = %id, %capture, why, "a paused sandbox cannot be brought back now; it is kept");
                            told.kept += 1;
                        }
                    }
                    continue;
                }
            };
            match end_one(&row, parts.disks.as_ref()).await {
                Ok(()) => {
                    rows.remove(id.to_string()).await?;
                    info!(sandbox_id = %id, %why, "ended a sandbox that a former server left");
                    ended.push((id, why));
                    told.ended += 1;
                }
                Err(failures) => {
                    warn!(sandbox_id = %id, failures, "a sandbox that a former server left would not go");
                    told.kept += 1;
                }
            }
        }
        Ok((found, ended, told))
    }
}

async fn running(
    parts: &Parts,
    id: SandboxId,
    row: &SandboxRow,
    kept: &BTreeSet<CaptureId>,
) -> Result<ToDrive, String> {
    let record = row.machine.as_ref().ok_or("its machine was never recorded")?;
    let base = match row.base {
        Some(base) => Some(parts.captures.find(base).await.map_err(|error| chain(&error))?),
        None => None,
    };
    let slot = match &row.slot {
        Some(slot) => parts.slots.adopt(slot).await.map_err(|error| format!("its network slot: {}", chain(&error)))?,
        None => return Err("its network slot was never recorded".to_owned()),
    };
    let machine = match parts.vmm.adopt(record).await {
        Ok(machine) => machine,
        Err(error) => {
            let mut slot = slot;
            if let Err(error) = slot.release().await {
                warn!(sandbox_id = %id, error = chain(&error), "a slot would not go");
            }
            return Err(chain(&error));
        }
    };
    // Its rules are in force; this node's may be others by now.
    if let Err(error) = slot.set_policy(&row.spec.egress).await {
        error!(sandbox_id = %id, error = chain(&error), "what a sandbox may reach stays as a former server had it");
    }
    if let Some(base) = &base {
        if base.state().is_some()
            && let Err(error) = base.memory().await
        {
            warn!(sandbox_id = %id, error = chain(&error), "the memory under a running machine cannot be seen");
        }
        if !kept.contains(&base.id()) {
            base.doom(); // of this sandbox alone
        }
    }
    let resources = Resources {
        machine: Some(machine),
        slot: Some(slot),
        disk: Some(row.disk.clone()),
        work_dir: Some(row.work_dir.clone()),
        ..Resources::default()
    };
    let mut row = row.clone();
    if let Some(beside) = &row.beside {
        match end_beside(beside, parts.disks.as_ref()).await {
            Ok(()) => row.beside = None, // written with the next change
            Err(failures) => warn!(sandbox_id = %id, failures, "what was made for a rollback would not go"),
        }
    }
    Ok(ToDrive { id, row, resources, base, rested: None, begin: Begin::Running })
}

async fn paused(
    parts: &Parts,
    rows: &Table<SandboxRow>,
    id: SandboxId,
    row: &SandboxRow,
    capture: CaptureId,
) -> Result<ToDrive, String> {
    let rested = parts.captures.find(capture).await.map_err(|error| chain(&error))?;
    // A pause that was cut short after its record, or a resume before its own.
    end_one(row, parts.disks.as_ref()).await?;
    let row = SandboxRow { machine: None, slot: None, boot: None, base: None, beside: None, ..row.clone() };
    rows.put(id.to_string(), row.clone()).await.map_err(|error| chain(&error))?;
    let resources = Resources::default();
    Ok(ToDrive { id, row, resources, base: None, rested: Some(rested), begin: Begin::Paused })
}

async fn end_one(row: &SandboxRow, disks: &dyn DiskStore) -> Result<(), String> {
    if let Some(beside) = &row.beside {
        end_beside(beside, disks).await?;
    }
    let SandboxRow { work_dir, disk, machine, .. } = row.clone();
    end_beside(&Beside { work_dir, disk, machine }, disks).await
}

async fn end_beside(held: &Beside, disks: &dyn DiskStore) -> Result<(), String> {
    // The recorded process, and whichever runs in our work dir without having been recorded.
    let unrecorded = find_by_work_dir(&held.work_dir).map_err(|error| format!("look for machines: {error}"))?;
    for record in held.machine.iter().chain(&unrecorded) {
        match end_orphan(record).await {
            Ok(OrphanEnd::Ended | OrphanEnd::AlreadyGone | OrphanEnd::NotOurs) => {}
            Err(error) => return Err(format!("end machine {}: {}", record.pid, chain(&error))),
        }
    }
    disks.remove(&held.disk).await.map_err(|error| format!("remove disk: {error}"))?;
    aenv_durable::remove_dir_if_present(&held.work_dir).map_err(|error| format!("remove work dir: {error}"))
}
