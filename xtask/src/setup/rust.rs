//! The Rust toolchain: it built us, so it is there; its extra parts may not be.

use anyhow::{Result, bail};

use crate::sh::Run;

pub(super) fn ensure() -> Result<()> {
    let absent: Vec<&str> = [("rustfmt", "fmt"), ("clippy", "clippy")]
        .into_iter()
        .filter(|(_, subcommand)| !Run::cargo().args([subcommand, "--version"]).probe())
        .map(|(component, _)| component)
        .collect();
    if absent.is_empty() {
        return Ok(());
    }
    let added = Run::new("rustup").args(["component", "add"]).args(&absent);
    let line = added.to_string();
    if !added.succeeds() {
        bail!("the Rust toolchain lacks {}; this should bring it: {line}", absent.join(" and "));
    }
    Ok(())
}
