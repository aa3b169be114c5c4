//! Two nodes that share a folder: what one does, the other sees.

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aenv_durable::Store;
use aenv_image::ImageConfig;
use aenv_model::{Bytes, SandboxId};
use aenv_objects::test_support::FaultyStore;
use aenv_objects::{LocalStore, ObjectStore};
use aenv_repository::{ArtifactCache, Clock, Options, Repository, RepositoryErrorKind};
use aenv_snapshot::CaptureStore;
use aenv_snapshot::test_support::FakeBacking;
use aenv_template::{
    AddSnapshotError, Base, BuildRequest, BuildStage, BuildState, CreateTemplateError, DeleteTemplateError,
    ImportImage, LogLevel, NameProblem, NewSnapshot, Parts, PublicationState, PublishError, ResolveError, Shared,
    StartBuildError, Step, TemplateConfig, Templates,
};
use support::{FakeImporter, FakeWorkshop, PATIENCE, SHAPE, request, text_of};

struct Node {
    dir: PathBuf,
    templates: Templates,
    captures: CaptureStore,
    workshop: FakeWorkshop,
    /// Its store fails.
    cut: Arc<AtomicBool>,
}

impl Node {
    async fn new(dir: &Path, name: &str) -> Self {
        let dir = dir.join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let captures = CaptureStore::open(&dir.join("captures"), Arc::new(FakeBacking::new(&dir))).unwrap();
        let workshop = FakeWorkshop::new(captures.clone(), &dir);
        let cut = Arc::new(AtomicBool::new(false));
        let folder = Arc::new(LocalStore::open(dir.parent().unwrap().join("shared")).unwrap());
        let is_cut = Arc::clone(&cut);
        let store: Arc<dyn ObjectStore> = Arc::new(FaultyStore::new(folder, move |_, _| is_cut.load(Ordering::SeqCst)));
        let shared = Shared {
            repository: Repository::new(store, Options::default(), Clock::system()),
            cache: ArtifactCache::open(&dir.join("cache"), Bytes::mib(1)).unwrap(),
        };
        let parts = Parts {
            config: TemplateConfig::default(),
            dir: dir.join("templates"),
            importer: Arc::new(FakeImporter::default()) as Arc<dyn ImportImage>,
            captures: captures.clone(),
            uploads_dir: dir.join("uploads"),
            workshop: Some(Arc::new(workshop.clone())),
            shared: Some(shared),
        };
        let store = Store::open(&dir.join("node.redb")).unwrap();
        Self { templates: Templates::start(parts, &store).await.unwrap(), captures, dir, workshop, cut }
    }

    async fn start_build(&self, name: &str, image: &str) -> String {
        self.start_build_of(name, request(image)).await
    }

    async fn start_build_of(&self, name: &str, request: BuildRequest) -> String {
        let (record, build) = self.templates.create(name, &[], SHAPE).await.unwrap();
        let build = build.to_string();
        self.templates.start_build(&record.id.to_string(), &build, request).await.unwrap();
        build
    }

    async fn state(&self, name: &str, build: &str) -> BuildState {
        self.templates.build(name, build, 0, 100, LogLevel::Debug).await.unwrap().unwrap().build.state
    }

    async fn ended(&self, name: &str, build: &str) -> BuildState {
        let ended = async {
            loop {
                match self.state(name, build).await {
                    BuildState::Waiting | BuildState::Building => tokio::time::sleep(Duration::from_millis(2)).await,
                    state => return state,
                }
            }
        };
        tokio::time::timeout(PATIENCE, ended).await.expect("the build does not end")
    }

    async fn build(&self, name: &str, image: &str) {
        self.build_of(name, request(image)).await;
    }

    async fn build_of(&self, name: &str, request: BuildRequest) {
        let build = self.start_build_of(name, request).await;
        let state = self.ended(name, &build).await;
        assert!(matches!(state, BuildState::Ready { .. }), "{state:?}");
    }

    async fn snapshot(
        &self,
        name: Option<&str>,
        text: &str,
    ) -> Result<aenv_template::SnapshotRecord, AddSnapshotError> {
        let capture = self.workshop.capture(text).await;
        self.templates.add_snapshot(new_snapshot(name), capture).await
    }

    /// What sandboxes from `reference` would have on their disk.
    async fn content(&self, reference: &str) -> Result<String, ResolveError> {
        let ready = self.templates.resolve(reference).await?;
        Ok(text_of(&ready.capture.expect("a capture")))
    }

    fn captures(&self) -> usize {
        std::fs::read_dir(self.dir.join("captures")).unwrap().count()
    }
}

fn new_snapshot(name: Option<&str>) -> NewSnapshot {
    NewSnapshot { sandbox: SandboxId::new(), name: name.map(str::to_owned), config: ImageConfig::default() }
}

async fn two(dir: &Path) -> [Node; 2] {
    [Node::new(dir, "a").await, Node::new(dir, "b").await]
}

fn is_gone(found: Result<String, ResolveError>) -> bool {
    matches!(found, Err(ResolveError::NotFound(_)))
}

#[tokio::test]
async fn a_template_of_one_node_is_the_others_too() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = two(dir.path()).await;
    let build = a.start_build("base", "one").await;
    a.ended("base", &build).await;
    let id = a.templates.find("base").await.unwrap().unwrap().id;
    for node in [&a, &b] {
        for reference in ["base".to_owned(), id.to_string()] {
            assert_eq!(node.content(&reference).await.unwrap(), "one");
        }
        let listed = node.templates.list().await.unwrap();
        assert_eq!(listed.iter().map(|record| (record.id, &*record.name)).collect::<Vec<_>>(), [(id, "base")]);
        assert!(matches!(node.state("base", &build).await, BuildState::Ready { .. }));
        assert!(node.templates.snapshots().await.unwrap().is_empty());
    }
    // A newer build of the other takes its place on both, under the same id.
    b.build("base", "two").await;
    for node in [&a, &b] {
        assert_eq!(node.content("base").await.unwrap(), "two");
        let record = node.templates.find("base").await.unwrap().unwrap();
        assert_eq!((record.id, record.builds.len()), (id, 1), "{record:?}");
    }
    b.templates.delete("base").await.unwrap();
    for node in [&a, &b] {
        assert!(is_gone(node.content("base").await));
        assert!(is_gone(node.content(&id.to_string()).await));
        assert!(node.templates.list().await.unwrap().is_empty());
        node.captures.settle().await;
        assert_eq!(node.captures(), 0, "nothing is kept of it");
    }
}

#[tokio::test]
async fn a_build_that_one_node_announces_the_other_may_do() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = two(dir.path()).await;
    let (record, build) = a.templates.create("base", &[], SHAPE).await.unwrap();
    let (template, build) = (record.id.to_string(), build.to_string());
    assert_eq!(b.state("base", &build).await, BuildState::Waiting);
    // One of many who are asked to start it does.
    let start = |node: &Node| {
        let (templates, template, build) = (node.templates.clone(), template.clone(), build.clone());
        async move { templates.start_build(&template, &build, request("one")).await }
    };
    let started = tokio::join!(start(&a), start(&b), start(&a), start(&b));
    let started = [started.0, started.1, started.2, started.3];
    assert_eq!(started.iter().filter(|started| started.is_ok()).count(), 1, "{started:?}");
    for refused in started.iter().filter_map(|started| started.as_ref().err()) {
        assert!(matches!(refused, StartBuildError::AlreadyStarted(_)), "{refused:?}");
    }
    for node in [&a, &b] {
        assert!(matches!(node.ended("base", &build).await, BuildState::Ready { .. }));
        assert_eq!(node.content("base").await.unwrap(), "one");
    }
    // One that fails says so everywhere.
    let failed = b.start_build("base", "bad").await;
    for node in [&b, &a] {
        let state = node.ended("base", &failed).await;
        assert!(matches!(&state, BuildState::Error { step: BuildStage::Base, .. }), "{state:?}");
        assert_eq!(node.content("base").await.unwrap(), "one", "what there was stays");
    }
}

#[tokio::test]
async fn what_was_built_in_steps_can_be_built_on_by_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = two(dir.path()).await;
    let step = |kind: &str, args: &[&str]| {
        let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
        Step::new(kind, &args, None, false).unwrap()
    };
    let steps = vec![step("ENV", &["A", "1"]), step("USER", &["worker"]), step("RUN", &["a"])];
    a.build_of(
        "base",
        BuildRequest { steps, start: Some("serve".to_owned()), ready: Some("check".to_owned()), ..request("one") },
    )
    .await;
    // What runs from the start writes to these disks, too.
    assert_eq!(b.content("base:default").await.unwrap(), "one + a + serve + check");
    let base = Base::Template("base".to_owned());
    b.build_of("derived", BuildRequest { base, steps: vec![step("RUN", &["b"])], ..request("unused") }).await;
    assert_eq!(a.content("derived").await.unwrap(), "one + a + serve + check + b + serve + check");
    let ran = b.workshop.ran();
    assert_eq!(ran[0], "worker@~: A=1 b");
    assert!(ran.contains(&"worker@~: A=1 serve".to_owned()), "{ran:?}");
    let tagged = a.templates.create("base", &["v1".to_owned()], SHAPE).await;
    assert!(matches!(tagged, Err(CreateTemplateError::Name(NameProblem::Shared))), "{tagged:?}");
    assert!(is_gone(b.content("base:v1").await));
}

#[tokio::test]
async fn a_snapshot_of_one_node_is_the_others_too() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = two(dir.path()).await;
    let record = a.snapshot(Some("prepared"), "memory").await.unwrap();
    for node in [&a, &b] {
        assert_eq!(node.content("prepared").await.unwrap(), "memory");
        assert_eq!(node.templates.snapshot("prepared").await.unwrap().unwrap().sandbox, record.sandbox);
        assert_eq!(node.templates.snapshots().await.unwrap().len(), 1);
        assert!(node.templates.list().await.unwrap().is_empty());
        let taken = node.snapshot(Some("prepared"), "other").await;
        assert!(matches!(taken, Err(AddSnapshotError::Taken(_))), "{taken:?}");
        let taken = node.templates.create("prepared", &[], SHAPE).await;
        assert!(matches!(taken, Err(CreateTemplateError::Taken(_))), "{taken:?}");
    }
    // After a restart, the node that took it still has it, and the other fetches it again.
    drop((a, b));
    let [a, b] = two(dir.path()).await;
    for node in [&a, &b] {
        assert_eq!(node.content(&record.id.to_string()).await.unwrap(), "memory");
    }
    b.templates.delete("prepared").await.unwrap();
    for node in [&a, &b] {
        assert!(is_gone(node.content("prepared").await));
        assert!(matches!(node.templates.delete("prepared").await, Err(DeleteTemplateError::NotFound(_))));
    }
}

#[tokio::test]
async fn what_was_deleted_while_a_node_was_away_goes_when_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = two(dir.path()).await;
    a.build("base", "one").await;
    a.snapshot(Some("prepared"), "memory").await.unwrap();
    a.templates.close(PATIENCE).await.unwrap();
    drop(a);
    for name in ["base", "prepared"] {
        b.templates.delete(name).await.unwrap();
    }
    let a = Node::new(dir.path(), "a").await;
    a.templates.reconcile().await.unwrap();
    a.captures.settle().await;
    assert_eq!(a.captures(), 0);
}

#[tokio::test]
async fn a_repository_out_of_reach_is_told_and_own_ones_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = two(dir.path()).await;
    a.build("base", "one").await;
    let record = a.snapshot(Some("prepared"), "memory").await.unwrap();
    assert_eq!(b.content("base").await.unwrap(), "one");
    let build = b.start_build("cut", "slow").await;
    for node in [&a, &b] {
        node.cut.store(true, Ordering::SeqCst);
    }
    for reference in ["base", "prepared", &record.id.to_string()] {
        assert!(a.content(reference).await.is_ok(), "{reference}");
    }
    assert_eq!(b.content("base").await.unwrap(), "one", "it was brought before");
    let unavailable = |error: &aenv_repository::RepositoryError| error.kind() == RepositoryErrorKind::Unavailable;
    assert!(matches!(b.content("prepared").await, Err(ResolveError::Repository(error)) if unavailable(&error)));
    assert!(unavailable(&a.templates.list().await.unwrap_err()));
    let created = a.templates.create("new", &[], SHAPE).await;
    assert!(matches!(created, Err(CreateTemplateError::Repository(error)) if unavailable(&error)));
    let added = a.snapshot(None, "memory").await;
    assert!(matches!(added, Err(AddSnapshotError::Publish(PublishError::Repository(error))) if unavailable(&error)));
    let deleted = a.templates.delete("base").await;
    assert!(matches!(deleted, Err(DeleteTemplateError::Repository(error)) if unavailable(&error)));
    b.templates.close(PATIENCE).await.unwrap();
    assert!(matches!(b.ended("cut", &build).await, BuildState::Error { .. }));
    a.cut.store(false, Ordering::SeqCst);
    assert_eq!(a.content("base").await.unwrap(), "one");
    assert_eq!(a.templates.list().await.unwrap().len(), 2);
    a.captures.settle().await;
    assert_eq!(a.captures(), 2, "what was not published is not kept");
}

/// What became of a snapshot's publication, once something has.
async fn published(node: &Node, id: &str) -> PublicationState {
    let published = async {
        loop {
            match node.templates.snapshot(id).await.unwrap().unwrap().publication {
                PublicationState::Publishing => tokio::time::sleep(Duration::from_millis(2)).await,
                publication => return publication,
            }
        }
    };
    tokio::time::timeout(PATIENCE, published).await.expect("the publication does not end")
}

#[tokio::test]
async fn a_snapshot_is_of_use_on_its_node_while_it_is_published() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = two(dir.path()).await;
    let capture = a.workshop.capture("memory").await;
    let record = a.templates.add_snapshot_soon(new_snapshot(Some("soon")), capture).await.unwrap();
    assert_eq!(record.publication, PublicationState::Publishing);
    assert_eq!(a.content("soon").await.unwrap(), "memory");
    let id = record.id.to_string();
    assert_eq!(published(&a, &id).await, PublicationState::Ready);
    assert_eq!(b.content("soon").await.unwrap(), "memory");
    for node in [&a, &b] {
        let listed = node.templates.snapshots().await.unwrap();
        let told: Vec<_> = listed.iter().map(|seen| (seen.id, seen.captured_at(), seen.memory)).collect();
        assert_eq!(told, [(record.id, record.captured_at(), false)]);
    }
    // Its name is taken from the first moment on.
    let taken = a.templates.add_snapshot_soon(new_snapshot(Some("soon")), a.workshop.capture("other").await).await;
    assert!(matches!(taken, Err(AddSnapshotError::Taken(_))), "{taken:?}");
    b.templates.delete(&id).await.unwrap();
    assert!(is_gone(a.content("soon").await));
    // One that is deleted on its way arrives nowhere.
    let record = a.templates.add_snapshot_soon(new_snapshot(None), a.workshop.capture("short").await).await.unwrap();
    let id = record.id.to_string();
    a.templates.delete(&id).await.unwrap();
    a.templates.close(PATIENCE).await.unwrap();
    for node in [&a, &b] {
        assert!(is_gone(node.content(&id).await));
        assert!(node.templates.snapshots().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_snapshot_that_cannot_be_published_stays_with_a_reason_and_the_next_server_publishes_what_was_cut_short() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = two(dir.path()).await;
    a.cut.store(true, Ordering::SeqCst);
    let failed = a.templates.add_snapshot_soon(new_snapshot(None), a.workshop.capture("memory").await).await.unwrap();
    let id = failed.id.to_string();
    assert!(
        matches!(published(&a, &id).await, PublicationState::Failed { reason } if reason.contains("stays on this node"))
    );
    assert_eq!(a.content(&id).await.unwrap(), "memory");
    a.cut.store(false, Ordering::SeqCst);
    assert_eq!(a.content(&id).await.unwrap(), "memory");
    assert!(is_gone(b.content(&id).await));
    a.templates.delete(&id).await.unwrap();
    assert!(is_gone(a.content(&id).await));

    // Its server ends before anything is published.
    let cut_short = a.templates.add_snapshot_soon(new_snapshot(Some("late")), a.workshop.capture("late").await);
    let record = cut_short.await.unwrap();
    a.templates.close(PATIENCE).await.unwrap();
    drop(a);
    let a = Node::new(dir.path(), "a").await;
    assert_eq!(published(&a, &record.id.to_string()).await, PublicationState::Ready);
    assert_eq!(b.content("late").await.unwrap(), "late");
}
