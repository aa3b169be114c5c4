//! Who may ask: the access token, signed file URLs, and the user that basic authentication names.
//!
//! The token is not a login. It proves that a request comes from whom the node gave the token to; the user only selects
//! home directory and ownership, and needs no password.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use http::{HeaderMap, Method, header};
use jiff::Timestamp;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use super::Envd;
use super::error::HttpError;

/// The header that carries the access token.
pub(super) const TOKEN_HEADER: &str = "x-access-token";

/// Requests that pass without the token header because they check for themselves.
const EXEMPT: [(Method, &str); 4] =
    [(Method::GET, "/health"), (Method::GET, "/files"), (Method::POST, "/files"), (Method::POST, "/init")];

/// Refuses requests without the right token, once there is one.
pub(super) async fn require_token(State(envd): State<Arc<Envd>>, request: Request, next: Next) -> Response {
    if let Some(token) = envd.settings.access_token() {
        let exempt = EXEMPT.iter().any(|(method, path)| request.method() == method && request.uri().path() == *path);
        let presented = presented_token(request.headers());
        if !exempt && !presented.is_some_and(|presented| same(presented, &token)) {
            return HttpError::unauthorized(
                "unauthorized access, please provide a valid access token or method signing if supported",
            )
            .into_response();
        }
    }
    next.run(request).await
}

/// The token a request carries, if any.
pub(super) fn presented_token(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get(TOKEN_HEADER).map(|value| value.as_bytes())
}

/// Compares secrets in time that tells nothing.
pub(super) fn same(presented: &[u8], secret: &str) -> bool {
    presented.ct_eq(secret.as_bytes()).into()
}

/// What a file URL may be signed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
}

/// The parts of a `/files` request that its signature covers, as they were sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct SignedRequest<'a> {
    pub(super) path: &'a str,
    pub(super) username: &'a str,
    pub(super) signature: Option<&'a str>,
    pub(super) expiration: Option<i64>,
}

/// Lets a `/files` request pass if it carries the token, or a signature made with it that has not expired.
pub(super) fn authorize_files(
    token: Option<&str>,
    headers: &HeaderMap,
    operation: Operation,
    request: SignedRequest<'_>,
    now: Timestamp,
) -> Result<(), HttpError> {
    let Some(token) = token else { return Ok(()) };
    if let Some(presented) = presented_token(headers) {
        return match same(presented, token) {
            true => Ok(()),
            false => Err(HttpError::unauthorized("access token present in header but does not match")),
        };
    }
    let signature = request.signature.ok_or_else(|| HttpError::unauthorized("missing signature query parameter"))?;
    let expected = sign(request.path, operation, request.username, token, request.expiration);
    if !same(signature.as_bytes(), &expected) {
        return Err(HttpError::unauthorized("invalid signature"));
    }
    match request.expiration {
        Some(expiration) if expiration < now.as_second() => {
            Err(HttpError::unauthorized("signature is already expired"))
        }
        _ => Ok(()),
    }
}

fn sign(path: &str, operation: Operation, username: &str, token: &str, expiration: Option<i64>) -> String {
    let operation = match operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    let mut text = format!("{path}:{operation}:{username}:{token}");
    if let Some(expiration) = expiration {
        text.push_str(&format!(":{expiration}"));
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

/// The user name of HTTP basic authentication. The password is not looked at: there are none.
pub(super) fn basic_user(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, credentials) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(credentials.trim()).ok()?).ok()?;
    let user = decoded.split_once(':').map_or(decoded.as_str(), |(user, _)| user);
    Some(user.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_match_the_sdks() {
        assert_eq!(sign("a", Operation::Read, "", "tok", None), "v1_54rCkEfEkZrpUtVWRlqL2nxBx/LpQ6ChNKYkiNC4s3g");
        assert_eq!(
            sign("hello.txt", Operation::Read, "user", "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0", None),
            "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"
        );
    }

    #[test]
    fn a_signature_opens_one_path_for_one_operation_until_it_expires() {
        let signature = sign("a", Operation::Read, "u", "tok", Some(100));
        let request = SignedRequest { path: "a", username: "u", signature: Some(&signature), expiration: Some(100) };
        let check = |operation, request, now| {
            let now = Timestamp::from_second(now).unwrap();
            authorize_files(Some("tok"), &HeaderMap::new(), operation, request, now).is_ok()
        };
        assert!(check(Operation::Read, request, 100));
        assert!(!check(Operation::Read, request, 101), "expired");
        assert!(!check(Operation::Write, request, 50), "other operation");
        assert!(!check(Operation::Read, SignedRequest { path: "b", ..request }, 50), "other path");
        assert!(!check(Operation::Read, SignedRequest { expiration: Some(200), ..request }, 50), "longer life");
        assert!(!check(Operation::Read, SignedRequest { signature: None, ..request }, 50), "none");
    }

    #[test]
    fn basic_authentication_names_the_user() {
        let mut headers = HeaderMap::new();
        assert_eq!(basic_user(&headers), None);
        headers.insert(header::AUTHORIZATION, format!("Basic {}", STANDARD.encode("user:")).parse().unwrap());
        assert_eq!(basic_user(&headers).as_deref(), Some("user"));
        headers.insert(header::AUTHORIZATION, "Bearer x".parse().unwrap());
        assert_eq!(basic_user(&headers), None);
    }
}
