//! Files for builds: a link for whoever has the API key, and the way in for whoever has the link.

use aenv_api::FilesLink;
use aenv_template::is_files_hash;
use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use futures::TryStreamExt as _;
use jiff::Timestamp;
use serde::Deserialize;
use subtle::ConstantTimeEq as _;

use super::App;
use super::body::{PathOf, QueryOf};
use super::error::ApiError;
use super::templates::find;

/// How long a link can be used to begin with an upload: clients do at once.
const LINK_SECONDS: i64 = 3600;

/// Leave to send files.
#[derive(Debug, Deserialize)]
pub(super) struct Leave {
    expires: i64,
    token: String,
}

/// `GET /templates/{id}/files/{hash}`.
pub(super) async fn link(
    State(app): State<App>,
    PathOf((template, hash)): PathOf<(String, String)>,
    request: Request,
) -> Result<(StatusCode, Json<FilesLink>), ApiError> {
    if !is_files_hash(&hash) {
        return Err(ApiError::bad_request("invalid hash of files: expected 64 lower-case hexadecimal digits"));
    }
    find(&app, &template).await?;
    let present = app.templates.uploads().find(&hash).is_some();
    let expires = Timestamp::now().as_second() + LINK_SECONDS;
    let token = app.seed.upload_token(&hash, expires);
    let url = format!("{}/uploads/{hash}?expires={expires}&token={token}", origin(&request)?);
    Ok((StatusCode::CREATED, Json(FilesLink { present, url: Some(url) })))
}

/// `PUT /uploads/{hash}`: without an API key, as the link says that it may.
pub(super) async fn receive(
    State(app): State<App>,
    PathOf(hash): PathOf<String>,
    QueryOf(Leave { expires, token }): QueryOf<Leave>,
    body: Body,
) -> Result<StatusCode, ApiError> {
    let right = app.seed.upload_token(&hash, expires);
    if !bool::from(right.as_bytes().ct_eq(token.as_bytes())) {
        return Err(ApiError::new(StatusCode::FORBIDDEN, "this link was not made here"));
    }
    if expires < Timestamp::now().as_second() {
        return Err(ApiError::new(StatusCode::FORBIDDEN, "this link has expired, ask for another"));
    }
    let pieces = body.into_data_stream().map_err(|_| ());
    app.templates.uploads().receive(&hash, pieces).await?;
    Ok(StatusCode::CREATED)
}

/// Where the client sees this server: what it has asked for reaches it.
fn origin(request: &Request) -> Result<String, ApiError> {
    let text = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST.as_str()).or_else(|| request.uri().authority().map(|authority| authority.as_str()));
    let host = host.ok_or_else(|| ApiError::bad_request("missing Host header"))?;
    // Of several proxies, the first has talked to the client.
    let scheme = text("x-forwarded-proto").and_then(|schemes| schemes.split(',').next()).map(str::trim);
    let scheme = scheme.filter(|scheme| matches!(*scheme, "http" | "https")).unwrap_or("http");
    Ok(format!("{scheme}://{host}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(headers: &[(&str, &str)]) -> Result<String, ApiError> {
        let request = headers.iter().fold(Request::get("/x"), |request, (name, value)| request.header(*name, *value));
        origin(&request.body(Body::empty()).unwrap())
    }

    #[test]
    fn links_lead_where_the_client_came_in() {
        assert_eq!(of(&[("host", "10.0.0.1:8000")]).unwrap(), "http://10.0.0.1:8000");
        let proxied = [("host", "api.example.com"), ("x-forwarded-proto", "https, http")];
        assert_eq!(of(&proxied).unwrap(), "https://api.example.com");
        assert!(of(&[]).is_err());
    }
}
