//! Tags of templates.

use aenv_api::{AssignTags, AssignedTags, RemoveTags, TemplateTag};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::App;
use super::body::{JsonBody, PathOf};
use super::error::ApiError;
use super::templates::find;

/// `POST /templates/tags`.
pub(super) async fn assign(
    State(app): State<App>,
    JsonBody(AssignTags { target, tags }): JsonBody<AssignTags>,
) -> Result<(StatusCode, Json<AssignedTags>), ApiError> {
    refuse_empty(&target, &tags)?;
    let build_id = app.templates.assign_tags(&target, &tags).await?;
    Ok((StatusCode::CREATED, Json(AssignedTags { tags, build_id })))
}

/// `DELETE /templates/tags`.
pub(super) async fn remove(
    State(app): State<App>,
    JsonBody(RemoveTags { name, tags }): JsonBody<RemoveTags>,
) -> Result<StatusCode, ApiError> {
    refuse_empty(&name, &tags)?;
    app.templates.remove_tags(&name, &tags).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /templates/{id}/tags`, by id or name.
pub(super) async fn list(
    State(app): State<App>,
    PathOf(reference): PathOf<String>,
) -> Result<Json<Vec<TemplateTag>>, ApiError> {
    let record = find(&app, &reference).await?;
    let tag = |(tag, stands): (&String, &aenv_template::Tag)| TemplateTag {
        tag: tag.clone(),
        build_id: stands.build,
        created_at: stands.created_at,
    };
    Ok(Json(record.tags.iter().map(tag).collect()))
}

fn refuse_empty(name: &str, tags: &[String]) -> Result<(), ApiError> {
    if name.split(':').next().is_none_or(str::is_empty) {
        return Err(ApiError::bad_request("missing name of the template"));
    }
    if tags.is_empty() {
        return Err(ApiError::bad_request("missing tags"));
    }
    Ok(())
}
