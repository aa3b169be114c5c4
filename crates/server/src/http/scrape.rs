//! `GET /metrics`, and the counting of requests.

use aenv_model::Phase;
use aenv_proxy::Via;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::time::Instant;
use tracing::debug;

use super::error::ApiError;
use super::{App, ledger};
use crate::metrics::{CONTENT_TYPE, HttpLabels, Now};

/// Route of the data plane's requests, whose paths are guests' own.
const PROXIED: &str = "/proxy/*";
/// Route of requests that have none.
const UNMATCHED: &str = "unmatched";

/// A request that is being answered.
pub(super) struct Counted {
    method: &'static str,
    begun: Instant,
    /// Not counted: who watches is not watched.
    is_scrape: bool,
}

impl Counted {
    pub(super) fn begin(request: &Request) -> Self {
        let is_scrape = request.uri().path() == "/metrics";
        Self { method: method(request.method()), begun: Instant::now(), is_scrape }
    }

    /// `via` is how the data plane was addressed; `None`: it is the control plane's.
    pub(super) fn end(self, app: &App, via: Option<Via>, response: &Response) {
        let (route, route_source) = match via {
            None if self.is_scrape => return,
            None => (route(response.extensions().get::<MatchedPath>()), "control_plane"),
            Some(Via::Host) => (PROXIED.to_owned(), "proxy_host"),
            Some(Via::Headers) => (PROXIED.to_owned(), "proxy_header"),
            Some(Via::Prefix) => (PROXIED.to_owned(), "proxy_prefix"),
        };
        let labels = HttpLabels { method: self.method, route, route_source, status: status(response.status()) };
        app.metrics.answered(&labels, self.begun);
    }
}

/// Has a response tell which route it is of.
pub(super) async fn note_route(request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().cloned();
    let mut response = next.run(request).await;
    if let Some(path) = path {
        response.extensions_mut().insert(path);
    }
    response
}

/// `GET /metrics`: open to everybody who reaches the API.
pub(super) async fn show(State(app): State<App>) -> Result<Response, ApiError> {
    let sandboxes = app.orchestrator.list();
    let phases = Phase::ALL.into_iter().filter(|phase| !phase.is_ending()).map(|phase| {
        let count = sandboxes.iter().filter(|info| info.phase == phase).count();
        (format!("{phase:?}").to_lowercase(), count as i64)
    });
    let ledger = match ledger::recent(&app).await {
        Ok(ledger) => ledger.counts(),
        Err(error) => {
            debug!(?error, "the ledger cannot be taken");
            Vec::new()
        }
    };
    let creates = app.orchestrator.creates();
    let now = Now {
        phases: phases.collect(),
        pools: vec![
            ("network_slots", app.slots.waiting() as i64),
            ("vmms", app.orchestrator.waiting() as i64),
            ("machines", app.orchestrator.standing() as i64),
        ],
        ledger,
        creates: [("ok", creates.succeeded), ("error", creates.failed)],
    };
    let text = app.metrics.render(app.orchestrator.stages(), &now);
    let text = text.map_err(|error| ApiError::unavailable(format!("encode metrics: {error}")))?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}

fn method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "OTHER",
    }
}

fn status(status: StatusCode) -> &'static str {
    match status.as_u16() / 100 {
        1 => "1xx",
        2 => "2xx",
        3 => "3xx",
        4 => "4xx",
        5 => "5xx",
        _ => "other",
    }
}

/// As dashboards know it: parameters say whose ids they are.
fn route(path: Option<&MatchedPath>) -> String {
    path.map_or_else(|| UNMATCHED.to_owned(), |path| label(path.as_str()))
}

fn label(path: &str) -> String {
    for (of, parameter) in [("/sandboxes/", "{sandbox_id}"), ("/nodes/", "{node_id}")] {
        if path.contains(of) {
            return path.replacen("{id}", parameter, 1);
        }
    }
    path.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_say_whose_ids_they_have() {
        for (path, expected) in [
            ("/sandboxes", "/sandboxes"),
            ("/sandboxes/{id}/pause", "/sandboxes/{sandbox_id}/pause"),
            ("/v2/sandboxes/{id}/connect", "/v2/sandboxes/{sandbox_id}/connect"),
            ("/nodes/{id}", "/nodes/{node_id}"),
            ("/templates/{id}", "/templates/{id}"),
        ] {
            assert_eq!(label(path), expected);
        }
        assert_eq!(route(None), "unmatched");
    }
}
