//! `aenv-image`: for people with a layer file in their hands.
//!
//! One file a verb. `input` opens what is read, `output` puts what is written in place, whole or not at all; `packing` wraps
//! a layer while it is written. Nothing here needs a running node.
//!
//! Results go to standard output. Bad input ends in exit code 1 and one line on standard error that says which file, where
//! in it, and what is wrong.

#![forbid(unsafe_code)]

mod args;
mod commit;
mod compact;
mod config;
mod convert;
mod describe;
mod export;
mod input;
mod inspect;
mod output;
mod packing;
mod progress;
mod report;
mod verify;

use std::process::ExitCode;

use args::{Arguments, Verb};

fn main() -> ExitCode {
    let arguments = Arguments::from_command_line();
    report::warnings_to_stderr();
    let result = match arguments.verb {
        Verb::Inspect(args) => inspect::run(&args),
        Verb::Verify(args) => verify::run(&args),
        Verb::Export(args) => export::run(&args),
        Verb::Commit(args) => commit::run(&args),
        Verb::Compact(args) => compact::run(&args),
        Verb::Convert(args) => convert::run(&args),
        Verb::ServeConversion(args) => convert::be_the_daemon(&args),
    };
    result.unwrap_or_else(|error| report::failure(&error))
}
