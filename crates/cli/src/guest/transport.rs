//! Carries the agent's protocol over HTTP/1.1 to the node server, which routes by headers.
//!
//! A connection per call, no redirects, and no proxy towards this machine; never the API key.

use connectrpc::client::{BoxFuture, ClientBody, ClientConfig, ClientTransport};
use connectrpc::{ConnectError, ErrorCode};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use serde::Deserialize;

use super::event::Body;

/// Largest refusal that is read, in bytes.
const MAX_REFUSAL_BODY: usize = 64 << 10;
/// Largest part of a refusal that is worth showing, in characters.
const MAX_REFUSAL: usize = 500;

/// See the module. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Transport {
    http: reqwest::Client,
}

/// What a refusal of the server on the way says, as opposed to one of the agent, whose `code` is a word.
#[derive(Deserialize)]
struct ServerRefusal {
    #[serde(rename = "code")]
    _code: u16,
    message: String,
}

impl Transport {
    /// A transport to the server at `server`. Opens no connection.
    pub(super) fn new(server: &str) -> anyhow::Result<Self> {
        let http = aenv_api::http_builder(server)?
            .http1_only()
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(0)
            .build()?;
        Ok(Self { http })
    }

    /// A plain request to the agent, without any header yet.
    pub(super) fn request(&self, method: http::Method, url: reqwest::Url) -> reqwest::RequestBuilder {
        self.http.request(method, url)
    }

    /// Sends a plain request. Errors: anything but success, in the agent's words.
    pub(super) async fn call(&self, request: reqwest::RequestBuilder) -> Result<reqwest::Response, ConnectError> {
        let response = request.send().await.map_err(unreachable)?;
        if response.status().is_success() {
            return Ok(response);
        }
        let response = Response::<reqwest::Body>::from(response);
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, MAX_REFUSAL_BODY).collect().await;
        let body = body.map_err(|error| ConnectError::unavailable(error.to_string()))?.to_bytes();
        let message = match serde_json::from_slice::<ServerRefusal>(&body) {
            Ok(refusal) => refusal.message,
            Err(_) => text_of(parts.status, &body),
        };
        Err(ConnectError::new(code_of(parts.status), message))
    }

    /// Asks the agent whether it is there. Errors: it, or the server for it, says no.
    pub(super) async fn health(&self, config: &ClientConfig) -> Result<(), ConnectError> {
        let uri = format!("{}/health", config.base_uri().to_string().trim_end_matches('/'));
        let uri: Uri = uri.parse().map_err(|error| ConnectError::internal(format!("{uri}: {error}")))?;
        let mut request = Request::get(uri).body(connectrpc::client::full_body(bytes::Bytes::new()));
        if let Ok(request) = &mut request {
            request.headers_mut().clone_from(config.default_headers());
        }
        let request = request.map_err(|error| ConnectError::internal(error.to_string()))?;
        let response = self.send(request).await?;
        let status = response.status();
        if status.is_success() { Ok(()) } else { Err(ConnectError::unavailable(format!("HTTP status {status}"))) }
    }
}

impl ClientTransport for Transport {
    type ResponseBody = Body;
    type Error = ConnectError;

    fn send(&self, request: Request<ClientBody>) -> BoxFuture<'static, Result<Response<Body>, ConnectError>> {
        let http = self.http.clone();
        Box::pin(async move {
            let request = reqwest::Request::try_from(request.map(reqwest::Body::wrap))
                .map_err(|error| ConnectError::internal(error.to_string()))?;
            let response = http.execute(request).await.map_err(unreachable)?;
            let response = Response::<reqwest::Body>::from(response);
            if response.status().is_success() {
                return Ok(response.map(Body::new));
            }
            let (parts, body) = response.into_parts();
            let body = Limited::new(body, MAX_REFUSAL_BODY).collect().await;
            let body = body.map_err(|error| ConnectError::unavailable(error.to_string()))?.to_bytes();
            if let Ok(refusal) = serde_json::from_slice::<ServerRefusal>(&body) {
                return Err(ConnectError::new(code_of(parts.status), refusal.message));
            }
            if serde_json::from_slice::<serde_json::Value>(&body).is_err() {
                return Err(ConnectError::new(code_of(parts.status), text_of(parts.status, &body)));
            }
            let body = Full::new(body).map_err(|never| match never {});
            Ok(Response::from_parts(parts, Body::new(body)))
        })
    }
}

/// What a refusal that is no JSON says.
fn text_of(status: StatusCode, body: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(body).trim().chars().take(MAX_REFUSAL).collect();
    if text.is_empty() { status.to_string() } else { text }
}

/// The innermost cause is what tells a person something.
pub(super) fn unreachable(error: reqwest::Error) -> ConnectError {
    let mut cause: &dyn std::error::Error = &error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    let message = format!("the connection to the server failed: {cause}");
    ConnectError::unavailable(message).with_source(error)
}

fn code_of(status: StatusCode) -> ErrorCode {
    match status.as_u16() {
        400 => ErrorCode::InvalidArgument,
        401 => ErrorCode::Unauthenticated,
        403 => ErrorCode::PermissionDenied,
        404 => ErrorCode::NotFound,
        409 => ErrorCode::Aborted,
        413 | 429 => ErrorCode::ResourceExhausted,
        502 | 503 => ErrorCode::Unavailable,
        504 => ErrorCode::DeadlineExceeded,
        507 => ErrorCode::ResourceExhausted,
        _ => ErrorCode::Unknown,
    }
}
