//! What every store must do, and stores that misbehave for the tests of those above.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;

use crate::{Condition, Key, ObjectError, ObjectErrorKind, ObjectInfo, ObjectStore, Version};

fn key(text: &str) -> Key {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

/// Bytes that repeat with no power of two.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

async fn listed(store: &dyn ObjectStore, folder: Option<&str>) -> Vec<(String, u64)> {
    let folder = folder.map(key);
    let found = store.list(folder.as_ref()).await.expect("list");
    found.into_iter().map(|info| (info.key.to_string(), info.size)).collect()
}

/// Tries all that the trait promises on an empty store. Panics where it is not so. `large` is the length of the largest
/// object, which should be more than the store writes at once.
pub async fn conformance(store: Arc<dyn ObjectStore>, large: usize) {
    absent(&*store).await;
    written_and_read(&*store).await;
    conditions(&*store).await;
    races(&store).await;
    files(&*store, large).await;
    listings(&*store).await;
    assert_eq!(listed(&*store, None).await, [], "every object is removed again");
}

async fn absent(store: &dyn ObjectStore) {
    let gone = key("no/such/object");
    let kinds = [
        store.head(&gone).await.map(|_| ()).unwrap_err().kind(),
        store.get(&gone, 0..1).await.map(|_| ()).unwrap_err().kind(),
        store.get(&gone, 0..0).await.map(|_| ()).unwrap_err().kind(),
        store.read(&gone, 10).await.map(|_| ()).unwrap_err().kind(),
    ];
    assert_eq!(kinds, [ObjectErrorKind::NotFound; 4]);
    store.delete(&gone).await.expect("removing what is not there is a success");
    assert_eq!(listed(store, None).await, []);
    assert_eq!(listed(store, Some("no/such")).await, []);
}

async fn written_and_read(store: &dyn ObjectStore) {
    let name = key("folder/object:1");
    let bytes = pattern(1000);
    store.put(&name, Bytes::from(bytes.clone()), Condition::None).await.expect("write");
    let info = store.head(&name).await.expect("look at");
    assert_eq!((&info.key, info.size), (&name, 1000));
    let age = info.modified.elapsed().unwrap_or_default();
    assert!(age < std::time::Duration::from_secs(3600), "written {age:?} ago");
    for range in [0..1000, 0..1, 999..1000, 300..700, 5..5, 1000..1000] {
        let found = store.get(&name, range.clone()).await.unwrap_or_else(|error| panic!("{range:?}: {error}"));
        assert_eq!(found, bytes[range.start as usize..range.end as usize], "{range:?}");
    }
    #[expect(clippy::reversed_empty_ranges, reason = "a range that makes no sense")]
    let bad: [Range<u64>; 4] = [0..1001, 1000..1001, 2000..2001, 7..5];
    for range in bad {
        let error = store.get(&name, range.clone()).await.unwrap_err();
        assert_eq!(error.kind(), ObjectErrorKind::Length, "{range:?}: {error}");
    }
    assert_eq!(store.read(&name, 1000).await.expect("read").0, bytes);
    assert_eq!(store.read(&name, 999).await.unwrap_err().kind(), ObjectErrorKind::Length);
    // What is asked for by a part of its name is not there.
    for other in ["folder/object", "object:1"] {
        assert_eq!(store.head(&key(other)).await.unwrap_err().kind(), ObjectErrorKind::NotFound, "{other}");
    }
    store.put(&name, Bytes::new(), Condition::None).await.expect("replace by nothing");
    assert_eq!(store.head(&name).await.expect("look at").size, 0);
    assert_eq!(store.read(&name, 0).await.expect("read").0, Bytes::new());
    store.delete(&name).await.expect("remove");
    assert_eq!(store.head(&name).await.unwrap_err().kind(), ObjectErrorKind::NotFound);
}

async fn conditions(store: &dyn ObjectStore) {
    let name = key("record");
    let put = async |text: &'static str, condition| store.put(&name, Bytes::from(text), condition).await;
    let first = put("first", Condition::Absent).await.expect("write where nothing is");
    assert_eq!(put("other", Condition::Absent).await.unwrap_err().kind(), ObjectErrorKind::Condition);
    let (bytes, read) = store.read(&name, 100).await.expect("read");
    assert_eq!((&bytes[..], &read), (&b"first"[..], &first), "a write tells the version that a read does");
    let second = put("second", Condition::Is(first.clone())).await.expect("write over what was read");
    assert_ne!(first, second);
    assert_eq!(put("third", Condition::Is(first.clone())).await.unwrap_err().kind(), ObjectErrorKind::Condition);
    assert_eq!(&store.read(&name, 100).await.expect("read").0[..], b"second", "what fails changes nothing");
    store.delete(&name).await.expect("remove");
    let gone = put("fourth", Condition::Is(second)).await.unwrap_err();
    assert_eq!(gone.kind(), ObjectErrorKind::Condition, "{gone}");
    put("fifth", Condition::Absent).await.expect("write where nothing is any more");
    store.delete(&name).await.expect("remove");
}

/// Of many who want the same at once, one gets it.
async fn races(store: &Arc<dyn ObjectStore>) {
    let name = key("race/record");
    for _ in 0..5 {
        let claim = |number: usize| {
            let (store, name) = (Arc::clone(store), name.clone());
            async move { store.put(&name, Bytes::from(number.to_string()), Condition::Absent).await }
        };
        let claims = join_all((0..8).map(claim)).await;
        let winners: Vec<usize> = (0..8).filter(|number| claims[*number].is_ok()).collect();
        let [winner] = winners[..] else { panic!("{winners:?} all were first") };
        assert_eq!(store.read(&name, 100).await.expect("read").0, winner.to_string());
        store.delete(&name).await.expect("remove");
    }
}

async fn files(store: &dyn ObjectStore, large: usize) {
    let dir = tempfile::tempdir().expect("make a directory");
    for length in [0, 1, 100_000, large] {
        let (path, name) = (dir.path().join("file"), key("files/large"));
        let bytes = pattern(length);
        std::fs::write(&path, &bytes).expect("write a file");
        store.put_file(&name, &path).await.unwrap_or_else(|error| panic!("{length} bytes: {error}"));
        assert_eq!(store.head(&name).await.expect("look at").size, length as u64);
        let (middle, end) = (length as u64 / 2, length as u64);
        assert_eq!(store.get(&name, middle..end).await.expect("read"), bytes[length / 2..]);
        assert!(store.get(&name, 0..end).await.expect("read") == bytes, "{length} bytes come back as they were");
    }
    let error = store.put_file(&key("files/none"), &dir.path().join("none")).await.unwrap_err();
    assert_eq!(error.kind(), ObjectErrorKind::File);
    let error = store.put_file(&key("files/none"), dir.path()).await.unwrap_err();
    assert_eq!(error.kind(), ObjectErrorKind::File);
    assert_eq!(listed(store, Some("files")).await, [("files/large".to_owned(), large as u64)]);
    store.delete(&key("files/large")).await.expect("remove");
}

async fn listings(store: &dyn ObjectStore) {
    let names = ["a", "b/1", "b/2/x", "b/2/y", "b.json", "bc/1", "d/e/f/g"];
    for (length, name) in names.iter().enumerate() {
        store.put(&key(name), Bytes::from(pattern(length)), Condition::None).await.expect("write");
    }
    let all = listed(store, None).await;
    let sorted: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>(), sorted.into_iter().collect::<Vec<_>>());
    let some = |text: &[(&str, u64)]| text.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect::<Vec<_>>();
    assert_eq!(
        listed(store, Some("b")).await,
        some(&[("b/1", 1), ("b/2/x", 2), ("b/2/y", 3)]),
        "b.json and bc are no part of b"
    );
    assert_eq!(listed(store, Some("b/2")).await, some(&[("b/2/x", 2), ("b/2/y", 3)]));
    assert_eq!(listed(store, Some("d")).await, some(&[("d/e/f/g", 6)]));
    assert_eq!(listed(store, Some("a")).await, [], "an object is no folder");
    for name in names {
        store.delete(&key(name)).await.expect("remove");
    }
}

/// What is asked of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// [`ObjectStore::head`].
    Head,
    /// [`ObjectStore::get`].
    Get,
    /// [`ObjectStore::read`].
    Read,
    /// [`ObjectStore::put`].
    Put,
    /// [`ObjectStore::put_file`].
    PutFile,
    /// [`ObjectStore::delete`].
    Delete,
    /// [`ObjectStore::list`].
    List,
}

type Rule = dyn Fn(Ask, &str) -> bool + Send + Sync;

/// A store that counts what is asked of it, and fails what a rule says.
pub struct FaultyStore {
    inner: Arc<dyn ObjectStore>,
    fails: Box<Rule>,
    asked: AtomicUsize,
}

impl FaultyStore {
    /// Fails what `fails` is true for, of a kind and a key (or folder). Nothing of it reaches `inner`.
    pub fn new(inner: Arc<dyn ObjectStore>, fails: impl Fn(Ask, &str) -> bool + Send + Sync + 'static) -> Self {
        Self { inner, fails: Box::new(fails), asked: AtomicUsize::new(0) }
    }

    /// How often anything was asked.
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    fn pass(&self, ask: Ask, key: &str) -> Result<(), ObjectError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if !(self.fails)(ask, key) {
            return Ok(());
        }
        let (store, key, source) = (self.inner.name().to_owned(), key.to_owned(), "made to fail".into());
        Err(ObjectError::Failed { doing: "fail", store, key, source })
    }
}

impl fmt::Debug for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyStore").field("inner", &self.inner).finish_non_exhaustive()
    }
}

#[async_trait]
impl ObjectStore for FaultyStore {
    fn name(&self) -> &str {
        self.inner.name()
    }

    async fn head(&self, key: &Key) -> Result<ObjectInfo, ObjectError> {
        self.pass(Ask::Head, key.as_str())?;
        self.inner.head(key).await
    }

    async fn get(&self, key: &Key, range: Range<u64>) -> Result<Bytes, ObjectError> {
        self.pass(Ask::Get, key.as_str())?;
        self.inner.get(key, range).await
    }

    async fn read(&self, key: &Key, limit: u64) -> Result<(Bytes, Version), ObjectError> {
        self.pass(Ask::Read, key.as_str())?;
        self.inner.read(key, limit).await
    }

    async fn put(&self, key: &Key, bytes: Bytes, condition: Condition) -> Result<Version, ObjectError> {
        self.pass(Ask::Put, key.as_str())?;
        self.inner.put(key, bytes, condition).await
    }

    async fn put_file(&self, key: &Key, file: &Path) -> Result<(), ObjectError> {
        self.pass(Ask::PutFile, key.as_str())?;
        self.inner.put_file(key, file).await
    }

    async fn delete(&self, key: &Key) -> Result<(), ObjectError> {
        self.pass(Ask::Delete, key.as_str())?;
        self.inner.delete(key).await
    }

    async fn list(&self, folder: Option<&Key>) -> Result<Vec<ObjectInfo>, ObjectError> {
        self.pass(Ask::List, folder.map_or("", Key::as_str))?;
        self.inner.list(folder).await
    }
}
