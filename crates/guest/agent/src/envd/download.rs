//! `GET /files`: sends a file, whole or in part, compressed if the client prefers that.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::response::{IntoResponse as _, Response};
use flate2::{Compression, write::GzEncoder};
use http::{HeaderMap, HeaderValue, StatusCode, header};

use super::auth::Operation;
use super::error::HttpError;
use super::upload::FilesQuery;
use super::{Envd, paths};

/// Bytes read, and held, at a time.
const READ_SIZE: usize = 64 * 1024;
/// As much of a file as its type is guessed from.
const SNIFF_SIZE: usize = 512;

mod negotiate;

use negotiate::{ByteRange, Encoding, RangeOutcome};

/// The handler.
pub(super) async fn download(
    State(envd): State<Arc<Envd>>,
    Query(query): Query<FilesQuery>,
    headers: HeaderMap,
) -> Response {
    match prepare(&envd, &query, &headers).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn prepare(envd: &Envd, query: &FilesQuery, headers: &HeaderMap) -> Result<Response, HttpError> {
    let user = query.authorize(envd, headers, Operation::Read)?;
    let workdir = envd.settings.default_workdir();
    let path = paths::resolve(query.path.as_deref().unwrap_or_default(), &user, workdir.as_deref())
        .map_err(HttpError::bad_request)?;
    let encoding = negotiate::encoding(headers).ok_or_else(|| {
        HttpError::new(StatusCode::NOT_ACCEPTABLE, "no acceptable content encoding: identity or gzip")
    })?;
    let headers = headers.clone();
    let prepared = tokio::task::spawn_blocking(move || Opened::open(path)?.respond(&headers, encoding)).await;
    prepared.map_err(|error| HttpError::internal(format!("worker failed: {error}")))?
}

/// A file to send, with the first of its bytes read already.
struct Opened {
    path: PathBuf,
    file: File,
    /// Size as the file system tells; zero also for files of /proc that are not empty.
    size: u64,
    modified: Option<SystemTime>,
    head: Vec<u8>,
}

impl Opened {
    fn open(path: PathBuf) -> Result<Self, HttpError> {
        let missing = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                HttpError::not_found(format!("path '{}' does not exist", path.display()))
            }
            _ => HttpError::from_io("error opening file", &error),
        };
        // Looked at before it is opened: opening a named pipe waits for its other end.
        let found = path.metadata().map_err(missing)?;
        if found.is_dir() {
            return Err(HttpError::bad_request(format!("path '{}' is a directory", path.display())));
        }
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let mut file = File::options().read(true).custom_flags(nonblocking).open(&path).map_err(missing)?;
        let mut head = Vec::with_capacity(SNIFF_SIZE);
        (&mut file)
            .take(SNIFF_SIZE as u64)
            .read_to_end(&mut head)
            .map_err(|error| HttpError::from_io("error reading file", &error))?;
        let size = if found.is_file() { found.len() } else { 0 };
        Ok(Self { path, file, size, modified: found.modified().ok(), head })
    }

    /// A file whose size is true and which can be read from anywhere.
    fn is_plain(&self) -> bool {
        self.size > 0 || self.head.is_empty()
    }

    fn respond(self, headers: &HeaderMap, encoding: Encoding) -> Result<Response, HttpError> {
        let mut response = Response::new(Body::empty());
        let out = response.headers_mut();
        out.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
        out.insert(header::CONTENT_DISPOSITION, disposition(&self.path));
        if encoding == Encoding::Gzip {
            out.insert(header::CONTENT_TYPE, type_by_name(&self.path).unwrap_or(OCTETS));
            out.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            *response.body_mut() = body(Reader::new(self.head, self.file, None, true));
            return Ok(response);
        }
        out.insert(header::CONTENT_TYPE, type_by_name(&self.path).unwrap_or_else(|| sniff(&self.head)));
        if !self.is_plain() {
            *response.body_mut() = body(Reader::new(self.head, self.file, None, false));
            return Ok(response);
        }
        out.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        if let Some(modified) = self.modified {
            if let Ok(value) = HeaderValue::from_str(&negotiate::http_date(modified)) {
                out.insert(header::LAST_MODIFIED, value);
            }
            if negotiate::not_modified(headers, modified) {
                *response.status_mut() = StatusCode::NOT_MODIFIED;
                return Ok(response);
            }
        }
        match negotiate::range(headers, self.size, self.modified) {
            RangeOutcome::Whole => {
                out.insert(header::CONTENT_LENGTH, self.size.into());
                *response.body_mut() = body(Reader::new(self.head, self.file, Some(self.size), false));
            }
            RangeOutcome::Part(part) => {
                *response.status_mut() = StatusCode::PARTIAL_CONTENT;
                let out = response.headers_mut();
                out.insert(header::CONTENT_LENGTH, part.len().into());
                out.insert(header::CONTENT_RANGE, part.content_range(self.size));
                *response.body_mut() = body(self.part(part)?);
            }
            RangeOutcome::Unsatisfiable => {
                *response.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
                response.headers_mut().insert(header::CONTENT_RANGE, ByteRange::unsatisfied(self.size));
            }
        }
        Ok(response)
    }

    fn part(mut self, part: ByteRange) -> Result<Reader, HttpError> {
        self.file
            .seek(SeekFrom::Start(part.first))
            .map_err(|error| HttpError::internal(format!("error seeking in file: {error}")))?;
        Ok(Reader::new(Vec::new(), self.file, Some(part.len()), false))
    }
}

/// Produces a body piece by piece, each on the blocking pool when the connection wants it.
struct Reader {
    head: Vec<u8>,
    file: File,
    /// Bytes still to send; `None`: until the end of the file.
    left: Option<u64>,
    /// `None`: not compressed, or all has been sent.
    encoder: Option<GzEncoder<Vec<u8>>>,
    done: bool,
}

impl Reader {
    fn new(head: Vec<u8>, file: File, left: Option<u64>, gzip: bool) -> Self {
        let encoder = gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast()));
        Self { head, file, left, encoder, done: false }
    }

    /// The next piece; empty at the end.
    fn next(&mut self) -> io::Result<Vec<u8>> {
        while !self.done {
            let plain = self.read()?;
            if plain.is_empty() {
                self.done = true;
            }
            let Some(mut encoder) = self.encoder.take() else { return Ok(plain) };
            if self.done {
                return encoder.finish();
            }
            encoder.write_all(&plain)?;
            let packed = std::mem::take(encoder.get_mut());
            self.encoder = Some(encoder);
            if !packed.is_empty() {
                return Ok(packed);
            }
        }
        Ok(Vec::new())
    }

    fn read(&mut self) -> io::Result<Vec<u8>> {
        let mut plain = std::mem::take(&mut self.head);
        if plain.is_empty() {
            let most = self.left.map_or(READ_SIZE as u64, |left| left.min(READ_SIZE as u64));
            plain.reserve_exact(most as usize);
            (&mut self.file).take(most).read_to_end(&mut plain)?;
        }
        if let Some(left) = &mut self.left {
            // The file may have grown since its length was announced.
            plain.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
            *left -= plain.len() as u64;
        }
        Ok(plain)
    }
}

fn body(reader: Reader) -> Body {
    Body::from_stream(futures::stream::try_unfold(reader, |mut reader| async move {
        let read = tokio::task::spawn_blocking(move || reader.next().map(|piece| (piece, reader))).await;
        let (piece, reader) = read.map_err(io::Error::other)??;
        Ok::<_, io::Error>((!piece.is_empty()).then(|| (Bytes::from(piece), reader)))
    }))
}

fn disposition(path: &Path) -> HeaderValue {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&+-.^_`|~".contains(&byte);
    let text = if name.bytes().all(token) {
        format!("inline; filename={name}")
    } else if name.is_ascii() {
        format!("inline; filename=\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""))
    } else {
        let encoded = percent_encoding::utf8_percent_encode(&name, percent_encoding::NON_ALPHANUMERIC);
        format!("inline; filename*=utf-8''{encoded}")
    };
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("inline"))
}

const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// The types that browsers care about; everything else is guessed from the content.
fn type_by_name(path: &Path) -> Option<HeaderValue> {
    let extension = path.extension()?.to_str()?.to_ascii_lowercase();
    Some(HeaderValue::from_static(match extension.as_str() {
        "txt" | "log" => "text/plain; charset=utf-8",
        "html" | "htm" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "csv" => "text/csv; charset=utf-8",
        "md" => "text/markdown; charset=utf-8",
        "xml" => "text/xml; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" => "application/json",
        "wasm" => "application/wasm",
        "pdf" => "application/pdf",
        "zip" => "application/zip",
        "gz" => "application/gzip",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "avif" => "image/avif",
        "svg" => "image/svg+xml",
        "mp3" => "audio/mpeg",
        "wav" => "audio/wav",
        "mp4" => "video/mp4",
        "webm" => "video/webm",
        _ => return None,
    }))
}

/// Text or not: a file without control characters, in UTF-8 but for a character cut at the end, is text.
fn sniff(head: &[u8]) -> HeaderValue {
    let control = |byte: &u8| matches!(byte, 0..=8 | 11 | 14..=26 | 28..=31);
    let utf8 = match std::str::from_utf8(head) {
        Ok(_) => true,
        Err(error) => error.error_len().is_none() && head.len() == SNIFF_SIZE,
    };
    if utf8 && !head.iter().any(control) { HeaderValue::from_static("text/plain; charset=utf-8") } else { OCTETS }
}
