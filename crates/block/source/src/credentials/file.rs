//! overlaybd's credential file:
//!
//! ```json
//! {"auths": {"registry.example:5000/team": {"auth": "<base64 of user:password>"},
//!            "registry.example:5000":      {"username": "…", "password": "…"}}}
//! ```
//!
//! A key is a leading part of a blob's place: the host, and as many components of the repository as it likes.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::Deserialize;

use super::{CredentialSource, Credentials, host_and_repository, is_docker_hub};

/// Longer than any list of credentials.
const MAX_SIZE: u64 = 4 << 20;
/// People write with and without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// A file of credentials, read anew for every look-up. Without the file there are none.
#[derive(Debug, Clone)]
pub struct CredentialFile {
    path: PathBuf,
}

#[derive(Deserialize)]
struct Contents {
    #[serde(default)]
    auths: HashMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    /// Docker's files, which are much alike, may have one.
    #[serde(rename = "identitytoken")]
    identity: Option<String>,
}

impl CredentialFile {
    /// The file `path`, which need not exist.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn read(&self) -> io::Result<Option<Contents>> {
        match std::fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Ok(metadata) if metadata.len() > MAX_SIZE => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "too long for a file of credentials"));
            }
            _ => {}
        }
        // What serde quotes of a file that makes no sense may be a password, so only the place is told.
        let malformed = |error: serde_json::Error| {
            let place = format!("not a file of credentials (line {}, column {})", error.line(), error.column());
            io::Error::new(io::ErrorKind::InvalidData, place)
        };
        serde_json::from_slice(&std::fs::read(&self.path)?).map(Some).map_err(malformed)
    }
}

impl CredentialSource for CredentialFile {
    fn credentials(&self, repo_blob_url: &str) -> io::Result<Credentials> {
        let told = |error: io::Error| {
            io::Error::new(error.kind(), format!("read credentials {}: {error}", self.path.display()))
        };
        let Some(contents) = self.read().map_err(told)? else { return Ok(Credentials::Anonymous) };
        let Some((host, repository)) = host_and_repository(repo_blob_url) else { return Ok(Credentials::Anonymous) };
        // Others take the first key that fits. But a JSON object has no order that survives its editors, and a key for a
        // whole host that happens to come first would hide every better one: the longest is what its author meant.
        let fitting = contents.auths.iter().filter_map(|(key, entry)| Some((fit(key, &host, &repository)?, entry)));
        match fitting.max_by_key(|(length, _)| *length) {
            Some((_, entry)) => entry.credentials().map_err(told),
            None => Ok(Credentials::Anonymous),
        }
    }
}

/// How many components of the repository `key` names, if it is a leading part of the place.
fn fit(key: &str, host: &str, repository: &str) -> Option<usize> {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let (key_host, key_path) = key.trim_end_matches('/').split_once('/').unwrap_or((key.trim_end_matches('/'), ""));
    if key_host != host && !(is_docker_hub(key_host) && is_docker_hub(host)) {
        return None;
    }
    // Docker's own files have a version of its interface here.
    if matches!(key_path, "" | "v1" | "v2") {
        return Some(0);
    }
    let mut components = repository.split('/');
    let mut length = 0;
    for part in key_path.split('/') {
        if components.next() != Some(part) {
            return None;
        }
        length += 1;
    }
    Some(length)
}

impl Entry {
    fn credentials(&self) -> io::Result<Credentials> {
        let invalid = |problem| io::Error::new(io::ErrorKind::InvalidData, problem);
        if let Some(identity) = self.identity.as_deref().filter(|identity| !identity.is_empty()) {
            return Ok(Credentials::Identity(identity.to_owned()));
        }
        if let Some(auth) = self.auth.as_deref().filter(|auth| !auth.is_empty()) {
            let text = BASE64.decode(auth).ok().and_then(|bytes| String::from_utf8(bytes).ok());
            let text = text.ok_or_else(|| invalid("an auth that fits is not base64"))?;
            let (username, password) = text.split_once(':').ok_or_else(|| invalid("an auth that fits has no colon"))?;
            return Ok(Credentials::Basic { username: username.to_owned(), password: password.to_owned() });
        }
        match (&self.username, &self.password) {
            (Some(username), Some(password)) => {
                Ok(Credentials::Basic { username: username.clone(), password: password.clone() })
            }
            _ => Ok(Credentials::Anonymous),
        }
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").field("username", &self.username).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> (tempfile::TempDir, CredentialFile) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cred.json");
        std::fs::write(&path, text).unwrap();
        (dir, CredentialFile::new(path))
    }

    fn password(file: &CredentialFile, url: &str) -> Option<String> {
        match file.credentials(url).unwrap() {
            Credentials::Basic { username, password } if username == "u" => Some(password),
            Credentials::Anonymous => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_longest_key_that_leads_to_the_blob_counts() {
        let entry = |password: &str| format!(r#"{{"username":"u","password":"{password}"}}"#);
        let (_dir, file) = file(&format!(
            r#"{{"auths":{{"a.io":{},"a.io/team/x":{},"a.io/team":{},"b.io:5000/team/":{},"https://index.docker.io/v1/":{}}}}}"#,
            entry("host"),
            entry("repo"),
            entry("team"),
            entry("b"),
            entry("hub"),
        ));
        for (url, expected) in [
            ("https://a.io/v2/other/x/blobs", Some("host")),
            ("https://a.io/v2/team/y/blobs", Some("team")),
            ("https://a.io/v2/team/x/blobs", Some("repo")),
            ("https://a.io/v2/team/x/y/blobs", Some("repo")),
            ("https://a.io/v2/teams/x/blobs", Some("host")),
            ("https://a.io:443/v2/x/blobs", Some("host")),
            ("https://a.io:444/v2/x/blobs", None),
            ("http://b.io:5000/v2/team/blobs", Some("b")),
            ("http://b.io:5000/v2/x/blobs", None),
            ("https://registry-1.docker.io/v2/library/x/blobs", Some("hub")),
            ("https://sub.a.io/v2/x/blobs", None),
        ] {
            assert_eq!(password(&file, url).as_deref(), expected, "{url}");
        }
    }

    #[test]
    fn a_password_is_written_in_either_way() {
        let url = "https://a.io/v2/x/blobs";
        for entry in [
            r#"{"auth":"dTpwOnE="}"#,
            r#"{"auth":"dTpwOnE"}"#,
            r#"{"auth":"","username":"u","password":"p:q"}"#,
            r#"{"username":"u","password":"p:q","email":"x"}"#,
        ] {
            let (_dir, file) = file(&format!(r#"{{"auths":{{"a.io":{entry}}},"more":1}}"#));
            assert_eq!(password(&file, url).as_deref(), Some("p:q"), "{entry}");
        }
        let (_dir, tokens) = file(r#"{"auths":{"a.io":{"auth":"dTo=","identitytoken":"i"}}}"#);
        assert_eq!(tokens.credentials(url).unwrap(), Credentials::Identity("i".into()));
        for entry in ["{}", r#"{"username":"u"}"#] {
            let (_dir, file) = file(&format!(r#"{{"auths":{{"a.io":{entry}}}}}"#));
            assert_eq!(file.credentials(url).unwrap(), Credentials::Anonymous, "{entry}");
        }
    }

    #[test]
    fn the_file_is_read_anew_need_not_exist_and_is_never_quoted() {
        let (_dir, file) = file("{}");
        let url = "https://a.io/v2/x/blobs";
        assert_eq!(password(&file, url), None);
        std::fs::write(file.path(), r#"{"auths":{"a.io":{"username":"u","password":"secret"}}}"#).unwrap();
        assert_eq!(password(&file, url).unwrap(), "secret");
        for text in [r#"{"auths":{"a.io":"secret"}}"#, r#"{"auths":{"a.io":{"auth":"secret!"}}}"#] {
            std::fs::write(file.path(), text).unwrap();
            let error = file.credentials(url).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            let error = error.to_string();
            assert!(error.contains("cred.json") && !error.contains("secret"), "{error}");
        }
        std::fs::remove_file(file.path()).unwrap();
        assert_eq!(password(&file, url), None);
    }
}
