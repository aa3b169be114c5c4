//! Loads the kernel modules of the initramfs.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::console::say;

/// `NNN-name.ko`, uncompressed; the numbers are the order in which they depend on each other.
const DIRECTORY: &str = "/modules";

/// Loads every module. One that fails is said and passed over: whether the machine can do without shows further on,
/// when its root device or network is missing.
pub(super) fn load_all() {
    let mut modules: Vec<PathBuf> = match std::fs::read_dir(DIRECTORY) {
        Ok(entries) => entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect(),
        // A kernel with everything built in needs none.
        Err(_) => return,
    };
    modules.retain(|path| path.extension().is_some_and(|extension| extension == "ko"));
    modules.sort_unstable();
    for path in modules {
        match load(&path) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => say!("load {}: {error}", path.display()),
        }
    }
}

fn load(path: &Path) -> Result<(), Errno> {
    let file = File::open(path).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    rustix::system::finit_module(&file, c"", 0)
}
