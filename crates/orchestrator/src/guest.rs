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

/// Patience with a connection to a guest that may still be booting: it drops the first packet, which TCP repeats only
/// after a second, so a fresh attempt finds out sooner.
const DIAL: Duration = Duration::from_millis(200);

/// Patience with a probe as a whole. A live guest answers far sooner even when it is emulated on a busy host.
const PROBE: Duration = Duration::from_secs(3);

/// Most bytes of an error text that are kept.
const ERROR_LIMIT: usize = 4096;

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
        send(stream, Method::GET, "/health", None, Bytes::new()).await
    };
    matches!(tokio::time::timeout(PROBE, probe).await, Ok(Ok(())))
}

/// `POST /init`. Its patience is its caller's.
pub(crate) async fn init(dialer: &dyn GuestDialer, request: &InitRequest) -> Result<(), GuestError> {
    let body = serde_json::to_vec(request).map_err(io::Error::other)?;
    let token = request.access_token.as_deref();
    send(dialer.dial(ENVD_PORT).await?, Method::POST, "/init", token, body.into()).await
}

/// One request on a connection of its own: a connection to a guest is never reused across its stops.
async fn send(
    stream: TcpStream,
    method: Method,
    path: &'static str,
    token: Option<&str>,
    body: Bytes,
) -> Result<(), GuestError> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let mut request = Request::builder()
        .method(method.clone())
        .uri(path)
        .header(header::HOST, "guest")
        .header(header::CONTENT_TYPE, "application/json");
    if let Some(token) = token {
        request = request.header("x-access-token", token);
    }
    let request = request.body(Full::new(body)).map_err(io::Error::other)?;
    let exchange = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let text = match Limited::new(response.into_body(), ERROR_LIMIT).collect().await {
            Ok(body) => String::from_utf8_lossy(&body.to_bytes()).trim().to_owned(),
            Err(_) => String::new(),
        };
        Err(GuestError::Status { method, path, status, text })
    };
    // The connection is polled beside the exchange and dropped with it: no task outlives this call.
    tokio::select! {
        result = exchange => result,
        Err(error) = connection => Err(error.into()),
    }
}
