//! The driver: one task that owns a sandbox's phase and resources from its creation to its end.
//!
//! ```text
//!          start ok                    delete · expiry · machine exit · shutdown
//! Creating ────────▶ Running ─────────────────────────────────────────────▶ Deleting ──released──▶ Gone
//!     └───────────── start failed · delete · shutdown ──────────────────────▶
//! ```

use std::sync::Arc;
use std::time::Duration;

use aenv_durable::Table;
use aenv_model::{Bytes, Phase, SandboxId};
use aenv_vmm_driver::MachineExit;
use jiff::Timestamp;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::admission::{Ask, Verdict, admit};
use crate::orchestrator::Parts;
use crate::resources::{Resources, SandboxRow, chain};
use crate::sandbox::{CreateError, Ended, Keep, NewSandbox};
use crate::seams::GuestDialer;
use crate::start::{Start, Started, start};

/// First and longest pause between two attempts to give back what would not go.
const RELEASE_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// What others may read of a sandbox at any time.
#[derive(Debug, Clone)]
pub(crate) struct Status {
    pub(crate) phase: Phase,
    pub(crate) end_at: Timestamp,
    pub(crate) disk_size: Bytes,
    /// The way in, while `Running`.
    pub(crate) live: Option<Live>,
}

/// A running sandbox's way in.
#[derive(Debug, Clone)]
pub(crate) struct Live {
    pub(crate) dialer: Arc<dyn GuestDialer>,
    pub(crate) ended: CancellationToken,
}

/// An ask with the place for its answer.
#[derive(Debug)]
pub(crate) enum Message {
    /// New deadline, counted from now; extend-only if `shorten` is false. Answers the deadline in force, or `None` if
    /// the sandbox is ending.
    Deadline { life: Duration, shorten: bool, reply: oneshot::Sender<Option<Timestamp>> },
    /// End it. Answers what could not be given back at the first attempt.
    Delete { why: Ended, reply: oneshot::Sender<Result<(), String>> },
}

impl Message {
    fn ask(&self) -> Ask {
        match self {
            Self::Deadline { .. } => Ask::Deadline,
            Self::Delete { .. } => Ask::Delete,
        }
    }
}

/// The task's state.
pub(crate) struct Driver {
    pub(crate) id: SandboxId,
    pub(crate) parts: Arc<Parts>,
    pub(crate) rows: Table<SandboxRow>,
    pub(crate) sandbox: Arc<NewSandbox>,
    pub(crate) keep: Option<Keep>,
    pub(crate) access_token: Option<String>,
    pub(crate) inbox: mpsc::Receiver<Message>,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) started: oneshot::Sender<Result<(), CreateError>>,
    pub(crate) start_permits: Arc<Semaphore>,
    pub(crate) expiry_permits: Arc<Semaphore>,
    pub(crate) shutdown: CancellationToken,
}

impl Driver {
    /// Lives as long as the sandbox; returns why it ended.
    pub(crate) async fn run(mut self) -> Ended {
        let mut resources = Resources::default();
        let mut deleters = Vec::new();
        let why = match self.create(&mut resources, &mut deleters).await {
            Ok(()) => self.serve(&resources, &mut deleters).await,
            Err(why) => why,
        };
        self.delete(resources, deleters, &why).await;
        why
    }

    /// `Creating`: the start runs beside the inbox; a delete cancels it and waits for its orderly end.
    async fn create(
        &mut self,
        resources: &mut Resources,
        deleters: &mut Vec<oneshot::Sender<Result<(), String>>>,
    ) -> Result<(), Ended> {
        let begun = Instant::now();
        let cancel = self.shutdown.child_token();
        let mut deleted = None;
        let mut waiting = Vec::new();
        let keep = self.keep.take().unwrap_or_else(|| Box::new(()));
        let result: Result<Started, CreateError> = {
            let access_token = self.access_token.as_deref();
            let starting = async {
                let _permit = tokio::select! {
                    permit = self.start_permits.acquire() => permit,
                    () = cancel.cancelled() => return Err(CreateError::Deleted { id: self.id }),
                };
                let (parts, rows, sandbox) = (&*self.parts, &self.rows, &*self.sandbox);
                start(Start { parts, rows, id: self.id, sandbox, access_token, cancel: &cancel }, keep, resources).await
            };
            tokio::pin!(starting);
            loop {
                tokio::select! {
                    result = &mut starting => break result,
                    Some(message) = self.inbox.recv() => match (admit(Phase::Creating, message.ask()), message) {
                        (Verdict::Begin, Message::Delete { why, reply }) => {
                            deleted.get_or_insert(why);
                            deleters.push(reply);
                            cancel.cancel();
                        }
                        (_, message) => waiting.push(message),
                    },
                }
            }
        };
        let outcome = match (result, deleted) {
            (_, Some(why)) => Err((why, CreateError::Deleted { id: self.id })),
            (Err(_), None) if self.shutdown.is_cancelled() => Err((Ended::NodeShutdown, CreateError::ShuttingDown)),
            (Err(error), None) => {
                warn!(sandbox_id = %self.id, error = chain(&error), "sandbox did not start");
                Err((Ended::StartFailed, error))
            }
            (Ok(started), None) => Ok(started),
        };
        let started = std::mem::replace(&mut self.started, oneshot::channel().0);
        match outcome {
            Ok(facts) => {
                let end_at = after(self.sandbox.timeout.unwrap_or(self.parts.config.default_timeout));
                let dialer = resources.slot.as_ref().map(|slot| slot.dialer());
                let live = dialer.map(|dialer| Live { dialer, ended: CancellationToken::new() });
                self.status.send_replace(Status { phase: Phase::Running, end_at, disk_size: facts.disk_size, live });
                info!(sandbox_id = %self.id, took_ms = begun.elapsed().as_millis() as u64, "sandbox is running");
                _ = started.send(Ok(())); // the creator may have hung up; the sandbox lives on until its deadline
                for message in waiting {
                    if let Message::Deadline { life, shorten, reply } = message {
                        _ = reply.send(Some(self.set_deadline(life, shorten)));
                    }
                }
                Ok(())
            }
            Err((why, error)) => {
                // The creator hears of it after everything is given back: what it reads next is the truth.
                self.status.send_modify(|status| status.phase = Phase::Deleting);
                if let Err(failures) = resources.release(self.parts.disks.as_ref()).await {
                    warn!(sandbox_id = %self.id, failures, "could not take down a failed start yet");
                }
                _ = started.send(Err(error));
                Err(why)
            }
        }
    }

    /// `Running`: until somebody or something ends it.
    async fn serve(&mut self, resources: &Resources, deleters: &mut Vec<oneshot::Sender<Result<(), String>>>) -> Ended {
        let mut exit = match &resources.machine {
            Some(machine) => machine.exit(),
            None => return Ended::MachineEnded("it was never there".to_owned()),
        };
        loop {
            let left = until(self.status.borrow().end_at);
            tokio::select! {
                biased; // an extension that arrived before the deadline counts
                Some(message) = self.inbox.recv() => match message {
                    Message::Deadline { life, shorten, reply } => {
                        _ = reply.send(Some(self.set_deadline(life, shorten)));
                    }
                    Message::Delete { why, reply } => {
                        deleters.push(reply);
                        return why;
                    }
                },
                () = self.shutdown.cancelled() => return Ended::NodeShutdown,
                ended = exit.wait_for(Option::is_some) => {
                    let how = ended.ok().and_then(|exit| exit.clone());
                    let text = match how {
                        Some(MachineExit::Crashed(text)) => text,
                        Some(MachineExit::Shutdown) => "the guest powered off".to_owned(),
                        Some(MachineExit::Killed) | None => "its VMM was killed".to_owned(),
                    };
                    warn!(sandbox_id = %self.id, how = text, "machine ended by itself");
                    return Ended::MachineEnded(text);
                }
                () = tokio::time::sleep(left) => {
                    if until(self.status.borrow().end_at).is_zero() {
                        return Ended::Expired;
                    }
                }
            }
        }
    }

    /// `Deleting`: cut traffic, give everything back, forget the intent row. Tries until it succeeds.
    async fn delete(
        mut self,
        mut resources: Resources,
        mut deleters: Vec<oneshot::Sender<Result<(), String>>>,
        why: &Ended,
    ) {
        self.status.send_modify(|status| {
            status.phase = Phase::Deleting;
            if let Some(live) = status.live.take() {
                live.ended.cancel();
            }
        });
        let permits = Arc::clone(&self.expiry_permits);
        let _permit = match why {
            // Somebody who deletes it now does not wait for its turn among the expired.
            Ended::Expired => tokio::select! {
                permit = permits.acquire() => permit.ok(),
                message = self.inbox.recv() => {
                    match message {
                        Some(Message::Delete { reply, .. }) => deleters.push(reply),
                        Some(Message::Deadline { reply, .. }) => _ = reply.send(None),
                        None => {}
                    }
                    None
                }
            },
            _ => None,
        };
        let mut pause = RELEASE_BACKOFF.0;
        loop {
            let released = match resources.release(self.parts.disks.as_ref()).await {
                Ok(()) => self.rows.remove(self.id.to_string()).await.map_err(|error| chain(&error)),
                Err(failures) => Err(failures),
            };
            for reply in deleters.drain(..) {
                _ = reply.send(released.clone());
            }
            let Err(failures) = released else { break };
            warn!(sandbox_id = %self.id, failures, "sandbox could not be taken down yet");
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                message = self.inbox.recv() => if let Some(Message::Delete { reply, .. }) = message {
                    deleters.push(reply);
                },
            }
            pause = (pause * 2).min(RELEASE_BACKOFF.1);
        }
        if matches!(why, Ended::Deleted | Ended::Expired | Ended::NodeShutdown) {
            _ = std::fs::remove_file(self.parts.serial_log(self.id)); // told nothing that anybody will look for
        }
        self.status.send_modify(|status| status.phase = Phase::Gone);
        info!(sandbox_id = %self.id, %why, "sandbox is gone");
        // Who asked while we were busy gets the outcome too.
        self.inbox.close();
        while let Some(message) = self.inbox.recv().await {
            match message {
                Message::Delete { reply, .. } => _ = reply.send(Ok(())),
                Message::Deadline { reply, .. } => _ = reply.send(None),
            }
        }
    }

    fn set_deadline(&self, life: Duration, shorten: bool) -> Timestamp {
        let wanted = after(life);
        self.status.send_modify(|status| {
            status.end_at = if shorten { wanted } else { wanted.max(status.end_at) };
        });
        self.status.borrow().end_at
    }
}

/// The instant `life` from now; the end of time if that is beyond it.
pub(crate) fn after(life: Duration) -> Timestamp {
    jiff::SignedDuration::try_from(life)
        .ok()
        .and_then(|life| Timestamp::now().checked_add(life).ok())
        .unwrap_or(Timestamp::MAX)
}

/// Time left until `end`, zero if it has passed. At most a day, so that a clock set forward is noticed.
fn until(end: Timestamp) -> Duration {
    const LONGEST: Duration = Duration::from_secs(86_400);
    Duration::try_from(end.duration_since(Timestamp::now())).unwrap_or(Duration::ZERO).min(LONGEST)
}
