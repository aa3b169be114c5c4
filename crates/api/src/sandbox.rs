//! Sandboxes: requests that make and keep them, and what is said about them.

use std::collections::BTreeMap;

use aenv_model::{LeaseId, SandboxId, TemplateId};
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::network::NetworkConfig;
use crate::null_as_default;

/// Body of `POST /v2/sandboxes` and `POST /sandboxes`. The two differ in defaults only, which are the server's.
///
/// Every field that E2B's API has is here, supported or not, so that the server can refuse by name what it cannot do
/// and no request is half understood.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    /// Template id, alias, or snapshot id.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Seconds to live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
    /// Whether the sandbox is paused when its time is over, rather than ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// `false`: that pause keeps the disk only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause_memory: Option<bool>,
    /// Whether traffic wakes a paused sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<AutoResume>,
    /// Whether the guest agent demands an access token. Not part of the v2 form, where every sandbox is secured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
    /// Seconds without a connection or a running command after which it is paused. Not in E2B's API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout: Option<u32>,
    /// A lease that it ends with. Not in E2B's API.
    #[serde(default, rename = "leaseID", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub lease_id: Option<LeaseId>,
    /// `false`: nothing outside is reached. The only snake-case key of this body; camel case is taken too.
    #[serde(
        default,
        rename = "allow_internet_access",
        alias = "allowInternetAccess",
        skip_serializing_if = "Option::is_none"
    )]
    pub allow_internet_access: Option<bool>,
    /// What may reach the sandbox and be reached from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// Free labels; lists filter on them.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Global environment of every process in the sandbox.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub env_vars: BTreeMap<String, String>,
    /// Configuration of an MCP gateway; opaque.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<Value>,
    /// Identity tokens for the workload; opaque.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iam: Option<Value>,
    /// Volumes to mount.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
    /// Parameters for the node's extension service; opaque.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "Map::is_empty")]
    pub custom_extension_params: Map<String, Value>,
}

/// `autoResume` of a create request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AutoResume {
    /// Whether traffic wakes a paused sandbox.
    #[serde(default)]
    pub enabled: bool,
}

/// A volume and where the guest sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VolumeMount {
    /// Volume name (or id).
    pub name: String,
    /// Absolute path in the guest.
    pub path: String,
}

/// Body of `POST /sandboxes-cold`: a sandbox booted from an image, without a template.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewColdSandbox {
    /// OCI image reference.
    pub image: String,
    /// Seconds to live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
    /// Whether the sandbox is paused when its time is over, rather than ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// Whether traffic wakes a paused sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<AutoResume>,
    /// Whether the guest agent demands an access token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
    /// `false`: nothing outside is reached. Camel case here, unlike in [`NewSandbox`], whose form is taken too.
    #[serde(default, alias = "allow_internet_access", skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// What may reach the sandbox and be reached from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// Free labels; lists filter on them.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Global environment of every process in the sandbox.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub env_vars: BTreeMap<String, String>,
    /// Parameters for the node's extension service; opaque.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "Map::is_empty")]
    pub custom_extension_params: Map<String, Value>,
    /// Virtual CPUs, at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_count: Option<u32>,
    /// Guest memory in MiB, at least 128.
    #[serde(default, rename = "memoryMB", skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u32>,
    /// Root disk in MiB, a multiple of 1024.
    #[serde(default, rename = "diskSizeMB", skip_serializing_if = "Option::is_none")]
    pub disk_size_mb: Option<u32>,
    /// More disks, each from an image.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub attached_drives: Vec<AttachedDrive>,
    /// Words for the guest kernel's command line, separated by white space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_boot_args: Option<String>,
    /// Volumes to mount.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
}

/// A further disk of a cold sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttachedDrive {
    /// Unique name, no `/`.
    #[serde(rename = "driveID")]
    pub drive_id: String,
    /// Default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// Absolute path in the guest; default `/mnt/{driveID}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_path: Option<String>,
    /// Folder of the disk to mount, relative.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sub_path: Option<String>,
    /// Size in MiB.
    #[serde(default, rename = "diskSizeMB", skip_serializing_if = "Option::is_none")]
    pub disk_size_mb: Option<u32>,
    /// What is on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<DriveSource>,
}

/// What a further disk is made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DriveSource {
    /// OCI image reference.
    pub image: String,
}

/// Answer to create, connect, resume and fork.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// The template it came from.
    #[serde(rename = "templateID")]
    #[schemars(with = "String")]
    pub template_id: TemplateId,
    /// The sandbox.
    #[serde(rename = "sandboxID")]
    #[schemars(with = "String")]
    pub sandbox_id: SandboxId,
    /// Always empty, always written: clients require the key.
    #[serde(default, rename = "clientID")]
    pub client_id: String,
    /// Release of the guest agent; SDKs gate features on it.
    pub envd_version: String,
    /// The template's alias.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Token that requests to the guest agent carry as `X-Access-Token`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// Token that requests to the sandbox's own ports carry, if its traffic is not public.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_access_token: Option<String>,
    /// Domain of the data plane; absent: the client's own setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

/// What a client is told of a sandbox's state. Transitions show as the state they lead to or come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// Its processes run.
    Running,
    /// Only a snapshot is left.
    Paused,
}

impl SandboxState {
    /// The state of that name on the wire.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Running, Self::Paused].into_iter().find(|state| state.name() == name)
    }

    /// Its name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
        }
    }
}

/// One entry of a sandbox list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ListedSandbox {
    /// The template it came from.
    #[serde(rename = "templateID")]
    #[schemars(with = "String")]
    pub template_id: TemplateId,
    /// The sandbox.
    #[serde(rename = "sandboxID")]
    #[schemars(with = "String")]
    pub sandbox_id: SandboxId,
    /// Always empty, always written: clients require the key.
    #[serde(default, rename = "clientID")]
    pub client_id: String,
    /// When it was created (or last resumed).
    pub started_at: Timestamp,
    /// When its time is over.
    pub end_at: Timestamp,
    /// Virtual CPUs.
    pub cpu_count: u32,
    /// Guest memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// Root disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Running or paused.
    pub state: SandboxState,
    /// Release of the guest agent.
    pub envd_version: String,
    /// The template's alias.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Labels given at create; absent when there are none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Mounted volumes; absent when there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
    /// Set when the guest did not answer at the time of its pause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_unresponsive_at_pause: Option<bool>,
}

/// Answer to `GET /sandboxes/{id}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxDetail {
    /// What lists say.
    #[serde(flatten)]
    pub listed: ListedSandbox,
    /// Token for the guest agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// As given at create; absent when it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Domain of the data plane.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// As given at create.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// What happens at the end of its time, and on traffic after that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<Lifecycle>,
    /// What a pause has kept; absent while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_mode: Option<PauseMode>,
}

/// What a pause keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PauseMode {
    /// Memory and disk: it goes on where it was.
    Full,
    /// The disk only: it boots.
    Filesystem,
}

impl PauseMode {
    /// Its name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Filesystem => "filesystem",
        }
    }
}

/// `lifecycle` of a sandbox's detail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// Whether traffic wakes it once paused.
    pub auto_resume: bool,
    /// What the end of its time does.
    pub on_timeout: OnTimeout,
}

/// What the end of a sandbox's time does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// It is ended.
    Kill,
    /// It is paused.
    Pause,
}

/// Body of `POST [/v2]/sandboxes/{id}/connect`. Extends a running sandbox's time, never shortens it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConnectRequest {
    /// Seconds to live from now; required by the v1 form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
    /// `false`: a paused sandbox is booted afresh from its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
}

/// Body of `POST /sandboxes/{id}/pause`; may be absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PauseRequest {
    /// `false`: only the disk is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
    /// Fail rather than pause a guest that does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub require_healthy_guest: Option<bool>,
}

/// Body of `POST /sandboxes/{id}/resume`; may be absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResumeRequest {
    /// Seconds to live from now; absent: the server's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
    /// `false`: it is booted afresh from its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
}

/// Body of `POST /sandboxes/{id}/fork`; may be absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ForkRequest {
    /// How many children, 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Seconds that they live; absent: as long as their source was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
}

/// One child of a fork: exactly one of the two.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ForkResult {
    /// It runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
    /// It does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<crate::ApiErrorBody>,
}

/// Body of `POST /sandboxes/batch`: sandboxes that are alike. Not in E2B's API.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewBatch {
    /// How many.
    pub count: u32,
    /// A new lease that they all end with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<NewLease>,
    /// What each of them is.
    #[serde(flatten)]
    pub sandbox: NewSandbox,
}

/// A lease to be: what is made under it ends with it, unless it is renewed in time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NewLease {
    /// Seconds that it, and each renewal of it, lasts.
    pub timeout: u32,
}

/// Body of `POST /leases/{id}/renew`; may be absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LeaseRenewal {
    /// Seconds from now; absent: as many as it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
}

/// A lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    /// Its id.
    #[serde(rename = "leaseID")]
    #[schemars(with = "String")]
    pub lease_id: LeaseId,
    /// When it ends unless it is renewed.
    pub end_at: Timestamp,
}

/// What became of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Batch {
    /// One result a sandbox.
    pub sandboxes: Vec<ForkResult>,
    /// The lease that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Lease>,
}

/// Body of `POST /sandboxes/{id}/rollback`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RollbackRequest {
    /// Id or name of a snapshot of this sandbox.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
}

/// Body of `POST /sandboxes/{id}/snapshots`; may be absent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NewSnapshot {
    /// A name for it: letters, digits, `-` and `_`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// `false`: only the disk is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
    /// `false`: the answer does not wait until other nodes have it. Not in E2B's API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<bool>,
}

/// Where a snapshot stands on its way to other nodes. On its own node sandboxes start from it in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotStatus {
    /// It is on its way.
    Publishing,
    /// All who are to have it have it.
    #[default]
    Ready,
    /// It stays on its node.
    Failed,
}

/// A snapshot of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotInfo {
    /// What sandboxes are started from, as their `templateID`.
    #[serde(rename = "snapshotID")]
    #[schemars(with = "String")]
    pub snapshot_id: TemplateId,
    /// Its names.
    #[serde(default)]
    pub names: Vec<String>,
    /// Virtual CPUs.
    #[serde(default)]
    pub cpu_count: u32,
    /// Guest memory in MiB.
    #[serde(default, rename = "memoryMB")]
    pub memory_mb: u64,
    /// Root disk in MiB.
    #[serde(default, rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// When it was recorded.
    pub created_at: Timestamp,
    /// When its record last changed.
    pub updated_at: Timestamp,
    /// The instant of which it is: all that it holds is of one instant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub captured_at: Option<Timestamp>,
    /// What it holds of that instant. The disk alone is as its guest has written it, on request, just before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consistency: Option<PauseMode>,
    /// Where it stands on its way to other nodes.
    #[serde(default)]
    pub status: SnapshotStatus,
    /// Why it stays on its node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Body of `POST /sandboxes/{id}/timeout`. Replaces the end of its time: may shorten it, 0 ends it at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TimeoutRequest {
    /// Seconds to live from now.
    pub timeout: u32,
}

/// Body of `POST /sandboxes/{id}/refreshes`. Extends only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RefreshRequest {
    /// Seconds to live from now, 0 to 3600; absent: the server's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<u32>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn listed() -> ListedSandbox {
        ListedSandbox {
            template_id: TemplateId::new(),
            sandbox_id: SandboxId::new(),
            client_id: String::new(),
            started_at: Timestamp::UNIX_EPOCH,
            end_at: Timestamp::UNIX_EPOCH,
            cpu_count: 2,
            memory_mb: 1024,
            disk_size_mb: 2048,
            state: SandboxState::Running,
            envd_version: "0.6.13".into(),
            alias: None,
            metadata: BTreeMap::new(),
            volume_mounts: Vec::new(),
            envd_unresponsive_at_pause: None,
        }
    }

    fn keys(value: &Value) -> Vec<&str> {
        value.as_object().unwrap().keys().map(String::as_str).collect()
    }

    #[test]
    fn a_create_request_as_the_sdk_sends_it_is_understood_with_unknown_fields() {
        let body = json!({"templateID": "base", "metadata": {}, "envVars": {"A": "b"}, "volumeMounts": null,
            "allow_internet_access": false, "futureField": [1], "network": {"allowPublicTraffic": null, "new": 1}});
        let request: NewSandbox = serde_json::from_value(body).unwrap();
        assert_eq!(request.template_id, "base");
        assert_eq!(request.env_vars["A"], "b");
        assert_eq!(request.allow_internet_access, Some(false));
        assert_eq!(request.network, Some(NetworkConfig::default()));
        assert_eq!((request.timeout, request.secure), (None, None));
    }

    #[test]
    fn a_negative_timeout_and_a_missing_template_are_refused_by_name() {
        let error = serde_json::from_value::<NewSandbox>(json!({"templateID": "x", "timeout": -1})).unwrap_err();
        assert!(error.to_string().contains("-1"), "{error}");
        let error = serde_json::from_value::<NewSandbox>(json!({})).unwrap_err();
        assert!(error.to_string().contains("templateID"), "{error}");
    }

    #[test]
    fn a_request_says_only_what_was_set() {
        let request = NewSandbox { template_id: "t".into(), timeout: Some(300), ..Default::default() };
        assert_eq!(serde_json::to_value(request).unwrap(), json!({"templateID": "t", "timeout": 300}));
    }

    #[test]
    fn required_keys_are_always_written_and_optional_ones_are_not() {
        let listed = listed();
        let sandbox = Sandbox {
            template_id: listed.template_id,
            sandbox_id: listed.sandbox_id,
            client_id: String::new(),
            envd_version: "0.6.13".into(),
            alias: None,
            envd_access_token: None,
            traffic_access_token: None,
            domain: None,
        };
        let value = serde_json::to_value(&sandbox).unwrap();
        assert_eq!(keys(&value), ["clientID", "envdVersion", "sandboxID", "templateID"]);
        assert_eq!(value["clientID"], "");
        let required = [
            "clientID",
            "cpuCount",
            "diskSizeMB",
            "endAt",
            "envdVersion",
            "memoryMB",
            "sandboxID",
            "startedAt",
            "state",
            "templateID",
        ];
        let value = serde_json::to_value(&listed).unwrap();
        assert_eq!(keys(&value), required);
        assert_eq!(value["startedAt"], "1970-01-01T00:00:00Z");
    }

    #[test]
    fn a_detail_is_a_list_entry_with_more() {
        let detail = SandboxDetail {
            listed: listed(),
            envd_access_token: Some("tok".into()),
            allow_internet_access: None,
            domain: None,
            network: None,
            lifecycle: Some(Lifecycle { auto_resume: false, on_timeout: OnTimeout::Kill }),
            pause_mode: None,
        };
        let value = serde_json::to_value(&detail).unwrap();
        assert_eq!(value["memoryMB"], 1024);
        assert_eq!(value["lifecycle"], json!({"autoResume": false, "onTimeout": "kill"}));
        assert_eq!(serde_json::from_value::<SandboxDetail>(value).unwrap(), detail);
    }
}
