//! What can go wrong between us and a registry, and what is worth repeating.

use std::io;
use std::ops::Range;
use std::time::Duration;

use reqwest::StatusCode;

use super::token::ExchangeError;

/// A range of a blob could not be read.
#[derive(Debug, thiserror::Error)]
#[error("fetch bytes {}..{} of {blob}, attempt {attempts}", range.start, range.end)]
pub struct FetchError {
    /// URL of the blob at its registry.
    pub blob: String,
    /// The bytes that were asked for.
    pub range: Range<u64>,
    /// How often it was tried.
    pub attempts: u32,
    /// What happened in the last attempt.
    pub source: FetchProblem,
}

/// What happened to one request.
#[derive(Debug, thiserror::Error)]
pub enum FetchProblem {
    /// No connection, or it broke.
    #[error("the connection failed")]
    Transport(#[source] reqwest::Error),
    /// A status that is no success, and the first words of the answer.
    #[error("HTTP status {status}: {words}")]
    Status {
        /// The status.
        status: StatusCode,
        /// The body's beginning.
        words: String,
        /// When the server would like to be asked again.
        retry_after: Option<Duration>,
    },
    /// The registry refuses us, also with a fresh token.
    #[error("the registry refuses access: {0}")]
    Unauthorized(String),
    /// No credentials could be had, and the registry refuses us without.
    #[error("look up credentials")]
    Credentials(#[source] io::Error),
    /// No token was given.
    #[error("get a token")]
    Token(#[source] Box<oci_client::errors::OciDistributionError>),
    /// No token was given for an identity token.
    #[error("trade an identity token")]
    Identity(#[source] ExchangeError),
    /// A redirect that leads nowhere we go: without a target, too many, or from https to http.
    #[error("redirect refused: {0}")]
    Redirect(String),
    /// Another part of the blob than was asked for.
    #[error("asked for bytes {}..{}, the server sent {got:?}", asked.start, asked.end)]
    WrongRange {
        /// What was asked for.
        asked: Range<u64>,
        /// The `Content-Range` of the answer.
        got: String,
    },
    /// The whole blob instead of the part that was asked for.
    #[error("the server ignores ranges")]
    RangeIgnored,
    /// The blob is not as long as its descriptor says.
    #[error("the blob is {found} bytes long, not {expected}")]
    WrongSize {
        /// Length by the descriptor.
        expected: u64,
        /// Length by the server.
        found: u64,
    },
    /// The answer does not tell how long the blob is.
    #[error("the server does not tell the blob's length")]
    NoSize,
    /// The body ended early.
    #[error("the answer ended {0} bytes early")]
    Cut(u64),
    /// The body went on after its end.
    #[error("the answer is longer than announced")]
    TooLong,
    /// The patience for the whole read ended in the middle of an attempt.
    #[error("no answer in time")]
    Slow,
}

impl FetchProblem {
    /// Whether it may pass by itself, so that it is repeated as long as there is patience. What a server does on purpose is
    /// repeated a few times only.
    pub(super) fn is_passing(&self) -> bool {
        match self {
            Self::Transport(_) | Self::Cut(_) | Self::Slow => true,
            Self::Status { status, .. } => {
                status.is_server_error()
                    || matches!(*status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
            }
            Self::Token(error) => {
                matches!(**error, oci_client::errors::OciDistributionError::RequestError(_))
            }
            Self::Identity(error) => matches!(error, ExchangeError::Request(_)),
            Self::Unauthorized(_)
            | Self::Credentials(_)
            | Self::Redirect(_)
            | Self::WrongRange { .. }
            | Self::RangeIgnored
            | Self::WrongSize { .. }
            | Self::NoSize
            | Self::TooLong => false,
        }
    }

    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

/// Signed URLs are secrets: an error says what happened, not where.
impl From<reqwest::Error> for FetchProblem {
    fn from(error: reqwest::Error) -> Self {
        Self::Transport(error.without_url())
    }
}

impl From<FetchError> for io::Error {
    fn from(error: FetchError) -> Self {
        let kind = match error.source {
            FetchProblem::Slow => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
