//! Lets browsers in: the JavaScript SDK also runs there, and the token guards what matters.

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderValue, Method, StatusCode, header};

const METHODS: HeaderValue = HeaderValue::from_static("HEAD, GET, POST, PUT, PATCH, DELETE");
/// Response headers that scripts may read: those of the Connect and gRPC protocols, and of file transfer.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin, Connect-Content-Encoding, Connect-Accept-Encoding, \
     Location, Cache-Control, X-Content-Type-Options",
);
const MAX_AGE: HeaderValue = HeaderValue::from_static("7200");
const ANY: HeaderValue = HeaderValue::from_static("*");

/// Answers preflight requests and marks every other answer as readable from any origin.
pub(super) async fn allow_all(request: Request, next: Next) -> Response {
    let from_script = request.headers().contains_key(header::ORIGIN);
    let preflight = from_script
        && request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    if preflight {
        // `*` does not cover the Authorization header, so the wish is echoed.
        let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned().unwrap_or(ANY);
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        return response;
    }
    let mut response = next.run(request).await;
    if from_script {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    response
}
