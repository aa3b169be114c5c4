//! Errors of the plain HTTP endpoints: `{"code": …, "message": …}` with the matching status.

use std::fmt;
use std::io;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};

/// An answer other than success.
#[derive(Debug)]
pub(super) struct HttpError {
    status: StatusCode,
    message: String,
}

impl HttpError {
    pub(super) fn new(status: StatusCode, message: impl fmt::Display) -> Self {
        Self { status, message: message.to_string() }
    }

    pub(super) fn bad_request(message: impl fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(super) fn unauthorized(message: impl fmt::Display) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }

    pub(super) fn not_found(message: impl fmt::Display) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    pub(super) fn internal(message: impl fmt::Display) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// A failed file operation: `doing` says which. A full disk is told apart (507).
    pub(super) fn from_io(doing: impl fmt::Display, error: &io::Error) -> Self {
        if is_disk_full(error) {
            return Self::new(StatusCode::INSUFFICIENT_STORAGE, "not enough disk space available");
        }
        Self::internal(format!("{doing}: {error}"))
    }
}

/// No space, or no quota, is left.
pub(super) fn is_disk_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let body = serde_json::json!({ "code": self.status.as_u16(), "message": self.message }).to_string();
        let json = HeaderValue::from_static("application/json; charset=utf-8");
        (self.status, [(header::CONTENT_TYPE, json)], body).into_response()
    }
}
