//! What the proxy needs to know of a sandbox, and from whom.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

/// Knows which sandboxes take traffic.
#[async_trait]
pub trait Routes: Send + Sync + 'static {
    /// The way to `port` of a sandbox. `sandbox` is what the client wrote, not yet known to be an id of anything.
    async fn route(&self, sandbox: &str, port: u16) -> Result<Route, RouteError>;
}

/// Opens connections into one sandbox.
#[async_trait]
pub trait Connector: Send + Sync {
    /// Connects to a port of the guest, with `TCP_NODELAY`. The proxy puts the deadline around it. An error of kind
    /// `NotConnected` says that the sandbox has no network any more.
    async fn connect(&self, port: u16) -> io::Result<TcpStream>;
}

/// The way into a running sandbox.
#[derive(Clone)]
pub struct Route {
    /// Opens the connections.
    pub connector: Arc<dyn Connector>,
    /// What a request to a port other than the agent's must show; `None` if the sandbox's ports are public. (The agent
    /// checks its own token.)
    pub traffic_token: Option<String>,
    /// Fires when the sandbox takes no more traffic; running streams break then.
    pub ended: CancellationToken,
    /// Kept until the exchange, or the tunnel that it became, is over.
    pub in_use: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.traffic_token.as_ref().map(|_| "(secret)");
        f.debug_struct("Route").field("traffic_token", &token).finish_non_exhaustive()
    }
}

/// Why there is no way to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// No such sandbox, or it has ended.
    #[error("the sandbox was not found")]
    NotFound,
    /// It is between two states; a later request may succeed.
    #[error("the sandbox is in transition")]
    Busy,
}
