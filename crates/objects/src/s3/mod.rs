//! Objects of an S3-compatible service.

mod config;
mod process;
mod url;

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Once};
use std::time::SystemTime;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path as ObjectPath;
use object_store::{
    GetOptions, GetRange, MultipartUpload, ObjectMeta, ObjectStore as _, ObjectStoreExt, PutMode, PutPayload,
    UpdateVersion,
};

pub use self::config::{Addressing, OpenS3Error, S3Config, S3Credentials};
pub use self::url::{ObjectUrl, ParseObjectUrlError};
use crate::error::ObjectError;
use crate::key::Key;
use crate::store::{Condition, ObjectInfo, ObjectStore, Version};

/// Bytes of one part of an upload, at least. Smaller files are written with one request.
const PART: u64 = 16 << 20;
/// Parts that an upload may have, by the protocol.
const MAX_PARTS: u64 = 10_000;
/// Parts on their way at once.
const PARTS_AT_ONCE: usize = 4;

/// A bucket, or a folder in one.
#[derive(Debug, Clone)]
pub struct S3Store {
    inner: Arc<object_store::aws::AmazonS3>,
    /// Where the keys are, if not at the top.
    prefix: Option<Key>,
    name: String,
}

impl S3Store {
    /// Prepares to talk to the service; nothing is asked yet.
    pub fn open(config: &S3Config) -> Result<Self, OpenS3Error> {
        use_ring();
        let (inner, prefix) = config.build()?;
        let folder = prefix.as_ref().map(|prefix| format!("/{prefix}")).unwrap_or_default();
        Ok(Self { inner: Arc::new(inner), prefix, name: format!("s3://{}{folder}", config.bucket) })
    }

    fn path(&self, key: &Key) -> ObjectPath {
        // Nothing in a key is encoded.
        match &self.prefix {
            Some(prefix) => ObjectPath::from(format!("{prefix}/{key}")),
            None => ObjectPath::from(key.as_str()),
        }
    }

    /// The object as we call it; `None` for what others have put there.
    fn info(&self, meta: &ObjectMeta) -> Option<ObjectInfo> {
        let path = meta.location.as_ref();
        let key = match &self.prefix {
            Some(prefix) => path.strip_prefix(prefix.as_str())?.strip_prefix('/')?,
            None => path,
        };
        Some(ObjectInfo { key: key.parse().ok()?, size: meta.size, modified: SystemTime::from(meta.last_modified) })
    }

    fn error(&self, doing: &'static str, key: &Key) -> impl Fn(object_store::Error) -> ObjectError {
        let (store, key) = (self.name.clone(), key.clone());
        move |error| {
            let (store, key) = (store.clone(), key.clone());
            match error {
                object_store::Error::NotFound { .. } => ObjectError::NotFound { store, key },
                object_store::Error::AlreadyExists { .. } => ObjectError::Exists { store, key },
                object_store::Error::Precondition { .. } | object_store::Error::NotModified { .. } => {
                    ObjectError::Changed { store, key }
                }
                error
                @ (object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. }) => {
                    ObjectError::Denied { doing, store, key, source: error.into() }
                }
                error => ObjectError::Failed { doing, store, key: key.to_string(), source: error.into() },
            }
        }
    }

    /// Uploads `length` bytes of `file` in parts.
    async fn upload(&self, key: &Key, path: &Path, file: Arc<std::fs::File>, length: u64) -> Result<(), ObjectError> {
        let error = self.error("upload", key);
        let mut upload = self.inner.put_multipart(&self.path(key)).await.map_err(&error)?;
        let part = PART.max(length.div_ceil(MAX_PARTS));
        let sent = self.send_parts(&error, &mut *upload, path, file, length, part).await;
        let done = match sent {
            Ok(()) => upload.complete().await.map(|_| ()).map_err(&error),
            Err(failed) => Err(failed),
        };
        if done.is_err()
            && let Err(error) = upload.abort().await
        {
            // The service removes such parts when its owner has told it to.
            tracing::warn!(store = self.name, %key, %error, "parts of an upload that failed are left behind");
        }
        done
    }

    async fn send_parts(
        &self,
        error: &(impl Fn(object_store::Error) -> ObjectError + Sync),
        upload: &mut dyn MultipartUpload,
        path: &Path,
        file: Arc<std::fs::File>,
        length: u64,
        part: u64,
    ) -> Result<(), ObjectError> {
        let mut on_the_way = stream::FuturesUnordered::new();
        let mut at = 0;
        while at < length {
            if on_the_way.len() == PARTS_AT_ONCE
                && let Some(sent) = on_the_way.next().await
            {
                Result::map_err(sent, error)?;
            }
            let end = (at + part).min(length);
            let bytes = read(Arc::clone(&file), at..end).await.map_err(|source| self.unreadable(path, source))?;
            // Parts are numbered in the order of these calls.
            on_the_way.push(upload.put_part(PutPayload::from(bytes)));
            at = end;
        }
        on_the_way.try_collect::<()>().await.map_err(error)
    }

    fn unreadable(&self, path: &Path, source: io::Error) -> ObjectError {
        ObjectError::File { store: self.name.clone(), path: path.to_owned(), source }
    }
}

/// Reads a part of a file.
async fn read(file: Arc<std::fs::File>, range: Range<u64>) -> io::Result<Bytes> {
    let reading = tokio::task::spawn_blocking(move || {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_exact_at(&mut bytes, range.start).map(|()| Bytes::from(bytes))
    });
    reading.await.map_err(io::Error::other).flatten()
}

#[async_trait]
impl ObjectStore for S3Store {
    fn name(&self) -> &str {
        &self.name
    }

    async fn head(&self, key: &Key) -> Result<ObjectInfo, ObjectError> {
        let meta = self.inner.head(&self.path(key)).await.map_err(self.error("look at", key))?;
        Ok(ObjectInfo { key: key.clone(), size: meta.size, modified: SystemTime::from(meta.last_modified) })
    }

    async fn get(&self, key: &Key, range: Range<u64>) -> Result<Bytes, ObjectError> {
        let out_of_range =
            || ObjectError::OutOfRange { store: self.name.clone(), key: key.clone(), range: range.clone() };
        if range.start >= range.end {
            // The protocol has no empty ranges.
            let size = self.head(key).await?.size;
            return if range.start == range.end && range.end <= size { Ok(Bytes::new()) } else { Err(out_of_range()) };
        }
        let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
        let error = self.error("read", key);
        let answer = match self.inner.get_opts(&self.path(key), options).await {
            Ok(answer) => answer,
            Err(failed) => {
                // How a range behind the end is refused differs; whether it is behind does not.
                return match error(failed) {
                    failed @ ObjectError::Failed { .. } => match self.head(key).await {
                        Ok(info) if range.end > info.size => Err(out_of_range()),
                        _ => Err(failed),
                    },
                    other => Err(other),
                };
            }
        };
        if answer.range != range {
            return Err(out_of_range());
        }
        let bytes = answer.bytes().await.map_err(error)?;
        if bytes.len() as u64 == range.end - range.start { Ok(bytes) } else { Err(out_of_range()) }
    }

    async fn read(&self, key: &Key, limit: u64) -> Result<(Bytes, Version), ObjectError> {
        let error = self.error("read", key);
        let answer = self.inner.get_opts(&self.path(key), GetOptions::default()).await.map_err(&error)?;
        let size = answer.meta.size;
        if size > limit {
            return Err(ObjectError::TooLong { store: self.name.clone(), key: key.clone(), size, limit });
        }
        let version = answer.meta.e_tag.clone();
        let bytes = answer.bytes().await.map_err(error)?;
        Ok((bytes, Version(version.unwrap_or_default())))
    }

    async fn put(&self, key: &Key, bytes: Bytes, condition: Condition) -> Result<Version, ObjectError> {
        let mode = match condition {
            Condition::None => PutMode::Overwrite,
            Condition::Absent => PutMode::Create,
            Condition::Is(Version(tag)) => PutMode::Update(UpdateVersion { e_tag: Some(tag), version: None }),
        };
        let put = self.inner.put_opts(&self.path(key), PutPayload::from(bytes), mode.into()).await;
        let result = put.map_err(self.error("write", key))?;
        Ok(Version(result.e_tag.unwrap_or_default()))
    }

    async fn put_file(&self, key: &Key, path: &Path) -> Result<(), ObjectError> {
        let opened = path.to_owned();
        let opening = tokio::task::spawn_blocking(move || {
            let file = std::fs::File::open(opened)?;
            let metadata = file.metadata()?;
            if metadata.is_file() {
                Ok((file, metadata.len()))
            } else {
                Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
            }
        });
        let opened = opening.await.map_err(io::Error::other).flatten();
        let (file, length) = opened.map_err(|source| self.unreadable(path, source))?;
        let file = Arc::new(file);
        if length > PART {
            return self.upload(key, path, file, length).await;
        }
        let bytes = read(file, 0..length).await.map_err(|source| self.unreadable(path, source))?;
        self.put(key, bytes, Condition::None).await.map(|_| ())
    }

    async fn delete(&self, key: &Key) -> Result<(), ObjectError> {
        match self.inner.delete(&self.path(key)).await.map_err(self.error("remove", key)) {
            Err(ObjectError::NotFound { .. }) => Ok(()),
            done => done,
        }
    }

    async fn list(&self, folder: Option<&Key>) -> Result<Vec<ObjectInfo>, ObjectError> {
        let path = match folder {
            Some(folder) => Some(self.path(folder)),
            None => self.prefix.as_ref().map(|prefix| ObjectPath::from(prefix.as_str())),
        };
        let failed = |source: object_store::Error| ObjectError::Failed {
            doing: "list",
            store: self.name.clone(),
            key: folder.map_or_else(|| "/".to_owned(), |folder| format!("{folder}/")),
            source: source.into(),
        };
        let found: Vec<ObjectMeta> = self.inner.list(path.as_ref()).try_collect().await.map_err(failed)?;
        let mut found: Vec<_> = found.iter().filter_map(|meta| self.info(meta)).collect();
        found.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }
}

/// Chooses the TLS implementation. The HTTP client takes the process's default; if the program has set one, it stays.
fn use_ring() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}
