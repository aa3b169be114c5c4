//! The client against a stub server on the loopback.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aenv_api::{Client, ClientError, ListQuery, ListedSandbox, NewSandbox, Page, RefreshRequest};
use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// One request as the stub saw it.
#[derive(Debug, Clone)]
struct Seen {
    line: String,
    key: Option<String>,
    body: Value,
}

/// A server that answers every request alike and remembers what was asked. Ends with the test's runtime.
struct Stub {
    url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Stub {
    async fn answering(answer: impl Fn() -> Response + Clone + Send + Sync + 'static) -> Self {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        let app = Router::new().fallback(move |method: Method, uri: Uri, headers: HeaderMap, body: Bytes| {
            let key = headers.get("x-api-key").map(|key| key.to_str().unwrap().to_owned());
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            log.lock().unwrap().push(Seen { line: format!("{method} {uri}"), key, body });
            let response = answer();
            async move { response }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { url, seen }
    }

    fn client(&self) -> Client {
        Client::new(&self.url, "e2b_key").unwrap()
    }

    fn last(&self) -> Seen {
        self.seen.lock().unwrap().last().unwrap().clone()
    }
}

fn sandbox() -> Value {
    let id = "0190b3a0-0000-7000-8000-000000000001";
    json!({"templateID": id, "sandboxID": id, "clientID": "", "envdVersion": "0.6.13", "later": true})
}

#[tokio::test]
async fn a_create_carries_key_and_body() {
    let stub = Stub::answering(|| (StatusCode::CREATED, axum::Json(sandbox())).into_response()).await;
    let request = NewSandbox { template_id: "base".into(), timeout: Some(5), ..Default::default() };
    let made = stub.client().create_sandbox(&request).await.unwrap();
    assert_eq!(made.envd_version, "0.6.13");
    let seen = stub.last();
    assert_eq!((seen.line.as_str(), seen.key.as_deref()), ("POST /v2/sandboxes", Some("e2b_key")));
    assert_eq!(seen.body, json!({"templateID": "base", "timeout": 5}));
}

#[tokio::test]
async fn a_base_path_is_kept_and_segments_are_escaped() {
    let stub = Stub::answering(|| StatusCode::NO_CONTENT.into_response()).await;
    let client = Client::new(&format!("{}/aenv/", stub.url), "k").unwrap();
    client.delete_template("team/a:b").await.unwrap();
    assert_eq!(stub.last().line, "DELETE /aenv/templates/team%2Fa%3Ab");
    client.refresh("x", &RefreshRequest { duration: Some(60) }).await.unwrap();
    assert_eq!(stub.last().body, json!({"duration": 60}));
}

#[tokio::test]
async fn a_page_gives_its_items_and_the_next_token() {
    let stub = Stub::answering(|| ([("X-Next-Token", "abc")], axum::Json(json!([{"n": 1}]))).into_response()).await;
    let query = ListQuery { state: Some("running,paused".into()), limit: Some("1".into()), ..Default::default() };
    let page: Page<Value> = stub.client().list_sandboxes(&query).await.unwrap();
    assert_eq!((page.items, page.next_token.as_deref()), (vec![json!({"n": 1})], Some("abc")));
    assert_eq!(stub.last().line, "GET /v2/sandboxes?state=running%2Cpaused&limit=1");
    let error = stub.client().list_sandboxes::<ListedSandbox>(&query).await.unwrap_err();
    assert!(matches!(error, ClientError::Answer { .. }), "{error}");
}

#[tokio::test]
async fn a_refusal_speaks_with_the_servers_words() {
    let body = json!({"code": 404, "message": "template 'x' not found"});
    let stub = Stub::answering(move || (StatusCode::NOT_FOUND, axum::Json(body.clone())).into_response()).await;
    let error = stub.client().template("x").await.unwrap_err();
    assert_eq!(error.to_string(), "template 'x' not found (404)");
    assert!(error.is_not_found());

    let stub = Stub::answering(|| (StatusCode::BAD_GATEWAY, "upstream sad\n").into_response()).await;
    assert_eq!(stub.client().health().await.unwrap_err().to_string(), "upstream sad (502)");
    let stub = Stub::answering(|| StatusCode::SERVICE_UNAVAILABLE.into_response()).await;
    assert_eq!(stub.client().health().await.unwrap_err().to_string(), "Service Unavailable (503)");
}

#[tokio::test]
async fn a_refused_key_comes_with_advice() {
    let body = json!({"code": 401, "message": "invalid API key"});
    let stub = Stub::answering(move || (StatusCode::UNAUTHORIZED, axum::Json(body.clone())).into_response()).await;
    let error = stub.client().health().await.unwrap_err();
    assert!(error.to_string().contains("aenv auth"), "{error}");
    assert_eq!(error.status(), Some(StatusCode::UNAUTHORIZED));
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_at_once() {
    let gone = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let began = Instant::now();
    let error = Client::new(&format!("http://{gone}"), "k").unwrap().health().await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains(&gone.to_string()), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test]
async fn an_answer_cut_short_is_told_from_a_wrong_one() {
    let stub = Stub::answering(|| ([(header::CONTENT_TYPE, "text/html")], "<html>").into_response()).await;
    let error = stub.client().sandbox("x").await.unwrap_err();
    assert!(matches!(error, ClientError::Answer { .. }) && error.to_string().contains("GET /sandboxes/x"), "{error}");
}

#[test]
fn only_http_urls_are_servers() {
    for bad in ["", "localhost:8000", "ftp://host", "/path", "http://"] {
        let error = Client::new(bad, "k").unwrap_err();
        assert!(matches!(error, ClientError::ServerUrl { .. }), "{bad}: {error}");
    }
    assert!(matches!(Client::new("http://h", "a\nb").unwrap_err(), ClientError::ApiKey));
    assert_eq!(Client::new("http://h:1/", "k").unwrap().server(), "http://h:1");
}
