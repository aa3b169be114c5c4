//! Bodies and queries as types, with refusals that say where and what.

use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::error::ApiError;

/// A JSON body. An empty one is `{}`: every field of such a request is optional or told as missing.
///
/// The `Content-Type` is not looked at, as clients of this API are not consistent about it.
#[derive(Debug)]
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        // axum bounds bodies to 2 MB by itself.
        let bytes = Bytes::from_request(request, state)
            .await
            .map_err(|rejection| ApiError::new(rejection.status(), rejection.body_text()))?;
        match bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
            None => parse(b"{}").map(Self),
            // A list would be taken for the fields in their order.
            Some(b'[') => Err(ApiError::bad_request("invalid body: expected an object, not a list")),
            Some(_) => parse(&bytes).map(Self),
        }
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.inner(); // carries line and column
        let message = match inner.classify() {
            serde_json::error::Category::Data if path != "." => format!("invalid field {path}: {inner}"),
            serde_json::error::Category::Data => format!("invalid body: {inner}"),
            _ => format!("malformed JSON: {inner}"),
        };
        ApiError::new(StatusCode::BAD_REQUEST, message)
    })?;
    deserializer.end().map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, format!("malformed JSON: {error}")))?;
    Ok(value)
}

/// Parts of the path. One that is not UTF-8 after decoding names nothing of ours.
#[derive(Debug)]
pub(super) struct PathOf<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathOf<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        Path::<T>::from_request_parts(parts, state)
            .await
            .map(|Path(value)| Self(value))
            .map_err(|rejection| ApiError::new(StatusCode::NOT_FOUND, rejection.body_text()))
    }
}

/// A query string.
#[derive(Debug)]
pub(super) struct QueryOf<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryOf<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        Query::<T>::from_request_parts(parts, state)
            .await
            .map(|Query(value)| Self(value))
            .map_err(|rejection| ApiError::new(StatusCode::BAD_REQUEST, rejection.body_text()))
    }
}

#[cfg(test)]
mod tests {
    use aenv_api::NewSandbox;

    use super::*;

    fn refusal(text: &str) -> String {
        parse::<NewSandbox>(text.as_bytes()).unwrap_err().message().to_owned()
    }

    #[test]
    fn a_refusal_names_the_position_or_the_field() {
        let message = refusal("{\"templateID\": \"base\",\n nonsense}");
        assert!(message.starts_with("malformed JSON") && message.contains("line 2 column"), "{message}");
        let message = refusal("{\"templateID\": \"base\", \"timeout\": \"soon\"}");
        assert!(message.starts_with("invalid field timeout") && message.contains("u32"), "{message}");
        let message = refusal("{}");
        assert!(message.contains("templateID"), "{message}");
        let message = refusal("{\"templateID\": \"base\"} {}");
        assert!(message.contains("trailing"), "{message}");
    }

    #[test]
    fn fields_nobody_knows_are_tolerated() {
        assert!(parse::<NewSandbox>(br#"{"templateID": "base", "fromTheFuture": [1]}"#).is_ok());
    }
}
