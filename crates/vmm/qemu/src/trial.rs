//! Does KVM really run a guest? Tried once, remembered until something relevant changes.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aenv_model::{Bytes, MachineShape};
use aenv_vmm_driver::{Machine, MachineSpec, end_orphan, find_by_work_dir};
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use crate::machine::QemuMachine;
use crate::{AccelChoice, Qemu, QemuConfig};

/// The kernel says this when it starts `/init`: user space runs, with all that comes before it.
const REACHED_INIT: &str = "as init process";
/// How many times the patience with a silent guest a guest may take that goes on saying something: on a busy or nested
/// host, KVM that works is slow, and still far better than emulation.
const SLOW: u32 = 24;
/// How often the console is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Trial<'a> {
    /// A QEMU that uses KVM.
    pub(crate) qemu: &'a Qemu,
    pub(crate) config: &'a QemuConfig,
    /// The exact version of QEMU.
    pub(crate) version: &'a str,
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
}

/// What is remembered.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Verdict {
    /// All that the outcome depends on.
    about: String,
    /// `None`: KVM works. `Some`: why not.
    why_not: Option<String>,
}

/// The error says, for people, why KVM does not work.
pub(crate) async fn kvm_works(trial: Trial<'_>) -> Result<(), String> {
    // Cheap, and may change with a group membership: not remembered.
    OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map_err(|e| format!("/dev/kvm cannot be opened: {e}"))?;
    let about = trial.about().map_err(|e| format!("kernel {} cannot be read: {e}", trial.kernel.display()))?;
    let cache = &trial.config.probe_cache;
    let remembered = std::fs::read(cache).ok().and_then(|text| serde_json::from_slice::<Verdict>(&text).ok());
    if let Some(verdict) = remembered.filter(|verdict| verdict.about == about) {
        // Somebody who insists has perhaps just repaired it.
        if verdict.why_not.is_none() || trial.config.accel != AccelChoice::Kvm {
            debug!(cache = %cache.display(), "outcome of an earlier trial of KVM is used");
            return verdict.why_not.map_or(Ok(()), Err);
        }
    }
    let outcome = trial.boot().await;
    let verdict = Verdict { about, why_not: outcome.clone().err() };
    if let Err(e) = remember(cache, &verdict) {
        warn!(cache = %cache.display(), error = %e, "cannot remember whether KVM works; the next start tries again");
    }
    outcome
}

/// Atomic, but not synced: a lost verdict costs a second trial.
fn remember(cache: &Path, verdict: &Verdict) -> io::Result<()> {
    let temporary = cache.with_extension("new");
    std::fs::write(&temporary, serde_json::to_vec_pretty(verdict)?)?;
    std::fs::rename(temporary, cache)
}

impl Trial<'_> {
    /// QEMU, guest kernel, host kernel, and this boot of the host: a module option or the firmware may change between
    /// two boots.
    fn about(&self) -> io::Result<String> {
        let kernel = std::fs::metadata(self.kernel)?;
        let read = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned());
        Ok(format!(
            "{}; {}; guest kernel {} ({} bytes, {}.{}); host {}, boot {}",
            self.qemu.binary.display(),
            self.version,
            self.kernel.display(),
            kernel.len(),
            kernel.mtime(),
            kernel.mtime_nsec(),
            read("/proc/sys/kernel/osrelease")?,
            read("/proc/sys/kernel/random/boot_id")?,
        ))
    }

    /// Boots a guest and waits until it has reached its `/init`.
    async fn boot(&self) -> Result<(), String> {
        let mut work_dir = self.config.probe_cache.clone().into_os_string();
        work_dir.push(".work");
        let work_dir = PathBuf::from(work_dir);
        // Of a server that died during its trial.
        for left in find_by_work_dir(&work_dir).unwrap_or_default() {
            let _ = end_orphan(&left).await;
        }
        let fresh = || {
            if work_dir.exists() {
                std::fs::remove_dir_all(&work_dir)?;
            }
            std::fs::create_dir_all(&work_dir)?;
            std::fs::set_permissions(&work_dir, PermissionsExt::from_mode(0o700))
        };
        fresh().map_err(|e: io::Error| format!("the trial's directory {} cannot be made: {e}", work_dir.display()))?;
        let outcome = self.boot_in(&work_dir).await;
        if let Err(e) = std::fs::remove_dir_all(&work_dir) {
            warn!(directory = %work_dir.display(), error = %e, "cannot remove the directory of the trial of KVM");
        }
        outcome
    }

    async fn boot_in(&self, work_dir: &Path) -> Result<(), String> {
        let initramfs = std::fs::metadata(self.initramfs).map_or(0, |file| file.len());
        let serial_log = work_dir.join("serial.log");
        let spec = MachineSpec {
            name: "kvm-trial".into(),
            // An initramfs is unpacked in memory, beside its packed form.
            shape: MachineShape {
                vcpus: 1,
                memory: Bytes(initramfs * 6).round_up(Bytes::mib(64)).max(Bytes::mib(256)),
            },
            kernel: self.kernel.to_owned(),
            initramfs: self.initramfs.to_owned(),
            cmdline: "ignore_loglevel".into(), // the words waited for are not among those that `quiet` lets through
            disks: Vec::new(),
            nics: Vec::new(),
            netns: None,
            work_dir: work_dir.to_owned(),
            serial_log: serial_log.clone(),
            serial_log_limit: Bytes::mib(1),
            memory_image: None,
        };
        let machine = self.qemu.start(spec, None).await.map_err(|e| format!("QEMU does not start with it: {e}"))?;
        let log = || String::from_utf8_lossy(&std::fs::read(&serial_log).unwrap_or_default()).into_owned();
        let outcome = self.watch_boot(&machine, &log).await;
        match machine.kill().await {
            Ok(_) => outcome,
            Err(e) => Err(format!("the machine of a trial does not end: {e}")),
        }
    }

    /// Until the guest has reached its `/init`, or is silent or slow beyond patience.
    async fn watch_boot(&self, machine: &QemuMachine, log: impl Fn() -> String) -> Result<(), String> {
        let patience = self.config.probe_timeout;
        let exit = machine.exit();
        let began = Instant::now();
        let (mut said, mut heard) = (0, began);
        loop {
            let ended = exit.borrow().clone(); // before the look, so that the look is at all the output
            let output = log();
            if output.contains(REACHED_INIT) {
                return Ok(());
            }
            if let Some(end) = ended {
                return Err(format!("the guest of a trial ended before it reached its init: {end:?}"));
            }
            if output.len() > said {
                (said, heard) = (output.len(), Instant::now());
            }
            if heard.elapsed() > patience || began.elapsed() > SLOW * patience {
                return Err(match output.lines().last() {
                    None => format!(
                        "a stock kernel booted with it says nothing within {patience:?} (is this host itself a PVM guest?)"
                    ),
                    Some(last) => {
                        format!("a stock kernel booted with it got stuck after {:?}, at: {last}", began.elapsed())
                    }
                });
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use aenv_vmm_driver::test_support::TestGuest;

    use super::*;

    /// A trial on the emulated CPU, which works everywhere: shows that a guest that boots is recognised.
    #[tokio::test]
    async fn a_guest_that_boots_passes_the_trial_and_one_that_cannot_is_told() {
        let guest = match TestGuest::from_environment() {
            Ok(guest) => guest,
            Err(why) => return println!("skipped: {why}"),
        };
        let dir = tempfile::tempdir().unwrap();
        let config = QemuConfig {
            accel: AccelChoice::Tcg,
            probe_timeout: Duration::from_secs(30),
            ..QemuConfig::new(dir.path().join("kvm.json"))
        };
        let qemu = match Qemu::probe(config.clone(), guest.kernel(), guest.initramfs()).await {
            Ok(qemu) => qemu,
            Err(why) => return println!("skipped: {why}"),
        };
        let trial =
            Trial { qemu: &qemu, config: &config, version: "", kernel: guest.kernel(), initramfs: guest.initramfs() };
        trial.boot().await.unwrap();

        let garbage = dir.path().join("garbage");
        std::fs::write(&garbage, [0; 4096]).unwrap();
        let why = Trial { kernel: &garbage, ..trial }.boot().await.unwrap_err();
        assert!(why.contains("does not start"), "{why}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "only the garbage is left");
    }
}
