//! `/health`, `/init` and `/envs`: what the node asks of a guest that has just come up or come back.

use std::net::SocketAddr;
use std::sync::Arc;

use aenv_guest_proto::{ENVD_VERSION, InitRequest};
use axum::Json;
use axum::body::Bytes;
use axum::extract::{ConnectInfo, State};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use jiff::Timestamp;

use super::{Envd, Place, auth};
use crate::boot::identity;
use crate::console::say;

const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");
/// The clock is set when it is this far behind the node's (a restored guest), in milliseconds.
const BEHIND_MS: i64 = 50;
/// It is set back only when it is this far ahead: time that jumps back harms more than a small error.
const AHEAD_MS: i64 = 5_000;

/// `GET /health`: 204 as soon as the agent serves.
pub(super) async fn health() -> Response {
    (StatusCode::NO_CONTENT, [(header::CACHE_CONTROL, NO_STORE)]).into_response()
}

/// `GET /envs`: the global environment.
pub(super) async fn envs(State(envd): State<Arc<Envd>>) -> Response {
    Json(envd.settings.global_env()).into_response()
}

/// `POST /sync`: what processes have written is on the disk. Asked before a pause that keeps nothing else.
pub(super) async fn sync() -> Response {
    match tokio::task::spawn_blocking(rustix::fs::sync).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// `POST /init`: applies what the node says, unless a newer request was applied already.
pub(super) async fn init(
    State(envd): State<Arc<Envd>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    match apply(&envd, peer, &headers, &body).await {
        Ok(()) => {
            let version = HeaderValue::from_static(ENVD_VERSION);
            let headers =
                [(header::CACHE_CONTROL, NO_STORE), ("x-envd-version".parse().unwrap_or(header::SERVER), version)];
            (StatusCode::NO_CONTENT, headers).into_response()
        }
        Err((status, message)) => (status, message).into_response(),
    }
}

type Refusal = (StatusCode, String);

async fn apply(envd: &Envd, peer: SocketAddr, headers: &HeaderMap, body: &[u8]) -> Result<(), Refusal> {
    let bad = |what: String| (StatusCode::BAD_REQUEST, what);
    let request: InitRequest = match body {
        [] => InitRequest::default(),
        body => serde_json::from_slice(body).map_err(|error| bad(format!("invalid request body: {error}")))?,
    };
    let time = match &request.timestamp {
        Some(text) => Some(text.parse::<Timestamp>().map_err(|error| bad(format!("invalid timestamp: {error}")))?),
        None => None,
    };
    let entropy = match &request.entropy {
        Some(text) => STANDARD.decode(text).map_err(|error| bad(format!("invalid entropy: {error}")))?,
        None => Vec::new(),
    };
    let access_token = request.access_token.filter(|token| !token.is_empty());

    let _turn = envd.settings.init.lock().await;
    let mut settings = envd.settings.snapshot();
    authorize(envd.place, settings.access_token.as_deref(), access_token.as_deref(), peer, headers)?;
    if let (Some(newest), Some(time)) = (settings.newest_init, time)
        && time <= newest
    {
        return Ok(());
    }

    if let Some(env_vars) = request.env_vars {
        settings.env_vars = env_vars;
    }
    settings.access_token = access_token;
    settings.default_user = request.default_user.filter(|user| !user.is_empty()).unwrap_or(settings.default_user);
    settings.default_workdir = request.default_workdir.filter(|path| !path.is_empty()).or(settings.default_workdir);
    settings.sandbox_id = request.sandbox_id.or(settings.sandbox_id);
    settings.template_id = request.template_id.or(settings.template_id);
    settings.newest_init = time.or(settings.newest_init);

    if let Place::Guest { .. } = envd.place {
        let work = MachineChanges {
            time,
            entropy,
            hostname: request.hostname,
            sandbox_id: settings.sandbox_id.clone(),
            template_id: settings.template_id.clone(),
        };
        let done = tokio::task::spawn_blocking(move || work.apply()).await;
        done.map_err(|error| bad(format!("worker failed: {error}")))?.map_err(bad)?;
    }
    envd.settings.replace(settings);
    Ok(())
}

/// The token may be set when there is none, and changed or removed by whoever knows it. The node itself, which reaches
/// the guest from outside where no process of the guest can be, may always: after a restore it gives a new one.
fn authorize(
    place: Place,
    current: Option<&str>,
    new: Option<&str>,
    peer: SocketAddr,
    headers: &HeaderMap,
) -> Result<(), Refusal> {
    let Some(current) = current else { return Ok(()) };
    let is_node = matches!(place, Place::Guest { node } if node == peer.ip());
    let knows_token = auth::presented_token(headers).is_some_and(|token| auth::same(token, current))
        || new.is_some_and(|new| auth::same(new.as_bytes(), current));
    match (is_node || knows_token, new) {
        (true, _) => Ok(()),
        (false, Some(_)) => Err((StatusCode::UNAUTHORIZED, "access token validation failed".into())),
        (false, None) => Err((StatusCode::UNAUTHORIZED, "access token reset not authorized".into())),
    }
}

/// What `/init` changes about the machine itself.
struct MachineChanges {
    time: Option<Timestamp>,
    entropy: Vec<u8>,
    hostname: Option<String>,
    sandbox_id: Option<String>,
    template_id: Option<String>,
}

impl MachineChanges {
    fn apply(self) -> Result<(), String> {
        // The random state first: nothing below should draw on the one that a fork shares with its siblings.
        if !self.entropy.is_empty() {
            crate::sys::add_entropy(&self.entropy).map_err(|error| format!("add entropy: {error}"))?;
        }
        if let Some(time) = self.time {
            set_clock(time).map_err(|error| format!("set the clock: {error}"))?;
        }
        if let Some(hostname) = self.hostname.filter(|name| !name.is_empty()) {
            identity::set_hostname(&hostname).map_err(|error| format!("set the host name: {error}"))?;
        }
        if let Err(error) = identity::write_run_files(self.sandbox_id.as_deref(), self.template_id.as_deref()) {
            say!("write /run/e2b: {error}");
        }
        Ok(())
    }
}

fn set_clock(node: Timestamp) -> std::io::Result<()> {
    let ahead_ms = Timestamp::now().as_millisecond() - node.as_millisecond();
    if (-BEHIND_MS..=AHEAD_MS).contains(&ahead_ms) {
        return Ok(());
    }
    let time = rustix::time::Timespec { tv_sec: node.as_second(), tv_nsec: node.subsec_nanosecond().max(0).into() };
    Ok(rustix::time::clock_settime(rustix::time::ClockId::Realtime, time)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_node_and_the_holder_of_the_token_change_it() {
        let node: SocketAddr = "169.254.0.22:4000".parse().unwrap();
        let local: SocketAddr = "127.0.0.1:4000".parse().unwrap();
        let guest = Place::Guest { node: node.ip() };
        let mut holder = HeaderMap::new();
        holder.insert(auth::TOKEN_HEADER, "old".parse().unwrap());
        let stranger = HeaderMap::new();

        assert!(authorize(guest, None, Some("new"), local, &stranger).is_ok(), "first token");
        assert!(authorize(guest, Some("old"), Some("new"), node, &stranger).is_ok(), "the node");
        assert!(authorize(guest, Some("old"), Some("new"), local, &holder).is_ok(), "header");
        assert!(authorize(guest, Some("old"), Some("old"), local, &stranger).is_ok(), "same token again");
        assert_eq!(
            authorize(guest, Some("old"), Some("new"), local, &stranger).unwrap_err().1,
            "access token validation failed"
        );
        assert_eq!(
            authorize(Place::Process, Some("old"), None, node, &stranger).unwrap_err().1,
            "access token reset not authorized"
        );
    }
}
