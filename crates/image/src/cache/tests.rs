use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aenv_block_client::Lower;
use aenv_model::Bytes;

use super::*;

/// A cache in a directory of its own.
struct Place {
    dir: tempfile::TempDir,
    cache: ImageCache,
}

impl Place {
    fn new() -> Self {
        Self::with(CacheConfig::default())
    }

    fn with(config: CacheConfig) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cache = ImageCache::open(&dir.path().join("cache"), "me", config).unwrap();
        Self { dir, cache }
    }

    /// The same cache as another node sees it.
    fn other_node(&self) -> ImageCache {
        ImageCache::open(self.cache.root(), "another", CacheConfig::default()).unwrap()
    }

    fn entries(&self, dir: &str) -> Vec<String> {
        let entries = files(&self.cache.root().join(dir)).unwrap();
        let name = |path: PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
        let mut names: Vec<String> = entries.into_iter().map(name).collect();
        names.sort();
        names
    }

    /// Collects when everything is old.
    fn collect(&self) -> Collected {
        self.cache.collect_blocking(later()).unwrap()
    }
}

/// A time at which nothing that tests do counts as recent.
fn later() -> SystemTime {
    SystemTime::now() + Duration::from_secs(3600)
}

/// Puts a layer with this content into the cache, kept by nobody in the end.
fn put(cache: &ImageCache, content: &[u8]) -> Commit {
    let staging = cache.staging("test-").unwrap();
    let mut operation = cache.operation(&staging.name()).unwrap();
    put_with(cache, content, &staging, &mut operation)
}

fn put_with(cache: &ImageCache, content: &[u8], staging: &Staging, operation: &mut Operation) -> Commit {
    let file = staging.join("file");
    fs::write(&file, content).unwrap();
    let commit = Commit { digest: Digest::of(content), size: Bytes(content.len() as u64) };
    cache.publish(&file, &commit, staging, operation).unwrap();
    commit
}

fn key(source: &Digest) -> ConversionKey {
    ConversionKey {
        chain: Digest::of(source.to_string().as_bytes()),
        source: source.clone(),
        converter: "test-1".into(),
        virtual_size: Bytes::gib(1),
        mkfs: false,
    }
}

/// An image of these layers, named after the first.
fn image(cache: &ImageCache, commits: &[&Commit]) -> (ImageKey, CachedImage) {
    let lower = |commit: &&Commit| Lower {
        file: Some(cache.commit_path(&commit.digest)),
        digest: Some(commit.digest.to_string()),
        size: Some(commit.size.get()),
        ..Lower::default()
    };
    let device = DeviceConfig { lowers: commits.iter().map(lower).collect(), ..DeviceConfig::default() };
    let key = ImageKey { digest: commits[0].digest.clone(), repository: None, converter: "test-1".into() };
    (key, CachedImage { device, config: Default::default(), size: Bytes::gib(1) })
}

#[test]
fn a_layer_is_kept_by_its_lease_and_by_nothing_else() {
    let place = Place::new();
    let commit = put(&place.cache, b"layer");
    assert_eq!(fs::read(place.cache.commit_path(&commit.digest)).unwrap(), b"layer");
    place.cache.lease_blocking(LeaseKind::Template, "build", [commit.digest.clone()]).unwrap();
    assert_eq!(place.collect().layers, 0);
    place.cache.release_blocking(LeaseKind::Runtime, "build").unwrap();
    assert_eq!(place.collect().layers, 0, "another kind's");
    place.cache.release_blocking(LeaseKind::Template, "build").unwrap();
    let recent = place.cache.collect_blocking(SystemTime::now()).unwrap();
    assert_eq!(recent.layers, 0, "it was used a moment ago");
    let collected = place.collect();
    assert_eq!((collected.layers, collected.freed, collected.left), (1, Bytes(5), Bytes(0)));
    let error = place.cache.lease_blocking(LeaseKind::Template, "build", [commit.digest.clone()]).unwrap_err();
    assert!(matches!(&error, CacheError::Gone { digests } if *digests == [commit.digest]), "{error}");
    assert_eq!(place.entries("leases/template"), [] as [&str; 0]);
    for dir in ["commits", "staging", "locks"] {
        assert_eq!(place.entries(dir), [] as [&str; 0], "{dir}");
    }
}

#[test]
fn a_lease_replaces_the_owners_former_one() {
    let place = Place::new();
    let (first, second) = (put(&place.cache, b"1"), put(&place.cache, b"2"));
    for commit in [&first, &second] {
        place.cache.lease_blocking(LeaseKind::Runtime, "sandbox", [commit.digest.clone()]).unwrap();
    }
    let refused = place.cache.lease_blocking(LeaseKind::Runtime, "sandbox", [first.digest.clone(), Digest::of(b"?")]);
    refused.unwrap_err();
    assert_eq!(place.collect().layers, 1);
    assert!(place.cache.is_there(&second.digest));
}

#[test]
fn a_device_keeps_its_files_here_and_what_it_may_find_here() {
    let place = Place::new();
    let (file, dir) = (put(&place.cache, b"file"), put(&place.cache, b"dir"));
    let mut device = image(&place.cache, &[&file]).1.device;
    let remote = |digest: &Digest| Lower {
        dir: Some(place.cache.commit_dir(digest)),
        digest: Some(digest.to_string()),
        ..Lower::default()
    };
    device.lowers.extend([remote(&dir.digest), remote(&Digest::of(b"still in the registry"))]);
    device.lowers.push(Lower { file: Some("/elsewhere/layer".into()), ..Lower::default() });
    place.cache.lease_device_blocking(LeaseKind::Runtime, "sandbox", &device).unwrap();
    assert_eq!(place.collect().layers, 0);
    device.lowers[0].file = Some(place.cache.commit_path(&Digest::of(b"never there")));
    let error = place.cache.lease_device_blocking(LeaseKind::Runtime, "other", &device).unwrap_err();
    assert!(matches!(error, CacheError::Gone { .. }), "{error}");
}

#[test]
fn owners_are_plain_names() {
    let place = Place::new();
    for owner in ["", ".", "..", ".new-x", "a/b", "a b", &"x".repeat(300)] {
        let error = place.cache.lease_blocking(LeaseKind::Runtime, owner, []).unwrap_err();
        assert!(matches!(error, CacheError::Owner { .. }), "{error}");
    }
}

#[test]
fn a_restarted_node_ends_its_leases_and_no_other_nodes() {
    let place = Place::new();
    let other = place.other_node();
    for owner in ["gone", "alive"] {
        place.cache.lease_blocking(LeaseKind::Runtime, owner, []).unwrap();
    }
    place.cache.lease_blocking(LeaseKind::Template, "gone", []).unwrap();
    other.lease_blocking(LeaseKind::Runtime, "others", []).unwrap();
    let ended = place.cache.reconcile_blocking(LeaseKind::Runtime, &BTreeSet::from(["alive".to_owned()])).unwrap();
    assert_eq!(ended, ["gone"]);
    assert_eq!(place.entries("leases/runtime"), ["alive.json", "others.json"]);
    assert_eq!(place.entries("leases/template"), ["gone.json"]);
}

#[test]
fn an_operation_keeps_layers_while_its_process_lives() {
    let place = Place::new();
    let commit = put(&place.cache, b"layer");
    let mut operation = place.cache.operation("import-1").unwrap();
    assert!(operation.keep(&commit.digest, commit.size).unwrap());
    assert!(!operation.keep(&commit.digest, Bytes(4)).unwrap(), "of another length");
    assert!(!operation.keep(&Digest::of(b"?"), Bytes(1)).unwrap());
    assert_eq!(place.collect().layers, 0);
    // What a process leaves that is killed: the file without the lock.
    let path = place.cache.layout.lease(LeaseKind::Operation, "import-1");
    let copy = fs::read(&path).unwrap();
    drop(operation);
    fs::write(&path, copy).unwrap();
    assert_eq!(place.collect().layers, 1);
    assert_eq!(place.entries("leases/operation"), [] as [&str; 0]);
}

#[test]
fn a_conversion_is_found_on_its_chain_only() {
    let place = Place::new();
    let (base, commit) = (put(&place.cache, b"base"), put(&place.cache, b"layer"));
    let key = key(&Digest::of(b"source"));
    place.cache.record_conversion(&key, Some(&base.digest), &commit).unwrap();
    assert_eq!(place.cache.find(&key, Some(&base.digest)), Some(commit.clone()));
    assert_eq!(place.cache.find(&key, None), None);
    assert_eq!(place.cache.find(&key, Some(&commit.digest)), None);
    let other = ConversionKey { virtual_size: Bytes::gib(2), ..key.clone() };
    assert_eq!(place.cache.find(&other, Some(&base.digest)), None);
    fs::write(place.cache.commit_path(&commit.digest), b"lay").unwrap();
    assert_eq!(place.cache.find(&key, Some(&base.digest)), None, "cut short");
    assert_eq!(put(&place.cache, b"layer"), commit, "made anew in its place");
    assert_eq!(place.cache.find(&key, Some(&base.digest)), Some(commit.clone()));
    place.collect();
    assert_eq!(place.cache.find(&key, Some(&base.digest)), None);
    assert_eq!(place.entries("indexes"), [] as [&str; 0], "records of what is gone go");
}

#[test]
fn an_image_is_found_by_all_of_its_key_and_keeps_its_layers() {
    let place = Place::new();
    let (base, top) = (put(&place.cache, b"base"), put(&place.cache, b"top"));
    let (key, image) = image(&place.cache, &[&base, &top]);
    place.cache.record_image(&key, &image).unwrap();
    assert_eq!(place.cache.image(&key), Some(image));
    let elsewhere = ImageKey { repository: Some("docker.io/x".into()), ..key.clone() };
    let otherwise = ImageKey { converter: "test-2".into(), ..key.clone() };
    assert_eq!((place.cache.image(&elsewhere), place.cache.image(&otherwise)), (None, None));
    let collected = place.collect();
    assert_eq!((collected.layers, collected.images), (0, 0), "nothing goes without a capacity");
    assert_eq!(place.cache.usage_blocking().unwrap(), Usage { layers: 2, bytes: Bytes(7), images: 1 });
}

#[test]
fn beyond_the_capacity_images_go_that_nobody_used_lately() {
    let mut config = CacheConfig { capacity: Some(Bytes(3000)), ..CacheConfig::default() };
    config.gc.low_watermark = 0.5;
    let place = Place::with(config);
    let commits: Vec<Commit> = (0..4).map(|n| put(&place.cache, &[n; 1000])).collect();
    let base = put(&place.cache, b"base");
    let keys: Vec<ImageKey> = commits
        .iter()
        .map(|commit| {
            let (key, image) = image(&place.cache, &[commit, &base]);
            place.cache.record_image(&key, &image).unwrap();
            key
        })
        .collect();
    // The first is used again, the second is leased.
    place
        .cache
        .lease_blocking(LeaseKind::Runtime, "sandbox", [commits[1].digest.clone(), base.digest.clone()])
        .unwrap();
    let age = |n: usize, seconds: u64| {
        let path = place.cache.layout.image(&commits[n].digest.dashed());
        let file = fs::File::open(path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
    };
    (0..4).for_each(|n| age(n, 100 - n as u64));
    assert!(place.cache.image(&keys[0]).is_some());
    let collected = place.collect();
    assert_eq!((collected.images, collected.layers, collected.left), (3, 3, Bytes(1004)));
    assert!(place.cache.image(&keys[1]).is_some(), "all it has is leased");
    assert_eq!(place.entries("configs").len(), 2);
}

#[test]
fn what_can_not_be_read_stops_removal_and_is_told() {
    let place = Place::new();
    put(&place.cache, b"layer");
    for path in ["leases/paused/x.json", "configs/x-image.json"] {
        let path = place.cache.root().join(path);
        fs::write(&path, "{").unwrap();
        let collected = place.collect();
        assert_eq!((collected.layers, collected.doubts), (0, vec![path.clone()]));
        fs::remove_file(path).unwrap();
    }
    assert_eq!(place.collect().layers, 1);
}

#[test]
fn what_is_not_as_it_should_be_is_left_alone_and_told() {
    let place = Place::new();
    let (commit, top) = (put(&place.cache, b"layer"), put(&place.cache, b"top"));
    let (key, image) = image(&place.cache, &[&commit, &top]);
    place.cache.record_image(&key, &image).unwrap();
    fs::write(place.cache.commit_path(&commit.digest), b"longer than it was").unwrap();
    let foreign = place.cache.root().join("commits/foreign");
    fs::create_dir(&foreign).unwrap();
    let outside = place.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("overlaybd.commit"), b"linked").unwrap();
    let linked = place.cache.commit_dir(&Digest::of(b"linked"));
    symlink(&outside, &linked).unwrap();
    let empty = place.cache.commit_dir(&Digest::of(b"empty"));
    fs::create_dir(&empty).unwrap();
    let collected = place.collect();
    assert_eq!(collected.layers, 0);
    let mut doubts = vec![place.cache.commit_path(&commit.digest), foreign, linked, empty];
    doubts.sort();
    assert_eq!(collected.doubts, doubts);
    assert_eq!(fs::read(outside.join("overlaybd.commit")).unwrap(), b"linked");
}

#[test]
fn work_of_processes_that_are_gone_is_swept_and_no_other() {
    let place = Place::new();
    let working = place.cache.staging("import-").unwrap();
    fs::write(working.join("x"), "").unwrap();
    let lock = place.cache.try_lock(&Digest::of(b"here")).unwrap().unwrap();
    for gone in ["staging/import-gone", "staging/unlocked/deep"] {
        fs::create_dir_all(place.cache.root().join(gone)).unwrap();
    }
    for gone in ["staging/import-gone/.lock", "configs/.new-abc", "leases/paused/.new-abc", "configs/x.metadata.json"] {
        fs::write(place.cache.root().join(gone), "").unwrap();
    }
    fs::write(place.cache.layout.locks().join("gone"), "").unwrap();
    place.collect();
    assert_eq!(place.entries("staging"), [working.name()]);
    assert_eq!(place.entries("locks").len(), 1);
    for dir in ["configs", "leases/paused"] {
        assert_eq!(place.entries(dir), [] as [&str; 0], "{dir}");
    }
    assert!(working.join("x").exists());
    drop((lock, working));
    for dir in ["staging", "locks"] {
        assert_eq!(place.entries(dir), [] as [&str; 0], "{dir}");
    }
}

/// Makes, leases, checks and releases layers for a while, beside collections.
fn use_at_random(cache: &ImageCache, worker: u32, stop: &AtomicBool) -> u32 {
    let mut done = 0;
    while !stop.load(Ordering::Relaxed) {
        let content = format!("layer {}", (worker + done) % 5);
        let owner = format!("worker-{worker}");
        let staging = cache.staging("test-").unwrap();
        let mut operation = cache.operation(&staging.name()).unwrap();
        let key = key(&Digest::of(content.as_bytes()));
        let commit = match cache.find(&key, None) {
            Some(commit) if operation.keep(&commit.digest, commit.size).unwrap() => commit,
            _ => {
                let commit = put_with(cache, content.as_bytes(), &staging, &mut operation);
                cache.record_conversion(&key, None, &commit).unwrap();
                commit
            }
        };
        cache.lease_blocking(LeaseKind::Runtime, &owner, [commit.digest.clone()]).unwrap();
        drop((operation, staging));
        for _ in 0..3 {
            assert_eq!(fs::read(cache.commit_path(&commit.digest)).unwrap(), content.as_bytes());
            std::thread::yield_now();
        }
        cache.release_blocking(LeaseKind::Runtime, &owner).unwrap();
        done += 1;
    }
    done
}

#[test]
fn what_is_leased_is_there_whatever_is_collected_meanwhile() {
    let place = Place::new();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|worker| {
                let (cache, stop) = (place.other_node(), &stop);
                scope.spawn(move || use_at_random(&cache, worker, stop))
            })
            .collect();
        let deadline = Instant::now() + Duration::from_secs(2);
        let mut removed = 0;
        while Instant::now() < deadline && !workers.iter().any(|worker| worker.is_finished()) {
            removed += place.collect().layers;
        }
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            assert!(worker.join().unwrap() > 0);
        }
        assert!(removed > 0, "the test would show nothing");
    });
}

/// Kills processes that use a cache at random moments. What they leave must be garbage at most.
#[test]
fn a_process_that_is_killed_at_any_moment_leaves_garbage_at_most() {
    let place = Place::new();
    let started = Instant::now();
    for round in 0..15 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cache::tests::use_a_cache_until_killed", "--ignored"])
            .env("AENV_TEST_CACHE", place.cache.root())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // Once it is at work, a little longer each time.
        let deadline = Instant::now() + Duration::from_secs(20);
        let marker = place.dir.path().join(format!("begun-{}", child.id()));
        while !marker.exists() {
            assert!(child.try_wait().unwrap().is_none() && Instant::now() < deadline, "it does not begin");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(700 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        for path in files_of(&files(&place.cache.layout.indexes()).unwrap()).unwrap() {
            if path.file_name().unwrap().to_string_lossy().starts_with(TEMPORARY) {
                continue;
            }
            let text = fs::read(&path).unwrap();
            serde_json::from_slice::<serde_json::Value>(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        }
        for path in files(&place.cache.layout.commits()).unwrap() {
            let digest = Digest::from_dashed(&path.file_name().unwrap().to_string_lossy()).unwrap();
            assert_eq!(Digest::of(&fs::read(path.join("overlaybd.commit")).unwrap()), digest);
        }
        assert_eq!(place.collect().doubts, [] as [PathBuf; 0]);
    }
    for owner in place.entries("leases/runtime") {
        place.cache.release_blocking(LeaseKind::Runtime, owner.trim_end_matches(".json")).unwrap();
    }
    place.collect();
    for dir in ["commits", "indexes", "staging", "locks", "leases/operation"] {
        assert_eq!(place.entries(dir), [] as [&str; 0], "{dir}");
    }
    assert!(started.elapsed() < Duration::from_secs(120));
}

#[test]
#[ignore = "run by a_process_that_is_killed_at_any_moment_leaves_garbage_at_most"]
fn use_a_cache_until_killed() {
    let Some(root) = std::env::var_os("AENV_TEST_CACHE").map(PathBuf::from) else {
        eprintln!("skipped: only of use to the test that runs it");
        return;
    };
    let cache = ImageCache::open(&root, "me", CacheConfig::default()).unwrap();
    fs::write(root.parent().unwrap().join(format!("begun-{}", std::process::id())), "").unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let (cache, stop) = (cache.clone(), &stop);
            scope.spawn(move || use_at_random(&cache, worker, stop));
        }
        loop {
            cache.collect_blocking(later()).unwrap();
        }
    });
}
