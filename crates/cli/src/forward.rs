//! `aenv port-forward`: ports here that are a sandbox's.
//!
//! The data plane carries HTTP, so that is what is forwarded: request by request, with the headers that route it, each
//! body as it comes, in both directions. A connection that is upgraded (WebSocket) goes on as one.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aenv_api::{Client, ConnectRequest};
use aenv_model::SandboxId;
use anyhow::{Context as _, bail};
use bytes::Bytes;
use futures::TryStreamExt as _;
use http::header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::args::{PortForward, PortPair};
use crate::attach::keep_alive_while;
use crate::guest::{PORT_HEADER, SANDBOX_HEADER};
use crate::output;
use crate::report::chain;
use crate::signals::Interruptions;

const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
/// Seconds to live that forwarding ensures at its beginning, and while there are requests.
const TIME_TO_LIVE: u32 = 300;
/// How often we look whether the sandbox is still there.
const CHECK: Duration = Duration::from_secs(5);
/// Headers of one connection only.
const HOP_BY_HOP: [&str; 6] = ["connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade"];

type Body = UnsyncBoxBody<Bytes, reqwest::Error>;

/// Where the requests of one local port go.
#[derive(Debug)]
struct Route {
    http: reqwest::Client,
    /// Without a slash at its end.
    server: String,
    /// What routes a request.
    headers: HeaderMap,
    /// Whether the server is found by its name, so that requests have to carry that.
    named: bool,
    /// Set by every request.
    activity: Arc<AtomicBool>,
    /// Connections that were upgraded: each ends with either side, or with this.
    tunnels: Mutex<JoinSet<()>>,
}

/// Forwards until a signal or the sandbox's end. A paused sandbox is resumed.
///
/// Errors: a port here is taken; the sandbox is gone.
pub(crate) async fn run(client: &Client, forward: &PortForward) -> anyhow::Result<ExitCode> {
    let mut interruptions = Interruptions::listen()?;
    let sandbox = forward.sandbox_id;
    let request = ConnectRequest { timeout: Some(TIME_TO_LIVE), memory: None };
    let token = client.connect_sandbox(sandbox, &request).await?.traffic_access_token;
    let http = aenv_api::http_builder(client.server())?
        .http1_only()
        .redirect(reqwest::redirect::Policy::none())
        .pool_max_idle_per_host(0)
        .build()?;
    let host = reqwest::Url::parse(client.server()).ok();
    let host = host.as_ref().and_then(|url| url.host_str()).unwrap_or_default();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let named = bare != "localhost" && bare.parse::<IpAddr>().is_err();
    let activity = Arc::new(AtomicBool::new(false));

    // All ports or none.
    let mut listeners = Vec::new();
    for PortPair { local, remote } in &forward.ports {
        let address = SocketAddr::new(forward.address, *local);
        let listener = TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?;
        let route = Route {
            http: http.clone(),
            server: client.server().to_owned(),
            headers: routing(sandbox, *remote, token.as_deref())?,
            named,
            activity: Arc::clone(&activity),
            tunnels: Mutex::default(),
        };
        listeners.push((listener, Arc::new(route), *remote));
    }
    let mut work = JoinSet::new();
    for (listener, route, remote) in listeners {
        let address = listener.local_addr().context("ask for a port's number")?;
        output::line(format_args!("Forwarding http://{address} to port {remote} of sandbox {sandbox}"))?;
        work.spawn(accept(listener, route));
    }
    work.spawn(keep_alive_while(client.clone(), sandbox, activity));
    tokio::select! {
        () = gone(client, sandbox) => bail!("sandbox {sandbox} was deleted"),
        code = interruptions.next() => Ok(ExitCode::from(code)),
    }
}

fn routing(sandbox: SandboxId, port: u16, token: Option<&str>) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(SANDBOX_HEADER, HeaderValue::from_str(&sandbox.to_string()).context("an id is a header value")?);
    headers.insert(PORT_HEADER, HeaderValue::from(port));
    if let Some(token) = token {
        let mut token = HeaderValue::from_str(token).context("the sandbox's traffic token is no header value")?;
        token.set_sensitive(true);
        headers.insert(TRAFFIC_TOKEN, token);
    }
    Ok(headers)
}

/// Returns when the sandbox is no longer there.
async fn gone(client: &Client, sandbox: SandboxId) {
    loop {
        sleep(CHECK).await;
        if client.sandbox(sandbox).await.is_err_and(|error| error.is_not_found()) {
            return;
        }
    }
}

/// Takes connections until it is dropped, and these with it.
async fn accept(listener: TcpListener, route: Arc<Route>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(serve(stream, Arc::clone(&route)))),
                // Out of descriptors, for example: some may be closed soon.
                Err(_) => sleep(Duration::from_millis(100)).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Requests of one connection, one after the other.
async fn serve(stream: TcpStream, route: Arc<Route>) {
    // Without, small answers wait for nothing.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let route = Arc::clone(&route);
        async move { Ok::<_, Infallible>(pass(&route, request).await.unwrap_or_else(|error| refusal(&error))) }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new());
    // Whoever it was is told by the connection's end.
    let _ = http.serve_connection(TokioIo::new(stream), service).with_upgrades().await;
}

async fn pass(route: &Route, mut request: Request<Incoming>) -> anyhow::Result<Response<Body>> {
    route.activity.store(true, Ordering::Relaxed);
    if request.method() == Method::CONNECT {
        bail!("CONNECT is for proxies, which this is not");
    }
    let ours = wanted_upgrade(request.headers()).map(|protocol| (protocol, hyper::upgrade::on(&mut request)));
    let (parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut headers = end_to_end(&parts.headers);
    if let Some(host) = parts.headers.get(HOST) {
        headers.insert(FORWARDED_HOST, host.clone());
    }
    if route.named {
        headers.remove(HOST);
    }
    headers.extend(route.headers.clone());
    if let Some((protocol, _)) = &ours {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol.clone());
    }
    let mut sent = route.http.request(parts.method, format!("{}{}", route.server, guest_path(path))).headers(headers);
    if !body.is_end_stream() {
        sent = sent.body(reqwest::Body::wrap(body));
    }
    let answer = sent.send().await.map_err(reqwest::Error::without_url).context("the server did not answer")?;

    let mut response = Response::builder().status(answer.status());
    let passed = end_to_end(answer.headers());
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        if let Some(headers) = response.headers_mut() {
            *headers = passed;
        }
        let body = StreamBody::new(answer.bytes_stream().map_ok(Frame::data));
        return Ok(response.body(UnsyncBoxBody::new(body))?);
    }
    let (_, ours) = ours.context("the sandbox switched protocols unasked")?;
    if let Some(headers) = response.headers_mut() {
        *headers = passed;
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.extend(answer.headers().get(UPGRADE).map(|protocol| (UPGRADE, protocol.clone())));
        headers.remove(CONTENT_LENGTH);
    }
    let mut tunnels = route.tunnels.lock().unwrap_or_else(PoisonError::into_inner);
    // What has ended needs no place any more.
    while tunnels.try_join_next().is_some() {}
    tunnels.spawn(async move {
        if let (Ok(ours), Ok(mut theirs)) = (ours.await, answer.upgrade().await) {
            let _ = copy_bidirectional(&mut TokioIo::new(ours), &mut theirs).await;
        }
    });
    Ok(response.body(empty())?)
}

/// The server takes `/proxy` off; a guest's own stays behind another.
fn guest_path(path: &str) -> String {
    if path.starts_with("/proxy") { format!("/proxy{path}") } else { path.to_owned() }
}

/// The protocol that a request wants to switch to, except HTTP/2, which is nobody's need.
fn wanted_upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let connection = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let mut tokens = connection.flat_map(|value| value.split(','));
    let wanted = tokens.any(|token| token.trim().eq_ignore_ascii_case("upgrade"));
    headers.get(UPGRADE).filter(|protocol| wanted && *protocol != "h2c").cloned()
}

/// Without what concerns one connection only. (Bodies are framed anew on each side; a length that was told stays.)
fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    let listed = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    for name in listed.flat_map(|value| value.split(',')).filter_map(|name| name.trim().parse::<HeaderName>().ok()) {
        kept.remove(name);
    }
    for name in HOP_BY_HOP {
        kept.remove(name);
    }
    if headers.contains_key(TRANSFER_ENCODING) {
        kept.remove(CONTENT_LENGTH);
    }
    kept
}

fn refusal(error: &anyhow::Error) -> Response<Body> {
    let text = format!("aenv port-forward: {}\n", chain(error));
    let mut response = Response::new(UnsyncBoxBody::new(Full::new(Bytes::from(text)).map_err(|never| match never {})));
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response
}

fn empty() -> Body {
    UnsyncBoxBody::new(Full::new(Bytes::new()).map_err(|never| match never {}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn what_concerns_one_connection_stays_there() {
        let headers = map(&[
            ("connection", "keep-alive, X-Mine"),
            ("keep-alive", "timeout=5"),
            ("x-mine", "1"),
            ("transfer-encoding", "chunked"),
            ("cookie", "a=b"),
        ]);
        assert_eq!(end_to_end(&headers), map(&[("cookie", "a=b")]));
        assert_eq!(end_to_end(&map(&[("content-length", "3")])), map(&[("content-length", "3")]));
    }

    #[test]
    fn an_upgrade_has_to_be_asked_for_twice() {
        assert_eq!(wanted_upgrade(&map(&[("connection", "Upgrade"), ("upgrade", "websocket")])).unwrap(), "websocket");
        assert_eq!(wanted_upgrade(&map(&[("upgrade", "websocket")])), None);
        assert_eq!(wanted_upgrade(&map(&[("connection", "upgrade, http2-settings"), ("upgrade", "h2c")])), None);
    }

    /// A server that answers requests one by one and keeps what it was asked; a route to it.
    async fn server(answers: &'static [&'static str]) -> (Arc<Route>, tokio::task::JoinHandle<Vec<String>>) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let serving = tokio::spawn(async move {
            let mut asked = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(stream.read_u8().await.unwrap());
                }
                stream.write_all(answer.as_bytes()).await.unwrap();
                if answer.starts_with("HTTP/1.1 101") {
                    let mut heard = [0; 5];
                    stream.read_exact(&mut heard).await.unwrap();
                    stream.write_all(&heard).await.unwrap();
                }
                asked.push(String::from_utf8(request).unwrap());
            }
            asked
        });
        let http = aenv_api::http_builder(&server).unwrap().http1_only().pool_max_idle_per_host(0).build().unwrap();
        let sandbox = "0190b3a0-0000-7000-8000-000000000001".parse().unwrap();
        let headers = routing(sandbox, 3000, Some("secret")).unwrap();
        (
            Arc::new(Route {
                http,
                server,
                headers,
                named: false,
                activity: Arc::default(),
                tunnels: Mutex::default(),
            }),
            serving,
        )
    }

    #[tokio::test]
    async fn requests_of_one_connection_are_routed_one_by_one_and_it_may_become_a_tunnel() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let (route, serving) = server(&[
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\nx-key: 1\r\n\r\n",
        ])
        .await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let _accepting = tokio::spawn(accept(listener, route));
        let mut client = TcpStream::connect(address).await.unwrap();
        let read_to = async |client: &mut TcpStream, end: &str| {
            let mut text = Vec::new();
            while !text.ends_with(end.as_bytes()) {
                text.push(client.read_u8().await.unwrap());
            }
            String::from_utf8(text).unwrap()
        };
        client.write_all(b"GET /a%2Fb?c HTTP/1.1\r\nhost: localhost:3000\r\n\r\n").await.unwrap();
        let answer = read_to(&mut client, "hi").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        let upgrade = "GET /proxy/ws HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n";
        client.write_all(upgrade.as_bytes()).await.unwrap();
        let answer = read_to(&mut client, "\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 101") && answer.contains("x-key: 1"), "{answer}");
        client.write_all(b"hello").await.unwrap();
        assert!(read_to(&mut client, "hello").await == "hello");
        let asked = serving.await.unwrap();
        assert!(asked[0].starts_with("GET /a%2Fb?c HTTP/1.1\r\n"), "{}", asked[0]);
        for header in [
            "host: localhost:3000\r\n",
            "x-agentenv-sandbox-id: 0190b3a0-0000-7000-8000-000000000001\r\n",
            "x-agentenv-target-port: 3000\r\n",
            "e2b-traffic-access-token: secret\r\n",
        ] {
            assert!(asked[0].contains(header), "{header}: {}", asked[0]);
        }
        assert!(
            asked[1].starts_with("GET /proxy/proxy/ws ") && asked[1].contains("upgrade: websocket\r\n"),
            "{}",
            asked[1]
        );
    }

    #[test]
    fn a_guests_own_proxy_path_arrives() {
        assert_eq!(guest_path("/proxy/x?y"), "/proxy/proxy/x?y");
        assert_eq!(guest_path("/x"), "/x");
    }
}
