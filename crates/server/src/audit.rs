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

/// A request that is being answered. Dropped before its end, it is a line without a status: the client has gone, and what it
/// asked for may have been done.
#[derive(Debug)]
pub(crate) struct Entry {
    lines: Option<mpsc::Sender<Line>>,
    began: Instant,
    line: Option<Line>,
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
    status: Option<u16>,
    took_ms: u64,
}

impl Entry {
    /// It was answered.
    ///
    /// Cancel safety: if dropped, the line is there all the same.
    pub(crate) async fn end(mut self, status: StatusCode) {
        let Some(line) = &mut self.line else { return };
        line.status = Some(status.as_u16());
        line.took_ms = self.began.elapsed().as_millis() as u64;
        let Some(lines) = &self.lines else { return };
        // The queue's room is waited for; the line itself is not given away before there is some.
        if let Ok(room) = lines.reserve().await
            && let Some(line) = self.line.take()
        {
            room.send(line);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let (Some(lines), Some(mut line)) = (self.lines.take(), self.line.take()) else { return };
        line.took_ms = self.began.elapsed().as_millis() as u64;
        let Err(mpsc::error::TrySendError::Full(line)) = lines.try_send(line) else { return };
        match tokio::runtime::Handle::try_current() {
            // Ends when the writer has taken it, or has ended.
            Ok(runtime) => _ = runtime.spawn(async move { lines.send(line).await }),
            Err(_) => warn!(?line, "the audit log lacks a line"),
        }
    }
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
                    // What the disk does not take is said where somebody may see it.
                    if let Err(error) = log.write(&text) {
                        let lines = String::from_utf8_lossy(&text);
                        warn!(%error, %lines, "the audit log lacks lines");
                    }
                    log
                });
                let Ok(same) = written.await else { return };
                log = same;
            }
        };
        Ok((Self { lines: Some(lines) }, work))
    }

    pub(crate) fn begin(&self, request: &Request, caller: Option<&Caller>) -> Entry {
        let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
        let line = Line {
            at: Timestamp::now(),
            key: caller.map(|caller| caller.name.to_string()),
            key_id: caller.and_then(|caller| caller.id),
            scope: caller.map(|caller| caller.scope),
            from: peer.map(|ConnectInfo(peer)| peer.ip()),
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
            status: None,
            took_ms: 0,
        };
        Entry { lines: self.lines.clone(), began: Instant::now(), line: Some(line) }
    }
}

/// The file. All of it blocks.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: std::fs::File,
    length: u64,
    /// It ends within a line: a write was cut off.
    torn: bool,
}

impl Log {
    fn open(path: &Path) -> std::io::Result<Self> {
        use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        let file = std::fs::File::options().read(true).append(true).create(true).mode(0o600).open(path)?;
        let length = file.metadata()?.len();
        // By a server that was killed, perhaps.
        let mut last = *b"\n";
        if length > 0 {
            file.read_exact_at(&mut last, length - 1)?;
        }
        let torn = last != *b"\n";
        Ok(Self { path: path.to_owned(), file, length, torn })
    }

    fn write(&mut self, text: &[u8]) -> std::io::Result<()> {
        if self.length > LIMIT {
            // Where that is not possible, the log grows on.
            match self.put_aside() {
                Ok(fresh) => *self = fresh,
                Err(error) => warn!(%error, "the audit log is long, and could not be put aside"),
            }
        }
        if self.torn {
            self.file.write_all(b"\n")?;
            self.torn = false;
        }
        self.file.write_all(text).inspect_err(|_| self.torn = true)?;
        self.length += text.len() as u64;
        Ok(())
    }

    fn put_aside(&self) -> std::io::Result<Self> {
        let mut aside = self.path.clone().into_os_string();
        aside.push(".1");
        std::fs::rename(&self.path, aside)?;
        Self::open(&self.path)
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
        audit.begin(&request, Some(&caller)).end(StatusCode::CREATED).await;
        audit.begin(&request, None).end(StatusCode::UNAUTHORIZED).await;
        drop(audit.begin(&request, Some(&caller)));
        drop(audit);
        work.await;
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let [first, second, gone] = &lines[..] else { panic!("{text}") };
        assert_eq!(
            (&first["key"], &first["status"], &first["from"]),
            (&"deployment".into(), &201.into(), &"192.0.2.1".into())
        );
        assert_eq!(first["path"], "/v2/sandboxes", "a query may hold what is nobody's business");
        assert_eq!((&second["key"], &second["status"]), (&serde_json::Value::Null, &401.into()));
        assert_eq!(
            (&gone["key"], &gone["status"]),
            (&"deployment".into(), &serde_json::Value::Null),
            "its client went"
        );
    }

    #[test]
    fn a_long_log_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let mut log = Log::open(&path).unwrap();
        log.write(b"one\n").unwrap();
        log.length = LIMIT + 1;
        log.torn = true;
        log.write(b"two\n").unwrap();
        std::fs::write(&path, "two\nhalf").unwrap();
        Log::open(&path).unwrap().write(b"three\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two\nhalf\nthree\n");
        assert_eq!(std::fs::read_to_string(dir.path().join("audit.jsonl.1")).unwrap(), "one\n");
    }
}
