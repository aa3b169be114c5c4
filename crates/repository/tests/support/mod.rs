//! What the tests share: a clock that is set, stores that die, publications of a few bytes.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use aenv_model::{Bytes as Amount, CaptureId, MachineShape, SandboxId, TemplateId};
use aenv_objects::{Condition, Key, ObjectError, ObjectInfo, ObjectStore, Version};
use aenv_repository::{
    ArtifactCache, Clock, Content, Context, FileKind, NewFile, Options, Publication, Record, Repository,
    RepositoryError, Resources,
};
use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;

/// A clock that goes when it is told to, from the host's time on.
#[derive(Clone)]
pub struct TestClock(Arc<AtomicI64>);

impl TestClock {
    pub fn new() -> Self {
        Self(Arc::new(Timestamp::now().as_millisecond().into()))
    }

    pub fn pass(&self, time: Duration) {
        self.0.fetch_add(time.as_millis().try_into().unwrap(), Ordering::SeqCst);
    }

    /// Whatever is held without a word is over.
    pub fn pass_all(&self) {
        let Options { lease, claim, turn, margin, .. } = Options::default();
        self.pass(lease + claim + turn + 2 * margin);
    }

    pub fn clock(&self) -> Clock {
        let at = Arc::clone(&self.0);
        Clock::new(move || Timestamp::from_millisecond(at.load(Ordering::SeqCst)).unwrap())
    }
}

/// A node's view of a repository.
pub fn node(store: &Arc<dyn ObjectStore>, clock: &TestClock) -> Repository {
    let options = Options { patience: Duration::from_secs(2), ..Options::default() };
    Repository::new(Arc::clone(store), options, clock.clock())
}

pub const RESOURCES: Resources = Resources { cpu_count: 2, memory_mib: 512, disk_size_mib: 1024 };

/// A capture of these layers, and of a state of its own.
pub fn publication(layers: &[&str]) -> Publication {
    let capture = CaptureId::new();
    let file =
        |name: String, text: &str, kind| NewFile { name, content: Content::Bytes(Bytes::from(text.to_owned())), kind };
    let layers = layers
        .iter()
        .enumerate()
        .map(|(number, text)| file(format!("memory-{number:03}.commit"), text, FileKind::Layer));
    let own = [
        file("state".into(), &format!("state of {capture}"), FileKind::Own),
        file("capture.json".into(), "{}", FileKind::Own),
    ];
    Publication {
        resources: RESOURCES,
        context: Context { workdir: Some("/srv".into()), ..Context::default() },
        capture,
        files: layers.chain(own).collect(),
    }
}

pub fn shape() -> MachineShape {
    MachineShape { vcpus: 2, memory: Amount::mib(512) }
}

pub async fn snapshot(
    node: &Repository,
    alias: Option<&str>,
    publication: &Publication,
) -> Result<Record, RepositoryError> {
    let alias = alias.map(str::to_owned);
    node.publish_snapshot(TemplateId::new(), alias, SandboxId::new(), publication.clone()).await
}

/// Brings all that the record names to an empty cache, and looks whether it is what was published.
pub async fn is_whole(node: &Repository, record: &Record, publication: &Publication) -> Result<(), RepositoryError> {
    let dir = tempfile::tempdir().unwrap();
    let cache = ArtifactCache::open(dir.path(), Amount::mib(1)).unwrap();
    let fetched = node.fetch(record, &cache).await?;
    let found: Vec<_> =
        fetched.files.iter().map(|(name, pinned)| (name.clone(), std::fs::read(pinned.path()).unwrap())).collect();
    let expected: Vec<_> = (publication.files.iter())
        .map(|file| match &file.content {
            Content::Bytes(bytes) => (file.name.clone(), bytes.to_vec()),
            Content::File(path) => (file.name.clone(), std::fs::read(path).unwrap()),
        })
        .collect();
    assert_eq!(found, expected);
    Ok(())
}

/// All that is in a store, but for the object that says whose turn it is.
pub async fn keys(store: &Arc<dyn ObjectStore>) -> Vec<String> {
    let found = store.list(None).await.unwrap();
    found.into_iter().map(|info| info.key.to_string()).filter(|key| key != "catalog/sweep.json").collect()
}

/// How a store dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Death {
    /// Before it has done what it was asked.
    Before,
    /// It has done it, and says nothing.
    After,
}

/// A store that does so many things, and then nothing any more: what a process sees of it that is killed there.
#[derive(Debug)]
pub struct DyingStore {
    inner: Arc<dyn ObjectStore>,
    left: AtomicUsize,
    death: Death,
    dead: std::sync::atomic::AtomicBool,
}

impl DyingStore {
    pub fn new(inner: &Arc<dyn ObjectStore>, after: usize, death: Death) -> Arc<Self> {
        Arc::new(Self { inner: Arc::clone(inner), left: after.into(), death, dead: false.into() })
    }

    /// Has it come to that?
    pub fn died(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    async fn pass<T>(&self, key: &str, work: impl Future<Output = Result<T, ObjectError>>) -> Result<T, ObjectError> {
        let failed = || ObjectError::Failed {
            doing: "do anything with",
            store: "a dead store".into(),
            key: key.to_owned(),
            source: "it is dead".into(),
        };
        if self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            return work.await;
        }
        let first = !self.dead.swap(true, Ordering::SeqCst);
        if first && self.death == Death::After {
            _ = work.await;
        }
        Err(failed())
    }
}

#[async_trait]
impl ObjectStore for DyingStore {
    fn name(&self) -> &str {
        self.inner.name()
    }

    async fn head(&self, key: &Key) -> Result<ObjectInfo, ObjectError> {
        self.pass(key.as_str(), self.inner.head(key)).await
    }

    async fn get(&self, key: &Key, range: Range<u64>) -> Result<Bytes, ObjectError> {
        self.pass(key.as_str(), self.inner.get(key, range)).await
    }

    async fn read(&self, key: &Key, limit: u64) -> Result<(Bytes, Version), ObjectError> {
        self.pass(key.as_str(), self.inner.read(key, limit)).await
    }

    async fn put(&self, key: &Key, bytes: Bytes, condition: Condition) -> Result<Version, ObjectError> {
        self.pass(key.as_str(), self.inner.put(key, bytes, condition)).await
    }

    async fn put_file(&self, key: &Key, file: &Path) -> Result<(), ObjectError> {
        self.pass(key.as_str(), self.inner.put_file(key, file)).await
    }

    async fn delete(&self, key: &Key) -> Result<(), ObjectError> {
        self.pass(key.as_str(), self.inner.delete(key)).await
    }

    async fn list(&self, folder: Option<&Key>) -> Result<Vec<ObjectInfo>, ObjectError> {
        self.pass(folder.map_or("/", Key::as_str), self.inner.list(folder)).await
    }
}
