//! The control plane's one door: exactly one `X-API-Key`. No other header opens it.

use aenv_api::{API_KEY_HEADER, KeyScope};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::App;
use super::error::ApiError;
use crate::keys::Caller;

/// Lets in who has a key, for what that may do. What was refused, and what may change something, is in the audit log.
pub(super) async fn require_key(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let is_read = is_read(request.method(), request.uri().path());
    let (entry, response) = match admitted(&app, &request) {
        Ok(caller) => {
            let entry = (!is_read).then(|| app.audit.begin(&request, Some(&caller)));
            request.extensions_mut().insert(caller);
            (entry, next.run(request).await)
        }
        Err((caller, refusal)) => (Some(app.audit.begin(&request, caller.as_ref())), refusal.into_response()),
    };
    if let Some(entry) = entry {
        entry.end(response.status()).await;
    }
    response
}

fn admitted(app: &App, request: &Request) -> Result<Caller, (Option<Caller>, ApiError)> {
    let mut keys = request.headers().get_all(API_KEY_HEADER).iter();
    let unauthorized = |why| (None, ApiError::new(StatusCode::UNAUTHORIZED, why));
    let key = match (keys.next(), keys.next()) {
        (Some(key), None) => key,
        (Some(_), Some(_)) => return Err(unauthorized("more than one X-API-Key header")),
        (None, _) => return Err(unauthorized("missing X-API-Key header")),
    };
    let caller = app.keys.caller(key.as_bytes()).ok_or_else(|| unauthorized("invalid API key"))?;
    if caller.scope == KeyScope::Read && !is_read(request.method(), request.uri().path()) {
        let message =
            format!("the key '{}' may look only, not {} {}", caller.name, request.method(), request.uri().path());
        return Err((Some(caller), ApiError::new(StatusCode::FORBIDDEN, message)));
    }
    Ok(caller)
}

/// Whether a request only looks at what there is. What reads a file acts in a sandbox; a link to uploads opens more; and
/// keys are their owners' affair.
fn is_read(method: &Method, path: &str) -> bool {
    let acts = path.contains("/files/") || path.starts_with("/api-keys");
    matches!(*method, Method::GET | Method::HEAD) && !acts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_is_told_from_acting() {
        assert!(is_read(&Method::GET, "/v2/sandboxes"));
        assert!(is_read(&Method::HEAD, "/templates"));
        assert!(!is_read(&Method::POST, "/v2/sandboxes"));
        assert!(!is_read(&Method::GET, "/sandboxes/x/files/read"));
        assert!(!is_read(&Method::GET, "/templates/x/files/0123"));
        assert!(!is_read(&Method::GET, "/api-keys"));
    }
}
