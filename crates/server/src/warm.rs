//! Machines that sandboxes of a template go on from.

use std::collections::BTreeMap;
use std::time::Duration;

use aenv_orchestrator::{AskError, NewSandbox, Orchestrator, SandboxSpec, Source};
use aenv_snapshot::Capture;
use aenv_template::{ReadyTemplate, Warm};
use async_trait::async_trait;
use tracing::{error, warn};

use crate::http::{guest_defaults, image_of};

/// Life of the sandbox that is captured: it ends by itself if nobody waits for it any more.
const LIFE: Duration = Duration::from_secs(60);

/// Boots a sandbox, captures it, and deletes it.
#[derive(Debug)]
pub(crate) struct Warmer {
    pub(crate) orchestrator: Orchestrator,
}

#[async_trait]
impl Warm for Warmer {
    async fn warm(&self, template: &ReadyTemplate) -> Result<Capture, String> {
        let spec = SandboxSpec {
            defaults: guest_defaults(&template.config, BTreeMap::new()),
            timeout: Some(LIFE),
            ..SandboxSpec::internal(template.id, template.shape)
        };
        let image = template.image.clone().map(image_of);
        let source = Source { capture: None, image };
        let sandbox = self.orchestrator.create(NewSandbox { spec, source }).await.map_err(|problem| {
            error!(template = %template.id, error = ?problem, "a template's machine did not start");
            format!("a machine on it could not be started: {problem}")
        })?;
        self.orchestrator.exercise(sandbox.id).await;
        let taken = self.orchestrator.capture(sandbox.id, false).await;
        if let Err(problem) = self.orchestrator.delete(sandbox.id).await {
            warn!(sandbox_id = %sandbox.id, %problem, "a template's machine is not gone yet");
        }
        taken.map(|taken| taken.capture).map_err(|problem| {
            error!(template = %template.id, error = ?problem, "a template's machine could not be captured");
            match problem {
                AskError::Capture { source, .. } => format!("the machine on it could not be captured: {source}"),
                problem => format!("the machine on it could not be captured: {problem}"),
            }
        })
    }
}
