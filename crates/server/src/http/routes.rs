//! The proxy's view of the orchestrator: which sandbox a request may reach, and how.

use std::io;
use std::sync::Arc;

use aenv_orchestrator::{GuestDialer, Orchestrator};
use aenv_proxy::{Connector, Route, RouteError, Routes};
use async_trait::async_trait;
use tokio::net::TcpStream;

/// Routes of one node's sandboxes.
#[derive(Debug)]
pub(crate) struct NodeRoutes {
    pub(crate) orchestrator: Orchestrator,
}

#[async_trait]
impl Routes for NodeRoutes {
    async fn route(&self, sandbox: &str, _port: u16) -> Result<Route, RouteError> {
        let id = sandbox.parse().map_err(|_| RouteError::NotFound)?;
        let Some(route) = self.orchestrator.route(id) else {
            // One that is still starting is not gone: its clients are to come back.
            return Err(if self.orchestrator.get(id).is_ok() { RouteError::Busy } else { RouteError::NotFound });
        };
        Ok(Route {
            connector: Arc::new(ThroughDialer(route.dialer)),
            traffic_token: route.traffic_token,
            ended: route.ended,
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
