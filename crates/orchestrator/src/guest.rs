//! The node's own conversation with a guest agent: is it up, and what it has to know.

use std::io;
use std::time::Duration;

use aenv_guest_proto::{ENVD_PORT, InitRequest};
use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::seams::GuestDialer;
use crate::vitals::Usage;

/// Patience with a connection to a guest that may still be booting: it drops the first packet, which TCP repeats only
/// after a second, so a fresh attempt finds out sooner.
const DIAL: Duration = Duration::from_millis(200);

/// Patience with a probe as a whole. A live guest answers far sooner even when it is emulated on a busy host.
const PROBE: Duration = Duration::from_secs(3);

/// Patience with a login shell that does nothing.
const EXERCISE: Duration = Duration::from_secs(20);

/// Most bytes of an answer that are read.
const ANSWER_LIMIT: usize = 4096;

/// What the agent can answer that is no success.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GuestError {
    /// No connection, or it broke.
    #[error("guest agent: {0}")]
    Connection(#[from] io::Error),
    /// The HTTP exchange failed.
    #[error("guest agent: {0}")]
    Http(#[from] hyper::Error),
    /// It answered, and not with success.
    #[error("guest agent answered {method} {path} with {status}: {text}")]
    Status { method: Method, path: &'static str, status: StatusCode, text: String },
    /// No answer in time.
    #[error("guest agent did not answer within {0:?}")]
    Timeout(Duration),
}

/// True once the agent serves requests.
pub(crate) async fn is_healthy(dialer: &dyn GuestDialer) -> bool {
    let probe = async {
        let stream =
            tokio::time::timeout(DIAL, dialer.dial(ENVD_PORT)).await.map_err(|_| GuestError::Timeout(DIAL))??;
        send(stream, Call { method: Method::GET, ..Call::to("/health") }).await
    };
    matches!(tokio::time::timeout(PROBE, probe).await, Ok(Ok(_)))
}

/// `POST /init`. Its patience is its caller's.
pub(crate) async fn init(dialer: &dyn GuestDialer, request: &InitRequest) -> Result<(), GuestError> {
    let body = serde_json::to_vec(request).map_err(io::Error::other)?;
    let token = request.access_token.as_deref();
    send(dialer.dial(ENVD_PORT).await?, Call { token, body: body.into(), ..Call::to("/init") }).await.map(drop)
}

/// `POST /sync`: the guest's file systems are written to its disk. Its patience is its caller's.
pub(crate) async fn sync(dialer: &dyn GuestDialer, token: Option<&str>) -> Result<(), GuestError> {
    send(dialer.dial(ENVD_PORT).await?, Call { token, ..Call::to("/sync") }).await.map(drop)
}

/// Whether any command, or terminal, that its agent started runs in a guest.
pub(crate) async fn runs_commands(dialer: &dyn GuestDialer, token: Option<&str>) -> Result<bool, GuestError> {
    let call = Call { token, body: Bytes::from_static(b"{}"), ..Call::to("/process.Process/List") };
    let ask = async { send(dialer.dial(ENVD_PORT).await?, call).await };
    let answer = tokio::time::timeout(PROBE, ask).await.map_err(|_| GuestError::Timeout(PROBE))??;
    // An answer that is too long to be read has many.
    let Some(answer) = answer else { return Ok(true) };
    let answer: serde_json::Value = serde_json::from_slice(&answer).map_err(io::Error::other)?;
    Ok(answer["processes"].as_array().is_some_and(|processes| !processes.is_empty()))
}

/// What a guest uses of its machine.
pub(crate) async fn usage(dialer: &dyn GuestDialer, token: Option<&str>) -> Result<Usage, GuestError> {
    let call = Call { method: Method::GET, token, ..Call::to("/metrics") };
    let ask = async { send(dialer.dial(ENVD_PORT).await?, call).await };
    let answer = tokio::time::timeout(PROBE, ask).await.map_err(|_| GuestError::Timeout(PROBE))??;
    Ok(serde_json::from_slice(&answer.unwrap_or_default()).map_err(io::Error::other)?)
}

/// Runs `true` in a login shell, as SDKs run commands, and waits for its end, whatever that is. What all commands need is
/// in the guest's memory afterwards.
pub(crate) async fn exercise(dialer: &dyn GuestDialer, token: Option<&str>) -> Result<(), GuestError> {
    let command = serde_json::json!({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "true"]}}).to_string();
    // One message of Connect's streaming protocol: no flags, and its length.
    let mut body = vec![0];
    body.extend_from_slice(&(command.len() as u32).to_be_bytes());
    body.extend_from_slice(command.as_bytes());
    let kind = "application/connect+json";
    let call = Call { token, kind, body: body.into(), ..Call::to("/process.Process/Start") };
    let run = async { send(dialer.dial(ENVD_PORT).await?, call).await };
    tokio::time::timeout(EXERCISE, run).await.unwrap_or(Err(GuestError::Timeout(EXERCISE))).map(drop)
}

/// `POST /init` to a guest that has just gone on, until it answers. Its patience is its caller's. Each attempt asks anew,
/// for the time in it.
pub(crate) async fn init_soon(dialer: &dyn GuestDialer, request: impl Fn() -> InitRequest, pause: Duration) {
    loop {
        match tokio::time::timeout(PROBE, init(dialer, &request())).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => tracing::debug!(%error, "a guest that goes on does not answer yet"),
            Err(_) => {}
        }
        tokio::time::sleep(pause).await;
    }
}

/// One request to the agent.
struct Call<'a> {
    method: Method,
    path: &'static str,
    token: Option<&'a str>,
    kind: &'static str,
    body: Bytes,
}

impl Call<'_> {
    fn to(path: &'static str) -> Self {
        Self { method: Method::POST, path, token: None, kind: "application/json", body: Bytes::new() }
    }
}

/// Sends it on a connection of its own, since a connection to a guest is never reused across its stops, and waits for the
/// end of the answer, which is given unless it is too long.
async fn send(stream: TcpStream, call: Call<'_>) -> Result<Option<Bytes>, GuestError> {
    let Call { method, path, token, kind, body } = call;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let mut request = Request::builder()
        .method(method.clone())
        .uri(path)
        .header(header::HOST, "guest")
        .header(header::CONTENT_TYPE, kind);
    if let Some(token) = token {
        request = request.header("x-access-token", token);
    }
    let request = request.body(Full::new(body)).map_err(io::Error::other)?;
    let exchange = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let answer = Limited::new(response.into_body(), ANSWER_LIMIT).collect().await;
        let answer = answer.ok().map(http_body_util::Collected::to_bytes);
        if status.is_success() {
            return Ok(answer);
        }
        let text = String::from_utf8_lossy(&answer.unwrap_or_default()).trim().to_owned();
        Err(GuestError::Status { method, path, status, text })
    };
    // The connection is polled beside the exchange and dropped with it: no task outlives this call.
    tokio::select! {
        result = exchange => result,
        Err(error) = connection => Err(error.into()),
    }
}
