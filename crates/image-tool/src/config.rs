//! Image configs: files that say what a device is made of.

use std::path::{Path, PathBuf};

use aenv_block_client::{DeviceConfig, Lower};
use anyhow::{Context as _, Result, bail};

use crate::input::{self, Opened};

/// What a lower's directory may hold, the first that is there.
const IN_DIRECTORY: [&str; 2] = ["overlaybd.commit", "overlaybd.sealed"];

/// Reads the config at `path`; paths in it are from its directory.
pub(crate) fn load(path: &Path) -> Result<DeviceConfig> {
    DeviceConfig::load(path).with_context(|| path.display().to_string())
}

/// Opens all that the config at `path` names.
pub(crate) fn open(path: &Path) -> Result<Opened> {
    let config = load(path)?;
    let mut lowers = Vec::new();
    for (number, lower) in config.layers().iter().enumerate() {
        let Some(file) = local(lower) else {
            let blob = lower.digest.as_deref().unwrap_or("it has no digest");
            bail!("{}: lowers[{number}] is not on this machine ({blob})", path.display());
        };
        lowers.push(input::layer(&file)?);
    }
    let upper = config.upper.as_ref().map(|upper| input::upper(&upper.data, upper.index.as_deref())).transpose()?;
    Ok(Opened { lowers, upper })
}

/// The file of a lower, if it is on this machine.
pub(crate) fn local(lower: &Lower) -> Option<PathBuf> {
    if let Some(file) = &lower.file {
        return Some(file.clone()); // whether it exists, opening tells better
    }
    let dir = lower.dir.as_deref()?;
    IN_DIRECTORY.iter().map(|name| dir.join(name)).find(|path| path.exists())
}

/// Whether the file at `path` may be one: JSON begins with a brace.
pub(crate) fn is_config(path: &Path) -> Result<bool> {
    let source = input::file(path)?;
    let mut begin = [0; 64];
    let begin = &mut begin[..source.size().min(64) as usize];
    source.read_at(0, begin).with_context(|| format!("read {}", path.display()))?;
    Ok(begin.trim_ascii_start().starts_with(b"{"))
}
