//! Sandbox endpoints.

use std::collections::BTreeMap;
use std::time::Duration;

use aenv_api::{
    ConnectRequest, Cursor, ForkRequest, ForkResult, KeyScope, Lifecycle, ListFilter, ListQuery, ListedSandbox,
    NetworkConfig, NetworkUpdate, NewSandbox, OnTimeout, Order, PauseMode, PauseRequest, RefreshRequest, ResumeRequest,
    RollbackRequest, Sandbox, SandboxDetail, SandboxState, TimeoutRequest, paginate,
};
use aenv_image::ImageConfig;
use aenv_model::SandboxId;
use aenv_network::{Destination, EgressPolicy};
use aenv_orchestrator::{
    GuestDefaults, HowToPause, Image, OnExpiry, OperationStage, SandboxInfo, SandboxSpec, Source, StartTimes,
};
use aenv_template::ReadyImageFiles;
use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;

use super::body::{JsonBody, PathOf, QueryOf};
use super::error::ApiError;
use super::once::Once;
use super::{App, CAPTURED_AT_HEADER, CONSISTENCY_HEADER, SANDBOX_ID_HEADER, STALL_HEADER, page};
use crate::keys::Caller;

/// What `connect` gives a sandbox whose client names no time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(300);

/// Longest extension by `refreshes`, in seconds.
const REFRESH_LIMIT: u32 = 3600;

/// Most children of one fork.
const FORK_LIMIT: u32 = 100;

/// Environment of processes in an image that sets no `PATH`: what login shells of most distributions have.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// `POST /v2/sandboxes`: every sandbox is secured.
pub(super) async fn create_v2(
    State(app): State<App>,
    headers: HeaderMap,
    JsonBody(request): JsonBody<NewSandbox>,
) -> Result<Response, ApiError> {
    let (key, hash) = (app.once.key(&headers)?, Once::hash("create", &request));
    let work = {
        let app = app.clone();
        async move { create(&app, request, true).await }
    };
    app.once.run(key, hash, work).await
}

/// `POST /sandboxes`: secured on request.
pub(super) async fn create_v1(
    State(app): State<App>,
    JsonBody(request): JsonBody<NewSandbox>,
) -> Result<Response, ApiError> {
    let secure = request.secure.unwrap_or(false);
    create(&app, request, secure).await
}

async fn create(app: &App, request: NewSandbox, secure: bool) -> Result<Response, ApiError> {
    let wanted = wanted(app, request, secure).await?;
    Ok(created(app, app.orchestrator.create(wanted).await?))
}

/// The sandbox that a request asks for.
pub(super) async fn wanted(
    app: &App,
    request: NewSandbox,
    secure: bool,
) -> Result<aenv_orchestrator::NewSandbox, ApiError> {
    refuse_unsupported(&request)?;
    let network = request.network.clone().unwrap_or_default();
    let egress = egress("network.", &network, request.allow_internet_access)?;
    let on_expiry = on_expiry(request.auto_pause, request.auto_pause_memory, request.auto_resume)?;
    let resolved = Box::pin(app.templates.resolve(&request.template_id));
    let template = app.orchestrator.stages().time(OperationStage::LOAD_SNAPSHOT, resolved).await?;
    let spec = SandboxSpec {
        defaults: guest_defaults(&template.config, request.env_vars),
        template: template.id,
        alias: template.name,
        shape: template.shape,
        metadata: request.metadata,
        timeout: request.timeout.map(|secs| Duration::from_secs(secs.into())),
        secure,
        private_traffic: network.allow_public_traffic == Some(false),
        egress,
        on_expiry,
        auto_resume: request.auto_resume.is_some_and(|auto| auto.enabled),
        idle_timeout: idle_timeout(request.idle_timeout)?,
        lease: request.lease_id,
        internal: false,
    };
    let source = Source { capture: template.capture, image: template.image.map(image_of) };
    Ok(aenv_orchestrator::NewSandbox { spec, source })
}

/// How long nobody may use a sandbox.
fn idle_timeout(secs: Option<u32>) -> Result<Option<Duration>, ApiError> {
    match secs {
        Some(0) => Err(ApiError::bad_request("invalid field idleTimeout: 0, expected at least 1 second")),
        secs => Ok(secs.map(|secs| Duration::from_secs(secs.into()))),
    }
}

/// What the deadline is to do.
pub(super) fn on_expiry(
    auto_pause: Option<bool>,
    memory: Option<bool>,
    auto_resume: Option<aenv_api::AutoResume>,
) -> Result<OnExpiry, ApiError> {
    let resumes = auto_resume.is_some_and(|auto| auto.enabled);
    match (auto_pause.unwrap_or(false), memory.unwrap_or(true)) {
        (false, true) => Ok(OnExpiry::Delete),
        (false, false) => Err(ApiError::bad_request("field autoPauseMemory: false needs autoPause: true")),
        (true, true) => Ok(OnExpiry::Pause),
        (true, false) if resumes => {
            Err(ApiError::bad_request("field autoPauseMemory: false excludes autoResume: traffic resumes memory only"))
        }
        (true, false) => Ok(OnExpiry::PauseDisk),
    }
}

/// The image of a template, to boot.
pub(crate) fn image_of(files: ReadyImageFiles) -> Image {
    let keep: aenv_orchestrator::Keep = Box::new(files.lease);
    Image { rootfs: files.rootfs, disk_size: Some(files.disk_size), keep: std::sync::Arc::new(keep) }
}

/// The answer to a create.
pub(super) fn created(app: &App, info: SandboxInfo) -> Response {
    let id = info.id.to_string();
    let timing = server_timing(&info.start_times);
    (StatusCode::CREATED, [(SANDBOX_ID_HEADER, id)], timing, Json(answer(app, info))).into_response()
}

/// Where the time of a start went, as `Server-Timing` tells it to a client's developer tools (W3C Server Timing): in
/// milliseconds.
fn server_timing(times: &StartTimes) -> [(&'static str, String); 1] {
    let StartTimes { prepare, machine, guest } = times;
    let parts = [("prepare", prepare), ("machine", machine), ("guest", guest)];
    let parts = parts.map(|(name, took)| format!("{name};dur={:.1}", took.as_secs_f64() * 1e3));
    [("server-timing", parts.join(", "))]
}

/// Fields that the API has and this version has not. What asks for nothing beyond what happens anyway is let through.
fn refuse_unsupported(request: &NewSandbox) -> Result<(), ApiError> {
    let checks = [
        ("mcp", request.mcp.as_ref().is_some_and(|mcp| !mcp.is_null())),
        ("iam", request.iam.as_ref().is_some_and(|iam| !iam.is_null())),
        ("volumeMounts", !request.volume_mounts.is_empty()),
        ("customExtensionParams", !request.custom_extension_params.is_empty()),
    ];
    match checks.iter().find(|(_, used)| *used) {
        Some((field, _)) => Err(ApiError::unsupported_field(field)),
        None => Ok(()),
    }
}

/// What a sandbox may reach, of a `network` and `allow_internet_access`. Refuses what this version has not; `prefix` is what its
/// fields are under.
pub(super) fn egress(prefix: &str, network: &NetworkConfig, internet: Option<bool>) -> Result<EgressPolicy, ApiError> {
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
    let checks = [
        ("dnsServers", dns_servers.as_ref().is_some_and(|list| !list.is_empty())),
        ("egressProxy", egress_proxy.is_some()),
        ("maskRequestHost", mask_request_host.is_some()),
        ("httpsPorts", https_ports.as_ref().is_some_and(|ports| !ports.is_empty())),
        ("rules", rules.as_ref().is_some_and(|rules| !rules.is_empty())),
    ];
    if let Some((field, _)) = checks.iter().find(|(_, used)| *used) {
        return Err(ApiError::unsupported_field(&format!("{prefix}{field}")));
    }
    let list = |list: &Option<Vec<String>>| list.clone().unwrap_or_default();
    EgressPolicy::new(&list(allow_out), &list(deny_out), internet)
        .map_err(|error| ApiError::bad_request(format!("invalid field {prefix}{error}")))
}

/// `PUT /sandboxes/{id}/network`: what it may reach from now on. Connections that it has go on.
pub(super) async fn set_network(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<NetworkUpdate>,
) -> Result<StatusCode, ApiError> {
    let id = visible(&app, &id)?;
    let NetworkUpdate { allow_out, deny_out, allow_internet_access, dns_servers, egress_proxy, rules } = request;
    let network = NetworkConfig { allow_out, deny_out, dns_servers, egress_proxy, rules, ..NetworkConfig::default() };
    let policy = egress("", &network, allow_internet_access)?;
    app.orchestrator.set_network(id, policy).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `network` of a sandbox's detail; nothing if nobody asked for anything.
fn network_of(info: &SandboxInfo) -> Option<NetworkConfig> {
    let private = info.traffic_token.is_some();
    let list =
        |list: &[Destination]| (!list.is_empty()).then(|| list.iter().map(ToString::to_string).collect::<Vec<_>>());
    let EgressPolicy { allow_out, deny_out, internet: _ } = &*info.egress;
    let network = NetworkConfig {
        allow_public_traffic: private.then_some(false),
        allow_out: list(allow_out),
        deny_out: list(deny_out),
        ..NetworkConfig::default()
    };
    (network != NetworkConfig::default()).then_some(network)
}

/// The image's settings with the creator's environment on top.
pub(crate) fn guest_defaults(config: &ImageConfig, env_vars: BTreeMap<String, String>) -> GuestDefaults {
    let mut env = BTreeMap::from([("PATH".to_owned(), DEFAULT_PATH.to_owned())]);
    env.extend(config.env.iter().filter_map(|pair| pair.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())));
    env.extend(env_vars);
    GuestDefaults { env, user: config.user.clone(), workdir: config.working_dir.clone() }
}

/// `GET /v2/sandboxes`.
pub(super) async fn list_v2(State(app): State<App>, QueryOf(query): QueryOf<ListQuery>) -> Result<Response, ApiError> {
    let filter = query.parse().map_err(|error| ApiError::bad_request(error.to_string()))?;
    let items = filtered(&app, &filter).await?;
    let (items, next) = paginate(items, filter.order, filter.cursor.as_ref(), filter.limit, position);
    Ok(page(items, next))
}

/// `GET /sandboxes`: running ones, not paged.
pub(super) async fn list_v1(State(app): State<App>, QueryOf(query): QueryOf<ListQuery>) -> Result<Response, ApiError> {
    let query = ListQuery { metadata: query.metadata, ..ListQuery::default() };
    let filter = query.parse().map_err(|error| ApiError::bad_request(error.to_string()))?;
    let filter = ListFilter { states: Some(vec![SandboxState::Running]), ..filter };
    let (items, _) = paginate(filtered(&app, &filter).await?, Order::Desc, None, None, position);
    Ok(page(items, None))
}

async fn filtered(app: &App, filter: &ListFilter) -> Result<Vec<ListedSandbox>, ApiError> {
    let template = filter.template.as_deref();
    // A filter by a name means the template of that name, also for sandboxes made before it was renamed or rebuilt.
    let template_id = match template {
        Some(reference) => match app.templates.find(reference).await? {
            Some(record) => Some(record.id),
            // Sandboxes may come from a snapshot, and outlive what they come from.
            None => app.templates.snapshot(reference).await?.map_or_else(|| reference.parse().ok(), |of| Some(of.id)),
        },
        None => None,
    };
    let listed = (app.orchestrator.list())
        .into_iter()
        .filter(|info| filter.states.as_ref().is_none_or(|states| states.contains(&state(info))))
        .filter(|info| filter.metadata.iter().all(|(key, value)| info.metadata.get(key) == Some(value)))
        .filter(|info| filter.started_after.is_none_or(|after| info.started_at >= after))
        .filter(|info| template.is_none() || Some(info.template) == template_id)
        .map(|info| listed(app, info));
    Ok(listed.collect())
}

fn position(item: &ListedSandbox) -> Cursor {
    Cursor { time: item.started_at, id: item.sandbox_id.to_string() }
}

/// `GET /sandboxes/{id}`.
pub(super) async fn detail(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    PathOf(id): PathOf<String>,
) -> Result<Json<SandboxDetail>, ApiError> {
    let info = app.orchestrator.get(parse_id(&id)?)?;
    Ok(Json(SandboxDetail {
        // Who may look only is not given what opens the sandbox.
        envd_access_token: info.access_token.clone().filter(|_| caller.scope == KeyScope::Admin),
        allow_internet_access: info.egress.internet,
        domain: domain(&app),
        network: network_of(&info),
        lifecycle: Some(Lifecycle {
            auto_resume: info.auto_resume,
            on_timeout: match info.on_expiry {
                OnExpiry::Delete => OnTimeout::Kill,
                OnExpiry::Pause | OnExpiry::PauseDisk => OnTimeout::Pause,
            },
        }),
        pause_mode: match (info.phase.is_paused(), info.disk_only) {
            (false, _) => None,
            (true, false) => Some(PauseMode::Full),
            (true, true) => Some(PauseMode::Filesystem),
        },
        listed: listed(&app, info),
    }))
}

/// `DELETE /sandboxes/{id}`.
pub(super) async fn kill(State(app): State<App>, PathOf(id): PathOf<String>) -> Result<StatusCode, ApiError> {
    app.orchestrator.delete(visible(&app, &id)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/timeout`: may shorten.
pub(super) async fn timeout(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<TimeoutRequest>,
) -> Result<StatusCode, ApiError> {
    let life = Duration::from_secs(request.timeout.into());
    app.orchestrator.set_timeout(visible(&app, &id)?, life).await?;
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
    app.orchestrator.extend(visible(&app, &id)?, life).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /v2/sandboxes/{id}/connect`.
pub(super) async fn connect_v2(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<ConnectRequest>,
) -> Result<Response, ApiError> {
    let life = request.timeout.map_or(CONNECT_TIMEOUT, |secs| Duration::from_secs(secs.into()));
    connect(&app, &id, life, request.memory).await
}

/// `POST /sandboxes/{id}/connect`: the time is required.
pub(super) async fn connect_v1(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<ConnectRequest>,
) -> Result<Response, ApiError> {
    let Some(secs) = request.timeout else {
        return Err(ApiError::bad_request("missing field timeout: seconds to live from now"));
    };
    connect(&app, &id, Duration::from_secs(secs.into()), request.memory).await
}

async fn connect(app: &App, id: &str, life: Duration, memory: Option<bool>) -> Result<Response, ApiError> {
    let id = visible(app, id)?;
    let resumed = app.orchestrator.connect(id, life, memory == Some(false)).await?;
    let info = app.orchestrator.get(id)?;
    let timing = server_timing(&info.start_times);
    Ok(match resumed {
        true => (StatusCode::CREATED, timing, Json(answer(app, info))).into_response(),
        false => (StatusCode::OK, Json(answer(app, info))).into_response(),
    })
}

/// `POST /sandboxes/{id}/pause`.
pub(super) async fn pause(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<PauseRequest>,
) -> Result<StatusCode, ApiError> {
    let id = visible(&app, &id)?;
    let how = HowToPause {
        disk_only: request.memory == Some(false),
        if_responsive: request.require_healthy_guest == Some(true),
    };
    match app.orchestrator.pause(id, how).await? {
        true => Ok(StatusCode::NO_CONTENT),
        // SDKs tell their callers by this status that they changed nothing.
        false => Err(ApiError::new(StatusCode::CONFLICT, format!("sandbox {id} is paused already"))),
    }
}

/// `POST /sandboxes/{id}/resume`: deprecated, and still in use.
pub(super) async fn resume(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<ResumeRequest>,
) -> Result<Response, ApiError> {
    let id = visible(&app, &id)?;
    let default = app.config.orchestrator.default_timeout;
    let life = request.timeout.map_or(default, |secs| Duration::from_secs(secs.into()));
    match request.memory {
        Some(false) => app.orchestrator.connect(id, life, true).await?,
        _ => app.orchestrator.resume(id, life).await?,
    };
    Ok(created(&app, app.orchestrator.get(id)?))
}

/// `POST /sandboxes/{id}/rollback`: back to one of its own snapshots, in place.
pub(super) async fn roll_back(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<RollbackRequest>,
) -> Result<Response, ApiError> {
    let id = visible(&app, &id)?;
    let reference = &request.snapshot_id;
    let missing = || ApiError::new(StatusCode::NOT_FOUND, format!("snapshot '{reference}' not found"));
    let snapshot = app.templates.snapshot(reference).await?.ok_or_else(missing)?;
    if snapshot.sandbox != id {
        let of = snapshot.sandbox;
        let message =
            format!("invalid field snapshotID: {reference} is a snapshot of sandbox {of}, expected one of {id}");
        return Err(ApiError::bad_request(message));
    }
    let capture = app.templates.resolve(&snapshot.id.to_string()).await?.capture.ok_or_else(missing)?;
    let info = app.orchestrator.roll_back(id, capture).await?;
    Ok((StatusCode::OK, server_timing(&info.start_times), Json(answer(&app, info))).into_response())
}

/// `POST /sandboxes/{id}/fork`.
pub(super) async fn fork(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    JsonBody(request): JsonBody<ForkRequest>,
) -> Result<Response, ApiError> {
    let id = visible(&app, &id)?;
    let count = request.count.unwrap_or(1);
    if !(1..=FORK_LIMIT).contains(&count) {
        return Err(ApiError::bad_request(format!("invalid field count: {count}, expected 1 to {FORK_LIMIT}")));
    }
    let life = request.timeout.map(|secs| Duration::from_secs(secs.into()));
    let forked = app.orchestrator.fork(id, count as usize, life).await?;
    let results = forked.children.into_iter().map(|child| match child {
        Ok(info) => ForkResult { sandbox: Some(answer(&app, info)), error: None },
        Err(error) => ForkResult { sandbox: None, error: Some(ApiError::from(error).into_body()) },
    });
    let results: Vec<_> = results.collect();
    // A fork always has memory.
    let copied = copied(forked.stall, forked.captured_at, PauseMode::Full);
    Ok((StatusCode::CREATED, copied, Json(results)).into_response())
}

/// What copies of a sandbox say of themselves: how long its machine stood still, in milliseconds; the instant of which they
/// are; and what of it they hold.
pub(super) fn copied(stall: Duration, captured_at: Timestamp, holds: PauseMode) -> [(HeaderName, String); 3] {
    [
        (STALL_HEADER, format!("{:.1}", stall.as_secs_f64() * 1000.0)),
        (CAPTURED_AT_HEADER, captured_at.to_string()),
        (CONSISTENCY_HEADER, holds.name().to_owned()),
    ]
}

/// The id of a sandbox that users may see.
pub(super) fn visible(app: &App, text: &str) -> Result<SandboxId, ApiError> {
    Ok(app.orchestrator.get(parse_id(text)?)?.id)
}

/// Whatever is no id of ours names no sandbox: SDKs count on 404 for any text.
pub(super) fn parse_id(text: &str) -> Result<SandboxId, ApiError> {
    text.parse().map_err(|_| ApiError::new(StatusCode::NOT_FOUND, format!("sandbox {text} not found")))
}

/// A sandbox that stands still to be copied runs on: its users need not know.
fn state(info: &SandboxInfo) -> SandboxState {
    if info.phase.is_paused() { SandboxState::Paused } else { SandboxState::Running }
}

fn domain(app: &App) -> Option<String> {
    app.config.sandbox_proxy.domains.first().cloned()
}

pub(super) fn answer(app: &App, info: SandboxInfo) -> Sandbox {
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
    let unresponsive = info.unresponsive;
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
        state: state(&info),
        envd_version: app.config.envd.version.clone(),
        alias: info.alias,
        metadata: info.metadata,
        volume_mounts: Vec::new(),
        envd_unresponsive_at_pause: unresponsive.then_some(true),
    }
}
