//! What can go wrong on the way to a kit, said to the person who can put it right.

use std::io;
use std::path::{Path, PathBuf};

/// Why there is no guest kit. Texts name the missing thing and, where there is one, the command that brings it.
#[derive(Debug, thiserror::Error)]
pub enum KitError {
    /// The guest agent's binary is not there.
    #[error("guest agent {path} is missing; build it with `cargo xtask setup`")]
    AgentMissing { path: PathBuf },
    /// The guest agent cannot be PID 1 of an initramfs that holds nothing else.
    #[error("guest agent {path} {why}; build it static with `cargo xtask setup`")]
    AgentUnusable { path: PathBuf, why: String },
    /// We know no kernel package of this distribution.
    #[error(
        "no kernel package is known for {distribution}; set [kernel] image_path (and modules_dir) to a kernel of your own"
    )]
    UnknownDistribution { distribution: String },
    /// The host has no apt.
    #[error(
        "`{program}` is not installed, so no kernel package can be fetched; set [kernel] image_path to a kernel of your own"
    )]
    NoApt { program: &'static str },
    /// apt was asked and failed, or took too long.
    #[error("`{command}` failed: {detail}")]
    Apt { command: String, detail: String },
    /// Every place that could have the kernel package was asked in vain.
    #[error("no guest kernel could be fetched:\n{}\ncheck that the mirror answers (`apt-get update`), or set [kernel] image_path", listed(.tried))]
    NoKernelPackage { tried: Vec<(String, String)> },
    /// A downloaded file is not what the signed index says it is.
    #[error("{path} has sha256 {found}, the archive's index says {expected}")]
    Checksum { path: PathBuf, expected: String, found: String },
    /// A package cannot be read, or lacks what it should hold.
    #[error("kernel package {path} {why}")]
    Package { path: PathBuf, why: String },
    /// A kernel image that is not one.
    #[error("kernel image {path} {why}")]
    KernelImage { path: PathBuf, why: String },
    /// A configured modules directory that is not one.
    #[error("kernel modules directory {path} {why}")]
    ModulesDir { path: PathBuf, why: String },
    /// A module without which no guest boots is neither a file nor built in.
    #[error(
        "kernel {kernel_version} has no module {name}, neither built in nor below {dir}; guests cannot boot without it"
    )]
    ModuleMissing { name: String, kernel_version: String, dir: PathBuf },
    /// A module that cannot be read as one.
    #[error("kernel module {path} {why}")]
    Module { path: PathBuf, why: String },
    /// No kit of that id.
    #[error("guest kit {id} is not in {dir}; `cargo xtask setup` provides the current one")]
    NotFound { id: String, dir: PathBuf },
    /// A kit that is not what its record says.
    #[error("guest kit {id} is damaged: {why}; remove {dir} to have it made again")]
    Damaged { id: String, dir: PathBuf, why: String },
    /// A file operation failed.
    #[error("{action} {path}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    /// Work handed to a thread did not come back.
    #[error("work on the guest kit was cut short")]
    Interrupted { source: tokio::task::JoinError },
}

impl KitError {
    /// For `map_err`: an I/O error while doing `action` to `path`.
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.as_ref().to_owned(), source }
    }
}

fn listed(tried: &[(String, String)]) -> String {
    tried.iter().map(|(place, why)| format!("  {place}: {why}")).collect::<Vec<_>>().join("\n")
}
