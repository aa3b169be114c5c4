use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use aenv_block_overlaybd::{Layer as Overlay, Mapped, Source, export};
use proptest::prelude::*;
use tar::EntryType;

use super::mounted::mounted;
use super::*;
use crate::cache::CacheConfig;
use crate::source::Slice;
use crate::unpack::Unpacker;
use crate::unpack::layer::{Tar, gzip, sha256};
use crate::unpack::model_tests;

#[path = "../../tests/common/daemon.rs"]
mod daemon;

#[test]
#[ignore = "run by tests that convert"]
fn the_daemon_of_a_test() {
    daemon::be_a_daemon();
}

/// A place to convert in.
struct Place {
    workshop: Workshop,
    _daemon: daemon::Blockd,
    dir: tempfile::TempDir,
}

impl Place {
    async fn start() -> Option<Self> {
        if !daemon::able() {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let daemon = daemon::Blockd::start(&dir.path().join("daemon"), "convert::tests::the_daemon_of_a_test").await;
        let workshop = Self::workshop(dir.path(), "cache", &daemon.client);
        Some(Self { workshop, _daemon: daemon, dir })
    }

    fn workshop(dir: &Path, cache: &str, daemon: &BlockdClient) -> Workshop {
        Workshop {
            cache: ImageCache::open(&dir.join(cache), "test", CacheConfig::default()).unwrap(),
            daemon: daemon.clone(),
            tasks: TaskScope::new("test"),
            virtual_size: Bytes::gib(1),
            max_unpacked: Bytes::gib(1),
            max_files: 100_000,
        }
    }

    /// The same with an empty cache.
    fn with_cache(&self, cache: &str) -> Workshop {
        Self::workshop(self.dir.path(), cache, &self.workshop.daemon)
    }

    /// Converts uncompressed `layers`.
    async fn convert(&self, workshop: &Workshop, layers: &[Vec<u8>]) -> Result<Vec<Commit>, ImportError> {
        let blobs = tempfile::tempdir_in(self.dir.path()).unwrap();
        let layers: Vec<Layer> = layers
            .iter()
            .enumerate()
            .map(|(number, layer)| {
                let (path, blob) = (blobs.path().join(number.to_string()), gzip(layer));
                std::fs::write(&path, &blob).unwrap();
                let digest = Some(sha256(&blob).parse().unwrap());
                let blob = Blob::Local { slice: Slice::whole(&path).unwrap(), digest };
                Layer { blob, diff_id: sha256(layer).parse().unwrap() }
            })
            .collect();
        let (cache, cancel) = (&workshop.cache, CancellationToken::new());
        let staging = cache.staging("test-").unwrap();
        let operation = Arc::new(Mutex::new(cache.operation(&staging.name()).unwrap()));
        let (image, progress) = ("x", &|_| {});
        let fetcher = Fetcher { image, registry: None, staging: &staging, progress, cancel: &cancel };
        let conversion = Conversion { workshop, image, staging: &staging, operation, progress, cancel: &cancel };
        conversion.convert(&layers, &fetcher).await
    }

    fn layers(&self, commits: &[Commit]) -> Vec<Overlay> {
        layers(&self.workshop, commits)
    }

    /// What is in the file system that `commits` make.
    async fn tree(&self, commits: &[Commit]) -> BTreeMap<String, Facts> {
        let (image, at) = (self.dir.path().join("exported"), self.dir.path().join("at"));
        std::fs::create_dir_all(&at).unwrap();
        drop(File::create(&image).unwrap());
        let stack = Stack::new(self.layers(commits)).unwrap();
        export(&stack, &LocalFile::open_writable(&image).unwrap(), &mut |_| true).unwrap();
        let checked = Command::new("/usr/sbin/e2fsck").arg("-fn").arg(&image).output().unwrap();
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
        mounted(image, at, |root| {
            let mut tree = walk(root);
            tree.remove("lost+found");
            tree
        })
        .await
        .unwrap()
    }
}

fn layers(workshop: &Workshop, commits: &[Commit]) -> Vec<Overlay> {
    let open = |commit: &Commit| {
        let file = LocalFile::open(&workshop.cache.commit_path(&commit.digest)).unwrap();
        Overlay::open(Arc::new(file) as Arc<dyn Source>).unwrap()
    };
    commits.iter().map(open).collect()
}

/// All that there is to know of a file.
#[derive(Debug, PartialEq, Eq)]
struct Facts {
    kind: char,
    mode: u32,
    owner: (u32, u32),
    device: u64,
    links: u64,
    mtime: (i64, i64),
    size: u64,
    /// Blocks of 4 KiB that are there.
    allocated: u64,
    content: Option<String>,
    target: Option<String>,
    attributes: BTreeMap<String, Vec<u8>>,
}

fn walk(root: &Path) -> BTreeMap<String, Facts> {
    let mut found = BTreeMap::new();
    let mut pending = vec![root.to_owned()];
    while let Some(path) = pending.pop() {
        let meta = std::fs::symlink_metadata(&path).unwrap();
        let kind = match meta.file_type() {
            kind if kind.is_dir() => 'd',
            kind if kind.is_symlink() => 'l',
            kind if kind.is_char_device() => 'c',
            kind if kind.is_block_device() => 'b',
            kind if kind.is_fifo() => 'p',
            _ => '-',
        };
        if kind == 'd' {
            pending.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let attributes = xattr::list(&path).unwrap();
        let facts = Facts {
            kind,
            mode: meta.mode() & 0o7777,
            owner: (meta.uid(), meta.gid()),
            device: meta.rdev(),
            links: if kind == 'd' { 0 } else { meta.nlink() },
            mtime: (meta.mtime(), meta.mtime_nsec()),
            size: if kind == 'd' { 0 } else { meta.size() },
            allocated: if kind == '-' { meta.blocks().div_ceil(8) } else { 0 },
            content: (kind == '-').then(|| sha256(&std::fs::read(&path).unwrap())),
            target: (kind == 'l').then(|| std::fs::read_link(&path).unwrap().display().to_string()),
            attributes: attributes
                .map(|name| {
                    let value = xattr::get(&path, &name).unwrap().unwrap();
                    (name.to_string_lossy().into_owned(), value)
                })
                .filter(|(name, _)| name != "security.selinux")
                .collect(),
        };
        found.insert(path.strip_prefix(root).unwrap().display().to_string(), facts);
    }
    found
}

/// What unpacking all of `layers` into one directory gives.
fn unpacked(layers: &[Vec<u8>], dir: &Path) -> BTreeMap<String, Facts> {
    let root = dir.join("unpacked");
    std::fs::create_dir(&root).unwrap();
    std::fs::set_permissions(&root, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    // The directory's own time is that of the base until a layer lists it.
    let base = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    File::open(&root).unwrap().set_modified(base).unwrap();
    let mut budget = Budget::new(Bytes::gib(1), Bytes::gib(1), 100_000);
    for (number, layer) in layers.iter().enumerate() {
        let mut unpacker = Unpacker::new(&root, number == 0, budget, CancellationToken::new()).unwrap();
        unpacker.apply(&sha256(layer).parse().unwrap(), || Ok(layer.as_slice())).unwrap();
        budget = unpacker.finish().unwrap();
    }
    let tree = walk(&root);
    std::fs::remove_dir_all(&root).unwrap();
    tree
}

#[track_caller]
fn assert_alike(converted: &BTreeMap<String, Facts>, plain: &BTreeMap<String, Facts>) {
    let names = |tree: &BTreeMap<String, Facts>| tree.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(converted), names(plain));
    for (path, facts) in converted {
        assert_eq!(facts, &plain[path], "{path:?}");
    }
}

/// Everything that a layer can do to those below it.
fn eventful() -> Vec<Vec<u8>> {
    let noise = |seed: u32, length: usize| -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..length).map(|_| next()).collect()
    };
    let mut base = Tar::default();
    base.dir("./").dir("usr/").dir("usr/lib/").dir("etc/").dir("var/").dir("var/cache/");
    base.symlink("lib", "usr/lib").file("usr/lib/libc.so", &noise(1, 700_000));
    base.hard_link("usr/lib/libc.so.6", "usr/lib/libc.so");
    for number in 0..300 {
        base.file(&format!("usr/lib/module-with-a-longer-name-{number}"), &noise(number, 37 * number as usize));
    }
    base.file("etc/passwd", b"root:x:0:0").file("etc/gone", b"x").file("var/cache/a", b"a").file("var/cache/b", b"b");
    base.dir("becomes-file/").file("becomes-file/x", b"x").file("becomes-dir", b"y").symlink("becomes-real", "usr");
    for (kind, path, major, minor) in [(EntryType::Char, "null", 1, 3), (EntryType::Block, "disk", 259, 70_000)] {
        let mut header = Tar::header(kind, path, 0o666);
        header.set_device_major(major).unwrap();
        header.set_device_minor(minor).unwrap();
        base.append(header, &[]);
    }
    base.append(Tar::header(EntryType::Fifo, "pipe", 0o622), &[]);

    let mut middle = Tar::default();
    let capability = [1u8, 0, 0, 2, 0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut ping = Tar::header(EntryType::Regular, "bin/ping", 0o4755);
    ping.set_uid(100_000);
    ping.set_gid(3_000_000_000);
    ping.set_size(3);
    middle.pax(&[("SCHILY.xattr.security.capability", &capability), ("SCHILY.xattr.user.big", &[b'x'; 3000])]);
    middle.append(ping, b"abc");
    middle.file("etc/.wh.gone", b"").file("var/cache/.wh..wh..opq", b"").file("var/cache/c", b"c");
    middle.hard_link("usr/lib/libc.so.7", "lib/libc.so").file("lib/through-a-link", b"!");
    middle.file("becomes-file", b"now").dir("becomes-dir/").file("becomes-dir/z", b"z").dir("becomes-real/");
    let mut holes = Tar::header(EntryType::Regular, "holes", 0o600);
    holes.set_size(8192);
    middle.pax(&[("GNU.sparse.size", b"104857600"), ("GNU.sparse.map", b"4096,4096,52428800,4096")]);
    middle.append(holes, &noise(5, 8192));
    middle.pax(&[("mtime", b"1500000000.123456789")]).file("etc/passwd", &noise(9, 5000));
    middle.pax(&[("SCHILY.xattr.trusted.overlay.opaque", b"y"), ("SCHILY.xattr.user.empty", b"")]).dir("usr/");

    let mut top = Tar::default();
    for number in (0..300).step_by(3) {
        top.file(&format!("usr/lib/.wh.module-with-a-longer-name-{number}"), b"");
    }
    top.file("usr/lib/module-with-a-longer-name-1", &noise(77, 200_000)).file(".wh.null", b"").file("a/b/c/d", b"deep");
    let long = [&b"l".repeat(200)[..], b"/", &b"n".repeat(255)].concat();
    top.pax(&[("path", long.as_slice())]).file("x", b"long");
    vec![base.finish(), middle.finish(), top.finish(), Tar::default().finish()]
}

#[tokio::test]
async fn a_converted_image_is_what_unpacking_it_gives() {
    let Some(place) = Place::start().await else { return };
    let layers = eventful();
    let commits = place.convert(&place.workshop, &layers).await.unwrap();
    assert_eq!(commits.len(), 5, "the base, and one for each");
    assert_alike(&place.tree(&commits).await, &unpacked(&layers, place.dir.path()));
    // Each is on the one below it, and known by what it was made of.
    let overlays = place.layers(&commits);
    let uuid = |index: usize| overlays[index].identity().uuid;
    assert_eq!(uuid(1), uuid_of(&sha256(&gzip(&layers[0])).parse().unwrap()));
    assert_eq!(uuid(1).get_version_num(), 8);
    assert_eq!(overlays[0].identity().parent, Uuid::nil());
    assert_eq!(Stack::new(overlays.clone()).unwrap().broken_parent(), None);
    // Nothing is in a layer that was not touched by it: the last one is empty.
    assert!(commits[4].size.get() < 64 << 10, "{}", commits[4].size);
    assert!(commits[0].size.get() < 6 << 20, "{}", commits[0].size);
}

#[tokio::test]
async fn the_same_layers_are_the_same_bytes_each_time_and_from_wherever_it_is_begun() {
    let Some(place) = Place::start().await else { return };
    let layers = eventful();
    let first = place.convert(&place.workshop, &layers).await.unwrap();
    // Time must have passed where it would show.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let again = place.with_cache("again");
    assert_same(&place, &again, &place.convert(&again, &layers).await.unwrap(), &first);
    let in_parts = place.with_cache("in-parts");
    for count in 1..=layers.len() {
        let commits = place.convert(&in_parts, &layers[..count]).await.unwrap();
        assert_same(&place, &in_parts, &commits, &first[..=count]);
    }
}

/// Tells where the layers `commits` of `workshop` are not those that were `expected`.
#[track_caller]
fn assert_same(place: &Place, workshop: &Workshop, commits: &[Commit], expected: &[Commit]) {
    let Some(at) = commits.iter().zip(expected).position(|(commit, expected)| commit != expected) else {
        assert_eq!(commits.len(), expected.len());
        return;
    };
    let [found, wanted] = [(workshop, commits), (&place.workshop, expected)]
        .map(|(workshop, commits)| Stack::new(layers(workshop, &commits[..=at])).unwrap());
    let blocks = |stack: &Stack| -> BTreeSet<u64> {
        let ranges = Stack::new(vec![stack.layers()[at].clone()]).unwrap().data_ranges();
        ranges.into_iter().flat_map(|range| range.start / BLOCK..range.end.div_ceil(BLOCK)).collect()
    };
    let (ours, theirs) = (blocks(&found), blocks(&wanted));
    let mut differences = Vec::new();
    for block in ours.union(&theirs) {
        let read = |stack: &Stack| {
            let mut bytes = vec![0; BLOCK as usize];
            aenv_block_device::BlockDevice::read_at(stack, block * BLOCK, &mut bytes).unwrap();
            bytes
        };
        let (a, b) = (read(&found), read(&wanted));
        let bytes: Vec<usize> = (0..a.len()).filter(|at| a[*at] != b[*at]).collect();
        let there = (ours.contains(block), theirs.contains(block));
        if !bytes.is_empty() || there.0 != there.1 {
            differences.push(format!("block {block} {there:?}: {} bytes from {:x?}", bytes.len(), bytes.first()));
        }
    }
    panic!("layer {at} differs: {differences:#?}");
}

#[tokio::test]
async fn a_layer_that_does_not_fit_is_too_large() {
    let Some(mut place) = Place::start().await else { return };
    place.workshop.virtual_size = Bytes::mib(64);
    let mut tar = Tar::default();
    tar.file("large", &vec![1; 80 << 20]);
    let error = place.convert(&place.workshop, &[tar.finish()]).await.unwrap_err();
    assert_eq!(error.kind(), crate::ImportErrorKind::Invalid, "{}", error.report());
    assert!(error.report().contains("more than 64.0 MiB"), "{}", error.report());
}

#[tokio::test]
async fn attributes_that_no_inode_holds_are_told_as_such() {
    let Some(place) = Place::start().await else { return };
    let mut tar = Tar::default();
    tar.pax(&[("SCHILY.xattr.user.huge", &[b'x'; 20_000])]).file("f", b"");
    let error = place.convert(&place.workshop, &[tar.finish()]).await.unwrap_err();
    assert_eq!(error.kind(), crate::ImportErrorKind::Invalid, "{}", error.report());
    assert!(error.report().contains("/f") && error.report().contains("attributes"), "{}", error.report());
}

#[test]
fn random_layers_convert_to_what_unpacking_them_gives() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let Some(place) = runtime.block_on(Place::start()) else { return };
    proptest!(ProptestConfig { cases: 8, max_shrink_iters: 0, ..ProptestConfig::default() },
        |(layers in prop::collection::vec(model_tests::layer(), 1..4))| {
        let layers: Vec<Vec<u8>> = layers.iter().map(|changes| model_tests::written(changes)).collect();
        let commits = runtime.block_on(place.convert(&place.workshop, &layers)).unwrap();
        assert_alike(&runtime.block_on(place.tree(&commits)), &unpacked(&layers, place.dir.path()));
    });
}
