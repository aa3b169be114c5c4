//! Images in registries, over the OCI distribution protocol.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Once;
use std::time::{Duration, Instant};

use backon::{ExponentialBuilder, Retryable};
use futures::StreamExt;
use oci_client::client::{ClientConfig, ClientProtocol, LayerDescriptor};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use tokio::io::AsyncWriteExt;

use super::manifest::{ACCEPTED, Descriptor, Manifest, choose, invalid};
use super::token::{self, http_client};
use super::{Blob, MAX_METADATA, Resolved, assemble};
use crate::credentials::Found;
use crate::error::ImportError;

/// A registry that accepts no connection in this time won't.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence in the middle of a transfer.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Pauses between attempts double from the first to the second of these, with jitter.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(8));

/// A client of one registry for one image, with one set of credentials. Nothing is shared between imports: what one
/// caller may see, another may not.
pub(crate) struct Registry {
    client: Client,
    reference: Reference,
    found: Found,
    plain: bool,
    patience: Duration,
}

impl Registry {
    /// `plain_http` lists hosts (with their ports) that speak no TLS; loopback addresses never need to be listed.
    /// `patience` bounds how long a failing request is repeated.
    pub(crate) fn new(
        reference: Reference,
        found: Found,
        plain_http: &[String],
        patience: Duration,
    ) -> Result<Self, ImportError> {
        use_ring();
        let host = reference.registry();
        let plain = is_loopback(host) || plain_http.iter().any(|known| known == host);
        let config = ClientConfig {
            protocol: if plain { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(CONNECT_TIMEOUT),
            read_timeout: Some(READ_TIMEOUT),
            user_agent: token::USER_AGENT,
            ..ClientConfig::default()
        };
        let client = Client::try_from(config)
            .map_err(|source| ImportError::Unreachable { registry: host.to_owned(), source: Box::new(source) })?;
        Ok(Self { client, reference, found, plain, patience })
    }

    /// Finds the image, and of several platforms' this machine's.
    pub(crate) async fn resolve(&self) -> Result<Resolved, ImportError> {
        let image = self.reference.whole();
        self.retrying(|| self.authorize()).await?;
        let (mut data, mut digest) = self.retrying(|| self.manifest(&self.reference)).await?;
        if let Manifest::Index(entries) = Manifest::parse(&image, &data)? {
            let chosen = choose(&image, &entries)?;
            chosen.digest(&image)?;
            let reference = self.reference.clone_with_digest(chosen.digest);
            (data, digest) = self.retrying(|| self.manifest(&reference)).await?;
        }
        let Manifest::Image { config, layers } = Manifest::parse(&image, &data)? else {
            return Err(invalid(&image, "its index names another index".into()));
        };
        let digest = digest.parse().map_err(|error| invalid(&image, format!("its manifest: {error}")))?;
        let file = self.retrying(|| self.metadata(&config)).await?;
        assemble(&image, digest, &file, layers.into_iter().map(Blob::Remote).collect())
    }

    /// Fetches a blob to the file `to`, verified. `on_bytes` is told how much is there.
    ///
    /// Cancel safety: if dropped, `to` holds a part.
    pub(crate) async fn fetch(
        &self,
        blob: &Descriptor,
        to: &Path,
        on_bytes: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), ImportError> {
        self.retrying(|| self.fetch_once(blob, to, on_bytes)).await
    }

    /// Gets a token if the registry hands them out. Done apart from the first request, as the client would go on
    /// without a token that it was refused, and the refusal's words would be lost.
    async fn authorize(&self) -> Result<(), ImportError> {
        let auth = match &self.found.identity {
            Some(identity) => match self.exchange(identity).await? {
                Some(token) => RegistryAuth::Bearer(token),
                None => RegistryAuth::Anonymous,
            },
            None => self.found.auth.clone(),
        };
        let done = self.client.auth(&self.reference, &auth, RegistryOperation::Pull).await;
        done.map(|_| ()).map_err(|error| self.explain(error))
    }

    /// Trades an identity token for an access token, which the client can't. `None` if the registry wants none.
    async fn exchange(&self, identity: &str) -> Result<Option<String>, ImportError> {
        let client = http_client(CONNECT_TIMEOUT, READ_TIMEOUT).map_err(|error| self.explain(error.into()))?;
        let scheme = if self.plain { "http" } else { "https" };
        let url = format!("{scheme}://{}/v2/", self.reference.resolve_registry());
        token::exchange(&client, &url, self.reference.repository(), identity).await.map_err(|error| match error {
            token::ExchangeError::Request(error) => self.explain(error.into()),
            token::ExchangeError::Refused(words) => self.explain(OciDistributionError::AuthenticationFailure(words)),
        })
    }

    async fn manifest(&self, reference: &Reference) -> Result<(Vec<u8>, String), ImportError> {
        let pulled = self.client.pull_manifest_raw(reference, &self.found.auth, ACCEPTED).await;
        let (data, digest) = pulled.map_err(|error| self.explain(error))?;
        if data.len() as u64 > MAX_METADATA {
            return Err(invalid(&self.reference.whole(), format!("its manifest takes {} bytes", data.len())));
        }
        Ok((data.to_vec(), digest))
    }

    async fn metadata(&self, blob: &Descriptor) -> Result<Vec<u8>, ImportError> {
        let mut stream = self.open(blob).await?;
        let mut data = Vec::new();
        while let Some(piece) = stream.next().await {
            data.extend_from_slice(&piece.map_err(|error| self.explain(error.into()))?);
            if data.len() as u64 > blob.size {
                return Err(self.wrong_length(blob));
            }
        }
        Ok(data)
    }

    async fn fetch_once(
        &self,
        blob: &Descriptor,
        to: &Path,
        on_bytes: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), ImportError> {
        let cannot_write = |source| ImportError::io("write", to, source);
        on_bytes(0);
        let mut file = tokio::fs::File::create(to).await.map_err(cannot_write)?;
        let mut stream = self.open(blob).await?;
        let mut done = 0;
        // The stream verifies the digest and fails at its end if it differs.
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(|error| self.explain(error.into()))?;
            done += piece.len() as u64;
            if done > blob.size {
                return Err(self.wrong_length(blob));
            }
            file.write_all(&piece).await.map_err(cannot_write)?;
            on_bytes(done);
        }
        file.flush().await.map_err(cannot_write)?;
        if done == blob.size { Ok(()) } else { Err(self.wrong_length(blob)) }
    }

    async fn open(&self, blob: &Descriptor) -> Result<oci_client::client::SizedStream, ImportError> {
        // A manifest may name other places for a blob (Windows' base layers do). Those are nobody's choice but its
        // author's, so they aren't asked.
        let layer = LayerDescriptor { digest: &blob.digest, urls: &None };
        self.client.pull_blob_stream(&self.reference, &layer).await.map_err(|error| self.explain(error))
    }

    fn wrong_length(&self, blob: &Descriptor) -> ImportError {
        let problem = format!("its blob {} is not the {} bytes long that the manifest says", blob.digest, blob.size);
        invalid(&self.reference.whole(), problem)
    }

    /// Repeats what fails for a passing reason.
    async fn retrying<T, F: Future<Output = Result<T, ImportError>>>(
        &self,
        attempt: impl FnMut() -> F,
    ) -> Result<T, ImportError> {
        let deadline = Instant::now() + self.patience;
        let pauses = ExponentialBuilder::default()
            .with_min_delay(PAUSES.0)
            .with_max_delay(PAUSES.1)
            .with_jitter()
            .without_max_times()
            .with_total_delay(Some(self.patience));
        attempt
            .retry(pauses)
            .when(|error: &ImportError| error.is_transient() && Instant::now() < deadline)
            .notify(|error, pause| {
                tracing::warn!(error = error.report(), ?pause, "registry request failed, trying again");
            })
            .await
    }

    /// What an error of the protocol means for the image, in the registry's words.
    fn explain(&self, error: OciDistributionError) -> ImportError {
        let image = self.reference.whole();
        let registry = self.reference.registry().to_owned();
        let not_found = |words| ImportError::NotFound { image: image.clone(), words };
        let unauthorized = |words: String| {
            let words = match &self.found.note {
                Some(note) => format!("{words} ({note})"),
                None => words,
            };
            ImportError::Unauthorized { image: image.clone(), words }
        };
        let failed = |words, transient| ImportError::Registry { registry: registry.clone(), words, transient };
        match error {
            OciDistributionError::RegistryError { envelope, .. } => {
                let words = words_of(&envelope.errors);
                match envelope.errors.first().map(|error| &error.code) {
                    Some(
                        OciErrorCode::ManifestUnknown
                        | OciErrorCode::NameUnknown
                        | OciErrorCode::NotFound
                        | OciErrorCode::BlobUnknown
                        | OciErrorCode::ManifestBlobUnknown,
                    ) => not_found(words),
                    Some(OciErrorCode::Unauthorized | OciErrorCode::Denied) => unauthorized(words),
                    Some(OciErrorCode::Toomanyrequests) => failed(words, true),
                    _ => failed(words, false),
                }
            }
            OciDistributionError::ServerError { code, message, .. } => {
                let words = format!("HTTP status {code}: {}", message.trim());
                match code {
                    404 => not_found(words),
                    401 | 403 => unauthorized(words),
                    _ => failed(words, code >= 500 || matches!(code, 408 | 429)),
                }
            }
            OciDistributionError::UnauthorizedError { .. } => {
                unauthorized("the registry wants other credentials, or has no such repository".to_owned())
            }
            OciDistributionError::AuthenticationFailure(words) => unauthorized(token_words(&words)),
            OciDistributionError::ImageManifestNotFoundError(words) => not_found(words),
            OciDistributionError::DigestError(error) => invalid(&image, error.to_string()),
            // The stream of a blob wraps what happened to it.
            OciDistributionError::IoError(error) => match error.downcast::<oci_client::errors::DigestError>() {
                Ok(error) => invalid(&image, error.to_string()),
                Err(error) => {
                    ImportError::Unreachable { registry, source: Box::new(OciDistributionError::IoError(error)) }
                }
            },
            error @ OciDistributionError::RequestError(_) => {
                ImportError::Unreachable { registry, source: Box::new(error) }
            }
            other => failed(other.to_string(), false),
        }
    }
}

/// The registry's errors as `code: message`, the way it writes its codes.
fn words_of(errors: &[oci_client::errors::OciError]) -> String {
    let one = |error: &oci_client::errors::OciError| {
        let code = serde_json::to_value(&error.code).ok();
        let code = code.as_ref().and_then(serde_json::Value::as_str).unwrap_or("UNKNOWN");
        let detail = if error.detail.is_null() { String::new() } else { format!(" {}", error.detail) };
        format!("{code}: {}{detail}", error.message)
    };
    errors.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// What a token server says: an envelope like a registry's, or anything.
fn token_words(body: &str) -> String {
    match serde_json::from_str::<oci_client::errors::OciEnvelope>(body) {
        Ok(envelope) => words_of(&envelope.errors),
        Err(_) => body.trim().chars().take(500).collect(),
    }
}

/// Whether a host is this machine, where nobody listens in.
fn is_loopback(registry: &str) -> bool {
    let host = match registry.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => registry,
    };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Chooses the TLS implementation. The HTTP client takes the process's default; if the program has set one, it stays.
fn use_ring() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for host in ["localhost", "localhost:5000", "127.0.0.1:80", "127.1.2.3"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["docker.io", "localhost.example.org", "128.0.0.1:5000", "10.0.0.1"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
