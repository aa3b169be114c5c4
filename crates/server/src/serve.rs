//! Accepting: one task a connection, bounded in number, in how long a silent one may stay, and in how it ends.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderName, HeaderValue};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;
use tracing::{debug, warn};

use crate::tls::Tls;

/// Connections open at the same time; more wait in the kernel's queue. Each may hold a second one, into a guest.
const CONNECTIONS: usize = 16_384;

/// How long a fresh connection may take to its first request: whoever has none to make must not hold a place.
const FIRST_REQUEST: Duration = Duration::from_secs(30);

/// How long a kept-alive connection may idle: longer than the clients' own pools keep theirs (300 s).
const IDLE: Duration = Duration::from_secs(640);

const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Pause after a failed accept, which means that descriptors or memory are short.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);

/// Serves connections until `stop`, then ends idle ones and waits for requests at work.
pub(crate) async fn serve(listener: TcpListener, tls: Option<Tls>, router: Router, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = async {
                let place = Arc::clone(&places).acquire_owned().await;
                (listener.accept().await, place)
            } => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            (Ok((stream, peer)), place) => {
                let (tls, router, stop) = (tls.clone(), router.clone(), stop.clone());
                connections.spawn(async move {
                    let _place = place;
                    if let Err(error) = stream.set_nodelay(true) {
                        debug!(%error, "could not set TCP_NODELAY on a client's connection");
                    }
                    match tls {
                        None => connection(stream, peer, false, router, stop).await,
                        Some(tls) => {
                            if let Some(stream) = tls.accept(stream).await {
                                connection(stream, peer, true, router, stop).await;
                            }
                        }
                    }
                });
            }
            (Err(error), _) => {
                warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
    connections.close();
    connections.wait().await;
}

async fn connection<S>(stream: S, peer: SocketAddr, is_secret: bool, router: Router, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let asked = Arc::new(AtomicBool::new(false));
    let service = hyper::service::service_fn({
        let asked = Arc::clone(&asked);
        move |mut request: Request<Incoming>| {
            asked.store(true, Ordering::Relaxed);
            request.extensions_mut().insert(ConnectInfo(peer));
            if is_secret {
                // What is made for the client to come back with, and what a guest may want to know.
                request.headers_mut().entry(FORWARDED_PROTO).or_insert(HeaderValue::from_static("https"));
            }
            router.clone().oneshot(request)
        }
    });
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE);
    let mut serving = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let mut first = pin!(tokio::time::sleep(FIRST_REQUEST));
    let mut waiting = true;
    loop {
        tokio::select! {
            // A connection that breaks is its client's affair.
            _ = serving.as_mut() => return,
            () = first.as_mut(), if waiting => {
                if !asked.load(Ordering::Relaxed) {
                    return;
                }
                waiting = false;
            }
            () = stop.cancelled() => break,
        }
    }
    serving.as_mut().graceful_shutdown();
    _ = serving.await;
}
