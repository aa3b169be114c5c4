//! Errors of the plain HTTP endpoints: `{"code": …, "message": …}` with the matching status.

use std::fmt;
use std::io;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use rustix::io::Errno;

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

    /// A failed file operation: `doing` says which. Told apart are a full disk (507), a path that no file can have (400), and
    /// one whose file cannot be changed (403).
    pub(super) fn from_io(doing: impl fmt::Display, error: &io::Error) -> Self {
        if is_disk_full(error) {
            return Self::new(StatusCode::INSUFFICIENT_STORAGE, "not enough disk space available");
        }
        let status = match error.kind() {
            _ if is_path_unfit(error) => StatusCode::BAD_REQUEST,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => StatusCode::FORBIDDEN,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, format!("{doing}: {error}"))
    }
}

/// No file can be reached or made under that path: it has a zero byte, a name too long, a loop of links or a file amid its
/// directories, or leads to what is no file (a pipe that nobody reads, a device without a driver).
fn is_path_unfit(error: &io::Error) -> bool {
    let is_of_kind = matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::NotADirectory);
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    is_of_kind || matches!(errno, Some(Errno::NAMETOOLONG | Errno::LOOP | Errno::ISDIR | Errno::NXIO | Errno::NODEV))
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
