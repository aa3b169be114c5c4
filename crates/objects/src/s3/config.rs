//! Where a bucket is, and who we are there.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AwsCredential};
use object_store::{BackoffConfig, ClientOptions, RetryConfig, StaticCredentialProvider};

use super::process::CredentialProcess;
use crate::key::{Key, ParseKeyError};

const USER_AGENT: &str = concat!("aenv/", env!("CARGO_PKG_VERSION"));

/// A bucket of an S3-compatible service.
#[derive(Debug, Clone)]
pub struct S3Config {
    /// `https://HOST[:PORT]`, or `http` for one nearby.
    pub endpoint: String,
    /// The bucket.
    pub bucket: String,
    /// Its region, which is part of every signature; services that have none take any.
    pub region: String,
    /// The folder that all keys are in; empty for none.
    pub prefix: String,
    /// Who we are.
    pub credentials: S3Credentials,
    /// Where in a URL the bucket is.
    pub addressing: Addressing,
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Longest time of one request, its body included.
    pub timeout: Duration,
    /// How long a request that fails is repeated.
    pub patience: Duration,
}

impl S3Config {
    /// A bucket with the usual patience.
    #[must_use]
    pub fn new(endpoint: impl Into<String>, region: impl Into<String>, bucket: impl Into<String>) -> Self {
        Self {
            endpoint: endpoint.into(),
            bucket: bucket.into(),
            region: region.into(),
            prefix: String::new(),
            credentials: S3Credentials::Anonymous,
            addressing: Addressing::Auto,
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(30),
            patience: Duration::from_secs(30),
        }
    }
}

/// Who we are to the service.
#[derive(Clone)]
pub enum S3Credentials {
    /// Nobody: requests are not signed.
    Anonymous,
    /// Keys that don't change.
    Static {
        /// The key's name.
        access_key_id: String,
        /// The key.
        secret_access_key: String,
        /// For keys that were given for a while.
        security_token: Option<String>,
    },
    /// What a command prints, as AWS's `credential_process` does. It is run without a shell, and again before its keys
    /// expire.
    Process(String),
}

impl fmt::Debug for S3Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.write_str("Anonymous"),
            Self::Static { access_key_id, .. } => write!(f, "Static({access_key_id}, …)"),
            // People write keys into its arguments.
            Self::Process(_) => f.write_str("Process(…)"),
        }
    }
}

/// Where in a URL the bucket is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Addressing {
    /// Before the host where the endpoint has it there, and for Alibaba's OSS, which wants it there; else in the path.
    #[default]
    Auto,
    /// Before the host: `https://BUCKET.HOST/KEY`.
    Virtual,
    /// In the path: `https://HOST/BUCKET/KEY`.
    Path,
}

/// The settings of a bucket make no sense.
#[derive(Debug, thiserror::Error)]
pub enum OpenS3Error {
    /// A setting that must not be empty.
    #[error("the {0} of the object store is not set")]
    Blank(&'static str),
    /// Not `http://HOST` or `https://HOST`.
    #[error("{0:?} is not the endpoint of an object store: it must be http:// or https:// and a host")]
    Endpoint(String),
    /// No folder.
    #[error("the prefix of the object store")]
    Prefix(#[from] ParseKeyError),
    /// Unbalanced quotes, or nothing.
    #[error("credential_process is not a command")]
    Process,
    /// The client refuses them.
    #[error("set up a client of the object store")]
    Client(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl S3Config {
    pub(super) fn build(&self) -> Result<(AmazonS3, Option<Key>), OpenS3Error> {
        for (what, value) in [("endpoint", &self.endpoint), ("bucket", &self.bucket), ("region", &self.region)] {
            if value.trim().is_empty() {
                return Err(OpenS3Error::Blank(what));
            }
        }
        let (endpoint, is_virtual) = self.bucket_endpoint()?;
        let prefix = match self.prefix.trim_matches('/') {
            "" => None,
            prefix => Some(prefix.parse()?),
        };
        let agent = USER_AGENT.parse().map_err(|error| OpenS3Error::Client(Box::new(error)))?;
        let client = ClientOptions::new()
            .with_user_agent(agent)
            .with_allow_http(true)
            .with_connect_timeout(self.connect_timeout)
            .with_timeout(self.timeout);
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(50),
                max_backoff: Duration::from_secs(2),
                base: 2.0,
            },
            max_retries: usize::MAX, // the time ends them
            retry_timeout: self.patience,
        };
        let builder = AmazonS3Builder::new()
            .with_bucket_name(&self.bucket)
            .with_region(&self.region)
            .with_endpoint(endpoint)
            .with_virtual_hosted_style_request(is_virtual)
            .with_client_options(client)
            .with_retry(retry);
        let builder = match &self.credentials {
            S3Credentials::Anonymous => builder.with_skip_signature(true),
            S3Credentials::Static { access_key_id, secret_access_key, security_token } => {
                builder.with_credentials(Arc::new(StaticCredentialProvider::new(AwsCredential {
                    key_id: access_key_id.clone(),
                    secret_key: secret_access_key.clone(),
                    token: security_token.clone(),
                })))
            }
            S3Credentials::Process(command) => {
                let process = CredentialProcess::new(command).ok_or(OpenS3Error::Process)?;
                builder.with_credentials(Arc::new(process))
            }
        };
        let inner = builder.build().map_err(|error| OpenS3Error::Client(error.into()))?;
        Ok((inner, prefix))
    }

    /// The endpoint as the client wants it, and whether the bucket is part of it.
    fn bucket_endpoint(&self) -> Result<(String, bool), OpenS3Error> {
        let refuse = || OpenS3Error::Endpoint(self.endpoint.clone());
        let endpoint = self.endpoint.trim().trim_end_matches('/');
        let (scheme, host) = endpoint.split_once("://").ok_or_else(refuse)?;
        let bare = !host.is_empty() && !host.contains(['/', '?', '#', '@']) && !host.contains(char::is_whitespace);
        if !matches!(scheme, "http" | "https") || !bare {
            return Err(refuse());
        }
        let has_bucket = host.strip_prefix(&self.bucket).is_some_and(|rest| rest.starts_with('.'));
        let name = host.split(':').next().unwrap_or(host);
        let is_virtual = match self.addressing {
            Addressing::Auto => has_bucket || name.ends_with(".aliyuncs.com"),
            Addressing::Virtual => true,
            Addressing::Path => false,
        };
        Ok(match (is_virtual, has_bucket) {
            (true, false) => (format!("{scheme}://{}.{host}", self.bucket), true),
            (true, true) => (endpoint.to_owned(), true),
            (false, true) if self.addressing == Addressing::Path => {
                // The path names it, so the host must not.
                let host = host.strip_prefix(&format!("{}.", self.bucket)).unwrap_or(host);
                (format!("{scheme}://{host}"), false)
            }
            (false, _) => (endpoint.to_owned(), false),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(endpoint: &str, addressing: Addressing) -> Option<(String, bool)> {
        S3Config { addressing, ..S3Config::new(endpoint, "r", "b") }.bucket_endpoint().ok()
    }

    #[test]
    fn the_bucket_is_in_the_host_or_in_the_path() {
        use Addressing::{Auto, Path, Virtual};
        for (given, addressing, expected, is_virtual) in [
            ("http://localhost:9000/", Auto, "http://localhost:9000", false),
            ("https://s3.eu-west-1.amazonaws.com", Auto, "https://s3.eu-west-1.amazonaws.com", false),
            ("https://s3.eu-west-1.amazonaws.com", Virtual, "https://b.s3.eu-west-1.amazonaws.com", true),
            ("https://b.s3.x.com", Auto, "https://b.s3.x.com", true),
            ("https://b.s3.x.com", Virtual, "https://b.s3.x.com", true),
            ("https://b.s3.x.com", Path, "https://s3.x.com", false),
            ("https://bb.s3.x.com", Auto, "https://bb.s3.x.com", false),
            ("https://oss-cn-hangzhou.aliyuncs.com:443", Auto, "https://b.oss-cn-hangzhou.aliyuncs.com:443", true),
            ("https://oss-cn-hangzhou.aliyuncs.com", Path, "https://oss-cn-hangzhou.aliyuncs.com", false),
        ] {
            assert_eq!(endpoint(given, addressing), Some((expected.to_owned(), is_virtual)), "{given} {addressing:?}");
        }
        for bad in ["localhost:9000", "ftp://x", "https://", "https://x/path", "https://u@x", "https://x y"] {
            assert_eq!(endpoint(bad, Auto), None, "{bad}");
        }
    }

    #[test]
    fn settings_that_make_no_sense_are_told_at_once() {
        let config = S3Config::new("http://localhost:1", "r", "b");
        let told = |config: S3Config| config.build().unwrap_err().to_string();
        assert_eq!(
            told(S3Config { region: " ".into(), ..config.clone() }),
            "the region of the object store is not set"
        );
        assert!(told(S3Config { prefix: "a//b".into(), ..config.clone() }).contains("prefix"));
        for command in ["", "a 'b"] {
            let credentials = S3Credentials::Process(command.into());
            assert!(told(S3Config { credentials, ..config.clone() }).contains("credential_process"));
        }
        let debug = format!(
            "{:?}",
            S3Credentials::Static {
                access_key_id: "id".into(),
                secret_access_key: "secret".into(),
                security_token: Some("secret".into()),
            }
        );
        assert!(debug.contains("id") && !debug.contains("secret"));
    }
}
