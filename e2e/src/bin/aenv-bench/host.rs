//! The machine that numbers were measured on; without it they mean nothing next month.

use std::fs;

use serde::Serialize;

/// What of a machine moves our numbers.
#[derive(Debug, Serialize)]
pub(crate) struct Host {
    cpu: String,
    cores: usize,
    memory_mib: u64,
    kernel: String,
}

impl Host {
    /// Reads `/proc`; what cannot be read is left empty or zero.
    pub(crate) fn read() -> Self {
        let field = |path: &str, key: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let value = text.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':'));
            value.map(|value| value.trim().to_owned()).unwrap_or_default()
        };
        let memory = field("/proc/meminfo", "MemTotal");
        let kib: u64 = memory.split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
        Self {
            cpu: field("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_mib: kib / 1024,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
        }
    }
}
