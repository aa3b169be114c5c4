//! The client: one connection a call, so that a daemon that was restarted is reached like any other.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aenv_model::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::DeviceConfig;
use crate::wire::{DeviceSpec, DeviceView, ErrorBody, Info, ResizeRequest, RestackRequest, RestackedView, Uppers};

/// Longest wait for an answer that is at hand.
const QUICK: Duration = Duration::from_secs(10);
/// Longest wait for what waits for the host's disks: a flush of what a guest wrote for minutes.
const DISK: Duration = Duration::from_secs(300);
/// Longest wait for a new device: its layers are read from registries, each with a patience of its own.
const OPEN: Duration = Duration::from_secs(300);
/// Largest answer: thousands of devices with hundreds of layers each.
const MAX_ANSWER: usize = 256 << 20;
/// Everything but RFC 3986's unreserved characters is escaped within a path segment.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// What a caller can do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// No daemon answers: start it, or wait until it is back. The call may have been carried out.
    Unreachable,
    /// There is no such device.
    NotFound,
    /// The name, or the upper, is another's; or there are devices.
    Conflict,
    /// It can never be done like this.
    Invalid,
    /// The host's disk is full.
    NoSpace,
    /// A registry does not give a layer.
    Remote,
    /// Anything else: look into the daemon's log.
    Failed,
}

/// A call that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum BlockdError {
    /// No daemon answers at the socket, or not to the end.
    #[error("{call}: aenv-blockd at {socket} cannot be reached", socket = socket.display())]
    Unreachable {
        /// Method and path.
        call: String,
        /// Where it should be.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The daemon took the request and did not answer in time.
    #[error("{call}: aenv-blockd at {socket} did not answer within {} s", waited.as_secs(), socket = socket.display())]
    TimedOut {
        /// Method and path.
        call: String,
        /// Where it is.
        socket: PathBuf,
        /// How long.
        waited: Duration,
    },
    /// The daemon refuses.
    #[error("{message}")]
    Refused {
        /// What can be done about it.
        kind: ErrorKind,
        /// The daemon's words.
        message: String,
    },
    /// The answer is not of the form that this client knows.
    #[error("{call}: aenv-blockd at {socket} answers {status} and not as expected", socket = socket.display())]
    Answer {
        /// Method and path.
        call: String,
        /// Where it is.
        socket: PathBuf,
        /// Of the answer.
        status: StatusCode,
        /// Why it cannot be read.
        source: serde_json::Error,
    },
}

impl BlockdError {
    /// What can be done about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unreachable { .. } | Self::TimedOut { .. } => ErrorKind::Unreachable,
            Self::Refused { kind, .. } => *kind,
            Self::Answer { .. } => ErrorKind::Failed,
        }
    }
}

/// A daemon, reached at its socket. Cheap to clone.
///
/// Every call is sent once and has a deadline: 10 s, or 5 min where disks and registries have a say. Cancel safety: the
/// daemon carries a call out to its end once it has it, whether or not anybody waits; read the state back.
#[derive(Clone)]
pub struct BlockdClient {
    socket: Arc<Path>,
}

impl BlockdClient {
    /// A client of the daemon at `socket`. Opens no connection.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into().into() }
    }

    /// Where the daemon is.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Who answers.
    pub async fn info(&self) -> Result<Info, BlockdError> {
        self.call(Method::GET, "/v1/info", None::<&()>, QUICK).await
    }

    /// Makes a device; one of that name with an equal spec is given back as it is, with another it is a
    /// [conflict](ErrorKind::Conflict). On an error, nothing is left.
    pub async fn create(&self, name: &str, spec: &DeviceSpec) -> Result<DeviceView, BlockdError> {
        self.call(Method::PUT, &device(name, ""), Some(spec), OPEN).await
    }

    /// A device, if there is one of that name.
    pub async fn get(&self, name: &str) -> Result<Option<DeviceView>, BlockdError> {
        absent(self.call(Method::GET, &device(name, ""), None::<&()>, QUICK).await)
    }

    /// All devices, by name.
    pub async fn list(&self) -> Result<Vec<DeviceView>, BlockdError> {
        self.call(Method::GET, "/v1/devices", None::<&()>, QUICK).await
    }

    /// Seals the upper and moves its data file to `layer`, an absolute path in the same filesystem with nothing at it; the
    /// device goes on with a fresh upper. The layer has all that was flushed before, and all whose writing had ended.
    pub async fn restack(&self, name: &str, layer: &Path) -> Result<RestackedView, BlockdError> {
        let request = RestackRequest { layer: layer.to_owned() };
        self.call(Method::POST, &device(name, "/restack"), Some(&request), DISK).await
    }

    /// Changes the size. The caller sees to the filesystem on it.
    pub async fn resize(&self, name: &str, size: Bytes) -> Result<DeviceView, BlockdError> {
        self.call(Method::POST, &device(name, "/resize"), Some(&ResizeRequest { size }), DISK).await
    }

    /// Makes durable what the daemon has. What the kernel caches for writers of its own does not count.
    pub async fn flush(&self, name: &str) -> Result<(), BlockdError> {
        self.call(Method::POST, &device(name, "/flush"), None::<&()>, DISK).await
    }

    /// Takes a device away; one that is not there is success. On success nobody can use it any more. Gives what it was made of
    /// at its end, which may be less than a look before told: its layers are merged now and then.
    pub async fn close(&self, name: &str, uppers: Uppers) -> Result<Option<DeviceConfig>, BlockdError> {
        let uppers = match uppers {
            Uppers::Keep => "?uppers=keep",
            Uppers::Remove => "?uppers=remove",
        };
        let closed = self.call(Method::DELETE, &device(name, uppers), None::<&()>, DISK).await;
        absent(closed).map(Option::flatten)
    }

    /// Ends the daemon. A [conflict](ErrorKind::Conflict) while it has devices.
    pub async fn shutdown(&self) -> Result<(), BlockdError> {
        self.call(Method::POST, "/v1/shutdown", None::<&()>, DISK).await
    }

    /// Ends the daemon, whatever it has; its next start brings the devices back. Until then guests wait for their disks
    /// (ublk); where devices are files, they see I/O errors.
    pub async fn shutdown_with_devices(&self) -> Result<(), BlockdError> {
        self.call(Method::POST, "/v1/shutdown?force=true", None::<&()>, DISK).await
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        deadline: Duration,
    ) -> Result<T, BlockdError> {
        let call = format!("{method} {path}");
        let unreachable =
            |source| BlockdError::Unreachable { call: call.clone(), socket: self.socket.to_path_buf(), source };
        let body = body.map(serde_json::to_vec).transpose().map_err(|error| unreachable(error.into()))?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "aenv-blockd")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(bytes::Bytes::from(body.unwrap_or_default())))
            .map_err(|error| unreachable(io::Error::other(error)))?;
        let (status, body) = timeout(deadline, self.exchange(request))
            .await
            .map_err(|_| BlockdError::TimedOut {
                call: call.clone(),
                socket: self.socket.to_path_buf(),
                waited: deadline,
            })?
            .map_err(unreachable)?;
        let unexpected =
            |source| BlockdError::Answer { call: call.clone(), socket: self.socket.to_path_buf(), status, source };
        if status.is_success() {
            let body = if body.is_empty() { &b"null"[..] } else { &body };
            return serde_json::from_slice(body).map_err(unexpected);
        }
        let ErrorBody { kind, message } = serde_json::from_slice(&body).map_err(unexpected)?;
        Err(BlockdError::Refused { kind, message })
    }

    async fn exchange(&self, request: Request<Full<bytes::Bytes>>) -> io::Result<(StatusCode, bytes::Bytes)> {
        let stream = UnixStream::connect(&self.socket).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let exchange = async move {
            let response = sender.send_request(request).await.map_err(broken)?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await.map_err(io::Error::other)?;
            Ok((status, body.to_bytes()))
        };
        // The connection ends when its sender is dropped; should it break, the exchange tells.
        let (answer, _) = futures::future::join(exchange, connection).await;
        answer
    }
}

impl fmt::Debug for BlockdClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlockdClient").field(&self.socket).finish()
    }
}

fn broken(error: hyper::Error) -> io::Error {
    let kind = error.source().and_then(|source| source.downcast_ref::<io::Error>()).map(io::Error::kind);
    io::Error::new(kind.unwrap_or(io::ErrorKind::ConnectionAborted), error)
}

fn device(name: &str, rest: &str) -> String {
    format!("/v1/devices/{}{rest}", utf8_percent_encode(name, SEGMENT))
}

fn absent<T>(result: Result<T, BlockdError>) -> Result<Option<T>, BlockdError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(BlockdError::Refused { kind: ErrorKind::NotFound, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
