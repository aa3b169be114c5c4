//! `setup`: from a fresh Debian 12/13 or Ubuntu 24.04 machine to one on which every other command works.
//!
//! Idempotent. Each step looks first, says what is missing and why it is wanted, and only then installs it. What it
//! cannot do itself (no root and no sudo, another distribution) it names exactly, with the line that would do it.

mod distro;
mod host;
mod packages;
mod rust;
mod unpacked;

pub(crate) use unpacked::{program, tool_path};

use std::path::PathBuf;

use anyhow::Result;

use crate::artifacts::{self, Artifacts, Profile};
use crate::image;
use crate::node::Home;
use crate::sh::say;
use distro::Distro;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only say what is missing; install and build nothing.
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.dry_run {
        let distro = Distro::detect()?;
        for line in packages::report(&distro) {
            println!("{line}");
        }
        for line in host::report() {
            println!("{line}");
        }
        return Ok(());
    }
    let (artifacts, image) = everything(Profile::Release)?;
    artifacts::provision(&artifacts, &Home::named("demo", &artifacts)?)?;
    say(format_args!("ready: first image {}, guest agent {}", image.display(), artifacts.agent.display()));
    Ok(())
}

/// System packages, tools and kernel features; nothing of ours is built.
pub(crate) fn machine() -> Result<()> {
    let distro = Distro::detect()?;
    rust::ensure()?;
    packages::ensure(&distro)?;
    host::ensure()?;
    unpacked::registry()
}

/// All that a command needs which starts servers: the machine, our programs and the first image.
pub(crate) fn everything(profile: Profile) -> Result<(Artifacts, PathBuf)> {
    machine()?;
    let image = image::ensure()?;
    Ok((artifacts::build(profile)?, image))
}
