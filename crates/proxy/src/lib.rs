//! The data plane: requests to ports inside sandboxes.
//!
//! ```text
//! request ─▶ Targets::of ─▶ Proxy::handle ─▶ Routes::route ─▶ may it? ─▶ Connector::connect ─▶ one HTTP/1.1 exchange
//!            host, /proxy       │               │ no             │ no        │ refused              │
//!            or headers         │               ▼ 502            ▼ 403/404   ▼ 502                  ▼ streamed, unbuffered
//! ```
//!
//! What it promises: bytes are passed on when they arrive, in both directions at once, with memory that does not depend
//! on how many there are. Path and query go through octet for octet. When either side goes away the other one notices;
//! when the sandbox ends, the client's stream *breaks*, so that nobody takes a killed command's output for all of it.
//! A connection to the guest carries one request: nothing of one client ever reaches another.
//!
//! Who cleans up: a connection ends with the response body it feeds, and an upgraded one with either of its peers, the
//! sandbox, or [`Proxy::close`].
//!
//! Informational answers (1xx) of a guest are not passed on, since the HTTP library below can only send the one it needs
//! itself: `100 Continue`, as soon as the guest is connected.

#![forbid(unsafe_code)]

mod access;
mod body;
mod headers;
mod proxy;
mod refusal;
mod route;
mod target;
#[cfg(test)]
mod tests;
mod upgrade;

pub use body::{Body, StreamError};
pub use proxy::{IsKey, Limits, Proxy};
pub use route::{Connector, Route, RouteError, Routes};
pub use target::{Target, TargetProblem, Targets, Via};

/// The port of the guest agent (envd) in every sandbox; fixed by the SDKs.
pub const AGENT_PORT: u16 = 49983;
