//! Who we are to a registry: credentials, and the tokens they are traded for.

use std::fmt;
use std::io;
use std::sync::Arc;

use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use reqwest::RequestBuilder;
use tokio::sync::Mutex;

use super::error::FetchProblem;
use super::{BlobUrl, RegistryOptions};

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
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.write_str("Anonymous"),
            Self::Basic { username, .. } => write!(f, "Basic({username}, …)"),
            Self::Bearer(_) => f.write_str("Bearer(…)"),
        }
    }
}

/// Where credentials are looked up. Asked again whenever the registry refuses what it got, so that changed ones count.
pub trait CredentialSource: fmt::Debug + Send + Sync {
    /// Credentials for the blobs below `repo_blob_url`. May block.
    fn credentials(&self, repo_blob_url: &str) -> io::Result<Credentials>;
}

/// The same for every registry.
impl CredentialSource for Credentials {
    fn credentials(&self, _: &str) -> io::Result<Credentials> {
        Ok(self.clone())
    }
}

/// What is sent along with a request.
#[derive(Clone)]
pub(super) enum Proof {
    Nothing,
    Basic { username: String, password: String },
    Bearer(String),
}

impl Proof {
    pub(super) fn put_on(&self, request: RequestBuilder) -> RequestBuilder {
        match self {
            Self::Nothing => request,
            Self::Basic { username, password } => request.basic_auth(username, Some(password)),
            Self::Bearer(token) => request.bearer_auth(token),
        }
    }
}

/// A proof and its age, by which a request that was refused tells which one it had.
#[derive(Clone)]
pub(super) struct Pass {
    pub(super) proof: Proof,
    renewals: u64,
}

/// The current pass to one repository, renewed by one request for all that were refused.
pub(super) struct Auth {
    credentials: Arc<dyn CredentialSource>,
    repo_blob_url: String,
    reference: Reference,
    client: Client,
    pass: Mutex<Pass>,
}

impl Auth {
    pub(super) fn new(
        url: &BlobUrl,
        credentials: Arc<dyn CredentialSource>,
        options: &RegistryOptions,
    ) -> Result<Self, Box<oci_client::errors::OciDistributionError>> {
        let config = ClientConfig {
            protocol: if url.plain { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(options.connect_timeout),
            read_timeout: Some(options.read_timeout),
            user_agent: super::USER_AGENT,
            ..ClientConfig::default()
        };
        Ok(Self {
            credentials,
            repo_blob_url: url.text.clone(),
            reference: Reference::with_tag(url.host.clone(), url.repository.clone(), "latest".into()),
            client: Client::try_from(config).map_err(Box::new)?,
            pass: Mutex::new(Pass { proof: Proof::Nothing, renewals: 0 }),
        })
    }

    pub(super) async fn pass(&self) -> Pass {
        self.pass.lock().await.clone()
    }

    /// The pass to use after `refused` was; asks for a new one only if nobody else has since.
    pub(super) async fn renew(&self, refused: &Pass) -> Result<Pass, FetchProblem> {
        let mut pass = self.pass.lock().await;
        if pass.renewals == refused.renewals {
            let proof = self.prove().await?;
            *pass = Pass { proof, renewals: pass.renewals + 1 };
        }
        Ok(pass.clone())
    }

    async fn prove(&self) -> Result<Proof, FetchProblem> {
        let (source, url) = (Arc::clone(&self.credentials), self.repo_blob_url.clone());
        let credentials = tokio::task::spawn_blocking(move || source.credentials(&url))
            .await
            .map_err(io::Error::other)
            .flatten()
            .map_err(FetchProblem::Credentials)?;
        let auth = match &credentials {
            Credentials::Anonymous => RegistryAuth::Anonymous,
            Credentials::Basic { username, password } => RegistryAuth::Basic(username.clone(), password.clone()),
            Credentials::Bearer(token) => return Ok(Proof::Bearer(token.clone())),
        };
        let token = self.client.auth(&self.reference, &auth, RegistryOperation::Pull).await;
        Ok(match (token.map_err(|error| FetchProblem::Token(Box::new(error)))?, credentials) {
            (Some(token), _) => Proof::Bearer(token),
            // The registry hands out no tokens.
            (None, Credentials::Basic { username, password }) => Proof::Basic { username, password },
            (None, _) => Proof::Nothing,
        })
    }
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth").field("credentials", &self.credentials).finish_non_exhaustive()
    }
}
