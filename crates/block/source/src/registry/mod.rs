//! Blobs of OCI registries, read by ranges.

mod auth;
mod error;
mod range;
mod retry;
mod token;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Once};
use std::time::Duration;

use aenv_block_overlaybd::Source;
use reqwest::{Client, Url, redirect};
use tokio::sync::Semaphore;

use self::auth::Auth;
pub use self::error::{FetchError, FetchProblem};
use self::range::{Answer, Place};
use self::retry::Retry;
pub use self::token::{ExchangeError, exchange_identity};
use crate::credentials::CredentialSource;
use crate::network::Network;

const USER_AGENT: &str = concat!("aenv/", env!("CARGO_PKG_VERSION"));
/// Requests to one repository at a time; more would only share its bandwidth.
const MAX_REQUESTS: usize = 32;
/// The longest range of one request, which is held in memory.
const MAX_FETCH: usize = 8 << 20;
/// How patient we are with a registry.
#[derive(Debug, Clone)]
pub struct RegistryOptions {
    /// How long a read is repeated before it fails.
    pub patience: Duration,
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Longest silence within an answer.
    pub read_timeout: Duration,
    /// Pauses between attempts double from the first to the second of these, with jitter.
    pub pauses: (Duration, Duration),
}

impl Default for RegistryOptions {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(10),
            pauses: (Duration::from_millis(50), Duration::from_secs(2)),
        }
    }
}

/// A repository can't be read from, whatever the registry says.
#[derive(Debug, thiserror::Error)]
pub enum RegistryUrlError {
    /// Not of the form `https://HOST/v2/REPOSITORY/blobs`.
    #[error("{0:?} is not the URL of a repository's blobs")]
    Url(String),
    /// Not `ALGORITHM:HEX`.
    #[error("{0:?} is not a digest")]
    Digest(String),
    /// The HTTP client refuses its settings.
    #[error("set up an HTTP client")]
    Client(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// `https://HOST/v2/REPOSITORY/blobs`, taken apart.
struct BlobUrl {
    text: String,
    host: String,
    repository: String,
    plain: bool,
}

impl BlobUrl {
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim_end_matches('/');
        let url = Url::parse(text).ok()?;
        let plain = match url.scheme() {
            "http" => true,
            "https" => false,
            _ => return None,
        };
        let host = match (url.host_str()?, url.port()) {
            (host, Some(port)) => format!("{host}:{port}"),
            (host, None) => host.to_owned(),
        };
        let repository = url.path().strip_prefix("/v2/")?.strip_suffix("/blobs")?.to_owned();
        let bare = url.query().is_none() && url.fragment().is_none() && url.username().is_empty();
        (bare && !repository.is_empty()).then(|| Self { text: text.to_owned(), host, repository, plain })
    }
}

/// One repository of a registry, with one source of credentials. Its blobs share connections, tokens and a bound of
/// requests.
#[derive(Debug)]
pub struct Registry {
    network: Arc<Network>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Without a slash at its end.
    repo_blob_url: String,
    client: Client,
    auth: Auth,
    options: RegistryOptions,
    /// One permit a request until its answer begins.
    requests: Semaphore,
}

impl Registry {
    /// `repo_blob_url` is `https://HOST/v2/REPOSITORY/blobs`; nothing is asked yet. TLS is used as the URL says.
    pub fn new(
        network: Arc<Network>,
        repo_blob_url: &str,
        credentials: Arc<dyn CredentialSource>,
        options: RegistryOptions,
    ) -> Result<Self, RegistryUrlError> {
        use_ring();
        let url = BlobUrl::parse(repo_blob_url).ok_or_else(|| RegistryUrlError::Url(repo_blob_url.to_owned()))?;
        let client = client_builder(&options)
            .redirect(redirect::Policy::none()) // followed by hand, without our proof
            .build()
            .map_err(|error| RegistryUrlError::Client(error.into()))?;
        let http = client_builder(&options).build().map_err(|error| RegistryUrlError::Client(error.into()))?;
        let auth = Auth::new(&url, credentials, &options, http).map_err(|error| RegistryUrlError::Client(error))?;
        let requests = Semaphore::new(MAX_REQUESTS);
        let shared = Arc::new(Shared { repo_blob_url: url.text, client, auth, options, requests });
        Ok(Self { network, shared })
    }

    /// A blob whose length is known from its descriptor. Nothing is asked yet; a server that tells another length later
    /// fails the read.
    pub fn blob(&self, digest: &str, size: u64) -> Result<RegistryBlob, RegistryUrlError> {
        let fetch = self.fetch(digest, Some(size))?;
        Ok(RegistryBlob { network: Arc::clone(&self.network), fetch: Arc::new(fetch), size })
    }

    /// A blob whose length the registry is asked for. Blocks for at most the patience.
    pub fn find_blob(&self, digest: &str) -> Result<RegistryBlob, FindBlobError> {
        let fetch = Arc::new(self.fetch(digest, None).map_err(FindBlobError::Url)?);
        let asked = Arc::clone(&fetch);
        let size = self.network.wait(async move { asked.find_size().await }).map_err(FindBlobError::Network)??;
        let fetch = self.fetch(digest, Some(size)).map_err(FindBlobError::Url)?;
        Ok(RegistryBlob { network: Arc::clone(&self.network), fetch: Arc::new(fetch), size })
    }

    fn fetch(&self, digest: &str, size: Option<u64>) -> Result<Fetch, RegistryUrlError> {
        let fine = |(algorithm, hex): (&str, &str)| {
            !algorithm.is_empty()
                && algorithm.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
                && hex.len() >= 32
                && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let bad = || RegistryUrlError::Digest(digest.to_owned());
        if !digest.split_once(':').is_some_and(fine) {
            return Err(bad());
        }
        let name = format!("{}/{digest}", self.shared.repo_blob_url);
        let url = Url::parse(&name).map_err(|_| bad())?;
        Ok(Fetch { shared: Arc::clone(&self.shared), name, url, place: Place::default(), size })
    }
}

fn client_builder(options: &RegistryOptions) -> reqwest::ClientBuilder {
    Client::builder().user_agent(USER_AGENT).connect_timeout(options.connect_timeout).read_timeout(options.read_timeout)
}

/// A blob's length could not be found out.
#[derive(Debug, thiserror::Error)]
pub enum FindBlobError {
    /// The URL or the digest makes no sense.
    #[error(transparent)]
    Url(RegistryUrlError),
    /// The registry did not answer usefully.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The network threads are gone.
    #[error("ask for a blob's length")]
    Network(#[source] io::Error),
}

/// A blob of a registry, read by ranges. Each read is repeated for as long as there is patience, then fails; the next
/// one starts over, so that a registry that comes back is used at once.
#[derive(Debug)]
pub struct RegistryBlob {
    network: Arc<Network>,
    fetch: Arc<Fetch>,
    size: u64,
}

impl Source for RegistryBlob {
    fn name(&self) -> &str {
        &self.fetch.name
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut at = offset;
        for part in buf.chunks_mut(MAX_FETCH) {
            let (fetch, range) = (Arc::clone(&self.fetch), at..at + part.len() as u64);
            part.copy_from_slice(&self.network.wait(async move { fetch.read(range).await })??);
            at += part.len() as u64;
        }
        Ok(())
    }
}

/// Reads of one blob, on the network's threads.
#[derive(Debug)]
struct Fetch {
    shared: Arc<Shared>,
    /// The blob's URL, for errors.
    name: String,
    url: Url,
    place: Place,
    /// Length by the descriptor.
    size: Option<u64>,
}

impl Fetch {
    /// Reads `range`, going on where a broken answer ended.
    async fn read(&self, range: Range<u64>) -> Result<Vec<u8>, FetchError> {
        let mut got = Vec::with_capacity((range.end - range.start) as usize);
        let mut retry = Retry::new(&self.shared.options);
        while (got.len() as u64) < range.end - range.start {
            let before = got.len();
            if let Err(problem) = retry.attempt(self.read_rest(&range, &mut got)).await
                && let Err(problem) = retry.pause(problem, got.len() > before).await
            {
                return Err(self.failed(range, retry.attempts, problem));
            }
        }
        Ok(got)
    }

    /// Asks for what is missing in `got` of `range`.
    async fn read_rest(&self, range: &Range<u64>, got: &mut Vec<u8>) -> Result<(), FetchProblem> {
        let mut answer = self.ask(range.start + got.len() as u64..range.end).await?;
        if let (Some(expected), Some(found)) = (self.size, answer.total)
            && expected != found
        {
            return Err(FetchProblem::WrongSize { expected, found });
        }
        let wanted = (range.end - range.start) as usize;
        while let Some(piece) = answer.response.chunk().await? {
            if piece.len() > wanted - got.len() {
                return Err(FetchProblem::TooLong);
            }
            got.extend_from_slice(&piece);
        }
        match wanted - got.len() {
            0 => Ok(()),
            missing => Err(FetchProblem::Cut(missing as u64)),
        }
    }

    /// The blob's length, from the answer to a request for its first byte.
    async fn find_size(&self) -> Result<u64, FetchError> {
        let mut retry = Retry::new(&self.shared.options);
        loop {
            let asked = async { self.ask(0..1).await?.total.ok_or(FetchProblem::NoSize) };
            let problem = match retry.attempt(asked).await {
                Ok(size) => return Ok(size),
                Err(problem) => problem,
            };
            if let Err(problem) = retry.pause(problem, false).await {
                return Err(self.failed(0..1, retry.attempts, problem));
            }
        }
    }

    async fn ask(&self, range: Range<u64>) -> Result<Answer, FetchProblem> {
        let Shared { client, auth, requests, .. } = &*self.shared;
        // Never closed. A transfer goes on without the permit: reading a body is bounded by whoever wants it.
        let _permit = requests.acquire().await;
        range::ask(client, &self.url, auth, &self.place, range).await
    }

    fn failed(&self, range: Range<u64>, attempts: u32, source: FetchProblem) -> FetchError {
        FetchError { blob: self.name.clone(), range, attempts, source }
    }
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
    fn the_url_of_a_repositorys_blobs_is_taken_apart() {
        let url = BlobUrl::parse("http://localhost:5000/v2/a/b/blobs/").unwrap();
        assert_eq!((&*url.host, &*url.repository, url.plain), ("localhost:5000", "a/b", true));
        assert_eq!(url.text, "http://localhost:5000/v2/a/b/blobs");
        for bad in [
            "",
            "localhost/v2/a/blobs",
            "https://h/v2/blobs",
            "https://h/a/blobs",
            "s3://b/v2/a/blobs",
            "https://u@h/v2/a/blobs",
            "https://h/v2/a/blobs?x",
        ] {
            assert!(BlobUrl::parse(bad).is_none(), "{bad}");
        }
    }
}
