//! A registry on loopback that does what a test's rules say.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aenv_block_source::{CredentialSource, Credentials, Network, Registry, RegistryBlob, RegistryOptions, Source};
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Response, StatusCode, header};
use futures::StreamExt;
use tokio::runtime::Runtime;

/// A blob's bytes: like chance, always the same.
pub fn pattern(length: usize) -> Vec<u8> {
    let mut state = 0x2545_F491_4F6C_DD1Du64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

pub fn digest(bytes: &[u8]) -> String {
    use sha2::Digest;
    format!("sha256:{}", hex::encode(sha2::Sha256::digest(bytes)))
}

/// Waits until `condition` holds.
#[track_caller]
pub fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A request, as the rules see it.
#[derive(Debug, Clone)]
pub struct Ask {
    /// Path and query.
    pub target: String,
    pub range: Option<Range<u64>>,
    pub authorization: Option<String>,
    /// How many came before.
    pub number: usize,
}

/// What the stub answers.
#[derive(Debug, Clone)]
pub enum Answer {
    /// The range that was asked for.
    Serve,
    /// The same, later.
    After(Duration, Box<Answer>),
    /// The range is promised; this many bytes come.
    Cut(usize),
    /// The range that was asked for, announced as one further on.
    Shifted,
    /// The range that was asked for, and as much again.
    TooLong,
    /// The range, of a blob said to be this long.
    OfTotal(u64),
    /// All of it, with status 200.
    Whole,
    /// Status, headers (in which `SELF` stands for the stub's address), body.
    Say(u16, Vec<(&'static str, String)>, &'static str),
}

pub fn say(status: u16) -> Answer {
    Answer::Say(status, vec![], "")
}

pub fn redirect(to: String) -> Answer {
    Answer::Say(307, vec![("location", to)], "")
}

type Rules = dyn Fn(&Ask) -> Answer + Send + Sync;

pub struct Stub {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Ask>>>,
    runtime: Option<Runtime>,
}

impl Stub {
    pub fn start(bytes: Vec<u8>, rules: impl Fn(&Ask) -> Answer + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), bytes, rules)
    }

    /// For stubs that go and come back: on a loopback address that no other test uses, lest one takes the port meanwhile.
    pub fn start_at(
        address: SocketAddr,
        bytes: Vec<u8>,
        rules: impl Fn(&Ask) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (bytes, rules, log): (_, Arc<Rules>, _) = (Bytes::from(bytes), Arc::new(rules), Arc::clone(&seen));
        let app = axum::Router::new().fallback(move |request: Request| {
            let ask = Ask {
                target: request.uri().to_string(),
                range: request.headers().get(header::RANGE).and_then(|value| range(value.to_str().ok()?)),
                authorization: header(&request, header::AUTHORIZATION),
                number: log.lock().unwrap().len(),
            };
            log.lock().unwrap().push(ask.clone());
            let answer = match rules(&ask) {
                Answer::Say(status, mut headers, words) => {
                    headers.iter_mut().for_each(|(_, value)| *value = value.replace("SELF", &address.to_string()));
                    Answer::Say(status, headers, words)
                }
                other => other,
            };
            respond(bytes.clone(), ask.range, answer)
        });
        runtime.spawn(async move { axum::serve(listener, app).await });
        Self { address, seen, runtime: Some(runtime) }
    }

    /// What was asked so far.
    pub fn seen(&self) -> Vec<Ask> {
        self.seen.lock().unwrap().clone()
    }

    /// How many asked for a blob.
    pub fn asked(&self) -> usize {
        self.seen().iter().filter(|ask| ask.range.is_some()).count()
    }

    pub fn url(&self) -> String {
        format!("http://{}/v2/team/image/blobs", self.address)
    }

    pub fn blob(&self, size: u64) -> RegistryBlob {
        self.blob_as(Credentials::Anonymous, size)
    }

    pub fn blob_as(&self, credentials: impl CredentialSource + 'static, size: u64) -> RegistryBlob {
        blob(&self.url(), Arc::new(credentials), quick(), &digest(b"x"), size)
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

/// Patience for tests: enough for a busy machine, and little pauses.
pub fn quick() -> RegistryOptions {
    RegistryOptions {
        patience: Duration::from_secs(20),
        pauses: (Duration::from_millis(1), Duration::from_millis(20)),
        ..RegistryOptions::default()
    }
}

pub fn impatient() -> RegistryOptions {
    RegistryOptions { patience: Duration::from_millis(400), ..quick() }
}

pub fn blob(
    url: &str,
    credentials: Arc<dyn CredentialSource>,
    options: RegistryOptions,
    digest: &str,
    size: u64,
) -> RegistryBlob {
    Registry::new(Network::start().unwrap(), url, credentials, options).unwrap().blob(digest, size).unwrap()
}

pub fn read(source: &dyn Source, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut buf = vec![0xEE; length];
    source.read_at(offset, &mut buf).map(|()| buf)
}

fn header(request: &Request, name: header::HeaderName) -> Option<String> {
    request.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

fn range(header: &str) -> Option<Range<u64>> {
    let (first, last) = header.strip_prefix("bytes=")?.split_once('-')?;
    Some(first.parse().ok()?..last.parse::<u64>().ok()? + 1)
}

async fn respond(bytes: Bytes, range: Option<Range<u64>>, answer: Answer) -> Response<Body> {
    let length = bytes.len() as u64;
    let range = range.unwrap_or(0..length);
    let part = bytes.slice(range.start.min(length) as usize..range.end.min(length) as usize);
    let partial = |first: u64, total: u64, size: usize, body: Body| {
        Response::builder()
            .status(StatusCode::PARTIAL_CONTENT)
            .header(header::CONTENT_RANGE, format!("bytes {first}-{}/{total}", first + part.len() as u64 - 1))
            .header(header::CONTENT_LENGTH, size)
            .body(body)
            .unwrap()
    };
    let whole = part.clone();
    match answer {
        Answer::After(time, then) => {
            tokio::time::sleep(time).await;
            Box::pin(respond(bytes, Some(range), *then)).await
        }
        Answer::Serve => partial(range.start, length, part.len(), Body::from(whole)),
        Answer::Cut(at) => {
            let pieces = [Ok(whole.slice(..at)), Err(io::Error::other("cut"))];
            // The pause lets what came first go out before the connection breaks.
            let slowly = futures::stream::iter(pieces).then(|piece| async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                piece
            });
            partial(range.start, length, part.len(), Body::from_stream(slowly))
        }
        Answer::Shifted => partial(range.start + 1, length + 1, part.len(), Body::from(whole)),
        Answer::TooLong => {
            let twice = [&whole[..], &whole[..]].concat();
            partial(range.start, length, twice.len(), Body::from(twice))
        }
        Answer::OfTotal(total) => partial(range.start, total, part.len(), Body::from(whole)),
        Answer::Whole => Response::new(Body::from(bytes)),
        Answer::Say(status, headers, words) => {
            let mut response = Response::builder().status(status);
            for (name, value) in headers {
                response = response.header(name, value);
            }
            response.body(Body::from(words)).unwrap()
        }
    }
}
