//! A guest kernel on its way into a kit: from packages, from configured files, or from a kit that has it already.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::apt::Package;
use crate::kernel_image::{self, KernelImage};
use crate::module::Module;
use crate::module_set::{ModuleSet, ModuleTree};
use crate::{KitError, deb};

/// Where a kernel came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Origin {
    /// The distribution's packages.
    Packages {
        /// The suite they were taken from.
        suite: String,
        /// All files that the kernel was put together from.
        packages: Vec<OriginPackage>,
    },
    /// Files named in the configuration.
    Files {
        /// The kernel image.
        image: PathBuf,
        /// Its modules; `None`: the kernel is taken to have all it needs built in.
        modules: Option<PathBuf>,
    },
}

/// One package file that a kernel came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OriginPackage {
    /// Package name: `linux-image-6.12.95+deb12-cloud-amd64`.
    pub name: String,
    /// Package version: `6.12.95-1~bpo12+1`.
    pub version: String,
    /// Checksum of the `.deb`, lower-case hex.
    pub sha256: String,
}

impl From<&Package> for OriginPackage {
    fn from(package: &Package) -> Self {
        Self { name: package.name.clone(), version: package.version.clone(), sha256: package.sha256.clone() }
    }
}

/// All of a guest kernel.
#[derive(Debug)]
pub(crate) struct GuestKernel {
    pub(crate) origin: Origin,
    pub(crate) release: String,
    /// The image as shipped.
    pub(crate) image: Vec<u8>,
    /// The uncompressed kernel, if VMMs can start it by PVH.
    pub(crate) elf: Option<Vec<u8>>,
    pub(crate) modules: ModuleSet,
}

impl GuestKernel {
    /// Unpacks kernel packages below `scratch`, an existing directory that is the caller's to remove.
    pub(crate) fn from_packages(origin: Origin, packages: &[PathBuf], scratch: &Path) -> Result<Self, KitError> {
        for package in packages {
            deb::unpack_kernel(package, scratch)?;
        }
        let lacks =
            |why: &str| KitError::Package { path: packages.first().cloned().unwrap_or_default(), why: why.to_owned() };
        let image = only_entry(&scratch.join("boot")).ok_or_else(|| lacks("holds no boot/vmlinuz-*"))?;
        let modules = only_entry(&scratch.join("lib/modules")).ok_or_else(|| lacks("holds no lib/modules/*"))?;
        Self::from_files(origin, &image, Some(&modules))
    }

    /// Reads a kernel image and its modules directory.
    pub(crate) fn from_files(origin: Origin, image: &Path, modules: Option<&Path>) -> Result<Self, KitError> {
        let bytes = read_image(image)?;
        let KernelImage { release, elf, pvh } = understand(image, &bytes)?;
        let modules = match modules {
            Some(dir) => ModuleTree::open(dir)?.guest_modules(&release)?,
            None => ModuleSet::default(),
        };
        Ok(Self { origin, release, image: bytes, elf: elf.filter(|_| pvh), modules })
    }
}

/// The modules directory of a configured kernel: the configured one, else where the distribution puts it.
pub(crate) fn modules_of(image: &Path, configured: Option<&Path>) -> Result<Option<PathBuf>, KitError> {
    if let Some(dir) = configured {
        return Ok(Some(dir.to_owned()));
    }
    let release = understand(image, &read_image(image)?)?.release;
    let places = ["/lib/modules", "/usr/lib/modules"];
    Ok(places.iter().map(|place| Path::new(place).join(&release)).find(|dir| dir.join("kernel").is_dir()))
}

fn read_image(path: &Path) -> Result<Vec<u8>, KitError> {
    let refused = |why: String| KitError::KernelImage { path: path.to_owned(), why };
    match fs::read(path) {
        Ok(bytes) if bytes.is_empty() => Err(refused("is empty".to_owned())),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(refused(format!("cannot be read: {error}"))),
    }
}

fn understand(path: &Path, bytes: &[u8]) -> Result<KernelImage, KitError> {
    kernel_image::understand(bytes).map_err(|why| KitError::KernelImage { path: path.to_owned(), why })
}

/// The first entry of a directory in which packages leave exactly one.
fn only_entry(dir: &Path) -> Option<PathBuf> {
    let mut entries: Vec<_> = fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries.into_iter().next()
}

/// The modules of a kit, as [`crate::store`] wrote them.
pub(crate) fn read_modules(dir: &Path, names: &[String]) -> Result<Vec<(String, Module)>, KitError> {
    let read = |(index, name): (usize, &String)| {
        let path = dir.join(module_file(index, name));
        let content = fs::read(&path).map_err(KitError::io("read", &path))?;
        Ok((name.clone(), Module { content, depends: Vec::new(), prefers: Vec::new(), release: None }))
    };
    names.iter().enumerate().map(read).collect()
}

/// How the module at `index` of the load order is called in a kit.
pub(crate) fn module_file(index: usize, name: &str) -> String {
    format!("{index:03}-{name}.ko")
}
