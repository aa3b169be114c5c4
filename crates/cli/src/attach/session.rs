//! The session's loop: the program's output goes to the screen until something ends it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use aenv_api::Client;
use aenv_model::SandboxId;
use anyhow::{Context as _, bail};
use connectrpc::ErrorCode;
use tokio::io::AsyncWriteExt as _;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::ending::Ending;
use super::input;
use super::watch::{self, Contact, LOST_AFTER};
use crate::guest::{Event, Events, Guest, Program};
use crate::output::OutputError;
use crate::signals::Interruptions;
use crate::stdin::Keys;
use crate::terminal;

/// Pause between two attempts to find the shell again.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

/// A shell that runs, with its output.
#[derive(Debug)]
pub(super) struct Session {
    client: Client,
    guest: Guest,
    sandbox: SandboxId,
    pid: u32,
    events: Events,
}

impl Session {
    /// Starts the shell. Errors: it does not start.
    pub(super) async fn start(
        client: &Client,
        guest: Guest,
        sandbox: SandboxId,
        program: Program,
    ) -> anyhow::Result<Self> {
        let doing = format!("start {} in sandbox {sandbox}", program.command);
        let mut events = guest.start(program).await.with_context(|| doing.clone())?;
        match events.next().await.with_context(|| doing.clone())? {
            Some(Event::Started { pid }) => Ok(Self { client: client.clone(), guest, sandbox, pid, events }),
            other => bail!("{doing}: the agent's first word was {other:?}, not the shell's pid"),
        }
    }

    /// The program's pid in the sandbox.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Runs until the session's end. Errors: this terminal takes no more output.
    pub(super) async fn run(mut self, keys: Keys, mut interruptions: Interruptions) -> anyhow::Result<Ending> {
        let contact = Contact::now();
        let mut beside = self.watchers(keys, &contact);
        let mut screen = tokio::io::stdout();
        loop {
            let event = tokio::select! {
                event = self.events.next() => event,
                Some(ended) = beside.join_next() => return ended.context("a part of the session failed"),
                code = interruptions.next() => return Ok(self.interrupted(code).await),
            };
            contact.renew();
            match event {
                Ok(Some(Event::Terminal(bytes) | Event::Stdout(bytes) | Event::Stderr(bytes))) => {
                    screen.write_all(&bytes).await.map_err(OutputError::from)?;
                    screen.flush().await.map_err(OutputError::from)?;
                }
                Ok(Some(Event::Started { .. } | Event::Alive)) => {}
                Ok(Some(Event::Ended(exit))) => return Ok(Ending::Shell(exit.code)),
                Ok(None) => return Ok(Ending::Closed),
                Err(_) => {
                    let found = tokio::select! {
                        found = self.find_again() => found,
                        code = interruptions.next() => return Ok(self.interrupted(code).await),
                    };
                    match found {
                        Ok(events) => self.events = events,
                        Err(ending) => return Ok(ending),
                    }
                }
            }
        }
    }

    /// Everything that goes on beside the output; ends when dropped. Whatever is returned first ends the session.
    fn watchers(&self, keys: Keys, contact: &Contact) -> JoinSet<Ending> {
        let activity = Arc::new(AtomicBool::new(false));
        let (guest, client, pid) = (&self.guest, &self.client, self.pid);
        let mut beside = JoinSet::new();
        let forward = input::forward(guest.clone(), pid, keys, Arc::clone(&activity));
        let size = watch::for_size(guest.clone(), pid, terminal::size());
        let refresh = watch::for_activity(client.clone(), self.sandbox, activity);
        beside.spawn(async move {
            tokio::join!(forward, size, refresh);
            // None of them returns.
            Ending::Closed
        });
        beside.spawn(watch::for_ending(client.clone(), self.sandbox, contact.clone()));
        beside
    }

    /// Follows the same shell again after its output broke off, or says why that is not possible.
    async fn find_again(&self) -> Result<Events, Ending> {
        let deadline = Instant::now() + LOST_AFTER;
        loop {
            match watch::ending_by_state(&self.client, self.sandbox).await {
                Ok(Some(ending)) => return Err(ending),
                Ok(None) => match self.guest.follow(self.pid).await {
                    Ok(events) => return Ok(events),
                    // The shell has ended meanwhile, and nobody knows how any more.
                    Err(error) if error.code == ErrorCode::NotFound => return Err(Ending::Lost),
                    Err(_) => {}
                },
                Err(_) => {}
            }
            if Instant::now() > deadline {
                return Err(Ending::Lost);
            }
            sleep(RECONNECT_PAUSE).await;
        }
    }

    /// Our terminal goes away, so the shell does.
    async fn interrupted(&self, code: u8) -> Ending {
        // Best effort: we are leaving.
        let _ = self.guest.kill(self.pid).await;
        Ending::Interrupted(code)
    }
}
