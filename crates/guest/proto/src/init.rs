//! The body of `POST /init`: what the node tells a guest that has just come up.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Everything is optional on the wire; what is absent leaves the guest's state as it is, except the access token,
/// whose absence clears it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InitRequest {
    /// Token that requests from outside must carry from now on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// Global environment of every process started later; replaces the former one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// The node's clock, RFC 3339. Also orders requests: an older one is acknowledged and not applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<String>,
    /// User of requests that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// Working directory of requests that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
    /// The guest's host name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Fresh random bytes for the kernel's pool, base64: a restored guest must not share its random state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy: Option<String>,
    /// Identity files and variables (`E2B_SANDBOX_ID`, `/run/e2b/.E2B_SANDBOX_ID`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// The template the sandbox came from (`E2B_TEMPLATE_ID`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_id: Option<String>,
}
