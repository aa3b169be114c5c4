//! Template endpoints.

use aenv_api::{
    AliasAnswer, BuildLogEntry, BuildReason, BuildState, BuildStatus, BuildStatusQuery, Cursor, ImageRegistry,
    ListQuery, LogLevel, Order, Template, TemplateBuild, TemplateBuildStartV2, TemplateCreateV3, TemplateCreated,
    TemplateWithBuilds, paginate,
};
use aenv_image::{Credentials, ImageReference};
use aenv_template::{BuildRecord, BuildRequest, FailedAt, LogEntry, TemplateRecord};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;

use super::body::{JsonBody, PathOf, QueryOf};
use super::error::ApiError;
use super::{App, page};

/// Log entries of one status answer, as clients page through them.
const LOG_PAGE: usize = 100;

/// Disks have 64 GiB, of which an ordinary image takes a few. Not checked against the image: its files are thin.
const MOST_FREE_DISK_MIB: u32 = 32 << 10;

/// `POST /v3/templates`: announces a build.
pub(super) async fn create(
    State(app): State<App>,
    JsonBody(request): JsonBody<TemplateCreateV3>,
) -> Result<(StatusCode, Json<TemplateCreated>), ApiError> {
    let name = request.name.or(request.alias).ok_or_else(|| ApiError::bad_request("missing field name"))?;
    if !request.tags.is_empty() || name.contains(':') {
        return Err(ApiError::unsupported_field("tags"));
    }
    if let Some(mib) = request.min_free_disk_mb.filter(|mib| *mib > MOST_FREE_DISK_MIB) {
        let message = format!("invalid field minFreeDiskMb: {mib}, expected at most {MOST_FREE_DISK_MIB}");
        return Err(ApiError::bad_request(message));
    }
    let shape = app.shape(request.cpu_count, request.memory_mb)?;
    let (record, build) = app.templates.create(&name, shape).await?;
    let answer = TemplateCreated {
        template_id: record.id,
        build_id: build,
        public: false,
        names: vec![record.name.clone()],
        tags: Vec::new(),
        aliases: vec![record.name],
    };
    Ok((StatusCode::ACCEPTED, Json(answer)))
}

/// `POST /v2/templates/{id}/builds/{build}`: starts it.
pub(super) async fn start_build(
    State(app): State<App>,
    PathOf((template, build)): PathOf<(String, String)>,
    JsonBody(request): JsonBody<TemplateBuildStartV2>,
) -> Result<StatusCode, ApiError> {
    let given = |command: &Option<String>| command.as_ref().is_some_and(|text| !text.trim().is_empty());
    let checks = [
        ("fromTemplate", request.from_template.is_some()),
        ("steps", !request.steps.is_empty()),
        ("startCmd", given(&request.start_cmd)),
        ("readyCmd", given(&request.ready_cmd)),
    ];
    if let Some((field, _)) = checks.iter().find(|(_, used)| *used) {
        return Err(ApiError::unsupported_field(field));
    }
    let credentials = match request.from_image_registry {
        None => None,
        Some(ImageRegistry::Registry { username, password }) => Some(Credentials::Basic { username, password }),
        Some(ImageRegistry::Aws { .. } | ImageRegistry::Gcp { .. }) => {
            return Err(ApiError::unsupported_field("fromImageRegistry.type"));
        }
    };
    let image = request.from_image.unwrap_or_else(|| app.config.image.resolver.default_image.clone());
    let reference: ImageReference =
        image.parse().map_err(|error| ApiError::bad_request(format!("invalid field fromImage: {error}")))?;
    let request = BuildRequest { image, reference, credentials };
    app.templates.start_build(&template, &build, request).await?;
    Ok(StatusCode::ACCEPTED)
}

/// `GET /templates/{id}/builds/{build}/status`.
pub(super) async fn build_status(
    State(app): State<App>,
    PathOf((template, build)): PathOf<(String, String)>,
    QueryOf(query): QueryOf<BuildStatusQuery>,
) -> Result<Json<BuildStatus>, ApiError> {
    let level = query.level.map_or(aenv_template::LogLevel::Debug, from_api_level);
    let (offset, limit) = (query.logs_offset.unwrap_or(0), query.limit.unwrap_or(LOG_PAGE).min(LOG_PAGE));
    let record = app.templates.find(&template).await?;
    let view = app.templates.build(&template, &build, offset, limit, level).await?;
    let (Some(record), Some(view)) = (record, view) else {
        return Err(ApiError::new(StatusCode::NOT_FOUND, format!("template {template} has no build {build}")));
    };
    let reason = match &view.build.state {
        aenv_template::BuildState::Error { message, step } => Some(BuildReason {
            message: message.clone(),
            step: Some(step_name(*step).to_owned()),
            log_entries: Vec::new(),
        }),
        _ => None,
    };
    let log_entries: Vec<_> = view.build.logs.iter().map(log_entry).collect();
    Ok(Json(BuildStatus {
        template_id: record.id,
        build_id: view.build.id,
        status: state_of(&view.build),
        logs: log_entries.iter().map(|entry| entry.message.clone()).collect(),
        log_entries,
        reason,
    }))
}

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
        public: false,
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
    Ok(Json(AliasAnswer { template_id: record.id, public: false }))
}

/// `DELETE /templates/{id}`, by id or name.
pub(super) async fn remove(State(app): State<App>, PathOf(reference): PathOf<String>) -> Result<StatusCode, ApiError> {
    app.templates.delete(&reference).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn find(app: &App, reference: &str) -> Result<TemplateRecord, ApiError> {
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
            public: false,
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

fn state_of(build: &BuildRecord) -> BuildState {
    match build.state {
        aenv_template::BuildState::Waiting => BuildState::Waiting,
        aenv_template::BuildState::Building => BuildState::Building,
        aenv_template::BuildState::Ready { .. } => BuildState::Ready,
        aenv_template::BuildState::Error { .. } => BuildState::Error,
    }
}

/// The names that SDKs point at the user's source with.
fn step_name(step: FailedAt) -> &'static str {
    match step {
        FailedAt::Base => "base",
        FailedAt::Finalize => "finalize",
    }
}

fn log_entry(entry: &LogEntry) -> BuildLogEntry {
    let level = match entry.level {
        aenv_template::LogLevel::Debug => LogLevel::Debug,
        aenv_template::LogLevel::Info => LogLevel::Info,
        aenv_template::LogLevel::Warn => LogLevel::Warn,
        aenv_template::LogLevel::Error => LogLevel::Error,
    };
    BuildLogEntry { timestamp: entry.timestamp, message: entry.message.clone(), level, step: Some("base".to_owned()) }
}

fn from_api_level(level: LogLevel) -> aenv_template::LogLevel {
    match level {
        LogLevel::Debug => aenv_template::LogLevel::Debug,
        LogLevel::Info => aenv_template::LogLevel::Info,
        LogLevel::Warn => aenv_template::LogLevel::Warn,
        LogLevel::Error => aenv_template::LogLevel::Error,
    }
}
