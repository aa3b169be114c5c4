//! Commands and files by plain HTTP, for whoever has no SDK at hand: each call becomes one of the guest agent's own, and
//! takes the data plane's way there. So it counts as use of the sandbox, and resumes one that traffic resumes.

use std::time::Duration;

use aenv_api::{ContentEncoding, ExecuteRequest, Executed, WriteFileRequest, WrittenFile};
use aenv_guest_proto::{
    ENVD_PORT, MESSAGES, NewProcess, OUTPUT_GRACE, ProcessEnd, ProcessReader, Refusal, Told, credentials,
};
use aenv_orchestrator::SandboxInfo;
use aenv_proxy::{Target, Via};
use axum::Json;
use axum::body::{Body, to_bytes};
use axum::extract::{FromRequest as _, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::Response;
use base64::Engine as _;
use base64::alphabet::STANDARD as ALPHABET;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use futures::StreamExt as _;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

use super::App;
use super::body::{JsonBody, PathOf, QueryOf};
use super::error::ApiError;
use super::sandboxes::parse_id;

/// What a command may take whose caller says nothing.
const TIMEOUT: Duration = Duration::from_secs(60);
/// What a command may take at most, in seconds.
const TIMEOUT_LIMIT: u32 = 3600;
/// How long the agent may take beyond a command's time to say that it is over.
const GRACE: Duration = Duration::from_secs(10);
/// For how long those are heard that a command leaves running: its caller waits for the command, not for them.
const LISTEN_ON: Duration = Duration::from_secs(1);
/// Bytes of output that are kept, of each kind.
const OUTPUT_LIMIT: usize = 8 << 20;
/// Largest answer of the agent that is read whole.
const ANSWER_LIMIT: usize = 64 << 10;

/// `POST /sandboxes/{id}/execute`: runs a command in a login shell and waits for its end.
///
/// Cancel safety: if the client hangs up, the command runs on until its time is over.
pub(super) async fn execute(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<ExecuteRequest>,
) -> Result<Json<Executed>, ApiError> {
    let info = app.orchestrator.get(parse_id(&id)?)?;
    let timeout = match request.timeout {
        Some(secs) if !(1..=TIMEOUT_LIMIT).contains(&secs) => {
            let message = format!("invalid field timeout: {secs}, expected 1 to {TIMEOUT_LIMIT} seconds");
            return Err(ApiError::bad_request(message));
        }
        secs => secs.map_or(TIMEOUT, |secs| Duration::from_secs(secs.into())),
    };
    let ExecuteRequest { command, user, cwd, env, .. } = request;
    let args = ["-l", "-c", &command].map(str::to_owned);
    let process = NewProcess { cmd: "/bin/bash", args: &args, envs: &env, cwd: cwd.as_deref() };
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MESSAGES));
    headers.insert("connect-protocol-version", HeaderValue::from_static("1"));
    headers.insert("connect-timeout-ms", HeaderValue::from(timeout.as_millis() as u64));
    headers.insert(OUTPUT_GRACE, HeaderValue::from(LISTEN_ON.as_millis() as u64));
    if let Some(user) = user {
        headers.insert(header::AUTHORIZATION, header_value("user", &credentials(&user))?);
    }
    let call = Call { method: Method::POST, path: "/process.Process/Start".to_owned(), headers };
    let answer = ask(&app, &info, call, Body::from(process.request())).await?;
    let late = || {
        let message = format!("the command did not end within {} s and was killed", timeout.as_secs());
        ApiError::coded(StatusCode::REQUEST_TIMEOUT, "command_timeout", message)
    };
    match tokio::time::timeout(timeout + GRACE, follow(answer.into_body())).await {
        Ok(Ok(executed)) => Ok(Json(executed)),
        Ok(Err(Broken::Agent { code, .. })) if code == "deadline_exceeded" => Err(late()),
        Ok(Err(Broken::Agent { code, message })) => Err(ApiError::new(status_of(&code), message)),
        Ok(Err(Broken::Off)) => {
            let message = format!("sandbox {id} ended, was paused or was rolled back while the command ran");
            Err(ApiError::new(StatusCode::CONFLICT, message))
        }
        Err(_) => Err(late()),
    }
}

/// Query of both file calls.
#[derive(Debug, Default, Deserialize)]
pub(super) struct FileQuery {
    path: Option<String>,
    user: Option<String>,
}

/// `GET /sandboxes/{id}/files/read?path=&user=`: the file, as its bytes.
pub(super) async fn read(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    QueryOf(query): QueryOf<FileQuery>,
    given: HeaderMap,
) -> Result<Response, ApiError> {
    let info = app.orchestrator.get(parse_id(&id)?)?;
    let path = query.path.ok_or_else(|| ApiError::bad_request("missing query parameter path"))?;
    let mut headers = HeaderMap::new();
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    for name in [header::RANGE, header::IF_RANGE, header::IF_MODIFIED_SINCE] {
        if let Some(value) = given.get(&name) {
            headers.insert(name, value.clone());
        }
    }
    let call = Call { method: Method::GET, path: files(&path, query.user.as_deref()), headers };
    ask(&app, &info, call, Body::empty()).await
}

/// `POST /sandboxes/{id}/files/write`: with a `path` in its query, the body is the file; else it is JSON that holds it.
pub(super) async fn write(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    QueryOf(query): QueryOf<FileQuery>,
    request: Request,
) -> Result<Json<WrittenFile>, ApiError> {
    let info = app.orchestrator.get(parse_id(&id)?)?;
    let (path, user, body) = match query.path {
        Some(path) => (path, query.user, request.into_body()),
        None => {
            let JsonBody(request) = JsonBody::<WriteFileRequest>::from_request(request, &app).await?;
            let content = match request.encoding {
                None | Some(ContentEncoding::Utf8) => request.content.into_bytes(),
                Some(ContentEncoding::Base64) => decoded(&request.content)?,
            };
            (request.path, request.user, Body::from(content))
        }
    };
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    let call = Call { method: Method::POST, path: files(&path, user.as_deref()), headers };
    let answer = ask(&app, &info, call, body).await?;
    let written = to_bytes(answer.into_body(), ANSWER_LIMIT).await.unwrap_or_default();
    let mut written: Vec<WrittenFile> = serde_json::from_slice(&written).unwrap_or_default();
    written.pop().map(Json).ok_or_else(|| {
        ApiError::new(StatusCode::BAD_GATEWAY, format!("the guest agent of sandbox {id} did not say what it wrote"))
    })
}

/// The agent's path of a file.
fn files(path: &str, user: Option<&str>) -> String {
    let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let user = user.map(|user| format!("&username={}", encode(user))).unwrap_or_default();
    format!("/files?path={}{user}", encode(path))
}

fn decoded(content: &str) -> Result<Vec<u8>, ApiError> {
    let lenient = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let engine = GeneralPurpose::new(&ALPHABET, lenient);
    let decoded = engine.decode(content.trim());
    decoded.map_err(|error| ApiError::bad_request(format!("invalid field content: not base64: {error}")))
}

fn header_value(field: &str, text: &str) -> Result<HeaderValue, ApiError> {
    HeaderValue::from_str(text).map_err(|_| ApiError::bad_request(format!("invalid field {field}")))
}

/// A request to the agent.
struct Call {
    method: Method,
    path: String,
    headers: HeaderMap,
}

/// Asks the agent of a sandbox. Its refusal, or that of the way there, becomes ours.
async fn ask(app: &App, info: &SandboxInfo, call: Call, body: Body) -> Result<Response, ApiError> {
    let mut request = Request::new(body);
    *request.method_mut() = call.method;
    *request.uri_mut() = call.path.parse::<Uri>().map_err(|_| ApiError::bad_request("invalid path"))?;
    *request.headers_mut() = call.headers;
    request.headers_mut().insert(header::HOST, HeaderValue::from_static("sandbox"));
    if let Some(token) = &info.access_token {
        request.headers_mut().insert("x-access-token", header_value("token", token)?);
    }
    let target = Target { sandbox: info.id.to_string(), port: ENVD_PORT, via: Via::Headers };
    let answer = app.proxy.handle(request, target).await.map(Body::new);
    if answer.status().is_success() || answer.status() == StatusCode::NOT_MODIFIED {
        return Ok(answer);
    }
    let (parts, body) = answer.into_parts();
    let body = to_bytes(body, ANSWER_LIMIT).await.unwrap_or_default();
    let said = serde_json::from_slice::<Refused>(&body).ok();
    let message = said.map_or_else(|| String::from_utf8_lossy(&body).trim().to_owned(), |said| said.message);
    // By the data plane, to whom a paused sandbox is not there; here it is known that it is.
    if parts.status == StatusCode::BAD_GATEWAY {
        let message = match app.orchestrator.get(info.id) {
            Ok(now) if now.phase.is_paused() => format!("sandbox {} is paused; resume it first", info.id),
            Ok(_) => format!("the guest agent of sandbox {} does not answer", info.id),
            Err(gone) => return Err(gone.into()),
        };
        return Err(ApiError::new(StatusCode::CONFLICT, message));
    }
    let status = match parts.status {
        StatusCode::UNAUTHORIZED => StatusCode::BAD_REQUEST, // our own token is right: there is no such user
        status => status,
    };
    Err(ApiError::new(status, message))
}

#[derive(Deserialize)]
struct Refused {
    message: String,
}

/// Why there is no outcome of a command.
enum Broken {
    /// The agent says so.
    Agent { code: String, message: String },
    /// The connection ended before the command.
    Off,
}

/// Follows a command to its end.
async fn follow(body: Body) -> Result<Executed, Broken> {
    let (mut outcome, mut reader) = (Outcome::default(), ProcessReader::default());
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        reader.push(&piece.map_err(|_| Broken::Off)?);
        while let Some(told) = reader.next().map_err(|_| Broken::Off)? {
            match told {
                Told::Over(Some(Refusal { code, message })) => return Err(Broken::Agent { code, message }),
                Told::Over(None) => return outcome.executed().ok_or(Broken::Off),
                told => outcome.take(told),
            }
        }
    }
    outcome.executed().ok_or(Broken::Off)
}

#[derive(Default)]
struct Outcome {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    truncated: bool,
    end: Option<ProcessEnd>,
}

impl Outcome {
    fn take(&mut self, told: Told) {
        let (output, kept) = match told {
            Told::Stdout(output) => (output, &mut self.stdout),
            Told::Stderr(output) => (output, &mut self.stderr),
            Told::Ended(end) => return self.end = Some(end),
            Told::Over(_) => return,
        };
        let room = OUTPUT_LIMIT - kept.len();
        self.truncated |= output.len() > room;
        kept.extend_from_slice(&output[..output.len().min(room)]);
    }

    /// `None`: it has not ended.
    fn executed(self) -> Option<Executed> {
        let ProcessEnd { exit_code, status, .. } = self.end?;
        Some(Executed {
            stdout: String::from_utf8_lossy(&self.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&self.stderr).into_owned(),
            exit_code,
            error: (exit_code != 0).then_some(status),
            truncated: self.truncated,
        })
    }
}

/// The status of a refusal in Connect's words.
fn status_of(code: &str) -> StatusCode {
    match code {
        "invalid_argument" | "failed_precondition" | "out_of_range" => StatusCode::BAD_REQUEST,
        // The key was right; it is the user that is not.
        "unauthenticated" => StatusCode::BAD_REQUEST,
        "not_found" => StatusCode::NOT_FOUND,
        "resource_exhausted" => StatusCode::TOO_MANY_REQUESTS,
        "unavailable" => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    fn told(messages: &[(u8, serde_json::Value)]) -> Body {
        let messages = messages.iter().map(|(flags, message)| {
            let message = message.to_string();
            [&[*flags], &(message.len() as u32).to_be_bytes()[..], message.as_bytes()].concat()
        });
        Body::from(messages.collect::<Vec<_>>().concat())
    }

    #[tokio::test]
    async fn a_command_is_followed_to_its_end() {
        let data = |kind: &str, text: &str| serde_json::json!({"event": {"data": {kind: STANDARD.encode(text)}}});
        let end = serde_json::json!({"event": {"end": {"exitCode": 3, "exited": true, "status": "exit status 3"}}});
        let messages = [(0, data("stdout", "out")), (0, data("stderr", "err")), (0, data("stdout", "put")), (0, end)];
        let Ok(executed) = follow(told(&messages)).await else { panic!("no outcome") };
        let error = Some("exit status 3".to_owned());
        let expected =
            Executed { stdout: "output".into(), stderr: "err".into(), exit_code: 3, error, truncated: false };
        assert_eq!(executed, expected);
        assert!(matches!(follow(told(&messages[..2])).await, Err(Broken::Off)));
    }

    #[tokio::test]
    async fn an_error_of_the_agent_is_told_with_its_code() {
        let error = serde_json::json!({"error": {"code": "deadline_exceeded", "message": "late"}});
        let messages = [(0, serde_json::json!({"event": {"start": {"pid": 7}}})), (2, error)];
        let followed = follow(told(&messages)).await;
        assert!(matches!(followed, Err(Broken::Agent { code, .. }) if code == "deadline_exceeded"));
    }

    #[test]
    fn paths_are_encoded_and_content_is_decoded() {
        assert_eq!(files("/a b&c", Some("me")), "/files?path=%2Fa%20b%26c&username=me");
        assert_eq!(decoded("aGk=").unwrap(), b"hi");
        assert_eq!(decoded("aGk").unwrap(), b"hi");
        assert!(decoded("?").unwrap_err().message().contains("content"));
    }
}
