//! `Pausing`: the machine is copied, the copy is recorded, the machine is ended.

use std::sync::Arc;
use std::time::Duration;

use aenv_durable::crash_point;
use aenv_model::{Phase, SandboxId};
use aenv_snapshot::{Capture, CaptureError};
use aenv_vmm_driver::VmmError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{AGAIN, Driver, Next, PauseCause, millis};
use crate::guest;
use crate::journal::Level;
use crate::message::{Message, Refusal, Reply};
use crate::resources::{Resources, Stage, chain};
use crate::sandbox::{AskError, Ended, HowToPause};
use crate::stages::OperationStage;

/// Longest wait for a guest to write to its disk what only its memory has.
const SYNC: Duration = Duration::from_secs(60);

impl Driver {
    /// Traffic is cut first, the machine ends last: at any moment in between, a failure lets it run on, and the end of this
    /// server leaves either a machine or a record of its capture.
    pub(super) async fn pause(&mut self, mut askers: Vec<Reply<bool>>, how: HowToPause, cause: PauseCause) -> Next {
        let begun = Instant::now();
        let HowToPause { disk_only, if_responsive } = how;
        if if_responsive && !self.responds().await {
            self.journal.note(Level::Warn, "not paused: its guest agent does not answer", &[]);
            for reply in askers {
                _ = reply.send(Err(Refusal::Failed(AskError::Unresponsive { id: self.id })));
            }
            return Next::Serve;
        }
        let unresponsive = !disk_only && !if_responsive && self.is_silent().await;
        self.close_down(Phase::Pausing);
        let (result, meanwhile) = {
            let Self { id, parts, rows, resources, row, base, inbox, access_token, stages, .. } = self;
            let work = async {
                if disk_only {
                    sync_guest(*id, resources, access_token.as_deref()).await?;
                }
                let stopped = resources.stopped(row, base.as_ref(), !disk_only).map_err(|e| failed(*id, e))?;
                stopped.machine.pause_vcpus().await.map_err(|error| failed(*id, error.into()))?;
                crash_point("pause.stopped");
                let copied = parts.captures.copy(stopped).await.map_err(|error| failed(*id, error))?;
                crash_point("pause.copied");
                let capture = copied.finish().await.map_err(|error| failed(*id, error))?;
                crash_point("pause.finished");
                let mut paused = row.clone();
                paused.stage = Stage::Paused(capture.id());
                paused.unresponsive = unresponsive;
                match rows.put(id.to_string(), paused.clone()).await {
                    Ok(()) => *row = paused,
                    Err(error) => {
                        capture.doom();
                        return Err(AskError::Unrecorded { id: *id, why: chain(&error) });
                    }
                }
                Ok(capture)
            };
            let work = stages.time(OperationStage::PAUSE, Box::pin(work));
            inbox.during(Phase::Pausing, &CancellationToken::new(), work).await
        };
        askers.extend(meanwhile.joined.into_iter().filter_map(|message| match message {
            Message::Pause { reply, .. } => Some(reply),
            _ => None,
        }));
        match result {
            Ok(capture) => self.paused(capture, askers, disk_only, cause, begun).await,
            Err(error) => self.not_paused(error, askers, cause).await,
        }
    }

    /// Whether the guest's agent, which was not heard of lately, does not answer. One that was is not asked again: that
    /// would cost each pause a round trip.
    async fn is_silent(&self) -> bool {
        let lately = 2 * self.parts.config.sample_interval;
        let heard = self.status.borrow().live.as_ref().is_some_and(|live| live.pulse.within(lately));
        !heard && !self.responds().await
    }

    /// Whether the guest's agent answers.
    async fn responds(&self) -> bool {
        match &self.resources.slot {
            Some(slot) => guest::is_healthy(slot.dialer().as_ref()).await,
            None => false,
        }
    }

    async fn paused(
        &mut self,
        capture: Capture,
        askers: Vec<Reply<bool>>,
        disk_only: bool,
        cause: PauseCause,
        begun: Instant,
    ) -> Next {
        crash_point("pause.recorded");
        self.rested = Some(capture);
        self.status.send_modify(|status| {
            status.phase = Phase::Paused;
            status.disk_only = disk_only;
            status.unresponsive = self.row.unresponsive;
        });
        info!(sandbox_id = %self.id, took_ms = begun.elapsed().as_millis() as u64, ?cause, "sandbox is paused");
        let (kept, took) = (if disk_only { "disk" } else { "memory and disk" }, millis(begun));
        let fields = [("cause", cause.name()), ("kept", kept), ("took_ms", &*took)];
        let (level, what) = match self.row.unresponsive {
            false => (Level::Info, "paused"),
            true => (Level::Warn, "paused; its guest agent did not answer"),
        };
        self.journal.note(level, what, &fields);
        for reply in askers {
            _ = reply.send(Ok(true));
        }
        let Self { parts, resources, inbox, .. } = self;
        let release = resources.release(parts.disks.as_ref());
        let (released, meanwhile) = inbox.during(Phase::Paused, &CancellationToken::new(), release).await;
        crash_point("pause.released");
        match released {
            Ok(()) => self.forget_machine().await,
            // The row names it still: a resume, a delete, and the next start try again.
            Err(failures) => warn!(sandbox_id = %self.id, failures, "a paused sandbox's machine is not gone yet"),
        }
        match meanwhile.deleted {
            Some(why) => Next::End(why),
            None if cause == PauseCause::Stop => Next::PutAway,
            None => Next::Rest,
        }
    }

    /// Nothing of the machine is left.
    pub(super) async fn forget_machine(&mut self) {
        self.base = None;
        (self.row.machine, self.row.slot, self.row.base, self.row.boot) = (None, None, None, None);
        self.row.beside = None;
        if let Err(error) = self.rows.put(self.id.to_string(), self.row.clone()).await {
            warn!(sandbox_id = %self.id, error = chain(&error), "could not record the end of a machine");
        }
    }

    async fn not_paused(&mut self, error: AskError, askers: Vec<Reply<bool>>, cause: PauseCause) -> Next {
        warn!(sandbox_id = %self.id, error = chain(&error), "sandbox could not be paused");
        let reason = chain(&error);
        self.journal.note(Level::Warn, "could not be paused", &[("cause", cause.name()), ("reason", &reason)]);
        let next = match self.go_on().await {
            Ok(()) => {
                if cause == PauseCause::Expired {
                    self.set_deadline(AGAIN, true).await;
                }
                let start_times = self.status.borrow().start_times;
                self.open_up(start_times);
                match cause {
                    // It is not lost: it runs on, for the next server to take over.
                    PauseCause::Stop => Next::Leave,
                    PauseCause::Asked | PauseCause::Expired | PauseCause::Idle => Next::Serve,
                }
            }
            Err(stuck) => Next::End(Ended::Stuck(chain(&stuck))),
        };
        for reply in askers {
            _ = reply.send(Err(Refusal::Failed(error.clone())));
        }
        next
    }

    /// Lets a machine that stands still go on.
    async fn go_on(&self) -> Result<(), VmmError> {
        match &self.resources.machine {
            Some(machine) => machine.resume_vcpus().await,
            None => Err(VmmError::Ended { operation: "resume", detail: "there is no machine".to_owned() }),
        }
    }
}

/// Has the guest write everything to its disk: the rest of its memory will be gone.
pub(super) async fn sync_guest(id: SandboxId, resources: &Resources, token: Option<&str>) -> Result<(), AskError> {
    let unsynced = |why: String| AskError::Unrecorded { id, why };
    let slot = resources.slot.as_ref().ok_or_else(|| unsynced("it has no network".to_owned()))?;
    match tokio::time::timeout(SYNC, guest::sync(slot.dialer().as_ref(), token)).await {
        Ok(synced) => synced.map_err(|error| unsynced(format!("its guest could not write to its disk: {error}"))),
        Err(_) => Err(unsynced(format!("its guest did not write all to its disk within {SYNC:?}"))),
    }
}

fn failed(id: SandboxId, error: CaptureError) -> AskError {
    AskError::Capture { id, source: Arc::new(error) }
}
