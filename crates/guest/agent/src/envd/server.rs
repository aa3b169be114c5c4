//! The HTTP/1.1 server: one task a connection.
//!
//! HTTP/2 is left out: every caller speaks 1.1 here, and it would cost memory a connection.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::ConnectInfo;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use crate::console::say;

/// How long a kept-alive connection may idle; the protocol's number, longer than the SDKs' and proxies' own.
const IDLE: Duration = Duration::from_secs(640);
/// Bytes of a response that may wait in memory for a slow client, per connection.
const WRITE_BUFFER: usize = 64 * 1024;
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;
/// Pause after a failed accept, which means that descriptors or memory are short.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);
/// How long open requests may go on after the stop.
const DRAIN: Duration = Duration::from_millis(200);

/// Listens, also when the former owner of the port has just gone.
pub(super) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves connections until `stop`, then gives open requests a moment to end.
pub(super) async fn accept(listener: TcpListener, routes: axum::Router, stop: CancellationToken) {
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                connections.spawn(serve(stream, peer, routes.clone(), stop.clone()));
            }
            Err(error) => {
                say!("accept: {error}");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
    connections.close();
    // Streams that follow a process end with it, which comes next; nobody waits for their clients.
    let _ = tokio::time::timeout(DRAIN, connections.wait()).await;
}

async fn serve(stream: TcpStream, peer: SocketAddr, routes: axum::Router, stop: CancellationToken) {
    // Events are small and each one is awaited by somebody.
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let mut request = request.map(axum::body::Body::new);
        request.extensions_mut().insert(ConnectInfo(peer));
        routes.clone().oneshot(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(WRITE_BUFFER)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    // A connection that breaks is its client's affair.
    tokio::select! {
        _ = &mut connection => {}
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}
