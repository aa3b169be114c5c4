//! Conversions that something happens to: what is left is no more than garbage, and another attempt succeeds.

mod common;
#[path = "common/registry.rs"]
mod registry;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use aenv_block_client::BlockdClient;
use aenv_image::{CacheConfig, ImageCache, ImportErrorKind, Importer, LeaseKind, Progress};
use aenv_model::Bytes;
use common::{Bench, Blockd, Image, OWNER, Tar, sha256};
use registry::{Answer, Front, Registry};
use tokio_util::sync::CancellationToken;

/// What a process that imports is told.
const TOLD: &str = "AENV_TEST_IMPORT";
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
#[ignore = "run by tests that import"]
fn the_daemon_of_a_test() {
    common::be_a_daemon();
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// A layer of `mib` MiB that do not compress, in files of its own name.
fn bulky(name: &str, mib: usize) -> Vec<u8> {
    let mut tar = Tar::default();
    tar.dir(&format!("{name}/"));
    let seed = name.bytes().fold(0, |sum, byte| sum * 31 + u64::from(byte));
    for number in 0..mib {
        tar.file(&format!("{name}/{number}"), &noise(seed + number as u64, 1 << 20));
    }
    tar.finish()
}

fn three_layers() -> Image {
    Image::of([bulky("a", 12), bulky("b", 12), bulky("c", 12)])
}

/// Writes an image as a layout, and gives the reference of it.
fn laid_out(image: &Image, dir: &Path) -> String {
    image.write_layout(dir, "x");
    format!("oci:{}:x", dir.display())
}

/// The digests that an image has when nothing happens.
async fn undisturbed(bench: &Bench, reference: &str) -> Vec<String> {
    let cache = ImageCache::open(&bench.dir.path().join("undisturbed"), "test", CacheConfig::default()).unwrap();
    let importer = Importer::new(bench.config.clone(), cache, bench.client());
    let (target, reference) = (bench.target(), reference.parse().unwrap());
    importer.import(&reference, None, &target, "other", &|_| {}, CancellationToken::new()).await.unwrap();
    let digests = bench.digests();
    std::fs::remove_file(target).unwrap();
    digests
}

/// Imports in a process of its own, which prints its progress.
struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn import(bench: &Bench, reference: &str, name: &str) -> Self {
        let target = bench.dir.path().join(format!("{name}.json"));
        let daemon = bench.client().socket().to_owned();
        let told = [bench.cache.root(), &daemon, &target].map(|path| path.display().to_string());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "an_import_in_a_process_of_its_own", "--ignored", "--nocapture"])
            .env(TOLD, [&told[..], &[reference.to_owned(), name.to_owned()]].concat().join("\n"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Reads its progress up to the first line that holds `part`; whether there is one.
    fn reads(&mut self, part: &str) -> bool {
        self.lines.by_ref().any(|line| line.unwrap().contains(part))
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
#[ignore = "run by tests that kill it"]
async fn an_import_in_a_process_of_its_own() {
    let Ok(told) = std::env::var(TOLD) else {
        eprintln!("skipped: only of use to the tests that run it");
        return;
    };
    let [cache, socket, target, reference, owner] = told.split('\n').collect::<Vec<_>>().try_into().unwrap();
    let cache = ImageCache::open(Path::new(cache), owner, CacheConfig::default()).unwrap();
    let config = Bench::new().config;
    let importer = Importer::new(config, cache, BlockdClient::new(socket));
    let tell = |step: Progress| println!("{step:?}");
    let (reference, target) = (reference.parse().unwrap(), Path::new(target));
    importer.import(&reference, None, target, owner, &tell, CancellationToken::new()).await.unwrap();
    println!("imported");
}

/// Loop devices whose file is below `dir`.
fn loop_devices(dir: &Path) -> Vec<String> {
    let devices = std::fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().path().join("loop/backing_file"));
    let files = devices.filter_map(|path| std::fs::read_to_string(path).ok());
    files.filter(|file| file.contains(&*dir.to_string_lossy())).collect()
}

/// Waits until `condition` holds.
#[track_caller]
fn wait(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_leaves_finished_layers_and_nothing_that_lasts() {
    let Some(bench) = Bench::start().await else { return };
    let reference = laid_out(&three_layers(), &bench.dir.path().join("layout"));
    let expected = undisturbed(&bench, &reference).await;
    let mut finished = BTreeSet::new();
    for step in [
        "Building",
        "Unpacking { index: 0",
        "Committing { index: 0",
        "Unpacking { index: 1",
        "Committing { index: 1",
        "Unpacking { index: 2",
        "Committing { index: 2",
    ] {
        let mut process = Process::import(&bench, &reference, "victim");
        assert!(process.reads(step), "{step}");
        process.kill();
        wait("the kernel lets go of loop devices", || loop_devices(bench.dir.path()).is_empty());
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains("/staging/"), "{mounts}");
        // Whatever is in the cache is whole.
        for entry in std::fs::read_dir(bench.cache.root().join("commits")).unwrap() {
            let path = entry.unwrap().path();
            let content = std::fs::read(path.join("overlaybd.commit")).unwrap();
            assert_eq!(sha256(&content).replace(':', "-"), path.file_name().unwrap().to_string_lossy());
            finished.insert(sha256(&content));
        }
        assert!(finished.iter().all(|digest| expected.contains(digest)), "{finished:?}");
        bench.importer().sweep().await.unwrap();
        let left = bench.leftovers().await;
        assert!(left.iter().all(|path| path.contains("/locks/") || path.contains("/operation/")), "{step}: {left:?}");
    }
    assert!(finished.len() >= 2, "what was finished has stayed: {finished:?}");
    let cached = Mutex::new(0);
    let tell = |step: Progress| {
        if matches!(step, Progress::Cached { .. }) {
            *cached.lock().unwrap() += 1;
        }
    };
    bench.import_with(&reference, &tell, CancellationToken::new()).await.unwrap();
    assert!(*cached.lock().unwrap() > 0);
    assert_eq!(bench.digests(), expected);
    bench.ext4().assert_clean();
    bench.cache.collect_blocking(SystemTime::now()).unwrap();
    bench.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_servers_convert_an_image_once_between_them() {
    let Some(bench) = Bench::start().await else { return };
    let reference = laid_out(&three_layers(), &bench.dir.path().join("layout"));
    let processes = ["one", "two"].map(|name| Process::import(&bench, &reference, name));
    let told = processes.map(|mut process| {
        std::thread::spawn(move || {
            let lines: Vec<String> = process.lines.by_ref().map(Result::unwrap).collect();
            assert!(process.child.wait().unwrap().success(), "{lines:?}");
            lines
        })
    });
    let told: Vec<String> = told.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    let count = |part: &str| told.iter().filter(|line| line.contains(part)).count();
    assert_eq!(count("imported"), 2, "{told:?}");
    assert_eq!(count("Committing"), 3, "{told:?}");
    assert_eq!(count("Cached"), 3, "{told:?}");
    let [one, two] = ["one", "two"].map(|name| std::fs::read(bench.dir.path().join(format!("{name}.json"))).unwrap());
    assert_eq!(one, two);
    bench.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn imports_and_collections_do_not_disturb_each_other() {
    let Some(bench) = Bench::start().await else { return };
    let shared = bulky("shared", 3);
    let references: Vec<String> = ["x", "y", "z"]
        .map(|name| {
            let image = Image::of([shared.clone(), bulky(name, 2)]);
            laid_out(&image, &bench.dir.path().join(name))
        })
        .into();
    let stop = Arc::new(AtomicBool::new(false));
    let collecting = {
        let (cache, stop) = (bench.cache.clone(), Arc::clone(&stop));
        std::thread::spawn(move || {
            let mut removed = 0;
            while !stop.load(Ordering::Relaxed) {
                // To this collector, everything is old.
                removed += cache.collect_blocking(SystemTime::now() + Duration::from_secs(3600)).unwrap().layers;
            }
            removed
        })
    };
    for _ in 0..2 {
        let importer = bench.importer();
        let imports = references.iter().enumerate().map(|(number, reference)| {
            let (importer, target) = (&importer, bench.dir.path().join(format!("{number}.json")));
            let reference = reference.parse().unwrap();
            async move {
                let owner = number.to_string();
                let done = importer.import(&reference, None, &target, &owner, &|_| {}, CancellationToken::new()).await;
                done.unwrap_or_else(|error| panic!("{}", error.report()));
                target
            }
        });
        for target in futures::future::join_all(imports).await {
            std::fs::rename(target, bench.target()).unwrap();
            assert_eq!(bench.stack().layers().len(), 3, "all of them are there");
        }
        // Images keep their layers too: forget everything, so that the next round begins anew.
        for number in 0..references.len() {
            bench.cache.release_blocking(LeaseKind::Template, &number.to_string()).unwrap();
        }
        for entry in std::fs::read_dir(bench.cache.root().join("configs")).unwrap() {
            let _ = std::fs::remove_file(entry.unwrap().path()); // the collector takes those without an image
        }
        wait("all is collected", || bench.cache.usage_blocking().unwrap().layers == 0);
    }
    stop.store(true, Ordering::Relaxed);
    assert!(collecting.join().unwrap() >= 10, "five layers, twice");
    bench.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_goes_away_costs_only_what_it_has_not_given() {
    let (Some(registry), Some(mut bench)) = (Registry::start(false).await, Bench::start().await) else { return };
    let image = three_layers();
    registry.push("hello:v1", &image).await;
    let (blobs, _) = image.parts();
    let last = sha256(&blobs[2]);
    let down = Arc::new(AtomicBool::new(true));
    let is_down = Arc::clone(&down);
    let front = Front::start(&registry.host, move |request| match request.target.contains(&last) {
        true if is_down.load(Ordering::Relaxed) => Answer::Say(503, vec![], "gone for lunch".into()),
        _ => Answer::Pass,
    })
    .await;
    bench.config.patience = Duration::from_secs(1);
    let reference = format!("{}/hello:v1", front.host);
    let error = bench.import(&reference).await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::Registry, "{}", error.report());
    assert!(!bench.target().exists() && !bench.is_leased());
    bench.assert_nothing_left().await;
    down.store(false, Ordering::Relaxed);
    let asked = |blob: &[u8]| front.count(&sha256(blob));
    let before = [asked(&blobs[0]), asked(&blobs[1])];
    let seen = Mutex::new(Vec::new());
    let tell = |step: Progress| seen.lock().unwrap().push(step);
    bench.import_with(&reference, &tell, CancellationToken::new()).await.unwrap();
    let seen = seen.into_inner().unwrap();
    for index in 0..2 {
        assert!(seen.contains(&Progress::Cached { index, total: 3 }), "{seen:?}");
    }
    assert_eq!([asked(&blobs[0]), asked(&blobs[1])], before, "what is here is not fetched again");
    bench.ext4().assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn images_that_share_layers_share_what_those_become() {
    let Some(bench) = Bench::start().await else { return };
    let (base, app) = (bulky("base", 2), bulky("app", 1));
    let first = laid_out(&Image::of([base.clone(), app]), &bench.dir.path().join("first"));
    let second = laid_out(&Image::of([base.clone(), bulky("other", 1)]), &bench.dir.path().join("second"));
    bench.import(&first).await.unwrap();
    let of_first = bench.digests();
    let seen = Mutex::new(Vec::new());
    let tell = |step: Progress| seen.lock().unwrap().push(step);
    bench.import_with(&second, &tell, CancellationToken::new()).await.unwrap();
    let of_second = bench.digests();
    assert_eq!(of_first[..2], of_second[..2]);
    assert_ne!(of_first[2], of_second[2]);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert!(seen.contains(&Progress::Cached { index: 0, total: 2 }), "{seen:?}");
    assert!(!seen.iter().any(|step| matches!(step, Progress::Building | Progress::Unpacking { index: 0, .. })));
    // An image that is known needs nothing at all.
    let seen = Mutex::new(Vec::new());
    let tell = |step: Progress| seen.lock().unwrap().push(step);
    bench.import_with(&first, &tell, CancellationToken::new()).await.unwrap();
    assert_eq!(bench.digests(), of_first);
    let cached = |index| Progress::Cached { index, total: 2 };
    assert_eq!(seen.into_inner().unwrap(), [Progress::Resolving, cached(0), cached(1)]);
    // Unless a layer of it is lost.
    let lost = bench.device().lowers[2].file.clone().unwrap();
    std::fs::remove_dir_all(lost.parent().unwrap()).unwrap();
    bench.import(&first).await.unwrap();
    assert_eq!(bench.digests(), of_first);
    assert!(lost.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_killed_fails_the_import_and_no_later_one() {
    let Some(mut bench) = Bench::start().await else { return };
    let reference = laid_out(&three_layers(), &bench.dir.path().join("layout"));
    let pid = bench.client().info().await.unwrap().pid;
    let killed = AtomicBool::new(false);
    let tell = |step: Progress| {
        if matches!(step, Progress::Unpacking { index: 1, .. }) && !killed.swap(true, Ordering::Relaxed) {
            let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
    };
    let importing = bench.import_with(&reference, &tell, CancellationToken::new());
    let error = tokio::time::timeout(PATIENCE, importing).await.expect("it ends").unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::Io, "{}", error.report());
    wait("the kernel lets go of loop devices", || loop_devices(bench.dir.path()).is_empty());
    let dir = bench.dir.path().join("daemon");
    bench.daemon = None;
    let _ = rustix::mount::unmount(dir.join("run/devices"), rustix::mount::UnmountFlags::DETACH);
    bench.daemon = Some(Blockd::start(&dir, "the_daemon_of_a_test").await);
    bench.importer().sweep().await.unwrap();
    bench.import(&reference).await.unwrap();
    bench.ext4().assert_clean();
    bench.assert_nothing_left().await;
}

/// A small file system of its own, unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(format!("size={size}")).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("none", dir.path(), "tmpfs", flags, options.as_c_str()).unwrap();
        Self(dir)
    }

    /// Leaves no more than `left` free.
    fn fill(&self, left: Bytes) -> PathBuf {
        let path = self.0.path().join("filler");
        let stat = rustix::fs::statvfs(self.0.path()).unwrap();
        let free = stat.f_bavail * stat.f_frsize;
        // Whatever else is written meanwhile takes its part.
        let _ = std::fs::write(&path, vec![1; usize::try_from(free.saturating_sub(left.get())).unwrap()]);
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_told_as_such_and_costs_no_more_than_the_import() {
    let Some(mut bench) = Bench::start().await else { return };
    let disk = SmallDisk::mount("80m");
    bench.cache = ImageCache::open(&disk.0.path().join("cache"), "test", CacheConfig::default()).unwrap();
    let fits = laid_out(&Image::of([bulky("fits", 2)]), &bench.dir.path().join("fits"));
    bench.import(&fits).await.unwrap();
    bench.forget();
    let unpacking: fn(&Progress) -> bool = |step| matches!(step, Progress::Unpacking { .. });
    for (number, (mib, when, left)) in [
        // One that is seen before it happens; then space goes while it is unpacked, and what is left is enough for a part,
        // for nothing, and for what is unpacked but not for the layer made of it.
        (60, None, Bytes(0)),
        (24, Some(unpacking), Bytes::mib(8)),
        (24, Some(unpacking), Bytes(0)),
        (24, Some(unpacking), Bytes::mib(28)),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("large-{number}");
        let reference = laid_out(&Image::of([bulky(&name, mib)]), &bench.dir.path().join(&name));
        let filler = Mutex::new(None);
        let tell = |step: Progress| {
            let mut filler = filler.lock().unwrap();
            if when.is_some_and(|when| when(&step)) && filler.is_none() {
                *filler = Some(disk.fill(left));
            }
        };
        let imported = bench.import_with(&reference, &tell, CancellationToken::new()).await;
        let error = imported.expect_err(&name);
        assert_eq!(error.kind(), ImportErrorKind::NoSpace, "{number}: {}", error.report());
        assert!(!bench.target().exists() && !bench.is_leased());
        bench.assert_nothing_left().await;
        if let Some(path) = filler.into_inner().unwrap() {
            std::fs::remove_file(path).unwrap();
        }
    }
    // What was there is there, and there is room again.
    let seen = Mutex::new(Vec::new());
    let tell = |step: Progress| seen.lock().unwrap().push(step);
    bench.import_with(&fits, &tell, CancellationToken::new()).await.unwrap();
    assert!(seen.lock().unwrap().contains(&Progress::Cached { index: 0, total: 1 }));
    let more = laid_out(&Image::of([bulky("more", 8)]), &bench.dir.path().join("more"));
    bench.import(&more).await.unwrap();
    bench.ext4().assert_clean();
    assert_eq!(bench.cache.collect_blocking(SystemTime::now()).unwrap().doubts, [] as [PathBuf; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cache_beyond_its_capacity_gives_up_what_nobody_needs_and_nothing_else() {
    let Some(mut bench) = Bench::start().await else { return };
    let mut config = CacheConfig { capacity: Some(Bytes::mib(8)), ..CacheConfig::default() };
    config.gc.min_age = Duration::ZERO;
    config.gc.low_watermark = 0.95;
    bench.cache = ImageCache::open(&bench.dir.path().join("small"), "test", config).unwrap();
    let references: Vec<String> = (0..3)
        .map(|number| {
            let name = format!("image-{number}");
            laid_out(&Image::of([bulky(&name, 4)]), &bench.dir.path().join(&name))
        })
        .collect();
    let importer = bench.importer();
    for (number, reference) in references.iter().enumerate() {
        let (target, owner) = (bench.target(), format!("{OWNER}-{number}"));
        let reference = reference.parse().unwrap();
        importer.import(&reference, None, &target, &owner, &|_| {}, CancellationToken::new()).await.unwrap();
    }
    let collected = bench.cache.collect_blocking(SystemTime::now()).unwrap();
    assert_eq!((collected.layers, collected.images), (0, 0), "all of it is leased, however much it is");
    assert!(collected.left > Bytes::mib(12), "{}", collected.left);
    for number in 0..2 {
        bench.cache.release_blocking(LeaseKind::Template, &format!("{OWNER}-{number}")).unwrap();
    }
    let collected = bench.cache.collect_blocking(SystemTime::now()).unwrap();
    assert_eq!((collected.layers, collected.images), (2, 2), "{collected:?}");
    assert_eq!(bench.stack().layers().len(), 2, "the last one is whole");
    bench.ext4().assert_clean();
}
