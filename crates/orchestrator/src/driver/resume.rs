//! `Resuming`: a machine goes on from the capture. Until it is recorded as running, the capture is what counts.

use std::sync::Arc;
use std::time::Duration;

use aenv_durable::crash_point;
use aenv_model::Phase;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{Driver, Next, after, millis};
use crate::journal::Level;
use crate::message::{Message, Refusal, Reply};
use crate::resources::{Stage, chain};
use crate::sandbox::{AskError, CreateError, Source};
use crate::stages::OperationStage;
use crate::start::{Start, start};

impl Driver {
    pub(super) async fn resume(&mut self, mut life: Duration, mut askers: Vec<Reply<bool>>) -> Next {
        let begun = Instant::now();
        let id = self.id;
        let Some(capture) = self.rested.clone() else {
            return Next::Rest; // cannot be: only a rested sandbox is resumed
        };
        self.status.send_modify(|status| status.phase = Phase::Resuming);
        let cancel = self.shutdown.child_token();
        let before = self.row.clone();
        let (result, meanwhile) = {
            let Self {
                parts,
                rows,
                blanks,
                spec,
                access_token,
                start_permits,
                row,
                resources,
                base,
                inbox,
                stages,
                ..
            } = self;
            let source = Source { capture: Some(capture.clone()), image: None };
            let starting = async {
                // What a pause could not give back.
                resources.release(parts.disks.as_ref()).await.map_err(|why| CreateError::Source { why })?;
                row.beside = None;
                let access_token = access_token.as_deref();
                let begin = Start { parts, rows, id, present: None, spec, access_token, blanks, cancel: &cancel };
                let _permit = begin.permit(start_permits).await?;
                let started = start(&begin, source, row, resources).await?;
                *base = started.base;
                let running = crate::resources::SandboxRow {
                    stage: Stage::Running,
                    end_at: after(life),
                    unresponsive: false,
                    ..row.clone()
                };
                let recorded = rows.put(id.to_string(), running.clone()).await;
                crash_point("resume.recorded");
                recorded.map_err(CreateError::in_step(id, "record the sandbox"))?;
                *row = running;
                Ok(started.times)
            };
            let starting = stages.time(OperationStage::RESUME, Box::pin(starting));
            inbox.during(Phase::Resuming, &cancel, starting).await
        };
        for message in meanwhile.joined {
            if let Message::Start { life: theirs, reply, .. } = message {
                life = life.max(theirs);
                askers.push(reply);
            }
        }
        match result {
            Ok(times) => {
                self.rested = None;
                capture.doom(); // the machine has it for as long as it needs it
                self.row.end_at = self.row.end_at.max(after(life));
                self.open_up(times);
                info!(sandbox_id = %id, took_ms = begun.elapsed().as_millis() as u64, ?times, "sandbox is resumed");
                self.journal.note(Level::Info, "resumed", &[("took_ms", &millis(begun))]);
                for reply in askers {
                    _ = reply.send(Ok(true));
                }
                match meanwhile.deleted {
                    Some(why) => Next::End(why),
                    None => Next::Serve,
                }
            }
            Err(error) => {
                warn!(sandbox_id = %id, error = chain(&error), "sandbox could not be resumed");
                self.journal.note(Level::Warn, "could not be resumed", &[("reason", &chain(&error))]);
                self.status.send_modify(|status| status.phase = Phase::Paused);
                match self.resources.release(self.parts.disks.as_ref()).await {
                    Ok(()) => {
                        self.row = before;
                        self.forget_machine().await;
                    }
                    Err(failures) => warn!(sandbox_id = %id, failures, "a failed resume is not taken down yet"),
                }
                let error = AskError::Resume { id, source: Arc::new(error) };
                for reply in askers {
                    _ = reply.send(Err(Refusal::Failed(error.clone())));
                }
                match meanwhile.deleted {
                    Some(why) => Next::End(why),
                    None => Next::Rest,
                }
            }
        }
    }
}
