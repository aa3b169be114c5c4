//! What credentials are traded for: tokens, which expire.

use std::fmt;
use std::io;
use std::sync::Arc;

use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use reqwest::RequestBuilder;
use tokio::sync::Mutex;

use super::error::FetchProblem;
use super::token::exchange_identity;
use super::{BlobUrl, RegistryOptions};
use crate::credentials::{CredentialSource, Credentials};

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
    /// Why the credentials for a better one could not be had.
    pub(super) lacking: Option<String>,
}

/// The current pass to one repository, renewed by one request for all that were refused.
pub(super) struct Auth {
    credentials: Arc<dyn CredentialSource>,
    repo_blob_url: String,
    reference: Reference,
    client: Client,
    /// For what `client` can't do.
    http: reqwest::Client,
    plain: bool,
    pass: Mutex<Pass>,
}

impl Auth {
    pub(super) fn new(
        url: &BlobUrl,
        credentials: Arc<dyn CredentialSource>,
        options: &RegistryOptions,
        http: reqwest::Client,
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
            http,
            plain: url.plain,
            pass: Mutex::new(Pass { proof: Proof::Nothing, renewals: 0, lacking: None }),
        })
    }

    pub(super) async fn pass(&self) -> Pass {
        self.pass.lock().await.clone()
    }

    /// The pass to use after `refused` was; asks for a new one only if nobody else has since.
    pub(super) async fn renew(&self, refused: &Pass) -> Result<Pass, FetchProblem> {
        let mut pass = self.pass.lock().await;
        if pass.renewals == refused.renewals {
            let (proof, lacking) = self.prove().await?;
            *pass = Pass { proof, renewals: pass.renewals + 1, lacking };
        }
        Ok(pass.clone())
    }

    /// A proof from what the credentials are now. What anybody may read stays readable when they can't be looked up: then
    /// it is tried without, and the reason is given along.
    async fn prove(&self) -> Result<(Proof, Option<String>), FetchProblem> {
        let (source, url) = (Arc::clone(&self.credentials), self.repo_blob_url.clone());
        let found = tokio::task::spawn_blocking(move || source.credentials(&url)).await;
        let (credentials, lacking) = match found.map_err(io::Error::other).flatten() {
            Ok(credentials) => (credentials, None),
            Err(error) => {
                tracing::warn!(url = self.repo_blob_url, %error, "looking up credentials failed, going on without");
                (Credentials::Anonymous, Some(error.to_string()))
            }
        };
        match self.trade(credentials).await {
            Ok(proof) => Ok((proof, lacking)),
            Err(problem) => Err(lacking.map_or(problem, |why| FetchProblem::Credentials(io::Error::other(why)))),
        }
    }

    async fn trade(&self, credentials: Credentials) -> Result<Proof, FetchProblem> {
        let auth = match &credentials {
            Credentials::Anonymous => RegistryAuth::Anonymous,
            Credentials::Basic { username, password } => RegistryAuth::Basic(username.clone(), password.clone()),
            Credentials::Bearer(token) => return Ok(Proof::Bearer(token.clone())),
            Credentials::Identity(identity) => {
                let scheme = if self.plain { "http" } else { "https" };
                let registry = format!("{scheme}://{}", self.reference.registry());
                let traded = exchange_identity(&self.http, &registry, self.reference.repository(), identity).await;
                let token = traded.map_err(FetchProblem::Identity)?;
                return Ok(token.map_or(Proof::Nothing, Proof::Bearer));
            }
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
