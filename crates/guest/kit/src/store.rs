//! Kits on disk: `<dir>/<id>/`, written beside their place and renamed into it, never changed after.
//!
//! ```text
//! <dir>/<id>/kernel       the image as shipped
//!            vmlinux      the same kernel uncompressed, if it has a PVH entry
//!            initramfs    modules and agent
//!            modules/     what is in the initramfs, to build the next one when only the agent changed
//!            kit.json     what all this is; written last
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::digest::sha256;
use crate::kernel::{GuestKernel, Origin, module_file, read_modules};
use crate::module_set::{ModuleSet, Skipped};
use crate::{KitError, cmdline, initramfs};

/// Begins the names of what a crash may leave behind.
pub(crate) const TEMPORARY: &str = ".new-";
/// Raised when the same sources would give other contents: a new kit then gets a new id.
const FORMAT: u32 = 1;
/// Half of SHA-256's half: short in paths, and kits on one machine are few.
const ID_LENGTH: usize = 16;

const KERNEL: &str = "kernel";
const VMLINUX: &str = "vmlinux";
const INITRAMFS: &str = "initramfs";
const MODULES: &str = "modules";
const RECORD: &str = "kit.json";

/// A guest kernel with its initramfs, ready to boot. All paths are absolute if the kits' directory is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestKit {
    /// Names the contents: kernel, modules, agent, command line. Snapshots record it.
    pub id: String,
    /// What to boot: the uncompressed ELF `vmlinux` where the kernel has a PVH entry, else the image as shipped.
    pub kernel: PathBuf,
    /// The initial file system, uncompressed.
    pub initramfs: PathBuf,
    /// `uname -r` in the guest.
    pub kernel_version: String,
    /// Kernel arguments that this kernel wants on any VMM.
    pub cmdline: String,
    /// The image as shipped (`vmlinuz`), for a loader that wants it.
    pub shipped_kernel: PathBuf,
    /// Modules of the initramfs in load order.
    pub modules: Vec<String>,
    /// Where the kernel came from.
    pub origin: Origin,
}

/// `kit.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) format: u32,
    pub(crate) id: String,
    pub(crate) kernel_version: String,
    pub(crate) cmdline: String,
    pub(crate) origin: Origin,
    pub(crate) agent_sha256: String,
    kernel: Part,
    vmlinux: Option<Part>,
    initramfs: Part,
    modules: Vec<ModulePart>,
    /// Modules that were wanted and are not in the initramfs.
    skipped: Vec<(String, Skipped)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Part {
    size: u64,
    sha256: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ModulePart {
    name: String,
    sha256: String,
}

impl Part {
    fn of(bytes: &[u8]) -> Self {
        Self { size: bytes.len() as u64, sha256: sha256(bytes) }
    }
}

/// The kit `id` in `dir`, if its files are there with the sizes that its record gives.
///
/// Errors: `NotFound`, `Damaged`.
pub fn open(dir: &Path, id: &str) -> Result<GuestKit, KitError> {
    kit_of(dir, read_record(dir, id)?)
}

/// All kits in `dir` that can be opened, by id. A directory that does not exist has none.
pub fn list(dir: &Path) -> Result<Vec<GuestKit>, KitError> {
    Ok(records(dir)?.into_iter().filter_map(|record| kit_of(dir, record).ok()).collect())
}

/// Removes a kit; one that is not there is success. Whether a snapshot still needs it is the caller's to know.
pub fn remove(dir: &Path, id: &str) -> Result<(), KitError> {
    let kit = kit_dir(dir, id)?;
    // The record goes first, so that what a crash leaves is no kit.
    let record = kit.join(RECORD);
    aenv_durable::remove_file_if_present(&record).map_err(KitError::io("remove", &record))?;
    aenv_durable::remove_dir_if_present(&kit).map_err(KitError::io("remove", &kit))
}

/// Removes what a crash left half-made in `dir`. The caller holds the lock, so nobody is at work on any of it.
pub(crate) fn sweep(dir: &Path) -> Result<(), KitError> {
    for entry in fs::read_dir(dir).map_err(KitError::io("list", dir))?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
            let path = entry.path();
            tracing::info!(path = %path.display(), "removing what an interrupted run left");
            let removed = match path.is_dir() {
                true => fs::remove_dir_all(&path),
                false => fs::remove_file(&path),
            };
            removed.map_err(KitError::io("remove", &path))?;
        }
    }
    Ok(())
}

/// The records of all kits of this format.
pub(crate) fn records(dir: &Path) -> Result<Vec<Record>, KitError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(KitError::Io { action: "list", path: dir.to_owned(), source }),
    };
    let mut ids: Vec<_> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    ids.sort();
    Ok(ids.iter().filter_map(|id| read_record(dir, id).ok()).collect())
}

/// The kernel of an existing kit, so that a new agent does not have to wait for packages to be unpacked.
pub(crate) fn kernel_of(dir: &Path, record: &Record) -> Result<GuestKernel, KitError> {
    let kit = kit_dir(dir, &record.id)?;
    let read = |name: &str| {
        let path = kit.join(name);
        fs::read(&path).map_err(KitError::io("read", &path))
    };
    let names: Vec<_> = record.modules.iter().map(|module| module.name.clone()).collect();
    Ok(GuestKernel {
        origin: record.origin.clone(),
        release: record.kernel_version.clone(),
        image: read(KERNEL)?,
        elf: record.vmlinux.as_ref().map(|_| read(VMLINUX)).transpose()?,
        modules: ModuleSet { modules: read_modules(&kit.join(MODULES), &names)?, skipped: record.skipped.clone() },
    })
}

/// Puts a kit together. One that is there already, intact, is left as it is.
pub(crate) fn assemble(dir: &Path, kernel: &GuestKernel, agent: &[u8]) -> Result<GuestKit, KitError> {
    let initramfs =
        initramfs::build(agent, &kernel.modules.modules).map_err(KitError::io("build initramfs in", dir))?;
    let named = |(name, module): &(String, crate::module::Module)| ModulePart {
        name: name.clone(),
        sha256: sha256(&module.content),
    };
    let mut record = Record {
        format: FORMAT,
        id: String::new(),
        kernel_version: kernel.release.clone(),
        cmdline: cmdline::line(),
        origin: kernel.origin.clone(),
        agent_sha256: sha256(agent),
        kernel: Part::of(&kernel.image),
        vmlinux: kernel.elf.as_deref().map(Part::of),
        initramfs: Part::of(&initramfs),
        modules: kernel.modules.modules.iter().map(named).collect(),
        skipped: kernel.modules.skipped.clone(),
    };
    record.id = id_of(&record);
    match open(dir, &record.id) {
        Ok(kit) => return Ok(kit),
        Err(KitError::NotFound { .. }) => {}
        Err(error) => {
            tracing::warn!(id = %record.id, %error, "making a damaged guest kit anew");
            remove(dir, &record.id)?;
        }
    }
    write(dir, &record, kernel, &initramfs)?;
    kit_of(dir, record)
}

/// Hash of everything that decides how a guest boots. Where the kernel came from does not.
fn id_of(record: &Record) -> String {
    let vmlinux = record.vmlinux.as_ref().map_or("-", |part| part.sha256.as_str());
    let parts = [&record.kernel.sha256, vmlinux, &record.initramfs.sha256, &record.cmdline];
    let mut id = sha256(format!("aenv guest kit {}\n{}\n", record.format, parts.join("\n")).as_bytes());
    id.truncate(ID_LENGTH);
    id
}

fn write(dir: &Path, record: &Record, kernel: &GuestKernel, initramfs: &[u8]) -> Result<(), KitError> {
    let fresh = tempfile::Builder::new()
        .prefix(TEMPORARY)
        .tempdir_in(dir)
        .map_err(KitError::io("create a directory in", dir))?;
    let modules = fresh.path().join(MODULES);
    fs::create_dir(&modules).map_err(KitError::io("create directory", &modules))?;
    // A VMM jailed as another user reads these files.
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(fresh.path(), readable).map_err(KitError::io("set permissions of", fresh.path()))?;

    let siblings = records(dir)?;
    let twin = |part: &Part| {
        siblings.iter().find_map(|sibling| {
            let kit = dir.join(&sibling.id);
            [(KERNEL, Some(&sibling.kernel)), (VMLINUX, sibling.vmlinux.as_ref())]
                .into_iter()
                .find_map(|(name, other)| (other == Some(part)).then(|| kit.join(name)))
        })
    };
    put(&fresh.path().join(KERNEL), &kernel.image, twin(&record.kernel))?;
    if let (Some(elf), Some(part)) = (&kernel.elf, &record.vmlinux) {
        put(&fresh.path().join(VMLINUX), elf, twin(part))?;
    }
    put(&fresh.path().join(INITRAMFS), initramfs, None)?;
    for (index, (name, module)) in kernel.modules.modules.iter().enumerate() {
        put(&modules.join(module_file(index, name)), &module.content, None)?;
    }
    let json = serde_json::to_vec_pretty(record).map_err(|error| KitError::Io {
        action: "write record in",
        path: dir.to_owned(),
        source: error.into(),
    })?;
    put(&fresh.path().join(RECORD), &json, None)?;

    let place = dir.join(&record.id);
    let whole = fresh.keep();
    fs::rename(&whole, &place).map_err(KitError::io("move new kit to", &place))?;
    aenv_durable::sync_dir(dir).map_err(KitError::io("sync", dir))
}

/// Writes a part, or links it to an equal one of another kit: kernels are big and change rarely, agents often.
fn put(path: &Path, content: &[u8], twin: Option<PathBuf>) -> Result<(), KitError> {
    if let Some(twin) = twin {
        let same_size = fs::metadata(&twin).is_ok_and(|metadata| metadata.len() == content.len() as u64);
        if same_size && fs::hard_link(&twin, path).is_ok() {
            return Ok(());
        }
    }
    aenv_durable::atomic_write(path, content, 0o644).map_err(KitError::io("write", path))
}

fn read_record(dir: &Path, id: &str) -> Result<Record, KitError> {
    let kit = kit_dir(dir, id)?;
    let path = kit.join(RECORD);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !kit.exists() => {
            return Err(KitError::NotFound { id: id.to_owned(), dir: dir.to_owned() });
        }
        Err(error) => return Err(damaged(dir, id, format!("{RECORD} cannot be read: {error}"))),
    };
    let record: Record = serde_json::from_slice(&text)
        .map_err(|error| damaged(dir, id, format!("{RECORD} is not understood: {error}")))?;
    match record.id == id && record.format == FORMAT {
        true => Ok(record),
        false => Err(damaged(dir, id, format!("{RECORD} is of kit {}, format {}", record.id, record.format))),
    }
}

/// The kit of a record, after a look at its files.
fn kit_of(dir: &Path, record: Record) -> Result<GuestKit, KitError> {
    let kit = dir.join(&record.id);
    let mut parts = vec![(KERNEL, &record.kernel), (INITRAMFS, &record.initramfs)];
    parts.extend(record.vmlinux.as_ref().map(|part| (VMLINUX, part)));
    for (name, part) in parts {
        let size = fs::metadata(kit.join(name)).map(|metadata| metadata.len());
        match size {
            Ok(size) if size == part.size => {}
            Ok(size) => {
                return Err(damaged(dir, &record.id, format!("{name} has {size} bytes instead of {}", part.size)));
            }
            Err(error) => return Err(damaged(dir, &record.id, format!("{name}: {error}"))),
        }
    }
    Ok(GuestKit {
        kernel: kit.join(if record.vmlinux.is_some() { VMLINUX } else { KERNEL }),
        shipped_kernel: kit.join(KERNEL),
        initramfs: kit.join(INITRAMFS),
        id: record.id,
        kernel_version: record.kernel_version,
        cmdline: record.cmdline,
        modules: record.modules.into_iter().map(|module| module.name).collect(),
        origin: record.origin,
    })
}

/// Ids come from snapshot records and command lines too: they must not reach outside `dir`.
fn kit_dir(dir: &Path, id: &str) -> Result<PathBuf, KitError> {
    let plain = id.len() == ID_LENGTH && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    match plain {
        true => Ok(dir.join(id)),
        false => Err(KitError::NotFound { id: id.to_owned(), dir: dir.to_owned() }),
    }
}

fn damaged(dir: &Path, id: &str, why: String) -> KitError {
    KitError::Damaged { id: id.to_owned(), dir: dir.join(id), why }
}
