//! Groups of sandboxes: made together, and ended together by a lease.

use std::time::Duration;

use aenv_api::{Batch, ForkResult, Lease, LeaseRenewal, NewBatch};
use aenv_model::LeaseId;
use aenv_orchestrator::LeaseInfo;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, StreamExt as _};

use super::App;
use super::body::{JsonBody, PathOf};
use super::error::ApiError;
use super::once::Once;
use super::sandboxes::{answer, wanted};

/// Most sandboxes of one batch.
const BATCH_LIMIT: u32 = 256;
/// Longest that a lease lasts without a renewal, in seconds.
const LEASE_LIMIT: u32 = 86_400;

/// `POST /sandboxes/batch`: one result each, in no particular order. All of them have room to wait for their start, or none
/// is started.
pub(super) async fn create(
    State(app): State<App>,
    headers: HeaderMap,
    JsonBody(request): JsonBody<NewBatch>,
) -> Result<Response, ApiError> {
    let (key, hash) = (app.once.key(&headers)?, Once::hash("batch", &request));
    let work = {
        let app = app.clone();
        async move { create_all(&app, request).await }
    };
    app.once.run(key, hash, work).await
}

async fn create_all(app: &App, request: NewBatch) -> Result<Response, ApiError> {
    let NewBatch { count, lease, sandbox } = request;
    if !(1..=BATCH_LIMIT).contains(&count) {
        return Err(ApiError::bad_request(format!("invalid field count: {count}, expected 1 to {BATCH_LIMIT}")));
    }
    if lease.is_some() && sandbox.lease_id.is_some() {
        return Err(ApiError::bad_request("fields lease and leaseID exclude each other: a new lease, or one there is"));
    }
    // Refused as a whole before anything is made; and looked up once.
    let mut wanted = wanted(app, sandbox, true).await?;
    app.orchestrator.admit(count as usize)?;
    let lease = match lease {
        Some(lease) => Some(app.orchestrator.grant_lease(life("lease.timeout", lease.timeout)?).await?),
        None => None,
    };
    if let Some(lease) = &lease {
        wanted.spec.lease = Some(lease.id);
    }
    let one = || async {
        match app.orchestrator.create(wanted.clone()).await.map_err(ApiError::from) {
            Ok(info) => ForkResult { sandbox: Some(answer(app, info)), error: None },
            Err(error) => ForkResult { sandbox: None, error: Some(error.into_body()) },
        }
    };
    let sandboxes: Vec<_> = stream::iter((0..count).map(|_| one())).buffer_unordered(count as usize).collect().await;
    let batch = Batch { sandboxes, lease: lease.map(told) };
    Ok((StatusCode::CREATED, Json(batch)).into_response())
}

/// `POST /leases/{id}/renew`.
pub(super) async fn renew(
    State(app): State<App>,
    PathOf(text): PathOf<String>,
    JsonBody(request): JsonBody<LeaseRenewal>,
) -> Result<Json<Lease>, ApiError> {
    let life = request.timeout.map(|secs| life("timeout", secs)).transpose()?;
    let renewed = app.orchestrator.renew_lease(parse(&text)?, life).await?;
    renewed.map(|lease| Json(told(lease))).ok_or_else(|| missing(&text))
}

/// `DELETE /leases/{id}`: its sandboxes end.
pub(super) async fn end(State(app): State<App>, PathOf(text): PathOf<String>) -> Result<StatusCode, ApiError> {
    match app.orchestrator.end_lease(parse(&text)?).await? {
        true => Ok(StatusCode::NO_CONTENT),
        false => Err(missing(&text)),
    }
}

fn life(field: &str, secs: u32) -> Result<Duration, ApiError> {
    if !(1..=LEASE_LIMIT).contains(&secs) {
        let message = format!("invalid field {field}: {secs}, expected 1 to {LEASE_LIMIT} seconds");
        return Err(ApiError::bad_request(message));
    }
    Ok(Duration::from_secs(secs.into()))
}

fn told(LeaseInfo { id, end_at }: LeaseInfo) -> Lease {
    Lease { lease_id: id, end_at }
}

fn parse(text: &str) -> Result<LeaseId, ApiError> {
    text.parse().map_err(|_| missing(text))
}

fn missing(text: &str) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, format!("lease {text} not found"))
}
