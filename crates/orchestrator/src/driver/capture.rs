//! `Snapshotting` and `Forking`: the machine stands still while it is copied, and goes on.

use std::sync::Arc;

use aenv_durable::crash_point;
use aenv_model::Phase;
use aenv_snapshot::CaptureError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::pause::sync_guest;
use super::{Driver, Next, millis};
use crate::journal::Level;
use crate::message::{CaptureKind, Refusal, Reply};
use crate::resources::chain;
use crate::sandbox::{AskError, Ended, Taken};
use crate::stages::OperationStage;

/// How a copy went wrong.
enum Failure {
    /// The machine went on all the time.
    Ask(AskError),
    /// The machine goes on.
    Capture(CaptureError),
    /// It does not.
    Stuck(aenv_vmm_driver::VmmError),
}

impl Driver {
    pub(super) async fn capture(&mut self, kind: CaptureKind, reply: Reply<Taken>) -> Next {
        let (phase, begun) = (kind.phase(), Instant::now());
        self.status.send_modify(|status| status.phase = phase);
        let (result, _) = {
            let Self { id, parts, resources, row, base, spec, inbox, access_token, stages, .. } = self;
            let disk_only = kind == CaptureKind::Snapshot { disk_only: true };
            let work = async {
                if disk_only {
                    sync_guest(*id, resources, access_token.as_deref()).await.map_err(Failure::Ask)?;
                }
                let stopped = resources.stopped(row, base.as_ref(), !disk_only).map_err(Failure::Capture)?;
                let begun = Instant::now();
                let copied = match stopped.machine.pause_vcpus().await {
                    Ok(()) => {
                        crash_point("capture.stopped");
                        parts.captures.copy(stopped).await
                    }
                    Err(error) => Err(error.into()),
                };
                crash_point("capture.copied");
                let resumed = stopped.machine.resume_vcpus().await;
                let stall = begun.elapsed();
                resumed.map_err(Failure::Stuck)?;
                let capture = copied.map_err(Failure::Capture)?.finish().await.map_err(Failure::Capture)?;
                crash_point("capture.finished");
                Ok(Taken { capture, spec: Arc::clone(spec), stall })
            };
            let work = Box::pin(work);
            let work = async {
                match kind {
                    CaptureKind::Snapshot { .. } => stages.time(OperationStage::CAPTURE, work).await,
                    CaptureKind::Fork => work.await, // counted with its children
                }
            };
            inbox.during(phase, &CancellationToken::new(), work).await
        };
        self.status.send_modify(|status| status.phase = Phase::Running);
        match result {
            Ok(taken) => {
                let stall_ms = taken.stall.as_millis() as u64;
                info!(sandbox_id = %self.id, capture = %taken.capture.id(), ?kind, stall_ms, "sandbox was captured");
                let (stall, took) = (stall_ms.to_string(), millis(begun));
                self.journal.note(Level::Info, kind.done(), &[("stall_ms", &stall), ("took_ms", &took)]);
                if let Err(Ok(taken)) = reply.send(Ok(taken)) {
                    taken.capture.doom(); // nobody waits for it any more
                }
                Next::Serve
            }
            Err(Failure::Ask(error)) => {
                self.not_captured(kind, &chain(&error));
                _ = reply.send(Err(Refusal::Failed(error)));
                Next::Serve
            }
            Err(Failure::Capture(error)) => {
                self.not_captured(kind, &chain(&error));
                let error = AskError::Capture { id: self.id, source: Arc::new(error) };
                _ = reply.send(Err(Refusal::Failed(error)));
                Next::Serve
            }
            Err(Failure::Stuck(error)) => {
                _ = reply.send(Err(Refusal::Gone));
                Next::End(Ended::Stuck(chain(&error)))
            }
        }
    }

    fn not_captured(&self, kind: CaptureKind, reason: &str) {
        let what = if kind == CaptureKind::Fork { "could not be forked" } else { "no snapshot could be taken" };
        self.journal.note(Level::Warn, what, &[("reason", reason)]);
    }
}
