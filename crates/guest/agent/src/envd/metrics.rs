//! `GET /metrics`: how the machine is doing.

use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use jiff::Timestamp;
use serde::Serialize;

use super::Envd;
use super::error::HttpError;

#[derive(Debug, Serialize)]
struct Metrics {
    /// Unix seconds.
    ts: i64,
    cpu_count: usize,
    /// Percent of all processors since the previous sample, two decimals.
    cpu_used_pct: f64,
    /// Bytes, as all sizes below without a unit.
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
}

/// Remembers the processor times of the previous sample.
#[derive(Debug, Default)]
pub(super) struct CpuMeter {
    last: Mutex<CpuTimes>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct CpuTimes {
    busy: u64,
    total: u64,
}

impl CpuMeter {
    fn sample(&self, now: CpuTimes) -> f64 {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let total = now.total.saturating_sub(last.total);
        let busy = now.busy.saturating_sub(last.busy);
        *last = now;
        if total == 0 { 0.0 } else { (busy as f64 * 10_000.0 / total as f64).round() / 100.0 }
    }
}

/// The handler.
pub(super) async fn metrics(State(envd): State<Arc<Envd>>) -> Response {
    match collect(&envd.cpu) {
        Ok(metrics) => Json(metrics).into_response(),
        Err(error) => HttpError::internal(format!("collect metrics: {error}")).into_response(),
    }
}

fn collect(cpu: &CpuMeter) -> std::io::Result<Metrics> {
    let memory = parse_meminfo(&std::fs::read_to_string("/proc/meminfo")?);
    let times = parse_cpu_times(&std::fs::read_to_string("/proc/stat")?);
    let disk = rustix::fs::statvfs("/")?;
    let used = memory.total.saturating_sub(memory.available);
    Ok(Metrics {
        ts: Timestamp::now().as_second(),
        cpu_count: std::thread::available_parallelism().map_or(1, usize::from),
        cpu_used_pct: cpu.sample(times),
        mem_total: memory.total,
        mem_used: used,
        mem_cache: memory.cached,
        mem_total_mib: memory.total >> 20,
        mem_used_mib: used >> 20,
        disk_used: disk.f_blocks.saturating_sub(disk.f_bfree) * disk.f_frsize,
        disk_total: disk.f_blocks * disk.f_frsize,
    })
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Memory {
    total: u64,
    available: u64,
    cached: u64,
}

fn parse_meminfo(text: &str) -> Memory {
    let field = |name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    Memory { total: field("MemTotal"), available: field("MemAvailable"), cached: field("Cached") }
}

/// The first line of `/proc/stat`: user nice system idle iowait irq softirq steal …, in ticks.
fn parse_cpu_times(text: &str) -> CpuTimes {
    let Some(line) = text.lines().next() else { return CpuTimes::default() };
    // Guest times, after the eighth field, are contained in user and nice.
    let ticks: Vec<u64> = line.split_ascii_whitespace().skip(1).take(8).map(|n| n.parse().unwrap_or(0)).collect();
    let total = ticks.iter().sum();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    CpuTimes { busy: total - idle, total }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_use_is_counted_between_samples() {
        let first = parse_cpu_times("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 …\n");
        assert_eq!(first, CpuTimes { busy: 200, total: 1000 });
        let meter = CpuMeter::default();
        assert_eq!(meter.sample(first), 20.0);
        assert_eq!(meter.sample(CpuTimes { busy: 225, total: 1100 }), 25.0);
        assert_eq!(meter.sample(CpuTimes { busy: 225, total: 1100 }), 0.0);
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let memory = parse_meminfo("MemTotal:  2000 kB\nMemFree: 1 kB\nMemAvailable:   500 kB\nCached:  100 kB\n");
        assert_eq!(memory, Memory { total: 2_048_000, available: 512_000, cached: 102_400 });
    }
}
