//! Bodies in flight: the answer to the client, and the request on its way to the guest.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

/// Why an answer broke off. The client sees its connection end in the middle of the body.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The guest's side failed.
    #[error("the connection into the sandbox broke")]
    Guest(#[source] hyper::Error),
    /// The sandbox ended, or the node's proxy did.
    #[error("the sandbox ended")]
    Ended,
}

/// An answer's body: the guest's as it comes, or a short text of the proxy's own.
pub struct Body(Inner);

enum Inner {
    Text(Full<Bytes>),
    Guest(Box<GuestBody>),
}

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.0 {
            Inner::Text(_) => "text",
            Inner::Guest(_) => "guest",
        };
        f.debug_tuple("Body").field(&kind).finish()
    }
}

impl Body {
    pub(crate) fn text(text: String) -> Self {
        Self(Inner::Text(Full::from(text)))
    }

    /// The guest's body; `connection` feeds it and ends with it.
    pub(crate) fn guest(body: Incoming, connection: Connection, cut: Cut) -> Self {
        let waiting = Box::pin(cut.clone().fired());
        Self(Inner::Guest(Box::new(GuestBody { body, cut, waiting, _connection: connection })))
    }
}

struct GuestBody {
    body: Incoming,
    cut: Cut,
    waiting: Pin<Box<dyn Future<Output = ()> + Send>>,
    _connection: Connection,
}

impl GuestBody {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        if self.cut.is_fired() || self.waiting.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(StreamError::Ended)));
        }
        match Pin::new(&mut self.body).poll_frame(cx) {
            // The end of a sandbox may reach us as the end of its connection first. What looks complete is not then.
            Poll::Ready(None) if self.cut.is_fired() => Poll::Ready(Some(Err(StreamError::Ended))),
            Poll::Ready(frame) => Poll::Ready(frame.map(|frame| frame.map_err(StreamError::Guest))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = StreamError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        match &mut self.get_mut().0 {
            // A text cannot fail.
            Inner::Text(text) => Pin::new(text).poll_frame(cx).map_err(|never| match never {}),
            Inner::Guest(guest) => guest.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Inner::Text(text) => text.is_end_stream(),
            Inner::Guest(guest) => guest.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Inner::Text(text) => text.size_hint(),
            Inner::Guest(guest) => guest.body.size_hint(),
        }
    }
}

/// The two reasons to cut a stream: its sandbox ended, or the proxy is closing.
#[derive(Debug, Clone)]
pub(crate) struct Cut {
    pub(crate) ended: CancellationToken,
    pub(crate) closing: CancellationToken,
    pub(crate) _in_use: Option<Arc<dyn Any + Send + Sync>>,
}

impl Cut {
    pub(crate) fn is_fired(&self) -> bool {
        self.ended.is_cancelled() || self.closing.is_cancelled()
    }

    pub(crate) async fn fired(self) {
        tokio::select! {
            () = self.ended.cancelled() => {}
            () = self.closing.cancelled() => {}
        }
    }
}

/// The task that moves a connection's bytes. Ends with this value.
#[derive(Debug)]
pub(crate) struct Connection(pub(crate) AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// When the client last gave us something to pass on.
#[derive(Debug, Clone)]
pub(crate) struct Progress(Arc<Mutex<Instant>>);

impl Progress {
    pub(crate) fn start() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    pub(crate) fn last(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

/// A request's body on its way to the guest, noting its progress.
#[derive(Debug)]
pub(crate) struct Upload<B> {
    pub(crate) body: Pin<Box<B>>,
    pub(crate) progress: Progress,
}

impl<B: HttpBody<Data = Bytes>> HttpBody for Upload<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let polled = self.body.as_mut().poll_frame(cx);
        if polled.is_ready() {
            self.progress.note();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
