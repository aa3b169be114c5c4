//! Calls that need no SDK: a command, a file. Not in E2B's API.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::null_as_default;

/// Body of `POST /sandboxes/{id}/execute`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExecuteRequest {
    /// What a login shell is to run.
    pub command: String,
    /// Seconds that it may take; 60 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
    /// As whom; absent: the template's user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Where; absent: that user's directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// On top of the sandbox's environment.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

/// What became of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Executed {
    /// Its standard output, as text.
    pub stdout: String,
    /// Its standard error, as text.
    pub stderr: String,
    /// Its exit code; -1 if a signal ended it.
    pub exit_code: i32,
    /// How it ended, if not with 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// There was more output than an answer holds: what came first is here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

/// Body of `POST /sandboxes/{id}/files/write` without a `path` in its query.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WriteFileRequest {
    /// Where; relative to the user's home.
    pub path: String,
    /// What.
    #[serde(default)]
    pub content: String,
    /// How `content` is written; absent: as it stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<ContentEncoding>,
    /// Whose; absent: the template's user's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// How a file's content stands in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ContentEncoding {
    /// As text.
    Utf8,
    /// In base64, with padding or without.
    Base64,
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WrittenFile {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub path: String,
    /// `file`.
    #[serde(rename = "type")]
    pub kind: String,
}
