//! What all server streams of the protocol share: keepalives while nothing happens, and the caller's deadline.

use std::future::Future;
use std::time::Duration;

use connectrpc::{ConnectError, RequestContext, ServiceStream};
use tokio::time::Instant;

/// Seconds between keepalives when the caller names none.
const DEFAULT_KEEPALIVE: Duration = Duration::from_secs(90);

/// When a stream speaks although it has nothing to say, and when it ends although there would be more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    keepalive: Duration,
    pub(super) deadline: Option<Instant>,
}

impl Pace {
    /// From `Keepalive-Ping-Interval` (whole seconds) and the request's deadline.
    pub(super) fn of(context: &RequestContext) -> Self {
        let interval = context.header("keepalive-ping-interval").and_then(|value| value.to_str().ok()?.parse().ok());
        let keepalive = interval.filter(|seconds| *seconds > 0).map_or(DEFAULT_KEEPALIVE, Duration::from_secs);
        Self { keepalive, deadline: context.deadline().map(Instant::from_std) }
    }
}

/// Where a stream's events come from.
pub(super) trait Events: Send + 'static {
    /// A message of the stream.
    type Message: Send + 'static;

    /// The first message, sent before anything is awaited.
    fn start(&mut self) -> Self::Message;
    /// A message that means nothing.
    fn keepalive(&self) -> Self::Message;
    /// The next message; `None` ends the stream well. Must be cancel safe.
    fn next(&mut self) -> impl Future<Output = Option<Result<Self::Message, ConnectError>>> + Send;
    /// Called when the deadline passes, before the stream ends with `deadline_exceeded`.
    fn expire(&mut self) -> impl Future<Output = ()> + Send;
}

enum Stage {
    Starting,
    Running,
    Over,
}

/// Makes the stream: start, events with keepalives between them, end.
pub(super) fn stream<E: Events>(events: E, pace: Pace) -> ServiceStream<E::Message> {
    Box::pin(futures::stream::unfold((events, Stage::Starting), move |(mut events, stage)| async move {
        match stage {
            Stage::Starting => Some((Ok(events.start()), (events, Stage::Running))),
            Stage::Running => match step(&mut events, pace).await {
                Some(Ok(message)) => Some((Ok(message), (events, Stage::Running))),
                Some(Err(error)) => Some((Err(error), (events, Stage::Over))),
                None => None,
            },
            Stage::Over => None,
        }
    }))
}

async fn step<E: Events>(events: &mut E, pace: Pace) -> Option<Result<E::Message, ConnectError>> {
    let deadline = async {
        match pace.deadline {
            Some(deadline) => tokio::time::sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = deadline => {}
        event = events.next() => return event,
        () = tokio::time::sleep(pace.keepalive) => return Some(Ok(events.keepalive())),
    }
    events.expire().await;
    Some(Err(ConnectError::deadline_exceeded("context deadline exceeded")))
}
