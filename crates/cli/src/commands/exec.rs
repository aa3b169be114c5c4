//! `aenv exec`: one command in a sandbox, its output here, its exit code ours.

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;
use std::time::Duration;

use aenv_api::{Client, SandboxState};
use aenv_guest_proto::wire::process::StreamInputRequest;
use aenv_model::SandboxId;
use anyhow::{Context as _, bail};
use connectrpc::ErrorCode;
use futures::{Stream, StreamExt as _};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::args::Exec;
use crate::attach::{self, Ending, OVERDUE};
use crate::guest::input::{self, KEEPALIVE};
use crate::guest::{Channel, Event, Events, Guest, Program};
use crate::output::OutputError;
use crate::signals::Interruptions;
use crate::stdin::{self, Keys};
use crate::terminal;

/// How long a command may take to end after it was told to.
const GRACE: Duration = Duration::from_secs(5);

/// Runs the command and streams its output as it comes.
///
/// An interruption here (Ctrl-C) ends the command there: with SIGTERM, and with SIGKILL if that does not help. With a
/// terminal, keys are the command's, Ctrl-C among them.
/// Errors: the sandbox or its agent cannot be reached, or the output broke off before the command's end.
pub(crate) async fn run(client: &Client, exec: Exec) -> anyhow::Result<ExitCode> {
    let (sandbox, command) = exec.target()?;
    let (name, arguments) = command.split_first().context("no command given")?;
    let (guest, state) = Guest::find(client, sandbox).await?;
    let (channel, mut environment) = match exec.tty {
        true => (Channel::Terminal(terminal::size()), attach::own_environment()),
        false => (Channel::Pipes { input: exec.interactive }, Vec::new()),
    };
    environment.extend(exec.env.iter().cloned());
    let program = Program {
        command: name.clone(),
        arguments: arguments.to_vec(),
        environment,
        directory: exec.workdir.clone(),
        user: exec.user.clone(),
        limit: exec.timeout.map(Duration::from_secs),
        channel,
    };
    // Traffic may wake a paused sandbox, if it was made so; we do not by ourselves.
    let doing = || match state {
        SandboxState::Running => format!("run a command in sandbox {sandbox}"),
        SandboxState::Paused => format!("sandbox {sandbox} is paused, `aenv resume {sandbox}` lets it go on"),
    };
    if exec.tty {
        let input = exec.interactive || io::stdin().is_terminal();
        let ending = attach::interact(client, guest, sandbox, program, input).await.with_context(doing)?;
        return at_a_terminals_end(ending, sandbox);
    }
    let mut interruptions = Interruptions::listen()?;
    let limit = program.limit;
    let running = Running { events: guest.start(program).await.with_context(doing)?, guest, sandbox, pid: None };
    running.run(exec.interactive, limit, &mut interruptions).await
}

/// The end of a program is told by its exit code alone; that of a sandbox also in words.
fn at_a_terminals_end(ending: Ending, sandbox: SandboxId) -> anyhow::Result<ExitCode> {
    match ending {
        Ending::Shell(_) => {}
        Ending::Closed => bail!(without_exit_code(sandbox)),
        _ => ending.tell(sandbox),
    }
    Ok(ExitCode::from(ending.code()))
}

/// A command without a terminal.
struct Running {
    guest: Guest,
    sandbox: SandboxId,
    events: Events,
    /// Known once it has started.
    pid: Option<u32>,
}

impl Running {
    async fn run(
        mut self,
        interactive: bool,
        limit: Option<Duration>,
        interruptions: &mut Interruptions,
    ) -> anyhow::Result<ExitCode> {
        let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
        let mut overdue = std::pin::pin!(async {
            match limit {
                Some(limit) => sleep(limit).await,
                None => std::future::pending().await,
            }
        });
        let mut reader = None;
        // Ends when dropped, which must be before the reader: that waits for room for what it has read.
        let mut pouring = JoinSet::new();
        loop {
            let event = tokio::select! {
                event = self.events.next() => event,
                Some(poured) = pouring.join_next() => match poured {
                    Ok(()) => continue,
                    Err(error) => return Err(error).with_context(|| self.what("send standard input to")),
                },
                () = &mut overdue => {
                    if let Some(pid) = self.pid {
                        // Best effort: the agent knows the limit as well.
                        let _ = self.guest.kill(pid).await;
                    }
                    eprintln!("The command took too long and was killed.");
                    return Ok(ExitCode::from(OVERDUE));
                }
                code = interruptions.next() => {
                    self.end().await;
                    return Ok(ExitCode::from(code));
                }
            };
            match event.with_context(|| self.what("follow"))? {
                Some(Event::Started { pid }) => {
                    self.pid = Some(pid);
                    if interactive {
                        let (chunks, thread) = stdin::read().context("read standard input")?;
                        reader = Some(thread);
                        pouring.spawn(pour(self.guest.clone(), pid, chunks));
                    }
                }
                Some(Event::Stdout(bytes) | Event::Terminal(bytes)) => write(&mut stdout, &bytes).await?,
                Some(Event::Alive) => {}
                Some(Event::Stderr(bytes)) => write(&mut stderr, &bytes).await?,
                Some(Event::Ended(exit)) => {
                    // Who sends must be gone before the reader is waited for.
                    pouring.shutdown().await;
                    drop(reader);
                    return Ok(ExitCode::from(exit.code));
                }
                None => bail!(without_exit_code(self.sandbox)),
            }
        }
    }

    fn what(&self, doing: &str) -> String {
        format!("{doing} the command in sandbox {}", self.sandbox)
    }

    /// Ends the command and waits for its end, not for long.
    async fn end(&mut self) {
        let Some(pid) = self.pid else { return };
        let mut ended = async || {
            while let Ok(Some(event)) = self.events.next().await {
                if matches!(event, Event::Ended(_)) {
                    break;
                }
            }
        };
        // Best effort: we are leaving, and the sandbox's own end takes the process in any case.
        let _ = self.guest.terminate(pid).await;
        if timeout(GRACE, ended()).await.is_err() {
            let _ = self.guest.kill(pid).await;
        }
    }
}

/// Sends chunks as fast as the command reads them, and their end.
///
/// A command may close its standard input, or end, before it has read everything. The agent says so at once, and its
/// answer may be lost with the connection that still carries input. That looks the same as a connection that broke for
/// another reason, so the command does not learn of an end then: it must not take a part for all of it. If it does not
/// end soon either, the user is told.
async fn pour(guest: Guest, pid: u32, chunks: Keys) {
    let first = futures::stream::iter([input::to(pid)]);
    let poured = match guest.stream_input(first.chain(messages(chunks))).await {
        Ok(()) => guest.close_stdin(pid).await,
        Err(error) => Err(error),
    };
    match poured {
        Ok(()) => {}
        // The agent's own words: the command takes no more.
        Err(error) if matches!(error.code, ErrorCode::Internal | ErrorCode::NotFound) => {}
        Err(error) => {
            sleep(GRACE).await;
            let why = error.message.unwrap_or_default();
            eprintln!("warning: the command takes no more input, or the way to it broke ({why}); it has not read all");
        }
    }
}

/// The chunks, with signs of life in between, until their end.
fn messages(chunks: Keys) -> impl Stream<Item = StreamInputRequest> + Send + 'static {
    let mut keepalive = interval(KEEPALIVE);
    keepalive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    keepalive.reset();
    futures::stream::unfold((chunks, keepalive), |(mut chunks, mut keepalive)| async move {
        let message = tokio::select! {
            chunk = chunks.recv() => input::piped(chunk?),
            _ = keepalive.tick() => input::alive(),
        };
        Some((message, (chunks, keepalive)))
    })
}

async fn write(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<(), OutputError> {
    to.write_all(bytes).await?;
    Ok(to.flush().await?)
}

fn without_exit_code(sandbox: SandboxId) -> String {
    format!("the output of the command in sandbox {sandbox} ended without its exit code")
}
