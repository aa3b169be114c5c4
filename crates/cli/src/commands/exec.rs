//! `aenv exec`: one command in a sandbox, its output here, its exit code ours.

use std::process::ExitCode;
use std::time::Duration;

use aenv_api::{Client, SandboxState};
use anyhow::{Context as _, bail};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

use crate::args::Exec;
use crate::guest::{Channel, Event, Guest, Program};
use crate::output::OutputError;
use crate::signals::Interruptions;

/// How long a command may take to end after it was told to.
const GRACE: Duration = Duration::from_secs(5);

/// Runs the command without terminal or standard input, and streams its output as it comes.
///
/// An interruption here (Ctrl-C) ends the command there: with SIGTERM, and with SIGKILL if that does not help.
/// Errors: the sandbox or its agent cannot be reached, or the output broke off before the command's end was told.
pub(crate) async fn run(client: &Client, exec: Exec) -> anyhow::Result<ExitCode> {
    let sandbox = exec.sandbox_id;
    let detail = client.sandbox(sandbox).await?;
    let guest = Guest::new(client.server(), sandbox, detail.envd_access_token.as_deref())?;
    let mut words = exec.command.into_iter();
    let command = words.next().context("no command given")?;
    let program = Program { command, arguments: words.collect(), environment: Vec::new(), channel: Channel::Pipes };
    let mut interruptions = Interruptions::listen()?;
    // Traffic may wake a paused sandbox, if it was made so; we do not by ourselves.
    let mut events = guest.start(program).await.with_context(|| match detail.listed.state {
        SandboxState::Running => format!("run a command in sandbox {sandbox}"),
        SandboxState::Paused => format!("sandbox {sandbox} is paused, `aenv resume {sandbox}` lets it go on"),
    })?;
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    let mut pid = None;
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            code = interruptions.next() => {
                if let Some(pid) = pid {
                    end(&guest, pid, &mut events).await;
                }
                return Ok(ExitCode::from(code));
            }
        };
        match event.with_context(|| format!("follow the command in sandbox {sandbox}"))? {
            Some(Event::Started { pid: started }) => pid = Some(started),
            Some(Event::Stdout(bytes) | Event::Terminal(bytes)) => write(&mut stdout, &bytes).await?,
            Some(Event::Alive) => {}
            Some(Event::Stderr(bytes)) => write(&mut stderr, &bytes).await?,
            Some(Event::Ended(exit)) => return Ok(ExitCode::from(exit.code)),
            None => bail!("the output of the command in sandbox {sandbox} ended without its exit code"),
        }
    }
}

async fn write(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<(), OutputError> {
    to.write_all(bytes).await?;
    Ok(to.flush().await?)
}

/// Ends the command and waits for its end, not for long.
async fn end(guest: &Guest, pid: u32, events: &mut crate::guest::Events) {
    let mut ended = async || {
        while let Ok(Some(event)) = events.next().await {
            if matches!(event, Event::Ended(_)) {
                break;
            }
        }
    };
    // Best effort: we are leaving, and the sandbox's own end takes the process in any case.
    let _ = guest.terminate(pid).await;
    if timeout(GRACE, ended()).await.is_err() {
        let _ = guest.kill(pid).await;
    }
}
