//! The proxy's view of the orchestrator: which sandbox a request may reach, and how.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use aenv_model::SandboxId;
use aenv_orchestrator::{GuestDialer, Orchestrator};
use aenv_proxy::{Connector, Route, RouteError, Routes};
use async_trait::async_trait;
use tokio::net::TcpStream;
use tracing::warn;

/// Routes of one node's sandboxes.
#[derive(Debug)]
pub(crate) struct NodeRoutes {
    pub(crate) orchestrator: Orchestrator,
}

/// Longest that traffic waits for a sandbox that it resumes.
const WAKE: Duration = Duration::from_secs(60);

impl NodeRoutes {
    /// The way into a sandbox that does not run now, if traffic resumes it.
    async fn woken(&self, id: SandboxId) -> Result<aenv_orchestrator::Route, RouteError> {
        let info = self.orchestrator.get(id).map_err(|_| RouteError::NotFound)?;
        match tokio::time::timeout(WAKE, self.orchestrator.wake(id)).await {
            Ok(Ok(true)) => self.orchestrator.route(id).ok_or(RouteError::Busy),
            // To its clients a paused sandbox is not there. One that is still starting is: they are to come back.
            Ok(Ok(false)) if info.phase.is_paused() => Err(RouteError::NotFound),
            Ok(Ok(false)) | Err(_) => Err(RouteError::Busy),
            Ok(Err(error)) => {
                warn!(sandbox_id = %id, %error, "traffic could not resume a sandbox");
                Err(RouteError::Busy)
            }
        }
    }
}

#[async_trait]
impl Routes for NodeRoutes {
    async fn route(&self, sandbox: &str, _port: u16) -> Result<Route, RouteError> {
        let id = sandbox.parse().map_err(|_| RouteError::NotFound)?;
        let route = match self.orchestrator.route(id) {
            Some(route) => route,
            None => self.woken(id).await?,
        };
        Ok(Route {
            connector: Arc::new(ThroughDialer(route.dialer)),
            traffic_token: route.traffic_token,
            ended: route.ended,
            in_use: Some(Arc::new(route.in_use)),
        })
    }
}

#[derive(Debug)]
struct ThroughDialer(Arc<dyn GuestDialer>);

#[async_trait]
impl Connector for ThroughDialer {
    async fn connect(&self, port: u16) -> io::Result<TcpStream> {
        self.0.dial(port).await
    }
}
