//! The system packages we use, each with the reason and the thing that shows it is there.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use super::distro::{Distro, Family};
use crate::paths;
use crate::sh::{Run, can_sudo, is_root, say};

/// What shows that a package is not needed. Things are looked for rather than packages: a QEMU built by hand will do.
enum Seen {
    Program(&'static str),
    File(&'static str),
    /// Python can make virtual environments (Debian splits this part off).
    PythonVenv,
}

struct Package {
    name: &'static str,
    why: &'static str,
    seen: Seen,
    only: Option<Family>,
}

const fn package(name: &'static str, seen: Seen, why: &'static str) -> Package {
    Package { name, why, seen, only: None }
}

const PACKAGES: &[Package] = &[
    package("gcc", Seen::Program("cc"), "links Rust programs and compiles the C parts of two dependencies"),
    package("libc6-dev", Seen::File("/usr/include/stdlib.h"), "headers and start files for the same"),
    package("ca-certificates", Seen::File("/etc/ssl/certs/ca-certificates.crt"), "TLS to image registries"),
    package("qemu-system-x86", Seen::Program("qemu-system-x86_64"), "the VMM that every sandbox runs in"),
    package("e2fsprogs", Seen::Program("mke2fs"), "makes the ext4 root filesystems of images"),
    package("busybox-static", Seen::File("/bin/busybox"), "the only program in the smallest image that tests boot"),
    package("mmdebstrap", Seen::Program("mmdebstrap"), "builds the first image without any registry"),
    package("python3", Seen::Program("python3"), "runs the E2B Python SDK in the demo and the SDK suite"),
    package("python3-venv", Seen::PythonVenv, "keeps that SDK in a virtual environment of its own"),
    Package {
        name: "debian-archive-keyring",
        why: "checks the signatures of the Debian packages in the first image and of the guest kernel",
        seen: Seen::File("/usr/share/keyrings/debian-archive-keyring.gpg"),
        only: Some(Family::Ubuntu),
    },
];

impl Package {
    fn is_missing(&self, distro: &Distro) -> bool {
        if self.only.is_some_and(|family| family != distro.family) {
            return false;
        }
        match self.seen {
            Seen::Program(program) => paths::which(program).is_none(),
            Seen::File(path) => !Path::new(path).exists(),
            Seen::PythonVenv => !Run::new("python3").args(["-c", "import venv, ensurepip"]).probe(),
        }
    }
}

fn missing(distro: &Distro) -> Vec<&'static Package> {
    PACKAGES.iter().filter(|package| package.is_missing(distro)).collect()
}

/// One line for each missing package, for `setup --dry-run`.
pub(super) fn report(distro: &Distro) -> Vec<String> {
    let missing = missing(distro);
    if missing.is_empty() {
        return vec![format!("packages: all there ({})", distro.name)];
    }
    missing.iter().map(|package| format!("missing: {} - {}", package.name, package.why)).collect()
}

/// Installs what is missing.
///
/// Errors: neither root nor passwordless sudo; then the message holds the line to run.
pub(super) fn ensure(distro: &Distro) -> Result<()> {
    let missing = missing(distro);
    if missing.is_empty() {
        return Ok(());
    }
    say(format_args!("{}: {} system package(s) are missing", distro.name, missing.len()));
    for package in &missing {
        eprintln!("    {:<24}{}", package.name, package.why);
    }
    let names: Vec<&str> = missing.iter().map(|package| package.name).collect();
    if !is_root() && !can_sudo() {
        bail!(
            "installing packages needs root, and sudo asks for a password here. Run this, then try again:\n    \
             sudo apt-get update && sudo apt-get install -y --no-install-recommends {}",
            names.join(" ")
        );
    }
    install(&names)?;
    if let Some(package) = PACKAGES.iter().find(|package| names.contains(&package.name) && package.is_missing(distro)) {
        bail!("{} was installed but what it should bring is still not found ({})", package.name, package.why);
    }
    Ok(())
}

/// `apt-get update` costs seconds and network, so it runs only if apt knows no candidate or the install fails
/// (package lists older than the mirror).
fn install(names: &[&str]) -> Result<()> {
    let unknown = names.iter().any(|name| !has_candidate(name));
    if unknown {
        update()?;
        if let Some(name) = names.iter().find(|name| !has_candidate(name)) {
            bail!("apt knows no package {name}: is the distribution's `main` (Ubuntu: also `universe`) enabled?");
        }
    }
    if apt_install(names).succeeds() {
        return Ok(());
    }
    if !unknown {
        update()?;
    }
    apt_install(names).run()
}

fn apt_install(names: &[&str]) -> Run {
    Run::as_root("env")
        .args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-qq", "--no-install-recommends"])
        // Without a terminal of its own dpkg spares us its progress bars.
        .args(["-o", "Dpkg::Use-Pty=0"])
        .args(names)
}

pub(super) fn update() -> Result<()> {
    Run::as_root("apt-get").args(["update", "-qq"]).run()
}

/// Whether apt could install `name` from the package lists it has.
pub(super) fn has_candidate(name: &str) -> bool {
    // Not through `Run`: a missing package is an answer here, and apt-cache says it on stderr.
    Command::new("apt-cache")
        .args(["show", "--no-all-versions", name])
        .output()
        .is_ok_and(|output| output.status.success() && !output.stdout.is_empty())
}
