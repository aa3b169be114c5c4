//! Builds of templates: announced, started, watched.

use aenv_api::{
    BuildLogEntry, BuildLogs, BuildReason, BuildStatus, BuildStatusQuery, ImageRegistry, LogLevel,
    TemplateBuildStartV2, TemplateCreateV3, TemplateCreated,
};
use aenv_image::{Credentials, ImageReference};
use aenv_template::{Base, BuildRequest, BuildView, ImageRequest, LogEntry, Step, TemplateRecord};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::App;
use super::body::{JsonBody, PathOf, QueryOf};
use super::error::ApiError;
use super::templates::state_of;

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
    if let Some(mib) = request.min_free_disk_mb.filter(|mib| *mib > MOST_FREE_DISK_MIB) {
        let message = format!("invalid field minFreeDiskMb: {mib}, expected at most {MOST_FREE_DISK_MIB}");
        return Err(ApiError::bad_request(message));
    }
    let shape = app.shape(request.cpu_count, request.memory_mb)?;
    let (record, build) = app.templates.create(&name, &request.tags, shape).await?;
    let tags = record.build(build).map(|build| build.tags.clone()).unwrap_or_default();
    let answer = TemplateCreated {
        template_id: record.id,
        build_id: build,
        public: record.public,
        names: vec![record.name.clone()],
        tags,
        aliases: vec![record.name],
    };
    Ok((StatusCode::ACCEPTED, Json(answer)))
}

/// `POST /v2/templates/{id}/builds/{build}`: starts it.
pub(super) async fn start(
    State(app): State<App>,
    PathOf((template, build)): PathOf<(String, String)>,
    JsonBody(request): JsonBody<TemplateBuildStartV2>,
) -> Result<StatusCode, ApiError> {
    let request = understood(request, &app.config.image.resolver.default_image)?;
    app.templates.start_build(&template, &build, request).await?;
    Ok(StatusCode::ACCEPTED)
}

/// What is to be built, where `default_image` is what builds begin with that name nothing.
fn understood(request: TemplateBuildStartV2, default_image: &str) -> Result<BuildRequest, ApiError> {
    let given = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
    let credentials = match request.from_image_registry {
        None => None,
        Some(ImageRegistry::Registry { username, password }) => Some(Credentials::Basic { username, password }),
        // Artifact Registry takes the key file itself as the password of this user.
        // https://docs.cloud.google.com/artifact-registry/docs/docker/authentication#json-key
        Some(ImageRegistry::Gcp { service_account_json }) => {
            if !serde_json::from_str::<serde_json::Value>(&service_account_json).is_ok_and(|key| key.is_object()) {
                let message =
                    "invalid field fromImageRegistry.serviceAccountJson: expected a key file, which is a JSON object";
                return Err(ApiError::bad_request(message));
            }
            Some(Credentials::Basic { username: "_json_key".to_owned(), password: service_account_json })
        }
        Some(ImageRegistry::Aws { .. }) => {
            return Err(ApiError::unsupported_field("fromImageRegistry.type"));
        }
    };
    let base = match (given(request.from_image), given(request.from_template)) {
        (Some(_), Some(_)) => {
            return Err(ApiError::bad_request("fields fromImage and fromTemplate exclude each other"));
        }
        (None, Some(template)) => Base::Template(template),
        (image, None) => {
            let image = image.unwrap_or_else(|| default_image.to_owned());
            let reference: ImageReference =
                image.parse().map_err(|error| ApiError::bad_request(format!("invalid field fromImage: {error}")))?;
            Base::Image(ImageRequest { image, reference, credentials })
        }
    };
    let step = |(at, step): (usize, aenv_api::TemplateStep)| {
        Step::new(&step.kind, &step.args, step.files_hash.as_deref(), step.force)
            .map_err(|problem| ApiError::bad_request(format!("invalid step {}: {problem}", at + 1)))
    };
    Ok(BuildRequest {
        base,
        steps: request.steps.into_iter().enumerate().map(step).collect::<Result<_, _>>()?,
        start: given(request.start_cmd),
        ready: given(request.ready_cmd),
        force: request.force,
    })
}

/// `GET /templates/{id}/builds/{build}/status`.
pub(super) async fn status(
    State(app): State<App>,
    PathOf(of): PathOf<(String, String)>,
    QueryOf(query): QueryOf<BuildStatusQuery>,
) -> Result<Json<BuildStatus>, ApiError> {
    let (record, view) = view(&app, &of, query).await?;
    let log_entries: Vec<_> = view.build.logs.iter().map(log_entry).collect();
    let reason = match &view.build.state {
        aenv_template::BuildState::Error { message, step } => {
            Some(BuildReason { message: message.clone(), step: Some(step.name()), log_entries: Vec::new() })
        }
        _ => None,
    };
    Ok(Json(BuildStatus {
        template_id: record.id,
        build_id: view.build.id,
        status: state_of(&view.build),
        logs: log_entries.iter().map(|entry| entry.message.clone()).collect(),
        log_entries,
        reason,
    }))
}

/// `GET /templates/{id}/builds/{build}/logs`: pages as the status does.
pub(super) async fn logs(
    State(app): State<App>,
    PathOf(of): PathOf<(String, String)>,
    QueryOf(query): QueryOf<BuildStatusQuery>,
) -> Result<Json<BuildLogs>, ApiError> {
    let (_, view) = view(&app, &of, query).await?;
    Ok(Json(BuildLogs { logs: view.build.logs.iter().map(log_entry).collect() }))
}

async fn view(
    app: &App,
    (template, build): &(String, String),
    query: BuildStatusQuery,
) -> Result<(TemplateRecord, BuildView), ApiError> {
    let level = query.level.map_or(aenv_template::LogLevel::Debug, from_api_level);
    let (offset, limit) = (query.logs_offset.unwrap_or(0), query.limit.unwrap_or(LOG_PAGE).min(LOG_PAGE));
    let record = app.templates.find(template).await?;
    let view = app.templates.build(template, build, offset, limit, level).await?;
    let missing = || ApiError::new(StatusCode::NOT_FOUND, format!("template {template} has no build {build}"));
    record.zip(view).ok_or_else(missing)
}

fn log_entry(entry: &LogEntry) -> BuildLogEntry {
    let level = match entry.level {
        aenv_template::LogLevel::Debug => LogLevel::Debug,
        aenv_template::LogLevel::Info => LogLevel::Info,
        aenv_template::LogLevel::Warn => LogLevel::Warn,
        aenv_template::LogLevel::Error => LogLevel::Error,
    };
    BuildLogEntry { timestamp: entry.timestamp, message: entry.message.clone(), level, step: Some(entry.stage.name()) }
}

fn from_api_level(level: LogLevel) -> aenv_template::LogLevel {
    match level {
        LogLevel::Debug => aenv_template::LogLevel::Debug,
        LogLevel::Info => aenv_template::LogLevel::Info,
        LogLevel::Warn => aenv_template::LogLevel::Warn,
        LogLevel::Error => aenv_template::LogLevel::Error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(json: serde_json::Value) -> Result<BuildRequest, String> {
        let request = serde_json::from_value(json).unwrap();
        understood(request, "base:1").map_err(|error| error.message().to_owned())
    }

    #[test]
    fn a_build_begins_with_one_thing_or_with_the_default() {
        let image = |json| match asked(json).unwrap().base {
            Base::Image(image) => image.image,
            Base::Template(template) => panic!("{template}"),
        };
        assert_eq!(image(serde_json::json!({})), "base:1");
        assert_eq!(image(serde_json::json!({"fromImage": "debian:12", "fromTemplate": ""})), "debian:12");
        let template = asked(serde_json::json!({"fromTemplate": "base:v1"})).unwrap().base;
        assert!(matches!(template, Base::Template(template) if template == "base:v1"));
        assert!(asked(serde_json::json!({"fromImage": "a", "fromTemplate": "b"})).unwrap_err().contains("exclude"));
    }

    #[test]
    fn a_key_file_of_google_is_a_password() {
        let with = |key: &str| {
            asked(serde_json::json!({
                "fromImage": "europe-docker.pkg.dev/p/r/i",
                "fromImageRegistry": {"type": "gcp", "serviceAccountJson": key},
            }))
        };
        let Base::Image(image) = with(r#"{"type": "service_account"}"#).unwrap().base else { panic!("no image") };
        assert!(matches!(image.credentials, Some(Credentials::Basic { username, .. }) if username == "_json_key"));
        assert!(with("key").unwrap_err().contains("serviceAccountJson"));
    }

    #[test]
    fn a_step_that_makes_no_sense_is_refused_by_its_number() {
        let steps = serde_json::json!([{"type": "RUN", "args": ["true"]}, {"type": "ENV", "args": ["A"]}]);
        let refusal = asked(serde_json::json!({"steps": steps})).unwrap_err();
        assert_eq!(refusal, "invalid step 2: ENV takes names and values");
    }
}
