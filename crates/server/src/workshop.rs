//! Machines that template builds work in: sandboxes of the node itself.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

use aenv_model::{Command, CommandExit, Output, SandboxId};
use aenv_orchestrator::{AskError, CommandError, NewSandbox, Orchestrator, SandboxSpec, Source};
use aenv_snapshot::Capture;
use aenv_template::{Bench, ReadyTemplate, Workshop};
use async_trait::async_trait;
use tokio::time::MissedTickBehavior;
use tracing::{error, warn};

use crate::http::{guest_defaults, image_of};

/// Life of such a sandbox beyond the last command: it ends by itself if nobody works in it any more.
const LIFE: Duration = Duration::from_secs(600);

/// How often its life is made longer while a command runs.
const KEEP: Duration = Duration::from_secs(120);

/// Makes sandboxes to build in.
#[derive(Debug)]
pub(crate) struct NodeWorkshop {
    pub(crate) orchestrator: Orchestrator,
}

#[async_trait]
impl Workshop for NodeWorkshop {
    async fn open(&self, template: &ReadyTemplate) -> Result<Box<dyn Bench>, String> {
        let spec = SandboxSpec {
            defaults: guest_defaults(&template.config, BTreeMap::new()),
            timeout: Some(LIFE),
            ..SandboxSpec::internal(template.id, template.shape)
        };
        let source = Source { capture: template.capture.clone(), image: template.image.clone().map(image_of) };
        let sandbox = self.orchestrator.create(NewSandbox { spec, source }).await.map_err(|problem| {
            error!(template = %template.id, error = ?problem, "a machine of a template build did not start");
            format!("a machine on it could not be started: {problem}")
        })?;
        Ok(Box::new(SandboxBench { orchestrator: self.orchestrator.clone(), id: sandbox.id }))
    }
}

/// A sandbox that a build works in.
#[derive(Debug)]
struct SandboxBench {
    orchestrator: Orchestrator,
    id: SandboxId,
}

impl SandboxBench {
    /// Works in it, for as long as that takes.
    async fn kept<T>(&self, work: impl Future<Output = Result<T, CommandError>>) -> Result<T, String> {
        tokio::select! {
            done = work => done.map_err(|error| error.to_string()),
            never = self.keep() => match never {},
        }
    }

    async fn keep(&self) -> Infallible {
        let mut ticks = tokio::time::interval(KEEP); // at once, and then every so often
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if let Err(problem) = self.orchestrator.extend(self.id, LIFE).await {
                warn!(sandbox_id = %self.id, %problem, "the machine of a build could not be kept");
            }
        }
    }
}

#[async_trait]
impl Bench for SandboxBench {
    async fn run(&self, command: &Command, output: &(dyn Fn(Output) + Send + Sync)) -> Result<CommandExit, String> {
        self.kept(self.orchestrator.run(self.id, command, output)).await
    }

    async fn put(&self, path: &str, file: &Path) -> Result<(), String> {
        self.kept(self.orchestrator.put_file(self.id, path, file)).await
    }

    async fn capture(&self, memory: bool) -> Result<Capture, String> {
        let taken = self.orchestrator.capture(self.id, !memory).await;
        taken.map(|taken| taken.capture).map_err(|problem| {
            error!(sandbox_id = %self.id, error = ?problem, "the machine of a template build could not be captured");
            match problem {
                AskError::Capture { source, .. } => format!("the machine on it could not be captured: {source}"),
                problem => format!("the machine on it could not be captured: {problem}"),
            }
        })
    }

    async fn close(self: Box<Self>) {
        if let Err(problem) = self.orchestrator.delete(self.id).await {
            warn!(sandbox_id = %self.id, %problem, "a machine of a template build is not gone yet");
        }
    }
}
