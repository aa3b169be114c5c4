//! Which modules a guest needs, found in a kernel's module tree and put into load order.
//!
//! Packages carry no `modules.dep` (depmod makes it at installation), so order comes from the modules themselves: each
//! names what it depends on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::KitError;
use crate::module::{Module, canonical};

/// What guests want, in the order it is loaded (first what the way to a served request needs), and whether one boots
/// without it.
const WANTED: &[(&str, Need)] = &[
    ("virtio_mmio", Need::Essential),
    ("virtio_pci", Need::Welcome), // Firecracker and QEMU microvm speak mmio; other machine types have only PCI
    ("virtio_blk", Need::Essential),
    ("crc32c_intel", Need::Welcome), // ext4's checksums in hardware; part of the kernel proper since 6.14
    ("ext4", Need::Essential),
    ("virtio_net", Need::Essential),
    ("virtio_rng", Need::Welcome),
    ("virtio_balloon", Need::Welcome),
    ("overlay", Need::Welcome),
    ("vmw_vsock_virtio_transport", Need::Welcome),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Essential,
    Welcome,
}

/// A kernel's modules as files: `/lib/modules/<release>` or what was unpacked from packages.
#[derive(Debug)]
pub(crate) struct ModuleTree {
    dir: PathBuf,
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

/// The modules of an initramfs.
#[derive(Debug, Default)]
pub(crate) struct ModuleSet {
    /// In load order, by canonical name.
    pub(crate) modules: Vec<(String, Module)>,
    /// Wanted ones that are not loaded, and why.
    pub(crate) skipped: Vec<(String, Skipped)>,
}

/// Why a wanted module is not in the initramfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Skipped {
    /// The kernel has it without a module.
    BuiltIn,
    /// This kernel has it not at all.
    Absent,
}

impl ModuleTree {
    /// Looks through a modules directory.
    ///
    /// Errors: `ModulesDir` if it holds neither modules nor a list of built-in ones.
    pub(crate) fn open(dir: &Path) -> Result<Self, KitError> {
        let mut tree = Self { dir: dir.to_owned(), files: BTreeMap::new(), builtin: BTreeSet::new() };
        tree.collect(&dir.join("kernel"))?;
        let list = dir.join("modules.builtin");
        match std::fs::read_to_string(&list) {
            Ok(text) => tree.builtin = text.lines().filter_map(|line| module_name(Path::new(line))).collect(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(KitError::Io { action: "read", path: list, source }),
        }
        if tree.files.is_empty() && tree.builtin.is_empty() {
            let why = "holds neither kernel/**/*.ko nor modules.builtin".to_owned();
            return Err(KitError::ModulesDir { path: dir.to_owned(), why });
        }
        Ok(tree)
    }

    fn collect(&mut self, dir: &Path) -> Result<(), KitError> {
        let entries = match std::fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(KitError::Io { action: "list", path: dir.to_owned(), source }),
        };
        for entry in entries {
            let entry = entry.map_err(KitError::io("list", dir))?;
            let path = entry.path();
            if entry.file_type().map_err(KitError::io("look at", &path))?.is_dir() {
                self.collect(&path)?;
            } else if let Some(name) = module_name(&path) {
                self.files.insert(name, path);
            }
        }
        Ok(())
    }

    /// The wanted modules and all they depend on, for the kernel `release`.
    ///
    /// Errors: `ModuleMissing` for an essential one (or a dependency of any), `Module` for a file that cannot be read or
    /// was built for another kernel.
    pub(crate) fn guest_modules(&self, release: &str) -> Result<ModuleSet, KitError> {
        let mut set = ModuleSet::default();
        let mut seen = BTreeSet::new();
        for (name, need) in WANTED {
            if self.builtin.contains(*name) {
                set.skipped.push(((*name).to_owned(), Skipped::BuiltIn));
            } else if self.files.contains_key(*name) || *need == Need::Essential {
                self.add(name, release, &mut seen, &mut set)?;
            } else {
                set.skipped.push(((*name).to_owned(), Skipped::Absent));
            }
        }
        Ok(set)
    }

    fn add(&self, name: &str, release: &str, seen: &mut BTreeSet<String>, set: &mut ModuleSet) -> Result<(), KitError> {
        if self.builtin.contains(name) || !seen.insert(name.to_owned()) {
            return Ok(());
        }
        let path = self.files.get(name).ok_or_else(|| KitError::ModuleMissing {
            name: name.to_owned(),
            kernel_version: release.to_owned(),
            dir: self.dir.clone(),
        })?;
        let refused = |why: String| KitError::Module { path: path.clone(), why };
        let module = Module::read(path).map_err(refused)?;
        if let Some(other) = module.release.as_deref().filter(|other| *other != release) {
            return Err(refused(format!("was built for kernel {other}, the guest's is {release}")));
        }
        for preferred in module.prefers.iter().filter(|preferred| self.files.contains_key(*preferred)) {
            self.add(preferred, release, seen, set)?;
        }
        for dependency in &module.depends {
            self.add(dependency, release, seen, set)?;
        }
        set.modules.push((name.to_owned(), module));
        Ok(())
    }
}

/// `…/virtio-rng.ko.xz` → `virtio_rng`; `None` for other files.
fn module_name(path: &Path) -> Option<String> {
    let (stem, extension) = path.file_name()?.to_str()?.split_once(".ko")?;
    ["", ".xz", ".zst", ".gz"].contains(&extension).then(|| canonical(stem))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::module;

    fn tree(files: &[(&str, &str)], builtin: &str) -> (tempfile::TempDir, ModuleTree) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("kernel/drivers")).unwrap();
        for (name, depends) in files {
            std::fs::write(dir.path().join("kernel/drivers").join(name), module("6.1.0", depends, "")).unwrap();
        }
        std::fs::write(dir.path().join("modules.builtin"), builtin).unwrap();
        let tree = ModuleTree::open(dir.path()).unwrap();
        (dir, tree)
    }

    fn names(set: &ModuleSet) -> Vec<&str> {
        set.modules.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn dependencies_come_first_and_once_whatever_is_built_in_stays_out() {
        let (_dir, tree) = tree(
            &[
                ("virtio-ring.ko", "virtio"),
                ("virtio.ko", ""),
                ("virtio_mmio.ko", "virtio-ring,virtio"),
                ("virtio_blk.ko", "virtio,virtio_ring"),
                ("virtio_net.ko", "net_failover,virtio"),
                ("net_failover.ko", "failover"),
                ("failover.ko", ""),
                ("unwanted.ko", ""),
            ],
            "kernel/fs/ext4/ext4.ko\nkernel/drivers/virtio/virtio_pci.ko\n",
        );
        let set = tree.guest_modules("6.1.0").unwrap();
        assert_eq!(
            names(&set),
            ["virtio", "virtio_ring", "virtio_mmio", "virtio_blk", "failover", "net_failover", "virtio_net"]
        );
        assert!(set.skipped.contains(&("ext4".to_owned(), Skipped::BuiltIn)));
        assert!(set.skipped.contains(&("overlay".to_owned(), Skipped::Absent)));
    }

    #[test]
    fn an_essential_module_that_is_nowhere_is_an_error_that_names_it() {
        let (_dir, tree) = tree(&[("virtio_mmio.ko", "")], "kernel/fs/ext4/ext4.ko\n");
        let error = tree.guest_modules("6.1.0").unwrap_err().to_string();
        assert!(error.contains("virtio_blk") && error.contains("6.1.0"), "{error}");
    }

    #[test]
    fn modules_of_another_kernel_are_refused() {
        let (_dir, tree) = tree(&[("virtio_mmio.ko", "")], "");
        let error = tree.guest_modules("6.12.0").unwrap_err().to_string();
        assert!(error.contains("built for kernel 6.1.0"), "{error}");
    }

    #[test]
    fn an_empty_directory_is_no_modules_directory() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(ModuleTree::open(dir.path()), Err(KitError::ModulesDir { .. })));
    }
}
