//! Files of the repository on this node, by digest.
//!
//! ```text
//!   DIR/sha256-HEX     a file: complete and of this digest, for it gets its name last
//!   DIR/.partial/…     one that is on its way; removed at the next start
//! ```
//!
//! Whoever wants a file that is not here brings it; whoever wants the same meanwhile waits for that. A file that is
//! [`Pinned`] stays. Beyond the limit, those that were not wanted for the longest time go, down to four fifths of it.

use std::collections::HashMap;
use std::fs::{self, File, FileTimes};
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::SystemTime;

use aenv_model::Bytes;
use futures::future::{BoxFuture, FutureExt, Shared, WeakShared};
use tempfile::TempPath;
use tracing::{info, warn};

use crate::digest::Digest;

const PARTIAL: &str = ".partial";

/// Files of the repository on this node. Cloning shares it. One process has it at a time.
#[derive(Debug, Clone)]
pub struct ArtifactCache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    limit: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    files: HashMap<Digest, Entry>,
    bytes: u64,
    /// Counted up with every use.
    time: u64,
    on_the_way: HashMap<Digest, WeakShared<Arrival>>,
}

type Arrival = BoxFuture<'static, Result<Pinned, Arc<CacheError>>>;

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("files", &self.files.len()).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Entry {
    size: u64,
    used: u64,
    pin: Weak<Pin>,
}

/// A file that stays for as long as this. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Pinned(Arc<Pin>);

#[derive(Debug)]
struct Pin {
    path: PathBuf,
    cache: Arc<Inner>,
}

impl Pinned {
    /// It. Not to be changed; links to it outlive the cache's.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.cache.shrink();
    }
}

/// Why a file is not here.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// It could not be brought.
    #[error(transparent)]
    Bring(crate::RepositoryError),
    /// What was brought is not what was asked for.
    #[error("{digest} was brought as {found}, {size} bytes")]
    Other {
        /// What was asked for.
        digest: Digest,
        /// What came.
        found: Digest,
        /// How much of it.
        size: u64,
    },
    /// The cache's directory.
    #[error("{doing} {path}", path = path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl ArtifactCache {
    /// Opens the cache in `dir`, which is made if need be, for at most `limit`. What was half-written is removed. Blocking.
    pub fn open(dir: &Path, limit: Bytes) -> io::Result<Self> {
        let partial = dir.join(PARTIAL);
        aenv_durable::remove_dir_if_present(&partial)?;
        fs::create_dir_all(&partial)?;
        let mut found = Vec::new();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let (name, metadata) = (entry.file_name(), entry.metadata()?);
            // What others put here is not ours.
            let Some(digest) = name.to_str().and_then(|name| name.replacen('-', ":", 1).parse::<Digest>().ok()) else {
                continue;
            };
            found.push((metadata.accessed()?, digest, metadata.len()));
        }
        found.sort();
        let mut state = State::default();
        for (_, digest, size) in found {
            state.time += 1;
            state.bytes += size;
            state.files.insert(digest, Entry { size, used: state.time, pin: Weak::new() });
        }
        let inner = Arc::new(Inner { dir: dir.to_owned(), limit: limit.get(), state: Mutex::new(state) });
        inner.shrink();
        Ok(Self { inner })
    }

    /// The file of this digest and length. If it is not here, `bring` writes it to the path that it is given, and says what
    /// it has written; of several who ask at once, one does, and the others get what becomes of that.
    ///
    /// Cancel safety: if all who ask are dropped, nothing is left.
    pub async fn get<F>(
        &self,
        digest: &Digest,
        size: u64,
        bring: impl FnOnce(PathBuf) -> F,
    ) -> Result<Pinned, Arc<CacheError>>
    where
        F: Future<Output = Result<(Digest, u64), CacheError>> + Send + 'static,
    {
        let arrival = {
            // Dropped after the lock: the last of them lets go of its pin, which takes the lock.
            let mut alive = Vec::new();
            let mut state = self.inner.lock();
            if let Some(pinned) = self.inner.pin(&mut state, digest, size) {
                return Ok(pinned);
            }
            match state.on_the_way.get(digest).and_then(WeakShared::upgrade) {
                Some(arrival) => arrival,
                None => {
                    state
                        .on_the_way
                        .retain(|_, arrival| arrival.upgrade().map(|arrival| alive.push(arrival)).is_some());
                    let place = self.inner.place().map_err(Arc::new)?;
                    let bringing = bring(place.to_path_buf());
                    let arrival = arrive(Arc::clone(&self.inner), digest.clone(), size, place, bringing);
                    let arrival: Shared<Arrival> = async { arrival.await.map_err(Arc::new) }.boxed().shared();
                    state.on_the_way.extend(arrival.downgrade().map(|weak| (digest.clone(), weak)));
                    arrival
                }
            }
        };
        arrival.await
    }

    /// Bytes of all files.
    #[must_use]
    pub fn size(&self) -> Bytes {
        Bytes(self.inner.lock().bytes)
    }
}

/// Waits for the bytes, and gives them their name.
async fn arrive(
    cache: Arc<Inner>,
    digest: Digest,
    size: u64,
    place: TempPath,
    bringing: impl Future<Output = Result<(Digest, u64), CacheError>>,
) -> Result<Pinned, CacheError> {
    let brought = bringing.await?;
    if brought != (digest.clone(), size) {
        return Err(CacheError::Other { digest, found: brought.0, size: brought.1 });
    }
    let work = move || {
        let path = cache.path(&digest);
        let failed = |doing| {
            let path = path.clone();
            move |source| CacheError::Io { doing, path, source }
        };
        File::open(&place).and_then(|file| file.sync_all()).map_err(failed("sync"))?;
        place.persist(&path).map_err(|error| error.error).map_err(failed("name"))?;
        aenv_durable::sync_dir(&cache.dir).map_err(failed("sync the directory of"))?;
        let pinned = {
            let mut state = cache.lock();
            let entry = Entry { size, used: 0, pin: Weak::new() };
            let replaced = state.files.insert(digest.clone(), entry).map_or(0, |old| old.size);
            state.bytes = state.bytes + size - replaced;
            cache.pin(&mut state, &digest, size)
        };
        cache.shrink();
        pinned.ok_or_else(|| failed("keep")(io::ErrorKind::NotFound.into()))
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(pinned) => pinned,
        Err(error) => Err(CacheError::Io { doing: "name", path: PathBuf::new(), source: io::Error::other(error) }),
    }
}

impl Inner {
    fn path(&self, digest: &Digest) -> PathBuf {
        self.dir.join(format!("sha256-{}", digest.hex()))
    }

    /// A file for what is on its way.
    fn place(&self) -> Result<TempPath, CacheError> {
        let dir = self.dir.join(PARTIAL);
        let made = tempfile::NamedTempFile::new_in(&dir).map(tempfile::NamedTempFile::into_temp_path);
        made.map_err(|source| CacheError::Io { doing: "make a file in", path: dir, source })
    }

    /// The file, if it is here and as long as it should be.
    fn pin(self: &Arc<Self>, state: &mut State, digest: &Digest, size: u64) -> Option<Pinned> {
        state.time += 1;
        let now = state.time;
        let entry = state.files.get_mut(digest)?;
        let path = self.path(digest);
        // Keeps its place in the order across restarts. The time of its last change stays: by that, others know it.
        let touched = File::open(&path).and_then(|file| {
            file.set_times(FileTimes::new().set_accessed(SystemTime::now()))?;
            file.metadata()
        });
        if touched.is_ok_and(|metadata| metadata.len() == size) && entry.size == size {
            entry.used = now;
            if let Some(pin) = entry.pin.upgrade() {
                return Some(Pinned(pin));
            }
            let pin = Arc::new(Pin { path, cache: Arc::clone(self) });
            entry.pin = Arc::downgrade(&pin);
            return Some(Pinned(pin));
        }
        warn!(path = %path.display(), "a file of the artifact cache is gone or was cut; it is brought again");
        let entry = state.files.remove(digest)?;
        state.bytes -= entry.size;
        _ = fs::remove_file(&path);
        None
    }

    /// Removes what nobody has used for the longest time, if there is too much.
    fn shrink(&self) {
        let mut state = self.lock();
        if state.bytes <= self.limit {
            return;
        }
        let idle = |entry: &Entry| entry.pin.strong_count() == 0;
        let mut idle: Vec<_> = (state.files.iter())
            .filter(|(_, entry)| idle(entry))
            .map(|(digest, entry)| (entry.used, digest.clone()))
            .collect();
        idle.sort();
        let (before, target) = (state.bytes, self.limit / 5 * 4);
        for (_, digest) in idle {
            if state.bytes <= target {
                break;
            }
            let path = self.path(&digest);
            if let Err(error) = aenv_durable::remove_file_if_present(&path) {
                warn!(path = %path.display(), %error, "a file of the artifact cache stays");
                continue;
            }
            if let Some(entry) = state.files.remove(&digest) {
                state.bytes -= entry.size;
            }
        }
        if state.bytes < before {
            info!(bytes = before - state.bytes, "removed files from the artifact cache");
        }
    }

    /// What is done under it leaves the counts right at every step, so they are after any panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn content(number: usize) -> Vec<u8> {
        vec![u8::try_from(number).unwrap(); 100]
    }

    async fn get(cache: &ArtifactCache, number: usize, brought: &Arc<AtomicUsize>) -> Result<Pinned, Arc<CacheError>> {
        let (bytes, brought) = (content(number), Arc::clone(brought));
        let digest = Digest::of(&bytes);
        let bring = |path: PathBuf| async move {
            tokio::task::yield_now().await;
            brought.fetch_add(1, Ordering::Relaxed);
            fs::write(path, &bytes).unwrap();
            Ok((Digest::of(&bytes), bytes.len() as u64))
        };
        cache.get(&digest, 100, bring).await
    }

    #[tokio::test]
    async fn a_file_is_brought_once_for_all_who_ask() {
        let dir = tempfile::tempdir().unwrap();
        let cache = ArtifactCache::open(dir.path(), Bytes(1000)).unwrap();
        let brought = Arc::new(AtomicUsize::new(0));
        let asked = (0..20).map(|_| get(&cache, 7, &brought));
        for pinned in futures::future::join_all(asked).await {
            assert_eq!(fs::read(pinned.unwrap().path()).unwrap(), content(7));
        }
        _ = get(&cache, 7, &brought).await.unwrap();
        assert_eq!(brought.load(Ordering::Relaxed), 1);
        let again = ArtifactCache::open(dir.path(), Bytes(1000)).unwrap();
        _ = get(&again, 7, &brought).await.unwrap();
        assert_eq!((brought.load(Ordering::Relaxed), again.size()), (1, Bytes(100)), "it is there after a restart");
    }

    #[tokio::test]
    async fn those_go_first_that_were_not_used_for_the_longest_time_and_pinned_ones_never() {
        let dir = tempfile::tempdir().unwrap();
        let cache = ArtifactCache::open(dir.path(), Bytes(500)).unwrap();
        let brought = Arc::new(AtomicUsize::new(0));
        let first = get(&cache, 0, &brought).await.unwrap();
        for number in [1, 2, 3, 4, 1, 5] {
            _ = get(&cache, number, &brought).await.unwrap();
        }
        assert_eq!((cache.size(), brought.load(Ordering::Relaxed)), (Bytes(400), 6));
        for (number, there) in [(0, true), (1, true), (4, true), (5, true), (2, false), (3, false)] {
            let path = dir.path().join(format!("sha256-{}", Digest::of(&content(number)).hex()));
            assert_eq!(path.exists(), there, "{number}");
        }
        let all: Vec<_> = [0, 1, 2, 3, 4, 5].into_iter().map(|number| get(&cache, number, &brought)).collect();
        let all = futures::future::join_all(all).await;
        assert_eq!(cache.size(), Bytes(600), "more than the limit while all are in use");
        drop((all, first));
        assert_eq!(cache.size(), Bytes(500), "no more than the limit, as soon as that can be");
    }

    #[tokio::test]
    async fn what_is_cut_or_wrong_is_not_given() {
        let dir = tempfile::tempdir().unwrap();
        let cache = ArtifactCache::open(dir.path(), Bytes(1000)).unwrap();
        let brought = Arc::new(AtomicUsize::new(0));
        let path = get(&cache, 1, &brought).await.unwrap().path().to_owned();
        fs::write(&path, b"cut").unwrap();
        let pinned = get(&cache, 1, &brought).await.unwrap();
        assert_eq!((fs::read(pinned.path()).unwrap(), brought.load(Ordering::Relaxed)), (content(1), 2));
        drop(pinned);
        fs::remove_file(&path).unwrap();
        _ = get(&cache, 1, &brought).await.unwrap();

        let asked = Digest::of(b"asked");
        let wrong = |path: PathBuf| async move {
            fs::write(path, b"other").unwrap();
            Ok((Digest::of(b"other"), 5))
        };
        let error = cache.get(&asked, 5, wrong).await.unwrap_err();
        assert!(matches!(*error, CacheError::Other { .. }), "{error}");
        let failing = |path: PathBuf| async move {
            fs::write(path, b"half").unwrap();
            Err(CacheError::Bring(crate::RepositoryError::Busy))
        };
        let two = [cache.get(&asked, 5, failing), cache.get(&asked, 5, failing)];
        for failed in futures::future::join_all(two).await {
            assert!(matches!(*failed.unwrap_err(), CacheError::Bring(_)));
        }
        let endless = cache.get(&asked, 5, |_| std::future::pending());
        assert!(endless.now_or_never().is_none(), "its asker is dropped");
        assert_eq!(fs::read_dir(dir.path().join(PARTIAL)).unwrap().count(), 0);
        assert_eq!(cache.size(), Bytes(100));
    }

    #[tokio::test]
    async fn what_was_half_written_goes_at_the_next_start_and_strange_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        _ = ArtifactCache::open(dir.path(), Bytes(1000)).unwrap();
        fs::write(dir.path().join(PARTIAL).join("half"), b"half").unwrap();
        fs::write(dir.path().join("strange"), b"strange").unwrap();
        let cache = ArtifactCache::open(dir.path(), Bytes(0)).unwrap();
        assert_eq!(fs::read_dir(dir.path().join(PARTIAL)).unwrap().count(), 0);
        assert!(dir.path().join("strange").exists());
        assert_eq!(cache.size(), Bytes(0));
    }
}
