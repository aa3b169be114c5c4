//! Builds over a fake importer: outcomes, logs, rebuilds, deletes, restarts.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aenv_durable::Store;
use aenv_image::{Credentials, ImageConfig, ImageReference, ImportError, Progress};
use aenv_model::{BuildId, Bytes, MachineShape};
use aenv_template::{
    BuildRequest, BuildState, ImportImage, ImportedImage, LogLevel, Parts, ResolveError, StartBuildError,
    TemplateConfig, Templates,
};
use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

/// Far beyond what any of these tests takes: reached only by a hang.
const PATIENCE: Duration = Duration::from_secs(30);

const SHAPE: MachineShape = MachineShape { vcpus: 1, memory: Bytes::mib(256) };

/// Writes a file per import; fails for images called `bad`, and waits for its cancellation for those called `slow`.
#[derive(Debug, Default)]
struct FakeImporter {
    cancelled: AtomicBool,
}

#[async_trait]
impl ImportImage for FakeImporter {
    async fn import(
        &self,
        reference: &ImageReference,
        _credentials: Option<Credentials>,
        target: &Path,
        progress: &(dyn Fn(Progress) + Send + Sync),
        cancel: CancellationToken,
    ) -> Result<ImportedImage, ImportError> {
        progress(Progress::Resolving);
        let name = reference.to_string();
        if name.contains("slow") {
            cancel.cancelled().await;
            self.cancelled.store(true, Ordering::SeqCst);
            return Err(ImportError::Cancelled);
        }
        if name.contains("bad") {
            return Err(ImportError::NotRoot);
        }
        std::fs::write(target, &name).unwrap();
        Ok(ImportedImage { digest: "sha256:00".into(), config: ImageConfig::default(), size: Bytes::gib(1) })
    }
}

struct Bench {
    dir: tempfile::TempDir,
    importer: Arc<FakeImporter>,
    templates: Templates,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let importer = Arc::new(FakeImporter::default());
        let templates = open(dir.path(), &importer);
        Self { dir, importer, templates }
    }

    async fn build(&self, name: &str, image: &str) -> BuildId {
        let (record, build) = self.templates.create(name, SHAPE).await.unwrap();
        self.templates.start_build(&record.id.to_string(), &build.to_string(), request(image)).await.unwrap();
        build
    }

    async fn ended(&self, name: &str, build: BuildId) -> BuildState {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let view = self.templates.build(name, &build.to_string(), 0, 100, LogLevel::Debug).unwrap();
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

fn open(dir: &Path, importer: &Arc<FakeImporter>) -> Templates {
    let store = Store::open(&dir.join("node.redb")).unwrap();
    let parts = Parts {
        config: TemplateConfig::default(),
        dir: dir.join("templates"),
        importer: Arc::clone(importer) as Arc<dyn ImportImage>,
    };
    Templates::start(parts, &store).unwrap()
}

fn request(image: &str) -> BuildRequest {
    BuildRequest { image: image.to_owned(), reference: image.parse().unwrap(), credentials: None }
}

#[tokio::test]
async fn a_built_template_resolves_by_name_and_id() {
    let bench = Bench::new();
    let build = bench.build("base", "debian:12").await;
    assert!(matches!(bench.ended("base", build).await, BuildState::Ready { .. }));
    let ready = bench.templates.resolve("base").unwrap();
    assert_eq!(ready.rootfs, bench.templates.resolve(&ready.id.to_string()).unwrap().rootfs);
    assert!(ready.rootfs.is_file());
    assert_eq!(bench.templates.resolve("other").unwrap_err(), ResolveError::NotFound("other".into()));
}

#[tokio::test]
async fn a_first_builds_id_is_its_templates() {
    let bench = Bench::new();
    let (record, build) = bench.templates.create("base", SHAPE).await.unwrap();
    assert_eq!(build.uuid(), record.id.uuid());
    let (again, second) = bench.templates.create("base", SHAPE).await.unwrap();
    assert_eq!(again.id, record.id);
    assert_ne!(second, build);
}

#[tokio::test]
async fn a_failed_build_says_why_and_leaves_no_file() {
    let bench = Bench::new();
    let build = bench.build("base", "bad").await;
    assert!(matches!(bench.ended("base", build).await, BuildState::Error { .. }));
    assert_eq!(bench.templates.resolve("base").unwrap_err(), ResolveError::NotReady("base".into()));
    let view = bench.templates.build("base", &build.to_string(), 0, 100, LogLevel::Error).unwrap();
    assert!(view.build.logs[0].message.starts_with("Build failed"), "{:?}", view.build.logs);
    assert_eq!(bench.files(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn a_rebuild_replaces_the_old_files_only_when_it_succeeds() {
    let bench = Bench::new();
    let first = bench.build("base", "one").await;
    bench.ended("base", first).await;
    let before = bench.templates.resolve("base").unwrap();
    let failed = bench.build("base", "bad").await;
    bench.ended("base", failed).await;
    assert_eq!(bench.templates.resolve("base").unwrap().rootfs, before.rootfs);
    let second = bench.build("base", "two").await;
    bench.ended("base", second).await;
    let after = bench.templates.resolve("base").unwrap();
    assert_eq!(after.id, before.id);
    // Whoever is making a sandbox from the old files still finds them.
    assert!(before.rootfs.is_file());
    drop(before);
    assert_eq!(bench.files(), [after.rootfs]);
}

#[tokio::test]
async fn a_build_is_started_once() {
    let bench = Bench::new();
    let build = bench.build("base", "one").await;
    let again = bench.templates.start_build("base", &build.to_string(), request("one")).await;
    assert!(matches!(again, Err(StartBuildError::AlreadyStarted(_))), "{again:?}");
    let nobody = BuildId::new().to_string();
    let unknown = bench.templates.start_build("base", &nobody, request("one")).await;
    assert!(matches!(unknown, Err(StartBuildError::NotFound { .. })));
}

#[tokio::test]
async fn deleting_a_template_cancels_its_build_and_leaves_nothing() {
    let bench = Bench::new();
    bench.build("base", "slow").await;
    tokio::time::timeout(PATIENCE, bench.templates.delete("base")).await.unwrap().unwrap();
    assert!(bench.importer.cancelled.load(Ordering::SeqCst));
    assert!(bench.templates.find("base").is_none());
    assert_eq!(bench.files(), Vec::<PathBuf>::new());
    assert!(bench.templates.delete("base").await.is_err());
}

#[tokio::test]
async fn log_entries_are_given_from_an_offset() {
    let bench = Bench::new();
    let build = bench.build("base", "one").await;
    bench.ended("base", build).await;
    let logs = |offset| {
        let view = bench.templates.build("base", &build.to_string(), offset, 100, LogLevel::Debug).unwrap();
        view.build.logs
    };
    let all = logs(0);
    assert!(all.len() >= 2);
    assert_eq!(logs(1), all[1..]);
    assert!(logs(all.len()).is_empty(), "clients stop asking at an empty list");
}

#[tokio::test]
async fn a_restart_keeps_what_is_ready_fails_what_was_at_work_and_sweeps_the_rest() {
    let bench = Bench::new();
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

    let templates = open(dir.path(), &importer);
    assert!(templates.resolve("ready").unwrap().rootfs.is_file());
    let view = templates.build("cut", &cut.to_string(), 0, 100, LogLevel::Debug).unwrap();
    assert!(
        matches!(&view.build.state, BuildState::Error { message, .. } if message.contains("restarted")),
        "{:?}",
        view.build.state
    );
    assert!(!garbage.exists());
}

#[tokio::test]
async fn a_change_whose_client_hangs_up_is_whole() {
    let bench = Bench::new();
    for _ in 0..50 {
        let hung_up = tokio::time::timeout(Duration::from_micros(200), bench.templates.create("base", SHAPE)).await;
        drop(hung_up);
    }
    let (record, _) = bench.templates.create("base", SHAPE).await.unwrap();
    bench.templates.close(PATIENCE).await.unwrap();
    let Bench { dir, importer, templates } = bench;
    drop(templates);
    let again = open(dir.path(), &importer);
    assert_eq!(again.list().len(), 1, "one name, one template");
    assert_eq!(again.find("base").unwrap().id, record.id);
}

#[tokio::test]
async fn names_that_no_template_can_have_are_refused() {
    let bench = Bench::new();
    for name in ["", "a b", "a/b", &"x".repeat(129)] {
        assert!(bench.templates.create(name, SHAPE).await.is_err(), "{name:?}");
    }
}
