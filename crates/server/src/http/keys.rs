//! API keys, as E2B's API has them, with what a key may do.

use aenv_api::{ApiKeyInfo, CreatedApiKey, NewApiKey, RenamedApiKey};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::App;
use super::body::{JsonBody, PathOf};
use super::error::ApiError;

/// `POST /api-keys`: a fresh one, told this once.
pub(super) async fn create(
    State(app): State<App>,
    JsonBody(request): JsonBody<NewApiKey>,
) -> Result<(StatusCode, Json<CreatedApiKey>), ApiError> {
    let created = app.keys.create(&request.name, request.scope).await?;
    Ok((StatusCode::CREATED, Json(created)))
}

/// `GET /api-keys`: all but the deployment's own.
pub(super) async fn list(State(app): State<App>) -> Json<Vec<ApiKeyInfo>> {
    Json(app.keys.list())
}

/// `PATCH /api-keys/{id}`: another name.
pub(super) async fn rename(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<RenamedApiKey>,
) -> Result<StatusCode, ApiError> {
    app.keys.rename(&id, &request.name).await?;
    Ok(StatusCode::OK)
}

/// `DELETE /api-keys/{id}`: it opens nothing from the next request on.
pub(super) async fn revoke(State(app): State<App>, PathOf(id): PathOf<String>) -> Result<StatusCode, ApiError> {
    app.keys.revoke(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}
