//! Who we are to a registry.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use aenv_block_source::{Credentials as Stored, DockerConfig};
use oci_client::secrets::RegistryAuth;

/// Credentials given with an import.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// A user and a password or access token, for registries with basic authentication and for those that hand out
    /// bearer tokens to whoever has it.
    Basic {
        /// The user's name.
        username: String,
        /// The password or access token.
        password: String,
    },
    /// A bearer token to use as it is.
    Bearer(String),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Basic { username, .. } => write!(f, "Basic({username}, …)"),
            Self::Bearer(_) => f.write_str("Bearer(…)"),
        }
    }
}

/// What was found for a registry in Docker's configuration.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) auth: RegistryAuth,
    /// A token that is good for tokens only. It goes before `auth`.
    pub(crate) identity: Option<String>,
    /// Why there is nothing better, if something went wrong: it explains a refusal that may follow.
    pub(crate) note: Option<String>,
}

impl From<Credentials> for Found {
    fn from(credentials: Credentials) -> Self {
        let auth = match credentials {
            Credentials::Basic { username, password } => RegistryAuth::Basic(username, password),
            Credentials::Bearer(token) => RegistryAuth::Bearer(token),
        };
        Self { auth, identity: None, note: None }
    }
}

/// Docker's `config.json`: the given file or folder, else where Docker keeps it.
pub(crate) fn docker_config(given: Option<&Path>) -> Option<Arc<DockerConfig>> {
    let path = match given {
        Some(path) if path.is_dir() => path.join("config.json"),
        Some(path) => path.to_owned(),
        None => DockerConfig::default_path()?,
    };
    Some(Arc::new(DockerConfig::new(path)))
}

/// Looks `registry` up in Docker's configuration, asking a credential helper if it names one.
///
/// Never fails: what can't be had is asked for without, and the note tells why.
pub(crate) async fn from_docker(config: Option<&Arc<DockerConfig>>, registry: &str) -> Found {
    let nobody = |note| Found { auth: RegistryAuth::Anonymous, identity: None, note };
    let Some(config) = config.map(Arc::clone) else { return nobody(None) };
    let registry = registry.to_owned();
    // A helper is a process that is waited for.
    let looked_up = tokio::task::spawn_blocking(move || config.look_up(&registry)).await;
    match looked_up.map_err(std::io::Error::other).flatten() {
        Ok(Stored::Anonymous) => nobody(None),
        Ok(Stored::Basic { username, password }) => Credentials::Basic { username, password }.into(),
        Ok(Stored::Bearer(token)) => Credentials::Bearer(token).into(),
        Ok(Stored::Identity(identity)) => Found { identity: Some(identity), ..nobody(None) },
        Err(error) => {
            tracing::warn!(%error, "going on without the registry's credentials");
            nobody(Some(error.to_string()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_docker_keeps_is_taken_or_its_lack_noted() {
        let dir = tempfile::tempdir().unwrap();
        let config = docker_config(Some(dir.path())).unwrap();
        let found = from_docker(Some(&config), "a.io").await;
        assert_eq!((found.auth, found.identity, found.note), (RegistryAuth::Anonymous, None, None));
        std::fs::write(
            dir.path().join("config.json"),
            r#"{"auths":{"a.io":{"username":"me","password":"p"},"b.io":{"identitytoken":"i"}}}"#,
        )
        .unwrap();
        let found = from_docker(Some(&config), "a.io").await;
        assert_eq!((found.auth, found.note), (RegistryAuth::Basic("me".into(), "p".into()), None));
        let found = from_docker(Some(&config), "b.io").await;
        assert_eq!((found.auth, found.identity.as_deref()), (RegistryAuth::Anonymous, Some("i")));
        std::fs::write(dir.path().join("config.json"), r#"{"credsStore":"of-no-such-helper"}"#).unwrap();
        let found = from_docker(Some(&config), "a.io").await;
        assert_eq!(found.auth, RegistryAuth::Anonymous);
        assert!(found.note.unwrap().contains("credential helper"));
    }
}
