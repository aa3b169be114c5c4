//! What a sandbox's machine is, and where its life stands.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// The size of a machine. Part of what a snapshot records: it restores only onto the same shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The machine is being stopped and its resources returned.
    Deleting,
    /// Nothing is left; only the driver still says so to whoever waits.
    Gone,
}
