//! `test`: everything that CI runs, on a machine that may have nothing yet.
//!
//! A step that fails does not keep the others from running: one run tells all there is to repair. The last line is the
//! sum of it all.

pub(crate) mod tally;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::artifacts::{self, Artifacts, Profile};
use crate::node::Home;
use crate::sh::{Run, say};
use crate::{check, e2e, sdk, setup};
use tally::Tally;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only what needs neither root nor a virtual machine.
    #[arg(long)]
    unit: bool,
}

/// The exit code says whether all went well; nothing is printed after the sum.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let mut steps = Steps::default();
    steps.add("crate arrows", || Ok(Tally::of_step(told(check::structure()))));
    steps.add("format", || Ok(Tally::of_step(told(check::format()))));
    if !args.unit {
        setup::machine()?;
    }
    steps.add("clippy", || Ok(Tally::of_step(told(check::clippy()))));
    steps.add("unit and property tests", unit);
    if !args.unit {
        match setup::everything(Profile::Dev) {
            Ok((artifacts, image)) => {
                steps.add("VMM driver conformance", || vmm_drivers(&artifacts));
                steps.add("end-to-end tests", || e2e::suite(&artifacts, &image, None));
                steps.add("SDK suites", || sdk::suites(&artifacts, &image));
            }
            Err(error) => steps.add("preparing the end-to-end tests", || Err(error)),
        }
    }
    Ok(steps.finish())
}

fn unit() -> Result<Tally> {
    let cargo = Run::cargo()
        .args(["test", "--quiet", "--workspace", "--exclude", "aenv-e2e", "--exclude", "aenv-vmm-qemu"])
        .args(["--no-fail-fast", "--", "--show-output"])
        .env("PATH", setup::tool_path()?);
    tally::of_cargo_test(cargo)
}

/// The driver suites boot the very kernel and initramfs that sandboxes get.
fn vmm_drivers(artifacts: &Artifacts) -> Result<Tally> {
    let kit = artifacts::provision(artifacts, &Home::named("vmm", artifacts)?)?;
    let cargo = Run::cargo()
        .args(["test", "--quiet", "-p", "aenv-vmm-qemu", "--no-fail-fast", "--", "--show-output", "--test-threads=2"])
        .env("AENV_TEST_KERNEL", kit.join("vmlinux"))
        .env("AENV_TEST_INITRAMFS", kit.join("initramfs"));
    tally::of_cargo_test(cargo)
}

/// Whether a check went well; if not, what it said is printed.
fn told(outcome: Result<()>) -> bool {
    outcome.inspect_err(|error| eprintln!("{error:#}")).is_ok()
}

/// What ran, how it went and how long it took.
#[derive(Default)]
struct Steps(Vec<(&'static str, Tally, Duration)>);

impl Steps {
    fn add(&mut self, name: &'static str, step: impl FnOnce() -> Result<Tally>) {
        say(name);
        let start = Instant::now();
        let tally = step().unwrap_or_else(|error| {
            eprintln!("{error:#}");
            Tally::of_step(false)
        });
        self.0.push((name, tally, start.elapsed()));
    }

    /// Prints the sum; its line is the last one.
    fn finish(self) -> ExitCode {
        let mut sum = Tally::default();
        println!();
        for (name, tally, took) in &self.0 {
            println!("{:<32}{:>6.0} s   {tally}", name, took.as_secs_f64());
            sum += *tally;
        }
        if sum.failed > 0 {
            let failed: Vec<&str> =
                self.0.iter().filter(|(_, tally, _)| tally.failed > 0).map(|(name, ..)| *name).collect();
            println!("failed: {}", failed.join(", "));
        }
        println!("{sum}");
        // A run in which nothing was tested proves nothing.
        if sum.failed > 0 || sum.passed == 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }
}
