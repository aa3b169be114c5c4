//! Sandbox endpoints.

use std::collections::BTreeMap;
use std::time::Duration;

use aenv_api::{
    ConnectRequest, Cursor, Lifecycle, ListFilter, ListQuery, ListedSandbox, NetworkConfig, NewColdSandbox, NewSandbox,
    OnTimeout, Order, RefreshRequest, Sandbox, SandboxDetail, SandboxState, TimeoutRequest, paginate,
};
use aenv_model::SandboxId;
use aenv_orchestrator::{GuestDefaults, SandboxInfo};
use aenv_template::ReadyTemplate;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;

use super::body::{JsonBody, PathOf, QueryOf};
use super::error::ApiError;
use super::{App, SANDBOX_ID_HEADER, page};

/// What `connect` gives a sandbox whose client names no time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(300);

/// Longest extension by `refreshes`, in seconds.
const REFRESH_LIMIT: u32 = 3600;

/// Environment of processes in an image that sets no `PATH`: what login shells of most distributions have.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// `POST /v2/sandboxes`: every sandbox is secured.
pub(super) async fn create_v2(
    State(app): State<App>,
    headers: HeaderMap,
    JsonBody(request): JsonBody<NewSandbox>,
) -> Result<Response, ApiError> {
    if headers.contains_key("idempotency-key") {
        // To ignore it would make two sandboxes where its sender counts on one.
        return Err(ApiError::bad_request("header 'Idempotency-Key' is not supported by this version"));
    }
    create(&app, request, true).await
}

/// `POST /sandboxes`: secured on request.
pub(super) async fn create_v1(
    State(app): State<App>,
    JsonBody(request): JsonBody<NewSandbox>,
) -> Result<Response, ApiError> {
    let secure = request.secure.unwrap_or(false);
    create(&app, request, secure).await
}

/// `POST /sandboxes-cold`: known, not here yet.
pub(super) async fn create_cold(JsonBody(_): JsonBody<NewColdSandbox>) -> ApiError {
    let message = "sandboxes from an image without a template are not supported by this version; \
                   make a template of the image first (aenv pull IMAGE)";
    ApiError::bad_request(message)
}

async fn create(app: &App, request: NewSandbox, secure: bool) -> Result<Response, ApiError> {
    refuse_unsupported(&request)?;
    let template = app.templates.resolve(&request.template_id)?;
    let network = request.network.unwrap_or_default();
    let sandbox = aenv_orchestrator::NewSandbox {
        defaults: guest_defaults(&template, request.env_vars),
        template: template.id,
        alias: Some(template.name),
        rootfs: template.rootfs,
        disk_size: Some(template.disk_size),
        shape: template.shape,
        metadata: request.metadata,
        timeout: request.timeout.map(|secs| Duration::from_secs(secs.into())),
        secure,
        private_traffic: network.allow_public_traffic == Some(false),
    };
    let info = app.orchestrator.create(sandbox, Box::new(template.lease)).await?;
    let id = info.id.to_string();
    let answer = Json(answer(app, info));
    Ok((StatusCode::CREATED, [(SANDBOX_ID_HEADER, id)], answer).into_response())
}

/// Fields that the API has and this version has not. What asks for nothing beyond what happens anyway is let through.
fn refuse_unsupported(request: &NewSandbox) -> Result<(), ApiError> {
    let network = request.network.clone().unwrap_or_default();
    let NetworkConfig {
        allow_public_traffic: _,
        allow_out,
        deny_out,
        dns_servers,
        egress_proxy,
        mask_request_host,
        https_ports,
        rules,
    } = network;
    let listed = |list: &Option<Vec<String>>| list.as_ref().is_some_and(|list| !list.is_empty());
    let checks = [
        ("autoPause", request.auto_pause == Some(true)),
        ("autoResume", request.auto_resume.is_some_and(|auto| auto.enabled)),
        ("mcp", request.mcp.as_ref().is_some_and(|mcp| !mcp.is_null())),
        ("iam", request.iam.as_ref().is_some_and(|iam| !iam.is_null())),
        ("volumeMounts", !request.volume_mounts.is_empty()),
        ("customExtensionParams", !request.custom_extension_params.is_empty()),
        ("network.allowOut", listed(&allow_out)),
        ("network.denyOut", listed(&deny_out)),
        ("network.dnsServers", listed(&dns_servers)),
        ("network.egressProxy", egress_proxy.is_some()),
        ("network.maskRequestHost", mask_request_host.is_some()),
        ("network.httpsPorts", https_ports.is_some_and(|ports| !ports.is_empty())),
        ("network.rules", rules.is_some_and(|rules| !rules.is_empty())),
    ];
    match checks.iter().find(|(_, used)| *used) {
        Some((field, _)) => Err(ApiError::unsupported_field(field)),
        None => Ok(()),
    }
}

/// The image's settings with the creator's environment on top.
fn guest_defaults(template: &ReadyTemplate, env_vars: BTreeMap<String, String>) -> GuestDefaults {
    let config = &template.config;
    let mut env = BTreeMap::from([("PATH".to_owned(), DEFAULT_PATH.to_owned())]);
    env.extend(config.env.iter().filter_map(|pair| pair.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())));
    env.extend(env_vars);
    GuestDefaults { env, user: config.user.clone(), workdir: config.working_dir.clone() }
}

/// `GET /v2/sandboxes`.
pub(super) async fn list_v2(State(app): State<App>, QueryOf(query): QueryOf<ListQuery>) -> Result<Response, ApiError> {
    let filter = query.parse().map_err(|error| ApiError::bad_request(error.to_string()))?;
    let items = filtered(&app, &filter);
    let (items, next) = paginate(items, filter.order, filter.cursor.as_ref(), filter.limit, position);
    Ok(page(items, next))
}

/// `GET /sandboxes`: running ones, not paged.
pub(super) async fn list_v1(State(app): State<App>, QueryOf(query): QueryOf<ListQuery>) -> Result<Response, ApiError> {
    let query = ListQuery { metadata: query.metadata, ..ListQuery::default() };
    let filter = query.parse().map_err(|error| ApiError::bad_request(error.to_string()))?;
    let (items, _) = paginate(filtered(&app, &filter), Order::Desc, None, None, position);
    Ok(page(items, None))
}

fn filtered(app: &App, filter: &ListFilter) -> Vec<ListedSandbox> {
    if filter.states.as_ref().is_some_and(|states| !states.contains(&SandboxState::Running)) {
        return Vec::new();
    }
    let template = filter.template.as_deref();
    // A filter by a name means the template of that name, also for sandboxes made before it was renamed or rebuilt.
    let template_id = template.and_then(|reference| app.templates.find(reference)).map(|record| record.id);
    app.orchestrator
        .list()
        .into_iter()
        .filter(|info| filter.metadata.iter().all(|(key, value)| info.metadata.get(key) == Some(value)))
        .filter(|info| filter.started_after.is_none_or(|after| info.started_at >= after))
        .filter(|info| template.is_none() || Some(info.template) == template_id)
        .map(|info| listed(app, info))
        .collect()
}

fn position(item: &ListedSandbox) -> Cursor {
    Cursor { time: item.started_at, id: item.sandbox_id.to_string() }
}

/// `GET /sandboxes/{id}`.
pub(super) async fn detail(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
) -> Result<Json<SandboxDetail>, ApiError> {
    let info = app.orchestrator.get(parse_id(&id)?)?;
    let private = info.traffic_token.is_some();
    Ok(Json(SandboxDetail {
        envd_access_token: info.access_token.clone(),
        allow_internet_access: None,
        domain: domain(&app),
        network: private.then(|| NetworkConfig { allow_public_traffic: Some(false), ..NetworkConfig::default() }),
        lifecycle: Some(Lifecycle { auto_resume: false, on_timeout: OnTimeout::Kill }),
        listed: listed(&app, info),
    }))
}

/// `DELETE /sandboxes/{id}`.
pub(super) async fn kill(State(app): State<App>, PathOf(id): PathOf<String>) -> Result<StatusCode, ApiError> {
    app.orchestrator.delete(parse_id(&id)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/timeout`: may shorten.
pub(super) async fn timeout(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<TimeoutRequest>,
) -> Result<StatusCode, ApiError> {
    let life = Duration::from_secs(request.timeout.into());
    app.orchestrator.set_timeout(parse_id(&id)?, life).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/refreshes`: extends only.
pub(super) async fn refresh(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<RefreshRequest>,
) -> Result<StatusCode, ApiError> {
    let life = match request.duration {
        Some(secs) if secs > REFRESH_LIMIT => {
            return Err(ApiError::bad_request(format!(
                "invalid field duration: {secs}, expected 0 to {REFRESH_LIMIT}"
            )));
        }
        Some(secs) => Duration::from_secs(secs.into()),
        None => app.config.orchestrator.default_timeout,
    };
    app.orchestrator.extend(parse_id(&id)?, life).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /v2/sandboxes/{id}/connect`.
pub(super) async fn connect_v2(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<ConnectRequest>,
) -> Result<Json<Sandbox>, ApiError> {
    connect(&app, &id, request.timeout.map_or(CONNECT_TIMEOUT, |secs| Duration::from_secs(secs.into()))).await
}

/// `POST /sandboxes/{id}/connect`: the time is required.
pub(super) async fn connect_v1(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<ConnectRequest>,
) -> Result<Json<Sandbox>, ApiError> {
    let Some(secs) = request.timeout else {
        return Err(ApiError::bad_request("missing field timeout: seconds to live from now"));
    };
    connect(&app, &id, Duration::from_secs(secs.into())).await
}

async fn connect(app: &App, id: &str, life: Duration) -> Result<Json<Sandbox>, ApiError> {
    let id = parse_id(id)?;
    app.orchestrator.extend(id, life).await?;
    Ok(Json(answer(app, app.orchestrator.get(id)?)))
}

/// Whatever is no id of ours names no sandbox: SDKs count on 404 for any text.
fn parse_id(text: &str) -> Result<SandboxId, ApiError> {
    text.parse().map_err(|_| ApiError::new(StatusCode::NOT_FOUND, format!("sandbox {text} not found")))
}

fn domain(app: &App) -> Option<String> {
    app.config.sandbox_proxy.domains.first().cloned()
}

fn answer(app: &App, info: SandboxInfo) -> Sandbox {
    Sandbox {
        template_id: info.template,
        sandbox_id: info.id,
        client_id: String::new(),
        envd_version: app.config.envd.version.clone(),
        alias: info.alias,
        envd_access_token: info.access_token,
        traffic_access_token: info.traffic_token,
        domain: domain(app),
    }
}

fn listed(app: &App, info: SandboxInfo) -> ListedSandbox {
    // A life without end is told as a far but printable one.
    let far = Timestamp::from_second(Timestamp::now().as_second() + 100 * 365 * 86_400).unwrap_or(Timestamp::MAX);
    ListedSandbox {
        template_id: info.template,
        sandbox_id: info.id,
        client_id: String::new(),
        started_at: info.started_at,
        end_at: info.end_at.min(far),
        cpu_count: info.shape.vcpus,
        memory_mb: info.shape.memory.to_mib_ceil(),
        disk_size_mb: info.disk_size.to_mib_ceil(),
        state: SandboxState::Running,
        envd_version: app.config.envd.version.clone(),
        alias: info.alias,
        metadata: info.metadata,
        volume_mounts: Vec::new(),
        envd_unresponsive_at_pause: None,
    }
}
