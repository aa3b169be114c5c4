//! The audit log: a JSON line for each request that may change something, and for each that was refused.
//!
//! One task writes. A request waits for room in its queue: what was done is not done unseen.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Instant;

use aenv_api::KeyScope;
use aenv_model::KeyId;
use axum::extract::{ConnectInfo, Request};
use axum::http::StatusCode;
use jiff::Timestamp;
use serde::Serialize;
use std::io::Write as _;
use tokio::sync::mpsc;
use tracing::warn;

use crate::keys::Caller;

/// Lines that may wait for the disk.
const QUEUE: usize = 4096;

/// A file that has grown so long is put aside, in the place of the one before.
const LIMIT: u64 = 64 << 20;

/// Where lines go. Cloning shares it.
#[derive(Debug, Clone)]
pub(crate) struct Audit {
    lines: Option<mpsc::Sender<Line>>,
}

/// A request that is being answered.
#[derive(Debug)]
pub(crate) struct Entry {
    at: Timestamp,
    began: Instant,
    from: Option<IpAddr>,
    method: String,
    path: String,
}

/// Who, what, when, from where, and what came of it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    at: Timestamp,
    /// The key's name; `None`: nobody's.
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_id: Option<KeyId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<KeyScope>,
    from: Option<IpAddr>,
    method: String,
    path: String,
    status: u16,
    took_ms: u64,
}

impl Audit {
    /// Nobody is to know.
    pub(crate) fn none() -> Self {
        Self { lines: None }
    }

    /// Appends to `path`, which is made if absent. The second is the work of that, which ends when all clones are dropped.
    pub(crate) fn to(path: PathBuf) -> std::io::Result<(Self, impl Future<Output = ()>)> {
        let mut log = Log::open(&path)?;
        let (lines, mut queue) = mpsc::channel::<Line>(QUEUE);
        let work = async move {
            let mut waiting = Vec::new();
            while queue.recv_many(&mut waiting, QUEUE).await > 0 {
                let mut text = Vec::new();
                for line in waiting.drain(..) {
                    // Of texts and numbers.
                    _ = serde_json::to_writer(&mut text, &line);
                    text.push(b'\n');
                }
                let written = tokio::task::spawn_blocking(move || {
                    let written = log.write(&text);
                    (log, written)
                });
                let Ok((same, written)) = written.await else { return };
                log = same;
                if let Err(error) = written {
                    warn!(%error, "the audit log lacks lines");
                }
            }
        };
        Ok((Self { lines: Some(lines) }, work))
    }

    pub(crate) fn begin(&self, request: &Request) -> Entry {
        let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
        Entry {
            at: Timestamp::now(),
            began: Instant::now(),
            from: peer.map(|ConnectInfo(peer)| peer.ip()),
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
        }
    }

    /// Cancel safety: if dropped, the line may be missing.
    pub(crate) async fn add(&self, entry: Entry, caller: Option<&Caller>, status: StatusCode) {
        let Some(lines) = &self.lines else { return };
        let Entry { at, began, from, method, path } = entry;
        let line = Line {
            at,
            key: caller.map(|caller| caller.name.to_string()),
            key_id: caller.and_then(|caller| caller.id),
            scope: caller.map(|caller| caller.scope),
            from,
            method,
            path,
            status: status.as_u16(),
            took_ms: began.elapsed().as_millis() as u64,
        };
        _ = lines.send(line).await; // the node is at its end
    }
}

/// The file. All of it blocks.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: std::fs::File,
    length: u64,
}

impl Log {
    fn open(path: &Path) -> std::io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt as _;
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        let file = std::fs::File::options().append(true).create(true).mode(0o600).open(path)?;
        let length = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, length })
    }

    fn write(&mut self, text: &[u8]) -> std::io::Result<()> {
        if self.length > LIMIT {
            let mut aside = self.path.clone().into_os_string();
            aside.push(".1");
            std::fs::rename(&self.path, aside)?;
            *self = Self::open(&self.path)?;
        }
        self.length += text.len() as u64;
        self.file.write_all(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_is_a_line_that_says_who_and_what() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logs/audit.jsonl");
        let (audit, work) = Audit::to(path.clone()).unwrap();
        let mut request = Request::post("/v2/sandboxes?x=secret").body(axum::body::Body::empty()).unwrap();
        request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([192, 0, 2, 1], 7))));
        let caller = Caller { id: None, name: "deployment".into(), scope: KeyScope::Admin };
        audit.add(audit.begin(&request), Some(&caller), StatusCode::CREATED).await;
        audit.add(audit.begin(&request), None, StatusCode::UNAUTHORIZED).await;
        drop(audit);
        work.await;
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let [first, second] = &lines[..] else { panic!("{text}") };
        assert_eq!(
            (&first["key"], &first["status"], &first["from"]),
            (&"deployment".into(), &201.into(), &"192.0.2.1".into())
        );
        assert_eq!(first["path"], "/v2/sandboxes", "a query may hold what is nobody's business");
        assert_eq!((&second["key"], &second["status"]), (&serde_json::Value::Null, &401.into()));
    }

    #[test]
    fn a_long_log_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let mut log = Log::open(&path).unwrap();
        log.write(b"one\n").unwrap();
        log.length = LIMIT + 1;
        log.write(b"two\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two\n");
        assert_eq!(std::fs::read_to_string(dir.path().join("audit.jsonl.1")).unwrap(), "one\n");
    }
}
