//! The proxy between a real HTTP server and stub guests, all on the loopback.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body as AxumBody;
use axum::extract::Request;
use axum::response::IntoResponse;
use futures::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinHandle};
use tokio_util::sync::CancellationToken;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);
const ID: &str = "01936f8e-72f5-7000-8000-000000000001";
const PRIVATE: &str = "01936f8e-72f5-7000-8000-000000000002";

/// Ends its task with the test.
struct Running(AbortHandle);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Loopback;

#[async_trait]
impl Connector for Loopback {
    async fn connect(&self, port: u16) -> io::Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

struct Known(HashMap<&'static str, Route>);

#[async_trait]
impl Routes for Known {
    async fn route(&self, sandbox: &str, _port: u16) -> Result<Route, RouteError> {
        self.0.get(sandbox).cloned().ok_or(RouteError::NotFound)
    }
}

/// A node server with a public and a private sandbox, whose guests are this host.
struct Node {
    address: SocketAddr,
    proxy: Arc<Proxy>,
    ended: CancellationToken,
    _server: Running,
}

async fn node() -> Node {
    node_with(Limits::default()).await
}

async fn node_with(limits: Limits) -> Node {
    let ended = CancellationToken::new();
    let route =
        |traffic_token| Route { connector: Arc::new(Loopback), traffic_token, ended: ended.clone(), in_use: None };
    let routes = Known(HashMap::from([(ID, route(None)), (PRIVATE, route(Some("secret".to_owned())))]));
    let proxy = Arc::new(Proxy::new(Arc::new(routes), Arc::new(|key| key == b"e2b_platform")).with_limits(limits));
    let targets = Targets::new(vec!["sbx.test".into()]);
    let handler = {
        let proxy = Arc::clone(&proxy);
        move |request: Request| {
            let proxy = Arc::clone(&proxy);
            let target = targets.of(&request);
            async move {
                match target {
                    Some(Ok(target)) => proxy.handle(request, target).await.map(AxumBody::new),
                    other => (http::StatusCode::IM_A_TEAPOT, format!("{other:?}")).into_response(),
                }
            }
        }
    };
    let (address, server) = serve(Router::new().fallback(handler)).await;
    Node { address, proxy, ended, _server: server }
}

async fn serve(router: Router) -> (SocketAddr, Running) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    let server = tokio::spawn(async move { axum::serve(listener, router).await });
    (address, Running(server.abort_handle()))
}

/// A guest written by hand: what `play` does with its first connection.
async fn guest<T, F>(play: impl FnOnce(Wire) -> F + Send + 'static) -> (u16, JoinHandle<T>)
where
    T: Send + 'static,
    F: Future<Output = T> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let port = listener.local_addr().expect("address").port();
    let task = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("accept");
        drop(listener);
        play(Wire(stream)).await
    });
    (port, task)
}

async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("in time")
}

/// One side of a TCP connection, read and written octet for octet.
struct Wire(TcpStream);

impl Wire {
    async fn to(node: &Node) -> Self {
        Self(TcpStream::connect(node.address).await.expect("connect"))
    }

    async fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.expect("write");
    }

    /// Reads until `text` has come, and gives back all of it.
    async fn until(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        let read = async {
            while !seen.ends_with(text.as_bytes()) {
                match self.0.read_u8().await {
                    Ok(byte) => seen.push(byte),
                    Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&seen)),
                }
            }
        };
        let done = tokio::time::timeout(PATIENCE, read).await;
        let seen = String::from_utf8_lossy(&seen).into_owned();
        done.unwrap_or_else(|_| panic!("no {text:?} after {seen:?}"));
        seen
    }

    async fn head(&mut self) -> String {
        self.until("\r\n\r\n").await
    }

    /// Reads to the end of the stream, however it ends.
    async fn rest(&mut self) -> String {
        let mut seen = Vec::new();
        // A reset is an end, too.
        let _ = in_time(self.0.read_to_end(&mut seen)).await;
        String::from_utf8_lossy(&seen).into_owned()
    }
}

/// A request head with routing headers.
fn head(method_and_path: &str, port: u16, more: &str) -> String {
    format!(
        "{method_and_path} HTTP/1.1\r\nHost: node\r\nE2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: {port}\r\n{more}\r\n"
    )
}

/// Sends a request without a body and reads the whole answer.
async fn ask(node: &Node, request: String) -> String {
    let mut wire = Wire::to(node).await;
    wire.send(&request.replacen("\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1)).await;
    wire.rest().await
}

fn body_of(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").map_or("", |(_, body)| body)
}

/// A port on which nobody listens.
async fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    listener.local_addr().expect("address").port()
}

async fn echo(request: Request) -> impl IntoResponse {
    request.into_body()
}

#[tokio::test]
async fn each_chunk_arrives_before_the_next_is_sent() {
    let node = node().await;
    let (address, _guest) = serve(Router::new().fallback(echo)).await;
    let mut client = Wire::to(&node).await;
    client.send(&head("POST /echo", address.port(), "Transfer-Encoding: chunked\r\n")).await;
    let mut got_head = false;
    for word in ["one", "two", "six"] {
        client.send(&format!("3\r\n{word}\r\n")).await;
        if !got_head {
            assert!(client.head().await.starts_with("HTTP/1.1 200 OK\r\n"));
            got_head = true;
        }
        assert_eq!(client.until("\r\n").await, "3\r\n");
        assert_eq!(client.until("\r\n").await, format!("{word}\r\n"));
    }
    client.send("0\r\n\r\n").await;
    assert_eq!(client.until("0\r\n\r\n").await, "0\r\n\r\n");
}

#[tokio::test]
async fn path_query_and_headers_reach_the_guest_as_they_should() {
    let node = node().await;
    let (port, guest) = guest(async |mut wire: Wire| {
        let head = wire.head().await;
        wire.send("HTTP/1.1 201 Created\r\nContent-Length: 2\r\nX-Of-Guest: 1\r\nKeep-Alive: timeout=1\r\n\r\nok")
            .await;
        head
    })
    .await;
    let more = "X-API-Key: e2b_platform\r\nX-Access-Token: t\r\n";
    let answer = ask(&node, head("DELETE /proxy//a%2Fb/%e2%82%ac/../x?q=%20&r=a+b;c", port, more)).await;
    assert!(answer.starts_with("HTTP/1.1 201 Created\r\n"), "{answer}");
    assert!(answer.contains("x-of-guest: 1\r\n") && !answer.contains("keep-alive: timeout"), "{answer}");
    assert_eq!(body_of(&answer), "ok");
    let seen = in_time(guest).await.expect("guest");
    assert!(seen.starts_with("DELETE //a%2Fb/%e2%82%ac/../x?q=%20&r=a+b;c HTTP/1.1\r\n"), "{seen}");
    assert!(seen.contains("host: node\r\n") && seen.contains("x-access-token: t\r\n"), "{seen}");
    assert!(seen.contains("x-forwarded-uri: /proxy//a%2Fb/%e2%82%ac/../x?q=%20&r=a+b;c\r\n"), "{seen}");
    for absent in ["e2b-sandbox", "e2b_platform", "content-length", "transfer-encoding"] {
        assert!(!seen.contains(absent), "{absent} in {seen}");
    }
}

#[tokio::test]
async fn a_body_without_a_length_passes_whatever_the_method() {
    let node = node().await;
    let (port, guest) = guest(async |mut wire: Wire| {
        let head = wire.head().await;
        let body = wire.until("0\r\n\r\n").await;
        wire.send("HTTP/1.1 204 No Content\r\n\r\n").await;
        (head, body)
    })
    .await;
    let mut client = Wire::to(&node).await;
    client.send(&head("GET /search", port, "Transfer-Encoding: chunked\r\n")).await;
    client.send("5\r\nhello\r\n0\r\n\r\n").await;
    assert!(client.head().await.starts_with("HTTP/1.1 204 "));
    let (head, body) = in_time(guest).await.expect("guest");
    assert!(head.contains("transfer-encoding: chunked\r\n"), "{head}");
    assert_eq!(body, "5\r\nhello\r\n0\r\n\r\n");
}

#[tokio::test]
async fn trailers_pass_both_ways() {
    let node = node().await;
    let (port, guest) = guest(async |mut wire: Wire| {
        let head = wire.head().await;
        let body = wire.until("x-sum: 1\r\n\r\n").await;
        wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Status\r\n\r\n").await;
        wire.send("2\r\nok\r\n0\r\nX-Status: 7\r\n\r\n").await;
        (head, body)
    })
    .await;
    let mut client = Wire::to(&node).await;
    client.send(&head("POST /", port, "TE: trailers\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n")).await;
    client.send("1\r\nx\r\n0\r\nX-Sum: 1\r\n\r\n").await;
    client.head().await;
    assert_eq!(client.until("x-status: 7\r\n\r\n").await, "2\r\nok\r\n0\r\nx-status: 7\r\n\r\n");
    let (head, _body) = in_time(guest).await.expect("guest");
    assert!(head.contains("te: trailers\r\n"), "{head}");
}

#[tokio::test]
async fn a_client_that_expects_100_continue_gets_it_and_the_guests_own_1xx_do_no_harm() {
    let node = node().await;
    let (port, guest) = guest(async |mut wire: Wire| {
        let head = wire.head().await;
        wire.send("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n").await;
        let body = wire.until("hello").await;
        wire.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
        (head, body)
    })
    .await;
    let mut client = Wire::to(&node).await;
    client.send(&head("PUT /file", port, "Expect: 100-continue\r\nContent-Length: 5\r\n")).await;
    assert_eq!(client.head().await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.send("hello").await;
    assert!(client.head().await.starts_with("HTTP/1.1 200 OK\r\n"));
    assert_eq!(client.until("ok").await, "ok");
    let (seen, body) = in_time(guest).await.expect("guest");
    assert_eq!(body, "hello");
    assert!(seen.contains("content-length: 5\r\n") && !seen.contains("expect"), "{seen}");

    let refused =
        ask(&node, head("PUT /file", closed_port().await, "Expect: 100-continue\r\nContent-Length: 5\r\n")).await;
    assert!(refused.starts_with("HTTP/1.1 502 "), "no invitation to send what nobody takes: {refused}");
}

#[tokio::test]
async fn a_client_that_goes_is_noticed_by_the_guest_before_and_while_it_answers() {
    let node = node().await;
    for begins in [false, true] {
        let (port, guest) = guest(async move |mut wire: Wire| {
            wire.head().await;
            if begins {
                wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").await;
            }
            wire.rest().await
        })
        .await;
        let mut client = Wire::to(&node).await;
        client.send(&head("GET /stream", port, "")).await;
        if begins {
            client.until("first\r\n").await;
        } else {
            // The guest has the request; its silence must not keep the connection.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        drop(client);
        assert_eq!(in_time(guest).await.expect("guest"), "", "begins: {begins}");
    }
}

#[tokio::test]
async fn a_client_that_goes_while_uploading_is_noticed_by_the_guest() {
    let node = node().await;
    let (port, guest) = guest(async |mut wire: Wire| {
        wire.head().await;
        wire.rest().await
    })
    .await;
    let mut client = Wire::to(&node).await;
    client.send(&head("PUT /file", port, "Content-Length: 1000\r\n")).await;
    client.send("part").await;
    drop(client);
    let seen = in_time(guest).await.expect("guest");
    assert!("part".starts_with(&seen), "{seen}");
}

#[tokio::test]
async fn a_guest_that_dies_breaks_the_clients_stream() {
    let node = node().await;
    for framing in ["Transfer-Encoding: chunked\r\n\r\n4\r\npart\r\n", "Content-Length: 100\r\n\r\npart"] {
        let (port, _guest) = guest(async move |mut wire: Wire| {
            wire.head().await;
            wire.send(&format!("HTTP/1.1 200 OK\r\n{framing}")).await;
        })
        .await;
        let mut client = Wire::to(&node).await;
        client.send(&head("GET /stream", port, "")).await;
        let seen = client.rest().await;
        assert!(seen.contains("part") && !seen.ends_with("0\r\n\r\n"), "{seen}");
    }
}

#[tokio::test]
async fn a_sandbox_that_ends_breaks_the_clients_stream_and_answers_as_not_found_after() {
    let node = node().await;
    let (port, guest) = guest(async |mut wire: Wire| {
        wire.head().await;
        wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n").await;
        wire.rest().await // the guest itself is silent: a dead VM sends no FIN
    })
    .await;
    let (silent, _waiting) = self::guest(async |mut wire: Wire| {
        wire.head().await;
        wire.rest().await
    })
    .await;
    let mut client = Wire::to(&node).await;
    client.send(&head("GET /stream", port, "")).await;
    client.until("part\r\n").await;
    let mut waiting = Wire::to(&node).await;
    waiting.send(&head("GET /", silent, "Connection: close\r\n")).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    node.ended.cancel();
    assert_eq!(client.rest().await, "", "broken, without the last chunk");
    let answer = waiting.rest().await;
    assert!(answer.starts_with("HTTP/1.1 502 ") && answer.contains("The sandbox was not found"), "{answer}");
    in_time(guest).await.expect("guest");
}

#[tokio::test]
async fn refusals_have_the_status_and_text_that_clients_key_on() {
    let node = node().await;
    let unknown = head("GET /", 80, "").replace(ID, "nobody");
    let answer = ask(&node, unknown.clone()).await;
    assert!(answer.starts_with("HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/json\r\n"), "{answer}");
    assert_eq!(body_of(&answer), r#"{"sandboxId":"nobody","message":"The sandbox was not found","code":502}"#);

    let port = closed_port().await;
    let answer = ask(&node, head("GET /", port, "")).await;
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
    let text = "The sandbox is running but port is not open";
    assert_eq!(body_of(&answer), format!(r#"{{"sandboxId":"{ID}","message":"{text}","code":502,"port":{port}}}"#));

    let browser = "User-Agent: Mozilla/5.0 (X11)\r\nAccept: text/html,*/*\r\n";
    let answer = ask(&node, head("GET /", port, browser)).await;
    assert!(answer.contains("content-type: text/html; charset=utf-8\r\n"), "{answer}");
    assert!(answer.contains(text) && answer.contains(&port.to_string()), "{answer}");

    let private = |more: &str| head("GET /", port, more).replace(ID, PRIVATE);
    let answer = ask(&node, private("")).await;
    assert!(answer.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{answer}");
    let text = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing";
    assert_eq!(body_of(&answer), format!(r#"{{"sandboxId":"{PRIVATE}","message":"{text}","code":403}}"#));
    let answer = ask(&node, private("e2b-traffic-access-token: wrong\r\n")).await;
    assert!(answer.contains("Provided token in header 'e2b-traffic-access-token' is invalid"), "{answer}");
    let answer = ask(&node, private("e2b-traffic-access-token: secret\r\n")).await;
    assert!(answer.contains("port is not open"), "let through: {answer}");

    let answer = ask(&node, head("POST /init", AGENT_PORT, "")).await;
    assert!(answer.starts_with("HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\n"), "{answer}");
    assert_eq!(body_of(&answer), format!(r#"{{"sandboxId":"{ID}","message":"route not found","code":404}}"#));
}

#[tokio::test]
async fn a_guest_that_hangs_up_or_never_answers_is_told_from_a_closed_port() {
    let node = node_with(Limits { answer: Duration::from_millis(300), ..Limits::default() }).await;
    let (port, _guest) = guest(async |mut wire: Wire| drop(wire.head().await)).await;
    let answer = ask(&node, head("GET /", port, "")).await;
    assert!(answer.starts_with("HTTP/1.1 502 ") && answer.contains("without an answer"), "{answer}");

    let (port, guest) = guest(async |mut wire: Wire| {
        wire.head().await;
        wire.rest().await
    })
    .await;
    let answer = ask(&node, head("GET /", port, "")).await;
    assert!(answer.starts_with("HTTP/1.1 504 ") && answer.contains("did not answer in time"), "{answer}");
    in_time(guest).await.expect("the connection is given up");
}

#[tokio::test]
async fn an_upload_that_goes_on_is_not_given_up() {
    let node = node_with(Limits { answer: Duration::from_millis(400), ..Limits::default() }).await;
    let (port, _guest) = guest(async |mut wire: Wire| {
        wire.head().await;
        wire.until("0\r\n\r\n").await;
        wire.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone").await;
    })
    .await;
    let mut client = Wire::to(&node).await;
    client.send(&head("POST /", port, "Transfer-Encoding: chunked\r\n")).await;
    for _ in 0..8 {
        client.send("1\r\nx\r\n").await;
        tokio::time::sleep(Duration::from_millis(100)).await; // twice the limit altogether
    }
    client.send("0\r\n\r\n").await;
    assert!(client.until("done").await.starts_with("HTTP/1.1 200 OK\r\n"));
}

#[tokio::test]
async fn an_upgraded_connection_passes_bytes_both_ways_until_either_side_goes() {
    let node = node().await;
    for guest_goes_first in [true, false] {
        let (port, guest) = guest(async move |mut wire: Wire| {
            let head = wire.head().await;
            wire.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n").await;
            wire.send("Sec-WebSocket-Protocol: chat\r\n\r\nhello").await;
            assert_eq!(wire.until("ping").await, "ping");
            wire.send("pong").await;
            if !guest_goes_first {
                assert_eq!(wire.rest().await, "");
            }
            head
        })
        .await;
        let mut client = Wire::to(&node).await;
        let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Protocol: chat\r\n";
        client.send(&head("GET /ws", port, upgrade)).await;
        let answer = client.head().await;
        assert!(answer.starts_with("HTTP/1.1 101 Switching Protocols\r\n"), "{answer}");
        assert!(answer.contains("upgrade: websocket\r\n") && answer.contains("sec-websocket-protocol: chat\r\n"));
        assert_eq!(client.until("hello").await, "hello");
        client.send("ping").await;
        assert_eq!(client.until("pong").await, "pong");
        if guest_goes_first {
            assert_eq!(client.rest().await, "");
        } else {
            drop(client);
        }
        let head = in_time(guest).await.expect("guest");
        assert!(head.contains("connection: upgrade\r\n") && head.contains("upgrade: websocket\r\n"), "{head}");
    }
}

#[tokio::test]
async fn closing_the_proxy_cuts_streams_and_upgraded_connections_and_leaves_no_task() {
    let node = node().await;
    let (upgraded, _one) = guest(async |mut wire: Wire| {
        wire.head().await;
        wire.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n").await;
        wire.rest().await
    })
    .await;
    let (streamed, _two) = guest(async |mut wire: Wire| {
        wire.head().await;
        wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n").await;
        wire.rest().await
    })
    .await;
    let mut socket = Wire::to(&node).await;
    socket.send(&head("GET /", upgraded, "Connection: upgrade\r\nUpgrade: x\r\n")).await;
    socket.head().await;
    let mut stream = Wire::to(&node).await;
    stream.send(&head("GET /", streamed, "")).await;
    stream.until("part\r\n").await;
    in_time(node.proxy.close()).await;
    assert_eq!(socket.rest().await, "");
    assert_eq!(stream.rest().await, "", "broken, without the last chunk");
}

#[tokio::test]
async fn requests_of_one_client_connection_each_get_a_guest_connection_of_their_own() {
    let node = node().await;
    let mut client = Wire::to(&node).await;
    for word in ["one", "two"] {
        let (port, guest) = guest(async move |mut wire: Wire| {
            wire.head().await;
            wire.send(&format!("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{word}")).await;
            wire.rest().await
        })
        .await;
        client.send(&head("GET /", port, "")).await;
        client.head().await;
        assert_eq!(client.until(word).await, word);
        assert_eq!(in_time(guest).await.expect("guest"), "", "ended with the answer");
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_the_guest_back() {
    let node = node().await;
    const PIECE: usize = 64 << 10;
    let (sent, counter) = tokio::sync::watch::channel(0_usize);
    let (address, _guest) = serve(Router::new().fallback(async move || {
        let pieces = futures::stream::iter(0..).map(move |_: u64| {
            sent.send_modify(|sent| *sent += PIECE);
            Ok::<_, io::Error>(bytes::Bytes::from_static(&[7; PIECE]))
        });
        AxumBody::from_stream(pieces)
    }))
    .await;
    let mut client = Wire::to(&node).await;
    client.send(&head("GET /endless", address.port(), "")).await;
    client.head().await;
    // Until nothing has moved for a while.
    let mut counter = counter;
    while tokio::time::timeout(Duration::from_millis(500), counter.changed()).await.is_ok() {
        assert!(*counter.borrow() < 64 << 20, "the guest sends on and on");
    }
    assert!(*counter.borrow() > 0);
}

#[tokio::test]
async fn big_bodies_pass_both_ways_in_flat_memory() {
    const SIZE: u64 = 256 << 20;
    let node = node().await;
    let (address, _guest) = serve(Router::new().fallback(echo)).await;
    let before = resident_peak();
    let stream = TcpStream::connect(node.address).await.expect("connect");
    let (mut reading, mut writing) = stream.into_split();
    let request = head("POST /", address.port(), &format!("Content-Length: {SIZE}\r\nConnection: close\r\n"));
    let upload = tokio::spawn(async move {
        writing.write_all(request.as_bytes()).await.expect("write");
        let piece = vec![7; 256 << 10];
        for _ in 0..SIZE / piece.len() as u64 {
            writing.write_all(&piece).await.expect("write");
        }
        writing
    });
    let mut seen = 0;
    let mut buffer = vec![0; 256 << 10];
    let download = async {
        loop {
            match reading.read(&mut buffer).await.expect("read") {
                0 => break,
                read => seen += read as u64,
            }
        }
    };
    tokio::time::timeout(PATIENCE * 3, download).await.expect("in time");
    upload.await.expect("upload");
    assert!(seen > SIZE, "all of the body and a head: {seen}");
    let grown = resident_peak() - before;
    assert!(grown < 64 << 10, "{grown} KiB more at the peak");
}

/// The process's largest resident size so far, in KiB.
fn resident_peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("VmHWM");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}
