//! Nodes and teams: there is one of each. And what extensions would have of a sandbox: there are none.

use aenv_api::{API_KEY_HEADER, Node, NodeMetrics, Team};
use aenv_model::Phase;
use aenv_orchestrator::SandboxInfo;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::App;
use super::body::{PathOf, QueryOf};
use super::error::ApiError;
use super::sandboxes::visible;
use crate::host;

/// The one team's id, the same on every node.
const TEAM: &str = "00000000-0000-4000-8000-000000000001";

/// Query of both calls.
#[derive(Debug, Default, Deserialize)]
pub(super) struct NodeQuery {
    #[serde(rename = "clusterID")]
    cluster_id: Option<String>,
}

/// `GET /nodes`.
pub(super) async fn list(State(app): State<App>, QueryOf(query): QueryOf<NodeQuery>) -> Json<Vec<Node>> {
    if !is_asked_for(&app, &query) {
        return Json(Vec::new());
    }
    let (node, starting) = this(&app).await;
    Json(vec![Node { sandbox_starting_count: Some(starting), ..node }])
}

/// `GET /nodes/{id}`.
pub(super) async fn detail(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    QueryOf(query): QueryOf<NodeQuery>,
) -> Result<Json<Node>, ApiError> {
    if id != app.config.node_identity.node_id || !is_asked_for(&app, &query) {
        return Err(ApiError::new(StatusCode::NOT_FOUND, format!("node {id} not found")));
    }
    let (node, _) = this(&app).await;
    Ok(Json(Node { cached_builds: Some(Vec::new()), ..node }))
}

fn is_asked_for(app: &App, query: &NodeQuery) -> bool {
    let cluster = query.cluster_id.as_ref().is_none_or(|id| *id == app.config.node_identity.cluster_id);
    app.config.observability.enabled && cluster
}

/// This node, and how many sandboxes are about to have a machine.
async fn this(app: &App) -> (Node, u32) {
    let identity = &app.config.node_identity;
    let sandboxes = app.orchestrator.list();
    let count = |of: &dyn Fn(Phase) -> bool| sandboxes.iter().filter(|info| of(info.phase)).count() as u32;
    let starting = count(&is_starting);
    let paused = count(&|phase| phase == Phase::Paused);
    let creates = app.orchestrator.creates();
    let disks = tokio::task::spawn_blocking(host::disks).await.unwrap_or_default();
    let node = Node {
        id: identity.node_id.clone(),
        service_instance_id: identity.service_instance_id.clone(),
        cluster_id: identity.cluster_id.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: option_env!("AENV_COMMIT").unwrap_or("unknown").to_owned(),
        status: "ready".to_owned(),
        sandbox_count: sandboxes.len() as u32 - starting - paused,
        sandbox_starting_count: None,
        sandbox_paused_count: paused,
        create_successes: creates.succeeded,
        create_fails: creates.failed,
        machine_info: host::machine(),
        metrics: NodeMetrics { cpu_percent: app.cpu.percent().await, disks, ..allocated(&sandboxes) },
        cached_builds: None,
    };
    (node, starting)
}

fn is_starting(phase: Phase) -> bool {
    matches!(phase, Phase::Creating | Phase::Resuming)
}

/// What is given to sandboxes, and what there is.
fn allocated(sandboxes: &[SandboxInfo]) -> NodeMetrics {
    let (used, total) = host::memory();
    let mut metrics = NodeMetrics {
        cpu_count: host::processors(),
        memory_used_bytes: used,
        memory_total_bytes: total,
        ..NodeMetrics::default()
    };
    for info in sandboxes {
        let (cpu, memory) = match info.phase {
            Phase::Paused => (&mut metrics.paused_allocated_cpu, &mut metrics.paused_allocated_memory_bytes),
            _ => (&mut metrics.allocated_cpu, &mut metrics.allocated_memory_bytes),
        };
        *cpu += u64::from(info.shape.vcpus);
        *memory += info.shape.memory.get();
    }
    metrics
}

/// `GET /teams`. Whoever asks has shown the key, so it is no news to him.
pub(super) async fn teams(headers: HeaderMap) -> Json<Vec<Team>> {
    let api_key = headers.get(API_KEY_HEADER).and_then(|key| key.to_str().ok()).unwrap_or_default().to_owned();
    Json(vec![Team { team_id: TEAM.to_owned(), name: "default".to_owned(), api_key, is_default: true }])
}

/// `GET /sandboxes/{id}/custom-extension-params`.
pub(super) async fn extension_params(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
) -> Result<Json<Map<String, Value>>, ApiError> {
    visible(&app, &id)?;
    Ok(Json(Map::new()))
}

/// `PATCH /sandboxes/{id}/custom-extension-params`.
pub(super) async fn patch_extension_params(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
) -> Result<Json<Map<String, Value>>, ApiError> {
    visible(&app, &id)?;
    Err(ApiError::bad_request("no extension is configured on this node: there is nobody to take the parameters"))
}
