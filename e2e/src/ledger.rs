//! The leak ledger: what of a node exists on the host, outside the node's own memory.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Kernel objects and files that belong to a node, each as a readable line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger(BTreeSet<String>);

impl Ledger {
    /// Everything on this host that names the node's home or runtime path, every link with its tag, and every file in its
    /// transient directories.
    #[must_use]
    pub fn take(home: &Path, runtime: &Path) -> Self {
        let mut lines = BTreeSet::new();
        let roots = [home.to_string_lossy().into_owned(), runtime.to_string_lossy().into_owned()];
        let ours = |text: &str| roots.iter().any(|root| text.contains(root.as_str()));
        for (pid, command) in processes() {
            let kind = ["qemu-system", "aenv-blockd"].into_iter().find(|program| command.contains(program));
            if let Some(kind) = kind.filter(|_| ours(&command)) {
                lines.insert(format!("{kind} process {pid}: {command}"));
            }
        }
        for line in fs::read_to_string("/proc/self/mountinfo").unwrap_or_default().lines() {
            if ours(line) {
                lines.insert(format!("mount: {line}"));
            }
        }
        let prefix = link_prefix(home);
        for name in names(Path::new("/sys/class/net")) {
            if prefix.as_ref().is_some_and(|prefix| name.starts_with(prefix)) {
                lines.insert(format!("link: {name}"));
            }
        }
        for device in names(Path::new("/sys/block")) {
            let backing = format!("/sys/block/{device}/loop/backing_file");
            if fs::read_to_string(backing).is_ok_and(|file| ours(&file)) {
                lines.insert(format!("loop device: {device}"));
            }
        }
        let cache = home.join("image-cache");
        let transient = [
            home.join("disks"),
            cache.join("staging"),
            cache.join("leases/operation"),
            cache.join("leases/runtime"),
            runtime.join("sandboxes"),
            runtime.join("netns"),
        ];
        for dir in transient {
            for name in names(&dir) {
                lines.insert(format!("file: {}", dir.join(name).display()));
            }
        }
        Self(lines)
    }

    /// What is here and was not in `before`.
    #[must_use]
    pub fn beyond<'a>(&'a self, before: &'a Self) -> Vec<&'a str> {
        self.0.difference(&before.0).map(String::as_str).collect()
    }
}

/// How the names of a node's links begin: `av`, the tag kept in its home, and `-`. `None` before its first start.
pub(crate) fn link_prefix(home: &Path) -> Option<String> {
    fs::read_to_string(home.join("node-tag")).ok().map(|tag| format!("av{tag}-"))
}

/// Every process with its command line, words separated by spaces.
pub(crate) fn processes() -> Vec<(i32, String)> {
    names(Path::new("/proc"))
        .into_iter()
        .filter_map(|name| name.parse::<i32>().ok())
        .filter_map(|pid| {
            let command = fs::read(PathBuf::from(format!("/proc/{pid}/cmdline"))).ok()?;
            let text = String::from_utf8_lossy(&command).replace('\0', " ");
            (!text.is_empty()).then_some((pid, text))
        })
        .collect()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
