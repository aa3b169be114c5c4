//! An interactive session: this terminal becomes a shell's in a sandbox.
//!
//! ```text
//!  keyboard ─ keys (thread) ─ input ──────► StreamInput ┐
//!  size     ─ resize ─────────────────────► Update      ├─ agent, shell
//!  screen   ◄──────────── session ◄──────── Start       ┘
//!                            ▲
//!             watch: is the sandbox still there, keep it from expiring while somebody types
//! ```
//!
//! The session ends with the shell (or whatever program it is), with the sandbox, with contact to it, or with a signal
//! to us. The sandbox stays.

mod ending;
mod input;
mod session;
mod watch;

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use aenv_api::{Client, ConnectRequest, Sandbox};
use aenv_model::SandboxId;
use anyhow::{Context as _, bail};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::guest::{Channel, Guest, Program};
use crate::progress::StatusLine;
use crate::signals::Interruptions;
use crate::stdin;
use crate::terminal::{self, RawMode};
pub(crate) use ending::{Ending, OVERDUE};
use session::Session;
pub(crate) use watch::for_activity as keep_alive_while;

/// Seconds to live that a session ensures at its beginning and while somebody types.
const TIME_TO_LIVE: u32 = 300;
/// Longest wait for the agent of a sandbox that was just started or resumed.
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// Shells to look for, the best first.
const SHELLS: [&str; 2] = ["/bin/bash", "/bin/sh"];
/// Variables of ours that the shell gets, as far as they are set.
const HANDED_ON: [&str; 4] = ["COLORTERM", "LANG", "LC_ALL", "LC_CTYPE"];
/// What the terminal is called if the guest would not know its real name.
const FALLBACK_TERM: &str = "xterm-256color";
/// Terminals that a small image's terminfo knows.
const KNOWN_TERMS: [&str; 14] = [
    "ansi",
    "dumb",
    "linux",
    "rxvt",
    "rxvt-unicode",
    "screen",
    "screen-256color",
    "tmux",
    "tmux-256color",
    "vt100",
    "vt220",
    "xterm",
    "xterm-256color",
    "xterm-color",
];

/// Attaches to a sandbox that exists: resumes it if it is paused, and makes sure that it lives for a while.
pub(crate) async fn connect(client: &Client, sandbox: SandboxId) -> anyhow::Result<ExitCode> {
    let status = StatusLine::while_waiting(&format!("Connecting to sandbox {sandbox}"));
    let request = ConnectRequest { timeout: Some(TIME_TO_LIVE), memory: None };
    let sandbox = client.connect_sandbox(sandbox, &request).await?;
    drop(status);
    attach(client, &sandbox).await
}

/// Attaches to a sandbox that runs. Gives the session's exit code: the shell's, or one that tells how it was cut short.
///
/// Errors: the agent does not answer in time; the image has no shell; the shell does not start. From then on, whatever
/// happens is an ending, not an error, and the terminal is as it was.
pub(crate) async fn attach(client: &Client, sandbox: &Sandbox) -> anyhow::Result<ExitCode> {
    let id = sandbox.sandbox_id;
    let guest = Guest::new(client.server(), id, sandbox.envd_access_token.as_deref())?;
    let status = StatusLine::while_waiting(&format!("Waiting for the agent of sandbox {id}"));
    guest.wait_ready(READY_TIMEOUT).await?;
    let shell = find_shell(&guest, id).await?;
    drop(status);

    let program = Program {
        command: shell.to_owned(),
        arguments: Vec::new(),
        environment: own_environment(),
        directory: None,
        user: None,
        limit: None,
        channel: Channel::Terminal(terminal::size()),
    };
    let ending = interact(client, guest, id, program, true).await?;
    ending.tell(id);
    Ok(ExitCode::from(ending.code()))
}

/// Runs a program that has a terminal, which is this one until it ends, with the keys typed here if `input`. Its limit
/// is kept here, too.
///
/// Errors: the program does not start. From then on, whatever happens is an ending, not an error, and the terminal is
/// as it was.
pub(crate) async fn interact(
    client: &Client,
    guest: Guest,
    sandbox: SandboxId,
    program: Program,
    input: bool,
) -> anyhow::Result<Ending> {
    let limit = program.limit;
    let interruptions = Interruptions::listen().context("take over signals")?;
    // From here on, keys are the program's; what is typed before it runs is kept for it.
    let raw = if input { Some(RawMode::enter().context("set the terminal to raw mode")?) } else { None };
    // Without input, the keys neither come nor end.
    let (silence, mut keys) = mpsc::channel(1);
    let mut reader = None;
    if input {
        let (typed, thread) = stdin::read().context("read standard input")?;
        (keys, reader) = (typed, Some(thread));
    }
    let ending = match Session::start(client, guest.clone(), sandbox, program).await {
        Ok(session) => {
            let pid = session.pid();
            let running = session.run(keys, interruptions);
            match limit {
                None => running.await,
                Some(limit) => match timeout(limit, running).await {
                    Ok(ending) => ending,
                    Err(_) => {
                        // Best effort: the agent knows the limit as well.
                        let _ = guest.kill(pid).await;
                        Ok(Ending::Overdue)
                    }
                },
            }
        }
        Err(error) => {
            // Nobody takes keys any more: the reader must not wait for somebody who does.
            drop(keys);
            Err(error)
        }
    };
    drop((reader, silence));
    drop(raw);
    ending
}

/// What a program with a terminal learns of this one.
pub(crate) fn own_environment() -> Vec<(String, String)> {
    shell_environment(|name| env::var(name).ok())
}

async fn find_shell(guest: &Guest, sandbox: SandboxId) -> anyhow::Result<&'static str> {
    for shell in SHELLS {
        if guest.has_file(shell).await.with_context(|| format!("look for a shell in sandbox {sandbox}"))? {
            return Ok(shell);
        }
    }
    bail!("sandbox {sandbox} has no shell ({}); run programs in it with `aenv exec`", SHELLS.join(" or "))
}

/// What the shell learns of this terminal and its user's language.
fn shell_environment(ours: impl Fn(&str) -> Option<String>) -> Vec<(String, String)> {
    let term = ours("TERM").filter(|term| KNOWN_TERMS.contains(&term.as_str()));
    let term = ("TERM".to_owned(), term.unwrap_or_else(|| FALLBACK_TERM.to_owned()));
    let handed_on = HANDED_ON.into_iter().filter_map(|name| Some((name.to_owned(), ours(name)?)));
    [term].into_iter().chain(handed_on).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(ours: &[(&str, &str)]) -> Vec<(String, String)> {
        shell_environment(|name| ours.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn a_terminal_that_the_guest_may_not_know_is_given_a_common_name() {
        assert_eq!(sent(&[("TERM", "xterm-kitty")]), [("TERM".into(), "xterm-256color".into())]);
        assert_eq!(sent(&[]), [("TERM".into(), "xterm-256color".into())]);
        assert_eq!(sent(&[("TERM", "screen")]), [("TERM".into(), "screen".into())]);
    }

    #[test]
    fn only_what_concerns_the_terminal_is_handed_on() {
        let sent = sent(&[("TERM", "xterm"), ("LANG", "C.UTF-8"), ("SECRET", "x"), ("COLORTERM", "truecolor")]);
        let names: Vec<_> = sent.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["TERM", "COLORTERM", "LANG"]);
    }
}
