//! Template endpoints.

use aenv_api::{
    AliasAnswer, BuildState, Cursor, ListQuery, Order, Template, TemplateBuild, TemplateNames, TemplateUpdate,
    TemplateWithBuilds, paginate,
};
use aenv_template::{BuildRecord, TemplateRecord};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;

use super::body::{JsonBody, PathOf, QueryOf};
use super::error::ApiError;
use super::{App, page};

/// `GET /templates`: not paged.
pub(super) async fn list_v1(State(app): State<App>) -> Result<Response, ApiError> {
    let (items, _) = paginate(all(&app).await?, Order::Desc, None, None, position);
    Ok(page(items, None))
}

/// `GET /v2/templates`.
pub(super) async fn list_v2(State(app): State<App>, QueryOf(query): QueryOf<ListQuery>) -> Result<Response, ApiError> {
    let query = ListQuery { limit: query.limit, next_token: query.next_token, ..ListQuery::default() };
    let filter = query.parse().map_err(|error| ApiError::bad_request(error.to_string()))?;
    let (items, next) = paginate(all(&app).await?, Order::Desc, filter.cursor.as_ref(), filter.limit, position);
    Ok(page(items, next))
}

/// `GET /templates/{id}`, by id or name.
pub(super) async fn detail(
    State(app): State<App>,
    PathOf(reference): PathOf<String>,
) -> Result<Json<TemplateWithBuilds>, ApiError> {
    let record = find(&app, &reference).await?;
    let envd_version = &app.config.envd.version;
    let builds = record.builds.iter().rev().map(|build| TemplateBuild {
        build_id: build.id,
        status: state_of(build),
        created_at: build.created_at,
        updated_at: build.updated_at,
        finished_at: state_of(build).is_terminal().then_some(build.updated_at),
        cpu_count: build.shape.vcpus,
        memory_mb: build.shape.memory.to_mib_ceil(),
        disk_size_mb: disk_size_mib(build),
        envd_version: Some(envd_version.clone()),
    });
    Ok(Json(TemplateWithBuilds {
        template_id: record.id,
        public: record.public,
        aliases: vec![record.name.clone()],
        names: vec![record.name.clone()],
        created_at: record.created_at,
        updated_at: record.updated_at,
        last_spawned_at: None,
        spawn_count: 0,
        builds: builds.collect(),
    }))
}

/// `GET /templates/aliases/{alias}`.
pub(super) async fn alias(
    State(app): State<App>,
    PathOf(alias): PathOf<String>,
) -> Result<Json<AliasAnswer>, ApiError> {
    let record = find(&app, &alias).await?;
    Ok(Json(AliasAnswer { template_id: record.id, public: record.public }))
}

/// `PATCH /v2/templates/{id}`, and the older `PATCH /templates/{id}`.
pub(super) async fn change(
    State(app): State<App>,
    PathOf(reference): PathOf<String>,
    JsonBody(request): JsonBody<TemplateUpdate>,
) -> Result<Json<TemplateNames>, ApiError> {
    let name = match request.public {
        Some(public) => app.templates.set_public(&reference, public).await?,
        None => find(&app, &reference).await?.name,
    };
    Ok(Json(TemplateNames { names: vec![name] }))
}

/// `DELETE /templates/{id}`, by id or name.
pub(super) async fn remove(State(app): State<App>, PathOf(reference): PathOf<String>) -> Result<StatusCode, ApiError> {
    app.templates.delete(&reference).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn find(app: &App, reference: &str) -> Result<TemplateRecord, ApiError> {
    let missing = || ApiError::new(StatusCode::NOT_FOUND, format!("template '{reference}' not found"));
    app.templates.find(reference).await?.ok_or_else(missing)
}

async fn all(app: &App) -> Result<Vec<Template>, ApiError> {
    let envd_version = &app.config.envd.version;
    let item = |record: &TemplateRecord| {
        let shown = record.shown()?;
        Some(Template {
            template_id: record.id,
            build_id: shown.id,
            cpu_count: shown.shape.vcpus,
            memory_mb: shown.shape.memory.to_mib_ceil(),
            disk_size_mb: disk_size_mib(shown).unwrap_or(0),
            public: record.public,
            aliases: vec![record.name.clone()],
            names: vec![record.name.clone()],
            created_at: record.created_at,
            updated_at: record.updated_at,
            created_by: None,
            last_spawned_at: None,
            spawn_count: 0,
            build_count: record.builds.len() as u64,
            envd_version: envd_version.clone(),
            build_status: state_of(shown),
        })
    };
    Ok(app.templates.list().await?.iter().filter_map(item).collect())
}

fn position(item: &Template) -> Cursor {
    Cursor { time: item.created_at, id: item.template_id.to_string() }
}

fn disk_size_mib(build: &BuildRecord) -> Option<u64> {
    match &build.state {
        aenv_template::BuildState::Ready { disk_size, .. } => Some(disk_size.to_mib_ceil()),
        _ => None,
    }
}

pub(super) fn state_of(build: &BuildRecord) -> BuildState {
    match build.state {
        aenv_template::BuildState::Waiting => BuildState::Waiting,
        aenv_template::BuildState::Building => BuildState::Building,
        aenv_template::BuildState::Ready { .. } | aenv_template::BuildState::Replaced => BuildState::Ready,
        aenv_template::BuildState::Error { .. } => BuildState::Error,
    }
}
