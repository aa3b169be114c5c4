//! What a node may say about QEMU.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How guest code is to run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccelChoice {
    /// KVM if a guest boots with it, else the emulated CPU.
    #[default]
    Auto,
    /// KVM or an error.
    Kvm,
    /// The emulated CPU.
    Tcg,
}

/// Where QEMU is, how to use it, and how patient to be.
#[derive(Debug, Clone)]
pub struct QemuConfig {
    /// The executable; `None`: `qemu-system-x86_64` in `PATH`.
    pub binary: Option<PathBuf>,
    /// How guest code is to run.
    pub accel: AccelChoice,
    /// File that remembers whether KVM works; a directory of that name plus `.work` beside it is used for the trial.
    pub probe_cache: PathBuf,
    /// Longest wait for a new process to answer: 50 ms is typical, a second on a crowded host.
    pub startup_timeout: Duration,
    /// Longest wait for the answer to one control call; all take milliseconds, but a stop drains block I/O first.
    pub call_timeout: Duration,
    /// How long a booting guest may be silent when KVM is tried: 100 ms is typical where it works. It may take four
    /// times as long to reach its `/init`.
    pub probe_timeout: Duration,
}

impl QemuConfig {
    /// The usual values.
    #[must_use]
    pub fn new(probe_cache: PathBuf) -> Self {
        Self {
            binary: None,
            accel: AccelChoice::Auto,
            probe_cache,
            startup_timeout: Duration::from_secs(15),
            call_timeout: Duration::from_secs(10),
            probe_timeout: Duration::from_secs(5),
        }
    }
}
