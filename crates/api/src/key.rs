//! API keys: made, listed and revoked by whoever has one that may.

use aenv_model::KeyId;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a key may do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KeyScope {
    /// Everything.
    #[default]
    Admin,
    /// Look at what there is, and get nothing that would open more.
    Read,
}

/// Body of `POST /api-keys`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NewApiKey {
    /// What it is called, 1 to 64 characters.
    pub name: String,
    /// What it may do.
    #[serde(default)]
    pub scope: KeyScope,
}

/// Body of `PATCH /api-keys/{id}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RenamedApiKey {
    /// What it is called from now on.
    pub name: String,
}

/// Enough of a key to tell it from others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeyMask {
    /// What all keys begin with.
    pub prefix: String,
    /// Characters after that.
    pub value_length: u32,
    /// The first of those.
    pub masked_value_prefix: String,
    /// The last of those.
    pub masked_value_suffix: String,
}

/// A key, without what it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApiKeyInfo {
    /// Its id.
    #[schemars(with = "String")]
    pub id: KeyId,
    /// What it is called.
    pub name: String,
    /// What it may do.
    #[serde(default)]
    pub scope: KeyScope,
    /// Enough of it to tell it from others.
    pub mask: KeyMask,
    /// When it was made.
    #[schemars(with = "String")]
    pub created_at: Timestamp,
    /// When it last opened something, since the node started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub last_used: Option<Timestamp>,
}

/// Answer of `POST /api-keys`: the only time that the key is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CreatedApiKey {
    /// The key.
    pub key: String,
    /// What lists tell of it.
    #[serde(flatten)]
    pub info: ApiKeyInfo,
}
