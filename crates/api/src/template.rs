//! Templates and their builds.

use aenv_model::{BuildId, TemplateId};
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::null_as_default;

/// Body of `POST /v3/templates`: announces a template whose build is started by a second call.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateCreateV3 {
    /// `name` or `name:tag`, at most 128 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Tags for the build.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Virtual CPUs of its sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_count: Option<u32>,
    /// Memory of its sandboxes in MiB.
    #[serde(default, rename = "memoryMB", skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u32>,
    /// Disk space in MiB that its sandboxes find free at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_free_disk_mb: Option<u32>,
    /// Older name of `name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Ignored; sent by older clients.
    #[serde(default, rename = "teamID", skip_serializing_if = "Option::is_none")]
    pub team_id: Option<String>,
}

/// Answer to `POST /v3/templates`; every key is required.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TemplateCreated {
    /// The template.
    #[serde(rename = "templateID")]
    #[schemars(with = "String")]
    pub template_id: TemplateId,
    /// The build to be started.
    #[serde(rename = "buildID")]
    #[schemars(with = "String")]
    pub build_id: BuildId,
    /// Whether others may use it.
    pub public: bool,
    /// Its names, namespace included if it has one.
    pub names: Vec<String>,
    /// Tags of the build.
    pub tags: Vec<String>,
    /// Its names without namespace.
    pub aliases: Vec<String>,
}

/// Body of `POST /v2/templates/{id}/builds/{build}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateBuildStartV2 {
    /// OCI image to start from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_image: Option<String>,
    /// Template to start from; not together with `from_image`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_template: Option<String>,
    /// Credentials for the image's registry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_image_registry: Option<ImageRegistry>,
    /// Build every step again, whatever a cache holds.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// What to do on top of the base, in order.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<TemplateStep>,
    /// Command that runs in every sandbox from the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_cmd: Option<String>,
    /// Command that succeeds when `start_cmd` is up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_cmd: Option<String>,
}

/// Credentials for an image's registry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum ImageRegistry {
    /// Basic credentials, or what a token server exchanges for a bearer token.
    Registry {
        /// User name.
        username: String,
        /// Password or token.
        password: String,
    },
    /// AWS ECR.
    #[serde(rename_all = "camelCase")]
    Aws {
        /// Key id.
        aws_access_key_id: String,
        /// Secret.
        aws_secret_access_key: String,
        /// Region of the registry.
        aws_region: String,
    },
    /// Google Artifact Registry.
    #[serde(rename_all = "camelCase")]
    Gcp {
        /// A service account's key file.
        service_account_json: String,
    },
}

/// One step of a build.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateStep {
    /// `RUN`, `COPY`, `ENV`, …: open, so that the server can refuse an unknown one by name.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its arguments; their meaning depends on the kind.
    #[serde(default, deserialize_with = "null_as_default")]
    pub args: Vec<String>,
    /// Do it again, whatever a cache holds.
    #[serde(default, deserialize_with = "null_as_default")]
    pub force: bool,
    /// Hash of the files that a `COPY` takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files_hash: Option<String>,
    /// Upload them even if they are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force_upload: Option<bool>,
}

/// Where a build stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BuildState {
    /// Announced, not started.
    Waiting,
    /// At work.
    Building,
    /// Its template can be used.
    Ready,
    /// It failed; the reason says why.
    Error,
}

impl BuildState {
    /// Whether nothing will change any more.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Ready | Self::Error)
    }

    /// Its name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Building => "building",
            Self::Ready => "ready",
            Self::Error => "error",
        }
    }
}

/// How much a log entry matters, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// For whoever works on the build itself.
    Debug,
    /// Ordinary progress.
    Info,
    /// Went on anyway.
    Warn,
    /// Ended the build.
    Error,
}

impl LogLevel {
    /// Its name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

/// One line of a build's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BuildLogEntry {
    /// When it was written.
    pub timestamp: Timestamp,
    /// The line.
    pub message: String,
    /// How much it matters.
    pub level: LogLevel,
    /// The step that wrote it: `base`, `finalize`, or a number from 1 as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

/// Why a build failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildReason {
    /// What happened.
    pub message: String,
    /// The step that failed: `base`, `finalize`, or a number from 1 as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// The lines that tell more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log_entries: Vec<BuildLogEntry>,
}

/// Query of `GET /templates/{id}/builds/{build}/status`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildStatusQuery {
    /// Log entries that the caller has already. Clients count on an empty list once there are no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logs_offset: Option<usize>,
    /// Log entries to give at most, up to 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Least level to give; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<LogLevel>,
}

/// Answer to `GET /templates/{id}/builds/{build}/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildStatus {
    /// The template.
    #[serde(rename = "templateID")]
    #[schemars(with = "String")]
    pub template_id: TemplateId,
    /// The build.
    #[serde(rename = "buildID")]
    #[schemars(with = "String")]
    pub build_id: BuildId,
    /// Where it stands.
    pub status: BuildState,
    /// The messages of `log_entries` alone.
    pub logs: Vec<String>,
    /// Log entries from the offset asked for.
    pub log_entries: Vec<BuildLogEntry>,
    /// Why it failed, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<BuildReason>,
}

/// One entry of a template list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// The template.
    #[serde(rename = "templateID")]
    #[schemars(with = "String")]
    pub template_id: TemplateId,
    /// Its newest build.
    #[serde(rename = "buildID")]
    #[schemars(with = "String")]
    pub build_id: BuildId,
    /// Virtual CPUs of its sandboxes.
    pub cpu_count: u32,
    /// Memory of its sandboxes in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// Root disk of its sandboxes in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Whether others may use it.
    pub public: bool,
    /// Its names without namespace.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Its names.
    #[serde(default)]
    pub names: Vec<String>,
    /// When it was announced.
    pub created_at: Timestamp,
    /// When its newest build changed.
    pub updated_at: Timestamp,
    /// Who made it; `null` where nobody is told apart.
    #[serde(default)]
    pub created_by: Option<Value>,
    /// When a sandbox last came from it; `null`: never.
    #[serde(default)]
    pub last_spawned_at: Option<Timestamp>,
    /// Sandboxes made from it so far.
    #[serde(default)]
    pub spawn_count: u64,
    /// Builds so far.
    #[serde(default)]
    pub build_count: u64,
    /// Release of the guest agent in it.
    #[serde(default)]
    pub envd_version: String,
    /// Where its newest build stands.
    pub build_status: BuildState,
}

/// Answer to `GET /templates/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateWithBuilds {
    /// The template.
    #[serde(rename = "templateID")]
    #[schemars(with = "String")]
    pub template_id: TemplateId,
    /// Whether others may use it.
    pub public: bool,
    /// Its names without namespace.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Its names.
    #[serde(default)]
    pub names: Vec<String>,
    /// When it was announced.
    pub created_at: Timestamp,
    /// When its newest build changed.
    pub updated_at: Timestamp,
    /// When a sandbox last came from it; `null`: never.
    #[serde(default)]
    pub last_spawned_at: Option<Timestamp>,
    /// Sandboxes made from it so far.
    #[serde(default)]
    pub spawn_count: u64,
    /// Its builds, newest first.
    pub builds: Vec<TemplateBuild>,
}

/// A build as `GET /templates/{id}` tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateBuild {
    /// The build.
    #[serde(rename = "buildID")]
    #[schemars(with = "String")]
    pub build_id: BuildId,
    /// Where it stands.
    pub status: BuildState,
    /// When it was announced.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Timestamp>,
    /// Virtual CPUs of its sandboxes.
    pub cpu_count: u32,
    /// Memory of its sandboxes in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// Root disk of its sandboxes in MiB.
    #[serde(default, rename = "diskSizeMB", skip_serializing_if = "Option::is_none")]
    pub disk_size_mb: Option<u64>,
    /// Release of the guest agent in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_version: Option<String>,
}

/// Answer to `GET /templates/{id}/builds/{build}/logs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BuildLogs {
    /// The entries.
    pub logs: Vec<BuildLogEntry>,
}

/// Answer to `GET /templates/{id}/files/{hash}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FilesLink {
    /// They are there already.
    pub present: bool,
    /// Where they can be put, as an archive, with no other leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// Body of `PATCH /v2/templates/{id}`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TemplateUpdate {
    /// Whether others may use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public: Option<bool>,
}

/// Answer to `PATCH /v2/templates/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TemplateNames {
    /// The template's names.
    pub names: Vec<String>,
}

/// Body of `POST /templates/tags`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AssignTags {
    /// `name` or `name:tag`: the build that they are to stand for.
    pub target: String,
    /// Tags without a name.
    pub tags: Vec<String>,
}

/// Answer to `POST /templates/tags`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AssignedTags {
    /// The tags.
    pub tags: Vec<String>,
    /// What they stand for now.
    #[serde(rename = "buildID")]
    #[schemars(with = "String")]
    pub build_id: BuildId,
}

/// Body of `DELETE /templates/tags`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RemoveTags {
    /// The template.
    pub name: String,
    /// Tags without a name.
    pub tags: Vec<String>,
}

/// An entry of `GET /templates/{id}/tags`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateTag {
    /// The tag.
    pub tag: String,
    /// What it stands for.
    #[serde(rename = "buildID")]
    #[schemars(with = "String")]
    pub build_id: BuildId,
    /// Since when.
    pub created_at: Timestamp,
}

/// Answer to `GET /templates/aliases/{alias}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AliasAnswer {
    /// The template of that name.
    #[serde(rename = "templateID")]
    #[schemars(with = "String")]
    pub template_id: TemplateId,
    /// Whether others may use it.
    pub public: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_build_as_the_sdk_starts_it_is_understood() {
        let start: TemplateBuildStartV2 = serde_json::from_value(json!({
            "fromImage": "debian:12", "force": false, "startCmd": null,
            "fromImageRegistry": {"type": "aws", "awsAccessKeyId": "i", "awsSecretAccessKey": "s", "awsRegion": "r"},
            "steps": [{"type": "RUN", "args": ["true"], "force": false, "forceUpload": null, "later": 1}],
        }))
        .unwrap();
        assert_eq!(start.from_image.as_deref(), Some("debian:12"));
        assert_eq!((start.steps[0].kind.as_str(), start.steps[0].args.len()), ("RUN", 1));
        assert!(matches!(start.from_image_registry, Some(ImageRegistry::Aws { .. })));
    }

    #[test]
    fn what_is_not_set_is_not_sent() {
        let start = TemplateBuildStartV2 { from_image: Some("x".into()), ..Default::default() };
        assert_eq!(serde_json::to_value(start).unwrap(), json!({"fromImage": "x"}));
    }

    #[test]
    fn a_status_always_carries_its_lists() {
        let id = TemplateId::new();
        let status = BuildStatus {
            template_id: id,
            build_id: id.into(),
            status: BuildState::Building,
            logs: vec![],
            log_entries: vec![],
            reason: None,
        };
        let value = serde_json::to_value(&status).unwrap();
        let text = id.to_string();
        let expected = json!({"templateID": text, "buildID": text, "status": "building", "logs": [], "logEntries": []});
        assert_eq!(value, expected);
    }

    #[test]
    fn a_template_writes_null_for_what_it_does_not_know() {
        let id = TemplateId::new();
        let template = Template {
            template_id: id,
            build_id: id.into(),
            cpu_count: 1,
            memory_mb: 512,
            disk_size_mb: 1024,
            public: false,
            aliases: vec!["base".into()],
            names: vec!["base".into()],
            created_at: Timestamp::UNIX_EPOCH,
            updated_at: Timestamp::UNIX_EPOCH,
            created_by: None,
            last_spawned_at: None,
            spawn_count: 0,
            build_count: 1,
            envd_version: "0.6.13".into(),
            build_status: BuildState::Ready,
        };
        let value = serde_json::to_value(&template).unwrap();
        assert_eq!((&value["createdBy"], &value["lastSpawnedAt"]), (&Value::Null, &Value::Null));
        assert_eq!(value["buildStatus"], "ready");
        assert_eq!(serde_json::from_value::<Template>(value).unwrap(), template);
    }

    #[test]
    fn levels_order_by_weight() {
        assert!(LogLevel::Debug < LogLevel::Info && LogLevel::Warn < LogLevel::Error);
    }
}
