//! The node's secrets: the API key and the seed of sandbox tokens.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rand::RngCore;
use subtle::ConstantTimeEq;

/// Where orchestrators mount a key.
const MOUNTED_KEY: &str = "/run/secrets/api-key";

/// What an API key may look like.
const KEY_RULE: &str = "32 to 256 characters of A-Z a-z 0-9 . _ ~ -";

/// Why a secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SecretError {
    #[error("API key from {origin} is not usable: expected {KEY_RULE}")]
    BadKey { origin: String },
    #[error("{path} must be a regular file of mode 0600 owned by uid {uid}")]
    Exposed { path: PathBuf, uid: u32 },
    #[error("secret {path}")]
    Io { path: PathBuf, source: io::Error },
}

/// The one key of the control plane.
#[derive(Clone)]
pub(crate) struct ApiKey(String);

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

impl ApiKey {
    /// In order: `AENV_API_KEY`, the mounted secret, the managed file, which is made if it is absent.
    pub(crate) fn find(secrets: &Path) -> Result<Self, SecretError> {
        if let Ok(text) = std::env::var("AENV_API_KEY") {
            return Self::check(&text, "AENV_API_KEY");
        }
        if let Some(text) = read_if_present(Path::new(MOUNTED_KEY))? {
            return Self::check(&text, MOUNTED_KEY);
        }
        let path = secrets.join("api-key");
        let text = managed(&path, || format!("e2b_{}", random_hex()))?;
        Self::check(&text, &path.display().to_string())
    }

    pub(crate) fn check(text: &str, origin: &str) -> Result<Self, SecretError> {
        let fits = (32..=256).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._~-".contains(&byte));
        if fits { Ok(Self(text.to_owned())) } else { Err(SecretError::BadKey { origin: origin.to_owned() }) }
    }

    /// Compares in constant time.
    #[must_use]
    pub(crate) fn matches(&self, candidate: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(candidate).into()
    }
}

/// The managed seed file's text, made if it is absent.
pub(crate) fn token_seed(secrets: &Path) -> Result<String, SecretError> {
    managed(&secrets.join("sandbox-access-token-hash-seed"), random_hex)
}

/// A secret file of our own: private, and made with `fresh` content if it is absent.
fn managed(path: &Path, fresh: impl FnOnce() -> String) -> Result<String, SecretError> {
    let failed = |source| SecretError::Io { path: path.to_owned(), source };
    if let Some(dir) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    }
    if !path.try_exists().map_err(failed)? {
        aenv_durable::atomic_write(path, fresh().as_bytes(), 0o600).map_err(failed)?;
    }
    let uid = nix::unistd::geteuid().as_raw();
    let metadata = std::fs::symlink_metadata(path).map_err(failed)?;
    if !metadata.is_file() || metadata.mode() & 0o777 != 0o600 || metadata.uid() != uid {
        return Err(SecretError::Exposed { path: path.to_owned(), uid });
    }
    Ok(read_if_present(path)?.unwrap_or_default())
}

fn read_if_present(path: &Path) -> Result<Option<String>, SecretError> {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let text = text.strip_suffix('\n').unwrap_or(&text);
            Ok(Some(text.strip_suffix('\r').unwrap_or(text).to_owned()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(SecretError::Io { path: path.to_owned(), source }),
    }
}

pub(crate) fn random_hex() -> String {
    let mut bytes = [0; 32];
    rand::rng().fill_bytes(&mut bytes);
    hex::encode(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_managed_secret_is_made_once_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secrets/seed");
        let first = managed(&path, random_hex).unwrap();
        assert_eq!(first, managed(&path, random_hex).unwrap());
        assert_eq!(first.len(), 64);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_managed_secret_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("seed");
        managed(&path, random_hex).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(managed(&path, random_hex), Err(SecretError::Exposed { .. })));
    }

    #[test]
    fn keys_outside_the_rule_are_refused_with_it() {
        for text in ["short", &"x".repeat(257), &format!("{} ", "x".repeat(40))] {
            let error = ApiKey::check(text, "test").unwrap_err().to_string();
            assert!(error.contains("32 to 256"), "{error}");
        }
        let key = ApiKey::check(&"k".repeat(32), "test").unwrap();
        assert!(key.matches(&[b'k'; 32]) && !key.matches(b"k"));
    }
}
