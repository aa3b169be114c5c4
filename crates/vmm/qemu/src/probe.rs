//! Which QEMU there is, and how it can run guests.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aenv_vmm_driver::{VmmError, VmmIdentity, host_tsc_khz};
use tracing::info;

use crate::arguments::{Accel, FORM};
use crate::trial::{self, Trial};
use crate::{AccelChoice, Qemu, QemuConfig};

/// Name of the executable in `PATH`.
const BINARY: &str = "qemu-system-x86_64";
/// The oldest version that saving and restoring were tried with.
const OLDEST: (u32, u32) = (7, 2);
/// What brings the executable.
const INSTALL: &str = "apt-get install --no-install-recommends qemu-system-x86";

impl Qemu {
    /// Finds QEMU and decides how guests run.
    ///
    /// `/dev/kvm` proves little: on a host that is itself a guest it may open, create machines, and never run a stock
    /// kernel. So unless `accel` says `Tcg`, a guest of `kernel` and `initramfs` is really booted once, without disks
    /// and network, until it runs its `/init`. The outcome is kept in `probe_cache` until QEMU, the kernel, or the
    /// host's boot is another; a forced `Kvm` that failed is tried anew.
    ///
    /// Errors: `Unusable`, with what to do about it: no QEMU or one older than 7.2; `accel` is `Kvm` and that does not
    /// work.
    pub async fn probe(config: QemuConfig, kernel: &Path, initramfs: &Path) -> Result<Self, VmmError> {
        let binary = find_binary(config.binary.as_deref())?;
        let version = read_version(&binary, config.startup_timeout).await?;
        let qemu = |accel, why_emulated| Self {
            identity: VmmIdentity { kind: Self::kind(accel), version: format!("{}, form {FORM}", version.number) },
            binary: binary.clone(),
            accel,
            startup_timeout: config.startup_timeout,
            call_timeout: config.call_timeout,
            why_emulated,
        };
        let why_emulated = match config.accel {
            AccelChoice::Tcg => "the configuration says so".to_owned(),
            AccelChoice::Auto | AccelChoice::Kvm => {
                let kvm = qemu(Accel::Kvm, None);
                let trial = Trial { qemu: &kvm, config: &config, version: &version.text, kernel, initramfs };
                match trial::kvm_works(trial).await {
                    Ok(()) => {
                        info!(version = version.number, "guests run on KVM");
                        return Ok(kvm);
                    }
                    Err(why) if config.accel == AccelChoice::Kvm => {
                        return Err(VmmError::Unusable {
                            binary,
                            why: format!(
                                "KVM is demanded, but {why}; `accel = \"auto\"` would emulate the CPU instead"
                            ),
                        });
                    }
                    Err(why) => why,
                }
            }
        };
        let tsc_khz = tokio::task::spawn_blocking(host_tsc_khz).await.ok().flatten();
        info!(version = version.number, why = why_emulated, "guests run on an emulated CPU");
        Ok(qemu(Accel::Tcg { tsc_khz }, Some(why_emulated)))
    }
}

fn find_binary(configured: Option<&Path>) -> Result<PathBuf, VmmError> {
    if let Some(binary) = configured {
        return Ok(binary.to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|directory| directory.join(BINARY)).find(|file| file.is_file());
    found.ok_or_else(|| VmmError::Unusable {
        binary: BINARY.into(),
        why: format!("it is not in PATH; install it with `{INSTALL}`"),
    })
}

#[derive(Debug, PartialEq, Eq)]
struct Version {
    /// `7.2.22`
    number: String,
    /// The first line of `-version`, with the distribution's own version.
    text: String,
}

async fn read_version(binary: &Path, deadline: Duration) -> Result<Version, VmmError> {
    let unusable = |why: String| VmmError::Unusable { binary: binary.to_owned(), why };
    let mut command = tokio::process::Command::new(binary);
    command.arg("-version").stdin(std::process::Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(deadline, command.output())
        .await
        .map_err(|_| unusable(format!("`-version` did not end within {deadline:?}")))?
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => unusable(format!("there is no such file; install it with `{INSTALL}`")),
            _ => unusable(format!("it cannot be started: {e}")),
        })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = parse_version(&text).ok_or_else(|| {
        let said = if text.is_empty() { String::from_utf8_lossy(&output.stderr) } else { text.clone() };
        unusable(format!("`-version` ended with {} and printed no version of QEMU: {}", output.status, said.trim()))
    })?;
    let mut numbers = version.number.split('.').map(|number| number.parse().unwrap_or(0));
    if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < OLDEST {
        let (major, minor) = OLDEST;
        return Err(unusable(format!(
            "version {} is too old, {major}.{minor} or newer is needed; install it with `{INSTALL}`",
            version.number
        )));
    }
    Ok(version)
}

/// `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)`
fn parse_version(output: &str) -> Option<Version> {
    let text = output.lines().next()?;
    let number = text.strip_prefix("QEMU emulator version ")?.split_ascii_whitespace().next()?;
    number.starts_with(|c: char| c.is_ascii_digit()).then(|| Version { number: number.into(), text: text.into() })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_version_is_read_from_the_first_line() {
        let version = parse_version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg)\nCopyright\n").unwrap();
        assert_eq!((version.number.as_str(), version.text.ends_with("2+dfsg)")), ("7.2.22", true));
        assert_eq!(parse_version("QEMU emulator version 10.0.0-rc1\n").unwrap().number, "10.0.0-rc1");
        assert_eq!(parse_version("GNU bash, version 5\n"), None);
    }

    #[tokio::test]
    async fn an_unusable_binary_is_answered_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("qemu");
        let mut why = Vec::new();
        for body in ["echo 'QEMU emulator version 6.2.0 (Ubuntu)'", "echo hello; exit 3"] {
            std::fs::write(&script, format!("#!/bin/sh\n{body}\n")).unwrap();
            std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
            why.push(read_version(&script, Duration::from_secs(10)).await.unwrap_err().to_string());
        }
        why.push(read_version(Path::new("/nowhere/qemu"), Duration::from_secs(10)).await.unwrap_err().to_string());
        assert!(why[0].contains("6.2.0 is too old") && why[0].contains("apt-get install"), "{}", why[0]);
        assert!(why[1].contains("exit status: 3") && why[1].contains("hello"), "{}", why[1]);
        assert!(why[2].contains("/nowhere/qemu") && why[2].contains("apt-get install"), "{}", why[2]);
    }
}
