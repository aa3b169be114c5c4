//! Docker's `config.json`: passwords, identity tokens, and the programs that keep either.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use docker_credential::{CredentialRetrievalError, DockerCredential};

use super::{CredentialSource, Credentials, host_and_repository, is_docker_hub};

/// Longest wait for a credential helper. It may ask a remote service, never a person.
const HELPER_TIMEOUT: Duration = Duration::from_secs(30);
/// Helpers at a time. One that hangs is left behind by whoever waited; it must not gather a crowd.
const MAX_HELPERS: usize = 8;
/// What Docker files its Hub's credentials under, for historical reasons.
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

/// Docker's configuration, read anew for every look-up. Without the file there are no credentials.
#[derive(Debug)]
pub struct DockerConfig {
    path: PathBuf,
    timeout: Duration,
    helpers: Arc<AtomicUsize>,
}

impl DockerConfig {
    /// The file `path`, which need not exist.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), timeout: HELPER_TIMEOUT, helpers: Arc::default() }
    }

    /// Where Docker keeps its configuration: `$DOCKER_CONFIG/config.json`, else `~/.docker/config.json`. `None` if the
    /// environment tells neither.
    #[must_use]
    pub fn default_path() -> Option<PathBuf> {
        let folder = match std::env::var_os("DOCKER_CONFIG") {
            Some(folder) if !folder.is_empty() => folder.into(),
            _ => Path::new(&std::env::var_os("HOME")?).join(".docker"),
        };
        Some(folder.join("config.json"))
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Credentials for a registry, by its host with port. Blocks while a helper is asked, for half a minute at most.
    pub fn look_up(&self, registry: &str) -> io::Result<Credentials> {
        let key = if is_docker_hub(registry) { DOCKER_HUB_KEY } else { registry };
        let (path, key) = (self.path.clone(), key.to_owned());
        let place = Place::take(&self.helpers)?;
        let (send, receive) = mpsc::sync_channel(1);
        thread::Builder::new().name("credentials".to_owned()).spawn(move || {
            let _place = place;
            // Nobody listens any more if it took too long.
            let _ = send.send(look_up(&path, &key));
        })?;
        let words = |problem: &str| format!("no credentials from {}: {}", self.path.display(), problem.trim());
        match receive.recv_timeout(self.timeout) {
            Ok(found) => found.map_err(|error| io::Error::other(words(&error.to_string()))),
            Err(_) => {
                let problem = format!("the credential helper did not answer within {} s", self.timeout.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, words(&problem)))
            }
        }
    }
}

impl CredentialSource for DockerConfig {
    fn credentials(&self, repo_blob_url: &str) -> io::Result<Credentials> {
        match host_and_repository(repo_blob_url) {
            Some((host, _)) => self.look_up(&host),
            None => Ok(Credentials::Anonymous),
        }
    }
}

/// One of the places for helpers.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(taken: &Arc<AtomicUsize>) -> io::Result<Self> {
        let place = Self(Arc::clone(taken));
        match taken.fetch_add(1, Ordering::Relaxed) {
            before if before < MAX_HELPERS => Ok(place),
            _ => Err(io::Error::new(io::ErrorKind::ResourceBusy, "too many credential helpers hang")),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn look_up(path: &Path, key: &str) -> Result<Credentials, CredentialRetrievalError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Credentials::Anonymous),
        Err(_) => return Err(CredentialRetrievalError::ConfigReadError),
    };
    match docker_credential::get_credential_from_reader(BufReader::new(file), key) {
        Ok(DockerCredential::UsernamePassword(username, password)) => Ok(Credentials::Basic { username, password }),
        Ok(DockerCredential::IdentityToken(token)) => Ok(Credentials::Identity(token)),
        Err(CredentialRetrievalError::NoCredentialConfigured) => Ok(Credentials::Anonymous),
        // What every helper of Docker's own says, on its standard output, when it has nothing.
        Err(CredentialRetrievalError::HelperFailure { stdout, .. }) if stdout.contains("credentials not found") => {
            Ok(Credentials::Anonymous)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use base64::Engine as _;

    use super::*;

    fn config(text: &str) -> (tempfile::TempDir, DockerConfig) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, text).unwrap();
        (dir, DockerConfig::new(path))
    }

    fn basic(username: &str, password: &str) -> Credentials {
        Credentials::Basic { username: username.into(), password: password.into() }
    }

    #[test]
    fn passwords_are_found_by_host_and_dockers_old_key() {
        let auth = base64::engine::general_purpose::STANDARD.encode("me:secret:with:colons");
        let (_dir, config) = config(&format!(
            r#"{{"auths":{{"localhost:5000":{{"auth":"{auth}"}},"https://index.docker.io/v1/":{{"auth":"{auth}"}},
                "token.io":{{"identitytoken":"i"}}}}}}"#
        ));
        let me = basic("me", "secret:with:colons");
        for host in ["localhost:5000", "docker.io", "registry-1.docker.io"] {
            assert_eq!(config.look_up(host).unwrap(), me, "{host}");
        }
        assert_eq!(config.look_up("quay.io").unwrap(), Credentials::Anonymous);
        assert_eq!(config.look_up("token.io").unwrap(), Credentials::Identity("i".into()));
        assert_eq!(config.credentials("http://localhost:5000/v2/a/blobs").unwrap(), me);
        assert_eq!(config.credentials("https://registry-1.docker.io/v2/library/a/blobs").unwrap(), me);
    }

    #[test]
    fn the_file_is_read_anew_and_need_not_exist() {
        let (dir, config) = config("{}");
        assert_eq!(config.look_up("a.io").unwrap(), Credentials::Anonymous);
        std::fs::write(config.path(), r#"{"auths":{"a.io":{"username":"me","password":"p"}}}"#).unwrap();
        assert_eq!(config.look_up("a.io").unwrap(), basic("me", "p"));
        std::fs::write(config.path(), "{").unwrap();
        let error = config.look_up("a.io").unwrap_err().to_string();
        assert!(error.contains(&dir.path().display().to_string()), "{error}");
        std::fs::remove_file(config.path()).unwrap();
        assert_eq!(config.look_up("a.io").unwrap(), Credentials::Anonymous);
    }

    /// Runs the ignored test below with a `PATH` on which the helper is found: this process's own is everybody's.
    #[test]
    fn a_helper_is_asked_and_its_failure_told() {
        let (dir, config) = config(r#"{"credsStore":"x","credHelpers":{"a.io":"y"}}"#);
        let script = |name: &str, text: &str| {
            let helper = dir.path().join(name);
            std::fs::write(&helper, format!("#!/bin/sh\nread host\n{text}")).unwrap();
            std::fs::set_permissions(&helper, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        script(
            "docker-credential-x",
            "case $host in\ngood) echo '{\"Username\":\"u\",\"Secret\":\"s\"}' ;;\n\
             token) echo '{\"Username\":\"<token>\",\"Secret\":\"i\"}' ;;\n\
             none) echo 'credentials not found in native keychain'; exit 1 ;;\n\
             slow) exec sleep 2 ;;\n*) echo broken >&2; exit 1 ;;\nesac\n",
        );
        script("docker-credential-y", "echo '{\"Username\":\"y\",\"Secret\":\"'$host'\"}'\n");
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "credentials::docker::tests::with_the_helper_on_the_path", "--ignored"])
            .env("PATH", format!("{}:/usr/bin:/bin", dir.path().display()))
            .env("DOCKER_CONFIG", config.path().parent().unwrap())
            .env("AENV_TEST_HELPER", "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    #[ignore = "run by a_helper_is_asked_and_its_failure_told"]
    fn with_the_helper_on_the_path() {
        if std::env::var_os("AENV_TEST_HELPER").is_none() {
            eprintln!("skipped: only of use to the test that runs it");
            return;
        }
        let mut config = DockerConfig::new(DockerConfig::default_path().unwrap());
        assert_eq!(config.look_up("good").unwrap(), basic("u", "s"));
        assert_eq!(config.look_up("token").unwrap(), Credentials::Identity("i".into()));
        assert_eq!(config.look_up("none").unwrap(), Credentials::Anonymous);
        assert_eq!(config.look_up("a.io").unwrap(), basic("y", "a.io"));
        assert!(config.look_up("bad").unwrap_err().to_string().contains("broken"));
        config.timeout = Duration::from_millis(50);
        for _ in 0..MAX_HELPERS {
            assert_eq!(config.look_up("slow").unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
        assert_eq!(config.look_up("slow").unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        // They end after a while, and make room.
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while config.helpers.load(Ordering::Relaxed) > 0 {
            assert!(std::time::Instant::now() < deadline, "helpers that ended keep their places");
            thread::sleep(Duration::from_millis(5));
        }
    }
}
