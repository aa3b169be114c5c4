//! `e2e [filter]`: the Rust end-to-end suite against real servers and guests.

use std::path::Path;

use anyhow::{Result, bail};

use crate::artifacts::{Artifacts, Profile};
use crate::setup;
use crate::sh::{Run, is_root, say};
use crate::test::tally::{self, Tally};

/// What the harness reads, and sudo would drop.
const HARNESS_VARS: &[&str] =
    &["PATH", "AENV_E2E_IMAGE", "AENV_E2E_AGENT", "AENV_E2E_SERVER", "AENV_E2E_CLI", "RUST_LOG", "RUST_BACKTRACE"];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only tests whose name contains this.
    filter: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let (artifacts, image) = setup::everything(Profile::Dev)?;
    let tally = suite(&artifacts, &image, args.filter.as_deref())?;
    println!("{tally}");
    if tally.failed > 0 {
        bail!("{} end-to-end test(s) failed", tally.failed);
    }
    Ok(())
}

/// Runs the suite; tests run one at a time, as each compares the whole machine before and after itself.
pub(crate) fn suite(artifacts: &Artifacts, image: &Path, filter: Option<&str>) -> Result<Tally> {
    say("end-to-end tests");
    let mut cargo = Run::cargo()
        .args(["test", "--quiet", "-p", "aenv-e2e", "--no-fail-fast", "--"])
        .args(["--show-output", "--test-threads=1"])
        .args(filter)
        .env("PATH", setup::tool_path()?)
        .env("AENV_E2E_IMAGE", image)
        .env("AENV_E2E_AGENT", &artifacts.agent)
        .env("AENV_E2E_SERVER", &artifacts.server)
        .env("AENV_E2E_CLI", &artifacts.cli);
    if !is_root() {
        // Built as ourselves, run as root.
        let runner = format!("sudo -n --preserve-env={}", HARNESS_VARS.join(","));
        cargo = cargo.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", runner);
    }
    tally::of_cargo_test(cargo)
}
