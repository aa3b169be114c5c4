//! `check`: what a reviewer should not have to look for.

mod arrows;
mod deny;
mod lints;

use anyhow::{Result, bail};

use crate::sh::{Run, say};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only the crate arrows and the lint habits (a second; no compiler).
    #[arg(long)]
    arrows: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut failed = Vec::new();
    let mut step = |name: &'static str, outcome: Result<()>| match outcome {
        Ok(()) => say(format_args!("{name}: ok")),
        Err(error) => {
            eprintln!("{error:#}");
            failed.push(name);
        }
    };
    step("crate arrows", structure());
    if !args.arrows {
        step("format", format());
        step("clippy", clippy());
        step("documentation", docs());
        step("licences and advisories", deny::check());
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// The layering of the crates, and the habits of each manifest and crate root.
pub(crate) fn structure() -> Result<()> {
    let crates = arrows::read()?;
    let mut problems = arrows::problems(&crates);
    problems.extend(lints::problems(&crates)?);
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    Ok(())
}

pub(crate) fn format() -> Result<()> {
    Run::cargo().args(["fmt", "--all", "--check"]).run()
}

pub(crate) fn clippy() -> Result<()> {
    Run::cargo().args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]).run()
}

fn docs() -> Result<()> {
    Run::cargo()
        .args(["doc", "--quiet", "--workspace", "--no-deps", "--document-private-items"])
        .env("RUSTDOCFLAGS", "-D warnings")
        .run()
}
