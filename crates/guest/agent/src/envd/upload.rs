//! `POST /files`: writes uploaded files; `POST /files/compose`: joins uploaded parts.
//!
//! The order of system calls is part of the protocol, since watchers see it: a new file is created, given to the user
//! and written (three events for a small one), an existing file is given to the user first and then overwritten in
//! place, keeping its mode.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest as _, Multipart, Query, Request, State};
use axum::response::{IntoResponse as _, Response};
use futures::{Stream, StreamExt as _};
use http::{StatusCode, header};
use jiff::Timestamp;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use serde::{Deserialize, Serialize};

use super::auth::{self, Operation, SignedRequest};
use super::error::{HttpError, is_disk_full};
use super::filesystem::{chown, create_owned_dirs, same_file};
use super::gunzip::gunzip;
use super::{Envd, User, find_user, metadata, paths};

/// Bytes gathered before a write: a small file is written by one write (one event), a large one in pieces of this size.
const WRITE_SIZE: usize = 128 * 1024;

/// The query of `/files`.
#[derive(Debug, Deserialize)]
pub(super) struct FilesQuery {
    pub(super) path: Option<String>,
    pub(super) username: Option<String>,
    signature: Option<String>,
    signature_expiration: Option<i64>,
}

impl FilesQuery {
    /// Checks token or signature and finds the user.
    pub(super) fn authorize(
        &self,
        envd: &Envd,
        headers: &http::HeaderMap,
        operation: Operation,
    ) -> Result<User, HttpError> {
        let signed = SignedRequest {
            path: self.path.as_deref().unwrap_or_default(),
            username: self.username.as_deref().unwrap_or_default(),
            signature: self.signature.as_deref(),
            expiration: self.signature_expiration,
        };
        let token = envd.settings.access_token();
        auth::authorize_files(token.as_deref(), headers, operation, signed, Timestamp::now())?;
        if let Some(name) = auth::basic_user(headers)
            && find_user(&name).is_none()
        {
            return Err(HttpError::unauthorized(format!("invalid username: '{name}'")));
        }
        let named = self.username.clone().filter(|name| !name.is_empty());
        user_or_default(envd, named)
    }
}

fn user_or_default(envd: &Envd, named: Option<String>) -> Result<User, HttpError> {
    let name = named.unwrap_or_else(|| envd.settings.default_user());
    find_user(&name)
        .ok_or_else(|| HttpError::unauthorized(format!("error looking up user '{name}': unknown user {name}")))
}

/// One file that was written.
#[derive(Debug, Serialize)]
struct Written {
    name: String,
    path: String,
    r#type: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

impl Written {
    fn new(path: &Path, metadata: BTreeMap<String, String>) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { name, path: path.to_string_lossy().into_owned(), r#type: "file", metadata }
    }
}

/// The handler of `POST /files`.
pub(super) async fn upload(
    State(envd): State<Arc<Envd>>,
    Query(query): Query<FilesQuery>,
    request: Request,
) -> Response {
    match receive(&envd, &query, request).await {
        Ok(written) => Json(written).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn receive(envd: &Arc<Envd>, query: &FilesQuery, request: Request) -> Result<Vec<Written>, HttpError> {
    let user = query.authorize(envd, request.headers(), Operation::Write)?;
    let metadata = metadata::from_headers(request.headers()).map_err(HttpError::bad_request)?;
    let workdir = envd.settings.default_workdir();
    let resolve = |path: &str| paths::resolve(path, &user, workdir.as_deref()).map_err(HttpError::bad_request);
    let content_type = header_text(&request, header::CONTENT_TYPE).to_ascii_lowercase();
    let length = header_text(&request, header::CONTENT_LENGTH).parse::<u64>().ok();
    let request = decode(request)?;
    let asked = query.path.as_deref().filter(|path| !path.is_empty());

    let mut written = Vec::new();
    if content_type.starts_with("multipart/") {
        let mut parts = Multipart::from_request(request, &()).await.map_err(HttpError::bad_request)?;
        while let Some(part) = parts.next_field().await.map_err(bad_multipart)? {
            if part.name() != Some("file") {
                continue;
            }
            let path = match (asked, part.file_name()) {
                (Some(path), _) => resolve(path)?,
                (None, Some(name)) => resolve(name)?,
                (None, None) => return Err(HttpError::bad_request("file part without a file name")),
            };
            if written.iter().any(|w: &Written| Path::new(&w.path) == path) {
                return Err(HttpError::bad_request(format!(
                    "you cannot upload multiple files to the same path '{}'",
                    path.display()
                )));
            }
            let bytes = part.map(|piece| piece.map_err(bad_multipart));
            store(envd, &path, &user, &metadata, None, bytes).await?;
            written.push(Written::new(&path, metadata.clone()));
        }
    } else if content_type.starts_with("application/octet-stream") {
        let asked =
            asked.ok_or_else(|| HttpError::bad_request("path query parameter is required for raw body upload"))?;
        let path = resolve(asked)?;
        let bytes = request.into_body().into_data_stream().map(|piece| piece.map_err(|error| bad_body(&error)));
        store(envd, &path, &user, &metadata, length, bytes).await?;
        written.push(Written::new(&path, metadata));
    } else {
        return Err(HttpError::bad_request(format!("unsupported content type: {content_type}")));
    }
    Ok(written)
}

fn header_text(request: &Request, name: header::HeaderName) -> &str {
    request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Undoes the body's Content-Encoding.
fn decode(request: Request) -> Result<Request, HttpError> {
    match header_text(&request, header::CONTENT_ENCODING).to_ascii_lowercase().as_str() {
        "" | "identity" => Ok(request),
        "gzip" => {
            let (parts, body) = request.into_parts();
            Ok(Request::from_parts(parts, Body::from_stream(gunzip(body))))
        }
        other => Err(HttpError::bad_request(format!(
            "error decompressing request body: unsupported Content-Encoding: {other}"
        ))),
    }
}

fn bad_multipart(error: axum::extract::multipart::MultipartError) -> HttpError {
    match corrupt(&error) {
        Some(text) => HttpError::bad_request(text),
        None => HttpError::bad_request(format!("error reading multipart body: {}", crate::console::Chain(&error))),
    }
}

fn bad_body(error: &axum::Error) -> HttpError {
    HttpError::bad_request(corrupt(error).unwrap_or_else(|| format!("error reading request body: {error}")))
}

/// The text of a decompression error somewhere in the chain.
fn corrupt(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        match error.downcast_ref::<io::Error>() {
            Some(io) if io.kind() == ErrorKind::InvalidData => return Some(io.to_string()),
            _ => next = error.source(),
        }
    }
    None
}

/// Writes one file from a stream of pieces. If that fails, a file that did not exist before is removed again.
async fn store(
    envd: &Arc<Envd>,
    path: &Path,
    user: &User,
    metadata: &BTreeMap<String, String>,
    length: Option<u64>,
    pieces: impl Stream<Item = Result<Bytes, HttpError>> + Unpin,
) -> Result<(), HttpError> {
    let target = {
        let (envd, path, user) = (Arc::clone(envd), path.to_owned(), user.clone());
        off_thread(move || Target::open(&envd, path, &user)).await??
    };
    let (new, path) = (target.new, target.path.clone());
    let metadata = metadata.clone();
    let stored = async {
        let target = write_all(target, length, pieces).await?;
        off_thread(move || target.finish(&metadata)).await?
    };
    let result = stored.await;
    if result.is_err() && new {
        let _ = off_thread(move || fs::remove_file(path)).await;
    }
    result
}

async fn write_all(
    mut target: Target,
    length: Option<u64>,
    mut pieces: impl Stream<Item = Result<Bytes, HttpError>> + Unpin,
) -> Result<Target, HttpError> {
    let mut gathered: Vec<u8> = Vec::new();
    loop {
        let piece = pieces.next().await.transpose()?;
        let end = piece.is_none();
        gathered.extend_from_slice(&piece.unwrap_or_default());
        if !gathered.is_empty() && (end || gathered.len() >= WRITE_SIZE) {
            let work = move || {
                target.file.write_all(&gathered).map_err(|error| write_error(length, &error))?;
                gathered.clear();
                Ok::<_, HttpError>((target, gathered))
            };
            (target, gathered) = off_thread(work).await??;
        }
        if end {
            return Ok(target);
        }
    }
}

fn write_error(length: Option<u64>, error: &io::Error) -> HttpError {
    match length {
        Some(length) if is_disk_full(error) => HttpError::new(
            StatusCode::INSUFFICIENT_STORAGE,
            format!("attempted to write {length} bytes: not enough disk space available"),
        ),
        _ => HttpError::from_io("error writing file", error),
    }
}

/// A file opened for an upload.
struct Target {
    path: PathBuf,
    file: File,
    /// It did not exist before.
    new: bool,
}

impl Target {
    fn open(envd: &Envd, path: PathBuf, user: &User) -> Result<Self, HttpError> {
        if let Some(parent) = path.parent() {
            let created = create_owned_dirs(parent, user);
            if created.map_err(|error| create_error("error creating directories", &error))? {
                envd.watchers.settle();
            }
        }
        let new = match path.metadata() {
            Ok(found) if found.is_dir() => {
                return Err(HttpError::bad_request(format!("path is a directory: {}", path.display())));
            }
            Ok(_) => false,
            Err(error) if error.kind() == ErrorKind::NotFound => true,
            Err(error) => return Err(HttpError::from_io("error getting file info", &error)),
        };
        let give = |path: &Path| chown(path, user).map_err(|error| HttpError::from_io("error changing owner", &error));
        if !new {
            give(&path)?;
        }
        // Not waiting: a named pipe that nobody reads says so.
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(nonblocking)
            .open(&path)
            .map_err(|error| create_error("error opening file", &error))?;
        let waiting = fcntl_getfl(&file).and_then(|flags| fcntl_setfl(&file, flags - OFlags::NONBLOCK));
        waiting.map_err(|error| HttpError::internal(format!("error opening file: {error}")))?;
        if new {
            give(&path)?;
        }
        Ok(Self { path, file, new })
    }

    fn finish(self, metadata: &BTreeMap<String, String>) -> Result<(), HttpError> {
        drop(self.file);
        metadata::replace(&self.path, metadata).map_err(|error| HttpError::from_io("error writing metadata", &error))
    }
}

/// A full disk while a name is being created may also mean that inodes have run out.
fn create_error(doing: &str, error: &io::Error) -> HttpError {
    let inodes_left = || rustix::fs::statvfs("/").is_ok_and(|found| found.f_files == 0 || found.f_favail > 0);
    if is_disk_full(error) && !inodes_left() {
        return HttpError::new(StatusCode::INSUFFICIENT_STORAGE, "not enough inodes available");
    }
    HttpError::from_io(doing, error)
}

async fn off_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, HttpError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| HttpError::internal(format!("worker failed: {error}")))
}

/// The body of `POST /files/compose`.
#[derive(Debug, Deserialize)]
pub(super) struct ComposeRequest {
    source_paths: Vec<String>,
    destination: String,
    username: Option<String>,
}

/// The handler of `POST /files/compose`: concatenates the sources into the destination and removes them.
pub(super) async fn compose(State(envd): State<Arc<Envd>>, body: Bytes) -> Response {
    match receive_compose(&envd, &body).await {
        Ok(written) => Json(written).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn receive_compose(envd: &Envd, body: &[u8]) -> Result<Written, HttpError> {
    let request: ComposeRequest = serde_json::from_slice(body)
        .map_err(|error| HttpError::bad_request(format!("invalid request body: {error}")))?;
    let user = user_or_default(envd, request.username.filter(|name| !name.is_empty()))?;
    let workdir = envd.settings.default_workdir();
    let resolve = |path: &str| paths::resolve(path, &user, workdir.as_deref()).map_err(HttpError::bad_request);
    if request.source_paths.is_empty() {
        return Err(HttpError::bad_request("source_paths must not be empty"));
    }
    let sources: Vec<PathBuf> = request.source_paths.iter().map(|path| resolve(path)).collect::<Result<_, _>>()?;
    let destination = resolve(&request.destination)?;
    let work = {
        let (destination, user) = (destination.clone(), user.clone());
        move || concatenate(&sources, &destination, &user)
    };
    off_thread(work).await??;
    Ok(Written::new(&destination, BTreeMap::new()))
}

fn concatenate(sources: &[PathBuf], destination: &Path, user: &User) -> Result<(), HttpError> {
    for source in sources {
        let found = source.metadata().map_err(|error| match error.kind() {
            ErrorKind::NotFound => HttpError::not_found(format!("source file not found: {}", source.display())),
            _ => HttpError::from_io("error getting file info", &error),
        })?;
        if !found.is_file() {
            return Err(HttpError::bad_request(format!("source is not a regular file: {}", source.display())));
        }
        if same_file(source, destination) {
            return Err(HttpError::bad_request(format!("source is the destination: {}", source.display())));
        }
    }
    let parent = destination.parent().unwrap_or(Path::new("/"));
    create_owned_dirs(parent, user).map_err(|error| create_error("error creating directories", &error))?;
    // Composed beside the destination and renamed, so that nobody sees half of it.
    let name = destination.file_name().unwrap_or_default().to_string_lossy();
    let temporary = parent.join(format!(".{name}.compose-{}", std::process::id()));
    let written = (|| {
        let mut target = File::create(&temporary)?;
        for source in sources {
            io::copy(&mut File::open(source)?, &mut target)?;
        }
        chown(&temporary, user)?;
        fs::rename(&temporary, destination)
    })();
    if let Err(error) = written {
        let _ = fs::remove_file(&temporary);
        return Err(HttpError::from_io("error composing file", &error));
    }
    for source in sources {
        // The result is there; a part that cannot be removed is only left over.
        let _ = fs::remove_file(source);
    }
    Ok(())
}
