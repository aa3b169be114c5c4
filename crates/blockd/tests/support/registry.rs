//! A registry on loopback that has blobs, and can be down.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Response, StatusCode, header};
use tokio::runtime::Runtime;

pub fn digest(bytes: &[u8]) -> String {
    use sha2::Digest;
    format!("sha256:{}", hex::encode(sha2::Sha256::digest(bytes)))
}

/// What it has, and how it is.
#[derive(Default)]
struct State {
    blobs: Mutex<HashMap<String, Bytes>>,
    /// Answers 503.
    down: AtomicBool,
    /// Blob requests answered with bytes.
    served: AtomicUsize,
}

pub struct Registry {
    pub address: SocketAddr,
    state: Arc<State>,
    runtime: Option<Runtime>,
}

impl Registry {
    pub fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        let app = axum::Router::new().fallback(move |request: Request| {
            let answer = answer(&shared, &request);
            async { answer }
        });
        runtime.spawn(async move { axum::serve(listener, app).await });
        Self { address, state, runtime: Some(runtime) }
    }

    /// Keeps a blob; gives its digest.
    pub fn push(&self, bytes: Vec<u8>) -> String {
        let name = digest(&bytes);
        self.push_as(&name, bytes);
        name
    }

    /// Keeps a blob under a digest that may not be its own.
    pub fn push_as(&self, digest: &str, bytes: Vec<u8>) {
        self.state.blobs.lock().unwrap().insert(digest.to_owned(), bytes.into());
    }

    pub fn set_down(&self, down: bool) {
        self.state.down.store(down, Ordering::SeqCst);
    }

    /// Blob requests that were answered with bytes.
    pub fn served(&self) -> usize {
        self.state.served.load(Ordering::SeqCst)
    }

    /// With https, as a resolver writes it.
    pub fn url(&self) -> String {
        format!("https://{}/v2/team/image/blobs", self.address)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

fn answer(state: &State, request: &Request) -> Response<Body> {
    let say = |status: StatusCode| Response::builder().status(status).body(Body::empty()).unwrap();
    if state.down.load(Ordering::SeqCst) {
        return say(StatusCode::SERVICE_UNAVAILABLE);
    }
    let Some(digest) = request.uri().path().strip_prefix("/v2/team/image/blobs/") else { return say(StatusCode::OK) };
    let Some(blob) = state.blobs.lock().unwrap().get(digest).cloned() else { return say(StatusCode::NOT_FOUND) };
    let asked = request.headers().get(header::RANGE).and_then(|value| range(value.to_str().ok()?));
    let Some(asked) = asked.filter(|asked| asked.start < blob.len() as u64) else {
        return say(StatusCode::RANGE_NOT_SATISFIABLE);
    };
    let end = asked.end.min(blob.len() as u64);
    state.served.fetch_add(1, Ordering::SeqCst);
    Response::builder()
        .status(StatusCode::PARTIAL_CONTENT)
        .header(header::CONTENT_RANGE, format!("bytes {}-{}/{}", asked.start, end - 1, blob.len()))
        .body(Body::from(blob.slice(asked.start as usize..end as usize)))
        .unwrap()
}

fn range(header: &str) -> Option<Range<u64>> {
    let (first, last) = header.strip_prefix("bytes=")?.split_once('-')?;
    Some(first.parse().ok()?..last.parse::<u64>().ok()? + 1)
}
