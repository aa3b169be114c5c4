//! Which server to speak to and with which key: the credentials file, and the variables that override it.

use std::env;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
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

/// The profile that is kept in the credentials file itself.
pub(crate) const DEFAULT_PROFILE: &str = "default";

/// What the process's environment and command line say about credentials, read once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Surroundings {
    /// `AENV_SERVER`.
    server: Option<String>,
    /// `AENV_API_KEY`.
    api_key: Option<String>,
    /// `--profile`, else `AENV_PROFILE`.
    profile: Option<String>,
    /// Where the user's configuration lives, if the user has a place.
    config_dir: Option<PathBuf>,
}

/// A profile that is stored.
#[derive(Debug)]
pub(crate) struct Profile {
    pub(crate) name: String,
    pub(crate) credentials: Result<Credentials, CredentialsError>,
}

/// There are no credentials to be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CredentialsError {
    #[error("no API key: there is no credentials file at {}; run `aenv auth`, or set AENV_API_KEY", path.display())]
    Missing { path: PathBuf },
    #[error("there is no profile {name}; `aenv auth --profile {name}` makes it")]
    NoProfile { name: String },
    #[error("{name:?} is not the name of a profile: expected letters, digits, '-' and '_', at most 64")]
    ProfileName { name: String },
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
    /// Reads the process's environment; `profile` is what the command line says. Blank values count as unset.
    ///
    /// A profile on the command line is meant as it is: variables that name another server or key do not count then.
    pub(crate) fn of_process(profile: Option<String>) -> Self {
        let text = |name| env::var(name).ok().map(|v: String| v.trim().to_owned()).filter(|v| !v.is_empty());
        let home = || env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        let config_dir = if cfg!(target_os = "macos") {
            home().map(|home| home.join("Library/Application Support"))
        } else {
            let configured = env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
            configured.or_else(|| home().map(|home| home.join(".config")))
        };
        let (server, api_key) = match profile {
            Some(_) => (None, None),
            None => (text("AENV_SERVER"), text("AENV_API_KEY")),
        };
        Self { server, api_key, profile: profile.or_else(|| text("AENV_PROFILE")), config_dir }
    }

    /// The profile to use: the one asked for, else the one chosen, else the default.
    pub(crate) fn profile(&self) -> Result<String, CredentialsError> {
        if let Some(name) = &self.profile {
            return Ok(name.clone());
        }
        let path = self.dir()?.join("profile");
        match fs::read_to_string(&path) {
            Ok(name) if !name.trim().is_empty() => Ok(name.trim().to_owned()),
            Ok(_) => Ok(DEFAULT_PROFILE.to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(DEFAULT_PROFILE.to_owned()),
            Err(source) => Err(CredentialsError::Read { path, source }),
        }
    }

    /// Where the credentials of the profile to use are.
    pub(crate) fn credentials_path(&self) -> Result<PathBuf, CredentialsError> {
        self.path_of(&self.profile()?)
    }

    fn dir(&self) -> Result<PathBuf, CredentialsError> {
        Ok(self.config_dir.as_deref().ok_or(CredentialsError::NoHome)?.join("aenv"))
    }

    fn path_of(&self, name: &str) -> Result<PathBuf, CredentialsError> {
        let dir = self.dir()?;
        if name == DEFAULT_PROFILE {
            return Ok(dir.join("credentials"));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
            return Err(CredentialsError::ProfileName { name: name.to_owned() });
        }
        Ok(dir.join("profiles").join(name))
    }

    /// All that are stored: the default first, then by name.
    pub(crate) fn profiles(&self) -> Result<Vec<Profile>, CredentialsError> {
        let dir = self.dir()?.join("profiles");
        let mut names = match fs::read_dir(&dir) {
            Ok(entries) => entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(source) => return Err(CredentialsError::Read { path: dir, source }),
        };
        names.sort();
        let all = [DEFAULT_PROFILE.to_owned()].into_iter().chain(names);
        let read = |name: String| {
            let path = self.path_of(&name).ok()?;
            let credentials = Credentials::read(&path);
            let is_there = !matches!(credentials, Err(CredentialsError::Missing { .. }));
            is_there.then_some(Profile { name, credentials })
        };
        Ok(all.filter_map(read).collect())
    }

    /// Uses a profile from now on. Errors: there is none of that name.
    pub(crate) fn choose(&self, name: &str) -> Result<(), CredentialsError> {
        if name != DEFAULT_PROFILE && !self.path_of(name)?.is_file() {
            return Err(CredentialsError::NoProfile { name: name.to_owned() });
        }
        write_private(&self.dir()?.join("profile"), &format!("{name}\n"))
    }

    /// Forgets a profile; if it was chosen, the default is. Errors: there is none of that name.
    pub(crate) fn delete(&self, name: &str) -> Result<(), CredentialsError> {
        let path = self.path_of(name)?;
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CredentialsError::NoProfile { name: name.to_owned() });
            }
            Err(source) => return Err(CredentialsError::Write { path, source }),
        }
        let chosen = Self { profile: None, ..self.clone() }.profile()?;
        if chosen == name && name != DEFAULT_PROFILE { self.choose(DEFAULT_PROFILE) } else { Ok(()) }
    }

    /// The credentials to use: each variable beats the file's entry; with a key from the environment, the file may be
    /// absent.
    pub(crate) fn credentials(self) -> Result<Credentials, CredentialsError> {
        if let (Some(url), Some(api_key)) = (&self.server, &self.api_key) {
            return Ok(Credentials { url: url.clone(), api_key: api_key.clone() });
        }
        let stored = match self.stored() {
            Ok(stored) => stored,
            Err(CredentialsError::Missing { .. } | CredentialsError::NoHome) if self.api_key.is_some() => {
                Credentials { url: DEFAULT_SERVER.to_owned(), api_key: String::new() }
            }
            Err(error) => return Err(error),
        };
        Ok(Credentials { url: self.server.unwrap_or(stored.url), api_key: self.api_key.unwrap_or(stored.api_key) })
    }

    fn stored(&self) -> Result<Credentials, CredentialsError> {
        let name = self.profile()?;
        match Credentials::read(&self.path_of(&name)?) {
            Err(CredentialsError::Missing { .. }) if name != DEFAULT_PROFILE => {
                Err(CredentialsError::NoProfile { name })
            }
            other => other,
        }
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
        let text = toml::to_string(self)
            .map_err(|error| CredentialsError::Write { path: path.to_owned(), source: io::Error::other(error) })?;
        write_private(path, &text)
    }
}

/// A file that only its owner reads, in a folder that only its owner enters.
fn write_private(path: &Path, text: &str) -> Result<(), CredentialsError> {
    let write = || -> io::Result<()> {
        let dir = path.parent().unwrap_or_else(|| Path::new("."));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        // One that was there may be wider. It is ours alone.
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
        // Created with mode 0600 beside its target, then renamed over it.
        let mut file = tempfile::NamedTempFile::new_in(dir)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        fs::File::open(dir)?.sync_all()
    };
    write().map_err(|source| CredentialsError::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
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
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
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

    #[test]
    fn profiles_are_kept_beside_the_default_and_chosen_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let of =
            |profile: Option<&str>| Surroundings { profile: profile.map(str::to_owned), ..surroundings(dir.path()) };
        let credentials = |name: &str| Credentials { url: format!("http://{name}:1"), api_key: "k".into() };
        for name in [DEFAULT_PROFILE, "work"] {
            credentials(name).write(&of(Some(name)).credentials_path().unwrap()).unwrap();
        }
        let names = || of(None).profiles().unwrap().into_iter().map(|profile| profile.name).collect::<Vec<_>>();
        assert_eq!(names(), ["default", "work"]);
        assert!(dir.path().join("aenv/credentials").is_file(), "the default's place is the contract's");
        assert_eq!(of(None).credentials().unwrap(), credentials("default"));
        assert_eq!(of(Some("work")).credentials().unwrap(), credentials("work"));
        of(None).choose("work").unwrap();
        assert_eq!(of(None).credentials().unwrap(), credentials("work"));
        assert_eq!(of(Some("default")).credentials().unwrap(), credentials("default"));
        assert!(of(None).choose("home").unwrap_err().to_string().contains("aenv auth --profile home"));
        assert!(of(Some("home")).credentials().unwrap_err().to_string().contains("there is no profile home"));
        assert!(of(Some("../x")).credentials().unwrap_err().to_string().contains("not the name of a profile"));
        of(None).delete("work").unwrap();
        assert_eq!(of(None).credentials().unwrap(), credentials("default"), "what was chosen is gone");
        assert!(of(None).delete("work").is_err());
        assert_eq!(names(), ["default"]);
    }
}
