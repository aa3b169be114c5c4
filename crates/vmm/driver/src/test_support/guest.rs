//! The guest that VMM drivers are tested with, and a place to run it in.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use aenv_model::{Bytes, MachineShape};
use tempfile::TempDir;

use crate::{Machine, MachineExit, MachineSpec, find_by_work_dir};

/// Names the guest kernel for tests.
const KERNEL: &str = "AENV_TEST_KERNEL";
/// Names an initramfs with the virtio modules of that kernel under `/modules`; needed by tests with disks.
const INITRAMFS: &str = "AENV_TEST_INITRAMFS";

/// A guest whose `/init` is `init.c`, beside this file.
#[derive(Debug)]
pub struct TestGuest {
    kernel: PathBuf,
    initramfs: PathBuf,
    has_modules: bool,
    speaks: bool,
    _dir: TempDir,
}

impl TestGuest {
    /// Builds the guest from the kernel that `AENV_TEST_KERNEL` names and, if set, the modules in the initramfs that
    /// `AENV_TEST_INITRAMFS` names. The error says why tests that need a guest are to be skipped.
    pub fn from_environment() -> Result<Self, String> {
        let kernel = std::env::var_os(KERNEL).map(PathBuf::from).ok_or_else(|| format!("{KERNEL} is not set"))?;
        if let Err(e) = File::open(&kernel) {
            return Err(format!("{KERNEL}={} cannot be read: {e}", kernel.display()));
        }
        let base = std::env::var_os(INITRAMFS).map(PathBuf::from);
        let dir = tempfile::tempdir().map_err(|e| format!("no temporary directory: {e}"))?;
        let init = dir.path().join("init");
        let source = dir.path().join("init.c");
        std::fs::write(&source, include_str!("init.c")).map_err(|e| format!("write {}: {e}", source.display()))?;
        let compile = Command::new("cc")
            .args([
                "-static",
                "-nostdlib",
                "-ffreestanding",
                "-mgeneral-regs-only",
                "-fno-stack-protector",
                "-fno-pie",
                "-no-pie",
                "-O1",
                "-o",
            ])
            .args([&init, &source])
            .output()
            .map_err(|e| format!("no C compiler: {e}"))?;
        if !compile.status.success() {
            return Err(format!("compile the guest's init: {}", String::from_utf8_lossy(&compile.stderr)));
        }
        let initramfs = dir.path().join("initramfs");
        pack(base.as_deref(), &init, &initramfs).map_err(|e| format!("pack the guest's initramfs: {e}"))?;
        Ok(Self { kernel, initramfs, has_modules: base.is_some(), speaks: true, _dir: dir })
    }

    /// A guest for a VMM that runs none: its console stays silent, and it has no memory.
    #[must_use]
    pub fn imaginary() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = |name: &str| dir.path().join(name);
        Self { kernel: file("kernel"), initramfs: file("initramfs"), has_modules: false, speaks: false, _dir: dir }
    }

    /// The guest kernel.
    #[must_use]
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// The initramfs.
    #[must_use]
    pub fn initramfs(&self) -> &Path {
        &self.initramfs
    }

    /// Whether the guest really runs.
    pub(crate) fn speaks(&self) -> bool {
        self.speaks
    }

    /// Whether the guest can use disks.
    #[must_use]
    pub fn has_modules(&self) -> bool {
        self.has_modules
    }
}

/// Archives may follow each other in an initramfs; of two files of one name the later one counts.
fn pack(base: Option<&Path>, init: &Path, to: &Path) -> io::Result<()> {
    let mut initramfs = File::create(to)?;
    if let Some(base) = base {
        let length = io::copy(&mut File::open(base)?, &mut initramfs)?;
        initramfs.write_all(&vec![0; (length.next_multiple_of(512) - length) as usize])?;
    }
    let entry = |name: &str, mode| cpio::NewcBuilder::new(name).mode(mode).nlink(1);
    let initramfs = entry("dev", 0o040_755).write(initramfs, 0).finish()?;
    let initramfs = entry("dev/console", 0o020_600).rdev_major(5).rdev_minor(1).write(initramfs, 0).finish()?;
    let init = std::fs::read(init)?;
    let length = u32::try_from(init.len()).map_err(io::Error::other)?;
    let mut file = entry("init", 0o100_755).write(initramfs, length);
    file.write_all(&init)?;
    cpio::newc::trailer(file.finish()?)?;
    Ok(())
}

/// A directory for machines. Whatever runs in it is ended when it goes, so a failed test leaves nothing.
#[derive(Debug)]
pub struct Rig {
    dir: TempDir,
    machines: AtomicU32,
}

impl Rig {
    /// An empty place.
    #[must_use]
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a temporary directory"), machines: AtomicU32::new(0) }
    }

    /// Where machines have their work dirs.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A machine with one vCPU and 256 MiB that does `todo` (see `init.c`).
    #[must_use]
    pub fn spec(&self, guest: &TestGuest, todo: &str) -> MachineSpec {
        let number = self.machines.fetch_add(1, Ordering::Relaxed);
        let work_dir = self.path().join(format!("machine-{number}"));
        std::fs::create_dir(&work_dir).expect("a work dir");
        MachineSpec {
            name: format!("test-{number}"),
            shape: MachineShape { vcpus: 1, memory: Bytes::mib(256) },
            kernel: guest.kernel.clone(),
            initramfs: guest.initramfs.clone(),
            cmdline: format!("aenv.test={todo}"),
            disks: Vec::new(),
            nics: Vec::new(),
            netns: None,
            serial_log: work_dir.join("serial.log"),
            serial_log_limit: Bytes::mib(1),
            work_dir,
            memory_image: None,
        }
    }

    /// Asserts that no machine is left.
    pub fn assert_empty(&self) {
        assert_eq!(find_by_work_dir(self.path()).expect("a look at /proc"), [], "machines are left");
    }
}

impl Default for Rig {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for left in find_by_work_dir(self.path()).unwrap_or_default() {
            if let Some(pid) = rustix::process::Pid::from_raw(left.pid.cast_signed()) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

/// Waits until the serial log holds `text` and returns the log. Panics, with the log, after a minute.
pub(crate) async fn wait_for(log: &Path, text: &str) -> String {
    let wait = async {
        loop {
            let said = read(log);
            if said.contains(text) {
                return said;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    match tokio::time::timeout(Duration::from_secs(60), wait).await {
        Ok(said) => said,
        Err(_) => panic!("no {text:?} within a minute in: {}", read(log)),
    }
}

/// Waits until the guest has counted to `least`; numbers before it may be missing. Panics, with the log, after a minute.
pub(crate) async fn wait_for_count(log: &Path, least: u64) {
    let wait = async {
        while counted(log) < least {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(60), wait).await.is_err() {
        panic!("no count of {least} within a minute in: {}", read(log));
    }
}

/// Waits until the machine ended. Panics after a minute.
pub(crate) async fn wait_for_exit(machine: &dyn Machine) -> MachineExit {
    let mut exit = machine.exit();
    let exit = tokio::time::timeout(Duration::from_secs(60), exit.wait_for(Option::is_some)).await;
    exit.expect("no end within a minute").expect("an end").clone().expect("an end")
}

pub(crate) fn read(log: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned()
}

/// The newest number that the guest has counted to.
pub(crate) fn counted(log: &Path) -> u64 {
    let said = read(log);
    let lines = said.lines().filter_map(|line| line.strip_prefix("count ")?.trim().parse().ok());
    lines.max().unwrap_or(0)
}
