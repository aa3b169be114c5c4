//! Who we are to a registry.

use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::Duration;

use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;

/// Longest wait for a credential helper. It may ask a remote service, never a person.
const HELPER_TIMEOUT: Duration = Duration::from_secs(30);
/// What Docker files its Hub's credentials under, for historical reasons.
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

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

/// Docker's `config.json`: the given file or folder, else `$DOCKER_CONFIG`, else `~/.docker`.
pub(crate) fn docker_config_path(given: Option<&Path>) -> Option<PathBuf> {
    let folder = match given {
        Some(path) if path.is_dir() => path.to_owned(),
        Some(path) => return Some(path.to_owned()),
        None => match std::env::var_os("DOCKER_CONFIG") {
            Some(folder) => folder.into(),
            None => Path::new(&std::env::var_os("HOME")?).join(".docker"),
        },
    };
    Some(folder.join("config.json"))
}

/// Looks `registry` up in Docker's configuration, asking a credential helper if it names one.
///
/// Never fails: what can't be had is asked for without, and the note tells why.
pub(crate) async fn from_docker(config: Option<&Path>, registry: &str) -> Found {
    let anonymous = |note| Found { auth: RegistryAuth::Anonymous, identity: None, note };
    let Some(config) = config.map(Path::to_owned) else { return anonymous(None) };
    let registry = registry.to_owned();
    let path = config.clone();
    // A helper is a process that is waited for.
    let lookup = tokio::task::spawn_blocking(move || lookup(&path, &registry));
    let problem = match tokio::time::timeout(HELPER_TIMEOUT, lookup).await {
        Ok(Ok(Ok(found))) => return found.unwrap_or_else(|| anonymous(None)),
        Ok(Ok(Err(error))) => error.to_string(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("the credential helper did not answer within {} s", HELPER_TIMEOUT.as_secs()),
    };
    tracing::warn!(config = %config.display(), problem, "going on without the registry's credentials");
    anonymous(Some(format!("no credentials from {}: {}", config.display(), problem.trim())))
}

fn lookup(config: &Path, registry: &str) -> Result<Option<Found>, CredentialRetrievalError> {
    let file = match File::open(config) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(_) => return Err(CredentialRetrievalError::ConfigReadError),
    };
    let key = if registry == "docker.io" { DOCKER_HUB_KEY } else { registry };
    match docker_credential::get_credential_from_reader(BufReader::new(file), key) {
        Ok(DockerCredential::UsernamePassword(username, password)) => {
            Ok(Some(Credentials::Basic { username, password }.into()))
        }
        Ok(DockerCredential::IdentityToken(token)) => {
            Ok(Some(Found { auth: RegistryAuth::Anonymous, identity: Some(token), note: None }))
        }
        Err(CredentialRetrievalError::NoCredentialConfigured) => Ok(None),
        // What every helper of Docker's own says, on its standard output, when it has nothing.
        Err(CredentialRetrievalError::HelperFailure { stdout, .. }) if stdout.contains("credentials not found") => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use base64::Engine as _;

    use super::*;

    fn config(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[tokio::test]
    async fn passwords_are_found_by_host_and_dockers_old_key() {
        let auth = base64::engine::general_purpose::STANDARD.encode("me:secret:with:colons");
        let (_dir, path) = config(&format!(
            r#"{{"auths":{{"localhost:5000":{{"auth":"{auth}"}},"https://index.docker.io/v1/":{{"auth":"{auth}"}}}}}}"#
        ));
        let expected = RegistryAuth::Basic("me".into(), "secret:with:colons".into());
        assert_eq!(from_docker(Some(&path), "localhost:5000").await.auth, expected);
        assert_eq!(from_docker(Some(&path), "docker.io").await.auth, expected);
        assert_eq!(from_docker(Some(&path), "quay.io").await.auth, RegistryAuth::Anonymous);
    }

    /// Runs the ignored test below with a `PATH` on which the helper is found: this process's own is everybody's.
    #[test]
    fn a_helper_is_asked_and_its_failure_noted() {
        let (dir, path) = config(r#"{"credsStore":"x"}"#);
        let helper = dir.path().join("docker-credential-x");
        let script = "#!/bin/sh\nread host\ncase $host in\n\
                      good) echo '{\"Username\":\"u\",\"Secret\":\"s\"}' ;;\n\
                      none) echo 'credentials not found in native keychain'; exit 1 ;;\n\
                      *) echo broken >&2; exit 1 ;;\nesac\n";
        std::fs::write(&helper, script).unwrap();
        std::fs::set_permissions(&helper, std::fs::Permissions::from_mode(0o755)).unwrap();
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "credentials::tests::with_the_helper_on_the_path", "--ignored"])
            .env("PATH", format!("{}:/usr/bin:/bin", dir.path().display()))
            .env("DOCKER_CONFIG", path.parent().unwrap())
            .env("AENV_TEST_HELPER", "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    #[tokio::test]
    #[ignore = "run by a_helper_is_asked_and_its_failure_noted"]
    async fn with_the_helper_on_the_path() {
        if std::env::var_os("AENV_TEST_HELPER").is_none() {
            eprintln!("skipped: only of use to the test that runs it");
            return;
        }
        let path = docker_config_path(None).unwrap();
        let found = from_docker(Some(&path), "good").await;
        assert_eq!((found.auth, found.note), (RegistryAuth::Basic("u".into(), "s".into()), None));
        let found = from_docker(Some(&path), "none").await;
        assert_eq!((found.auth, found.note), (RegistryAuth::Anonymous, None));
        let found = from_docker(Some(&path), "bad").await;
        assert_eq!(found.auth, RegistryAuth::Anonymous);
        assert!(found.note.unwrap().contains("broken"), "the note tells what failed");
    }

    #[tokio::test]
    async fn no_configuration_means_anonymous() {
        let dir = tempfile::tempdir().unwrap();
        let found = from_docker(Some(&dir.path().join("config.json")), "x").await;
        assert_eq!((found.auth, found.note), (RegistryAuth::Anonymous, None));
    }
}
