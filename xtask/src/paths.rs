//! Where things are: the sources, cargo's target directory, and what xtask keeps between runs.

use std::env;
use std::path::{Path, PathBuf};

/// Root of the workspace, from where this crate was compiled.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Cargo's target directory: `CARGO_TARGET_DIR` as cargo itself reads it, else `target/`.
pub(crate) fn target() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Everything xtask makes and keeps: images, virtual environments, tools, homes of the servers it starts.
/// Removing it costs time on the next run and nothing else.
pub(crate) fn kept() -> PathBuf {
    target().join("xtask")
}

/// Where `cargo build` of the dev profile leaves the program `name`.
pub(crate) fn dev_binary(name: &str) -> PathBuf {
    target().join("debug").join(name)
}

/// Where `cargo build --release` leaves the program `name`.
pub(crate) fn release_binary(name: &str) -> PathBuf {
    target().join("release").join(name)
}

/// The first file called `name` in `PATH` or in the `sbin` folders, which an ordinary user's `PATH` lacks.
pub(crate) fn which(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|candidate| candidate.is_file())
}
