//! A home that is soon full.

use std::path::PathBuf;
use std::process::Command;

/// A home on a file system of its own, gone with this value.
#[derive(Debug)]
pub struct SmallHome {
    dir: tempfile::TempDir,
}

impl SmallHome {
    /// Of `size`, in the words of `mount`. Needs root.
    #[must_use]
    pub fn mount(size: &str) -> Self {
        let dir = tempfile::tempdir().expect("make a mount point");
        let options = format!("size={size},mode=0755");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "aenv-e2e"]).arg(dir.path()).status();
        assert!(status.expect("run mount").success(), "mount a tmpfs");
        std::fs::create_dir(dir.path().join("home")).expect("make the home");
        Self { dir }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("home")
    }
}

impl Drop for SmallHome {
    fn drop(&mut self) {
        _ = nix::mount::umount2(self.dir.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}
