//! Who we are to a registry.

mod docker;
mod file;

use std::fmt;
use std::io;
use std::sync::Arc;

pub use self::docker::DockerConfig;
pub use self::file::CredentialFile;

/// What a registry knows us by.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// Nobody.
    Anonymous,
    /// A user and a password or access token; traded for a bearer token where the registry hands them out.
    Basic {
        /// The user's name.
        username: String,
        /// The password or access token.
        password: String,
    },
    /// A bearer token to use as it is.
    Bearer(String),
    /// A token that is good for one thing, to be traded for a bearer token: what `docker login` keeps for some
    /// registries.
    Identity(String),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.write_str("Anonymous"),
            Self::Basic { username, .. } => write!(f, "Basic({username}, …)"),
            Self::Bearer(_) => f.write_str("Bearer(…)"),
            Self::Identity(_) => f.write_str("Identity(…)"),
        }
    }
}

/// Where credentials are looked up. Asked again whenever the registry refuses what it got, so that changed ones count.
pub trait CredentialSource: fmt::Debug + Send + Sync {
    /// Credentials for the blobs below `repo_blob_url`; anonymous if there are none for them. May block.
    ///
    /// Errors: they can't be looked up. Then the registry is tried without.
    fn credentials(&self, repo_blob_url: &str) -> io::Result<Credentials>;
}

/// The same for every registry.
impl CredentialSource for Credentials {
    fn credentials(&self, _: &str) -> io::Result<Credentials> {
        Ok(self.clone())
    }
}

/// The first that has any.
impl CredentialSource for Vec<Arc<dyn CredentialSource>> {
    fn credentials(&self, repo_blob_url: &str) -> io::Result<Credentials> {
        for source in self {
            match source.credentials(repo_blob_url)? {
                Credentials::Anonymous => {}
                found => return Ok(found),
            }
        }
        Ok(Credentials::Anonymous)
    }
}

/// What a blob URL is matched by: host and path, without the parts that all of them have. `None` if it is no URL.
fn host_and_repository(repo_blob_url: &str) -> Option<(String, String)> {
    let url = reqwest::Url::parse(repo_blob_url.trim_end_matches('/')).ok()?;
    let host = match (url.host_str()?, url.port()) {
        (host, Some(port)) => format!("{host}:{port}"),
        (host, None) => host.to_owned(),
    };
    let path = url.path().trim_matches('/');
    let path = path.strip_prefix("v2/").unwrap_or(path);
    Some((host, path.strip_suffix("/blobs").unwrap_or(path).to_owned()))
}

/// Docker Hub goes by several names, and its credentials are filed under any of them.
fn is_docker_hub(host: &str) -> bool {
    matches!(host, "docker.io" | "index.docker.io" | "registry-1.docker.io")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blob_url_is_taken_apart() {
        for (url, host, repository) in [
            ("https://a.io/v2/x/y/blobs", "a.io", "x/y"),
            ("http://localhost:5000/v2/x/blobs/", "localhost:5000", "x"),
            ("https://a.io:8443/v2/v2/blobs/blobs", "a.io:8443", "v2/blobs"),
            ("s3://bucket/some/key", "bucket", "some/key"),
        ] {
            assert_eq!(host_and_repository(url).unwrap(), (host.to_owned(), repository.to_owned()), "{url}");
        }
        assert!(host_and_repository("no url").is_none());
    }

    #[test]
    fn of_several_sources_the_first_that_has_any_counts() {
        #[derive(Debug)]
        struct Broken;
        impl CredentialSource for Broken {
            fn credentials(&self, _: &str) -> io::Result<Credentials> {
                Err(io::Error::other("broken"))
            }
        }
        let token: Arc<dyn CredentialSource> = Arc::new(Credentials::Bearer("t".into()));
        let nobody: Arc<dyn CredentialSource> = Arc::new(Credentials::Anonymous);
        let found = |sources: Vec<Arc<dyn CredentialSource>>| sources.credentials("https://a.io/v2/x/blobs");
        assert_eq!(
            found(vec![Arc::clone(&nobody), Arc::clone(&token), Arc::new(Broken)]).unwrap(),
            Credentials::Bearer("t".into())
        );
        assert_eq!(found(vec![nobody]).unwrap(), Credentials::Anonymous);
        assert!(found(vec![Arc::new(Broken), token]).is_err(), "going on would hide what is wrong");
    }
}
