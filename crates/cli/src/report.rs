//! How a command's failure is told.

use std::error::Error;
use std::io;
use std::process::ExitCode;

use crate::output::shown;

/// Exit code of a process that SIGPIPE ended, as shells report it.
const BROKEN_PIPE: u8 = 128 + 13;

/// Prints the chain of `error` to standard error and gives the exit code, 1.
///
/// When the reader of our output has gone, as in `aenv list | head -1`, there is nobody to tell, and the code is what
/// the signal would have made it.
pub(crate) fn failure(error: &anyhow::Error) -> ExitCode {
    let broken_pipe = |cause: &(dyn Error + 'static)| {
        cause.downcast_ref().is_some_and(|e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe)
    };
    if error.downcast_ref::<crate::output::OutputError>().is_some() && error.chain().any(broken_pipe) {
        return ExitCode::from(BROKEN_PIPE);
    }
    // A server or a guest may have had its say in it.
    let told: Vec<_> = chain(error).split('\n').map(shown).collect();
    eprintln!("error: {}", told.join("\n"));
    ExitCode::FAILURE
}

/// The messages from the outermost to the innermost cause, in one line.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut in_http = false;
    let mut causes = error.chain().peekable();
    while let Some(cause) = causes.next() {
        // Of what the HTTP stack says, only the last link tells a person something ("connection refused").
        in_http |= cause.is::<reqwest::Error>();
        if in_http && causes.peek().is_some() {
            continue;
        }
        let text = cause.to_string();
        if parts.last().is_none_or(|outer| !outer.contains(&text)) {
            parts.push(text);
        }
    }
    parts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_follow_each_other_and_are_said_once() {
        let error =
            anyhow::Error::new(io::Error::other("disk on fire")).context("write x: disk on fire").context("save");
        assert_eq!(chain(&error), "save: write x: disk on fire");
    }
}
