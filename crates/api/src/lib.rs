//! What crosses the wire between a control-plane client and the node server: one module per resource, the shapes of
//! E2B's public API plus our own, and a client for them.
//!
//! Types are plain serde structs. Keys that official clients require are always written; optional ones are left out
//! when there is nothing to say. Unknown keys are tolerated, as newer SDKs add some. Nothing here decides: defaults
//! that differ between two forms of a call, and refusals of what is not supported, are the server's.

#![forbid(unsafe_code)]

mod client;
mod error;
mod key;
mod list;
mod network;
mod node;
mod observe;
mod page;
mod plain;
mod sandbox;
mod template;

pub use client::{Client, ClientError, Page, http_builder};
pub use error::ApiErrorBody;
pub use key::{ApiKeyInfo, CreatedApiKey, KeyMask, KeyScope, NewApiKey, RenamedApiKey};
pub use list::{ListFilter, ListQuery, PageQuery, ParseListQueryError, decode_metadata_filter, encode_metadata_filter};
pub use network::{EgressProxy, EgressProxyTls, NetworkConfig, NetworkUpdate};
pub use node::{MachineInfo, Node, NodeDisk, NodeMetrics, Team};
pub use observe::{
    LogsQuery, SandboxLog, SandboxLogEntry, SandboxLogs, SandboxLogsV2, SandboxMetric, SandboxesWithMetrics,
};
pub use page::{Cursor, Order, ParseCursorError, paginate};
pub use plain::{ContentEncoding, ExecuteRequest, Executed, WriteFileRequest, WrittenFile};
pub use sandbox::{
    AttachedDrive, AutoResume, Batch, ConnectRequest, DriveSource, ForkRequest, ForkResult, Lease, LeaseRenewal,
    Lifecycle, ListedSandbox, NewBatch, NewColdSandbox, NewLease, NewSandbox, NewSnapshot, OnTimeout, PauseMode,
    PauseRequest, RefreshRequest, ResumeRequest, RollbackRequest, Sandbox, SandboxDetail, SandboxState, SnapshotInfo,
    SnapshotStatus, TimeoutRequest, VolumeMount,
};
pub use template::{
    AliasAnswer, AssignTags, AssignedTags, BuildLogEntry, BuildLogs, BuildReason, BuildState, BuildStatus,
    BuildStatusQuery, FilesLink, ImageRegistry, LogLevel, RemoveTags, Template, TemplateBuild, TemplateBuildStartV2,
    TemplateCreateV3, TemplateCreated, TemplateNames, TemplateStep, TemplateTag, TemplateUpdate, TemplateWithBuilds,
};

/// Header that carries the platform's API key.
pub const API_KEY_HEADER: &str = "x-api-key";

/// Response header of a list that has more pages: the value for the next request's `nextToken`.
pub const NEXT_TOKEN_HEADER: &str = "x-next-token";

/// Reads an explicit `null` as the default, which is how SDKs write "not given".
fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + serde::Deserialize<'de>,
{
    Ok(<Option<T> as serde::Deserialize>::deserialize(deserializer)?.unwrap_or_default())
}
