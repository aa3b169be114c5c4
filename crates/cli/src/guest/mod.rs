//! The agent in a sandbox, reached through the node server: its processes and files.

mod event;
pub(crate) mod files;
pub(crate) mod input;
mod program;
mod transport;

use std::time::Duration;

use aenv_api::{Client, SandboxState};
use aenv_guest_proto::wire::process::{
    CloseStdinRequest, ConnectRequest, PTY, ProcessClient, ProcessSelector, SendSignalRequest, Signal,
    StreamInputRequest, UpdateRequest, process_selector,
};
use aenv_guest_proto::{ENVD_PORT, OUTPUT_REPLAY, credentials};
use aenv_model::SandboxId;
use anyhow::Context as _;
use connectrpc::client::{CallOptions, ClientConfig};
use connectrpc::{CompressionRegistry, ConnectError};
use futures::Stream;
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use tokio::time::{Instant, sleep, timeout};

pub(crate) use event::{Event, Events};
pub(crate) use program::{Channel, Program, TerminalSize};
use transport::Transport;

pub(crate) const SANDBOX_HEADER: HeaderName = HeaderName::from_static("x-agentenv-sandbox-id");
pub(crate) const PORT_HEADER: HeaderName = HeaderName::from_static("x-agentenv-target-port");
const TOKEN_HEADER: HeaderName = HeaderName::from_static("x-access-token");
/// Asks the agent for a sign of life after this many seconds without output.
const PING_HEADER: HeaderName = HeaderName::from_static("keepalive-ping-interval");
/// How much of what a process wrote before comes first.
const REPLAY_HEADER: HeaderName = HeaderName::from_static(OUTPUT_REPLAY);
/// Well below the time after which a session counts as lost.
const PING_SECONDS: HeaderValue = HeaderValue::from_static("5");

/// Longest wait for one answer to "are you there".
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Pause between two such questions.
const PROBE_PAUSE: Duration = Duration::from_millis(100);
/// Longest wait for a call that does nothing but set something.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// How much later than we the agent keeps a program's limit, so that it is our word that counts while we are there.
const SLACK: Duration = Duration::from_secs(5);

/// One sandbox's agent.
#[derive(Debug, Clone)]
pub(crate) struct Guest {
    transport: Transport,
    config: ClientConfig,
    sandbox: SandboxId,
}

impl Guest {
    /// The agent of a sandbox that the server knows.
    pub(crate) async fn find(client: &Client, sandbox: SandboxId) -> anyhow::Result<(Self, SandboxState)> {
        let detail = client.sandbox(sandbox).await?;
        let guest = Self::new(client.server(), sandbox, detail.envd_access_token.as_deref())?;
        Ok((guest, detail.listed.state))
    }

    /// The agent of `sandbox`, behind the server at `server`. Opens no connection.
    pub(crate) fn new(server: &str, sandbox: SandboxId, token: Option<&str>) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::new();
        let id = HeaderValue::from_str(&sandbox.to_string()).context("an id is a header value")?;
        headers.insert(SANDBOX_HEADER, id);
        headers.insert(PORT_HEADER, HeaderValue::from(ENVD_PORT));
        if let Some(token) = token {
            let mut token = HeaderValue::from_str(token).context("the sandbox's access token is no header value")?;
            token.set_sensitive(true);
            headers.insert(TOKEN_HEADER, token);
        }
        let base: Uri = server.parse().with_context(|| format!("{server:?} is not a server URL"))?;
        // What we carry is typed by hand or small; compressing it would only add delay.
        let config =
            ClientConfig::new(base).proto().with_compression(CompressionRegistry::new()).with_default_headers(headers);
        Ok(Self { transport: Transport::new(server)?, config, sandbox })
    }

    /// Waits until the agent answers, at most `limit`. Errors: it does not.
    pub(crate) async fn wait_ready(&self, limit: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            let probe = self.transport.health(&self.config);
            match timeout(PROBE_TIMEOUT, probe).await {
                Ok(Ok(())) => return Ok(()),
                _ if Instant::now() < deadline => sleep(PROBE_PAUSE).await,
                Ok(Err(error)) => return Err(error).with_context(|| self.not_ready(limit)),
                Err(_) => anyhow::bail!(self.not_ready(limit)),
            }
        }
    }

    fn not_ready(&self, limit: Duration) -> String {
        format!("the agent of sandbox {} did not answer within {} s", self.sandbox, limit.as_secs())
    }

    /// Starts a program and follows it. The first event is its pid. The program goes on if the events are dropped.
    pub(crate) async fn start(&self, program: Program) -> Result<Events, ConnectError> {
        let mut options = following();
        if let Some(user) = &program.user {
            options = options.with_header(header::AUTHORIZATION, credentials(user));
        }
        if let Some(limit) = program.limit {
            options = options.with_timeout(limit + SLACK);
        }
        Ok(Events::of_start(self.process().start_with_options(program.into(), options).await?))
    }

    /// Follows a running process from now on: what it wrote before is on the screen already.
    pub(crate) async fn follow(&self, pid: u32) -> Result<Events, ConnectError> {
        let request = ConnectRequest { process: selector(pid).into(), ..Default::default() };
        let options = following().with_header(REPLAY_HEADER, HeaderValue::from_static("0"));
        Ok(Events::of_connect(self.process().connect_with_options(request, options).await?))
    }

    /// Sends input, message by message, until `requests` ends; the first must select the process.
    pub(crate) async fn stream_input(
        &self,
        requests: impl Stream<Item = StreamInputRequest> + Send + 'static,
    ) -> Result<(), ConnectError> {
        self.process().stream_input(requests).await.map(drop)
    }

    /// Ends a process's standard input.
    pub(crate) async fn close_stdin(&self, pid: u32) -> Result<(), ConnectError> {
        let request = CloseStdinRequest { process: selector(pid).into(), ..Default::default() };
        self.process().close_stdin_with_options(request, brief()).await.map(drop)
    }

    /// Sets the size of a process's terminal.
    pub(crate) async fn resize(&self, pid: u32, size: TerminalSize) -> Result<(), ConnectError> {
        let request =
            UpdateRequest { process: selector(pid).into(), pty: PTY::from(size).into(), ..Default::default() };
        self.process().update_with_options(request, brief()).await.map(drop)
    }

    /// Asks a process to end (SIGTERM).
    pub(crate) async fn terminate(&self, pid: u32) -> Result<(), ConnectError> {
        self.signal(pid, Signal::SIGNAL_SIGTERM).await
    }

    /// Ends a process (SIGKILL); a shell takes its terminal's foreground programs with it.
    pub(crate) async fn kill(&self, pid: u32) -> Result<(), ConnectError> {
        self.signal(pid, Signal::SIGNAL_SIGKILL).await
    }

    async fn signal(&self, pid: u32, signal: Signal) -> Result<(), ConnectError> {
        let request = SendSignalRequest { process: selector(pid).into(), signal: signal.into(), ..Default::default() };
        self.process().send_signal_with_options(request, brief()).await.map(drop)
    }

    /// Whether there is a file at `path`.
    pub(crate) async fn has_file(&self, path: &str) -> Result<bool, ConnectError> {
        Ok(self.stat(path, None).await?.is_some())
    }

    fn process(&self) -> ProcessClient<Transport> {
        ProcessClient::new(self.transport.clone(), self.config.clone())
    }
}

/// Selects a process by pid.
pub(crate) fn selector(pid: u32) -> ProcessSelector {
    ProcessSelector { selector: Some(process_selector::Selector::Pid(pid)), ..Default::default() }
}

fn following() -> CallOptions {
    CallOptions::default().with_header(PING_HEADER, PING_SECONDS)
}

fn brief() -> CallOptions {
    CallOptions::default().with_timeout(CALL_TIMEOUT)
}
