//! What a sandbox's machine is, and where its life stands.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// The size of a machine. Part of what a snapshot records: it restores only onto the same shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MachineShape {
    /// Virtual CPUs, at least 1.
    pub vcpus: u32,
    /// Guest memory, at least 128 MiB.
    pub memory: Bytes,
}

/// Where a sandbox stands between its creation and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Resources are being gathered, the guest boots; no traffic yet.
    Creating,
    /// The guest agent answered; traffic flows.
    Running,
    /// It is stopped for a moment, to be copied into a snapshot; traffic waits.
    Snapshotting,
    /// It is stopped for a moment, to be copied for its children; traffic waits.
    Forking,
    /// A machine of an earlier instant is made ready beside its own, to take its place; traffic flows.
    RollingBack,
    /// It is being copied, to be ended then; no traffic any more.
    Pausing,
    /// There is no machine, only what it goes on from.
    Paused,
    /// A machine goes on from where it was paused; no traffic yet.
    Resuming,
    /// The machine is being stopped and its resources returned.
    Deleting,
    /// Nothing is left; only the driver still says so to whoever waits.
    Gone,
}

impl Phase {
    /// Every phase, in the order of a life.
    pub const ALL: [Self; 10] = [
        Self::Creating,
        Self::Running,
        Self::Snapshotting,
        Self::Forking,
        Self::RollingBack,
        Self::Pausing,
        Self::Paused,
        Self::Resuming,
        Self::Deleting,
        Self::Gone,
    ];

    /// To the outside there is no such sandbox any more.
    #[must_use]
    pub fn is_ending(self) -> bool {
        matches!(self, Self::Deleting | Self::Gone)
    }

    /// Its machine has been stopped for good or is about to be: to the outside it is paused.
    #[must_use]
    pub fn is_paused(self) -> bool {
        matches!(self, Self::Pausing | Self::Paused)
    }
}
