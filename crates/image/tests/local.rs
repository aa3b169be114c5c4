//! Imports from layout folders and archives, down to the file system.

mod common;

use std::path::Path;
use std::sync::Mutex;

use aenv_image::{ImportErrorKind, Progress};
use aenv_model::Bytes;
use common::{Bench, Image, OWNER, Tar, gzip, sha256};
use tar::EntryType;
use tokio_util::sync::CancellationToken;

fn two_layers() -> Image {
    let mut lower = Tar::default();
    lower.dir("./").dir("bin/").file("bin/hello", b"old").file("etc/gone", b"x").dir("srv/").file("srv/a", b"a");
    let mut upper = Tar::default();
    upper.file("bin/hello", b"new").file("etc/.wh.gone", b"").file("srv/b", b"b").file("srv/.wh..wh..opq", b"");
    Image::of([lower.finish(), upper.finish()])
}

fn one_file(content: &[u8]) -> Image {
    Image::of([Tar::default().file("f", content).finish()])
}

/// An archive of `files`.
fn archive(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut tar = Tar::default();
    for (name, data) in files {
        tar.file(name, data);
    }
    tar.finish()
}

/// What `docker save` of old wrote: layer folders, and a link for a layer that two images share.
fn legacy_archive(images: &[(&Image, &[&str])]) -> Tar {
    let mut tar = Tar::default();
    let mut entries = Vec::new();
    let mut known: Vec<(Vec<u8>, String)> = Vec::new();
    for (number, (image, tags)) in images.iter().enumerate() {
        let file = image.file();
        let config = format!("{}.json", &sha256(&file)[7..]);
        tar.file(&config, &file);
        let mut layers = Vec::new();
        for (index, layer) in image.layers.iter().enumerate() {
            let name = format!("{number}-{index}/layer.tar");
            match known.iter().find(|(bytes, _)| bytes == layer) {
                Some((_, first)) => tar.symlink(&name, &format!("../{first}")),
                None => tar.file(&name, layer),
            };
            known.push((layer.clone(), name.clone()));
            layers.push(name);
        }
        entries.push(serde_json::json!({"Config": config, "RepoTags": tags, "Layers": layers}));
    }
    tar.file("manifest.json", &serde_json::to_vec(&entries).unwrap());
    tar
}

async fn failure(bench: &Bench, reference: &str) -> (ImportErrorKind, String) {
    let error = bench.import(reference).await.unwrap_err();
    bench.assert_nothing_left().await;
    assert!(!bench.target().exists() && !bench.is_leased());
    (error.kind(), error.report())
}

#[test]
#[ignore = "run by tests that import"]
fn the_daemon_of_a_test() {
    common::be_a_daemon();
}

#[tokio::test]
async fn a_layout_becomes_a_root_file_system() {
    let Some(bench) = Bench::start().await else { return };
    let layout = bench.dir.path().join("layout");
    two_layers().write_layout(&layout, "v1");
    let seen = Mutex::new(Vec::new());
    let tell = |step: Progress| seen.lock().unwrap().push(step);
    let imported =
        bench.import_with(&format!("oci:{}:v1", layout.display()), &tell, CancellationToken::new()).await.unwrap();
    assert_eq!(imported.config.env, ["PATH=/bin"]);
    assert_eq!(imported.config.user.as_deref(), Some("me"));
    assert_eq!(imported.digest, sha256(&two_layers().parts().1));
    let size = aenv_block_device::BlockDevice::size(&bench.stack());
    assert_eq!((imported.size, size), (Bytes::gib(1), Bytes::gib(1)));
    assert!(bench.is_leased());
    let ext4 = bench.ext4();
    ext4.assert_clean();
    assert_eq!(ext4.cat("/bin/hello"), b"new");
    assert!(!ext4.exists("/etc/gone"));
    assert!(!ext4.exists("/srv/a"));
    assert_eq!(ext4.cat("/srv/b"), b"b");
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.first(), Some(&Progress::Resolving));
    assert_eq!(seen[1], Progress::Building, "once for all images");
    assert!(seen.contains(&Progress::Committing { index: 1, total: 2 }), "{seen:?}");
    assert!(seen.iter().any(|step| matches!(step, Progress::Unpacking { index: 1, total: 2, .. })), "{seen:?}");
    bench.assert_nothing_left().await;
}

#[tokio::test]
async fn the_file_system_holds_everything_exactly() {
    let Some(bench) = Bench::start().await else { return };
    let capability = [1u8, 0, 0, 2, 0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut tar = Tar::default();
    let mut top = Tar::header(EntryType::Directory, "./", 0o750);
    top.set_uid(70_000);
    top.set_gid(9);
    top.set_mtime(1_300_000_000);
    tar.append(top, &[]);
    let mut ping = Tar::header(EntryType::Regular, "ping", 0o4755);
    ping.set_uid(100_000);
    ping.set_gid(200_000);
    ping.set_size(3);
    tar.pax(&[("SCHILY.xattr.security.capability", &capability), ("SCHILY.xattr.user.big", &[b'x'; 3000])]);
    tar.append(ping, b"abc").hard_link("pong", "ping");
    tar.pax(&[("SCHILY.xattr.trusted.on-link", b"yes")]).symlink("short", "ping").symlink("long", &"t".repeat(99));
    for (kind, path, major, minor) in [(EntryType::Char, "null", 1, 3), (EntryType::Block, "disk", 259, 70_000)] {
        let mut header = Tar::header(kind, path, 0o666);
        header.set_device_major(major).unwrap();
        header.set_device_minor(minor).unwrap();
        tar.append(header, &[]);
    }
    tar.append(Tar::header(EntryType::Fifo, "pipe", 0o622), &[]);
    tar.append(Tar::header(EntryType::Directory, "tmp/", 0o1777), &[]);
    let mut holes = Tar::header(EntryType::Regular, "holes", 0o644);
    holes.set_size(4096);
    tar.pax(&[("GNU.sparse.size", b"104857600"), ("GNU.sparse.map", b"52428800,4096")]).append(holes, &[9; 4096]);
    let layout = bench.dir.path().join("layout");
    Image::of([tar.finish()]).write_layout(&layout, "x");
    bench.import(&format!("oci:{}", layout.display())).await.unwrap();
    let size = bench.device().lowers[1].size.unwrap();
    assert!(size < 2 << 20, "{size}: holes take no space");
    let ext4 = bench.ext4();
    ext4.assert_clean();
    let stat = |path: &str, key: &str| ext4.stat(path, key);
    assert_eq!((stat("/", "Mode"), stat("/", "User"), stat("/", "Group")), ("0750".into(), "70000".into(), "9".into()));
    let time = |seconds: u32| format!("0x{seconds:08x}:00000000");
    assert_eq!(stat("/", "mtime"), time(1_300_000_000));
    assert_eq!(stat("/tmp", "mtime"), time(1_600_000_000));
    assert_eq!(stat("/ping", "mtime"), time(1_600_000_000));
    assert_eq!((stat("/ping", "Mode"), stat("/ping", "Links")), ("04755".into(), "2".into()));
    assert_eq!((stat("/ping", "User"), stat("/ping", "Group")), ("100000".into(), "200000".into()));
    assert_eq!(stat("/ping", "Inode"), stat("/pong", "Inode"));
    let attributes = ext4.ask("ea_list /ping");
    assert!(attributes.contains("security.capability (20) = 01 00 00 02 00 0a"), "{attributes}");
    assert!(attributes.contains("user.big (3000)"), "{attributes}");
    assert!(ext4.ask("ea_list /short").contains("trusted.on-link (3) = \"yes\""));
    assert_eq!(stat("/long", "Size"), "99");
    assert!(ext4.ask("stat /null").contains("01:03"));
    assert!(ext4.ask("stat /disk").contains("259:70000"));
    assert_eq!((stat("/pipe", "Type"), stat("/pipe", "Mode")), ("FIFO".into(), "0622".into()));
    assert_eq!(stat("/tmp", "Mode"), "01777");
    assert_eq!((stat("/holes", "Size"), stat("/holes", "Blockcount")), ("104857600".into(), "8".into()));
    let superblock = ext4.ask("stats -h");
    assert!(superblock.contains("aenv-root"), "{superblock}");
    assert!(!superblock.contains("orphan_file"), "{superblock}");
}

#[tokio::test]
async fn a_docker_archive_is_read_plain_or_compressed() {
    let Some(bench) = Bench::start().await else { return };
    let plain = legacy_archive(&[(&two_layers(), &["hello:v1"])]).finish();
    let file = bench.dir.path().join("saved.tar");
    for bytes in [plain.clone(), gzip(&plain), zstd::encode_all(plain.as_slice(), 1).unwrap()] {
        std::fs::write(&file, bytes).unwrap();
        let imported = bench.import(&format!("docker-archive:{}", file.display())).await.unwrap();
        assert_eq!(imported.digest, sha256(&two_layers().file()), "the configuration's, as docker's image id");
        assert_eq!(imported.config.working_dir.as_deref(), Some("/srv"));
        assert_eq!(bench.ext4().cat("/bin/hello"), b"new");
    }
    bench.assert_nothing_left().await;
}

#[tokio::test]
async fn of_an_archive_of_several_images_the_tag_chooses() {
    let Some(bench) = Bench::start().await else { return };
    let shared = two_layers();
    let mut second = Image::of([shared.layers[0].clone(), one_file(b"second").layers[0].clone()]);
    second.config = serde_json::json!({});
    let file = bench.dir.path().join("two.tar");
    std::fs::write(&file, legacy_archive(&[(&shared, &["a:1"]), (&second, &["quay.io/b:2", "b:3"])]).finish()).unwrap();
    for tag in ["b:3", "2", "quay.io/b:2"] {
        // A tag with slashes can't be told from a path in the text form.
        let reference = aenv_image::ImageReference::DockerArchive { path: file.clone(), tag: Some(tag.to_owned()) };
        let (importer, target) = (bench.importer(), bench.target());
        importer.import(&reference, None, &target, OWNER, &|_| {}, CancellationToken::new()).await.unwrap();
        assert_eq!(bench.ext4().cat("/f"), b"second");
        assert_eq!(bench.ext4().cat("/bin/hello"), b"old", "a layer that is a link to another image's");
        bench.forget();
    }
    for tag in ["", ":c", ":4"] {
        let (kind, text) = failure(&bench, &format!("docker-archive:{}{tag}", file.display())).await;
        assert_eq!(kind, ImportErrorKind::NotFound);
        assert!(text.contains("a:1, quay.io/b:2, b:3"), "{text}");
    }
}

#[tokio::test]
async fn an_archive_that_is_a_layout_is_read_as_one() {
    let Some(bench) = Bench::start().await else { return };
    let file = bench.dir.path().join("oci.tar");
    std::fs::write(&file, archive(&two_layers().layout("v1"))).unwrap();
    for tag in ["", ":v1"] {
        let imported = bench.import(&format!("docker-archive:{}{tag}", file.display())).await.unwrap();
        assert_eq!(imported.digest, sha256(&two_layers().parts().1));
        assert_eq!(bench.ext4().cat("/srv/b"), b"b");
    }
    // Docker since 25 writes both, the layers under the names of blobs.
    let mut both = two_layers().layout("v1");
    let (blobs, _) = two_layers().parts();
    let name = |blob: &[u8]| format!("blobs/{}", sha256(blob).replace(':', "/"));
    let entry = serde_json::json!([{"Config": name(&two_layers().file()), "RepoTags": ["hello:v1"],
        "Layers": blobs.iter().map(|blob| name(blob)).collect::<Vec<_>>()}]);
    both.push(("manifest.json".into(), serde_json::to_vec(&entry).unwrap()));
    std::fs::write(&file, archive(&both)).unwrap();
    bench.import(&format!("docker-archive:{}:hello:v1", file.display())).await.unwrap();
    assert_eq!(bench.ext4().cat("/srv/b"), b"b");
}

#[tokio::test]
async fn what_is_not_there_is_not_found() {
    let Some(bench) = Bench::start().await else { return };
    let layout = bench.dir.path().join("layout");
    two_layers().write_layout(&layout, "v1");
    let empty = bench.dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    for (reference, words) in [
        (format!("oci:{}:v2", layout.display()), "v1"),
        ("oci:/no/such/folder".to_owned(), "no OCI layout"),
        (format!("oci:{}", empty.display()), "no OCI layout"),
        ("docker-archive:/no/such/file".to_owned(), "no file"),
    ] {
        let (kind, text) = failure(&bench, &reference).await;
        assert_eq!(kind, ImportErrorKind::NotFound, "{text}");
        assert!(text.contains(words), "{text}");
    }
}

#[tokio::test]
async fn damage_is_told_from_absence() {
    let Some(bench) = Bench::start().await else { return };
    let layout = bench.dir.path().join("layout");
    let reference = format!("oci:{}", layout.display());
    let blob = |data: &[u8]| layout.join("blobs").join(sha256(data).replace(':', "/"));
    let (blobs, manifest) = two_layers().parts();
    let damages: [(&Path, Option<&[u8]>, &str); 4] = [
        (&blob(&blobs[1]), Some(&vec![0; blobs[1].len()]), "has the digest"),
        (&blob(&blobs[0]), None, "is missing"),
        (&blob(&manifest), Some(b"{}"), "bytes long"),
        (&layout.join("index.json"), Some(b"{"), "malformed"),
    ];
    for (path, content, words) in damages {
        two_layers().write_layout(&layout, "v1");
        match content {
            Some(content) => std::fs::write(path, content).unwrap(),
            None => std::fs::remove_file(path).unwrap(),
        }
        let (kind, text) = failure(&bench, &reference).await;
        assert_eq!(kind, ImportErrorKind::Invalid, "{text}");
        assert!(text.contains(words), "{text}");
    }
    let file = bench.dir.path().join("garbage.tar");
    for garbage in [vec![1; 5000], gzip(&[1; 5000]), gzip(b"")[..10].to_vec()] {
        std::fs::write(&file, garbage).unwrap();
        let (kind, text) = failure(&bench, &format!("docker-archive:{}", file.display())).await;
        assert_eq!(kind, ImportErrorKind::Invalid, "{text}");
    }
}

#[tokio::test]
async fn a_layer_that_is_not_the_configurations_is_refused() {
    let Some(bench) = Bench::start().await else { return };
    let mut swapped = two_layers();
    let file = bench.dir.path().join("swapped.tar");
    let config = swapped.file();
    swapped.layers.swap(0, 1);
    let mut tar = Tar::default();
    tar.file("c.json", &config).file("0.tar", &swapped.layers[0]).file("1.tar", &swapped.layers[1]);
    tar.file("manifest.json", br#"[{"Config":"c.json","RepoTags":null,"Layers":["0.tar","1.tar"]}]"#);
    std::fs::write(&file, tar.finish()).unwrap();
    let (kind, text) = failure(&bench, &format!("docker-archive:{}", file.display())).await;
    assert_eq!(kind, ImportErrorKind::Invalid);
    assert!(text.contains("unpack layer 1") && text.contains("digest"), "{text}");
}

#[tokio::test]
async fn another_architecture_is_refused_with_both_named() {
    let Some(bench) = Bench::start().await else { return };
    let mut image = one_file(b"");
    image.architecture = "riscv64".into();
    let file = bench.dir.path().join("saved.tar");
    std::fs::write(&file, legacy_archive(&[(&image, &[])]).finish()).unwrap();
    let (kind, text) = failure(&bench, &format!("docker-archive:{}", file.display())).await;
    assert_eq!(kind, ImportErrorKind::WrongArchitecture);
    assert!(text.contains("linux/riscv64") && text.contains(common::host_architecture()), "{text}");
}

#[tokio::test]
async fn a_failed_import_leaves_the_target_as_it_was() {
    let Some(bench) = Bench::start().await else { return };
    let layout = bench.dir.path().join("layout");
    Image::of([Tar::default().file("../escape", b"").finish()]).write_layout(&layout, "x");
    std::fs::write(bench.target(), "before").unwrap();
    let error = bench.import(&format!("oci:{}", layout.display())).await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::Invalid);
    assert!(error.report().contains("parent directory"), "{}", error.report());
    assert_eq!(std::fs::read(bench.target()).unwrap(), b"before");
    bench.assert_nothing_left().await;
}

#[tokio::test]
async fn an_image_larger_than_allowed_is_refused() {
    let Some(mut bench) = Bench::start().await else { return };
    bench.config.max_unpacked = Bytes::mib(1);
    let layout = bench.dir.path().join("layout");
    one_file(&vec![0; 2 << 20]).write_layout(&layout, "x");
    let (kind, text) = failure(&bench, &format!("oci:{}", layout.display())).await;
    assert_eq!(kind, ImportErrorKind::Invalid);
    assert!(text.contains("more than 1.0 MiB"), "{text}");
}

/// Runs the ignored test below as nobody.
#[test]
fn anyone_but_root_is_told_so_at_once() {
    use std::os::unix::process::CommandExt;
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root, to become nobody");
        return;
    }
    // A copy where nobody may read it; the build directory is root's on some machines.
    let dir =
        tempfile::Builder::new().permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755)).tempdir().unwrap();
    let program = dir.path().join("test");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let output = std::process::Command::new(&program)
        .args(["--exact", "as_nobody", "--ignored"])
        .uid(65534)
        .current_dir("/")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[tokio::test]
#[ignore = "run by anyone_but_root_is_told_so_at_once"]
async fn as_nobody() {
    if rustix::process::geteuid().is_root() {
        eprintln!("skipped: only of use to the test that runs it");
        return;
    }
    let error = Bench::new().import("oci:/not/looked/at").await.unwrap_err();
    assert_eq!(error.kind(), ImportErrorKind::NotPermitted);
    assert!(error.report().contains("needs root"), "{}", error.report());
}
