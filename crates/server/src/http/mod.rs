//! The HTTP surface: who may call, what is routed where, and one shape of every error.
//!
//! ```text
//! request ─▶ names a sandbox (host, /proxy, routing headers)? ──yes─▶ data plane: proxy
//!                     │ no
//!                     ▼
//!  /health ─▶ 204 · /metrics    anything else: API key ─▶ handler ─▶ orchestrator, templates
//! ```

mod auth;
mod batch;
mod body;
mod builds;
mod cold;
mod error;
mod keys;
mod ledger;
mod machine;
mod nodes;
mod observe;
mod once;
mod openapi;
mod plain;
mod routes;
mod scrape;
pub(crate) use ledger::LastLedger;
pub(crate) use once::Once;
pub(crate) use routes::NodeRoutes;
mod sandboxes;
pub(crate) use sandboxes::{guest_defaults, image_of};
mod snapshots;
mod tags;
mod templates;
mod uploads;

use std::path::PathBuf;
use std::sync::Arc;

use aenv_api::NEXT_TOKEN_HEADER;
use aenv_block_client::BlockdClient;
use aenv_model::Bytes;
use aenv_network::SlotPool;
use aenv_orchestrator::{Orchestrator, TokenSeed};
use aenv_proxy::{Proxy, Targets, Via};
use aenv_template::Templates;
use axum::extract::{Request, State};
use axum::http::{HeaderName, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post, put};
use axum::{Json, Router};

use crate::audit::Audit;
use crate::config::Config;
use crate::host::CpuMeter;
use crate::keys::Keys;
use crate::metrics::Metrics;
use error::ApiError;
use scrape::Counted;

/// Sent with a new sandbox so that a gateway can note where it lives.
const SANDBOX_ID_HEADER: HeaderName = HeaderName::from_static("x-agentenv-sandbox-id");

/// How long the machine of a fork's or a snapshot's source stood still, in milliseconds.
const STALL_HEADER: HeaderName = HeaderName::from_static("x-agentenv-stall-ms");

/// The instant of which a fork or a snapshot is.
const CAPTURED_AT_HEADER: HeaderName = HeaderName::from_static("x-agentenv-captured-at");

/// What a fork or a snapshot holds of that instant: `full` or `filesystem`.
const CONSISTENCY_HEADER: HeaderName = HeaderName::from_static("x-agentenv-consistency");

/// What handlers need. Cloning shares it.
#[derive(Debug, Clone)]
pub(crate) struct App {
    pub(crate) inner: Arc<AppParts>,
}

/// The parts behind [`App`].
#[derive(Debug)]
pub(crate) struct AppParts {
    pub(crate) config: Config,
    /// The host's memory: no machine can have more.
    pub(crate) memory: Bytes,
    pub(crate) keys: Keys,
    pub(crate) audit: Audit,
    pub(crate) orchestrator: Orchestrator,
    pub(crate) templates: Templates,
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) targets: Targets,
    /// What links to uploads are signed with.
    pub(crate) seed: TokenSeed,
    pub(crate) once: Once,
    pub(crate) slots: Arc<SlotPool>,
    pub(crate) blockd: BlockdClient,
    /// Private directories of sandboxes.
    pub(crate) sandboxes_dir: PathBuf,
    pub(crate) captures_dir: PathBuf,
    pub(crate) metrics: Metrics,
    pub(crate) last_ledger: LastLedger,
    pub(crate) cpu: CpuMeter,
}

impl std::ops::Deref for App {
    type Target = AppParts;

    fn deref(&self) -> &AppParts {
        &self.inner
    }
}

/// The whole surface as one service.
pub(crate) fn router(app: App) -> Router {
    let api = Router::new()
        .route("/sandboxes", post(sandboxes::create_v1).get(sandboxes::list_v1))
        .route("/v2/sandboxes", post(sandboxes::create_v2).get(sandboxes::list_v2))
        .route("/sandboxes/batch", post(batch::create))
        .route("/leases/{id}/renew", post(batch::renew))
        .route("/leases/{id}", delete(batch::end))
        .route("/sandboxes-cold", post(cold::create))
        .route("/sandboxes/{id}", get(sandboxes::detail).delete(sandboxes::kill))
        .route("/sandboxes/{id}/timeout", post(sandboxes::timeout))
        .route("/sandboxes/{id}/refreshes", post(sandboxes::refresh))
        .route("/sandboxes/{id}/connect", post(sandboxes::connect_v1))
        .route("/v2/sandboxes/{id}/connect", post(sandboxes::connect_v2))
        .route("/sandboxes/{id}/pause", post(sandboxes::pause))
        .route("/sandboxes/{id}/resume", post(sandboxes::resume))
        .route("/sandboxes/{id}/network", put(sandboxes::set_network))
        .route("/sandboxes/{id}/fork", post(sandboxes::fork))
        .route("/sandboxes/{id}/rollback", post(sandboxes::roll_back))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/sandboxes/{id}/execute", post(plain::execute))
        .route("/sandboxes/{id}/files/read", get(plain::read))
        .route("/sandboxes/{id}/files/write", post(plain::write))
        .route("/sandboxes/{id}/metrics", get(observe::metrics))
        .route("/sandboxes/metrics", get(observe::all_metrics))
        .route("/sandboxes/{id}/logs", get(observe::logs_v1))
        .route("/v2/sandboxes/{id}/logs", get(observe::logs_v2))
        .route("/nodes", get(nodes::list))
        .route("/nodes/{id}", get(nodes::detail))
        .route("/teams", get(nodes::teams))
        .route("/api-keys", post(keys::create).get(keys::list))
        .route("/api-keys/{id}", patch(keys::rename).delete(keys::revoke))
        .route(
            "/sandboxes/{id}/custom-extension-params",
            get(nodes::extension_params).patch(nodes::patch_extension_params),
        )
        .route("/snapshots", get(snapshots::list))
        .route("/snapshots/{id}", get(snapshots::detail))
        .route("/debug/ledger", get(ledger::show))
        .route("/v3/templates", post(builds::create))
        .route("/templates", get(templates::list_v1))
        .route("/v2/templates", get(templates::list_v2))
        .route("/templates/{id}", get(templates::detail).delete(templates::remove).patch(templates::change))
        .route("/v2/templates/{id}", patch(templates::change))
        .route("/templates/aliases/{alias}", get(templates::alias))
        .route("/templates/tags", post(tags::assign).delete(tags::remove))
        .route("/templates/{id}/tags", get(tags::list))
        .route("/templates/{id}/files/{hash}", get(uploads::link))
        .route("/v2/templates/{id}/builds/{build}", post(builds::start))
        .route("/templates/{id}/builds/{build}/status", get(builds::status))
        .route("/templates/{id}/builds/{build}/logs", get(builds::logs))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn_with_state(app.clone(), auth::require_key))
        .layer(middleware::from_fn(scrape::note_route));
    Router::new()
        .route("/health", get(health).fallback(no_method))
        .route("/metrics", get(scrape::show).fallback(no_method))
        .route("/uploads/{hash}", put(uploads::receive).fallback(no_method))
        .route("/openapi.json", get(openapi::show).fallback(no_method))
        .route("/docs", get(openapi::page).fallback(no_method))
        .route_layer(middleware::from_fn(scrape::note_route))
        .with_state(app.clone())
        .fallback_service(api.with_state(app.clone()))
        .layer(middleware::from_fn_with_state(app, data_plane_first))
}

async fn health() -> StatusCode {
    StatusCode::NO_CONTENT
}

/// A request that names a sandbox is the sandbox's, whatever its path: a service may well have a `/sandboxes` of its own.
async fn data_plane_first(State(app): State<App>, request: Request, next: Next) -> Response {
    let counted = Counted::begin(&request);
    let (via, response) = match app.targets.of(&request) {
        None => (None, next.run(request).await),
        Some(Ok(target)) => (Some(target.via), app.proxy.handle(request, target).await.map(axum::body::Body::new)),
        Some(Err(problem)) => {
            // Headers, or a prefix without them.
            let refusal = ApiError::new(StatusCode::BAD_REQUEST, problem.to_string()).into_response();
            (Some(Via::Headers), refusal)
        }
    };
    counted.end(&app, via, &response);
    response
}

async fn no_route(request: Request) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, format!("route not found: {} {}", request.method(), request.uri().path()))
}

async fn no_method(request: Request) -> ApiError {
    let message = format!("{} has no method {}", request.uri().path(), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

/// A page of a list: the items, and the token of the next page as a header while there is one.
fn page<T: serde::Serialize>(items: Vec<T>, next: Option<String>) -> Response {
    let token = next.map(|token| [(HeaderName::from_static(NEXT_TOKEN_HEADER), token)]);
    match token {
        Some(header) => (header, Json(items)).into_response(),
        None => Json(items).into_response(),
    }
}
