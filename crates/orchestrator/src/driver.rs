//! The driver: one task that owns a sandbox's phase and resources from its creation to its end.
//!
//! ```text
//!          start ok              delete · expiry · machine exit · shutdown
//! Creating ────────▶ Running ──────────────────────────────────────────────▶ Deleting ──released──▶ Gone
//!     │             ▲ │ ▲ │ copy, go on · swap machines                         ▲
//!     │   resume ok │ │ │ └─▶ Snapshotting · Forking · RollingBack ─────────────┤
//!     │    Resuming ┘ │ └ copy or swap failed                                   │
//!     │     │ ▲       ▼ │                                                       │
//!     │     │ │     Pausing                                                     │
//!     │     ▼ │       │                                                         │
//!     │    Paused ◀───┘ ──────────────── delete ────────────────────────────────┤
//!     └── start failed · delete · shutdown ─────────────────────────────────────┘
//! ```
//!
//! Each state is a method that returns the next. Work in a state runs beside the inbox, so that whoever asks has an
//! answer at once, and is never dropped half-way.

mod capture;
mod end;
mod pause;
mod resume;
mod rollback;

use std::sync::Arc;
use std::time::Duration;

use aenv_durable::{Table, crash_point};
use aenv_model::{Bytes, Phase, SandboxId};
use aenv_network::EgressPolicy;
use aenv_snapshot::Capture;
use aenv_vmm_driver::MachineExit;
use jiff::Timestamp;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::activity::Activity;
use crate::blanks::Blanks;
use crate::config::OnStop;
use crate::guest;
use crate::inbox::Inbox;
use crate::journal::{Journal, Level};
use crate::message::{CaptureKind, Message, Refusal, Reply};
use crate::orchestrator::Parts;
use crate::resources::{Resources, SandboxRow, Stage, chain};
use crate::sandbox::{AskError, CreateError, Ended, HowToPause, OnExpiry, SandboxSpec, Source, StartTimes, Taken};
use crate::seams::GuestDialer;
use crate::stages::Stages;
use crate::start::{Start, awaken, start};
use crate::vitals::Pulse;

/// Life that a sandbox is given whose deadline could not pause it.
const AGAIN: Duration = Duration::from_secs(30);

/// What others may read of a sandbox at any time.
#[derive(Debug, Clone)]
pub(crate) struct Status {
    pub(crate) phase: Phase,
    pub(crate) end_at: Timestamp,
    pub(crate) disk_size: Bytes,
    /// It is paused, and only its disk was kept.
    pub(crate) disk_only: bool,
    /// It is paused, and its guest did not answer then.
    pub(crate) unresponsive: bool,
    /// Where the time of the last start went.
    pub(crate) start_times: StartTimes,
    /// What it may reach.
    pub(crate) egress: Arc<EgressPolicy>,
    /// The way in, while traffic flows.
    pub(crate) live: Option<Live>,
}

/// A running sandbox's way in.
#[derive(Debug, Clone)]
pub(crate) struct Live {
    pub(crate) dialer: Arc<dyn GuestDialer>,
    pub(crate) ended: CancellationToken,
    pub(crate) activity: Activity,
    pub(crate) pulse: Pulse,
}

/// The task's state.
pub(crate) struct Driver {
    pub(crate) id: SandboxId,
    pub(crate) parts: Arc<Parts>,
    pub(crate) rows: Table<SandboxRow>,
    pub(crate) blanks: Arc<Blanks>,
    pub(crate) spec: Arc<SandboxSpec>,
    pub(crate) access_token: Option<String>,
    pub(crate) inbox: Inbox,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) start_permits: Arc<Semaphore>,
    pub(crate) expiry_permits: Arc<Semaphore>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) journal: Arc<Journal>,
    pub(crate) stages: Stages,
    /// As it is in the node store, or will be with the next write.
    pub(crate) row: SandboxRow,
    pub(crate) resources: Resources,
    /// What the machine's memory and disk are over.
    pub(crate) base: Option<Capture>,
    /// What a paused sandbox goes on from.
    pub(crate) rested: Option<Capture>,
}

/// How a driver begins.
pub(crate) enum Begin {
    /// A new sandbox, whose machine may stand ready. Its creator waits.
    Create { source: Source, started: oneshot::Sender<Result<(), CreateError>> },
    /// The machine of a former server is there already.
    Running,
    /// There is a capture to go on from.
    Paused,
}

/// How a driver ends.
#[derive(Debug)]
pub(crate) enum Departure {
    /// With its sandbox.
    Ended(Ended),
    /// With the server: the next one goes on with the sandbox.
    PutAway,
}

/// What is next.
enum Next {
    Serve,
    Pause { askers: Vec<Reply<bool>>, how: HowToPause, cause: PauseCause },
    Capture { kind: CaptureKind, reply: Reply<Taken> },
    RollBack { capture: Capture, reply: Reply<()> },
    Rest,
    Resume { life: Duration, askers: Vec<Reply<bool>> },
    End(Ended),
    Leave,
    PutAway,
}

/// Why a sandbox is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PauseCause {
    Asked,
    Expired,
    Idle,
    Stop,
}

impl PauseCause {
    /// In a journal.
    fn name(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Expired => "its time was over",
            Self::Idle => "nobody used it",
            Self::Stop => "the node was stopped",
        }
    }
}

impl Driver {
    /// Lives as long as the sandbox, or the server.
    pub(crate) async fn run(mut self, begin: Begin) -> Departure {
        let mut next = match begin {
            Begin::Create { source, started } => self.create(source, started).await,
            Begin::Running => self.take_over().await,
            Begin::Paused => Next::Rest,
        };
        loop {
            next = match next {
                Next::Serve => self.serve().await,
                Next::Pause { askers, how, cause } => self.pause(askers, how, cause).await,
                Next::Capture { kind, reply } => self.capture(kind, reply).await,
                Next::RollBack { capture, reply } => self.roll_back(capture, reply).await,
                Next::Rest => self.rest().await,
                Next::Resume { life, askers } => self.resume(life, askers).await,
                Next::End(why) => {
                    self.end(&why).await;
                    return Departure::Ended(why);
                }
                Next::Leave => {
                    self.close_down(Phase::Running);
                    self.leave().await;
                    Next::PutAway
                }
                Next::PutAway => {
                    self.inbox.close().await;
                    return Departure::PutAway;
                }
            }
        }
    }

    /// `Creating`: the start runs beside the inbox; a delete cancels it and waits for its orderly end.
    async fn create(&mut self, source: Source, started: oneshot::Sender<Result<(), CreateError>>) -> Next {
        let begun = Instant::now();
        let cancel = self.shutdown.child_token();
        let id = self.id;
        let (result, meanwhile) = {
            let Self { parts, rows, blanks, spec, access_token, start_permits, row, resources, base, .. } = self;
            let access_token = access_token.as_deref();
            let begin = Start { parts, rows, id, present: None, spec, access_token, blanks, cancel: &cancel };
            let starting = async {
                let ready = match resources.machine {
                    Some(_) => match awaken(&begin, resources).await {
                        Ok(times) => Some(times),
                        Err(error @ CreateError::Deleted { .. }) => return Err(error),
                        Err(error) => {
                            warn!(sandbox_id = %id, error = chain(&error), "a machine that stood ready did not go on");
                            resources.release(parts.disks.as_ref()).await.map_err(|why| CreateError::Source { why })?;
                            None
                        }
                    },
                    None => None,
                };
                let times = match ready {
                    Some(times) => times,
                    None => {
                        let _permit = begin.permit(start_permits).await?;
                        let started = start(&begin, source, row, resources).await?;
                        *base = started.base;
                        started.times
                    }
                };
                row.stage = Stage::Running;
                row.end_at = after(spec.timeout.unwrap_or(parts.config.default_timeout));
                let recorded = rows.put(id.to_string(), row.clone()).await;
                crash_point("create.recorded");
                recorded.map_err(CreateError::in_step(id, "record the sandbox")).map(|()| times)
            };
            self.inbox.during(Phase::Creating, &cancel, starting).await
        };
        let outcome = match (result, meanwhile.deleted) {
            (_, Some(why)) => Err((why, CreateError::Deleted { id })),
            (Err(_), None) if self.shutdown.is_cancelled() => Err((Ended::NodeShutdown, CreateError::ShuttingDown)),
            (Err(error), None) => {
                warn!(sandbox_id = %id, error = chain(&error), "sandbox did not start");
                self.journal.note(Level::Error, "could not be started", &[("reason", &chain(&error))]);
                Err((Ended::StartFailed, error))
            }
            (Ok(times), None) => Ok(times),
        };
        match outcome {
            Ok(times) => {
                self.open_up(times);
                info!(sandbox_id = %id, took_ms = begun.elapsed().as_millis() as u64, ?times, "sandbox is running");
                let template = self.spec.alias.clone().unwrap_or_else(|| self.spec.template.to_string());
                self.journal.note(Level::Info, "created", &[("template", &template), ("took_ms", &millis(begun))]);
                _ = started.send(Ok(())); // the creator may have hung up; the sandbox lives on until its deadline
                Next::Serve
            }
            Err((why, error)) => {
                // The creator hears of it after everything is given back: what it reads next is the truth.
                self.status.send_modify(|status| status.phase = Phase::Deleting);
                if let Err(failures) = self.resources.release(self.parts.disks.as_ref()).await {
                    warn!(sandbox_id = %id, failures, "could not take down a failed start yet");
                }
                _ = started.send(Err(error));
                Next::End(why)
            }
        }
    }

    /// Traffic flows from now on.
    fn open_up(&mut self, start_times: StartTimes) {
        let dialer = self.resources.slot.as_ref().map(|slot| slot.dialer());
        let (ended, activity, pulse) = (CancellationToken::new(), Activity::new(), Pulse::new());
        let live = dialer.map(|dialer| Live { dialer, ended, activity, pulse });
        let (end_at, disk_size) = (self.row.end_at, self.row.disk_size);
        let phase = Phase::Running;
        self.row.unresponsive = false;
        self.status.send_replace(Status {
            phase,
            end_at,
            disk_size,
            disk_only: false,
            unresponsive: false,
            start_times,
            egress: Arc::new(self.spec.egress.clone()),
            live,
        });
    }

    /// Traffic is cut now.
    fn close_down(&self, phase: Phase) {
        self.status.send_modify(|status| {
            status.phase = phase;
            if let Some(live) = status.live.take() {
                live.ended.cancel();
            }
        });
    }

    /// `Running`: until somebody or something ends or changes it.
    async fn serve(&mut self) -> Next {
        let Some(mut exit) = self.resources.machine.as_ref().map(|machine| machine.exit()) else {
            return Next::End(Ended::MachineEnded("it was never there".to_owned()));
        };
        let live = self.status.borrow().live.clone();
        loop {
            let left = until(self.row.end_at);
            let message = tokio::select! {
                biased; // an extension that arrived before the deadline counts
                message = self.inbox.next() => message,
                () = self.shutdown.cancelled() => return self.stop(),
                ended = exit.wait_for(Option::is_some) => {
                    let how = ended.ok().and_then(|exit| exit.clone());
                    let text = match how {
                        Some(MachineExit::Crashed(text)) => text,
                        Some(MachineExit::Shutdown) => "the guest powered off".to_owned(),
                        Some(MachineExit::Killed) | None => "its VMM was killed".to_owned(),
                    };
                    warn!(sandbox_id = %self.id, how = text, "machine ended by itself");
                    return Next::End(Ended::MachineEnded(text));
                }
                () = idle(self.id, self.spec.idle_timeout, live.as_ref(), self.access_token.as_deref()) => {
                    let how = HowToPause { disk_only: self.spec.on_expiry == OnExpiry::PauseDisk, ..HowToPause::default() };
                    return Next::Pause { askers: Vec::new(), how, cause: PauseCause::Idle };
                }
                () = tokio::time::sleep(left) => {
                    if !until(self.row.end_at).is_zero() {
                        continue; // a day has passed, not the deadline
                    }
                    let (askers, cause) = (Vec::new(), PauseCause::Expired);
                    let disk_only = match self.spec.on_expiry {
                        OnExpiry::Delete => return Next::End(Ended::Expired),
                        OnExpiry::Pause => false,
                        OnExpiry::PauseDisk => true,
                    };
                    return Next::Pause { askers, how: HowToPause { disk_only, ..HowToPause::default() }, cause };
                }
            };
            match message {
                Message::Deadline { life, shorten, reply } => {
                    let end_at = self.set_deadline(life, shorten).await;
                    _ = reply.send(Ok(end_at));
                }
                Message::Start { life, connect, reply } => {
                    self.set_deadline(life, !connect).await;
                    _ = reply.send(Ok(false));
                }
                Message::Pause { how, reply } => {
                    return Next::Pause { askers: vec![reply], how, cause: PauseCause::Asked };
                }
                Message::Capture { kind, reply } => return Next::Capture { kind, reply },
                Message::Rollback { capture, reply } => return Next::RollBack { capture, reply },
                Message::Network { policy, reply } => {
                    let changed = self.set_network(policy).await;
                    let id = self.id;
                    _ = reply.send(changed.map_err(|why| Refusal::Failed(AskError::Network { id, why })));
                }
                Message::Delete { why, reply } => {
                    self.inbox.deleters.push(reply);
                    return Next::End(why);
                }
            }
        }
    }

    /// The server is being stopped while the sandbox runs.
    fn stop(&self) -> Next {
        if self.spec.internal {
            return Next::End(Ended::NodeShutdown); // whoever it was for ends with the server
        }
        match self.parts.config.on_stop {
            OnStop::Delete => Next::End(Ended::NodeShutdown),
            OnStop::Pause => Next::Pause { askers: Vec::new(), how: HowToPause::default(), cause: PauseCause::Stop },
            OnStop::Leave => Next::Leave,
        }
    }

    /// `Paused`: there is nothing but a capture.
    async fn rest(&mut self) -> Next {
        self.status.send_modify(|status| status.phase = Phase::Paused);
        loop {
            let message = tokio::select! {
                biased;
                message = self.inbox.next() => message,
                () = self.shutdown.cancelled() => return match self.parts.config.on_stop {
                    OnStop::Delete => Next::End(Ended::NodeShutdown),
                    OnStop::Pause | OnStop::Leave => Next::PutAway,
                },
            };
            match message {
                Message::Start { life, reply, .. } => return Next::Resume { life, askers: vec![reply] },
                Message::Pause { reply, .. } => _ = reply.send(Ok(false)),
                message @ (Message::Deadline { .. }
                | Message::Capture { .. }
                | Message::Rollback { .. }
                | Message::Network { .. }) => {
                    message.refuse(Refusal::Busy(Phase::Paused));
                }
                Message::Delete { why, reply } => {
                    self.inbox.deleters.push(reply);
                    return Next::End(why);
                }
            }
        }
    }

    /// Changes what the guest may reach, for the next server too. If that could not be told, it is changed back.
    async fn set_network(&mut self, policy: EgressPolicy) -> Result<(), String> {
        let slot = self.resources.slot.as_ref().ok_or("it has no network")?;
        slot.set_policy(&policy).await.map_err(|error| chain(&error))?;
        let spec = SandboxSpec { egress: policy, ..self.row.spec.clone() };
        let row = SandboxRow { spec, ..self.row.clone() };
        if let Err(error) = self.rows.put(self.id.to_string(), row.clone()).await {
            if let Err(error) = slot.set_policy(&self.spec.egress).await {
                warn!(sandbox_id = %self.id, error = chain(&error), "a change of network could not be undone");
            }
            return Err(chain(&error));
        }
        self.row = row;
        self.spec = Arc::new(self.row.spec.clone());
        let egress = Arc::new(self.spec.egress.clone());
        self.status.send_modify(|status| status.egress = egress);
        self.journal.note(Level::Info, "network changed", &[]);
        Ok(())
    }

    /// Sets the deadline, for the next server too.
    async fn set_deadline(&mut self, life: Duration, shorten: bool) -> Timestamp {
        let wanted = after(life);
        let end_at = if shorten { wanted } else { wanted.max(self.row.end_at) };
        self.row.end_at = end_at;
        self.status.send_modify(|status| status.end_at = end_at);
        if let Err(error) = self.rows.put(self.id.to_string(), self.row.clone()).await {
            warn!(sandbox_id = %self.id, error = chain(&error), "a restart of the server would forget a deadline");
        }
        end_at
    }
}

/// Waits until nobody has used a sandbox for as long as it was told, and no command runs in it. Never ends if it was told
/// nothing.
async fn idle(id: SandboxId, patience: Option<Duration>, live: Option<&Live>, access_token: Option<&str>) {
    let (Some(patience), Some(live)) = (patience, live) else { return std::future::pending().await };
    loop {
        match live.activity.idle_since() {
            None => live.activity.use_ends().await,
            // Whoever comes meanwhile is noticed at the end of it.
            Some(since) if since.elapsed() < patience => tokio::time::sleep_until(since + patience).await,
            Some(_) => match guest::runs_commands(live.dialer.as_ref(), access_token).await {
                Ok(false) => return,
                Ok(true) => live.activity.touch(),
                Err(error) => {
                    debug!(sandbox_id = %id, %error, "a guest does not say whether it is idle");
                    live.activity.touch();
                }
            },
        }
    }
}

/// How long something took, for a journal.
pub(crate) fn millis(since: Instant) -> String {
    since.elapsed().as_millis().to_string()
}

/// The instant `life` from now; the end of time if that is beyond it.
pub(crate) fn after(life: Duration) -> Timestamp {
    jiff::SignedDuration::try_from(life)
        .ok()
        .and_then(|life| Timestamp::now().checked_add(life).ok())
        .unwrap_or(Timestamp::MAX)
}

/// Time left until `end`, zero if it has passed. At most a day, so that a clock set forward is noticed.
pub(crate) fn until(end: Timestamp) -> Duration {
    const LONGEST: Duration = Duration::from_secs(86_400);
    Duration::try_from(end.duration_since(Timestamp::now())).unwrap_or(Duration::ZERO).min(LONGEST)
}
