//! Snapshot endpoints.

use aenv_api::{Cursor, ListQuery, NewSnapshot, Order, PauseMode, SnapshotInfo, SnapshotStatus, paginate};
use aenv_image::ImageConfig;
use aenv_orchestrator::{GuestDefaults, Level, OperationStage, Taken};
use aenv_template::{PublicationState, SnapshotRecord};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use super::body::{JsonBody, PathOf, QueryOf};
use super::error::ApiError;
use super::sandboxes::{copied, visible};
use super::{App, page};

/// Query of `GET /snapshots`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SnapshotQuery {
    #[serde(rename = "sandboxID")]
    sandbox_id: Option<String>,
    name: Option<String>,
    limit: Option<String>,
    next_token: Option<String>,
}

/// `POST /sandboxes/{id}/snapshots`: the sandbox stands still for a moment. Waits until all nodes have the snapshot, unless it
/// is told not to: then until this one has.
pub(super) async fn create(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<NewSnapshot>,
) -> Result<Response, ApiError> {
    let id = visible(&app, &id)?;
    let name = request.name.filter(|name| !name.is_empty());
    if let Some(name) = &name {
        app.templates.check_snapshot_name(name).await?;
    }
    // What is begun is finished, also when its client hangs up.
    let (orchestrator, templates) = (app.orchestrator.clone(), app.templates.clone());
    let take = async move {
        let taken = orchestrator.capture(id, request.memory == Some(false)).await.map_err(ApiError::from)?;
        let Taken { capture, spec, stall } = taken;
        let snapshot = aenv_template::NewSnapshot { sandbox: id, name, config: image_config(&spec.defaults) };
        let add = async {
            match request.wait {
                Some(false) => templates.add_snapshot_soon(snapshot, capture).await,
                _ => templates.add_snapshot(snapshot, capture).await,
            }
        };
        let record = orchestrator.stages().time(OperationStage::PUBLISH, Box::pin(add)).await.inspect_err(|error| {
            orchestrator.note(id, Level::Warn, "a snapshot was not kept", &[("reason", &error.to_string())]);
        })?;
        Ok::<_, ApiError>((record, stall))
    };
    let (record, stall) = tokio::spawn(take).await.map_err(|_| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the snapshot of sandbox {id} was not made"))
    })??;
    let copied = copied(stall, record.captured_at(), holds(&record));
    Ok((StatusCode::CREATED, copied, Json(info(&record))).into_response())
}

/// `GET /snapshots`.
pub(super) async fn list(State(app): State<App>, QueryOf(query): QueryOf<SnapshotQuery>) -> Result<Response, ApiError> {
    let paging = ListQuery { limit: query.limit, next_token: query.next_token, ..ListQuery::default() };
    let filter = paging.parse().map_err(|error| ApiError::bad_request(error.to_string()))?;
    // A name may come as `namespace/name:tag`; there is one namespace and one tag here.
    let wanted = query.name.as_deref().map(|name| {
        let name = name.rsplit('/').next().unwrap_or(name);
        name.split(':').next().unwrap_or(name)
    });
    let records = app.templates.snapshots().await?.into_iter().filter(|record| {
        let of_sandbox = query.sandbox_id.as_ref().is_none_or(|id| record.sandbox.to_string() == *id);
        let named = wanted.is_none_or(|name| record.name.as_deref() == Some(name) || record.id.to_string() == name);
        of_sandbox && named
    });
    let items = records.map(|record| info(&record)).collect();
    let (items, next) = paginate(items, Order::Desc, filter.cursor.as_ref(), filter.limit, position);
    Ok(page(items, next))
}

/// `GET /snapshots/{id}`, by id or name.
pub(super) async fn detail(
    State(app): State<App>,
    PathOf(reference): PathOf<String>,
) -> Result<Json<SnapshotInfo>, ApiError> {
    let missing = || ApiError::new(StatusCode::NOT_FOUND, format!("snapshot '{reference}' not found"));
    app.templates.snapshot(&reference).await?.map(|record| Json(info(&record))).ok_or_else(missing)
}

fn position(item: &SnapshotInfo) -> Cursor {
    Cursor { time: item.created_at, id: item.snapshot_id.to_string() }
}

fn holds(record: &SnapshotRecord) -> PauseMode {
    if record.memory { PauseMode::Full } else { PauseMode::Filesystem }
}

fn info(record: &SnapshotRecord) -> SnapshotInfo {
    let (status, reason) = match &record.publication {
        PublicationState::Ready => (SnapshotStatus::Ready, None),
        PublicationState::Publishing => (SnapshotStatus::Publishing, None),
        PublicationState::Failed { reason } => (SnapshotStatus::Failed, Some(reason.clone())),
    };
    SnapshotInfo {
        snapshot_id: record.id,
        names: record.name.clone().into_iter().collect(),
        cpu_count: record.shape.vcpus,
        memory_mb: record.shape.memory.to_mib_ceil(),
        disk_size_mb: record.disk_size.to_mib_ceil(),
        created_at: record.created_at,
        updated_at: record.created_at,
        captured_at: Some(record.captured_at()),
        consistency: Some(holds(record)),
        status,
        reason,
    }
}

/// What sandboxes from a snapshot give their processes: what those of its source got.
fn image_config(defaults: &GuestDefaults) -> ImageConfig {
    ImageConfig {
        env: defaults.env.iter().map(|(key, value)| format!("{key}={value}")).collect(),
        user: defaults.user.clone(),
        working_dir: defaults.workdir.clone(),
        ..ImageConfig::default()
    }
}
