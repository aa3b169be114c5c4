//! Settings of this crate, beside their reader.

use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// `[orchestrator]`: lives and their limits.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct OrchestratorConfig {
    /// Life of a sandbox whose creator names none.
    #[serde(rename = "default_sandbox_timeout_secs", deserialize_with = "secs")]
    pub default_timeout: Duration,
    /// Guests that boot at the same time; further creates queue. An emulated boot takes a whole core, so more than a
    /// few per core only makes all of them late. 0: twice the host's CPUs.
    pub max_concurrent_starts: usize,
    /// Sandboxes that may be starting or wait for it; beyond, creates are refused.
    pub max_queued_starts: usize,
    /// Expired sandboxes that are stopped at the same time: one slow stop delays nobody, many do not flood the host.
    pub max_concurrent_expiries: usize,
    /// What becomes of running sandboxes when the server is stopped.
    pub on_stop: OnStop,
    /// Least life of a sandbox that was resumed by traffic.
    #[serde(rename = "auto_resume_min_sandbox_timeout_secs", deserialize_with = "secs")]
    pub auto_resume_least: Duration,
    /// Between two samples of what a running sandbox uses. 0: none are taken.
    #[serde(rename = "sample_interval_secs", deserialize_with = "secs")]
    pub sample_interval: Duration,
    /// Longest wait for a slot, and for a disk, each; and for each step of a capture.
    #[serde(rename = "resource_timeout_secs", deserialize_with = "secs")]
    pub resource_timeout: Duration,
}

/// What becomes of running sandboxes when the server is stopped. A server that is killed leaves them as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnStop {
    /// They are paused: nothing is lost, and nothing runs on.
    Pause,
    /// They run on, with nobody to reach them or to end them before the next start.
    Leave,
    /// They are deleted, paused ones too.
    Delete,
}

impl Default for OrchestratorConfig {
    fn default() -> Self {
        Self {
            default_timeout: Duration::from_secs(300),
            max_concurrent_starts: 0,
            max_queued_starts: 512,
            max_concurrent_expiries: 8,
            on_stop: OnStop::Pause,
            auto_resume_least: Duration::from_secs(300),
            sample_interval: Duration::from_secs(5),
            resource_timeout: Duration::from_secs(120),
        }
    }
}

impl OrchestratorConfig {
    /// `max_concurrent_starts` with its default worked out.
    #[must_use]
    pub fn start_permits(&self) -> usize {
        match self.max_concurrent_starts {
            0 => 2 * std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }
}

/// `[envd]`: how the guest agent is waited for.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct EnvdConfig {
    /// Version reported to SDKs; they gate features on it.
    pub version: String,
    /// Longest wait from the machine's start to an initialised agent. An emulated boot on a busy host needs tens of
    /// seconds.
    #[serde(rename = "init_timeout_secs", deserialize_with = "secs")]
    pub init_timeout: Duration,
    /// Pause between two readiness probes.
    #[serde(rename = "poll_ms", deserialize_with = "millis")]
    pub poll: Duration,
}

impl Default for EnvdConfig {
    fn default() -> Self {
        Self {
            version: aenv_guest_proto::ENVD_VERSION.to_owned(),
            init_timeout: Duration::from_secs(60),
            poll: Duration::from_millis(10),
        }
    }
}

pub(crate) fn secs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    u64::deserialize(deserializer).map(Duration::from_secs)
}

fn millis<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    u64::deserialize(deserializer).map(Duration::from_millis)
}
