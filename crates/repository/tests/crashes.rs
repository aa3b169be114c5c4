//! Ends between any two writes leave a whole snapshot or none, and garbage that the sweep takes.

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aenv_model::{SandboxId, TemplateId};
use aenv_objects::test_support::{Ask, FaultyStore};
use aenv_objects::{LocalStore, ObjectStore};
use aenv_repository::{BuildStatus, Publication, Record, Repository, RepositoryError, RepositoryErrorKind, Source};
use support::{Death, DyingStore, RESOURCES, TestClock, is_whole, keys, node, publication, snapshot};

/// More operations than anything here takes.
const MOST: usize = 200;

struct World {
    _dir: tempfile::TempDir,
    store: Arc<dyn ObjectStore>,
    clock: TestClock,
    base: (Record, Publication),
}

impl World {
    /// A repository with one snapshot.
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(LocalStore::open(dir.path()).unwrap()) as Arc<dyn ObjectStore>;
        let clock = TestClock::new();
        let content = publication(&["base"]);
        let base = snapshot(&node(&store, &clock), Some("base"), &content).await.unwrap();
        Self { _dir: dir, store, clock, base: (base, content) }
    }

    fn node(&self) -> Repository {
        node(&self.store, &self.clock)
    }

    /// A node whose store dies.
    fn dying(&self, after: usize, death: Death) -> (Repository, Arc<DyingStore>) {
        let store = DyingStore::new(&self.store, after, death);
        (node(&(Arc::clone(&store) as Arc<dyn ObjectStore>), &self.clock), store)
    }

    /// All that is listed is whole. Gives what there is beside the base.
    async fn beside(&self, content: &Publication) -> Option<Record> {
        let node = self.node();
        let listing = node.list().await.unwrap();
        assert_eq!(listing.problems, []);
        is_whole(&node, &self.base.0, &self.base.1).await.unwrap();
        let mut others: Vec<_> = listing.records.into_iter().filter(|record| record.id != self.base.0.id).collect();
        let other = others.pop()?;
        assert_eq!(others, []);
        is_whole(&node, &other, content).await.unwrap();
        if let Some(alias) = &other.alias {
            assert_eq!(node.find(alias).await.unwrap(), other);
        }
        Some(other)
    }

    /// When all that was held is over, a sweep leaves what records name, and nothing else.
    async fn sweep(&self) {
        self.clock.pass_all();
        let node = self.node();
        node.sweep().await.unwrap();
        let mut expected = BTreeSet::new();
        for record in node.list().await.unwrap().records {
            expected.insert(format!("catalog/records/{}.json", record.id));
            expected.extend(record.alias.as_ref().map(|alias| format!("catalog/aliases/{alias}")));
            for file in record.committed.iter().flat_map(|committed| &committed.files) {
                expected.insert(match file.managed {
                    true => format!("managed-layers/{}", file.digest),
                    false => {
                        let capture = record.committed.as_ref().unwrap().capture;
                        format!("artifacts/{}/{capture}/{}", record.id, file.name)
                    }
                });
            }
        }
        assert_eq!(keys(&self.store).await.into_iter().collect::<BTreeSet<_>>(), expected);
    }
}

/// Runs `test` for every operation that may be the last, until it comes to its end without dying.
async fn at_every_step(test: impl AsyncFn(usize, Death) -> bool) {
    for death in [Death::Before, Death::After] {
        let mut steps = 0;
        while test(steps, death).await {
            steps += 1;
            assert!(steps < MOST);
        }
        assert!(steps > 3, "it died {steps} times only");
    }
}

#[tokio::test]
async fn a_crash_while_a_snapshot_is_published_leaves_all_of_it_or_none() {
    at_every_step(async |after, death| {
        let world = World::new().await;
        let content = publication(&["base", "new"]);
        let (dying, store) = world.dying(after, death);
        let published = snapshot(&dying, Some("fresh"), &content).await;
        let there = world.beside(&content).await;
        match (&published, &there) {
            (Ok(record), Some(there)) => assert_eq!(record, there),
            (Ok(_), None) => panic!("it was acknowledged, and is not there"),
            // Its store died before it could say so.
            (Err(error), _) => assert_eq!(error.kind(), RepositoryErrorKind::Unavailable, "{error:?}"),
        }
        // Garbage is no obstacle, and others are not hurt by its removal.
        world.sweep().await;
        assert_eq!(world.beside(&content).await, there);
        if there.is_none() {
            let again = snapshot(&world.node(), Some("fresh"), &content).await.unwrap();
            is_whole(&world.node(), &again, &content).await.unwrap();
        }
        store.died()
    })
    .await;
}

#[tokio::test]
async fn a_crash_while_a_build_is_published_leaves_the_old_or_the_new() {
    at_every_step(async |after, death| {
        let world = World::new().await;
        let node = world.node();
        let (template, first) = node.announce("image", RESOURCES).await.unwrap();
        let (old, new) = (publication(&["base", "old"]), publication(&["base", "new"]));
        node.claim(template.id, first).await.unwrap();
        node.publish_build(template.id, first, old.clone()).await.unwrap();
        let (_, second) = node.announce("image", RESOURCES).await.unwrap();
        node.claim(template.id, second).await.unwrap();
        let (dying, store) = world.dying(after, death);
        let published = dying.publish_build(template.id, second, new.clone()).await;
        let there = node.find("image").await.unwrap();
        let is_new = there.committed.as_ref().unwrap().capture == new.capture;
        assert!(is_new || published.is_err());
        world.beside(if is_new { &new } else { &old }).await.unwrap();
        world.sweep().await;
        world.beside(if is_new { &new } else { &old }).await.unwrap();
        store.died()
    })
    .await;
}

#[tokio::test]
async fn a_crash_while_it_is_deleted_leaves_all_of_it_or_none() {
    at_every_step(async |after, death| {
        let world = World::new().await;
        let content = publication(&["base", "new"]);
        let record = snapshot(&world.node(), Some("doomed"), &content).await.unwrap();
        let (dying, store) = world.dying(after, death);
        let deleted = dying.delete(record.id).await;
        let there = world.beside(&content).await;
        assert!(there.is_none() || deleted.is_err());
        if there.is_none() {
            assert_eq!(world.node().find("doomed").await.unwrap_err().kind(), RepositoryErrorKind::NotFound);
            let next = snapshot(&world.node(), Some("doomed"), &content).await.unwrap();
            world.node().delete(next.id).await.unwrap();
        }
        world.sweep().await;
        assert_eq!(world.beside(&content).await.is_some(), there.is_some());
        store.died()
    })
    .await;
}

#[tokio::test]
async fn a_crash_while_a_build_is_announced_or_claimed_leaves_a_name_that_can_be_had() {
    at_every_step(async |after, death| {
        let world = World::new().await;
        let (dying, store) = world.dying(after, death);
        let claimed = async {
            let (record, build) = dying.announce("image", RESOURCES).await?;
            dying.claim(record.id, build).await
        };
        let claimed = claimed.await;
        world.sweep().await;
        let (record, build) = world.node().announce("image", RESOURCES).await.unwrap();
        if let Ok(claimed) = claimed {
            assert_eq!(claimed.id, record.id);
        }
        world.node().claim(record.id, build).await.unwrap();
        store.died()
    })
    .await;
}

#[tokio::test]
async fn a_crash_while_garbage_is_removed_hurts_nobody() {
    at_every_step(async |after, death| {
        let world = World::new().await;
        let (kept, gone) = (publication(&["base", "kept"]), publication(&["base", "gone", "new"]));
        snapshot(&world.node(), Some("kept"), &kept).await.unwrap();
        let doomed = snapshot(&world.node(), Some("gone"), &gone).await.unwrap();
        let (dying, _) = world.dying(1, Death::After);
        _ = dying.delete(doomed.id).await;
        let (dying, store) = world.dying(after, death);
        _ = dying.sweep().await;
        world.beside(&kept).await.unwrap();
        world.sweep().await;
        world.beside(&kept).await.unwrap();
        store.died()
    })
    .await;
}

#[tokio::test]
async fn a_layer_that_a_publication_reuses_is_not_swept_before_its_record_is_there() {
    let world = World::new().await;
    let content = publication(&["shared"]);
    let old = snapshot(&world.node(), None, &content).await.unwrap();
    world.node().delete(old.id).await.unwrap();
    // The record of the new one stops just before it is written, when the layer was found to be there.
    let (waits, go) = (Arc::new(AtomicBool::new(false)), Arc::new(tokio::sync::Semaphore::new(0)));
    let hold = Arc::new(Holding { inner: Arc::clone(&world.store), waits: Arc::clone(&waits), go: Arc::clone(&go) });
    let publisher = node(&(hold as Arc<dyn ObjectStore>), &world.clock);
    let publishing = tokio::spawn({
        let content = content.clone();
        async move { publisher.publish_snapshot(TemplateId::new(), None, SandboxId::new(), content).await }
    });
    while !waits.load(Ordering::SeqCst) {
        tokio::task::yield_now().await;
    }
    let swept = world.node().sweep().await.unwrap();
    assert_eq!(swept.layers, 0, "it is leased");
    go.add_permits(1);
    let record = publishing.await.unwrap().unwrap();
    is_whole(&world.node(), &record, &content).await.unwrap();
}

#[tokio::test]
async fn a_publication_that_took_longer_than_its_lease_does_not_come_to_be() {
    let world = World::new().await;
    let content = publication(&["slow"]);
    let clock = world.clock.clone();
    // Time passes while a layer is written.
    let slow = FaultyStore::new(Arc::clone(&world.store), move |ask, key| {
        if ask == Ask::Put && key.starts_with("managed-layers/") {
            clock.pass_all();
        }
        false
    });
    let slow = node(&(Arc::new(slow) as Arc<dyn ObjectStore>), &world.clock);
    let error = snapshot(&slow, Some("slow"), &content).await.unwrap_err();
    assert!(matches!(error, RepositoryError::Late { .. }), "{error:?}");
    assert_eq!(world.beside(&content).await, None);
    world.sweep().await;
}

#[tokio::test]
async fn a_publication_waits_for_a_sweep_and_not_for_one_that_died() {
    let world = World::new().await;
    let content = publication(&["new"]);
    // A sweep that dies in its turn.
    let (dying, _) = world.dying(3, Death::After);
    _ = dying.sweep().await.unwrap_err();
    assert!(matches!(world.node().sweep().await, Err(RepositoryError::Busy)), "one at a time");
    let error = snapshot(&world.node(), None, &content).await.unwrap_err();
    assert!(matches!(error, RepositoryError::Busy), "{error:?}");
    world.clock.pass_all();
    snapshot(&world.node(), None, &content).await.unwrap();
    world.sweep().await;
}

#[tokio::test]
async fn a_store_that_fails_in_passing_is_told_and_what_was_begun_is_undone() {
    for failing in ["leases/", "managed-layers/", "artifacts/", "catalog/aliases/", "catalog/records/"] {
        let world = World::new().await;
        let content = publication(&["new"]);
        let broken =
            FaultyStore::new(Arc::clone(&world.store), move |ask, key| ask == Ask::Put && key.starts_with(failing));
        let broken = node(&(Arc::new(broken) as Arc<dyn ObjectStore>), &world.clock);
        let error = snapshot(&broken, Some("fresh"), &content).await.unwrap_err();
        assert_eq!(error.kind(), RepositoryErrorKind::Unavailable, "{failing}: {error:?}");
        assert_eq!(world.beside(&content).await, None);
        world.sweep().await;
    }
}

#[tokio::test]
async fn of_a_build_that_two_nodes_finish_the_newest_counts() {
    let world = World::new().await;
    let node = world.node();
    let (template, first) = node.announce("image", RESOURCES).await.unwrap();
    node.claim(template.id, first).await.unwrap();
    let (_, second) = node.announce("image", RESOURCES).await.unwrap();
    // The older one ends while the newer waits: sandboxes start from it, and the newer goes on waiting.
    let content = publication(&["first"]);
    node.publish_build(template.id, first, content.clone()).await.unwrap();
    let record = world.beside(&content).await.unwrap();
    let Source::Template { build } = record.source else { panic!("a template") };
    assert_eq!((build.id, build.status), (second, BuildStatus::Waiting));
    assert!(matches!(node.claim(template.id, first).await, Err(RepositoryError::NotFound(_))));
    tokio::time::timeout(Duration::from_secs(5), node.claim(template.id, second)).await.unwrap().unwrap();
}

/// Stops before it writes a record, until it may go.
#[derive(Debug)]
struct Holding {
    inner: Arc<dyn ObjectStore>,
    waits: Arc<AtomicBool>,
    go: Arc<tokio::sync::Semaphore>,
}

mod holding {
    use std::ops::Range;
    use std::path::Path;
    use std::sync::atomic::Ordering;

    use aenv_objects::{Condition, Key, ObjectError, ObjectInfo, ObjectStore, Version};
    use async_trait::async_trait;
    use bytes::Bytes;

    #[async_trait]
    impl ObjectStore for super::Holding {
        fn name(&self) -> &str {
            self.inner.name()
        }

        async fn head(&self, key: &Key) -> Result<ObjectInfo, ObjectError> {
            self.inner.head(key).await
        }

        async fn get(&self, key: &Key, range: Range<u64>) -> Result<Bytes, ObjectError> {
            self.inner.get(key, range).await
        }

        async fn read(&self, key: &Key, limit: u64) -> Result<(Bytes, Version), ObjectError> {
            self.inner.read(key, limit).await
        }

        async fn put(&self, key: &Key, bytes: Bytes, condition: Condition) -> Result<Version, ObjectError> {
            if key.as_str().starts_with("catalog/records/") {
                self.waits.store(true, Ordering::SeqCst);
                self.go.acquire().await.unwrap().forget();
            }
            self.inner.put(key, bytes, condition).await
        }

        async fn put_file(&self, key: &Key, file: &Path) -> Result<(), ObjectError> {
            self.inner.put_file(key, file).await
        }

        async fn delete(&self, key: &Key) -> Result<(), ObjectError> {
            self.inner.delete(key).await
        }

        async fn list(&self, folder: Option<&Key>) -> Result<Vec<ObjectInfo>, ObjectError> {
            self.inner.list(folder).await
        }
    }
}
