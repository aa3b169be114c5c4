//! The keys of the control plane: the deployment's own, which is given to the node, and those that were made with it.
//!
//! Of a made key the node keeps a digest. A key has 256 random bits, so that nothing slower than SHA-256 is needed, and its
//! digest can be looked up: what that takes tells nothing about any key.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aenv_api::{ApiKeyInfo, CreatedApiKey, KeyMask, KeyScope};
use aenv_durable::{Row, Store, StoreError, Table};
use aenv_model::KeyId;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tracing::warn;

use crate::secrets::{ApiKey, random_hex};

/// Version of the rows.
const ROW_VERSION: u32 = 1;

/// What every key begins with: E2B's, which some clients look for.
const PREFIX: &str = "e2b_";

/// Characters of a key that are shown, at either end.
const SHOWN: usize = 4;

/// What the node's own key is called.
const DEPLOYMENT: &str = "deployment";

/// Longest name.
const NAME_LIMIT: usize = 64;

/// Most keys that there can be.
const KEYS: usize = 1024;

type KeyDigest = [u8; 32];

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    /// `None`: the deployment's own key.
    pub(crate) id: Option<KeyId>,
    pub(crate) name: Arc<str>,
    pub(crate) scope: KeyScope,
}

/// Why a key was not made or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyProblem {
    #[error("invalid field name: expected 1 to {NAME_LIMIT} characters that can be seen, and not '{DEPLOYMENT}'")]
    Name,
    #[error("there are {KEYS} keys already; revoke those that nobody uses")]
    Many,
    #[error("key {0} not found")]
    NotFound(String),
    #[error("record a key")]
    Store(#[from] StoreError),
}

/// All keys of a node. Cloning shares them.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    deployment: ApiKey,
    rows: Table<KeyRecord>,
    /// Held over a change, from its check to its row.
    changing: tokio::sync::Mutex<()>,
    known: Mutex<HashMap<KeyDigest, Known>>,
}

/// What the node store keeps of a key.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct KeyRecord {
    id: KeyId,
    name: String,
    scope: KeyScope,
    /// SHA-256 of the whole key, in hexadecimal digits.
    digest: String,
    first: String,
    last: String,
    length: u32,
    created_at: Timestamp,
}

#[derive(Debug)]
struct Known {
    record: KeyRecord,
    caller: Caller,
    last_used: Option<Timestamp>,
}

impl Known {
    fn new(record: KeyRecord) -> Self {
        let caller = Caller { id: Some(record.id), name: record.name.as_str().into(), scope: record.scope };
        Self { record, caller, last_used: None }
    }

    fn info(&self) -> ApiKeyInfo {
        let KeyRecord { id, name, scope, first, last, length, created_at, .. } = &self.record;
        ApiKeyInfo {
            id: *id,
            name: name.clone(),
            scope: *scope,
            mask: KeyMask {
                prefix: PREFIX.to_owned(),
                value_length: *length,
                masked_value_prefix: first.clone(),
                masked_value_suffix: last.clone(),
            },
            created_at: *created_at,
            last_used: self.last_used,
        }
    }
}

impl Keys {
    /// The deployment's key, and what the store has. Blocking.
    pub(crate) fn load(store: &Store, deployment: ApiKey) -> Result<Self, StoreError> {
        let rows: Table<KeyRecord> = store.table("api_keys", ROW_VERSION);
        let mut known = HashMap::new();
        for (id, row) in rows.list_blocking()? {
            let record = match row {
                Row::Known(record) => record,
                Row::Unknown(why) => {
                    warn!(key_id = id, why, "kept an API key that this version does not understand; it opens nothing");
                    continue;
                }
            };
            let mut digest = KeyDigest::default();
            match hex::decode_to_slice(&record.digest, &mut digest) {
                Ok(()) => _ = known.insert(digest, Known::new(record)),
                Err(error) => warn!(key_id = id, %error, "an API key has no digest; it opens nothing"),
            }
        }
        let changing = tokio::sync::Mutex::new(());
        Ok(Self { inner: Arc::new(Inner { deployment, rows, changing, known: Mutex::new(known) }) })
    }

    /// Whose key that is; `None`: nobody's.
    pub(crate) fn caller(&self, candidate: &[u8]) -> Option<Caller> {
        if self.inner.deployment.matches(candidate) {
            return Some(Caller { id: None, name: DEPLOYMENT.into(), scope: KeyScope::Admin });
        }
        let mut known = self.known();
        let key = known.get_mut(&digest(candidate))?;
        key.last_used = Some(Timestamp::now());
        Some(key.caller.clone())
    }

    /// Whether anything is opened by it.
    pub(crate) fn is_key(&self, candidate: &[u8]) -> bool {
        self.inner.deployment.matches(candidate) || self.known().contains_key(&digest(candidate))
    }

    /// All that were made and not revoked, oldest first.
    pub(crate) fn list(&self) -> Vec<ApiKeyInfo> {
        let mut infos: Vec<_> = self.known().values().map(Known::info).collect();
        infos.sort_by_key(|info| info.id);
        infos
    }

    /// A fresh key, which is not kept: this is the only time that it is told.
    pub(crate) async fn create(&self, name: &str, scope: KeyScope) -> Result<CreatedApiKey, KeyProblem> {
        let name = checked(name)?;
        let _changing = self.inner.changing.lock().await;
        if self.known().len() >= KEYS {
            return Err(KeyProblem::Many);
        }
        let value = random_hex();
        let key = format!("{PREFIX}{value}");
        let digest = digest(key.as_bytes());
        let record = KeyRecord {
            id: KeyId::new(),
            name,
            scope,
            digest: hex::encode(digest),
            first: value[..SHOWN].to_owned(),
            last: value[value.len() - SHOWN..].to_owned(),
            length: value.len() as u32,
            created_at: Timestamp::now(),
        };
        self.inner.rows.put(record.id.to_string(), record.clone()).await?;
        let known = Known::new(record);
        let info = known.info();
        self.known().insert(digest, known);
        Ok(CreatedApiKey { key, info })
    }

    /// Gives a key another name.
    pub(crate) async fn rename(&self, id: &str, name: &str) -> Result<(), KeyProblem> {
        let name = checked(name)?;
        let _changing = self.inner.changing.lock().await;
        let (digest, record) = self.find(id)?;
        let record = KeyRecord { name, ..record };
        self.inner.rows.put(record.id.to_string(), record.clone()).await?;
        if let Some(known) = self.known().get_mut(&digest) {
            *known = Known { last_used: known.last_used, ..Known::new(record) };
        }
        Ok(())
    }

    /// A key opens nothing from here on, also if this fails to be recorded: then it comes back with the next start.
    pub(crate) async fn revoke(&self, id: &str) -> Result<(), KeyProblem> {
        let _changing = self.inner.changing.lock().await;
        let (digest, record) = self.find(id)?;
        self.known().remove(&digest);
        self.inner.rows.remove(record.id.to_string()).await?;
        Ok(())
    }

    fn find(&self, id: &str) -> Result<(KeyDigest, KeyRecord), KeyProblem> {
        let missing = || KeyProblem::NotFound(id.to_owned());
        let id: KeyId = id.parse().map_err(|_| missing())?;
        let known = self.known();
        let found = known.iter().find(|(_, known)| known.record.id == id);
        found.map(|(digest, known)| (*digest, known.record.clone())).ok_or_else(missing)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<KeyDigest, Known>> {
        self.inner.known.lock().unwrap_or_else(PoisonError::into_inner) // single map operations leave no half state
    }
}

fn digest(key: &[u8]) -> KeyDigest {
    Sha256::digest(key).into()
}

fn checked(name: &str) -> Result<String, KeyProblem> {
    let name = name.trim();
    let fits = (1..=NAME_LIMIT).contains(&name.chars().count()) && !name.chars().any(is_unseen);
    if fits && name != DEPLOYMENT { Ok(name.to_owned()) } else { Err(KeyProblem::Name) }
}

/// Controls what comes after it, or nothing at all: with such characters one name looks like another.
fn is_unseen(character: char) -> bool {
    let is_format = matches!(
        character,
        '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
    );
    character.is_control() || is_format
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "e2b_0123456789abcdef0123456789abcdef";

    fn keys(dir: &std::path::Path) -> Keys {
        let store = Store::open(&dir.join("node.redb")).unwrap();
        Keys::load(&store, ApiKey::check(OWN, "test").unwrap()).unwrap()
    }

    #[tokio::test]
    async fn a_key_opens_until_it_is_revoked_and_across_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let all = keys(dir.path());
        assert_eq!(all.caller(OWN.as_bytes()).unwrap().id, None);
        let made = all.create(" ci ", KeyScope::Read).await.unwrap();
        assert!(made.key.starts_with(PREFIX) && made.info.name == "ci");
        assert!(
            made.info.mask.masked_value_prefix.len() == SHOWN
                && made.key.ends_with(&made.info.mask.masked_value_suffix)
        );
        let caller = all.caller(made.key.as_bytes()).unwrap();
        assert_eq!((caller.id, caller.scope), (Some(made.info.id), KeyScope::Read));
        assert!(all.list()[0].last_used.is_some());
        assert_eq!(all.caller(b"e2b_other"), None);
        drop(all);

        let all = keys(dir.path());
        assert!(all.is_key(made.key.as_bytes()) && all.is_key(OWN.as_bytes()));
        all.rename(&made.info.id.to_string(), "robots").await.unwrap();
        assert_eq!(&*all.caller(made.key.as_bytes()).unwrap().name, "robots");
        all.revoke(&made.info.id.to_string()).await.unwrap();
        assert_eq!(all.caller(made.key.as_bytes()), None);
        assert!(matches!(all.revoke(&made.info.id.to_string()).await, Err(KeyProblem::NotFound(_))));
        drop(all);
        assert!(keys(dir.path()).list().is_empty());
    }

    #[tokio::test]
    async fn the_store_has_no_key() {
        let dir = tempfile::tempdir().unwrap();
        let all = keys(dir.path());
        let made = all.create("ci", KeyScope::Admin).await.unwrap();
        drop(all);
        let kept = std::fs::read(dir.path().join("node.redb")).unwrap();
        let value = &made.key.as_bytes()[PREFIX.len()..];
        assert!(!kept.windows(value.len()).any(|window| window == value));
        let all = keys(dir.path());
        for name in ["a\nb", "\u{202e}evil", " ", "deployment"] {
            assert!(matches!(all.create(name, KeyScope::Admin).await, Err(KeyProblem::Name)), "{name:?}");
        }
    }
}
