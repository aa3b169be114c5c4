//! Builds over a fake importer: outcomes, logs, rebuilds, deletes, restarts.

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aenv_durable::Store;
use aenv_model::BuildId;
use aenv_snapshot::CaptureStore;
use aenv_snapshot::test_support::FakeBacking;
use aenv_template::{
    BuildState, ImportImage, LogLevel, Parts, ReadyTemplate, ResolveError, StartBuildError, TemplateConfig, Templates,
};
use support::{FakeImporter, PATIENCE, SHAPE, image, request};

struct Bench {
    dir: tempfile::TempDir,
    importer: Arc<FakeImporter>,
    templates: Templates,
}

impl Bench {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let importer = Arc::new(FakeImporter::default());
        let templates = open(dir.path(), &importer).await;
        Self { dir, importer, templates }
    }

    async fn build(&self, name: &str, image: &str) -> BuildId {
        let (record, build) = self.templates.create(name, &[], SHAPE).await.unwrap();
        self.templates.start_build(&record.id.to_string(), &build.to_string(), request(image)).await.unwrap();
        build
    }

    async fn ended(&self, name: &str, build: BuildId) -> BuildState {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let view = self.templates.build(name, &build.to_string(), 0, 100, LogLevel::Debug).await.unwrap().unwrap();
            if !matches!(view.build.state, BuildState::Waiting | BuildState::Building) {
                return view.build.state;
            }
            assert!(tokio::time::Instant::now() < deadline, "the build does not end");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        let list = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let templates: Vec<_> = list(&self.dir.path().join("templates")).collect();
        templates
            .iter()
            .flat_map(|template| list(template))
            .flat_map(|build| list(&build).collect::<Vec<_>>())
            .collect()
    }
}

async fn open(dir: &Path, importer: &Arc<FakeImporter>) -> Templates {
    let store = Store::open(&dir.join("node.redb")).unwrap();
    let parts = Parts {
        config: TemplateConfig::default(),
        dir: dir.join("templates"),
        importer: Arc::clone(importer) as Arc<dyn ImportImage>,
        captures: CaptureStore::open(&dir.join("captures"), Arc::new(FakeBacking::new(dir))).unwrap(),
        uploads_dir: dir.join("uploads"),
        workshop: None,
        shared: None,
    };
    Templates::start(parts, &store).await.unwrap()
}

fn rootfs(ready: &ReadyTemplate) -> PathBuf {
    ready.image.as_ref().expect("an image to boot").rootfs.clone()
}

#[tokio::test]
async fn a_built_template_resolves_by_name_and_id() {
    let bench = Bench::new().await;
    let build = bench.build("base", "debian:12").await;
    assert!(matches!(bench.ended("base", build).await, BuildState::Ready { .. }));
    let ready = bench.templates.resolve("base").await.unwrap();
    assert_eq!(rootfs(&ready), rootfs(&bench.templates.resolve(&ready.id.to_string()).await.unwrap()));
    assert!(rootfs(&ready).is_file());
    assert!(matches!(bench.templates.resolve("other").await, Err(ResolveError::NotFound(name)) if name == "other"));
}

#[tokio::test]
async fn a_first_builds_id_is_its_templates() {
    let bench = Bench::new().await;
    let (record, build) = bench.templates.create("base", &[], SHAPE).await.unwrap();
    assert_eq!(build.uuid(), record.id.uuid());
    let (again, second) = bench.templates.create("base", &[], SHAPE).await.unwrap();
    assert_eq!(again.id, record.id);
    assert_ne!(second, build);
}

#[tokio::test]
async fn a_failed_build_says_why_and_leaves_no_file() {
    let bench = Bench::new().await;
    let build = bench.build("base", "bad").await;
    assert!(matches!(bench.ended("base", build).await, BuildState::Error { .. }));
    assert!(matches!(bench.templates.resolve("base").await, Err(ResolveError::NotReady(name)) if name == "base"));
    let view = bench.templates.build("base", &build.to_string(), 0, 100, LogLevel::Error).await.unwrap().unwrap();
    assert!(view.build.logs[0].message.starts_with("Build failed"), "{:?}", view.build.logs);
    assert_eq!(bench.files(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn a_rebuild_replaces_the_old_files_only_when_it_succeeds() {
    let bench = Bench::new().await;
    let first = bench.build("base", "one").await;
    bench.ended("base", first).await;
    let before = bench.templates.resolve("base").await.unwrap();
    let failed = bench.build("base", "bad").await;
    bench.ended("base", failed).await;
    assert_eq!(rootfs(&bench.templates.resolve("base").await.unwrap()), rootfs(&before));
    let second = bench.build("base", "two").await;
    bench.ended("base", second).await;
    let after = bench.templates.resolve("base").await.unwrap();
    assert_eq!(after.id, before.id);
    // Whoever is making a sandbox from the old files still finds them.
    assert!(rootfs(&before).is_file());
    drop(before);
    assert_eq!(bench.files(), [rootfs(&after)]);
    assert_eq!(bench.importer.kept.lock().unwrap().len(), 1, "layers of a build that was replaced are kept");
}

#[tokio::test]
async fn an_image_without_a_template_goes_with_its_lease() {
    let bench = Bench::new().await;
    let imported = bench.templates.import(&image("one")).await.unwrap();
    assert!(imported.rootfs.is_file());
    assert_eq!(bench.importer.kept.lock().unwrap().len(), 1);
    drop(imported);
    assert!(bench.templates.import(&image("bad")).await.is_err());
    assert_eq!(bench.files(), Vec::<PathBuf>::new());
    assert!(bench.importer.kept.lock().unwrap().is_empty());
    assert_eq!(std::fs::read_dir(bench.dir.path().join("templates")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_build_is_started_once() {
    let bench = Bench::new().await;
    let build = bench.build("base", "one").await;
    let again = bench.templates.start_build("base", &build.to_string(), request("one")).await;
    assert!(matches!(again, Err(StartBuildError::AlreadyStarted(_))), "{again:?}");
    let nobody = BuildId::new().to_string();
    let unknown = bench.templates.start_build("base", &nobody, request("one")).await;
    assert!(matches!(unknown, Err(StartBuildError::NotFound { .. })));
}

#[tokio::test]
async fn deleting_a_template_cancels_its_build_and_leaves_nothing() {
    let bench = Bench::new().await;
    bench.build("base", "slow").await;
    tokio::time::timeout(PATIENCE, bench.templates.delete("base")).await.unwrap().unwrap();
    assert!(bench.importer.cancelled.load(Ordering::SeqCst));
    assert!(bench.templates.find("base").await.unwrap().is_none());
    assert_eq!(bench.files(), Vec::<PathBuf>::new());
    assert!(bench.templates.delete("base").await.is_err());
}

#[tokio::test]
async fn log_entries_are_given_from_an_offset() {
    let bench = Bench::new().await;
    let build = bench.build("base", "one").await;
    bench.ended("base", build).await;
    let logs = async |offset| {
        let view =
            bench.templates.build("base", &build.to_string(), offset, 100, LogLevel::Debug).await.unwrap().unwrap();
        view.build.logs
    };
    let all = logs(0).await;
    assert!(all.len() >= 2);
    assert_eq!(logs(1).await, all[1..]);
    assert!(logs(all.len()).await.is_empty(), "clients stop asking at an empty list");
}

#[tokio::test]
async fn a_restart_keeps_what_is_ready_fails_what_was_at_work_and_sweeps_the_rest() {
    let bench = Bench::new().await;
    let ready = bench.build("ready", "one").await;
    bench.ended("ready", ready).await;
    let cut = bench.build("cut", "slow").await;
    let Bench { dir, importer, templates } = bench;
    let garbage = dir.path().join("templates").join(BuildId::new().to_string());
    std::fs::create_dir_all(garbage.join("half")).unwrap();
    // As after kill -9: the store as it is now, without the end of the build.
    std::fs::copy(dir.path().join("node.redb"), dir.path().join("killed.redb")).unwrap();
    templates.close(PATIENCE).await.unwrap();
    drop(templates);
    std::fs::rename(dir.path().join("killed.redb"), dir.path().join("node.redb")).unwrap();

    let templates = open(dir.path(), &importer).await;
    assert!(rootfs(&templates.resolve("ready").await.unwrap()).is_file());
    let view = templates.build("cut", &cut.to_string(), 0, 100, LogLevel::Debug).await.unwrap().unwrap();
    assert!(
        matches!(&view.build.state, BuildState::Error { message, .. } if message.contains("restarted")),
        "{:?}",
        view.build.state
    );
    assert!(!garbage.exists());
}

#[tokio::test]
async fn a_change_whose_client_hangs_up_is_whole() {
    let bench = Bench::new().await;
    for _ in 0..50 {
        let hung_up =
            tokio::time::timeout(Duration::from_micros(200), bench.templates.create("base", &[], SHAPE)).await;
        drop(hung_up);
    }
    let (record, _) = bench.templates.create("base", &[], SHAPE).await.unwrap();
    bench.templates.close(PATIENCE).await.unwrap();
    let Bench { dir, importer, templates } = bench;
    drop(templates);
    let again = open(dir.path(), &importer).await;
    assert_eq!(again.list().await.unwrap().len(), 1, "one name, one template");
    assert_eq!(again.find("base").await.unwrap().unwrap().id, record.id);
}

#[tokio::test]
async fn names_that_no_template_can_have_are_refused() {
    let bench = Bench::new().await;
    for name in ["", "a b", "a/b", &"x".repeat(129)] {
        assert!(bench.templates.create(name, &[], SHAPE).await.is_err(), "{name:?}");
    }
}
