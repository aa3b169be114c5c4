//! What the host is, and what is used of it: as much as `/proc` and the cgroup say.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use aenv_api::{MachineInfo, NodeDisk};

/// File systems that are told of: those that keep files.
const FILESYSTEMS: [&str; 7] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "tmpfs"];
/// Between the first two looks at the processors' counters.
const FIRST: Duration = Duration::from_millis(100);

/// How busy the processors are, since somebody asked before.
#[derive(Debug, Default)]
pub(crate) struct CpuMeter(Mutex<Option<Ticks>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ticks {
    busy: u64,
    total: u64,
}

impl CpuMeter {
    /// Percent of all processors. The first to ask waits a moment.
    pub(crate) async fn percent(&self) -> f64 {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = match last {
            Some(last) => last,
            None => {
                let first = ticks();
                tokio::time::sleep(FIRST).await;
                first
            }
        };
        let now = ticks();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        percent(last, now)
    }
}

fn percent(last: Ticks, now: Ticks) -> f64 {
    let (busy, total) = (now.busy.saturating_sub(last.busy), now.total.saturating_sub(last.total));
    if total == 0 { 0.0 } else { (busy as f64 * 10_000.0 / total as f64).round() / 100.0 }
}

fn ticks() -> Ticks {
    parse_ticks(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
}

/// The first line of `/proc/stat`: user nice system idle iowait irq softirq steal …
fn parse_ticks(text: &str) -> Ticks {
    let line = text.lines().next().unwrap_or_default();
    let ticks: Vec<u64> = line.split_ascii_whitespace().skip(1).take(8).map(|n| n.parse().unwrap_or(0)).collect();
    let total: u64 = ticks.iter().sum();
    Ticks { busy: total - ticks.iter().skip(3).take(2).sum::<u64>(), total }
}

/// The first processor of the host.
pub(crate) fn machine() -> MachineInfo {
    parse_machine(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

fn parse_machine(text: &str) -> MachineInfo {
    let field = |name: &str| {
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        let found = lines.into_iter().find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned());
        found.unwrap_or_default()
    };
    MachineInfo {
        cpu_family: field("cpu family"),
        cpu_model: field("model"),
        cpu_model_name: field("model name"),
        cpu_architecture: std::env::consts::ARCH.to_owned(),
    }
}

/// Processors that this process may use: those it may run on, or as many as its cgroup's quota makes up.
pub(crate) fn processors() -> u64 {
    std::thread::available_parallelism().map_or(1, |count| count.get() as u64) // honours quotas of cgroups
}

/// Memory in use and in all, in bytes; within the limit of the cgroup, if that has one.
pub(crate) fn memory() -> (u64, u64) {
    let (used, total) = parse_memory(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default());
    let of_cgroup = |file: &str| -> Option<u64> {
        std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(file)).ok()?.trim().parse().ok()
    };
    match (of_cgroup("memory.max"), of_cgroup("memory.current")) {
        (Some(limit), Some(current)) if limit < total => (current.min(limit), limit),
        _ => (used, total),
    }
}

fn parse_memory(text: &str) -> (u64, u64) {
    let field = |name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
    };
    let total = field("MemTotal");
    (total.saturating_sub(field("MemAvailable")), total)
}

/// File systems of the host, as this process sees them. Blocking: one that hangs is asked nothing, as none of a network is
/// among them.
pub(crate) fn disks() -> Vec<NodeDisk> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = table.lines().filter_map(parse_mount).filter(|mount| FILESYSTEMS.contains(&&*mount.filesystem_type));
    let sized = mounts.filter_map(|mount| {
        let sizes = nix::sys::statvfs::statvfs(Path::new(&mount.mount_point)).ok()?;
        let unit = sizes.fragment_size() as u64;
        let (total, free) = (sizes.blocks() as u64 * unit, sizes.blocks_free() as u64 * unit);
        Some(NodeDisk { total_bytes: total, used_bytes: total.saturating_sub(free), ..mount })
    });
    sized.collect()
}

/// A line of `mountinfo` (proc_pid_mountinfo(5)): the fifth field is the place; after a dash come type and device.
fn parse_mount(line: &str) -> Option<NodeDisk> {
    let (place, rest) = (line.split(' ').nth(4)?, line.split_once(" - ")?.1);
    let mut rest = rest.split(' ');
    let (filesystem_type, device) = (rest.next()?.to_owned(), rest.next()?.to_owned());
    let mount_point = place.replace("\\040", " ");
    Some(NodeDisk { mount_point, device, filesystem_type, used_bytes: 0, total_bytes: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_understood() {
        let (first, second) = (parse_ticks("cpu  100 0 100 700 100 0 0 0 0 0\n"), Ticks { busy: 225, total: 1100 });
        assert_eq!((first, percent(first, second)), (Ticks { busy: 200, total: 1000 }, 25.0));
        assert_eq!(percent(second, second), 0.0);
        let machine = parse_machine("processor\t: 0\ncpu family\t: 6\nmodel\t\t: 106\nmodel name\t: Some CPU\n");
        assert_eq!((&*machine.cpu_family, &*machine.cpu_model, &*machine.cpu_model_name), ("6", "106", "Some CPU"));
        assert_eq!(parse_memory("MemTotal:  2000 kB\nMemAvailable:   500 kB\n"), (1500 << 10, 2000 << 10));
        let mount = parse_mount("36 35 98:0 / /mnt\\040a rw,noatime shared:1 - ext4 /dev/vda rw").unwrap();
        assert_eq!((&*mount.mount_point, &*mount.filesystem_type, &*mount.device), ("/mnt a", "ext4", "/dev/vda"));
    }

    #[test]
    fn this_host_has_a_disk_and_memory() {
        assert!(disks().iter().any(|disk| disk.total_bytes > 0));
        let (used, total) = memory();
        assert!(used > 0 && used <= total);
        assert!(processors() >= 1);
    }
}
