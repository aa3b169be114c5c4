//! The control plane's one door: exactly one `X-API-Key`, compared in constant time. No other header opens it.

use aenv_api::API_KEY_HEADER;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::App;
use super::error::ApiError;

pub(super) async fn require_key(State(app): State<App>, request: Request, next: Next) -> Response {
    let mut keys = request.headers().get_all(API_KEY_HEADER).iter();
    let refusal = match (keys.next(), keys.next()) {
        (Some(key), None) if app.key.matches(key.as_bytes()) => return next.run(request).await,
        (Some(_), None) => "invalid API key",
        (Some(_), Some(_)) => "more than one X-API-Key header",
        (None, _) => "missing X-API-Key header",
    };
    ApiError::new(StatusCode::UNAUTHORIZED, refusal).into_response()
}
