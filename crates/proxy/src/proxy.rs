//! One request, from target to streamed answer.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING};
use http::uri::{PathAndQuery, Uri};
use http::{Request, Response, StatusCode, Version};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, debug, debug_span};

use crate::access;
use crate::body::{Body, Connection, Cut, Progress, Upload};
use crate::headers;
use crate::refusal::{Asker, Refusal, answer};
use crate::route::{Route, RouteError, Routes};
use crate::target::{Target, guest_path};
use crate::upgrade::splice;

/// How patient the proxy is with a guest.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Longest wait for a connection. A guest is one virtual wire away; longer means that it does not run.
    pub connect: Duration,
    /// Longest wait for an answer's head after the last byte of the request that the client sent. Generous, since a
    /// service may think long, and an upload is an answer's head late by nature; streams that have begun have no limit.
    pub answer: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connect: Duration::from_secs(5), answer: Duration::from_secs(600) }
    }
}

/// Tells the node's API keys from others.
pub type IsKey = Arc<dyn Fn(&[u8]) -> bool + Send + Sync>;

/// The data plane of a node.
pub struct Proxy {
    routes: Arc<dyn Routes>,
    is_key: IsKey,
    limits: Limits,
    /// Connections into guests and upgraded streams.
    tasks: TaskTracker,
    closing: CancellationToken,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Proxy {
    /// A proxy to the sandboxes that `routes` knows. `is_key` knows the node's API keys, which guests must not see.
    #[must_use]
    pub fn new(routes: Arc<dyn Routes>, is_key: IsKey) -> Self {
        Self { routes, is_key, limits: Limits::default(), tasks: TaskTracker::new(), closing: CancellationToken::new() }
    }

    /// The same with other limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// Cuts every stream and waits for its end.
    pub async fn close(&self) {
        self.closing.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Passes `request` to its target and gives back the answer as it comes, or the proxy's own.
    ///
    /// The request must come straight from hyper's server if upgrades shall work: they live in its extensions. Cancel
    /// safety: dropping this, or the answer's body, ends the connection into the guest.
    pub async fn handle<B>(&self, request: Request<B>, target: Target) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        let asker = Asker::of(request.headers());
        let span = debug_span!("proxy", sandbox_id = target.sandbox, port = target.port);
        match self.pass(request, &target).instrument(span).await {
            Ok(response) => response,
            Err(refusal) => {
                debug!(sandbox_id = target.sandbox, port = target.port, ?refusal, "request refused");
                answer(refusal, &target.sandbox, target.port, asker)
            }
        }
    }

    async fn pass<B>(&self, mut request: Request<B>, target: &Target) -> Result<Response<Body>, Refusal>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        let route = self.routes.route(&target.sandbox, target.port).await.map_err(|error| match error {
            RouteError::NotFound => Refusal::NotFound,
            RouteError::Busy => Refusal::Busy,
        })?;
        let path = guest_path(request.uri(), target.via);
        access::check(target.port, path, request.headers(), route.traffic_token.as_deref()).map_err(Refusal::Denied)?;

        let (ended, closing, in_use) = (route.ended.clone(), self.closing.clone(), route.in_use.clone());
        let cut = Cut { ended, closing, _in_use: in_use };
        let exchange = async {
            let stream = self.connect(&route, target.port).await?;
            let client_upgrade =
                headers::wanted_upgrade(request.headers()).is_some().then(|| hyper::upgrade::on(&mut request));
            let (request, progress) = self.for_guest(request, target);
            self.exchange(stream, request, progress, client_upgrade, cut.clone()).await
        };
        // Whatever failed: if the sandbox has ended, that is why.
        tokio::select! {
            result = exchange => result.map_err(|refusal| if cut.is_fired() { Refusal::NotFound } else { refusal }),
            () = cut.clone().fired() => Err(Refusal::NotFound),
        }
    }

    async fn connect(&self, route: &Route, port: u16) -> Result<TcpStream, Refusal> {
        match tokio::time::timeout(self.limits.connect, route.connector.connect(port)).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => {
                debug!(%error, "cannot connect");
                let closed = error.kind() == io::ErrorKind::NotConnected;
                Err(if closed { Refusal::NotFound } else { Refusal::PortClosed })
            }
            Err(_) => Err(Refusal::PortClosed),
        }
    }

    /// The request as the guest shall see it.
    fn for_guest<B>(&self, request: Request<B>, target: &Target) -> (Request<Upload<B>>, Progress)
    where
        B: http_body::Body<Data = Bytes>,
    {
        let (mut parts, body) = request.into_parts();
        headers::for_guest(&mut parts.headers, &parts.method, &parts.uri, self.is_key.as_ref());
        // Without a length it goes in chunks, also where the method has no body as a rule and hyper would leave it out.
        if !body.is_end_stream() && !parts.headers.contains_key(CONTENT_LENGTH) {
            parts.headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        let progress = Progress::start();
        let mut passed = Request::new(Upload { body: Box::pin(body), progress: progress.clone() });
        *passed.uri_mut() = origin_form(guest_path(&parts.uri, target.via));
        *passed.method_mut() = parts.method;
        *passed.version_mut() = Version::HTTP_11;
        *passed.headers_mut() = parts.headers;
        (passed, progress)
    }

    /// Sends the request over a connection of its own and waits for the answer's head.
    async fn exchange<B>(
        &self,
        stream: TcpStream,
        request: Request<Upload<B>>,
        progress: Progress,
        client_upgrade: Option<hyper::upgrade::OnUpgrade>,
        cut: Cut,
    ) -> Result<Response<Body>, Refusal>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        let no_answer = |error: hyper::Error| {
            debug!(error = &error as &dyn StdError, "no answer");
            Refusal::NoAnswer
        };
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(no_answer)?;
        let closing = self.closing.clone();
        let task = self.tasks.spawn(async move {
            // Its errors also reach whoever waits for the answer or reads the body.
            tokio::select! {
                result = connection.with_upgrades() => if let Err(error) = result {
                    debug!(error = &error as &dyn StdError, "connection into a sandbox broke");
                },
                () = closing.cancelled() => {}
            }
        });
        let connection = Connection(task.abort_handle());

        let mut head = pin!(sender.send_request(request));
        let mut response = loop {
            let deadline = progress.last() + self.limits.answer;
            tokio::select! {
                result = &mut head => break result.map_err(no_answer)?,
                () = tokio::time::sleep_until(deadline.into()) => {
                    if progress.last() + self.limits.answer <= deadline {
                        return Err(Refusal::TimedOut);
                    }
                }
            }
        };

        let upgraded = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let guest_upgrade = upgraded.then(|| hyper::upgrade::on(&mut response));
        let (mut parts, body) = response.into_parts();
        headers::for_client(&mut parts.headers, upgraded);
        let body = match (client_upgrade, guest_upgrade) {
            (Some(client), Some(guest)) => {
                self.tasks.spawn(splice(client, guest, connection, cut));
                Body::text(String::new())
            }
            // A switch that nobody asked for.
            (None, Some(_)) => return Err(Refusal::NoAnswer),
            (_, None) => Body::guest(body, connection, cut),
        };
        let mut answer = Response::new(body);
        *answer.status_mut() = parts.status;
        *answer.headers_mut() = parts.headers;
        Ok(answer)
    }
}

/// A URI of nothing but path and query, octet for octet.
fn origin_form(path: &str) -> Uri {
    // `?query` alone is not a path. All else was part of a valid URI.
    let path = if path.starts_with('?') { format!("/{path}") } else { path.to_owned() };
    PathAndQuery::try_from(path).map(Uri::from).unwrap_or_default()
}
