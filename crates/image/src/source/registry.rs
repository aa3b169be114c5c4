//! Images in registries, over the OCI distribution protocol.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Once;
use std::time::{Duration, Instant};

use aenv_block_source::{Credentials as BlobCredentials, ExchangeError, exchange_identity};
use backon::{ExponentialBuilder, Retryable};
use futures::StreamExt;
use oci_client::client::{ClientConfig, ClientProtocol, LayerDescriptor};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use tokio::io::AsyncWriteExt;

use super::kind::{ImageKind, classify};
use super::manifest::{ACCEPTED, Descriptor, ImageManifest, MAX_NESTING, Manifest, choose, invalid};
use super::referrers::{self, Place};
use super::{Blob, Content, MAX_METADATA, Repository, Resolved, read_config};
use crate::credentials::Found;
use crate::digest::Digest;
use crate::error::ImportError;
use crate::image_config::ImageFile;

const USER_AGENT: &str = concat!("aenv/", env!("CARGO_PKG_VERSION"));
/// A registry that accepts no connection in this time won't.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence in the middle of a transfer.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Pauses between attempts to find an image double from this, with jitter: somebody waits for the answer.
const PAUSE: Duration = Duration::from_millis(500);
/// How often it is tried again to find an image.
const REPETITIONS: usize = 5;
/// Pauses between attempts to fetch a blob double from the first to the second of these, with jitter.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(8));
/// Docker Hub as images are named, and the host that serves its images.
const DOCKER_HUB: (&str, &str) = ("docker.io", "registry-1.docker.io");

/// A client of one registry for one image, with one set of credentials. Nothing is shared between imports: what one
/// caller may see, another may not.
pub(crate) struct Registry {
    client: Client,
    /// As it is named to people.
    image: String,
    /// The host as images are named.
    host: String,
    /// As it is asked for.
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
        let (image, host) = (reference.whole(), reference.registry().to_owned());
        let reference = contacted(&reference);
        let plain = is_loopback(&host) || plain_http.contains(&host);
        let config = ClientConfig {
            protocol: if plain { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(CONNECT_TIMEOUT),
            read_timeout: Some(READ_TIMEOUT),
            user_agent: USER_AGENT,
            ..ClientConfig::default()
        };
        let client = Client::try_from(config)
            .map_err(|source| ImportError::Unreachable { registry: host.clone(), source: Box::new(source) })?;
        Ok(Self { client, image, host, reference, found, plain, patience })
    }

    /// Finds the image, and of several platforms' this machine's. With `referrers`, an overlaybd image that somebody made
    /// of it and put beside it is taken instead, if there is one; how it is run, the image itself says.
    pub(crate) async fn resolve(&self, referrers: bool) -> Result<Resolved, ImportError> {
        self.repeating(|| self.authorize()).await?;
        let (manifest, digest) = self.find().await?;
        let file = self.repeating(|| self.metadata(&manifest.config)).await?;
        let file = read_config(&self.image, &file)?;
        if referrers && classify(&manifest) != ImageKind::Native {
            match self.find_native(&digest, &file).await {
                Ok(Some((content, digest))) => {
                    tracing::info!(image = self.image, %digest, "an overlaybd image refers to the image and is taken");
                    return Ok(Resolved { digest, file, content });
                }
                Ok(None) => {}
                Err(error) => {
                    let error = error.report();
                    tracing::warn!(
                        image = self.image,
                        error,
                        "looking for an overlaybd image failed, going on without"
                    );
                }
            }
        }
        let content = self.content(&manifest, &file)?;
        Ok(Resolved { digest, file, content })
    }

    /// The manifest for this machine, whatever indexes lead to it.
    async fn find(&self) -> Result<(ImageManifest, Digest), ImportError> {
        let mut reference = self.reference.clone();
        for _ in 0..=MAX_NESTING {
            match self.repeating(|| self.manifest(&reference)).await? {
                (Manifest::Image(manifest), digest) => return Ok((manifest, digest)),
                (Manifest::Index(entries), _) => {
                    let chosen = choose(&self.image, &entries)?;
                    chosen.digest(&self.image)?;
                    reference = self.reference.clone_with_digest(chosen.digest);
                }
            }
        }
        Err(invalid(&self.image, "its indexes are nested too deeply".into()))
    }

    /// The overlaybd image that refers to the manifest `digest`, if there is one.
    async fn find_native(&self, digest: &Digest, file: &ImageFile) -> Result<Option<(Content, Digest)>, ImportError> {
        let entries = match self.repeating(|| self.referrers(digest)).await? {
            Some(entries) => entries,
            None => self.tagged_referrers(digest).await?,
        };
        let Some(chosen) = referrers::choose(&entries) else { return Ok(None) };
        chosen.digest(&self.image)?;
        let reference = self.reference.clone_with_digest(chosen.digest.clone());
        let unusable = |problem: &str| Err(invalid(&self.image, format!("its referrer {} {problem}", chosen.digest)));
        match self.repeating(|| self.manifest(&reference)).await? {
            (Manifest::Image(manifest), digest) => match classify(&manifest) {
                ImageKind::Native => Ok(Some((self.content(&manifest, file)?, digest))),
                ImageKind::Unsupported(problem) => unusable(&format!("can't be used: {problem}")),
                ImageKind::Standard | ImageKind::Empty => unusable("is no overlaybd image"),
            },
            (Manifest::Index(_), _) => unusable("is an index"),
        }
    }

    /// What refers to the manifest `digest`, as the registry's interface for it says; `None` if it has none.
    async fn referrers(&self, digest: &Digest) -> Result<Option<Vec<Descriptor>>, ImportError> {
        let client = http_client().map_err(|error| self.explain(error.into()))?;
        let token = self.authorize().await?;
        let place = Place {
            client: &client,
            registry: &self.url(),
            repository: self.reference.repository(),
            token: token.as_deref(),
            auth: &self.found.auth,
        };
        referrers::list(&place, digest).await.map_err(|error| match error {
            referrers::ListError::Request(error) => self.explain(error.into()),
            referrers::ListError::Status(code, message) => {
                self.explain(OciDistributionError::ServerError { code, url: String::new(), message })
            }
            referrers::ListError::Malformed(problem) => invalid(&self.image, format!("its referrers: {problem}")),
        })
    }

    /// The same from the tag under which clients keep it for registries without that interface.
    async fn tagged_referrers(&self, digest: &Digest) -> Result<Vec<Descriptor>, ImportError> {
        let (registry, repository) = (self.reference.registry().to_owned(), self.reference.repository().to_owned());
        let reference = Reference::with_tag(registry, repository, referrers::tag(digest));
        match self.repeating(|| self.manifest(&reference)).await {
            Ok((Manifest::Index(entries), _)) => Ok(entries),
            Ok((Manifest::Image(_), _)) => Err(invalid(&self.image, "its referrers' tag is no index".into())),
            Err(ImportError::NotFound { .. }) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// What the blobs of a native image are read with, once that is done without this client.
    pub(crate) fn credentials(&self) -> BlobCredentials {
        match (&self.found.identity, &self.found.auth) {
            (Some(identity), _) => BlobCredentials::Identity(identity.clone()),
            (None, RegistryAuth::Basic(username, password)) => {
                BlobCredentials::Basic { username: username.clone(), password: password.clone() }
            }
            (None, RegistryAuth::Bearer(token)) => BlobCredentials::Bearer(token.clone()),
            (None, RegistryAuth::Anonymous) => BlobCredentials::Anonymous,
        }
    }

    fn content(&self, manifest: &ImageManifest, file: &ImageFile) -> Result<Content, ImportError> {
        let name = self.reference.repository();
        let repository =
            Repository { name: format!("{}/{name}", self.host), blob_url: format!("{}/v2/{name}/blobs", self.url()) };
        Content::of(&self.image, manifest, file, &|blob| Ok(Blob::Remote(blob.clone())), Some(repository))
    }

    /// Scheme and host.
    fn url(&self) -> String {
        let scheme = if self.plain { "http" } else { "https" };
        format!("{scheme}://{}", self.reference.registry())
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
        let pauses = ExponentialBuilder::default()
            .with_min_delay(PAUSES.0)
            .with_max_delay(PAUSES.1)
            .with_jitter()
            .without_max_times()
            .with_total_delay(Some(self.patience));
        self.retrying(pauses, || self.fetch_once(blob, to, on_bytes)).await
    }

    /// Gets a token if the registry hands them out. Done apart from the first request, as the client would go on
    /// without a token that it was refused, and the refusal's words would be lost.
    async fn authorize(&self) -> Result<Option<String>, ImportError> {
        let auth = match &self.found.identity {
            Some(identity) => match self.exchange(identity).await? {
                Some(token) => RegistryAuth::Bearer(token),
                None => RegistryAuth::Anonymous,
            },
            None => self.found.auth.clone(),
        };
        let done = self.client.auth(&self.reference, &auth, RegistryOperation::Pull).await;
        done.map_err(|error| self.explain(error))
    }

    /// Trades an identity token for an access token, which the client can't. `None` if the registry wants none.
    async fn exchange(&self, identity: &str) -> Result<Option<String>, ImportError> {
        let client = http_client().map_err(|error| self.explain(error.into()))?;
        exchange_identity(&client, &self.url(), self.reference.repository(), identity).await.map_err(
            |error| match error {
                ExchangeError::Request(error) => self.explain(error.into()),
                ExchangeError::Refused(words) => self.explain(OciDistributionError::AuthenticationFailure(words)),
            },
        )
    }

    async fn manifest(&self, reference: &Reference) -> Result<(Manifest, Digest), ImportError> {
        let pulled = self.client.pull_manifest_raw(reference, &self.found.auth, ACCEPTED).await;
        let (data, digest) = pulled.map_err(|error| self.explain(error))?;
        if data.len() as u64 > MAX_METADATA {
            return Err(invalid(&self.image, format!("its manifest takes {} bytes", data.len())));
        }
        let digest = digest.parse().map_err(|error| invalid(&self.image, format!("its manifest: {error}")))?;
        Ok((Manifest::parse(&self.image, &data)?, digest))
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
        invalid(&self.image, problem)
    }

    /// Repeats a request for metadata that fails for a passing reason.
    async fn repeating<T, F: Future<Output = Result<T, ImportError>>>(
        &self,
        attempt: impl FnMut() -> F,
    ) -> Result<T, ImportError> {
        let pauses = ExponentialBuilder::default()
            .with_min_delay(PAUSE)
            .with_jitter()
            .with_max_times(REPETITIONS)
            .with_total_delay(Some(self.patience));
        self.retrying(pauses, attempt).await
    }

    /// Repeats what fails for a passing reason.
    async fn retrying<T, F: Future<Output = Result<T, ImportError>>>(
        &self,
        pauses: ExponentialBuilder,
        attempt: impl FnMut() -> F,
    ) -> Result<T, ImportError> {
        let deadline = Instant::now() + self.patience;
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
        let (image, registry) = (self.image.clone(), self.host.clone());
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

/// A client for what the registry's own client can't do.
fn http_client() -> Result<reqwest::Client, reqwest::Error> {
    let builder = reqwest::Client::builder().user_agent(USER_AGENT);
    builder.connect_timeout(CONNECT_TIMEOUT).read_timeout(READ_TIMEOUT).build()
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

/// The reference as the registry is asked for it: by the host that serves it, and by digest alone where there is one.
fn contacted(reference: &Reference) -> Reference {
    let registry = match reference.registry() {
        host if host == DOCKER_HUB.0 => DOCKER_HUB.1,
        host => host,
    };
    let (registry, repository) = (registry.to_owned(), reference.repository().to_owned());
    match reference.digest() {
        Some(digest) => Reference::with_digest(registry, repository, digest.to_owned()),
        None => Reference::with_tag(registry, repository, reference.tag().unwrap_or("latest").to_owned()),
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
    fn docker_hub_is_asked_where_it_serves_and_a_digest_decides() {
        let digest = format!("sha256:{}", "0".repeat(64));
        for (named, asked) in [
            ("docker.io/ubuntu".to_owned(), "registry-1.docker.io/library/ubuntu:latest".to_owned()),
            ("index.docker.io/a/b:1".to_owned(), "registry-1.docker.io/a/b:1".to_owned()),
            (format!("quay.io/x:1@{digest}"), format!("quay.io/x@{digest}")),
        ] {
            assert_eq!(contacted(&named.parse().unwrap()).whole(), asked);
        }
    }

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
