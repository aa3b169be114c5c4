//! Objects as files of a folder, which several processes and, on a shared file system, several hosts may use at once.
//!
//! ```text
//!   a/b/c        the object a/b/c
//!   .partial/…   objects that are being written
//!   .locks/XX    one for each of 256 parts of the keys, held by `flock` while one of them is changed
//! ```
//!
//! An object is written beside, synced and renamed: it is there whole or not at all. Whoever changes a key holds its lock
//! from looking at what is there to the rename, which makes conditions hold; a process that is killed lets go of it. Readers
//! need none. A version is the content's hash: equal contents are equal, as they are for S3.

use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::error::ObjectError;
use crate::key::Key;
use crate::store::{Condition, ObjectInfo, ObjectStore, Version};

const PARTIAL: &str = ".partial";
const LOCKS: &str = ".locks";
/// What is being written for so long is not: whoever wrote it was killed.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);
/// How often folders are made again that are removed at that moment.
const ATTEMPTS: u32 = 16;

/// A folder of objects.
#[derive(Debug, Clone)]
pub struct LocalStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    name: String,
}

impl LocalStore {
    /// Opens the folder `root`, which is made if need be, and removes what writers of long ago left there. Blocking.
    pub fn open(root: impl Into<PathBuf>) -> io::Result<Self> {
        let root = root.into();
        fs::create_dir_all(root.join(PARTIAL))?;
        fs::create_dir_all(root.join(LOCKS))?;
        sweep(&root.join(PARTIAL))?;
        let name = root.display().to_string();
        Ok(Self { inner: Arc::new(Inner { root, name }) })
    }

    /// The file of an object, for whoever can use one. It must not be changed.
    #[must_use]
    pub fn path(&self, key: &Key) -> PathBuf {
        self.inner.path(key)
    }

    /// Runs blocking work about `key`.
    async fn blocking<T: Send + 'static>(
        &self,
        doing: &'static str,
        key: &str,
        work: impl FnOnce(&Inner) -> Result<T, ObjectError> + Send + 'static,
    ) -> Result<T, ObjectError> {
        let inner = Arc::clone(&self.inner);
        match tokio::task::spawn_blocking(move || work(&inner)).await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(error) => {
                let (store, key) = (self.inner.name.clone(), key.to_owned());
                Err(ObjectError::Failed { doing, store, key, source: error.into() })
            }
        }
    }
}

/// Removes what was left half-written a day ago.
fn sweep(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // Others may be sweeping too.
        let Ok(modified) = entry.metadata().and_then(|metadata| metadata.modified()) else { continue };
        if modified.elapsed().is_ok_and(|age| age > ABANDONED) {
            tracing::info!(file = %entry.path().display(), "an object that was never finished is removed");
            aenv_durable::remove_file_if_present(&entry.path())?;
        }
    }
    Ok(())
}

impl Inner {
    fn path(&self, key: &Key) -> PathBuf {
        self.root.join(key.as_str())
    }

    fn error(&self, doing: &'static str, key: &Key) -> impl Fn(io::Error) -> ObjectError {
        let (store, key) = (self.name.clone(), key.clone());
        move |source| {
            let store = store.clone();
            match source.kind() {
                // A component of the key may be an object.
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                    ObjectError::NotFound { store, key: key.clone() }
                }
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    ObjectError::Denied { doing, store, key: key.clone(), source: source.into() }
                }
                _ => ObjectError::Failed { doing, store, key: key.to_string(), source: source.into() },
            }
        }
    }

    /// Opens an object; a folder is none.
    fn open(&self, key: &Key) -> io::Result<(File, fs::Metadata)> {
        let file = File::open(self.path(key))?;
        let metadata = file.metadata()?;
        if metadata.is_file() { Ok((file, metadata)) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Waits for the lock of `key`, which the file holds until it is dropped.
    fn lock(&self, key: &Key) -> io::Result<File> {
        let part = Sha256::digest(key.as_str())[0];
        let path = self.root.join(LOCKS).join(format!("{part:02x}"));
        let file = File::options().create(true).truncate(false).write(true).open(path)?;
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Err(rustix::io::Errno::INTR) => {}
                done => return done.map(|()| file).map_err(io::Error::from),
            }
        }
    }

    fn begin(&self) -> io::Result<NamedTempFile> {
        use std::os::unix::fs::PermissionsExt;
        let permissions = fs::Permissions::from_mode(0o644);
        tempfile::Builder::new().permissions(permissions).tempfile_in(self.root.join(PARTIAL))
    }

    /// Gives a finished file its name, if `condition` holds.
    fn publish(&self, key: &Key, file: NamedTempFile, condition: &Condition) -> Result<(), ObjectError> {
        let error = self.error("write", key);
        // A folder that is in the way of an object must not look like an absent one.
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => ObjectError::Failed {
                doing: "write",
                store: self.name.clone(),
                key: key.to_string(),
                source: source.into(),
            },
            _ => error(source),
        };
        file.as_file().sync_all().map_err(failed)?;
        let _lock = self.lock(key).map_err(failed)?;
        self.check(key, condition)?;
        let path = self.path(key);
        let mut file = file.into_temp_path();
        for _ in 0..ATTEMPTS {
            let folders = self.make_folders(&path).map_err(failed)?;
            match file.persist(&path) {
                Ok(()) => {
                    for folder in folders {
                        aenv_durable::sync_dir(&folder).map_err(failed)?;
                    }
                    return Ok(());
                }
                // Whoever removed the last object of a folder has removed the folder too.
                Err(error) if error.error.kind() == io::ErrorKind::NotFound => file = error.path,
                Err(error) => return Err(failed(error.error)),
            }
        }
        Err(failed(io::ErrorKind::NotFound.into()))
    }

    /// Makes the folders above `path` and gives them, innermost first.
    fn make_folders(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let above = path.ancestors().skip(1).take_while(|folder| folder.starts_with(&self.root));
        let folders: Vec<_> = above.map(Path::to_owned).collect();
        if let Some(innermost) = folders.first() {
            fs::create_dir_all(innermost)?;
        }
        Ok(folders)
    }

    fn check(&self, key: &Key, condition: &Condition) -> Result<(), ObjectError> {
        let (store, error) = (self.name.clone(), self.error("look at", key));
        match condition {
            Condition::None => Ok(()),
            Condition::Absent => match self.open(key) {
                Ok(_) => Err(ObjectError::Exists { store, key: key.clone() }),
                Err(source) => match error(source) {
                    ObjectError::NotFound { .. } => Ok(()),
                    other => Err(other),
                },
            },
            Condition::Is(version) => {
                let changed = || ObjectError::Changed { store, key: key.clone() };
                let found = self.open(key).and_then(|(mut file, _)| {
                    let mut hasher = Sha256::new();
                    io::copy(&mut file, &mut HashWriter(&mut hasher))?;
                    Ok(version_of(hasher))
                });
                match found.map_err(error) {
                    Ok(found) if found == *version => Ok(()),
                    Ok(_) | Err(ObjectError::NotFound { .. }) => Err(changed()),
                    Err(other) => Err(other),
                }
            }
        }
    }

    fn delete(&self, key: &Key) -> Result<(), ObjectError> {
        let error = self.error("remove", key);
        let _lock = self.lock(key).map_err(&error)?;
        let path = self.path(key);
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(source) if source.kind() == io::ErrorKind::IsADirectory => return Ok(()),
            Err(source) => match error(source) {
                ObjectError::NotFound { .. } => return Ok(()),
                other => return Err(other),
            },
        }
        let mut folders = path.ancestors().skip(1).take_while(|folder| *folder != self.root);
        // Up to the first that holds something else; that is the one to sync.
        let left = folders.find(|folder| fs::remove_dir(folder).is_err()).unwrap_or(&self.root);
        match aenv_durable::sync_dir(left) {
            // Somebody else may have removed it meanwhile.
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(error(source)),
            _ => Ok(()),
        }
    }

    fn list(&self, folder: Option<&Key>) -> io::Result<Vec<ObjectInfo>> {
        let top = folder.map_or_else(|| self.root.clone(), |folder| self.path(folder));
        let mut folders = vec![(top, folder.map_or_else(String::new, |folder| format!("{folder}/")))];
        let mut found = Vec::new();
        while let Some((path, prefix)) = folders.pop() {
            let entries = match fs::read_dir(&path) {
                Ok(entries) => entries,
                // It goes with its last object.
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    continue;
                }
                Err(error) => return Err(error),
            };
            for entry in entries {
                let entry = entry?;
                // Only we make names here, and what others put beside is not ours.
                let Some(key) =
                    entry.file_name().to_str().and_then(|name| format!("{prefix}{name}").parse::<Key>().ok())
                else {
                    continue;
                };
                let metadata = match entry.metadata() {
                    Ok(metadata) => metadata,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                };
                if metadata.is_dir() {
                    folders.push((entry.path(), format!("{key}/")));
                } else if metadata.is_file() {
                    found.push(ObjectInfo { key, size: metadata.len(), modified: metadata.modified()? });
                }
            }
        }
        found.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }
}

/// Feeds a hash.
struct HashWriter<'a>(&'a mut Sha256);

impl io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn version_of(hasher: Sha256) -> Version {
    Version(hex::encode(hasher.finalize()))
}

#[async_trait]
impl ObjectStore for LocalStore {
    fn name(&self) -> &str {
        &self.inner.name
    }

    async fn head(&self, key: &Key) -> Result<ObjectInfo, ObjectError> {
        let asked = key.clone();
        let work = move |inner: &Inner| {
            let found = inner.open(&asked).and_then(|(_, metadata)| Ok((metadata.len(), metadata.modified()?)));
            let (size, modified): (u64, SystemTime) = found.map_err(inner.error("look at", &asked))?;
            Ok(ObjectInfo { key: asked, size, modified })
        };
        self.blocking("look at", key.as_str(), work).await
    }

    async fn get(&self, key: &Key, range: Range<u64>) -> Result<Bytes, ObjectError> {
        let asked = key.clone();
        let work = move |inner: &Inner| {
            let (file, metadata) = inner.open(&asked).map_err(inner.error("read", &asked))?;
            if range.start > range.end || range.end > metadata.len() {
                return Err(ObjectError::OutOfRange { store: inner.name.clone(), key: asked, range });
            }
            let mut bytes = vec![0; (range.end - range.start) as usize];
            file.read_exact_at(&mut bytes, range.start).map_err(inner.error("read", &asked))?;
            Ok(Bytes::from(bytes))
        };
        self.blocking("read", key.as_str(), work).await
    }

    async fn read(&self, key: &Key, limit: u64) -> Result<(Bytes, Version), ObjectError> {
        let asked = key.clone();
        let work = move |inner: &Inner| {
            let (file, metadata) = inner.open(&asked).map_err(inner.error("read", &asked))?;
            let size = metadata.len();
            if size > limit {
                return Err(ObjectError::TooLong { store: inner.name.clone(), key: asked, size, limit });
            }
            let mut bytes = Vec::with_capacity(size as usize);
            file.take(limit).read_to_end(&mut bytes).map_err(inner.error("read", &asked))?;
            let version = version_of(Sha256::new_with_prefix(&bytes));
            Ok((Bytes::from(bytes), version))
        };
        self.blocking("read", key.as_str(), work).await
    }

    async fn put(&self, key: &Key, bytes: Bytes, condition: Condition) -> Result<Version, ObjectError> {
        let asked = key.clone();
        let work = move |inner: &Inner| {
            let written = inner.begin().and_then(|mut file| io::Write::write_all(&mut file, &bytes).map(|()| file));
            let file = written.map_err(inner.error("write", &asked))?;
            inner.publish(&asked, file, &condition)?;
            Ok(version_of(Sha256::new_with_prefix(&bytes)))
        };
        self.blocking("write", key.as_str(), work).await
    }

    async fn put_file(&self, key: &Key, file: &Path) -> Result<(), ObjectError> {
        let (asked, path) = (key.clone(), file.to_owned());
        let work = move |inner: &Inner| {
            let unreadable = |source| ObjectError::File { store: inner.name.clone(), path: path.clone(), source };
            let mut from = File::open(&path).map_err(unreadable)?;
            if !from.metadata().map_err(unreadable)?.is_file() {
                return Err(unreadable(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
            }
            // Copied within the kernel, or shared where the file system can.
            let copied = inner.begin().and_then(|mut to| io::copy(&mut from, to.as_file_mut()).map(|_| to));
            let file = copied.map_err(inner.error("write", &asked))?;
            inner.publish(&asked, file, &Condition::None)
        };
        self.blocking("write", key.as_str(), work).await
    }

    async fn delete(&self, key: &Key) -> Result<(), ObjectError> {
        let asked = key.clone();
        self.blocking("remove", key.as_str(), move |inner| inner.delete(&asked)).await
    }

    async fn list(&self, folder: Option<&Key>) -> Result<Vec<ObjectInfo>, ObjectError> {
        let asked = folder.cloned();
        let name = folder.map_or_else(|| "/".to_owned(), |folder| format!("{folder}/"));
        let label = name.clone();
        let work = move |inner: &Inner| {
            inner.list(asked.as_ref()).map_err(|source| ObjectError::Failed {
                doing: "list",
                store: inner.name.clone(),
                key: label,
                source: source.into(),
            })
        };
        self.blocking("list", &name, work).await
    }
}
