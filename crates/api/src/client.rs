//! A client of the control plane: one method a call, no retries, errors that say what to do.

use std::fmt::Display;
use std::time::Duration;

use aenv_model::BuildId;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Response, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::key::{ApiKeyInfo, CreatedApiKey, NewApiKey};
use crate::{
    API_KEY_HEADER, AliasAnswer, ApiErrorBody, BuildStatus, BuildStatusQuery, ConnectRequest, FilesLink, ForkRequest,
    ForkResult, ListQuery, LogsQuery, NEXT_TOKEN_HEADER, NetworkUpdate, NewColdSandbox, NewSandbox, NewSnapshot,
    PauseRequest, RefreshRequest, RollbackRequest, Sandbox, SandboxDetail, SandboxLogsV2, SnapshotInfo,
    TemplateBuildStartV2, TemplateCreateV3, TemplateCreated, TemplateWithBuilds, TimeoutRequest,
};

/// Longest wait for a TCP (and TLS) connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for a whole answer: a cold create under emulation takes tens of seconds.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest part of an unexpected error body that is worth showing, in characters.
const MAX_ERROR_TEXT: usize = 500;
/// Everything but RFC 3986's unreserved characters is escaped within a path segment.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// A call that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server's address is no HTTP URL.
    #[error("{url:?} is not a server URL: expected http://HOST:PORT or https://HOST")]
    ServerUrl {
        /// The address given.
        url: String,
    },
    /// The key cannot stand in a header.
    #[error("the API key has characters that no key has; check it with `aenv auth`")]
    ApiKey,
    /// The HTTP client could not be set up (a broken system certificate store, for example).
    #[error("set up the HTTP client")]
    SetUp {
        /// Why.
        source: reqwest::Error,
    },
    /// Nobody answers at the server's address.
    #[error(
        "cannot reach the server at {url}; is it running? Start it with `aenv-server`, or choose another one \
         with `aenv auth` or AENV_SERVER"
    )]
    Unreachable {
        /// The server's address.
        url: String,
        /// Why.
        source: reqwest::Error,
    },
    /// The server took the request and did not answer in time.
    #[error("the server at {url} did not answer {what} within {} s", TOTAL_TIMEOUT.as_secs())]
    TimedOut {
        /// The server's address.
        url: String,
        /// Method and path.
        what: String,
        /// Why.
        source: reqwest::Error,
    },
    /// The connection broke in between.
    #[error("{what} at {url} broke off")]
    Broken {
        /// The server's address.
        url: String,
        /// Method and path.
        what: String,
        /// Why.
        source: reqwest::Error,
    },
    /// The server refuses the key.
    #[error("{message} (401); check the API key with `aenv auth` or AENV_API_KEY")]
    Unauthorized {
        /// The server's words.
        message: String,
    },
    /// The server refuses the call.
    #[error("{message} ({})", status.as_u16())]
    Status {
        /// The HTTP status.
        status: StatusCode,
        /// The server's words.
        message: String,
        /// A finer cause, if the server told one.
        error_code: Option<String>,
    },
    /// The server's answer is not of the form that this client knows.
    #[error("cannot read the answer to {what} at {url}; is it an AgentENV server of a matching version?")]
    Answer {
        /// The server's address.
        url: String,
        /// Method and path.
        what: String,
        /// Why.
        source: serde_json::Error,
    },
}

impl ClientError {
    /// The status of a refusal; `None` if the server did not answer.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Unauthorized { .. } => Some(StatusCode::UNAUTHORIZED),
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// Whether the server says that the thing does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(StatusCode::NOT_FOUND)
    }
}

/// How every HTTP client of the server at `server` begins: its TLS, its patience for a connection (5 s), and no proxy
/// towards this machine. Without a key: requests to a sandbox's guest agent must not carry it.
///
/// Errors: [`ClientError::ServerUrl`].
pub fn http_builder(server: &str) -> Result<reqwest::ClientBuilder, ClientError> {
    let base = parse_server(server)?;
    // The process may have chosen its TLS provider already; the first choice stands.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .user_agent(concat!("aenv/", env!("CARGO_PKG_VERSION")));
    // A proxy from the environment cannot know what listens on this machine.
    Ok(if base.host_str().is_some_and(is_local) { builder.no_proxy() } else { builder })
}

/// One page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The items, in the server's order.
    pub items: Vec<T>,
    /// What continues the list; absent on the last page.
    pub next_token: Option<String>,
}

/// A control plane, reached with one API key. Cheap to clone; clones share connections.
///
/// Every call waits at most 5 s for a connection and 120 s in all, and is sent once. Cancel safety: if a call is
/// dropped, the server may or may not have carried it out; read the state back.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: Url,
}

impl Client {
    /// A client of the server at `server` (`http://HOST:PORT`), with `api_key` sent on every call.
    ///
    /// Opens no connection. Errors: [`ClientError::ServerUrl`], [`ClientError::ApiKey`], [`ClientError::SetUp`].
    pub fn new(server: &str, api_key: &str) -> Result<Self, ClientError> {
        Self::with_patience(server, api_key, CONNECT_TIMEOUT, TOTAL_TIMEOUT)
    }

    /// The same, which waits `connect` for a connection and `total` in all.
    pub fn with_patience(server: &str, api_key: &str, connect: Duration, total: Duration) -> Result<Self, ClientError> {
        let base = parse_server(server)?;
        let mut key = HeaderValue::from_str(api_key).map_err(|_| ClientError::ApiKey)?;
        key.set_sensitive(true);
        let key = HeaderMap::from_iter([(HeaderName::from_static(API_KEY_HEADER), key)]);
        let builder = http_builder(server)?.connect_timeout(connect).timeout(total).default_headers(key);
        let http = builder.build().map_err(|source| ClientError::SetUp { source })?;
        Ok(Self { http, base })
    }

    /// The server's address, without a trailing slash.
    #[must_use]
    pub fn server(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// `GET /health`: returns once the server answers that it serves.
    pub async fn health(&self) -> Result<(), ClientError> {
        self.call_empty(Method::GET, "/health", None::<&()>).await
    }

    /// `POST /v2/sandboxes`: a sandbox as current SDKs ask for it.
    pub async fn create_sandbox(&self, request: &NewSandbox) -> Result<Sandbox, ClientError> {
        self.call(Method::POST, "/v2/sandboxes", Some(request)).await
    }

    /// `POST /sandboxes`: the older form, which can ask for `secure` by itself.
    pub async fn create_sandbox_v1(&self, request: &NewSandbox) -> Result<Sandbox, ClientError> {
        self.call(Method::POST, "/sandboxes", Some(request)).await
    }

    /// `POST /sandboxes-cold`: a sandbox booted from an image.
    pub async fn create_sandbox_cold(&self, request: &NewColdSandbox) -> Result<Sandbox, ClientError> {
        self.call(Method::POST, "/sandboxes-cold", Some(request)).await
    }

    /// `GET /v2/sandboxes`: one page, as [`crate::ListedSandbox`], or as [`serde_json::Value`] to keep the server's
    /// words.
    pub async fn list_sandboxes<T: DeserializeOwned>(&self, query: &ListQuery) -> Result<Page<T>, ClientError> {
        let text = |value: &Option<String>| value.clone();
        let query = [
            ("metadata", text(&query.metadata)),
            ("state", text(&query.state)),
            ("order", text(&query.order)),
            ("startedAfter", text(&query.started_after)),
            ("template", text(&query.template)),
            ("limit", text(&query.limit)),
            ("nextToken", text(&query.next_token)),
        ];
        self.page("/v2/sandboxes", &query).await
    }

    /// `GET /sandboxes/{id}`.
    pub async fn sandbox(&self, id: impl Display) -> Result<SandboxDetail, ClientError> {
        self.call(Method::GET, &format!("/sandboxes/{}", segment(id)), None::<&()>).await
    }

    /// `DELETE /sandboxes/{id}`: returns when the sandbox has ended.
    pub async fn delete_sandbox(&self, id: impl Display) -> Result<(), ClientError> {
        self.call_empty(Method::DELETE, &format!("/sandboxes/{}", segment(id)), None::<&()>).await
    }

    /// `POST /sandboxes/{id}/connect`: resumes it if paused and makes it live `timeout` seconds more at least.
    pub async fn connect_sandbox(&self, id: impl Display, request: &ConnectRequest) -> Result<Sandbox, ClientError> {
        self.call(Method::POST, &format!("/sandboxes/{}/connect", segment(id)), Some(request)).await
    }

    /// `PUT /sandboxes/{id}/network`: replaces all that it may reach.
    pub async fn set_network(&self, id: impl Display, request: &NetworkUpdate) -> Result<(), ClientError> {
        self.call_empty(Method::PUT, &format!("/sandboxes/{}/network", segment(id)), Some(request)).await
    }

    /// `POST /sandboxes/{id}/pause`: returns when its machine is captured.
    pub async fn pause_sandbox(&self, id: impl Display, request: &PauseRequest) -> Result<(), ClientError> {
        self.call_empty(Method::POST, &format!("/sandboxes/{}/pause", segment(id)), Some(request)).await
    }

    /// `POST /sandboxes/{id}/rollback`: returns when it runs as it was at the snapshot.
    pub async fn roll_back_sandbox(&self, id: impl Display, request: &RollbackRequest) -> Result<Sandbox, ClientError> {
        self.call(Method::POST, &format!("/sandboxes/{}/rollback", segment(id)), Some(request)).await
    }

    /// `POST /sandboxes/{id}/fork`: one result a child.
    pub async fn fork_sandbox(&self, id: impl Display, request: &ForkRequest) -> Result<Vec<ForkResult>, ClientError> {
        self.call(Method::POST, &format!("/sandboxes/{}/fork", segment(id)), Some(request)).await
    }

    /// `POST /sandboxes/{id}/snapshots`: the sandbox goes on.
    pub async fn create_snapshot(&self, id: impl Display, request: &NewSnapshot) -> Result<SnapshotInfo, ClientError> {
        self.call(Method::POST, &format!("/sandboxes/{}/snapshots", segment(id)), Some(request)).await
    }

    /// `GET /snapshots`: one page of at most 100, of all or of one sandbox, as [`SnapshotInfo`], or as
    /// [`serde_json::Value`] to keep the server's words.
    pub async fn list_snapshots<T: DeserializeOwned>(
        &self,
        sandbox: Option<&str>,
        next_token: Option<&str>,
    ) -> Result<Page<T>, ClientError> {
        let query = [
            ("sandboxID", sandbox.map(str::to_owned)),
            ("limit", Some("100".to_owned())),
            ("nextToken", next_token.map(str::to_owned)),
        ];
        self.page("/snapshots", &query).await
    }

    /// `GET /snapshots/{id}`, by id or name.
    pub async fn snapshot(&self, reference: impl Display) -> Result<SnapshotInfo, ClientError> {
        self.call(Method::GET, &format!("/snapshots/{}", segment(reference)), None::<&()>).await
    }

    /// `POST /sandboxes/{id}/timeout`: the sandbox ends `timeout` seconds from now.
    pub async fn set_timeout(&self, id: impl Display, request: &TimeoutRequest) -> Result<(), ClientError> {
        self.call_empty(Method::POST, &format!("/sandboxes/{}/timeout", segment(id)), Some(request)).await
    }

    /// `POST /sandboxes/{id}/refreshes`: the sandbox lives `duration` seconds more at least.
    pub async fn refresh(&self, id: impl Display, request: &RefreshRequest) -> Result<(), ClientError> {
        self.call_empty(Method::POST, &format!("/sandboxes/{}/refreshes", segment(id)), Some(request)).await
    }

    /// `GET /v2/sandboxes/{id}/logs`: from a millisecond on, in either direction.
    pub async fn sandbox_logs(&self, id: impl Display, query: &LogsQuery) -> Result<SandboxLogsV2, ClientError> {
        let path = format!("/v2/sandboxes/{}/logs", segment(id));
        let query = [
            ("cursor", query.cursor.map(|cursor| cursor.to_string())),
            ("limit", query.limit.map(|limit| limit.to_string())),
            ("direction", query.backward.then(|| "backward".to_owned())),
            ("level", query.level.map(|level| level.name().to_owned())),
        ];
        let response = self.send(Method::GET, &path, &query, None::<&()>).await?;
        self.read(&format!("GET {path}"), response).await
    }

    /// `GET /sandboxes/{id}/metrics`: oldest first, from `start` in Unix seconds on.
    pub async fn sandbox_metrics<T: DeserializeOwned>(
        &self,
        id: impl Display,
        start: Option<i64>,
    ) -> Result<Vec<T>, ClientError> {
        let path = format!("/sandboxes/{}/metrics", segment(id));
        let query = [("start", start.map(|start| start.to_string()))];
        let response = self.send(Method::GET, &path, &query, None::<&()>).await?;
        self.read(&format!("GET {path}"), response).await
    }

    /// `GET /templates/{id}/files/{hash}`: whether files are there, and where they can be put.
    pub async fn files_link(&self, template: impl Display, hash: &str) -> Result<FilesLink, ClientError> {
        let path = format!("/templates/{}/files/{}", segment(template), segment(hash));
        self.call(Method::GET, &path, None::<&()>).await
    }

    /// `POST /v3/templates`: announces a template; [`Client::start_build`] makes it.
    pub async fn create_template(&self, request: &TemplateCreateV3) -> Result<TemplateCreated, ClientError> {
        self.call(Method::POST, "/v3/templates", Some(request)).await
    }

    /// `POST /v2/templates/{id}/builds/{build}`: returns when the build has begun.
    pub async fn start_build(
        &self,
        template: impl Display,
        build: BuildId,
        request: &TemplateBuildStartV2,
    ) -> Result<(), ClientError> {
        let path = format!("/v2/templates/{}/builds/{build}", segment(template));
        self.call_empty(Method::POST, &path, Some(request)).await
    }

    /// `GET /templates/{id}/builds/{build}/status`.
    pub async fn build_status(
        &self,
        template: impl Display,
        build: BuildId,
        query: &BuildStatusQuery,
    ) -> Result<BuildStatus, ClientError> {
        let path = format!("/templates/{}/builds/{build}/status", segment(template));
        let number = |value: Option<usize>| value.map(|n| n.to_string());
        let level = query.level.map(|level| level.name().to_owned());
        let query = [("logsOffset", number(query.logs_offset)), ("limit", number(query.limit)), ("level", level)];
        let what = format!("GET {path}");
        let response = self.send(Method::GET, &path, &query, None::<&()>).await?;
        self.read(&what, response).await
    }

    /// `GET /v2/templates`: one page, as [`crate::Template`], or as [`serde_json::Value`] to keep the server's words.
    pub async fn list_templates<T: DeserializeOwned>(&self, next_token: Option<&str>) -> Result<Page<T>, ClientError> {
        self.page("/v2/templates", &[("nextToken", next_token.map(str::to_owned))]).await
    }

    /// `GET /templates/{id}`.
    pub async fn template(&self, id: impl Display) -> Result<TemplateWithBuilds, ClientError> {
        self.call(Method::GET, &format!("/templates/{}", segment(id)), None::<&()>).await
    }

    /// `DELETE /templates/{id}`.
    pub async fn delete_template(&self, id: impl Display) -> Result<(), ClientError> {
        self.call_empty(Method::DELETE, &format!("/templates/{}", segment(id)), None::<&()>).await
    }

    /// `GET /templates/aliases/{alias}`: the template of that name.
    pub async fn resolve_alias(&self, alias: &str) -> Result<AliasAnswer, ClientError> {
        self.call(Method::GET, &format!("/templates/aliases/{}", segment(alias)), None::<&()>).await
    }

    /// `POST /api-keys`: a fresh key. Its text is told this once.
    pub async fn create_key(&self, request: &NewApiKey) -> Result<CreatedApiKey, ClientError> {
        self.call(Method::POST, "/api-keys", Some(request)).await
    }

    /// `GET /api-keys`: all that were made and not revoked.
    pub async fn list_keys(&self) -> Result<Vec<ApiKeyInfo>, ClientError> {
        self.call(Method::GET, "/api-keys", None::<&()>).await
    }

    /// `DELETE /api-keys/{id}`: it opens nothing from now on.
    pub async fn revoke_key(&self, id: impl Display) -> Result<(), ClientError> {
        self.call_empty(Method::DELETE, &format!("/api-keys/{}", segment(id)), None::<&()>).await
    }

    async fn call<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&B>,
    ) -> Result<T, ClientError> {
        let what = format!("{method} {path}");
        let response = self.send(method, path, &[], body).await?;
        self.read(&what, response).await
    }

    async fn call_empty<B: Serialize>(&self, method: Method, path: &str, body: Option<&B>) -> Result<(), ClientError> {
        self.send(method, path, &[], body).await.map(drop)
    }

    async fn page<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(&str, Option<String>)],
    ) -> Result<Page<T>, ClientError> {
        let response = self.send(Method::GET, path, query, None::<&()>).await?;
        let token = response.headers().get(NEXT_TOKEN_HEADER).and_then(|value| value.to_str().ok());
        let next_token = token.filter(|token| !token.is_empty()).map(str::to_owned);
        Ok(Page { items: self.read(&format!("GET {path}"), response).await?, next_token })
    }

    /// Sends one request. Errors: anything but a 2xx answer.
    async fn send<B: Serialize>(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, Option<String>)],
        body: Option<&B>,
    ) -> Result<Response, ClientError> {
        let what = format!("{method} {path}");
        let mut url = self.base.clone();
        url.set_path(&format!("{}{path}", self.base.path().trim_end_matches('/')));
        for (key, value) in query {
            if let Some(value) = value {
                url.query_pairs_mut().append_pair(key, value);
            }
        }
        let mut request = self.http.request(method, url);
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.map_err(|source| self.broken(&what, source))?;
        if response.status().is_success() { Ok(response) } else { Err(refusal(response).await) }
    }

    async fn read<T: DeserializeOwned>(&self, what: &str, response: Response) -> Result<T, ClientError> {
        let body = response.bytes().await.map_err(|source| self.broken(what, source))?;
        serde_json::from_slice(&body).map_err(|source| ClientError::Answer {
            url: self.server().to_owned(),
            what: what.to_owned(),
            source,
        })
    }

    fn broken(&self, what: &str, source: reqwest::Error) -> ClientError {
        // Our message names the address already.
        let source = source.without_url();
        let (url, what) = (self.server().to_owned(), what.to_owned());
        if source.is_connect() {
            ClientError::Unreachable { url, source }
        } else if source.is_timeout() {
            ClientError::TimedOut { url, what, source }
        } else {
            ClientError::Broken { url, what, source }
        }
    }
}

/// The server's words: its JSON `message`, else the raw body, else the status's name.
async fn refusal(response: Response) -> ClientError {
    let status = response.status();
    let body = response.bytes().await.unwrap_or_default();
    let (message, error_code) = match serde_json::from_slice::<ApiErrorBody>(&body) {
        Ok(body) => (body.message, body.error_code),
        Err(_) => {
            let text: String = String::from_utf8_lossy(&body).trim().chars().take(MAX_ERROR_TEXT).collect();
            let named = || status.canonical_reason().unwrap_or("refused").to_owned();
            (if text.is_empty() { named() } else { text }, None)
        }
    };
    if status == StatusCode::UNAUTHORIZED {
        ClientError::Unauthorized { message }
    } else {
        ClientError::Status { status, message, error_code }
    }
}

fn parse_server(server: &str) -> Result<Url, ClientError> {
    let url = Url::parse(server.trim()).ok();
    let url = url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    url.ok_or_else(|| ClientError::ServerUrl { url: server.to_owned() })
}

fn segment(value: impl Display) -> String {
    utf8_percent_encode(&value.to_string(), SEGMENT).to_string()
}

fn is_local(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}
