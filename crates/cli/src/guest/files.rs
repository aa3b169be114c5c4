//! Files in a sandbox: what is there, and their contents in either direction.

use std::time::Duration;

use aenv_guest_proto::credentials;
use aenv_guest_proto::wire::filesystem::{
    EntryInfo, FileType, FilesystemClient, ListDirRequest, MakeDirRequest, StatRequest,
};
use bytes::Bytes;
use connectrpc::client::CallOptions;
use connectrpc::{ConnectError, ErrorCode};
use futures::Stream;
use http::{HeaderMap, Method, header};
use jiff::Timestamp;
use reqwest::multipart::{Form, Part};
use reqwest::{Body, Response, Url};

use super::transport::Transport;
use super::{Guest, brief};

/// Largest listing of one directory: some hundred thousand entries.
const MAX_LISTING: usize = 64 << 20;
/// Longest wait for a listing.
const LISTING_TIMEOUT: Duration = Duration::from_secs(60);

/// Something at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Base name. The guest's word: not to be used as a path here without a look at it.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    /// In bytes.
    pub(crate) size: u64,
    /// When its content last changed, by the guest's clock.
    pub(crate) modified: Option<Timestamp>,
}

/// What it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Symlink,
    /// A device, a socket, a named pipe.
    Special,
}

impl Entry {
    fn of(entry: EntryInfo) -> Self {
        let kind = match entry.r#type.as_known() {
            // Such an entry has the type of what it leads to.
            _ if entry.symlink_target.is_some() => Kind::Symlink,
            Some(FileType::FILE_TYPE_FILE) => Kind::File,
            Some(FileType::FILE_TYPE_DIRECTORY) => Kind::Directory,
            Some(FileType::FILE_TYPE_SYMLINK) => Kind::Symlink,
            _ => Kind::Special,
        };
        let modified = entry.modified_time.into_option();
        let modified = modified.and_then(|time| Timestamp::new(time.seconds, time.nanos).ok());
        Self { name: entry.name, kind, size: u64::try_from(entry.size).unwrap_or(0), modified }
    }
}

/// A part of a file: from `from` on, if it still is what it was at `unchanged_since`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rest {
    pub(crate) from: u64,
    pub(crate) unchanged_since: Timestamp,
}

impl Guest {
    /// What is at `path`, relative to the home of `user`; `None`: nothing. A symlink is told as such.
    pub(crate) async fn stat(&self, path: &str, user: Option<&str>) -> Result<Option<Entry>, ConnectError> {
        let request = StatRequest { path: path.to_owned(), ..Default::default() };
        match self.filesystem().stat_with_options(request, as_user(brief(), user)).await {
            Ok(answer) => Ok(answer.into_owned().entry.into_option().map(Entry::of)),
            Err(error) if error.code == ErrorCode::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What is in a directory, sorted by name.
    pub(crate) async fn list(&self, path: &str) -> Result<Vec<Entry>, ConnectError> {
        let request = ListDirRequest { path: path.to_owned(), depth: 1, ..Default::default() };
        let options = CallOptions::default()
            .with_timeout(LISTING_TIMEOUT)
            .with_max_message_size(MAX_LISTING)
            .with_element_memory_limit(2 * MAX_LISTING);
        let answer = self.filesystem().list_dir_with_options(request, options).await?;
        let mut entries: Vec<_> = answer.into_owned().entries.into_iter().map(Entry::of).collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Makes a directory and its parents; one that is there is fine. Errors: something else is there.
    pub(crate) async fn make_dir(&self, path: &str) -> Result<(), ConnectError> {
        let request = MakeDirRequest { path: path.to_owned(), ..Default::default() };
        match self.filesystem().make_dir_with_options(request, brief()).await {
            Err(error) if error.code != ErrorCode::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    /// Begins to read a file, whole or the rest of it. The answer's status says which of the two it is.
    pub(crate) async fn read_file(
        &self,
        path: &str,
        user: Option<&str>,
        rest: Option<Rest>,
    ) -> Result<Response, ConnectError> {
        let mut headers = self.file_headers(user);
        headers.insert(header::ACCEPT_ENCODING, header::HeaderValue::from_static("identity"));
        if let Some(Rest { from, unchanged_since }) = rest {
            let text = |text: String| header::HeaderValue::from_str(&text).map_err(invalid);
            headers.insert(header::RANGE, text(format!("bytes={from}-"))?);
            headers.insert(header::IF_RANGE, text(http_date(unchanged_since))?);
        }
        let url = self.file_url(path, user)?;
        self.transport.call(self.transport.request(Method::GET, url).headers(headers)).await
    }

    /// Writes a file of `length` bytes, in the place of what is there. Makes its parents.
    ///
    /// Cancel safety: if dropped, the file may hold a part of it.
    pub(crate) async fn write_file<E>(
        &self,
        path: &str,
        user: Option<&str>,
        length: u64,
        content: impl Stream<Item = Result<Bytes, E>> + Send + 'static,
    ) -> Result<(), ConnectError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
    {
        // The name counts for nothing where the path is given, but has to be there.
        let part = Part::stream_with_length(Body::wrap_stream(content), length).file_name("file");
        let form = Form::new().part("file", part);
        let url = self.file_url(path, user)?;
        let request = self.transport.request(Method::POST, url).headers(self.file_headers(user)).multipart(form);
        self.transport.call(request).await.map(drop)
    }

    fn file_headers(&self, user: Option<&str>) -> HeaderMap {
        let mut headers = self.config.default_headers().clone();
        if let Some(value) = user.and_then(|user| header::HeaderValue::from_str(&credentials(user)).ok()) {
            headers.insert(header::AUTHORIZATION, value);
        }
        headers
    }

    fn file_url(&self, path: &str, user: Option<&str>) -> Result<Url, ConnectError> {
        let base = self.config.base_uri().to_string();
        let mut url = Url::parse(&format!("{}/files", base.trim_end_matches('/'))).map_err(invalid)?;
        url.query_pairs_mut().append_pair("path", path);
        if let Some(user) = user {
            url.query_pairs_mut().append_pair("username", user);
        }
        Ok(url)
    }

    pub(super) fn filesystem(&self) -> FilesystemClient<Transport> {
        FilesystemClient::new(self.transport.clone(), self.config.clone())
    }
}

fn as_user(options: CallOptions, user: Option<&str>) -> CallOptions {
    match user {
        Some(user) => options.with_header(header::AUTHORIZATION, credentials(user)),
        None => options,
    }
}

fn invalid(error: impl std::fmt::Display) -> ConnectError {
    ConnectError::invalid_argument(error.to_string())
}

/// A date as HTTP writes it: whole seconds.
fn http_date(time: Timestamp) -> String {
    // Only years beyond 9999 have no such form.
    jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&time).unwrap_or_default()
}
