//! What a sandbox uses, and what it went through.

use std::collections::BTreeMap;

use aenv_model::SandboxId;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::template::LogLevel;

/// What a sandbox used of its machine at one instant. Every field is required by official clients.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxMetric {
    /// The instant.
    pub timestamp: Timestamp,
    /// The same in Unix seconds.
    pub timestamp_unix: i64,
    /// Virtual CPUs.
    pub cpu_count: u32,
    /// Percent of all of them, since the sample before.
    pub cpu_used_pct: f64,
    /// Bytes of memory in use, caches not counted.
    pub mem_used: u64,
    /// Bytes of memory there are.
    pub mem_total: u64,
    /// Bytes of the page cache.
    pub mem_cache: u64,
    /// Bytes of the root disk in use.
    pub disk_used: u64,
    /// Bytes of the root disk there are.
    pub disk_total: u64,
}

/// Answer to `GET /sandboxes/metrics`: the newest sample of each that has one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SandboxesWithMetrics {
    /// By sandbox.
    #[schemars(with = "BTreeMap<String, SandboxMetric>")]
    pub sandboxes: BTreeMap<SandboxId, SandboxMetric>,
}

/// Answer to `GET /sandboxes/{id}/logs`: the same entries in two forms.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxLogs {
    /// Each as a line.
    pub logs: Vec<SandboxLog>,
    /// Each in its parts.
    #[serde(default)]
    pub log_entries: Vec<SandboxLogEntry>,
}

/// An entry of a sandbox's log as a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SandboxLog {
    /// When.
    pub timestamp: Timestamp,
    /// A JSON object as text; clients count on its texts `level` and `logger`.
    pub line: String,
}

/// Query of `GET /v2/sandboxes/{id}/logs`, as a client asks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogsQuery {
    /// The first Unix millisecond, in the direction asked for.
    pub cursor: Option<i64>,
    /// Entries to give at most, up to 1000.
    pub limit: Option<usize>,
    /// The newest first.
    pub backward: bool,
    /// Least level to give; absent: all.
    pub level: Option<LogLevel>,
}

/// Answer to `GET /v2/sandboxes/{id}/logs`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SandboxLogsV2 {
    /// In the order asked for.
    pub logs: Vec<SandboxLogEntry>,
}

/// An entry of a sandbox's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SandboxLogEntry {
    /// When. No two entries of a sandbox have the same millisecond.
    pub timestamp: Timestamp,
    /// How much it matters.
    pub level: LogLevel,
    /// What happened.
    pub message: String,
    /// `logger`, who says so, and what belongs to it.
    #[serde(default)]
    pub fields: BTreeMap<String, String>,
}

impl SandboxLogEntry {
    /// As a line: message, level and fields in one JSON object.
    #[must_use]
    pub fn line(&self) -> SandboxLog {
        let mut object: serde_json::Map<String, serde_json::Value> =
            self.fields.iter().map(|(key, value)| (key.clone(), value.clone().into())).collect();
        object.insert("level".to_owned(), self.level.name().into());
        object.insert("message".to_owned(), self.message.clone().into());
        object.entry("logger").or_insert_with(|| "".into());
        SandboxLog { timestamp: self.timestamp, line: serde_json::Value::Object(object).to_string() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_is_an_object_with_a_level_and_a_logger() {
        let fields = BTreeMap::from([("logger".to_owned(), "sandbox".to_owned()), ("cause".into(), "asked".into())]);
        let entry = SandboxLogEntry {
            timestamp: Timestamp::UNIX_EPOCH,
            level: LogLevel::Info,
            message: "paused".into(),
            fields,
        };
        let line: serde_json::Value = serde_json::from_str(&entry.line().line).unwrap();
        assert_eq!(line, json!({"level": "info", "logger": "sandbox", "message": "paused", "cause": "asked"}));
        let bare = SandboxLogEntry { fields: BTreeMap::new(), ..entry };
        let line: serde_json::Value = serde_json::from_str(&bare.line().line).unwrap();
        assert_eq!(line["logger"], "", "clients count on the key");
    }

    #[test]
    fn a_metric_has_every_key_that_clients_require() {
        let metric = SandboxMetric {
            timestamp: Timestamp::UNIX_EPOCH,
            timestamp_unix: 0,
            cpu_count: 1,
            cpu_used_pct: 0.5,
            mem_used: 1,
            mem_total: 2,
            mem_cache: 3,
            disk_used: 4,
            disk_total: 5,
        };
        let expected = json!({"timestamp": "1970-01-01T00:00:00Z", "timestampUnix": 0, "cpuCount": 1, "cpuUsedPct": 0.5,
            "memUsed": 1, "memTotal": 2, "memCache": 3, "diskUsed": 4, "diskTotal": 5});
        assert_eq!(serde_json::to_value(metric).unwrap(), expected);
        let id = SandboxId::new();
        let many = SandboxesWithMetrics { sandboxes: BTreeMap::from([(id, metric)]) };
        assert_eq!(serde_json::to_value(many).unwrap(), json!({"sandboxes": {id.to_string(): expected}}));
    }
}
