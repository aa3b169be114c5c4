//! Builds with steps, on machines that only note what is done on them.

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aenv_durable::Store;
use aenv_model::BuildId;
use aenv_snapshot::CaptureStore;
use aenv_snapshot::test_support::FakeBacking;
use aenv_template::{
    Base, BuildRecord, BuildRequest, BuildStage, BuildState, ChangeTemplateError, CreateTemplateError, ImportImage,
    LogLevel, Parts, ResolveError, Step, TemplateConfig, Templates,
};
use support::{FakeImporter, FakeWorkshop, PATIENCE, SHAPE, request, text_of};

const FILES: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

struct Bench {
    dir: tempfile::TempDir,
    importer: Arc<FakeImporter>,
    captures: CaptureStore,
    shop: FakeWorkshop,
    templates: Templates,
}

impl Bench {
    async fn new() -> Self {
        Self::on(tempfile::tempdir().unwrap(), Arc::default()).await
    }

    async fn on(dir: tempfile::TempDir, importer: Arc<FakeImporter>) -> Self {
        Self::with(dir, importer, TemplateConfig { max_cached_steps: 4, ..TemplateConfig::default() }).await
    }

    async fn with(dir: tempfile::TempDir, importer: Arc<FakeImporter>, config: TemplateConfig) -> Self {
        let path = dir.path();
        let captures = CaptureStore::open(&path.join("captures"), Arc::new(FakeBacking::new(path))).unwrap();
        let shop = FakeWorkshop::new(captures.clone(), path);
        let store = Store::open(&path.join("node.redb")).unwrap();
        let parts = Parts {
            config,
            dir: path.join("templates"),
            uploads_dir: path.join("uploads"),
            importer: Arc::clone(&importer) as Arc<dyn ImportImage>,
            captures: captures.clone(),
            workshop: Some(Arc::new(shop.clone())),
            shared: None,
        };
        let templates = Templates::start(parts, &store).await.unwrap();
        Self { dir, importer, captures, shop, templates }
    }

    async fn restarted(self) -> Self {
        let Self { dir, importer, captures, shop, templates } = self;
        templates.close(PATIENCE).await.unwrap();
        captures.close(PATIENCE).await.unwrap();
        drop((templates, captures, shop));
        Self::on(dir, importer).await
    }

    async fn start(&self, name: &str, request: BuildRequest) -> BuildId {
        let (record, build) = self.templates.create(name, &[], SHAPE).await.unwrap();
        self.templates.start_build(&record.id.to_string(), &build.to_string(), request).await.unwrap();
        build
    }

    /// Builds to the end.
    async fn build(&self, name: &str, request: BuildRequest) -> BuildRecord {
        let build = self.start(name, request).await;
        self.ended(name, build).await
    }

    async fn ended(&self, name: &str, build: BuildId) -> BuildRecord {
        let name = name.split(':').next().unwrap();
        let ended = async {
            loop {
                let view = self.templates.build(name, &build.to_string(), 0, 100, LogLevel::Debug).await;
                let record = view.unwrap().unwrap().build;
                if !matches!(record.state, BuildState::Waiting | BuildState::Building) {
                    return record;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(PATIENCE, ended).await.expect("the build does not end")
    }

    async fn disk(&self, reference: &str) -> Result<String, ResolveError> {
        Ok(text_of(&self.templates.resolve(reference).await?.capture.unwrap()))
    }

    async fn captures(&self) -> usize {
        self.captures.settle().await;
        std::fs::read_dir(self.dir.path().join("captures")).unwrap().count()
    }
}

fn steps(all: &[(&str, &[&str])]) -> Vec<Step> {
    let step = |(kind, args): &(&str, &[&str])| {
        let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
        Step::new(kind, &args, (*kind == "COPY").then_some(FILES), false).unwrap()
    };
    all.iter().map(step).collect()
}

fn on(image: &str, all: &[(&str, &[&str])]) -> BuildRequest {
    BuildRequest { steps: steps(all), ..request(image) }
}

fn cached(build: &BuildRecord) -> Vec<&str> {
    build.logs.iter().filter_map(|entry| entry.message.strip_prefix("CACHED ")).collect()
}

#[tokio::test]
async fn steps_are_done_in_order_by_their_user_in_their_place() {
    let bench = Bench::new().await;
    let request = on(
        "one",
        &[
            ("ENV", &["A", "1", "B", "$A$A"]),
            ("RUN", &["first"]),
            ("WORKDIR", &["app"]),
            ("USER", &["worker"]),
            ("LABEL", &["x", "y"]),
            ("RUN", &["second"]),
            ("RUN", &["third", "root"]),
        ],
    );
    let build = bench.build("base", request).await;
    let BuildState::Ready { config, recipe, .. } = &build.state else { panic!("{:?}", build.state) };
    assert_eq!((config.user.as_deref(), config.working_dir.as_deref()), (Some("worker"), Some("/app")));
    assert_eq!(config.env, Vec::<String>::new(), "what users run does not see the build's variables");
    assert_eq!(recipe.as_ref().unwrap().env["B"], "11");
    let ran = [
        "script",
        "user@~: A=1 B=11 first",
        "script /app user",
        "script worker",
        "worker@/app: A=1 B=11 second",
        "root@/app: A=1 B=11 third",
    ];
    assert_eq!(bench.shop.ran(), ran);
    assert_eq!(bench.disk("base").await.unwrap(), "one + first + second + third");
    assert_eq!(bench.shop.open.load(Ordering::SeqCst), 0, "no machine is left");
    let told = build.logs.iter().find(|entry| entry.message.contains("out of second")).unwrap();
    assert_eq!((told.stage, &*told.message), (BuildStage::Step(6), "[builder 6/7] [stdout]: out of second"));
    // The capture has all of it: there is nothing to boot, and nothing of the image is kept for the template.
    assert!(bench.templates.resolve("base").await.unwrap().image.is_none());
    assert!(bench.importer.kept.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_build_goes_on_from_the_last_step_that_it_has_in_common_with_others() {
    let bench = Bench::new().await;
    let first: &[(&str, &[&str])] = &[("RUN", &["a"]), ("ENV", &["X", "1"]), ("RUN", &["b"]), ("WORKDIR", &["/w"])];
    let build = bench.build("base", on("one", first)).await;
    assert_eq!(cached(&build), [""; 0]);
    bench.shop.ran();
    let again = bench.build("other", on("one", first)).await;
    assert_eq!(cached(&again).len(), 4);
    assert_eq!(bench.shop.ran(), [""; 0], "nothing is done twice");
    assert_eq!(bench.disk("other").await.unwrap(), "one + a + b");
    assert_eq!(bench.templates.resolve("other").await.unwrap().config.working_dir.as_deref(), Some("/w"));

    // Also after a restart, and with another end.
    let bench = bench.restarted().await;
    let changed = [("RUN", &["a"] as &[&str]), ("ENV", &["X", "1"]), ("RUN", &["b"]), ("RUN", &["c"])];
    let build = bench.build("base", on("one", &changed)).await;
    assert_eq!(cached(&build), ["[builder 1/4] RUN a", "[builder 2/4] ENV X=1", "[builder 3/4] RUN b"]);
    assert_eq!(bench.shop.ran(), ["user@~: X=1 c"]);
    assert_eq!(bench.disk("base").await.unwrap(), "one + a + b + c");

    // Another base, and an order to do it again, have nothing in common with it.
    bench.build("base", on("two", first)).await;
    assert_eq!(bench.disk("base").await.unwrap(), "two + a + b");
    bench.shop.ran();
    bench.build("base", BuildRequest { force: true, ..on("one", first) }).await;
    assert_eq!(bench.shop.ran(), ["script", "user@~: a", "user@~: X=1 b", "script /w user"]);
    let mut partly = on("one", first);
    partly.steps[2] = Step::new("RUN", &["b".to_owned()], None, true).unwrap();
    let build = bench.build("base", partly).await;
    assert_eq!(cached(&build), ["[builder 1/4] RUN a"]);
}

#[tokio::test]
async fn only_so_many_points_are_kept() {
    let bench = Bench::new().await;
    for at in 0..6 {
        bench.build("base", on("one", &[("RUN", &[&format!("step {at}")])])).await;
    }
    assert_eq!(bench.captures().await, 1 + 4, "the template's, and the limit");
    bench.templates.delete("base").await.unwrap();
    assert_eq!(bench.captures().await, 4);
    let bench = bench.restarted().await;
    assert_eq!(cached(&bench.build("base", on("one", &[("RUN", &["step 5"])])).await).len(), 1);
    assert_eq!(cached(&bench.build("base", on("one", &[("RUN", &["step 0"])])).await).len(), 0);
}

#[tokio::test]
async fn a_step_that_fails_is_named_and_leaves_nothing() {
    let bench = Bench::new().await;
    let failed = |build: &BuildRecord| match &build.state {
        BuildState::Error { message, step } => (message.clone(), *step),
        state => panic!("{state:?}"),
    };
    let build = bench.build("base", on("one", &[("RUN", &["fine"]), ("RUN", &["fail here"])])).await;
    assert_eq!(failed(&build), ("failed to run command 'fail here': exit status 7".to_owned(), BuildStage::Step(2)));
    let last = build.logs.last().unwrap();
    assert_eq!((last.level, last.stage), (LogLevel::Error, BuildStage::Step(2)));
    let build = bench.build("base", on("one", &[("RUN", &["whoami", "nobody-here"])])).await;
    let text = "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'nobody-here'";
    assert_eq!(failed(&build), (text.to_owned(), BuildStage::Step(1)));
    let build = bench.build("base", on("one", &[("COPY", &["a", "/b"])])).await;
    assert_eq!(failed(&build).1, BuildStage::Step(1));
    assert!(failed(&build).0.contains("upload"), "{:?}", failed(&build));
    let start = BuildRequest { start: Some("fail to start".to_owned()), ..on("one", &[]) };
    let build = bench.build("base", start).await;
    let text = "the start command 'fail to start' failed: exit status 7";
    assert_eq!(failed(&build), (text.to_owned(), BuildStage::Finalize));
    let missing = BuildRequest { base: Base::Template("nothing".to_owned()), ..on("one", &[]) };
    assert_eq!(failed(&bench.build("base", missing).await).1, BuildStage::Base);
    assert_eq!(bench.shop.open.load(Ordering::SeqCst), 0, "no machine is left");
    assert_eq!(bench.captures().await, 1, "what was done before the failure is a point");
    assert!(matches!(bench.disk("base").await, Err(ResolveError::NotReady(_))));
}

#[tokio::test]
async fn files_are_put_into_the_guest_and_unpacked_there() {
    let bench = Bench::new().await;
    let body = futures::stream::iter([Ok::<_, ()>(bytes::Bytes::from_static(b"tar"))]);
    bench.templates.uploads().receive(FILES, body).await.unwrap();
    let request = on("one", &[("WORKDIR", &["/w"]), ("COPY", &["src/*.txt", "to/", "u:g", "0640"])]);
    let build = bench.build("base", request).await;
    assert!(build.is_ready(), "{:?}", build.state);
    let archive = format!("/tmp/aenv-copy-{FILES}.tar");
    assert_eq!(*bench.shop.put.lock().unwrap(), std::slice::from_ref(&archive));
    assert_eq!(bench.shop.ran()[2], format!("script {archive} src src/*.txt to/ u:g 0640 /w user"));
}

#[tokio::test]
async fn a_template_on_a_template_inherits_what_its_base_has() {
    let bench = Bench::new().await;
    let base = BuildRequest {
        start: Some("serve".to_owned()),
        ready: Some("check".to_owned()),
        ..on("one", &[("ENV", &["A", "1"]), ("USER", &["worker"]), ("RUN", &["a"])])
    };
    assert!(bench.build("base", base).await.is_ready());
    bench.shop.ran();
    let on_base = |all| BuildRequest { base: Base::Template("base".to_owned()), ..on("unused", all) };
    let build = bench.build("derived", on_base(&[("ENV", &["B", "$A-2"]), ("RUN", &["b"])])).await;
    assert!(build.is_ready(), "{:?}", build.state);
    let ran = bench.shop.ran();
    assert_eq!(ran[0], "worker@~: A=1 B=1-2 b");
    assert!(ran[1..].contains(&"worker@~: A=1 B=1-2 serve".to_owned()), "{ran:?}");
    assert!(ran[1..].contains(&"worker@~: A=1 B=1-2 check".to_owned()), "{ran:?}");
    let other = BuildRequest { start: Some("other".to_owned()), ..on_base(&[]) };
    assert!(bench.build("derived", other).await.is_ready());
    let ran = bench.shop.ran();
    assert!(
        ran.contains(&"worker@~: A=1 other".to_owned()) && ran.contains(&"worker@~: A=1 check".to_owned()),
        "{ran:?}"
    );
}

#[tokio::test]
async fn an_image_without_steps_stays_as_it_is() {
    let bench = Bench::new().await;
    let request = BuildRequest { start: Some("serve".to_owned()), ready: Some("check".to_owned()), ..on("one", &[]) };
    assert!(bench.build("base", request).await.is_ready());
    let mut ran = bench.shop.ran();
    ran.sort();
    assert_eq!(ran, ["root@~: check", "root@~: serve"], "nobody was made, and nothing prepared");
    let template = BuildRequest { base: Base::Template("base".to_owned()), ..on("unused", &[("RUN", &["a"])]) };
    assert!(bench.build("derived", template).await.is_ready());
    assert_eq!(bench.shop.ran()[0], "root@~: a");
}

#[tokio::test]
async fn a_build_that_takes_too_long_ends_with_its_machine() {
    let config = TemplateConfig { timeout: Duration::from_millis(300), ..TemplateConfig::default() };
    let bench = Bench::with(tempfile::tempdir().unwrap(), Arc::default(), config).await;
    let build = bench.build("base", on("one", &[("RUN", &["hang"])])).await;
    assert!(
        matches!(&build.state, BuildState::Error { message, .. } if message.contains("longer than 300ms")),
        "{:?}",
        build.state
    );
    assert_eq!(bench.shop.open.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn deleting_a_template_ends_its_build_and_its_machine() {
    let bench = Bench::new().await;
    bench.start("base", on("one", &[("RUN", &["hang"])])).await;
    let begun = async {
        while !bench.shop.ran.lock().unwrap().iter().any(|line| line.contains("hang")) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, begun).await.unwrap();
    tokio::time::timeout(PATIENCE, bench.templates.delete("base")).await.unwrap().unwrap();
    assert_eq!(bench.shop.open.load(Ordering::SeqCst), 0, "no machine is left");
    assert!(bench.importer.kept.lock().unwrap().is_empty());
    assert_eq!(bench.captures().await, 0);
}

#[tokio::test]
async fn a_build_that_its_server_stops_in_is_failed_with_the_reason() {
    let bench = Bench::new().await;
    let build = bench.start("base", on("one", &[("RUN", &["hang"])])).await;
    let open = Arc::clone(&bench.shop.open);
    let bench = bench.restarted().await;
    assert_eq!(open.load(Ordering::SeqCst), 0);
    let state = bench.ended("base", build).await.state;
    assert!(matches!(&state, BuildState::Error { message, .. } if message.contains("server was")), "{state:?}");
}

#[tokio::test]
async fn a_tag_stands_for_a_build_until_another_takes_it() {
    let bench = Bench::new().await;
    let build = async |name: &str, text: &str| bench.build(name, on("one", &[("RUN", &[text])])).await.id;
    let v1 = build("app:v1", "a").await;
    assert!(matches!(bench.disk("app").await, Err(ResolveError::NotFound(_))), "nothing has the default tag");
    let v2 = build("app", "b").await;
    assert_eq!(bench.disk("app:v1").await.unwrap(), "one + a");
    assert_eq!(bench.disk("app").await.unwrap(), "one + b");
    assert_eq!(bench.disk("app:default").await.unwrap(), "one + b");
    assert!(matches!(bench.disk("app:v3").await, Err(ResolveError::NotFound(name)) if name == "app:v3"));
    assert!(bench.templates.find("app:v1").await.unwrap().is_some());
    assert!(bench.templates.find("app:v3").await.unwrap().is_none());

    let stable = ["stable".to_owned()];
    assert_eq!(bench.templates.assign_tags("app:v1", &stable).await.unwrap(), v1);
    assert_eq!(bench.disk("app:stable").await.unwrap(), "one + a");
    assert_eq!(bench.templates.assign_tags("app", &stable).await.unwrap(), v2);
    assert_eq!(bench.disk("app:stable").await.unwrap(), "one + b");
    let captures = bench.captures().await;
    bench.templates.remove_tags("app", &["v1".to_owned()]).await.unwrap();
    assert_eq!(bench.captures().await, captures - 1, "a build without a tag goes");
    let record = bench.templates.find("app").await.unwrap().unwrap();
    assert_eq!(record.tags.keys().collect::<Vec<_>>(), ["default", "stable"]);

    let bench = bench.restarted().await;
    assert_eq!(bench.disk("app:stable").await.unwrap(), "one + b");
    let refused = bench.templates.remove_tags("app", &["default".to_owned()]).await;
    assert!(matches!(refused, Err(ChangeTemplateError::Default)));
    let missing = bench.templates.remove_tags("app", &["v1".to_owned()]).await;
    assert!(matches!(missing, Err(ChangeTemplateError::NotFound(_))));
    let bad = bench.templates.assign_tags("app:", &stable).await;
    assert!(matches!(bad, Err(ChangeTemplateError::Name(_))));
    let bad = bench.templates.create("app:a:b", &[], SHAPE).await;
    assert!(matches!(bad, Err(CreateTemplateError::Name(_))));
    assert_eq!(bench.templates.set_public("app", true).await.unwrap(), "app");
    assert!(bench.restarted().await.templates.find("app").await.unwrap().unwrap().public);
}

/// What is copied where, by the script that does it in guests.
#[test]
fn files_are_merged_as_docker_merges_them() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let at = |path: &str| root.join(path).to_string_lossy().into_owned();
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    write("context/src/a.txt", "a");
    write("context/src/lib/b.txt", "b");
    write("context/src/{c}", "c");
    std::os::unix::fs::symlink("a.txt", root.join("context/src/link")).unwrap();
    let packed =
        std::process::Command::new("tar").args(["-C", &at("context"), "-czf", &at("pristine.tar"), "src"]).status();
    assert!(packed.unwrap().success());
    let owner = std::process::Command::new("id").arg("-u").output().unwrap().stdout;
    let owner = String::from_utf8(owner).unwrap().trim().to_owned();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/scripts");
    let script = ["common.sh", "copy.sh"].map(|file| std::fs::read_to_string(source.join(file)).unwrap()).join("\n");
    let copy = |from: &str, to: &str, mode: &str| {
        std::fs::copy(root.join("pristine.tar"), root.join("archive.tar")).unwrap();
        let archive = at("archive.tar");
        let (base, work) = (from.split("/{").next().unwrap(), at("work"));
        let arguments = ["-c", &script, "copy", &archive, base, from, to, &owner, mode, &work, &owner];
        let done = std::process::Command::new("/bin/bash").args(arguments).output().unwrap();
        assert!(!root.join("archive.tar").exists());
        done.status.success().then_some(()).ok_or(String::from_utf8(done.stderr).unwrap())
    };
    let mode = |path: &str| {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::symlink_metadata(root.join(path)).unwrap().permissions().mode() & 0o7777
    };

    // A directory's content, into one that is there: over its files, through its links to directories.
    write("out/old.txt", "old");
    write("out/a.txt", "theirs");
    write("elsewhere/kept.txt", "kept");
    std::os::unix::fs::symlink(root.join("elsewhere"), root.join("out/lib")).unwrap();
    copy("src", &at("out"), "").unwrap();
    assert_eq!((read("out/a.txt"), read("out/old.txt")), ("a".into(), "old".into()));
    assert_eq!((read("elsewhere/b.txt"), read("elsewhere/kept.txt")), ("b".into(), "kept".into()));
    assert_eq!(std::fs::read_link(root.join("out/link")).unwrap(), Path::new("a.txt"), "links stay links");

    // A file, to a name of its own, into a directory, and over a link, which is no way out.
    copy("src/a.txt", &at("new/deep/name"), "0640").unwrap();
    assert_eq!((read("new/deep/name"), mode("new/deep/name")), ("a".into(), 0o640));
    copy("src/a.txt", "here/", "").unwrap();
    copy("src/a.txt", "here", "").unwrap();
    assert_eq!(read("work/here/a.txt"), "a");
    std::os::unix::fs::symlink(root.join("elsewhere/kept.txt"), root.join("out/way")).unwrap();
    copy("src/a.txt", &at("out/way"), "").unwrap();
    assert_eq!((read("out/way"), read("elsewhere/kept.txt")), ("a".into(), "kept".into()));
    copy("src/link", &at("out/moved"), "0600").unwrap();
    assert_eq!(std::fs::read_link(root.join("out/moved")).unwrap(), Path::new("a.txt"));

    // A name that looks like a pattern.
    copy("src/{c}", &at("braced"), "").unwrap();
    assert_eq!(read("braced"), "c");

    copy(".", &at("all"), "").unwrap();
    assert_eq!(read("all/src/lib/b.txt"), "b");
    let missing = copy("src/none", &at("x"), "").unwrap_err();
    assert!(missing.contains("not among the files"), "{missing}");
}
