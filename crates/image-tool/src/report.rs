//! What is told besides results: failures, and warnings of the storage crates.

use std::error::Error;
use std::io::{self, Write as _};
use std::process::ExitCode;

use serde::Serialize;
use tracing_subscriber::filter::LevelFilter;

/// Exit code of a process that SIGPIPE ended, as shells report it.
const BROKEN_PIPE: u8 = 128 + 13;

/// Standard output could not be written.
#[derive(Debug, thiserror::Error)]
#[error("write to standard output")]
struct OutputError(#[source] io::Error);

/// Prints `text` and a newline.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    Ok(writeln!(out, "{text}").and_then(|()| out.flush()).map_err(OutputError)?)
}

/// Prints `value` as JSON in one line.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&serde_json::to_string(value)?)
}

/// Prints the chain of `error` in one line to standard error, and gives the exit code.
///
/// When the reader of our output has gone, there is nobody to tell, and the code is what the signal would have made it.
pub(crate) fn failure(error: &anyhow::Error) -> ExitCode {
    let broken_pipe = |cause: &(dyn Error + 'static)| {
        cause.downcast_ref().is_some_and(|error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    if error.is::<OutputError>() && error.chain().any(broken_pipe) {
        return ExitCode::from(BROKEN_PIPE);
    }
    eprintln!("error: {}", line(error));
    ExitCode::FAILURE
}

/// The messages from the outermost to the innermost cause, each once, in one line whatever is in a file's name.
pub(crate) fn line(error: &anyhow::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if parts.last().is_none_or(|outer| !outer.contains(&text)) {
            parts.push(text);
        }
    }
    printable(&parts.join(": "))
}

/// Control characters as Rust writes them.
fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// What the storage crates warn of goes to standard error, without times and targets.
pub(crate) fn warnings_to_stderr() {
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_max_level(LevelFilter::WARN)
        .without_time()
        .with_target(false)
        .with_ansi(false)
        .init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_and_says_nothing_twice() {
        let error =
            anyhow::Error::new(io::Error::other("disk\non fire")).context("a\tb: disk\non fire").context("save");
        assert_eq!(line(&error), r"save: a\tb: disk\non fire");
    }
}
