//! Machines that nobody owns any more: left by a server that died.

use std::path::PathBuf;

use crate::{AdoptError, MachineRecord, VmmError, VmmProcess};

/// What became of an orphan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrphanEnd {
    /// It had ended before.
    AlreadyGone,
    /// It was killed, and the kernel has let go of it.
    Ended,
    /// Its pid belongs to another process by now, which was left alone.
    NotOurs,
}

/// Kills the recorded process if it still lives and is what the record says, and waits until it is gone.
///
/// Errors: `Deadline` when it does not go within 20 s of the signal; `Io` when the kernel refuses to tell who it is.
/// Cancel safety: if dropped, the process may or may not have been killed; ask again.
pub async fn end_orphan(record: &MachineRecord) -> Result<OrphanEnd, VmmError> {
    match VmmProcess::adopt(record.clone()).await {
        Ok(process) => process.kill().await.map(|_| OrphanEnd::Ended),
        Err(AdoptError::Gone { .. }) => Ok(OrphanEnd::AlreadyGone),
        Err(AdoptError::NotOurs { .. }) => Ok(OrphanEnd::NotOurs),
        Err(AdoptError::Look { pid, source, .. }) => {
            Err(VmmError::Io { operation: "look at orphan", path: PathBuf::from(format!("/proc/{pid}")), source })
        }
        Err(AdoptError::Unresponsive { source, .. }) => Err(source),
    }
}
