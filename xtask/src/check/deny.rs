//! Licences, sources, banned and doubled crates, and known vulnerabilities, by cargo-deny and `deny.toml`.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::paths;
use crate::sh::{Run, say};

/// Installed when the machine has none. Built from source, as registries carry no program of it: some minutes, once.
const VERSION: &str = "0.20.2";

pub(super) fn check() -> Result<()> {
    let deny = tool()?;
    let run = |checks: &[&str]| Run::new(&deny).args(["check", "--hide-inclusion-graph"]).args(checks);
    run(&["licenses", "bans", "sources"]).run()?;

    // The database is a git repository elsewhere. Not reaching it is no finding; it must only not pass in silence.
    if !Run::new(&deny).args(["fetch", "db"]).succeeds() {
        say("advisories: SKIPPED, the advisory database cannot be reached from here");
        return Ok(());
    }
    if !run(&["advisories"]).succeeds() {
        bail!("a dependency has a known advisory; see above");
    }
    Ok(())
}

fn tool() -> Result<PathBuf> {
    if let Some(found) = paths::which("cargo-deny") {
        return Ok(found);
    }
    let root = paths::kept().join("tools");
    let installed = root.join("bin/cargo-deny");
    if !installed.is_file() {
        say(format_args!("installing cargo-deny {VERSION} into {}: it reads deny.toml", root.display()));
        Run::cargo()
            .args(["install", "--locked", "--quiet", "cargo-deny", "--version", VERSION, "--root"])
            .arg(&root)
            .run()?;
    }
    Ok(installed)
}
