//! Nodes and teams, as far as one node that serves one team has them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A node, in lists and on its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// Its id.
    pub id: String,
    /// Of this run of its server.
    #[serde(rename = "serviceInstanceID")]
    pub service_instance_id: String,
    /// The cluster it belongs to.
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    /// Version of its server.
    pub version: String,
    /// What that was built from.
    pub commit: String,
    /// `ready`: it answers.
    pub status: String,
    /// Sandboxes that have a machine.
    pub sandbox_count: u32,
    /// Sandboxes that are about to have one. Lists only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_starting_count: Option<u32>,
    /// Sandboxes that have none.
    pub sandbox_paused_count: u32,
    /// Creates that had success since the start of the server.
    pub create_successes: u64,
    /// Creates that had none.
    pub create_fails: u64,
    /// Its processors.
    pub machine_info: MachineInfo,
    /// What is used of it.
    pub metrics: NodeMetrics,
    /// Builds that it keeps. On its own only; always empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_builds: Option<Vec<Value>>,
}

/// A node's processors.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MachineInfo {
    /// Family, as the processor says.
    pub cpu_family: String,
    /// Model, as the processor says.
    pub cpu_model: String,
    /// Its name.
    pub cpu_model_name: String,
    /// `x86_64`, for example.
    pub cpu_architecture: String,
}

/// What is used of a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMetrics {
    /// Virtual CPUs of sandboxes that are not paused.
    #[serde(rename = "allocatedCPU")]
    pub allocated_cpu: u64,
    /// Memory of those.
    pub allocated_memory_bytes: u64,
    /// Percent of all processors of the host that are busy.
    pub cpu_percent: f64,
    /// Processors that this server may use.
    pub cpu_count: u64,
    /// Memory in use.
    pub memory_used_bytes: u64,
    /// Memory that this server may use.
    pub memory_total_bytes: u64,
    /// Virtual CPUs of paused sandboxes.
    #[serde(rename = "pausedAllocatedCPU")]
    pub paused_allocated_cpu: u64,
    /// Memory of those.
    pub paused_allocated_memory_bytes: u64,
    /// File systems.
    pub disks: Vec<NodeDisk>,
}

/// A file system of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeDisk {
    /// Where it is.
    pub mount_point: String,
    /// On what.
    pub device: String,
    /// Its kind.
    pub filesystem_type: String,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes there are.
    pub total_bytes: u64,
}

/// A team. There is one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Team {
    /// Its id.
    #[serde(rename = "teamID")]
    pub team_id: String,
    /// Its name.
    pub name: String,
    /// The key that its calls carry.
    pub api_key: String,
    /// Whether it is meant where none is named.
    pub is_default: bool,
}
