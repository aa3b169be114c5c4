//! The node server's stand-in: control calls are answered from a table, requests with routing headers go to a real agent.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{KEY, SANDBOX, TEMPLATE};

/// Largest request body of a control call.
const MAX_BODY: usize = 1 << 20;

/// A control call as it was made.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// Method, path and query.
    pub(crate) line: String,
    pub(crate) body: Value,
}

/// What the stand-in does; shared with the test, which may change it meanwhile.
#[derive(Debug)]
struct State {
    calls: Mutex<Vec<Call>>,
    data_headers: Mutex<Vec<HeaderMap>>,
    answers: Mutex<Vec<(String, u16, Value, HeaderMap)>>,
    /// `running`, `paused`, `deleted`, or `unreachable`.
    sandbox: Mutex<&'static str>,
    agent: Option<String>,
    /// Each new value cuts the data connections that exist.
    cut: watch::Sender<u32>,
    /// Bytes of a data answer's body after which it goes on no more.
    stall_after: AtomicU64,
    http: reqwest::Client,
}

/// A server on a free port of the loopback; ends with the test's runtime.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    pub(crate) url: String,
    state: Arc<State>,
}

impl Server {
    /// A server without sandboxes' agents.
    pub(crate) async fn start() -> Self {
        Self::before(None).await
    }

    /// A server whose sandbox's agent listens at `agent`.
    pub(crate) async fn before(agent: Option<String>) -> Self {
        let http = aenv_api::http_builder("http://127.0.0.1").unwrap().build().unwrap();
        let state = Arc::new(State {
            calls: Mutex::default(),
            data_headers: Mutex::default(),
            answers: Mutex::default(),
            sandbox: Mutex::new("running"),
            agent,
            cut: watch::Sender::new(0),
            stall_after: AtomicU64::new(u64::MAX),
            http,
        });
        let serving = Arc::clone(&state);
        let app = Router::new().fallback(move |request: Request| {
            let state = Arc::clone(&serving);
            async move {
                if request.headers().contains_key("x-agentenv-sandbox-id") {
                    forward(&state, request).await
                } else {
                    control(&state, request).await
                }
            }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { url, state }
    }

    /// Answers the next call whose `METHOD /path` begins with `line` in this way. The last such answer stays.
    pub(crate) fn answer(&self, line: &str, status: u16, body: Value) {
        self.answer_with(line, status, body, HeaderMap::new());
    }

    /// The same, before all other such answers.
    pub(crate) fn answer_first(&self, line: &str, status: u16, body: Value) {
        self.state.answers.lock().unwrap().insert(0, (line.to_owned(), status, body, HeaderMap::new()));
    }

    pub(crate) fn answer_with(&self, line: &str, status: u16, body: Value, headers: HeaderMap) {
        self.state.answers.lock().unwrap().push((line.to_owned(), status, body, headers));
    }

    /// What the sandbox's state is from now on: `running`, `paused`, `deleted`, or `unreachable`.
    pub(crate) fn set_sandbox(&self, state: &'static str) {
        *self.state.sandbox.lock().unwrap() = state;
    }

    /// Data answers stop after so many bytes from now on.
    pub(crate) fn stall_after(&self, bytes: u64) {
        self.state.stall_after.store(bytes, Ordering::Relaxed);
    }

    /// Cuts every data connection that exists.
    pub(crate) fn cut(&self) {
        self.state.cut.send_modify(|n| *n += 1);
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.state.calls.lock().unwrap().clone()
    }

    pub(crate) fn called(&self, line: &str) -> Option<Call> {
        self.calls().into_iter().rev().find(|call| call.line == line)
    }

    /// The headers of the requests that went to the agent.
    pub(crate) fn data_headers(&self) -> Vec<HeaderMap> {
        self.state.data_headers.lock().unwrap().clone()
    }
}

/// A sandbox as create and connect give it.
pub(crate) fn sandbox() -> Value {
    json!({"templateID": TEMPLATE, "sandboxID": SANDBOX, "clientID": "", "envdVersion": "0.6.13",
        "envdAccessToken": "guest-token"})
}

/// A sandbox as lists give it.
pub(crate) fn listed(state: &str) -> Value {
    json!({"templateID": TEMPLATE, "sandboxID": SANDBOX, "clientID": "", "envdVersion": "0.6.13", "alias": "base",
        "startedAt": "2026-01-31T12:00:00Z", "endAt": "2026-01-31T13:00:00Z", "cpuCount": 2, "memoryMB": 1024,
        "diskSizeMB": 2048, "state": state})
}

fn json_answer(status: u16, body: &Value) -> Response {
    let status = StatusCode::from_u16(status).unwrap();
    if body.is_null() { status.into_response() } else { (status, axum::Json(body.clone())).into_response() }
}

fn refuse(status: u16, message: &str) -> Response {
    json_answer(status, &json!({"code": status, "message": message}))
}

async fn control(state: &State, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let line = format!("{} {}", parts.method, parts.uri);
    let body = to_bytes(body, MAX_BODY).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    state.calls.lock().unwrap().push(Call { line: line.clone(), body });
    if parts.headers.get("x-api-key").is_none_or(|key| key != KEY) {
        return refuse(401, "invalid API key");
    }
    let prepared = {
        let mut answers = state.answers.lock().unwrap();
        let matching: Vec<_> = (0..answers.len()).filter(|n| line.starts_with(&answers[*n].0)).collect();
        match matching[..] {
            [] => None,
            [last] => Some(answers[last].clone()),
            [first, ..] => Some(answers.remove(first)),
        }
    };
    if let Some((_, status, body, headers)) = prepared {
        let mut response = json_answer(status, &body);
        response.headers_mut().extend(headers);
        return response;
    }
    let now = *state.sandbox.lock().unwrap();
    let path = format!("/sandboxes/{SANDBOX}");
    match (line.split('?').next().unwrap(), now) {
        (line, "deleted") if line.contains(&path) => refuse(404, &format!("sandbox {SANDBOX} not found")),
        (_, "unreachable") => refuse(500, "down"),
        (line, _) if line == format!("POST {path}/connect") => json_answer(200, &sandbox()),
        (line, _) if line == format!("GET {path}") => {
            let mut detail = listed(now);
            detail["envdAccessToken"] = json!("guest-token");
            json_answer(200, &detail)
        }
        (line, _) => refuse(404, &format!("route not found: {line}")),
    }
}

async fn forward(state: &State, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    state.data_headers.lock().unwrap().push(parts.headers.clone());
    let Some(agent) = state.agent.as_deref().filter(|_| *state.sandbox.lock().unwrap() == "running") else {
        return refuse(502, "The sandbox was not found");
    };
    let mut cut = state.cut.subscribe();
    let mut headers = parts.headers;
    for name in [header::HOST, header::CONNECTION, header::CONTENT_LENGTH, header::TRANSFER_ENCODING] {
        headers.remove(name);
    }
    let sent = state
        .http
        .request(parts.method, format!("http://{agent}{}", parts.uri))
        .headers(headers)
        .body(reqwest::Body::wrap_stream(body.into_data_stream()));
    let response = tokio::select! {
        response = sent.send() => match response {
            Ok(response) => response,
            Err(error) => return refuse(502, &error.to_string()),
        },
        _ = cut.changed() => return refuse(502, "cut"),
    };
    let mut answer = Response::builder().status(response.status());
    for (name, value) in response.headers() {
        if name != header::TRANSFER_ENCODING && name != header::CONNECTION {
            answer = answer.header(name, value);
        }
    }
    let left = state.stall_after.load(Ordering::Relaxed);
    let chunks =
        futures::stream::unfold((response, cut, false, left), |(mut response, mut cut, ended, left)| async move {
            if ended {
                return None;
            }
            if left == 0 {
                std::future::pending::<()>().await;
            }
            let chunk = tokio::select! {
                chunk = response.chunk() => chunk.map_err(std::io::Error::other),
                _ = cut.changed() => Err(std::io::Error::other("cut")),
            };
            let ended = chunk.is_err();
            let length = chunk.as_ref().ok().and_then(|chunk| Some(chunk.as_ref()?.len() as u64));
            let left = left.saturating_sub(length.unwrap_or(0));
            chunk.transpose().map(|chunk: Result<Bytes, _>| (chunk, (response, cut, ended, left)))
        });
    answer.body(Body::from_stream(chunks)).unwrap()
}
