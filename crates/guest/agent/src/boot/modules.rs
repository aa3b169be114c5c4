//! Loads the kernel modules of the initramfs: at once what the root needs, then what the network needs, then the rest.
//!
//! Loading is most of the boot time, above all where the CPU is emulated. Two things keep it short. Modules are loaded
//! in their order, and only until root device and root file system are there; the others are loaded beside the rest of
//! the boot. And signatures are cut off before the kernel sees them: it would verify each with RSA, and
//! who could forge a module here could replace the kernel beside it just as well.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::console::say;

/// `NNN-name.ko`, uncompressed; the numbers are the order in which they depend on each other.
const DIRECTORY: &str = "/modules";
const INTERFACE: &str = "eth0";
const FILE_SYSTEM: &str = "\text4";
/// Ends a signed module: `struct module_signature` (12 bytes, the last four the signature's length) and this text.
const SIGNATURE_MARK: &[u8] = b"~Module signature appended~\n";

/// Modules that are not loaded yet, in their order. Their files are open, for the initramfs will be gone.
#[derive(Debug, Default)]
pub(super) struct Deferred(VecDeque<(PathBuf, File)>);

/// Loads modules until what the root needs is there.
pub(super) fn load_for_root(root_device: &str) -> Deferred {
    let mut paths: Vec<PathBuf> = match std::fs::read_dir(DIRECTORY) {
        Ok(entries) => entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect(),
        // A kernel with everything built in needs none.
        Err(_) => return Deferred::default(),
    };
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "ko"));
    paths.sort_unstable();
    let mut deferred = VecDeque::new();
    for path in paths {
        match File::open(&path) {
            Ok(file) if !deferred.is_empty() || have_root(root_device) => deferred.push_back((path, file)),
            Ok(file) => load(&path, file),
            Err(error) => say!("open {}: {error}", path.display()),
        }
    }
    Deferred(deferred)
}

impl Deferred {
    /// Loads until there is a network interface.
    pub(super) fn load_for_network(&mut self) {
        // Asked of the kernel by name, not of `/sys`, which is being moved into the new root meanwhile.
        while nix::net::if_::if_nametoindex(INTERFACE).is_err()
            && let Some((path, file)) = self.0.pop_front()
        {
            load(&path, file);
        }
    }

    /// Loads the rest.
    pub(super) fn load_all(self) {
        for (path, file) in self.0 {
            load(&path, file);
        }
    }
}

fn have_root(root_device: &str) -> bool {
    Path::new(root_device).exists()
        && std::fs::read_to_string("/proc/filesystems").is_ok_and(|known| known.lines().any(|line| line == FILE_SYSTEM))
}

/// A module that fails is said and passed over: whether the machine can do without shows further on, when its root
/// device or network is missing.
fn load(path: &Path, file: File) {
    match try_load(file) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => say!("load {}: {error}", path.display()),
    }
}

fn try_load(mut file: File) -> io::Result<()> {
    let mut image = Vec::new();
    file.read_to_end(&mut image)?;
    match rustix::system::init_module(without_signature(&image), c"") {
        // A kernel that insists on signatures.
        Err(Errno::KEYREJECTED | Errno::PERM | Errno::NODATA) => Ok(rustix::system::init_module(&image, c"")?),
        result => Ok(result?),
    }
}

fn without_signature(image: &[u8]) -> &[u8] {
    const HEADER: usize = 12;
    let stripped = || {
        let rest = image.strip_suffix(SIGNATURE_MARK)?;
        let (rest, length) = rest.split_last_chunk::<4>()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        rest.get(..rest.len().checked_sub(HEADER - 4)?.checked_sub(length)?)
    };
    stripped().unwrap_or(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_cut_off_and_nothing_else() {
        let signature = [7; 300];
        let header = [&[0, 0, 2, 0, 0, 0, 0, 0][..], &300_u32.to_be_bytes()].concat();
        let signed = [&b"ELF code"[..], &signature, &header, SIGNATURE_MARK].concat();
        assert_eq!(without_signature(&signed), b"ELF code");
        assert_eq!(without_signature(b"ELF code"), b"ELF code");
        let lying = [&b"x"[..], &[0; 8], &9_999_u32.to_be_bytes(), SIGNATURE_MARK].concat();
        assert_eq!(without_signature(&lying), lying);
    }
}
