//! `Idempotency-Key`: a request that is sent again does nothing again, and has the answer of the first time.
//!
//! What is begun is written down first, and its answer before it is sent. A key is free again after a request that failed;
//! one whose request was cut short by the end of the server is not, for nobody knows how far it came.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aenv_durable::{Row, Store, StoreError, Table};
use aenv_tasks::TaskScope;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tracing::warn;

use super::error::ApiError;

const KEY_HEADER: &str = "idempotency-key";
/// Longest key.
const KEY_LIMIT: usize = 255;
/// Says that nothing was done this time.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// How long a key is known.
const LIFE: SignedDuration = SignedDuration::from_hours(24);
/// Largest answer that is kept, in bytes: hundreds of sandboxes.
const ANSWER_LIMIT: usize = 4 << 20;
/// Version of the rows.
const ROW_VERSION: u32 = 1;

/// What is known of a key.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Known {
    /// SHA-256 of what was asked for, in hexadecimal.
    request: String,
    at: Timestamp,
    /// `None` until there is one.
    answer: Option<Answer>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
}

/// All keys of the last day.
#[derive(Debug, Clone)]
pub(crate) struct Once {
    inner: std::sync::Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    rows: Table<Known>,
    known: Mutex<HashMap<String, Known>>,
    /// Keys whose requests are under way here.
    under_way: Mutex<std::collections::HashSet<String>>,
    scope: TaskScope,
}

impl Once {
    /// With what a former server wrote down. Blocking.
    pub(crate) fn load(store: &Store, scope: TaskScope) -> Result<Self, StoreError> {
        let rows: Table<Known> = store.table("idempotency", ROW_VERSION);
        let mut known = HashMap::new();
        for (key, row) in rows.list_blocking()? {
            match row {
                Row::Known(row) if is_old(&row) => rows.remove_blocking(&key)?,
                Row::Known(row) => _ = known.insert(key, row),
                Row::Unknown(why) => warn!(key, why, "kept an idempotency key that this version does not understand"),
            }
        }
        let inner = Inner { rows, known: Mutex::new(known), under_way: Mutex::default(), scope };
        Ok(Self { inner: std::sync::Arc::new(inner) })
    }

    /// The key of a request, if it has one.
    pub(super) fn key(&self, headers: &HeaderMap) -> Result<Option<String>, ApiError> {
        let Some(value) = headers.get(KEY_HEADER) else { return Ok(None) };
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        match value.to_str() {
            Ok(key) if (1..=KEY_LIMIT).contains(&key.len()) && key.chars().all(allowed) => Ok(Some(key.to_owned())),
            _ => Err(ApiError::bad_request(format!(
                "invalid header Idempotency-Key: expected 1 to {KEY_LIMIT} of a-z, 0-9 and '-'"
            ))),
        }
    }

    /// What stands for a request of this kind.
    pub(super) fn hash(kind: &str, request: &impl Serialize) -> String {
        let text = serde_json::to_string(request).unwrap_or_default(); // of a type of ours, whose keys are texts
        hex::encode(Sha256::digest(format!("{kind} {text}")))
    }

    /// Runs `work`, unless the key's request was answered before. Without a key it is just run.
    ///
    /// Cancel safety: with a key, if dropped, the work goes on to its end.
    pub(super) async fn run(
        &self,
        key: Option<String>,
        request: String,
        work: impl Future<Output = Result<Response, ApiError>> + Send + 'static,
    ) -> Result<Response, ApiError> {
        let Some(key) = key else { return work.await };
        if let Some(answered) = self.begin(&key, &request)? {
            return Ok(answered);
        }
        let once = self.clone();
        let whole = async move {
            let done = once.first_time(&key, request, work).await;
            lock(&once.inner.under_way).remove(&key);
            done
        };
        let task = self.inner.scope.spawn("a request with a key", whole);
        task.await.unwrap_or_else(|_| Err(ApiError::unavailable("the node is shutting down")))
    }

    /// The answer of the first time; `None` if this is the first time.
    fn begin(&self, key: &str, request: &str) -> Result<Option<Response>, ApiError> {
        let mut under_way = lock(&self.inner.under_way);
        let known = lock(&self.inner.known).get(key).filter(|known| !is_old(known)).cloned();
        let conflict = |code, message: &str| Err(ApiError::coded(StatusCode::CONFLICT, code, message));
        match known {
            Some(known) if known.request != request => Err(ApiError::coded(
                StatusCode::UNPROCESSABLE_ENTITY,
                "idempotency_request_mismatch",
                "this Idempotency-Key was sent with another request",
            )),
            Some(Known { answer: Some(answer), .. }) => Ok(Some(answer.replayed())),
            _ if under_way.contains(key) => {
                conflict("idempotency_in_progress", "a request with this Idempotency-Key is under way")
            }
            Some(_) => conflict(
                "idempotency_outcome_unknown",
                "the node ended while a request with this Idempotency-Key was under way: look at what there is, and use another key",
            ),
            None => {
                under_way.insert(key.to_owned());
                Ok(None)
            }
        }
    }

    async fn first_time(
        &self,
        key: &str,
        request: String,
        work: impl Future<Output = Result<Response, ApiError>>,
    ) -> Result<Response, ApiError> {
        let unwritten = |error: StoreError| ApiError::unavailable(format!("write down the Idempotency-Key: {error}"));
        let mut known = Known { request, at: Timestamp::now(), answer: None };
        self.put(key, &known).await.map_err(unwritten)?;
        let answered = match work.await {
            Ok(response) => Answer::of(response).await.map(|(answer, response)| {
                known.answer = Some(answer);
                response
            }),
            Err(error) => Err(error),
        };
        let written = match &answered {
            Ok(_) => self.put(key, &known).await,
            Err(_) => {
                lock(&self.inner.known).remove(key);
                self.inner.rows.remove(key).await
            }
        };
        if let Err(error) = written {
            warn!(key, %error, "the outcome of a request with a key is not written down");
        }
        answered
    }

    async fn put(&self, key: &str, known: &Known) -> Result<(), StoreError> {
        self.inner.rows.put(key, known.clone()).await?;
        lock(&self.inner.known).insert(key.to_owned(), known.clone());
        Ok(())
    }
}

impl Answer {
    /// An answer with its body read, and the answer again.
    async fn of(response: Response) -> Result<(Self, Response), ApiError> {
        let (parts, body) = response.into_parts();
        let too_large = |error| ApiError::unavailable(format!("read the answer: {error}"));
        let body = to_bytes(body, ANSWER_LIMIT).await.map_err(too_large)?;
        let texts =
            parts.headers.iter().filter_map(|(name, value)| Some((name.to_string(), value.to_str().ok()?.into())));
        let answer = Self {
            status: parts.status.as_u16(),
            headers: texts.collect(),
            body: String::from_utf8_lossy(&body).into_owned(),
        };
        Ok((answer, Response::from_parts(parts, Body::from(body))))
    }

    fn replayed(self) -> Response {
        let mut response = Response::new(Body::from(self.body));
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap_or(StatusCode::OK);
        for (name, value) in self.headers {
            if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse::<HeaderValue>()) {
                response.headers_mut().insert(name, value);
            }
        }
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
        response
    }
}

fn is_old(known: &Known) -> bool {
    known.at.duration_until(Timestamp::now()) > LIFE
}

// Each section is a map operation or two: valid after any panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn once(dir: &tempfile::TempDir) -> Once {
        let store = Store::open(&dir.path().join("node.redb")).unwrap();
        Once::load(&store, TaskScope::new("test")).unwrap()
    }

    async fn ok(text: &'static str) -> Result<Response, ApiError> {
        Ok(Response::builder().status(201).header("x-id", text).body(Body::from(text)).unwrap())
    }

    async fn text(response: Response) -> (u16, String, bool) {
        let replayed = response.headers().contains_key(REPLAYED);
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 100).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap(), replayed)
    }

    #[tokio::test]
    async fn the_second_time_has_the_first_answer_also_from_the_next_server() {
        let dir = tempfile::tempdir().unwrap();
        let key = || Some("k".to_owned());
        {
            let once = once(&dir);
            let first = once.run(key(), "a".into(), ok("one")).await.unwrap();
            assert_eq!(text(first).await, (201, "one".into(), false));
            let second = once.run(key(), "a".into(), ok("two")).await.unwrap();
            assert_eq!(second.headers()["x-id"], "one");
            assert_eq!(text(second).await, (201, "one".into(), true));
            let other = once.run(key(), "b".into(), ok("two")).await.unwrap_err();
            assert!(other.message().contains("another request"));
        }
        let again = once(&dir).run(key(), "a".into(), ok("two")).await.unwrap();
        assert_eq!(text(again).await, (201, "one".into(), true));
    }

    #[tokio::test]
    async fn a_failure_frees_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let once = once(&dir);
        let failed = async { Err(ApiError::unavailable("no")) };
        once.run(Some("k".into()), "a".into(), failed).await.unwrap_err();
        let again = once.run(Some("k".into()), "a".into(), ok("one")).await.unwrap();
        assert_eq!(text(again).await, (201, "one".into(), false));
    }

    #[tokio::test]
    async fn one_request_at_a_time_has_a_key() {
        let dir = tempfile::tempdir().unwrap();
        let once = once(&dir);
        let (begun, begins) = tokio::sync::oneshot::channel();
        let (end, ends) = tokio::sync::oneshot::channel::<()>();
        let slow = async move {
            _ = begun.send(());
            _ = ends.await;
            ok("one").await
        };
        let running = tokio::spawn({
            let once = once.clone();
            async move { once.run(Some("k".into()), "a".into(), slow).await }
        });
        begins.await.unwrap();
        let second = once.run(Some("k".into()), "a".into(), ok("two")).await.unwrap_err();
        assert!(second.message().contains("under way"));
        // Whoever asked hangs up: it goes on.
        running.abort();
        end.send(()).unwrap();
        let answered = loop {
            match once.run(Some("k".into()), "a".into(), ok("two")).await {
                Ok(answered) => break answered,
                Err(_) => tokio::task::yield_now().await,
            }
        };
        assert_eq!(text(answered).await, (201, "one".into(), true));
    }

    #[tokio::test]
    async fn what_the_end_of_a_server_cut_short_is_not_done_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("node.redb")).unwrap();
        let cut = Known { request: "a".into(), at: Timestamp::now(), answer: None };
        let old = Known { at: Timestamp::now() - LIFE - SignedDuration::from_secs(1), ..cut.clone() };
        let rows = store.table("idempotency", ROW_VERSION);
        rows.put_blocking("k", &cut).unwrap();
        rows.put_blocking("old", &old).unwrap();
        let once = Once::load(&store, TaskScope::new("test")).unwrap();
        let unknown = once.run(Some("k".into()), "a".into(), ok("two")).await.unwrap_err();
        assert!(unknown.message().contains("the node ended"));
        let fresh = once.run(Some("old".into()), "b".into(), ok("one")).await.unwrap();
        assert_eq!(text(fresh).await, (201, "one".into(), false), "nobody remembers after a day");
    }

    #[test]
    fn keys_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let once = once(&dir);
        let key = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(KEY_HEADER, value.parse().unwrap());
            once.key(&headers)
        };
        assert_eq!(once.key(&HeaderMap::new()), Ok(None));
        assert_eq!(key("ab-1"), Ok(Some("ab-1".to_owned())));
        for bad in ["", "AB", "a b", &"a".repeat(256)] {
            key(bad).unwrap_err();
        }
    }
}
