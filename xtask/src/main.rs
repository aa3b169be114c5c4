//! The one door to this repository: everything a person or CI does here is a `cargo xtask` command.
//!
//! A command prepares what it needs by itself (`setup` is idempotent and quick when there is nothing to do), so that
//! `cargo xtask demo` and `cargo xtask test` work on a fresh machine without another keystroke.

#![forbid(unsafe_code)]

mod artifacts;
mod bench;
mod check;
mod debs;
mod demo;
mod e2e;
mod image;
mod node;
mod paths;
mod python;
mod sdk;
mod setup;
mod sh;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "The one door: set up, check, test, measure and show AgentENV")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Bring a fresh machine to green: system packages, guest agent, guest kernel, first image.
    Setup(setup::Args),
    /// Format, clippy, documentation, crate arrows, licences and advisories.
    Check(check::Args),
    /// Set up, then everything CI runs: format, clippy, unit and property tests, end-to-end tests, SDK suites.
    Test(test::Args),
    /// End-to-end tests only, optionally those whose name contains FILTER.
    E2e(e2e::Args),
    /// The official E2B SDKs, unmodified, against a real server.
    Sdk(sdk::Args),
    /// Measure boots, execs or layered storage.
    Bench(bench::Args),
    /// Run the main job through the official E2B SDK and print what each step took.
    Demo(demo::Args),
    /// Build the first image (a small Debian with python3) as an OCI layout folder and print its path.
    Image(image::Args),
}

fn main() -> ExitCode {
    let done = |()| ExitCode::SUCCESS;
    let outcome = match Args::parse().command {
        Command::Setup(args) => setup::run(&args).map(done),
        Command::Check(args) => check::run(&args).map(done),
        Command::Test(args) => test::run(&args),
        Command::E2e(args) => e2e::run(&args).map(done),
        Command::Sdk(args) => sdk::run(&args).map(done),
        Command::Bench(args) => bench::run(&args).map(done),
        Command::Demo(args) => demo::run(&args).map(done),
        Command::Image(args) => image::run(&args).map(done),
    };
    match outcome {
        Ok(ended) => ended,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
