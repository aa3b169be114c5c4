//! Answers of the proxy itself. Clients key on status and text, so both are the contract's.

use http::header::{ACCEPT, CONTENT_TYPE, HeaderValue, USER_AGENT};
use http::{HeaderMap, Response, StatusCode};
use serde::Serialize;

use crate::access::Denied;
use crate::body::Body;

/// Why a request was not, or not fully, answered by the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// No such sandbox, or not any more.
    NotFound,
    /// The sandbox is between two states.
    Busy,
    /// It may not pass.
    Denied(Denied),
    /// Nobody takes connections on the port.
    PortClosed,
    /// The guest's service took the connection and ended it without an answer.
    NoAnswer,
    /// The guest's service has not begun to answer for too long.
    TimedOut,
}

impl Refusal {
    fn status(self) -> StatusCode {
        match self {
            // A gateway's error, not a 404: SDKs take a 404 for the answer of a service that runs.
            Self::NotFound | Self::PortClosed | Self::NoAnswer => StatusCode::BAD_GATEWAY,
            Self::Busy => StatusCode::CONFLICT,
            Self::Denied(Denied::Internal) => StatusCode::NOT_FOUND,
            Self::Denied(Denied::NoToken | Denied::WrongToken) => StatusCode::FORBIDDEN,
            Self::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    fn message(self) -> String {
        match self {
            Self::NotFound => "The sandbox was not found".into(),
            Self::Busy => "The sandbox is in transition; retry in a moment".into(),
            Self::Denied(denied) => denied.to_string(),
            Self::PortClosed => "The sandbox is running but port is not open".into(),
            Self::NoAnswer => "The sandbox is running but its service closed the connection without an answer".into(),
            Self::TimedOut => "The sandbox is running but its service did not answer in time".into(),
        }
    }

    /// Whether the answer tells the port: where the fault lies with what listens on it.
    fn is_about_the_port(self) -> bool {
        matches!(self, Self::PortClosed | Self::NoAnswer | Self::TimedOut)
    }
}

/// The shape of every such answer.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    sandbox_id: &'a str,
    message: &'a str,
    code: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
}

/// What asked, as far as the form of a refusal depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asker {
    Program,
    /// A person is looking.
    Browser,
}

impl Asker {
    /// A browser navigating, not a script in a page fetching: only the former asks for HTML.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let has = |name, text: &str| headers.get(name).and_then(|v| v.to_str().ok()).is_some_and(|v| v.contains(text));
        if has(USER_AGENT, "Mozilla/") && has(ACCEPT, "text/html") { Self::Browser } else { Self::Program }
    }
}

/// The answer to a request for `port` of `sandbox`.
pub(crate) fn answer(refusal: Refusal, sandbox: &str, port: u16, asker: Asker) -> Response<Body> {
    let (status, message) = (refusal.status(), refusal.message());
    let port = refusal.is_about_the_port().then_some(port);
    let (kind, text) = match asker {
        Asker::Program => {
            let answer = Answer { sandbox_id: sandbox, message: &message, code: status.as_u16(), port };
            // Strings and numbers always serialize.
            ("application/json", serde_json::to_string(&answer).unwrap_or_default())
        }
        Asker::Browser => ("text/html; charset=utf-8", page(status, &message, sandbox, port)),
    };
    let mut response = Response::new(Body::text(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// A page for people. `sandbox` was checked to be letters, digits, `-` and `_`, but is escaped where it is used all the same.
fn page(status: StatusCode, message: &str, sandbox: &str, port: Option<u16>) -> String {
    let sandbox = escaped(sandbox);
    let message = escaped(message);
    let port = port.map(|port| format!("<p>Port <code>{port}</code></p>")).unwrap_or_default();
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{status}</title></head>\
         <body><h1>{message}</h1><p>Sandbox <code>{sandbox}</code></p>{port}</body></html>\n"
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
