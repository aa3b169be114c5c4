//! Who this node is, and what it tells of itself.

use std::path::PathBuf;

use serde::Deserialize;
use uuid::Uuid;

/// `[observability]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct ObservabilityConfig {
    /// Whether `GET /nodes` tells of this node.
    pub enabled: bool,
    /// Where the audit log is; empty: nowhere.
    pub audit_path: PathBuf,
}

impl Default for ObservabilityConfig {
    fn default() -> Self {
        Self { enabled: true, audit_path: "$AENV_HOME/logs/audit.jsonl".into() }
    }
}

/// `[node_identity]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct NodeIdentityConfig {
    /// Its id; default: the host's name.
    pub node_id: String,
    /// The cluster it belongs to; default: the nil UUID.
    pub cluster_id: String,
    /// Of this run of the server; default: a fresh UUID.
    pub service_instance_id: String,
}

impl Default for NodeIdentityConfig {
    fn default() -> Self {
        Self {
            node_id: host_name(),
            cluster_id: Uuid::nil().to_string(),
            service_instance_id: Uuid::now_v7().to_string(),
        }
    }
}

fn host_name() -> String {
    let told = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match told.trim() {
        "" => "unknown".to_owned(),
        name => name.to_owned(),
    }
}
