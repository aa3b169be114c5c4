//! The protocol: HTTP to operations, and their errors to statuses.

use std::sync::Arc;

use aenv_block_client::wire::{CloseQuery, ErrorBody, ResizeRequest, RestackRequest, ShutdownQuery};
use aenv_block_client::{DeviceConfig, DeviceSpec, ErrorKind, Info, PROTOCOL};
use aenv_block_export::ExportKind;
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::devices::{Devices, Failed};
use crate::metrics::{self, Observed};

/// What handlers have.
#[derive(Debug, Clone)]
pub(crate) struct App {
    pub(crate) devices: Arc<Devices>,
    /// Ends the daemon.
    pub(crate) stop: CancellationToken,
}

/// All of it, for the socket.
pub(crate) fn router(app: App) -> Router {
    let one = put(create).get(get_one).delete(close);
    Router::new()
        .route("/v1/info", get(about))
        .route("/v1/devices", get(list))
        .route("/v1/devices/{name}", one)
        .route("/v1/devices/{name}/restack", post(restack))
        .route("/v1/devices/{name}/resize", post(resize))
        .route("/v1/devices/{name}/flush", post(flush))
        .route("/v1/shutdown", post(shutdown))
        .route("/metrics", get(scrape))
        .fallback(|| async { Failed { kind: ErrorKind::Invalid, message: "there is no such call".to_owned() } })
        .with_state(app)
}

/// Metrics alone, for everybody.
pub(crate) fn metrics_router(app: App) -> Router {
    Router::new().route("/metrics", get(scrape)).with_state(app)
}

type Answer<T> = Result<Json<T>, Failed>;

async fn about(State(app): State<App>) -> Json<Info> {
    let export = match app.devices.exporter_kind() {
        ExportKind::Fuse => "fuse",
        ExportKind::Ublk => "ublk",
    };
    Json(Info {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: PROTOCOL,
        pid: std::process::id(),
        export: export.to_owned(),
        devices: app.devices.count() as u64,
    })
}

async fn list(State(app): State<App>) -> impl IntoResponse {
    Json(app.devices.list())
}

async fn get_one(State(app): State<App>, Path(name): Path<String>) -> Result<impl IntoResponse, Failed> {
    app.devices.get(&name).await.map(Json)
}

async fn create(State(app): State<App>, Path(name): Path<String>, body: Bytes) -> Result<impl IntoResponse, Failed> {
    let spec: DeviceSpec = parse(&body)?;
    let layers = spec.config.layers().len();
    let view = told("create", &name, app.devices.create(&name, spec).await)?;
    info!(device = name, layers, path = %view.path.display(), size = view.size.get(), "device is there");
    Ok(Json(view))
}

async fn restack(State(app): State<App>, Path(name): Path<String>, body: Bytes) -> Result<impl IntoResponse, Failed> {
    let RestackRequest { layer } = parse(&body)?;
    let restacked = told("restack", &name, app.devices.restack(&name, &layer).await)?;
    let pause_micros = restacked.pause_micros;
    info!(device = name, layer = %layer.display(), size = restacked.size.get(), pause_micros, "upper became a layer");
    Ok(Json(restacked))
}

async fn resize(State(app): State<App>, Path(name): Path<String>, body: Bytes) -> Result<impl IntoResponse, Failed> {
    let ResizeRequest { size } = parse(&body)?;
    let view = told("resize", &name, app.devices.resize(&name, size).await)?;
    info!(device = name, size = size.get(), "device has another size");
    Ok(Json(view))
}

async fn flush(State(app): State<App>, Path(name): Path<String>) -> Answer<()> {
    told("flush", &name, app.devices.flush(&name).await).map(Json)
}

async fn close(
    State(app): State<App>,
    Path(name): Path<String>,
    query: Result<Query<CloseQuery>, QueryRejection>,
) -> Answer<DeviceConfig> {
    let Query(CloseQuery { uppers }) = query.map_err(|error| invalid(error.body_text()))?;
    let config = told("close", &name, app.devices.close(&name, uppers).await)?;
    info!(device = name, ?uppers, "device is closed");
    Ok(Json(config))
}

async fn shutdown(State(app): State<App>, query: Result<Query<ShutdownQuery>, QueryRejection>) -> Answer<()> {
    let Query(ShutdownQuery { force }) = query.map_err(|error| invalid(error.body_text()))?;
    let count = app.devices.count();
    if count > 0 && !force {
        let message = format!("there are {count} devices; close them, or use force");
        return Err(Failed { kind: ErrorKind::Conflict, message });
    }
    info!(devices = count, "asked to shut down");
    app.stop.cancel();
    Ok(Json(()))
}

async fn scrape(State(app): State<App>) -> Result<impl IntoResponse, Failed> {
    let observed: Arc<dyn Observed> = app.devices;
    let text = metrics::render(observed)
        .map_err(|error| Failed { kind: ErrorKind::Failed, message: format!("encode metrics: {error}") })?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text))
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failed> {
    let mut json = serde_json::Deserializer::from_slice(body);
    serde_path_to_error::deserialize(&mut json).map_err(|error| invalid(format!("{}: {}", error.path(), error.inner())))
}

fn invalid(message: String) -> Failed {
    Failed { kind: ErrorKind::Invalid, message }
}

/// Logs a failure that somebody should know of besides its caller.
fn told<T>(operation: &'static str, name: &str, result: Result<T, Failed>) -> Result<T, Failed> {
    if let Err(Failed { kind, message }) = &result
        && !matches!(kind, ErrorKind::NotFound)
    {
        warn!(device = name, operation, ?kind, error = message, "operation refused");
    }
    result
}

/// JSON, as an answer.
struct Json<T>(T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        answer(StatusCode::OK, &self.0)
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        let status = match self.kind {
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            ErrorKind::Remote => StatusCode::BAD_GATEWAY,
            ErrorKind::Unreachable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        answer(status, &ErrorBody { kind: self.kind, message: self.message })
    }
}

fn answer(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(body) => (status, [(header::CONTENT_TYPE, "application/json")], body).into_response(),
        // A path that is no text: refused when it came in.
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
