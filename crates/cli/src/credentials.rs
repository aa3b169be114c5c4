//! Which server to speak to and with which key: the credentials file, and the variables that override it.

use std::env;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The server that a fresh installation listens as.
pub(crate) const DEFAULT_SERVER: &str = "http://localhost:8000";

/// A server's URL and a key it knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Credentials {
    pub(crate) url: String,
    pub(crate) api_key: String,
}

/// What the process's environment says about credentials, read once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Surroundings {
    /// `AENV_SERVER`.
    server: Option<String>,
    /// `AENV_API_KEY`.
    api_key: Option<String>,
    /// Where the user's configuration lives, if the user has a place.
    config_dir: Option<PathBuf>,
}

/// There are no credentials to be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CredentialsError {
    #[error("no API key: there is no credentials file at {}; run `aenv auth`, or set AENV_API_KEY", path.display())]
    Missing { path: PathBuf },
    #[error("no API key: neither HOME nor XDG_CONFIG_HOME is set to look for credentials in; set AENV_API_KEY")]
    NoHome,
    #[error("read credentials file {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("credentials file {} is damaged; run `aenv auth` to write it anew", path.display())]
    Damaged { path: PathBuf, source: Box<toml::de::Error> },
    #[error("write credentials file {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl Surroundings {
    /// Reads the process's environment. Blank values count as unset.
    pub(crate) fn of_process() -> Self {
        let text = |name| env::var(name).ok().map(|v: String| v.trim().to_owned()).filter(|v| !v.is_empty());
        let home = || env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        let config_dir = if cfg!(target_os = "macos") {
            home().map(|home| home.join("Library/Application Support"))
        } else {
            let configured = env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
            configured.or_else(|| home().map(|home| home.join(".config")))
        };
        Self { server: text("AENV_SERVER"), api_key: text("AENV_API_KEY"), config_dir }
    }

    /// Where the credentials file is.
    pub(crate) fn credentials_path(&self) -> Result<PathBuf, CredentialsError> {
        let dir = self.config_dir.as_deref().ok_or(CredentialsError::NoHome)?;
        Ok(dir.join("aenv/credentials"))
    }

    /// The credentials to use: each variable beats the file's entry; with a key from the environment, the file may be
    /// absent.
    pub(crate) fn credentials(self) -> Result<Credentials, CredentialsError> {
        if let (Some(url), Some(api_key)) = (&self.server, &self.api_key) {
            return Ok(Credentials { url: url.clone(), api_key: api_key.clone() });
        }
        let stored = match self.credentials_path().and_then(|path| Credentials::read(&path)) {
            Ok(stored) => stored,
            Err(CredentialsError::Missing { .. } | CredentialsError::NoHome) if self.api_key.is_some() => {
                Credentials { url: DEFAULT_SERVER.to_owned(), api_key: String::new() }
            }
            Err(error) => return Err(error),
        };
        Ok(Credentials { url: self.server.unwrap_or(stored.url), api_key: self.api_key.unwrap_or(stored.api_key) })
    }
}

impl Credentials {
    fn read(path: &Path) -> Result<Self, CredentialsError> {
        let text = fs::read_to_string(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => CredentialsError::Missing { path: path.to_owned() },
            _ => CredentialsError::Read { path: path.to_owned(), source },
        })?;
        toml::from_str(&text)
            .map_err(|source| CredentialsError::Damaged { path: path.to_owned(), source: Box::new(source) })
    }

    /// Writes the file for its owner's eyes only, from its first byte on, and whole or not at all. Makes its folder.
    pub(crate) fn write(&self, path: &Path) -> Result<(), CredentialsError> {
        let refuse = |source| CredentialsError::Write { path: path.to_owned(), source };
        let dir = path.parent().unwrap_or_else(|| Path::new("."));
        fs::create_dir_all(dir).map_err(refuse)?;
        // Created with mode 0600 beside its target, then renamed over it.
        let mut file = tempfile::NamedTempFile::new_in(dir).map_err(refuse)?;
        let text = toml::to_string(self).map_err(|error| refuse(io::Error::other(error)))?;
        file.write_all(text.as_bytes()).map_err(refuse)?;
        file.as_file().sync_all().map_err(refuse)?;
        file.persist(path).map_err(|error| refuse(error.error))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn surroundings(dir: &Path) -> Surroundings {
        Surroundings { config_dir: Some(dir.to_owned()), ..Default::default() }
    }

    fn stored() -> Credentials {
        Credentials { url: "http://stored:1".into(), api_key: "e2b_stored".into() }
    }

    #[test]
    fn credentials_read_back_and_only_their_owner_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = surroundings(dir.path()).credentials_path().unwrap();
        stored().write(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_to_string(&path).unwrap(), "url = \"http://stored:1\"\napi_key = \"e2b_stored\"\n");
        assert_eq!(surroundings(dir.path()).credentials().unwrap(), stored());
    }

    #[test]
    fn writing_again_narrows_a_file_that_others_could_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("credentials");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        stored().write(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn variables_beat_the_file_one_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let place = surroundings(dir.path());
        stored().write(&place.credentials_path().unwrap()).unwrap();
        let server = Surroundings { server: Some("http://env".into()), ..place.clone() }.credentials().unwrap();
        assert_eq!((server.url.as_str(), server.api_key.as_str()), ("http://env", "e2b_stored"));
        let key = Surroundings { api_key: Some("k".into()), ..place }.credentials().unwrap();
        assert_eq!((key.url.as_str(), key.api_key.as_str()), ("http://stored:1", "k"));
    }

    #[test]
    fn a_key_alone_is_enough() {
        let credentials = Surroundings { api_key: Some("k".into()), ..Default::default() }.credentials().unwrap();
        assert_eq!(credentials, Credentials { url: DEFAULT_SERVER.into(), api_key: "k".into() });
    }

    #[test]
    fn without_credentials_the_way_to_get_some_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = surroundings(dir.path()).credentials().unwrap_err().to_string();
        assert!(error.contains("aenv auth") && error.contains("aenv/credentials"), "{error}");
        let path = surroundings(dir.path()).credentials_path().unwrap();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "url = 3").unwrap();
        let error = surroundings(dir.path()).credentials().unwrap_err().to_string();
        assert!(error.contains("damaged"), "{error}");
    }
}
