//! Archives that clients send for their builds: opaque files under the name that the client has for their content. They are
//! opened in guests only.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aenv_model::Bytes;
use futures::{Stream, StreamExt as _};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::warn;

/// What files that are still being received begin with.
const PART: &str = "part-";

/// How long an archive stays that no build asks for.
const LIFE: Duration = Duration::from_secs(3 * 24 * 3600);

/// Archives that are received at the same time; more wait.
const AT_ONCE: usize = 16;

/// A client that sends nothing for so long has gone.
const SILENCE: Duration = Duration::from_secs(60);

/// Archives of a node. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Uploads {
    dir: PathBuf,
    /// Of one.
    limit: Bytes,
    /// Of all.
    total: Bytes,
    turns: Arc<Semaphore>,
}

/// Why an archive was not kept.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// No such name.
    #[error("the name of files is their SHA-256, in lower-case hexadecimal digits")]
    Name,
    /// Too long.
    #[error("the files of a step may have {limit} as an archive")]
    Large {
        /// The most.
        limit: Bytes,
    },
    /// The client went away, or sent nonsense.
    #[error("the files did not arrive whole")]
    Cut,
    /// The node's disk.
    #[error("keep files of a build")]
    Io(#[from] io::Error),
}

impl Uploads {
    /// Archives in `dir`, which is made if absent. What a former server has not received whole goes, and what is too old.
    pub(crate) fn open(dir: PathBuf, limit: Bytes, total: Bytes) -> io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        let uploads = Self { dir, limit, total, turns: Arc::new(Semaphore::new(AT_ONCE)) };
        for (path, _, _) in uploads.files() {
            if is_part(&path) {
                remove(&path);
            }
        }
        uploads.sweep();
        Ok(uploads)
    }

    /// The archive of that name, which somebody is about to use.
    #[must_use]
    pub fn find(&self, hash: &str) -> Option<PathBuf> {
        let path = self.path(hash)?;
        let file = std::fs::File::options().append(true).open(&path).ok()?;
        _ = file.set_modified(SystemTime::now()); // at worst, it goes too early
        Some(path)
    }

    /// Keeps what arrives under that name, in the place of what was there.
    ///
    /// Cancel safety: if dropped, what was there stays.
    pub async fn receive<E>(
        &self,
        hash: &str,
        body: impl Stream<Item = Result<bytes::Bytes, E>> + Send,
    ) -> Result<(), UploadError> {
        let target = self.path(hash).ok_or(UploadError::Name)?;
        let _turn = self.turns.acquire().await;
        self.sweep();
        // Goes by itself on every way out but the last.
        let part = tempfile::Builder::new().prefix(PART).tempfile_in(&self.dir)?;
        let mut file = tokio::fs::File::from_std(part.as_file().try_clone()?);
        let mut body = std::pin::pin!(body);
        let mut length = 0;
        while let Some(piece) = timeout(SILENCE, body.next()).await.map_err(|_| UploadError::Cut)? {
            let piece = piece.map_err(|_| UploadError::Cut)?;
            length += piece.len() as u64;
            if length > self.limit.get() {
                return Err(UploadError::Large { limit: self.limit });
            }
            file.write_all(&piece).await?;
        }
        file.flush().await?;
        file.sync_all().await?; // its name promises all of it
        part.persist(&target).map_err(|failed| failed.error)?;
        Ok(())
    }

    /// Removes what was not used for long, and the oldest beyond what all may have together.
    fn sweep(&self) {
        let mut files = self.files();
        files.retain(|(path, _, _)| !is_part(path)); // somebody is at it
        files.sort_by_key(|(_, modified, _)| std::cmp::Reverse(*modified));
        let mut sum = 0;
        for (path, modified, length) in files {
            sum += length;
            let is_old = modified.elapsed().is_ok_and(|age| age > LIFE);
            if is_old || sum > self.total.get() {
                remove(&path);
            }
        }
    }

    fn files(&self) -> Vec<(PathBuf, SystemTime, u64)> {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let file = |entry: std::fs::DirEntry| {
            let metadata = entry.metadata().ok()?;
            Some((entry.path(), metadata.modified().ok()?, metadata.len()))
        };
        entries.filter_map(file).collect()
    }

    fn path(&self, hash: &str) -> Option<PathBuf> {
        crate::step::is_files_hash(hash).then(|| self.dir.join(hash))
    }
}

fn is_part(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PART))
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        warn!(path = %path.display(), %error, "files of a build stay although nobody needs them");
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    fn hash(digit: &str) -> String {
        digit.repeat(64)
    }

    fn body(text: &'static str) -> impl Stream<Item = Result<bytes::Bytes, ()>> + Send {
        stream::iter([Ok(bytes::Bytes::from_static(text.as_bytes()))])
    }

    fn open(dir: &Path) -> Uploads {
        Uploads::open(dir.join("uploads"), Bytes(8), Bytes(12)).unwrap()
    }

    #[tokio::test]
    async fn what_arrived_is_found_and_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let uploads = open(dir.path());
        assert!(uploads.find(&hash("a")).is_none());
        uploads.receive(&hash("a"), body("one")).await.unwrap();
        let cut = stream::iter([Ok(bytes::Bytes::from_static(b"tw")), Err(())]);
        assert!(matches!(uploads.receive(&hash("a"), cut).await, Err(UploadError::Cut)));
        assert_eq!(std::fs::read(uploads.find(&hash("a")).unwrap()).unwrap(), b"one");
        uploads.receive(&hash("a"), body("two")).await.unwrap();
        assert_eq!(std::fs::read(uploads.find(&hash("a")).unwrap()).unwrap(), b"two");
    }

    #[tokio::test]
    async fn sizes_and_names_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let uploads = open(dir.path());
        assert!(matches!(uploads.receive(&hash("a"), body("123456789")).await, Err(UploadError::Large { .. })));
        for name in ["", "../../etc/passwd", &hash("A"), &hash("a")[1..]] {
            assert!(matches!(uploads.receive(name, body("x")).await, Err(UploadError::Name)), "{name}");
            assert!(uploads.find(name).is_none());
        }
        assert_eq!(std::fs::read_dir(dir.path().join("uploads")).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn the_oldest_go_where_all_are_too_many_and_so_do_remains() {
        let dir = tempfile::tempdir().unwrap();
        let uploads = open(dir.path());
        for (at, name) in ["a", "b"].into_iter().enumerate() {
            uploads.receive(&hash(name), body("12345678")).await.unwrap();
            let file = std::fs::File::options().append(true).open(uploads.path(&hash(name)).unwrap()).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(60 - at as u64)).unwrap();
        }
        std::fs::write(dir.path().join("uploads/part-x"), "half").unwrap();
        let uploads = open(dir.path());
        assert!(uploads.find(&hash("a")).is_none() && uploads.find(&hash("b")).is_some());
        assert_eq!(std::fs::read_dir(dir.path().join("uploads")).unwrap().count(), 1);
    }
}
