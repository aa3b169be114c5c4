//! TLS on the node's own port, with a certificate that may be renewed while it serves.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::TlsConfig;

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(5);

/// Longest handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    #[error("read {path}: {problem}")]
    Pem { path: PathBuf, problem: String },
    #[error("{0} holds no certificate")]
    Empty(PathBuf),
    #[error("{certificate} and {key} do not go together")]
    Pair { certificate: PathBuf, key: PathBuf, source: rustls::Error },
    #[error("set up TLS")]
    Setup(#[source] rustls::Error),
}

/// What makes connections secret. Cloning shares it.
#[derive(Clone)]
pub(crate) struct Tls {
    acceptor: TlsAcceptor,
    current: Arc<Current>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("certificate", &self.current.certificate).finish_non_exhaustive()
    }
}

/// The certificate that handshakes begin with.
#[derive(Debug)]
struct Current {
    certificate: PathBuf,
    key: PathBuf,
    pair: RwLock<Arc<CertifiedKey>>,
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.pair.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl Tls {
    /// As configured; `None`: not at all. Blocking, for a moment.
    pub(crate) fn load(config: &TlsConfig) -> Result<Option<Self>, TlsError> {
        let (Some(certificate), Some(key)) = (config.certificate_path.clone(), config.key_path.clone()) else {
            return Ok(None);
        };
        let pair = RwLock::new(read(&certificate, &key)?);
        let current = Arc::new(Current { certificate, key, pair });
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let resolver = Arc::clone(&current) as Arc<dyn ResolvesServerCert>;
        let mut server = builder.map_err(TlsError::Setup)?.with_no_client_auth().with_cert_resolver(resolver);
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Some(Self { acceptor: TlsAcceptor::from(Arc::new(server)), current }))
    }

    /// `None`: the client's handshake came to nothing.
    pub(crate) async fn accept(&self, stream: TcpStream) -> Option<TlsStream<TcpStream>> {
        tokio::time::timeout(HANDSHAKE, self.acceptor.accept(stream)).await.ok()?.ok()
    }

    /// Takes a renewed certificate over, until `stop`. One that cannot be used is told, and the one before stays.
    pub(crate) async fn watch(self, stop: CancellationToken) {
        let Current { certificate, key, pair } = &*self.current;
        let mut seen = stamps(certificate, key);
        while stop.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_some() {
            let now = stamps(certificate, key);
            if now == seen {
                continue;
            }
            match read(certificate, key) {
                Ok(fresh) => {
                    *pair.write().unwrap_or_else(PoisonError::into_inner) = fresh;
                    info!(certificate = %certificate.display(), "took a renewed certificate over");
                }
                // Perhaps one of the two is yet to be written.
                Err(error) => warn!(%error, "a renewed certificate cannot be used; the one before stays"),
            }
            seen = now;
        }
    }
}

fn read(certificate: &Path, key: &Path) -> Result<Arc<CertifiedKey>, TlsError> {
    let pem = |path: &Path| {
        let path = path.to_owned();
        move |error: rustls::pki_types::pem::Error| TlsError::Pem { path, problem: error.to_string() }
    };
    let chain = CertificateDer::pem_file_iter(certificate).map_err(pem(certificate))?;
    let chain = chain.collect::<Result<Vec<_>, _>>().map_err(pem(certificate))?;
    if chain.is_empty() {
        return Err(TlsError::Empty(certificate.to_owned()));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(pem(key))?;
    let pair = |source| TlsError::Pair { certificate: certificate.to_owned(), key: key.to_owned(), source };
    let private = rustls::crypto::ring::sign::any_supported_type(&private).map_err(pair)?;
    let certified = CertifiedKey::new(chain, private);
    certified.keys_match().map_err(pair)?;
    Ok(Arc::new(certified))
}

type Stamp = Option<(SystemTime, u64)>;

fn stamps(certificate: &Path, key: &Path) -> [Stamp; 2] {
    [certificate, key].map(|path| {
        let found = std::fs::metadata(path).ok()?;
        Some((found.modified().ok()?, found.len()))
    })
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::ServerName;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::serve::serve;

    /// Writes a fresh certificate and its key; gives the certificate.
    fn issue(config: &TlsConfig) -> CertificateDer<'static> {
        let fresh = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(config.certificate_path.as_ref().unwrap(), fresh.cert.pem()).unwrap();
        std::fs::write(config.key_path.as_ref().unwrap(), fresh.signing_key.serialize_pem()).unwrap();
        fresh.cert.der().clone()
    }

    /// What `GET /` answers to a client that trusts this certificate alone; `None`: the server shows another.
    async fn get(address: std::net::SocketAddr, trusted: &CertificateDer<'static>) -> Option<String> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(trusted.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let client = builder.unwrap().with_root_certificates(roots).with_no_client_auth();
        let stream = TcpStream::connect(address).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
        let mut stream = connector.connect(ServerName::try_from("localhost").unwrap(), stream).await.ok()?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        _ = stream.read_to_string(&mut answer).await;
        Some(answer)
    }

    #[tokio::test]
    async fn a_renewed_certificate_is_shown_without_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| Some(dir.path().join(name));
        let config = TlsConfig { certificate_path: at("cert.pem"), key_path: at("key.pem") };
        let first = issue(&config);
        let tls = Tls::load(&config).unwrap().unwrap();
        let stop = CancellationToken::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let told = |headers: axum::http::HeaderMap| async move {
            headers.get("x-forwarded-proto").and_then(|value| value.to_str().ok()).unwrap_or("none").to_owned()
        };
        let router = axum::Router::new().route("/", axum::routing::get(told));
        let serving = tokio::spawn(serve(listener, Some(tls.clone()), router, stop.clone()));
        let watching = tokio::spawn(tls.watch(stop.clone()));
        assert!(get(address, &first).await.unwrap().ends_with("https"));

        // A certificate without its key is not shown.
        std::fs::write(config.certificate_path.as_ref().unwrap(), "nothing").unwrap();
        let second = issue(&config);
        let deadline = tokio::time::Instant::now() + 6 * LOOK;
        while get(address, &second).await.is_none() {
            assert!(tokio::time::Instant::now() < deadline, "the renewed certificate is not shown");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        stop.cancel();
        watching.await.unwrap();
        serving.await.unwrap();
    }

    #[test]
    fn what_is_no_certificate_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| Some(dir.path().join(name));
        let config = TlsConfig { certificate_path: at("cert.pem"), key_path: at("key.pem") };
        assert!(Tls::load(&TlsConfig::default()).unwrap().is_none());
        assert!(matches!(Tls::load(&config), Err(TlsError::Pem { .. })));
        issue(&config);
        std::fs::write(dir.path().join("cert.pem"), "").unwrap();
        assert!(matches!(Tls::load(&config), Err(TlsError::Empty(_))));
        let other = rcgen::generate_simple_self_signed(["other".to_owned()]).unwrap();
        std::fs::write(dir.path().join("cert.pem"), other.cert.pem()).unwrap();
        assert!(matches!(Tls::load(&config), Err(TlsError::Pair { .. })));
    }
}
