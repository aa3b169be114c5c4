//! `RollingBack`: a machine that goes on from an earlier instant is made ready beside the present one, and takes its place.

use std::sync::Arc;

use aenv_block_device::DiskRecord;
use aenv_durable::crash_point;
use aenv_model::{Phase, SandboxId};
use aenv_snapshot::Capture;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{Driver, Next, millis};
use crate::journal::Level;
use crate::message::{Refusal, Reply};
use crate::resources::{Resources, SandboxRow, chain};
use crate::sandbox::{AskError, CreateError, Source};
use crate::stages::OperationStage;
use crate::start::{Start, Started, start};

impl Driver {
    /// The row always names both machines, and says by their places which of them counts: whenever this server ends, the
    /// next one keeps that and ends the other.
    pub(super) async fn roll_back(&mut self, capture: Capture, reply: Reply<()>) -> Next {
        let begun = Instant::now();
        let (id, to) = (self.id, capture.manifest().captured_at.to_string());
        self.status.send_modify(|status| status.phase = Phase::RollingBack);
        let cancel = self.shutdown.child_token();
        let name = SandboxId::new().to_string();
        let mut row = SandboxRow {
            work_dir: self.parts.run_dir.join(&name),
            disk: DiskRecord { name },
            machine: None,
            slot: None,
            boot: None,
            base: None,
            beside: None,
            ..self.row.clone()
        };
        let mut resources = Resources::default();
        let (result, meanwhile) = {
            let Self { parts, rows, blanks, spec, access_token, start_permits, inbox, stages, .. } = self;
            let (present, held) = (&self.row, &mut self.resources);
            let access_token = access_token.as_deref();
            let begin = Start { parts, rows, id, present: Some(present), spec, access_token, blanks, cancel: &cancel };
            let source = Source { capture: Some(capture), image: None };
            let starting = async {
                // There is one place beside the present machine, and a rollback before may not have left it.
                if let Some(left) = &mut held.beside {
                    left.release(parts.disks.as_ref()).await.map_err(|why| CreateError::Source { why })?;
                    held.beside = None;
                }
                let _permit = begin.permit(start_permits).await?;
                let started = start(&begin, source, &mut row, &mut resources).await?;
                let swapped = row.beside(present);
                let recorded = rows.put(id.to_string(), swapped.clone()).await;
                crash_point("rollback.swapped");
                recorded.map_err(CreateError::in_step(id, "record the machine"))?;
                Ok((started, swapped))
            };
            let starting = stages.time(OperationStage::ROLLBACK, Box::pin(starting));
            inbox.during(Phase::RollingBack, &cancel, starting).await
        };
        match result {
            Ok((Started { base, times }, swapped)) => {
                // Whoever is connected is connected to what is no more.
                self.close_down(Phase::RollingBack);
                std::mem::swap(&mut self.resources, &mut resources);
                let old_base = std::mem::replace(&mut self.base, base);
                self.row = swapped;
                self.open_up(times);
                info!(sandbox_id = %id, took_ms = begun.elapsed().as_millis() as u64, ?times, "sandbox is rolled back");
                self.journal.note(Level::Info, "rolled back", &[("to", &to), ("took_ms", &millis(begun))]);
                _ = reply.send(Ok(()));
                self.end_beside(resources).await;
                crash_point("rollback.ended");
                drop(old_base); // its memory was the old machine's
            }
            Err(error) => {
                warn!(sandbox_id = %id, error = chain(&error), "sandbox could not be rolled back");
                self.journal.note(Level::Warn, "could not be rolled back", &[("reason", &chain(&error))]);
                self.status.send_modify(|status| status.phase = Phase::Running);
                if self.resources.beside.is_none() {
                    self.row = self.row.beside(&row);
                    self.end_beside(resources).await;
                }
                let failed = Refusal::Failed(AskError::Rollback { id, source: Arc::new(error) });
                _ = reply.send(Err(if meanwhile.deleted.is_some() { Refusal::Gone } else { failed }));
            }
        }
        meanwhile.deleted.map_or(Next::Serve, Next::End)
    }

    /// Ends the machine that does not count. What would not go stays in the row and with what the sandbox holds: the next
    /// rollback, pause or delete tries again, and so does the next start.
    async fn end_beside(&mut self, mut resources: Resources) {
        let released = resources.release(self.parts.disks.as_ref()).await;
        match released {
            Ok(()) => self.row.beside = None,
            Err(failures) => {
                warn!(sandbox_id = %self.id, failures, "a rolled back sandbox's other machine is not gone yet");
                self.resources.beside = Some(Box::new(resources));
            }
        }
        if let Err(error) = self.rows.put(self.id.to_string(), self.row.clone()).await {
            warn!(sandbox_id = %self.id, error = chain(&error), "could not record the end of a machine");
        }
    }
}
