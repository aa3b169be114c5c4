//! What a former server left behind when it was killed: found by its intent rows, ended, and told.

use aenv_block_device::DiskStore;
use aenv_durable::{Row, Store, StoreError, Table};
use aenv_vmm_driver::{OrphanEnd, end_orphan, find_by_work_dir};
use tracing::{info, warn};

use crate::resources::{SandboxRow, chain};

/// How many sandboxes of a former server were found at the start, and what became of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Taken down completely.
    pub ended: usize,
    /// Something would not go; their rows are kept for the next start.
    pub kept: usize,
    /// Written by another version of the program; not touched.
    pub unknown: usize,
}

/// Version of the intent rows.
const ROW_VERSION: u32 = 1;

/// The intent rows of sandboxes.
pub(crate) fn sandbox_rows(store: &Store) -> Table<SandboxRow> {
    store.table("sandboxes", ROW_VERSION)
}

/// Ends everything that the intent rows name. Comes before the network's own sweep (by name): a machine that still runs
/// holds its slot.
pub async fn end_leftovers(store: &Store, disks: &dyn DiskStore) -> Result<Leftovers, StoreError> {
    let rows = sandbox_rows(store);
    let mut leftovers = Leftovers::default();
    for (id, row) in rows.list_blocking()? {
        match row {
            Row::Known(row) => match end_one(&row, disks).await {
                Ok(()) => {
                    rows.remove(id.clone()).await?;
                    info!(sandbox_id = id, "ended a sandbox that a former server left");
                    leftovers.ended += 1;
                }
                Err(failures) => {
                    warn!(sandbox_id = id, failures, "a sandbox that a former server left would not go");
                    leftovers.kept += 1;
                }
            },
            Row::Unknown(why) => {
                warn!(sandbox_id = id, why, "kept a sandbox record that this version does not understand");
                leftovers.unknown += 1;
            }
        }
    }
    Ok(leftovers)
}

async fn end_one(row: &SandboxRow, disks: &dyn DiskStore) -> Result<(), String> {
    // The recorded process, and whichever runs in our work dir without having been recorded.
    let unrecorded = find_by_work_dir(&row.work_dir).map_err(|error| format!("look for machines: {error}"))?;
    for record in row.machine.iter().chain(&unrecorded) {
        match end_orphan(record).await {
            Ok(OrphanEnd::Ended | OrphanEnd::AlreadyGone | OrphanEnd::NotOurs) => {}
            Err(error) => return Err(format!("end machine {}: {}", record.pid, chain(&error))),
        }
    }
    disks.remove(&row.disk).await.map_err(|error| format!("remove disk: {error}"))?;
    aenv_durable::remove_dir_if_present(&row.work_dir).map_err(|error| format!("remove work dir: {error}"))
}
