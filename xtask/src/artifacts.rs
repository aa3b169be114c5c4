//! Our own programs, built the way the machine needs them: the guest agent static and small, the others as asked.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::node::Home;
use crate::paths;
use crate::sh::{Run, say};

/// The agent is part of every initramfs and stays in every guest's memory.
const AGENT_MAX_BYTES: u64 = 8 << 20;
const AGENT_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Programs that belong together because they were built from the same sources.
#[derive(Debug, Clone)]
pub(crate) struct Artifacts {
    pub(crate) agent: PathBuf,
    pub(crate) server: PathBuf,
    pub(crate) cli: PathBuf,
}

/// How server and CLI are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// Quick to build; what tests use.
    Dev,
    /// What users run; measurements mean nothing otherwise.
    Release,
}

/// Builds guest agent, server with its storage daemon (which it looks for beside itself), and CLI.
pub(crate) fn build(profile: Profile) -> Result<Artifacts> {
    let agent = agent()?;
    say("building aenv-server, aenv-blockd and aenv");
    let cargo =
        Run::cargo().args(["build", "--quiet", "-p", "aenv-server", "-p", "aenv-blockd", "-p", "aenv-cli", "--bins"]);
    let (cargo, binary): (_, fn(&str) -> PathBuf) = match profile {
        Profile::Dev => (cargo, paths::dev_binary),
        Profile::Release => (cargo.arg("--release"), paths::release_binary),
    };
    cargo.run()?;
    Ok(Artifacts { agent, server: binary("aenv-server"), cli: binary("aenv") })
}

/// Builds the guest agent and puts it where it stays: `target/guest/aenv-guest`.
///
/// It has a target directory of its own: its flags differ from everything else's, and sharing one would make cargo
/// build the common dependencies anew at every change between the two.
pub(crate) fn agent() -> Result<PathBuf> {
    say("building the guest agent (static, for size)");
    let dir = paths::target().join("guest");
    Run::cargo()
        .args(["build", "--quiet", "--profile", "guest", "--target", AGENT_TARGET, "-p", "aenv-guest-agent"])
        .arg("--target-dir")
        .arg(&dir)
        // Static and at a fixed address: PID 1 of a machine without a loader has nobody to relocate it.
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static")
        .run()?;
    let built = dir.join(AGENT_TARGET).join("guest/aenv-guest");
    let agent = dir.join("aenv-guest");
    check_agent(&built)?;
    // Untouched when unchanged, so that nothing downstream believes in a new agent.
    if fs::read(&agent).ok() != Some(fs::read(&built).with_context(|| format!("read {}", built.display()))?) {
        let fresh = dir.join("aenv-guest.new");
        fs::copy(&built, &fresh).and_then(|_| fs::rename(&fresh, &agent)).context("put the guest agent in place")?;
    }
    Ok(agent)
}

/// Fetches the guest kernel and builds the initramfs around the agent (the server does both, into `home`'s guest
/// folder) so that the first start of a server does not spend its time on it. Returns the folder with both.
pub(crate) fn provision(artifacts: &Artifacts, home: &Home) -> Result<PathBuf> {
    say("providing the guest kernel and initramfs");
    let id = Run::as_root(&artifacts.server).arg("--config").arg(home.config()).arg("provision").read()?;
    Ok(home.kits().join(id.trim()))
}

fn check_agent(path: &Path) -> Result<()> {
    let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    if bytes.len() as u64 > AGENT_MAX_BYTES {
        bail!("{} has {} bytes, {AGENT_MAX_BYTES} are allowed", path.display(), bytes.len());
    }
    match has_interpreter(&bytes) {
        Some(false) => Ok(()),
        Some(true) => bail!("{} asks for a dynamic loader; no guest has one", path.display()),
        None => bail!("{} is not a little-endian ELF64 program", path.display()),
    }
}

/// Whether an ELF64 file has a `PT_INTERP` program header; `None` if it is no such file.
fn has_interpreter(elf: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    if elf.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let offset = u64::from_le_bytes(elf.get(32..40)?.try_into().ok()?) as usize;
    let size = u16::from_le_bytes(elf.get(54..56)?.try_into().ok()?) as usize;
    let count = u16::from_le_bytes(elf.get(56..58)?.try_into().ok()?) as usize;
    let mut found = false;
    for index in 0..count {
        let at = offset.checked_add(index * size)?;
        let kind = u32::from_le_bytes(elf.get(at..at.checked_add(4)?)?.try_into().ok()?);
        found |= kind == PT_INTERP;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_program_is_told_from_no_program_at_all() -> Result<()> {
        assert_eq!(has_interpreter(&fs::read(std::env::current_exe()?)?), Some(true));
        assert_eq!(has_interpreter(b"#!/bin/sh\n"), None);
        assert_eq!(has_interpreter(b"\x7fELF\x02\x01"), None);
        Ok(())
    }
}
