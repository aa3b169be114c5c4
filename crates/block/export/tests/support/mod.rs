//! A mount or a ublk driver for a test, gone with it.

#![allow(dead_code, reason = "each test program uses its part")]

use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Deref;
use std::path::Path;
use std::time::Duration;

use aenv_block_export::{Caching, ExportOptions, FuseExporter, FuseOptions, UblkExporter};

/// Longer than any machine needs for what should take no time.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// A disk of a guest.
pub(crate) const DIRECT: ExportOptions = ExportOptions { read_only: false, caching: Caching::Direct };
/// What many read.
pub(crate) const SHARED: ExportOptions = ExportOptions { read_only: true, caching: Caching::Shared };
/// What many read and somebody writes.
pub(crate) const SHARED_WRITABLE: ExportOptions = ExportOptions { read_only: false, caching: Caching::Shared };

/// A FUSE mount in a directory of its own. Unmounted when dropped, also when the test fails.
pub(crate) struct Mount {
    exporter: Option<FuseExporter>,
    dir: tempfile::TempDir,
}

impl Mount {
    /// None, said on stderr, where it cannot be.
    pub(crate) fn new() -> Option<Self> {
        Self::with(FuseOptions::default())
    }

    pub(crate) fn with(options: FuseOptions) -> Option<Self> {
        if !can_mount() {
            return None;
        }
        let dir = tempfile::tempdir().expect("temp dir");
        let exporter = FuseExporter::mount(&dir.path().join("mnt"), options).expect("mount");
        Some(Self { exporter: Some(exporter), dir })
    }

    /// A place for files that do not lie on the mount.
    pub(crate) fn scratch(&self) -> &Path {
        self.dir.path()
    }

    /// Unmounts and sees that nothing is left.
    pub(crate) fn close(mut self) {
        let exporter = self.exporter.take().expect("closed once");
        let dir = exporter.dir().to_owned();
        exporter.close().expect("unmount");
        assert_eq!(std::fs::read_dir(&dir).expect("the plain directory").count(), 0);
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
        assert!(!mounts.contains(dir.to_str().expect("a plain path")), "{mounts}");
    }
}

impl Deref for Mount {
    type Target = FuseExporter;

    fn deref(&self) -> &FuseExporter {
        self.exporter.as_ref().expect("not closed")
    }
}

/// Says why not on stderr.
pub(crate) fn can_mount() -> bool {
    let can = rustix::process::geteuid().is_root() && File::options().read(true).write(true).open("/dev/fuse").is_ok();
    if !can {
        eprintln!("skipped: mounting FUSE needs root and /dev/fuse here");
    }
    can
}

/// Devices of one test on the ublk driver. All are gone when it is dropped, also when the test fails.
pub(crate) struct Ublk {
    exporter: UblkExporter,
    pub(crate) tag: NonZeroU64,
}

impl Ublk {
    /// None, said on stderr, where it cannot be.
    pub(crate) fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !UblkExporter::is_there() {
            eprintln!("skipped: exporting by ublk needs root and /dev/ublk-control here");
            return None;
        }
        let tag = NonZeroU64::new(uuid::Uuid::new_v4().as_u64_pair().0 | 1).expect("odd");
        Some(Self { exporter: UblkExporter::open(tag).expect("open the ublk driver"), tag })
    }

    /// As another process would have it.
    pub(crate) fn another(&self) -> UblkExporter {
        UblkExporter::open(self.tag).expect("open the ublk driver")
    }
}

impl Deref for Ublk {
    type Target = UblkExporter;

    fn deref(&self) -> &UblkExporter {
        &self.exporter
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        let swept = self.exporter.sweep(&[]).expect("delete what the test left");
        assert!(swept == 0 || std::thread::panicking(), "the test left {swept} devices");
    }
}
