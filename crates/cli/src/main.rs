//! `aenv`, the command line of AgentENV: a client of the node server's HTTP API and, through it, of the agent in each
//! sandbox.
//!
//! The folders: `commands` has one file a command, `guest` speaks to the agent in a sandbox, `attach` is an interactive
//! session, `transfer` copies files, `dockerfile` makes steps of a Dockerfile. What a command prints for programs goes
//! to standard output, what it says to people while it works to standard error.

#![forbid(unsafe_code)]

mod args;
mod attach;
mod build;
mod commands;
mod complete;
mod credentials;
mod dockerfile;
mod forward;
mod guest;
mod output;
mod progress;
mod report;
mod signals;
mod stdin;
mod terminal;
mod transfer;

use std::process::ExitCode;

use clap::CommandFactory as _;
use clap_complete::CompleteEnv;

fn main() -> ExitCode {
    // A shell that asks for candidates has its answer here, and the process ends.
    CompleteEnv::with_factory(args::Arguments::command).complete();
    let arguments = args::Arguments::read();
    // Two workers: a command waits for the network most of its time.
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report::failure(&anyhow::Error::new(error).context("start the runtime")),
    };
    let result = runtime.block_on(commands::run(arguments));
    // A write that a stopped terminal does not take must not keep the process.
    runtime.shutdown_background();
    result.unwrap_or_else(|error| report::failure(&error))
}
