//! A kit from the distribution's own archive, booted: needs apt, a mirror that answers, QEMU and rustc; no root.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aenv_guest_kit::{GuestKit, KitConfig, KitError, Origin, provision};

const QEMU: &str = "qemu-system-x86_64";
/// Emulated, on a machine that is busy compiling.
const BOOT_DEADLINE: Duration = Duration::from_secs(90);

/// Builds the stand-in for the guest agent.
fn stand_in(dir: &Path) -> Option<PathBuf> {
    let program = dir.join("init");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in/init.rs");
    let status = Command::new("rustc")
        .args(["--edition", "2024", "-O", "-C", "panic=abort", "-C", "target-feature=+crt-static"])
        .args(["-C", "relocation-model=static", "-C", "strip=symbols", "-o"])
        .args([&program, &source])
        .status();
    status.is_ok_and(|status| status.success()).then_some(program)
}

fn has_qemu() -> bool {
    Command::new(QEMU).arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}

#[tokio::test]
async fn a_kit_from_the_distribution_boots_with_disk_and_nic() {
    let dir = tempfile::tempdir().unwrap();
    let Some(agent) = stand_in(dir.path()) else {
        println!("skipped: rustc cannot link a static program here");
        return;
    };
    let config = KitConfig {
        dir: dir.path().join("guest"),
        kernel_image: None,
        modules_dir: None,
        agent,
        cache_dir: Path::new(env!("CARGO_TARGET_TMPDIR")).join("guest-kit-cache"), // a download a checkout, not a run
    };
    let kit = match provision(&config, &|line| println!("{line}")).await {
        Ok(kit) => kit,
        Err(
            error @ (KitError::NoKernelPackage { .. } | KitError::NoApt { .. } | KitError::UnknownDistribution { .. }),
        ) => {
            println!("skipped: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    assert!(matches!(kit.origin, Origin::Packages { .. }));
    assert_ne!(kit.kernel, kit.shipped_kernel, "a distribution's kernel has an ELF file with a PVH entry in it");
    if !has_qemu() {
        println!("skipped: {QEMU} is not installed (`apt-get install qemu-system-x86`)");
        return;
    }
    for kernel in [&kit.kernel, &kit.shipped_kernel] {
        let console = boot(&kit, kernel, dir.path());
        let expected = format!(
            "stand-in: release={} modules={} disk=true nic=true ext4=true newroot=true",
            kit.kernel_version,
            kit.modules.len()
        );
        assert!(console.contains(&expected), "{} said:\n{console}", kernel.display());
        assert!(!console.contains("does not load"), "{console}");
    }
}

/// Boots `kernel` on an emulated CPU until the guest ends the machine; returns the console's text.
fn boot(kit: &GuestKit, kernel: &Path, dir: &Path) -> String {
    let (console, disk) = (dir.join("console"), dir.join("disk"));
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    // What emulation wants, as the VMM driver gives it: no clock calibration, and no instruction that QEMU 7 gets wrong.
    let clock = tsc_khz().map(|khz| format!("tsc_early_khz={khz} tsc=reliable")).unwrap_or_default();
    let emulated = format!("clearcpuid=cx16 {clock}");
    let mut qemu = Command::new(QEMU)
        .args(["-M", "microvm,acpi=on,pit=on,pic=on,rtc=on,isa-serial=on", "-accel", "tcg", "-cpu", "max", "-m", "256"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-serial", &format!("file:{}", console.display())])
        .args(["-drive", &format!("file={},if=none,id=disk,format=raw", disk.display())])
        .args(["-device", "virtio-blk-device,drive=disk"])
        .args(["-netdev", "user,id=nic,restrict=on", "-device", "virtio-net-device,netdev=nic"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(&kit.initramfs)
        .args(["-append", &format!("console=ttyS0 panic=-1 reboot=t {} {emulated}", kit.cmdline)])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + BOOT_DEADLINE;
    let ended = loop {
        match qemu.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => break None,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let text = String::from_utf8_lossy(&std::fs::read(&console).unwrap_or_default()).into_owned();
    if ended.is_none() {
        qemu.kill().unwrap();
        qemu.wait().unwrap();
        panic!("{} did not get to its end within {BOOT_DEADLINE:?}:\n{text}", kernel.display());
    }
    text
}

/// The host's TSC frequency, which an emulated CPU has too.
fn tsc_khz() -> Option<u64> {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let mhz =
        cpuinfo.lines().find_map(|line| line.strip_prefix("cpu MHz")?.split_once(':'))?.1.trim().parse::<f64>().ok()?;
    Some((mhz * 1000.0) as u64)
}
